"""The routers of a mixture of experts, and how many different experts their tokens were sent to in a pass.

What a pass over several tokens costs such a target is mostly how many experts it wakes: each one's weights are read
once, however many of the tokens chose it. Routers are those of transformers: modules that return, among others, the
chosen experts as integers `[tokens, k]` (Mixtral, Qwen3-MoE, DeepSeek, gpt-oss, OLMoE, GraniteMoE, GLM-4, Gemma 4).
"""

from __future__ import annotations

from typing import Any

import torch

PREFIX = "router:"  # of their taps' names: "router:3" is that of the third MoE layer, counted from 0


def routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """One a MoE layer, in the order of the layers; empty for a dense model."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("router")]


def choice(output: Any) -> torch.Tensor | None:
    """The integers among what a router returns: the experts `[tokens, k]` of each token."""
    parts = output if isinstance(output, tuple) else (output,)
    return next((part for part in parts if torch.is_tensor(part) and not part.is_floating_point()), None)


def split(taps: dict[str, torch.Tensor], experts: int) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """A pass's taps without the routers', and the mean over MoE layers of how many of the `experts` were chosen.

    That is a float on the device, which nobody has to wait for; None where there are no routers.
    """
    chosen = [tap for name, tap in taps.items() if name.startswith(PREFIX)]
    if not chosen:
        return taps, None
    rest = {name: tap for name, tap in taps.items() if not name.startswith(PREFIX)}
    # Over several devices each layer's choices lie on its own.
    return rest, unique(torch.stack([tap.to(chosen[0].device) for tap in chosen]), experts)


def unique(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Of choices `[layers, tokens, k]`, the mean over layers of how many different ones there are."""
    hit = torch.zeros(chosen.shape[0], experts, device=chosen.device)
    return hit.scatter_(1, chosen.flatten(1), 1.0).sum() / len(chosen)


def number_of_experts(config: Any) -> tuple[int, int]:
    """(routed experts a MoE layer, chosen by each token) of a transformers config; (0, 0) for a dense model."""
    return _first(config, EXPERTS), _first(config, ACTIVE)


EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
ACTIVE = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token")


def _first(config: Any, names: tuple[str, ...]) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((int(value) for value in values if value), 0)
