"""Models with frequencies for short and for long texts take the same ones throughout a request."""

from __future__ import annotations

import pytest
import tiny
import torch
from test_loop import SMALL, VOCAB, RandomTrees, generate, hf_greedy
from transformers import LlamaConfig, Phi3Config

from specbench.decoding.draft import Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.models.long_rope import depends_on_text
from specbench.models.target import Target

BORDER = 40
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 6.0, 16.0],
    "original_max_position_embeddings": BORDER,
}


@pytest.fixture(scope="module")
def phi() -> Target:
    config = Phi3Config(
        **{**SMALL, "pad_token_id": 0}, rope_parameters=ROPE, original_max_position_embeddings=BORDER
    )
    return tiny.build(config, seed=1)


def answer(target: Target, drafter: Drafter, prompt: list[int], new: int) -> list[int]:
    return generate(DraftVerify(target, drafter), Request([prompt], new))[0][0]


@pytest.mark.parametrize(("length", "new"), [(8, BORDER - 8), (BORDER + 1, 20)])
def test_on_either_side_of_the_border_it_is_transformers_own_choice(
    phi: Target, length: int, new: int
) -> None:
    prompt = tiny.prompts(1, VOCAB, seed=2, longest=60)[0] * 3
    prompt = prompt[:length]
    assert answer(phi, Drafter(phi), prompt, new) == hf_greedy(phi, prompt, new)


def test_across_the_border_a_method_still_gives_vanillas_tokens(phi: Target) -> None:
    (prompt,) = tiny.prompts(1, VOCAB, seed=3)
    addresses = [buffer.data_ptr() for buffer in phi.model.buffers()]
    vanilla = answer(phi, Drafter(phi), prompt, 60)
    assert answer(phi, RandomTrees(phi, {tuple(prompt): vanilla}), prompt, 60) == vanilla
    assert [buffer.data_ptr() for buffer in phi.model.buffers()] == addresses, "a graph reads them there"
    short = answer(phi, Drafter(phi), prompt, BORDER - len(prompt))
    assert short != vanilla[: len(short)], "the weights should tell the two apart"


def test_a_reference_leaves_the_frequencies_where_they_stood(phi: Target) -> None:
    """transformers up to 5.23 puts another buffer in their place whenever it chooses."""
    addresses = [buffer.data_ptr() for buffer in phi.model.buffers()]
    rotary = phi.model.model.rotary_emb
    with phi.stock_attention():
        rotary.register_buffer("inv_freq", rotary.inv_freq * 2, persistent=False)
    assert [buffer.data_ptr() for buffer in phi.model.buffers()] == addresses


def test_only_what_is_computed_from_positions_depends_on_the_text(phi: Target) -> None:
    dynamic = LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert depends_on_text(tiny.build(dynamic).model)
    assert not depends_on_text(phi.model)
    assert not depends_on_text(tiny.llama().model)
    assert not depends_on_text(torch.nn.Linear(1, 1))
