"""From a stream that has ended to a reply whose tokens are counted, or the reason why there is none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from specbench.engines.base import Engine
from specbench.engines.record import Reply
from specbench.engines.terms import Setup
from specbench.serving.client import Client, Exchange, StreamError, events

Request = tuple[str, dict[str, Any]]  # route and body


class NoAnswer(Exception):
    """A request that failed; says why in one line."""


def read_answer(engine: Engine, exchange: Exchange, setup: Setup) -> Reply:
    """The reply that a stream holds.

    Raises:
        NoAnswer: the stream failed, is broken, or bears no token.
    """
    if exchange.error is not None:
        raise NoAnswer(exchange.error)
    try:
        reply = engine.read(list(events(exchange.chunks)), setup)
    except StreamError as error:
        raise NoAnswer(str(error)) from error
    if not reply.arrivals:
        raise NoAnswer("the answer holds no token")
    if reply.finish is None and reply.completion_tokens is not None:
        raise NoAnswer("the stream ended before the answer did")
    return reply


async def asked_again(client: Client, request: Request, reply: Reply) -> int | None:
    """The tokens of a reply as the server counts them where it does not stream: the same request, untimed.

    None where the second answer is another one, or holds no usage.
    """
    route, body = request
    status, text = await client.post(route, {**body, "stream": False})
    try:
        answer = json.loads(text)
        same = status == 200 and answer["choices"][0]["text"] == reply.text
        return int(answer["usage"]["completion_tokens"]) if same else None
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def from_text(tokenizer: Any, reply: Reply) -> int:
    """Tokens of a reply's text, tokenised again: about as many as there were. An EOS is not among them."""
    return len(tokenizer(reply.text, add_special_tokens=False)["input_ids"])


def with_count(reply: Reply, tokens: int, most: int, *, exact: bool) -> Reply:
    """A reply with its tokens; where it does not say why it ended, it ended at the limit or with an EOS."""
    finish = reply.finish or ("length" if tokens >= most else "eos")
    return replace(
        reply, completion_tokens=min(tokens + (not exact and finish == "eos"), most), finish=finish
    )


def with_opening(tokenizer: Any, reply: Reply) -> Reply:
    """A counted reply with the tokens of its first event, where that does not tell them: those of its text.

    Every other event bears one at least; if there is none, the first bears all.
    """
    first, *rest = reply.arrivals
    if first.tokens is not None or reply.completion_tokens is None:
        return reply
    most = max(reply.completion_tokens - len(rest), 1)
    spelled = len(tokenizer(reply.opening, add_special_tokens=False)["input_ids"]) if rest else most
    return replace(reply, arrivals=[replace(first, tokens=min(max(spelled, 1), most)), *rest])
