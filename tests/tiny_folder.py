"""A tiny Llama with a real tokenizer in a folder, and the command line run in this process.

`--target FOLDER` then works offline in a fraction of a second, through everything a user's run goes through.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DRAFTER = "from specbench.decoding.draft import Draft, Drafter\nimport torch\n"  # how a method file begins
CONTEXT = 256
PADDED_VOCAB = 128  # the model's, wider than the tokenizer's as real ones often are


def save_folder(path: Path, *, seed: int = 0, alphabet: str | None = None) -> Path:
    """Save the model; another `alphabet` order makes the tokenizer another one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(alphabet or string.printable.strip() + " \n")
    config = LlamaConfig(
        vocab_size=PADDED_VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _tokenizer(alphabet: str) -> Any:
    """One token a character, so that decoding and encoding again gives the same ids."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=SPECIAL[0]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_task(path: Path, rows: Sequence[Sequence[str] | Mapping[str, Any]]) -> Path:
    """A task file in Spec-Bench's format; a row is its turns, or a whole object."""
    objects = [
        dict(row)
        if isinstance(row, Mapping)
        else {"question_id": f"q{number}", "category": None, "turns": row}
        for number, row in enumerate(rows, 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in objects), encoding="utf-8")
    return path


@dataclass
class Result:
    """What a command did. `code` is what a shell would see."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        """The lines of the error message at the end of standard error."""
        lines = self.err.splitlines()
        start = next((i for i, line in enumerate(lines) if line.startswith("error: ")), len(lines))
        return lines[start:]


def specbench(*args: object) -> Result:
    """`specbench ARGS` in this process, through the entry point of the installed command."""
    from specbench.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = mock.patch.object(sys, "argv", ["specbench", *map(str, args)])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
    return Result(code, out.getvalue(), err.getvalue())


@dataclass
class Workplace:
    """A folder to run in: the target, a task file and where the results go."""

    path: Path
    target: Path
    task: Path
    defaults: list[object] = field(default_factory=list)

    @property
    def results(self) -> Path:
        return self.path / "results"

    def argv(self, *args: object, name: str = "r") -> list[object]:
        given = set(map(str, args))
        own: dict[str, object] = {"--target": self.target, "--task": self.task, "--max-new-tokens": 12}
        filled = [part for pair in own.items() if pair[0] not in given for part in pair]
        places = ["--output", self.results, "--reports", self.path / "reports", "--name", name]
        return ["run", *filled, *places, *self.defaults, *args]

    def run(self, *args: object, name: str = "r") -> Result:
        return specbench(*self.argv(*args, name=name))

    def plug_in(self, source: str, cls: str = "Mine", file: str = "mine.py") -> str:
        """Write a method file; returns its SPEC without options."""
        (self.path / file).write_text(source, encoding="utf-8")
        return f"{self.path / file}::{cls}"

    def trials_file(self, name: str = "r") -> Path:
        return self.results / name / "trials.jsonl"

    def rows(self, name: str = "r") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.trials_file(name).read_text(encoding="utf-8").splitlines()]

    def manifest(self, name: str = "r") -> dict[str, Any]:
        return json.loads((self.results / name / "manifest.json").read_text(encoding="utf-8"))


@contextlib.contextmanager
def quiet_machine() -> Iterator[None]:
    """The processor probe sees no competitor, whatever this machine does; garbage is not looked for long, and a
    run draws no figures."""
    from specbench import runner, session
    from specbench.measure.cpu import CpuProbe

    real = CpuProbe.stop
    calm = mock.patch.object(CpuProbe, "stop", lambda self, *a: replace(real(self, *a), contended=False))
    brief = mock.patch.object(session, "RUN_REPORTS", ("md",))
    gc.freeze()
    try:
        with calm, brief, mock.patch.object(runner, "settled_heap", contextlib.nullcontext):
            yield
    finally:
        gc.unfreeze()
