"""A checkpoint's weights into a drafter's network: every key, every shape, nothing left over."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from specbench.errors import SpecbenchError
from specbench.models.checkpoint import Checkpoint


def fill(
    net: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    key_of: Callable[[str], str] = str,
    ignored: Iterable[str] = (),
) -> None:
    """Give `net` (which may lie on the meta device) the weights of `checkpoint`.

    Args:
        net: its `state_dict` says what is needed.
        device: where the weights go.
        dtype: of weights that are floating point; None: what each is in `net`.
        key_of: the checkpoint's key for a name of `net`.
        ignored: keys that may be there and are not needed.

    Raises:
        SpecbenchError: a key that is missing, misshapen, or one that `net` has no place for.
    """
    wanted = {name: key_of(name) for name in net.state_dict()}
    state = {
        name: move(checkpoint.take(wanted[name], *empty.shape), device, dtype or empty.dtype)
        for name, empty in net.state_dict().items()
    }
    check_no_others(checkpoint, [*wanted.values(), *ignored])
    net.load_state_dict(state, assign=True)
    net.requires_grad_(False).eval()


def check_no_others(checkpoint: Checkpoint, known: Iterable[str]) -> None:
    """Raise SpecbenchError for a weight that nothing reads: left out in silence, it would only lower acceptance."""
    others = sorted(checkpoint.state.keys() - set(known))
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        raise SpecbenchError(
            f"{checkpoint.ref} holds {others[0]}{more}, which this kind of drafter does not have",
            "is it the drafter you mean, and not a newer variant of it?",
        )


def own_weight(checkpoint: Checkpoint, key: str, shared: nn.Module) -> nn.Parameter | None:
    """The weight `key` if the checkpoint holds one other than the target's own (`shared.weight`), else None.

    Drafters often carry copies of the target's embeddings and head; those need no second place in memory.
    """
    theirs: torch.Tensor = shared.weight  # type: ignore[assignment]
    if key not in checkpoint.state:
        return None
    weight = move(checkpoint.take(key, *theirs.shape), theirs.device, theirs.dtype)
    return None if torch.equal(weight, theirs) else nn.Parameter(weight, requires_grad=False)


def move(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` on `device`, in `dtype` if it is floating point."""
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
