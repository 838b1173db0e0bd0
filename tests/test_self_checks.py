"""What `doctor` runs on a GPU, run on made-up clocks and, without a capture, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

from specbench.graph_check import DRAFTERS, check_graphs
from specbench.measure.clock import EventStamps
from specbench.measure.clock_check import LENGTHS_S, TOLERANCE, compare_clocks
from specbench.models.fixed_pass import FixedPass, Tensors
from specbench.models.passes import Passes
from specbench.models.quantize import QuantizedLinear
from specbench.quantise_check import check_scheme


class Device:
    """A GPU and a host with a clock each. Starting costs the host `launch` s; the device takes `work` s a piece."""

    def __init__(self, work: float, launch: float = 5e-6, drift: float = 1.0) -> None:
        self.work, self.launch, self.drift = work, launch, drift
        self.host_s = self.busy_until = 0.0
        self.stamps = EventStamps(lambda: Event(self), lambda event: event.record(), self.wait)

    def start(self) -> None:
        self.host_s += self.launch
        self.busy_until = max(self.busy_until, self.host_s) + self.work

    def wait(self) -> None:
        self.host_s = max(self.host_s, self.busy_until) + 2e-5  # waking up takes the host a moment


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.device.host_s += 1e-6
        self.at = max(self.device.busy_until, self.device.host_s)

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3 * self.device.drift


def checks_of(device: Device) -> list[Any]:
    return compare_clocks(device.stamps, device.start, host=lambda: device.host_s)


@pytest.mark.parametrize("work", [1e-6, 1e-4, 3e-3])
def test_clocks_that_agree(work: float) -> None:
    checks = checks_of(Device(work))
    assert [check.host_s for check in checks] == pytest.approx(list(LENGTHS_S), rel=0.3)
    assert all(check.agrees for check in checks)
    assert all(check.to_json()["difference"] <= TOLERANCE for check in checks)


@pytest.mark.parametrize("drift", [0.98, 1.02])
def test_clocks_that_differ_are_found_at_every_length(drift: float) -> None:
    assert not any(check.agrees for check in checks_of(Device(1e-4, drift=drift)))


def test_captured_passes_pass_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda().install(monkeypatch)
    single, half = check_graphs("cpu", new=24)
    assert (single.dtype, half.dtype) == ("float32", "bfloat16")
    assert single.agreement == dict.fromkeys(DRAFTERS, 1.0)
    assert single.difference < 1e-4
    assert half.difference < 0.05
    assert single.passed
    assert half.passed
    assert single.eager is None
    target, draft = single.shapes.values()
    assert {shape.split("x")[1] for shape in target} >= {"1", "8", "16"}
    assert draft
    assert single.to_json()["passed"] is True


def test_a_draft_network_that_is_never_captured_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the target's passes are: see that a network's steps go through them at all."""
    FakeCuda().install(monkeypatch)
    plain = Passes.run

    def run(
        passes: Passes, variant: Any, version: Any, compute: Any, inputs: Tensors, length: int, **how: Any
    ) -> Any:
        if passes.name == "draft network":
            return compute(inputs, length)
        return plain(passes, variant, version, compute, inputs, length, **how)

    monkeypatch.setattr(Passes, "run", run)
    single, _ = check_graphs("cpu", new=24)
    assert single.agreement == dict.fromkeys(DRAFTERS, 1.0)
    assert not single.passed


def test_passes_that_say_something_else_do_not() -> None:
    class Wrong(FixedPass):
        def run(self) -> Tensors:
            outputs = super().run().items()  # a tree of wrong nodes would be refused by the loop
            return {name: t.flip(-1) if t.is_floating_point() else t for name, t in outputs}

    assert not any(check.passed for check in check_graphs("cpu", Wrong, new=8))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_layers_run_captured_too(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    pytest.importorskip("torchao")
    cuda = FakeCuda().install(monkeypatch)
    assert check_scheme(scheme, torch.device("cpu")) is None
    assert "captured" not in cuda.happened
    assert check_scheme(scheme, torch.device("cpu"), captured=True) is None
    assert cuda.happened.count("captured") == 1


def test_quantised_layers_that_do_not_work_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    FakeCuda().install(monkeypatch)
    right = QuantizedLinear.forward

    def wrong(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
        return -right(layer, x)

    def reading(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
        return right(layer, x) if x.sum().item() else x

    def refusing(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel\nmore")

    for forward, said in (
        (wrong, "run as it is, its outputs are off by 200%"),
        (reading, "no CUDA graph of it can be made"),
        (refusing, "no kernel"),
    ):
        monkeypatch.setattr(QuantizedLinear, "forward", forward)
        found = check_scheme("int8", torch.device("cpu"), captured=True)
        assert found is not None
        assert said in found


def test_a_device_that_captures_nothing_does_not_pass() -> None:
    def refuse(*_: Any) -> FixedPass:
        raise RuntimeError("no graphs here")

    checks = check_graphs("cpu", refuse, new=12)
    assert [check.eager for check in checks] == ["RuntimeError: no graphs here"] * 2
    assert not any(check.passed for check in checks)
