"""A checkpoint's weights into a drafter's network: every key, every shape, nothing left over."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import replace

import torch
from torch import nn

from specbench.errors import SpecbenchError
from specbench.models.checkpoint import FOR_TARGET, Checkpoint
from specbench.models.fits import check_vocabulary

# The fields of a draft's config that the shapes of a layer's weights follow from, by a part of their names.
LAYER_FIELDS = {
    "self_attn.": "num_attention_heads, num_key_value_heads and head_dim",
    "mlp.": "intermediate_size",
}


def fill(
    net: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    key_of: Callable[[str], str] = str,
    ignored: Iterable[str] = (),
    said_by: Mapping[str, str] | None = None,
) -> None:
    """Give `net` (which may lie on the meta device) the weights of `checkpoint`.

    Args:
        net: its `state_dict` says what is needed.
        device: where the weights go.
        dtype: of weights that are floating point; None: what each is in `net`.
        key_of: the checkpoint's key for a name of `net`.
        ignored: keys that may be there and are not needed.
        said_by: fields of the draft's config that shapes follow from, by a part of the weights' names: for hints.

    Raises:
        SpecbenchError: a key that is missing, misshapen, or one that `net` has no place for.
    """
    empty = net.state_dict()
    wanted = {name: key_of(name) for name in empty}

    def taken(name: str) -> torch.Tensor:
        field = next((field for part, field in (said_by or {}).items() if part in name), None)
        hint = FOR_TARGET if field is None else f"check {field} in its config.json; {FOR_TARGET}"
        tensor = checkpoint.take(wanted[name], *empty[name].shape, hint=hint)
        return move(tensor, device, dtype or empty[name].dtype)

    state = {name: taken(name) for name in empty}
    check_no_others(checkpoint, wanted.values(), ignored)
    net.load_state_dict(state, assign=True)
    net.requires_grad_(False).eval()


def check_no_others(checkpoint: Checkpoint, known: Collection[str], ignored: Iterable[str] = ()) -> None:
    """Raise SpecbenchError for a weight that nothing reads: left out in silence, it would only lower acceptance."""
    others = sorted(checkpoint.state.keys() - {*known, *ignored})
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        near = difflib.get_close_matches(others[0], known, n=3, cutoff=0.0)
        raise SpecbenchError(
            f"{checkpoint.ref} holds {others[0]}{more}, which this kind of drafter does not have: expected are "
            f"{len(known)} weights like {', '.join(near)}",
            "is it the drafter you mean, and not a newer variant of it?",
        )


def own_weight(checkpoint: Checkpoint, key: str, shared: nn.Module) -> nn.Parameter | None:
    """The weight `key` if the checkpoint holds one other than the target's own (`shared.weight`), else None.

    Drafters often carry copies of the target's embeddings and head; those need no second place in memory. One that
    is padded otherwise is cut to the target's rows, or gets its last ones.
    """
    theirs: torch.Tensor = shared.weight  # type: ignore[assignment]
    if key not in checkpoint.state:
        return None
    rows, *width = theirs.shape
    found = checkpoint.take(key, None, *width)
    check_vocabulary(checkpoint.ref, key, len(found), rows)
    weight = move(found[:rows], theirs.device, theirs.dtype)
    if not weight.is_meta and torch.equal(weight, theirs[: len(weight)]):
        return None
    return nn.Parameter(torch.cat([weight, theirs[len(weight) :]]), requires_grad=False)


def fit_rows(checkpoint: Checkpoint, keys: Set[str], rows: int) -> Checkpoint:
    """The checkpoint with those of the weights `keys` that are padded otherwise cut to `rows` rows, or zeros added.

    Raises:
        SpecbenchError: one is for another vocabulary.
    """
    state = dict(checkpoint.state)
    for key in keys & state.keys():
        tensor = checkpoint.take(key, None, None)
        check_vocabulary(checkpoint.ref, key, len(tensor), rows)
        more = tensor.new_zeros(max(rows - len(tensor), 0), *tensor.shape[1:])
        state[key] = torch.cat([tensor[:rows], more])
    return replace(checkpoint, state=state)


def move(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` on `device`, in `dtype` if it is floating point."""
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
