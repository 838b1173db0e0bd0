"""From a question to prompt ids: chat templates, history, stop ids, and random ids where there is no text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from specbench.errors import SpecbenchError
from specbench.questions import Question

CHARS_PER_ID = 4  # an English text's characters a token, about
FIRST_ORDINARY_ID = 3  # below it vocabularies keep <unk>, <s>, </s>

# Parameters of `apply_chat_template` that are ours to set, and names the template gets its messages by.
RESERVED_ARGS = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"}
    | {"return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}
)


def render(
    question: Question,
    turn: int,
    answers: Sequence[str],
    tokenizer: Any,
    template_args: Mapping[str, Any] | None = None,
    *,
    vocab_size: int | None = None,
    seed: int = 0,
    avoid: Iterable[int] = (),
) -> list[int]:
    """The prompt ids of a question's turn (counted from 0), continued from `answers` to the turns before it.

    The chat template renders straight to ids: text tokenised again would double the BOS. A tokenizer without
    a template takes turns and answers plainly, joined by blank lines, with its own special tokens. Without a
    tokenizer (`random:` targets) `random_ids` draws them: `vocab_size` must then be given, and `avoid` holds
    the stop ids.

    A blank turn gives no ids, template or not: there is nothing to ask (see `check_prompt`).
    """
    if not question.turns[turn].strip():
        return []
    messages = chat(question.turns[: turn + 1], answers[:turn])
    if tokenizer is not None and _template(tokenizer):
        return _apply_template(tokenizer, messages, template_args or {})
    text = "\n\n".join(message["content"] for message in messages)
    if tokenizer is not None:
        return _flat_ids(tokenizer(text))
    assert vocab_size is not None, "without a tokenizer the vocabulary's size is needed"
    return random_ids(text, -(-len(text) // CHARS_PER_ID), vocab_size, seed, avoid=avoid)


def template_note(tokenizer: Any, template_args: Mapping[str, Any] | None = None) -> str | None:
    """What the user should know once about how prompts are made, or None when there is nothing to say."""
    given = list(template_args or {})
    unused = f"; --template-arg {', '.join(given)} has no effect" if given else ""
    if tokenizer is None:
        return f"the target has no tokenizer: prompts are random ids, one a {CHARS_PER_ID} characters{unused}"
    template = _template(tokenizer)
    if not template:
        return f"the target has no chat template: it takes the text plainly{unused}"
    unread = [name for name in given if not re.search(rf"\b{name}\b", str(template))]
    return f"the chat template does not read {', '.join(unread)} (--template-arg)" if unread else None


def parse_template_args(args: Iterable[str]) -> dict[str, Any]:
    """`--template-arg K=V` values: true and false, whole and decimal numbers, else text."""
    parsed: dict[str, Any] = {}
    for arg in args:
        name, equals, value = arg.partition("=")
        if not equals or not name.isidentifier():
            raise SpecbenchError(f"--template-arg {arg!r} is not K=V", "write e.g. enable_thinking=false")
        if name in RESERVED_ARGS:
            raise SpecbenchError(f"--template-arg cannot set {name!r}", "give a variable of the template")
        if name in parsed:
            raise SpecbenchError(f"--template-arg {name} is given twice", "give each name once")
        parsed[name] = _value(value)
    return parsed


def random_ids(
    text: str, length: int, vocab_size: int, seed: int = 0, *, avoid: Iterable[int] = ()
) -> list[int]:
    """`length` ids that depend on the text and the seed only, none special (below 3) and none in `avoid`."""
    shunned = frozenset(avoid)
    pool = [i for i in range(min(FIRST_ORDINARY_ID, vocab_size - 1), vocab_size) if i not in shunned]
    if not pool:
        raise SpecbenchError(f"a vocabulary of {vocab_size} leaves no id for a prompt", "take a larger one")
    generator = Random(f"{seed}\n{text}")  # seeding with text and random() are the same on every Python
    return [pool[int(generator.random() * len(pool))] for _ in range(length)]


def check_prompt(ids: Sequence[int], max_new_tokens: int, context: int | None) -> str | None:
    """Why a prompt cannot be run, as one line for the trial's `error`, or None. No `context`: no bound."""
    if not ids:
        return "empty prompt"
    if context is not None and len(ids) + max_new_tokens > context:
        return f"prompt too long: {len(ids)} tokens + {max_new_tokens} new exceed the context of {context}"
    return None


def stop_ids(model_or_generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: the generation config's EOS (a number or a list) and the tokenizer's own.

    Args:
        model_or_generation_config: a model, a generation config, or None.
        tokenizer: a tokenizer or None.
    """
    config = getattr(model_or_generation_config, "generation_config", None) or model_or_generation_config
    found: set[int] = set()
    for holder in (config, tokenizer):
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            found.update(int(i) for i in (eos if isinstance(eos, Iterable) else [eos]))
    return frozenset(found)


def chat(turns: Sequence[str], answers: Sequence[str]) -> list[dict[str, str]]:
    """The messages of a conversation: each turn, and the answer to all but the last."""
    assert len(answers) == len(turns) - 1, f"{len(answers)} answers before turn {len(turns)}"
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return messages


def _template(tokenizer: Any) -> Any:
    return getattr(tokenizer, "chat_template", None)


def _apply_template(
    tokenizer: Any, messages: list[dict[str, str]], template_args: Mapping[str, Any]
) -> list[int]:
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, **template_args
        )
    except Exception as error:  # a template is a program: it may raise anything, `raise_exception` included
        raise SpecbenchError(
            f"the chat template refuses the conversation: {' '.join(str(error).split())}",
            "check --template-arg, or the target's chat template",
        ) from error
    return _flat_ids(encoded)


def _flat_ids(encoded: Any) -> list[int]:
    """Ids of one text out of what tokenizers return: a mapping, a list, a list of one list."""
    ids = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
    if len(ids) and isinstance(ids[0], list):
        (ids,) = ids
    return [int(i) for i in ids]


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]+)?", text):
        return float(text)
    return text
