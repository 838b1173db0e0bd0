"""Which attention captured passes use: measured once a shape, before a capture, and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from fake_cuda import FakeCuda
from test_attention import inputs
from test_loop import SMALL
from tiny_folder import Workplace
from transformers import LlamaConfig

from specbench.decoding.draft import Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.measure.clock import NullClock
from specbench.models import attention, attention_choice, attention_speed, fixed_pass
from specbench.models.attention_choice import AttentionChoices
from specbench.models.attention_speed import OVERWRITES, REPEATS, device_seconds
from specbench.models.passes import Passes
from specbench.models.target import Target


class OnCpu(AttentionChoices):
    """Choices for passes that a CPU computes, as if it captured them while `capturing` says so."""

    def __init__(self, folder: Path, capturing: Callable[[], bool] = lambda: False) -> None:
        super().__init__(folder)
        self.capturing = capturing

    def _captures(self, query: torch.Tensor) -> bool:
        return self._choosing or self.capturing()


class Times:
    """Seconds that implementations take, by their order among those able; and how often that was measured."""

    def __init__(self) -> None:
        self.seconds: list[float] = [3.0, 1.0, 2.0]
        self.measured: list[int] = []

    def __call__(self, runs: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
        self.measured.append(len(runs))
        return self.seconds[: len(runs)]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    made = Times()
    monkeypatch.setattr(attention_speed, "device_seconds", made)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    return made


def same(*given: Any) -> torch.Tensor:
    return attention.fused(*given)


def nearly(*given: Any) -> torch.Tensor:
    return attention.fused(*given) * 1.01


def unmasked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *rest: Any
) -> torch.Tensor:
    return attention.fused(query, key, value, torch.zeros_like(mask), *rest)


def not_a_number(*given: Any) -> torch.Tensor:
    return attention.fused(*given) * float("nan")


def refusing(*_given: Any) -> torch.Tensor:
    raise NotImplementedError("no kernel for this")


def out_of_memory(*_given: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError


THREE = {"first": attention.fused, "second": same, "third": nearly}


def given(rows: int = 2, length: int = 4, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """One head a group: the queries are as `pick` takes them."""
    return inputs(rows, 1, length, dtype=dtype)


# -- the choice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ([3.0, 1.0, 2.0], "second"),
        ([3.0, 2.0, 1.0], "third"),
        ([1.0, 1.0, 1.0], "first"),
        ([1.0, 0.98, 0.99], "first"),  # not clearly
        ([1.0, 2.0, 3.0], "first"),
    ],
)
def test_the_first_stays_unless_another_is_clearly_faster(
    times: Times, tmp_path: Path, seconds: list[float], best: str
) -> None:
    times.seconds = seconds
    with (made := OnCpu(tmp_path)).choosing():
        assert made.pick(THREE, *given()) == best


@pytest.mark.parametrize("faulty", [refusing, unmasked, not_a_number])
def test_what_fails_or_says_something_else_is_dropped(times: Times, tmp_path: Path, faulty: Any) -> None:
    with (made := OnCpu(tmp_path)).choosing():
        assert made.pick({"first": attention.fused, "second": faulty}, *given()) == "first"
        assert (
            made.pick({"first": attention.fused, "second": faulty, "third": same}, *given(rows=1)) == "third"
        )
    assert times.measured == [1, 2]


def test_zeros_hide_nothing(times: Times, tmp_path: Path) -> None:
    """While passes are made ahead, queries, cache and masks hold zeros: what is wrong must be seen all the same."""
    with (made := OnCpu(tmp_path)).choosing():
        zeros = tuple(torch.zeros_like(each) for each in given())
        assert made.pick({"first": attention.fused, "second": unmasked}, *zeros) == "first"


def test_measuring_changes_nothing(times: Times, tmp_path: Path) -> None:
    """Neither the inputs nor the random numbers that come next; strides are the inputs' own."""
    seen: list[Any] = []

    def spy(*each: Any) -> torch.Tensor:
        seen.append([t.stride() for t in each[:3]])
        return attention.fused(*each)

    ours, untouched, state = given(), given(), torch.get_rng_state()
    with (made := OnCpu(tmp_path)).choosing():
        made.pick({"first": spy}, *ours)
    assert all(torch.equal(a, b) for a, b in zip(ours, untouched, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert seen == [[t.stride() for t in ours[:3]]]


def test_a_shape_is_measured_once(times: Times, tmp_path: Path) -> None:
    with (made := OnCpu(tmp_path)).choosing():
        for _ in range(2):
            made.pick(THREE, *given())
        assert len(times.measured) == 1
        for other in (given(rows=3), given(length=5), given(dtype=torch.float16)):
            made.pick(THREE, *other)
        query, key, value, mask = given()
        made.pick(THREE, query, key[:, :, :64], value[:, :, :64], mask[..., :64])
    assert len(times.measured) == 5


def test_it_holds_for_the_process_even_if_it_cannot_be_kept(times: Times, tmp_path: Path) -> None:
    (no_folder := tmp_path / "file").touch()
    with (made := OnCpu(no_folder)).choosing():
        assert [made.pick(THREE, *given()) for _ in range(2)] == ["second"] * 2
    assert len(times.measured) == 1


# -- when it is made, and when it holds -----------------------------------------------------------------------


def test_only_captured_passes_use_it_and_only_before_a_capture_it_is_made(
    times: Times, tmp_path: Path
) -> None:
    capturing = False
    made = OnCpu(tmp_path, lambda: capturing)
    assert made.pick(THREE, *given()) == "first"
    capturing = True
    assert made.pick(THREE, *given()) == "first", "nothing is measured during a capture"
    assert times.measured == []
    capturing = False
    with made.choosing():
        assert made.pick(THREE, *given()) == "second"
    assert made.pick(THREE, *given()) == "first", "an eager pass"
    capturing = True
    assert made.pick(THREE, *given()) == "second"
    assert times.measured == [3]


def test_other_dtypes_stay_as_they_are(times: Times, tmp_path: Path) -> None:
    """Outputs are compared in float32; and a mask of bools is not one to be added."""
    with (made := OnCpu(tmp_path)).choosing():
        assert made.pick(THREE, *given(dtype=torch.float32)) == "first"
        query, key, value, mask = given()
        assert made.pick(THREE, query, key, value, mask == 0) == "first"
    assert times.measured == []
    assert made.facts() == {}


def test_compiled_passes_are_the_compilers(
    times: Times, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = OnCpu(tmp_path)
    monkeypatch.setattr(attention, "choices", made)
    fused = torch.compile(attention.grouped, backend="eager", fullgraph=True, dynamic=True)
    with made.choosing():
        torch.testing.assert_close(fused(*given()), attention.fused(*given()))
        assert times.measured == []
        attention.grouped(*given())
        assert times.measured != []


def test_a_cpu_captures_nothing(times: Times, tmp_path: Path) -> None:
    with (made := AttentionChoices(tmp_path)).choosing():
        assert made.pick(THREE, *given()) == "first"
    assert times.measured == []


@pytest.mark.parametrize("capturing", [False, True])
def test_a_gpu_captures_while_its_stream_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    query: Any = SimpleNamespace(is_cuda=True)
    made = AttentionChoices(tmp_path)
    assert made._captures(query) == capturing
    with made.choosing():
        assert made._captures(query)
    assert made._captures(query) == capturing


def test_without_memory_to_measure_in_it_is_tried_another_time(times: Times, tmp_path: Path) -> None:
    with (made := OnCpu(tmp_path)).choosing():
        assert made.pick({"first": attention.fused, "second": out_of_memory}, *given()) == "first"
        assert made.pick({"first": attention.fused, "second": same}, *given()) == "second"


# -- what stays of it -----------------------------------------------------------------------------------------


def test_choices_are_kept_for_the_next_process(
    times: Times, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def picked(implementations: dict[str, Any] = THREE) -> str:
        with (made := OnCpu(tmp_path)).choosing():
            return made.pick(implementations, *given())

    assert picked() == "second"
    times.seconds = [1.0, 2.0, 3.0]
    assert picked() == "second"
    assert len(times.measured) == 1
    assert picked({"first": attention.fused}) == "first", "what is no longer known is measured again"
    assert len(times.measured) == 2
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    assert picked() == "first"
    assert len(times.measured) == 3


@pytest.mark.parametrize("garbage", ["", "[]", '{"2x2x4x16 bfloat16": "second"}'])
def test_what_cannot_be_read_is_measured_again(times: Times, tmp_path: Path, garbage: str) -> None:
    with (made := OnCpu(tmp_path)).choosing():
        made.pick(THREE, *given())
    (file,) = tmp_path.rglob("*.json")
    assert json.loads(file.read_text()) == {"2x2x4x16 bfloat16": {"128": "second"}}
    file.write_text(garbage)
    with (made := OnCpu(tmp_path)).choosing():
        assert made.pick(THREE, *given()) == "second"
    assert len(times.measured) == 2


def test_the_manifest_says_what_was_used(times: Times, tmp_path: Path) -> None:
    with (earlier := OnCpu(tmp_path)).choosing():
        earlier.pick(THREE, *given(rows=1))
    with (made := OnCpu(tmp_path)).choosing():
        query, key, value, mask = given()
        for slots, seconds in [
            (64, [1.0, 2.0, 3.0]),
            (8, [1.0, 2.0, 3.0]),
            (96, [2.0, 1.0, 3.0]),
            (128, [1.0] * 3),
        ]:
            times.seconds = seconds
            made.pick(THREE, query, key[:, :, :slots], value[:, :, :slots], mask[..., :slots])
        made.pick(THREE, query, key, value[..., :8], mask)
    assert made.facts() == {
        "2x2x4x16 bfloat16": {"first": [8, 64, 128], "second": [96]},
        "2x2x4x16+8 bfloat16": {"first": [128]},
    }


def test_a_run_says_it_and_goes_on_although_it_has_grown(
    make_place: Callable[[str], Workplace], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place("attention")
    kind = "1x2x4x16 bfloat16"
    for used, said in [
        ({}, {}),
        ({kind: {"64": "cudnn"}}, {kind: {"cudnn": [64]}}),
        ({kind: {"128": "cudnn"}}, {kind: {"cudnn": [64, 128]}}),
        ({}, {kind: {"cudnn": [64, 128]}}),  # a start that had nothing left to do
    ]:
        monkeypatch.setattr(attention_choice.choices, "_used", used)
        assert place.run("--method", "prompt-lookup").code == 0
        assert place.manifest()["attention"] == said
    assert len(place.manifest()["resumed"]) == 3


# -- in a pass ------------------------------------------------------------------------------------------------


def test_a_captured_pass_measures_while_it_is_warmed_up(
    times: Times, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of one shape: one measurement; the capture takes the choice, and a pass as it is does not."""
    cuda = FakeCuda().install(monkeypatch)
    made = OnCpu(tmp_path, lambda: cuda.happened.count("capture") > cuda.happened.count("captured"))
    monkeypatch.setattr(attention, "choices", made)
    monkeypatch.setattr(fixed_pass, "choices", made)
    calls: list[str] = []

    def counted(name: str, *each: Any) -> torch.Tensor:
        calls.append(name)
        return attention.fused(*each)

    monkeypatch.setattr(
        attention, "IMPLEMENTATIONS", {name: partial(counted, name) for name in ("first", "second")}
    )
    target = Target(tiny.build(LlamaConfig(**SMALL)).model.bfloat16())
    target.passes = Passes("target")
    layers = target.config.num_hidden_layers
    request = Request([list(range(1, 9))], 4)
    rounds = list(DraftVerify(target, Drafter(target)).generate(request, NullClock()))
    assert sum(len(each.tokens[0]) for each in rounds) == 4
    assert target.passes.off is None
    assert calls == ["first"] * layers + ["first", "second"] + ["second"] * (2 * layers + layers)
    assert times.measured == [2]
    heads, groups = target.config.num_key_value_heads, 4 // target.config.num_key_value_heads
    assert made.facts() == {f"1x{heads}x{groups}x{target.config.head_dim} bfloat16": {"second": [64]}}


# -- time -----------------------------------------------------------------------------------------------------


class Device:
    """A device whose work takes the time it is told, behind a host that is slower or faster."""

    def __init__(self) -> None:
        self.clock, self.log = 0.0, list[str]()

    def now(self) -> float:
        self.log.append("stamp")
        return self.clock

    def synchronize(self) -> None:
        self.log.append("wait")

    def seconds(self, begin: float, end: float) -> float:
        assert self.log[-1] == "wait", "read before the device got there"
        return end - begin

    def release(self) -> None:
        """Nothing is held."""

    def run(self, name: str, seconds: list[float]) -> torch.Tensor:
        self.log.append(name)
        self.clock += seconds.pop() if len(seconds) > 1 else seconds[0]
        return torch.ones(1)


def test_times_are_medians_taken_in_turn_behind_an_overwritten_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    zero = torch.Tensor.zero_

    def overwriting(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.nbytes == 2 * 1000
        device.log.append("overwrite")
        return zero(tensor)

    monkeypatch.setattr(torch.Tensor, "zero_", overwriting)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1000)
    )
    runs = [partial(device.run, "a", [2.0, 9.0, 2.0]), partial(device.run, "b", [1.0])]
    assert device_seconds(runs, torch.device("cpu"), device) == [2.0, 1.0]
    clear = ["overwrite"] * OVERWRITES
    once = [*clear, "stamp", "a", "stamp", *clear, "stamp", "b", "stamp"]
    assert device.log == [*(once * REPEATS), "wait"]
