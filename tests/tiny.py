"""Tiny seeded models for tests: random weights whose greedy decisions are clear-cut enough to compare."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from specbench.models.target import Target


def llama(vocab: int = 64, seed: int = 0, layers: int = 2, hidden: int = 32, **kwargs: Any) -> Target:
    """A Llama with grouped-query heads. Larger `std` makes peakier distributions."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=kwargs.pop("std", 0.2),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **kwargs,
    )
    return build(config, seed)


def of_few_tokens(config: PreTrainedConfig, vocab: int = 6) -> PreTrainedConfig:
    """The same architecture over a vocabulary so small that random drafts are often right."""
    made = copy.deepcopy(config)
    made.vocab_size = vocab
    return made


def build(config: PreTrainedConfig, seed: int = 0, attn: str = "sdpa") -> Target:
    """A target of `config` with seeded random float32 weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn).float().eval()
    return Target(model)


def prompts(rows: int, vocab: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    """Ragged random prompts in which some n-grams repeat, so that look-up methods find something."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for row in range(rows):
        length = int(torch.randint(6, longest, (1,), generator=generator)) + row
        ids = torch.randint(0, vocab, (length,), generator=generator).tolist()
        out.append(ids + ids[: length // 2])
    return out
