"""Grouped attention over slices of a slot cache: what the formula says, and no copy of keys or values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.models import attention
from specbench.models.attention import fused, grouped, grouped_sdpa, two_products

KEY_HEADS, SLOTS, READ, WIDTH = 2, 160, 128, 16
ROWS, GROUPS, LENGTHS = (1, 3), (1, 3, 4), (1, 8, 32)
IMPLEMENTATIONS = {"fused": fused, "two products": two_products}  # that a CPU has

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    rows: int, groups: int, length: int, *, window: int = READ, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Queries as a projection leaves them, keys and values as a slot cache hands them out, and a mask of `window`."""
    generator = torch.Generator().manual_seed(rows * 100 + groups * 10 + length)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query = drawn(rows, length, KEY_HEADS * groups, WIDTH).transpose(1, 2)
    key, value = (drawn(rows + 1, KEY_HEADS, SLOTS, WIDTH)[:rows, :, :READ] for _ in range(2))
    slot, last = torch.arange(READ), torch.arange(length) + READ - length - torch.arange(rows)[:, None] * 20
    last = last[..., None].clamp(min=1)
    seen = (slot >= 1) & (slot <= last) & (slot > last - window)
    return query, key, value, torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """softmax(q·k/√d) v over the slots that are shown, head by head, in float64."""
    rows, heads, _, width = query.shape
    out = torch.empty(query.shape, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            kept = head // (heads // key.shape[1])
            scores = query[row, head].double() @ key[row, kept].double().T / width**0.5
            scores[mask[row, 0] < 0] = -torch.inf
            out[row, head] = scores.softmax(-1) @ value[row, kept].double()
    return out


@pytest.fixture(params=IMPLEMENTATIONS)
def only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one implementation that there is."""
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", {request.param: IMPLEMENTATIONS[request.param]})
    return request.param


@pytest.fixture
def float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no product of halves that comes out in float32: what a GPU does there."""
    product = torch.bmm

    def bmm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if out_dtype is None:
            return product(a, b)
        assert out_dtype == torch.float32
        return product(a.float(), b.float())

    monkeypatch.setattr(torch, "bmm", bmm)


@pytest.mark.parametrize("window", [READ, 9])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("rows", ROWS)
def test_implementations_compute_attention(
    only: str, rows: int, groups: int, length: int, window: int
) -> None:
    given = inputs(rows, groups, length, window=window)
    out = grouped(*given)
    torch.testing.assert_close(out.double(), formula(*given), atol=2e-6, rtol=1e-5)
    query, key, value, mask = given
    repeated = [each.repeat_interleave(groups, dim=1) for each in (key, value)]
    plain = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask)
    torch.testing.assert_close(out, plain, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.usefixtures("float32_products")
def test_implementations_in_half_precision(only: str, dtype: torch.dtype, rounding: float) -> None:
    given = inputs(3, 4, 8, dtype=dtype)
    out = grouped(*given)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), formula(*given), atol=rounding, rtol=rounding)


@pytest.mark.usefixtures("float32_products")
def test_scores_too_large_for_a_half_stay_numbers(only: str) -> None:
    query, key, value, mask = inputs(1, 4, 8, dtype=torch.float16)
    assert grouped(query * 300, key * 300, value, mask).isfinite().all()


def test_a_scale_of_its_own(only: str) -> None:
    query, key, value, mask = inputs(3, 3, 8)
    scaled = grouped(query, key, value, mask, 1.0)
    torch.testing.assert_close(
        scaled.double(), formula(query * WIDTH**0.5, key, value, mask), atol=5e-6, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("float32_products")
def test_a_row_that_sees_nothing_is_no_nan(only: str, dtype: torch.dtype) -> None:
    query, key, value, mask = inputs(1, 4, 8, dtype=dtype)
    mask[:, :, 3] = torch.finfo(dtype).min
    assert grouped(query, key, value, mask).isfinite().all()


def test_cudnn_is_the_only_kernel_where_it_is_asked_for_and_off_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, cuda = attention.scaled_dot_product_attention, torch.backends.cuda
    on: list[tuple[bool, ...]] = []

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        on.append((cuda.cudnn_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return plain(*args, **kwargs)

    attention.register()
    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    given = inputs(3, 1, 8)
    for implementation in (attention.cudnn, fused):
        torch.testing.assert_close(implementation(*given).double(), formula(*given), atol=2e-6, rtol=1e-5)
    assert on == [(True, False, False), (False, True, True)]


# -- nothing is copied ----------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The largest tensor, in numbers, that any operation made that is no view; and where the products read."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tensors((args, kwargs))}
        made = [each for each in tensors(out) if each.untyped_storage().data_ptr() not in given]
        self.largest = max([self.largest, *(each.numel() for each in made)])
        if func.overloadpacket.__name__ == "bmm" or "attention" in func.overloadpacket.__name__:
            self.read |= {each.data_ptr() for each in tensors(args)}
            assert all(1 in each.stride()[-2:] for each in tensors(args[:2])), "BLAS would copy it"
        return out


def tensors(nested: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def watched(run: Callable[[], Any]) -> Allocations:
    with torch.inference_mode(), Allocations() as seen:
        run()
    return seen


@pytest.mark.parametrize("rows", ROWS)
def test_no_keys_or_values_are_copied(only: str, rows: int) -> None:
    query, key, value, mask = inputs(rows, 4, 3)
    seen = watched(lambda: grouped(query, key, value, mask))
    assert seen.largest < key.numel()
    assert seen.read >= {key.data_ptr(), value.data_ptr()}


def test_what_only_a_copy_could_serve_is_refused() -> None:
    query, key, value, mask = inputs(3, 1, 8)
    other = key.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(RuntimeError, match="view"):
        two_products(query, other, value, mask)


class Module(torch.nn.Module):
    num_key_value_groups = 4


@pytest.mark.parametrize("length", [2, 60, 2 * KEY_HEADS * WIDTH])
def test_heads_are_grouped_as_long_as_the_mask_is_the_smaller_copy(length: int) -> None:
    """A tree of 60 nodes and four heads a group: 240 queries."""
    given = inputs(1, 4, length)
    seen = watched(lambda: grouped_sdpa(Module(), *given))
    out, _ = grouped_sdpa(Module(), *given)
    torch.testing.assert_close(out.transpose(1, 2).double(), formula(*given), atol=2e-6, rtol=1e-5)
    assert {given[1].data_ptr(), given[2].data_ptr()} <= seen.read


def test_beyond_that_transformers_repeats_keys_and_values() -> None:
    given = inputs(1, 4, 2 * KEY_HEADS * WIDTH + 1)
    seen = watched(lambda: grouped_sdpa(Module(), *given))
    assert not {given[1].data_ptr(), given[2].data_ptr()} & seen.read
