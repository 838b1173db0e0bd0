"""`specbench doctor`: what it prints, how it exits, and what each rule says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from fake_nvml import FakeNvml
from typer.testing import CliRunner

from specbench.cli import doctor
from specbench.errors import SpecbenchError
from specbench.measure import checks
from specbench.measure.advice import problems

HEALTHY: dict[str, Any] = {
    "schema": 1,
    "versions": {"python": "3.11", "torch": "2.13.0"},
    "unmet": [],
    "broken": [],
    "quiet": {"load": 0.1, "busy_cores": 0.0, "cores": 2, "threads": 2},
    "machine": {
        "os": "Linux",
        "kernel": "6",
        "arch": "x86_64",
        "cpu": {
            "model": "Some [bold] CPU",
            "cores_physical": 2,
            "cores_logical": 2,
            "cores_usable": 2,
            "governor": None,
        },
        "torch": {"threads": 2, "cpu_capability": "AVX2", "mkl": "2024.2", "onednn": "3.12", "cuda": None},
        "gpus": [],
    },
    "memory": {"total_bytes": 16e9, "available_bytes": 12e9},
    "gpu": {
        "nvml": False,
        "why_not": "not found",
        "driver_gpus": None,
        "torch_gpus": 0,
        "now": [],
        "warnings": [],
    },
    "folders": {
        name: {"path": f"/cache/{name}", "writable": True, "free_bytes": 50e9}
        for name in ("specbench", "hugging_face")
    },
    "hub": {"endpoint": "https://hub", "offline": False, "reachable": True},
    "bandwidth": {"cpu": {"copy_gb_s": 20.0, "read_gb_s": 21.0, "buffer_bytes": 1, "threads": 2}},
    "clocks": {"cuda:0": None},
    "graphs": {"cuda:0": None},
    "quantisation": {
        "torchao": "0.18.0",
        "device": "cpu",
        "schemes": {"int8": None, "int4": None, "fp8": "it needs a CUDA device, and this is a cpu"},
        "failed": {},
    },
    "fingerprint": "abc",
}
CLOCK = {"host_s": 0.05, "events_s": 0.049, "difference": 0.02, "agrees": False}
GRAPHS = {
    "dtype": "float32",
    "agreement": {"vanilla": 1.0, "tree": 0.5},
    "difference": 1e-6,
    "shapes": {"random target": ["2x1x64"], "draft network": ["2x4x64"]},
    "eager": None,
    "reads": 1.0,
    "passed": False,
}
GPU_NOW = {"used_bytes": 1e9, "total_bytes": 80e9, "throttle_reasons": []}
GPU = {"nvml": True, "why_not": None, "driver_gpus": 1, "torch_gpus": 1, "now": [GPU_NOW], "warnings": []}


def facts(**changes: dict[str, Any]) -> dict[str, Any]:
    """The healthy facts with some entries of some sections changed."""
    changed = copy.deepcopy(HEALTHY)
    for section, values in changes.items():
        changed[section] = {**changed[section], **values} if isinstance(values, dict) else values
    return changed


def test_a_healthy_machine_has_no_problems() -> None:
    assert problems(HEALTHY) == []
    assert problems(facts(gpu=GPU)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quiet": {"busy_cores": 1.4}}, "keep 1.4 of 2 cores busy"),
        ({"quiet": {"load": 2.1}}, "load 2.1 on 2 cores"),
        ({"quiet": {"threads": 8}}, "8 threads on 2 usable cores"),
        ({"machine": {"cpu": {"governor": "powersave"}}}, "'powersave'"),
        ({"memory": {"available_bytes": 1.5e9}}, "only 1.5 GB of memory"),
        (
            {"folders": {"specbench": {"path": "/ro", "writable": False, "free_bytes": 9e9}}},
            "/ro cannot be written",
        ),
        (
            {"folders": {"hugging_face": {"path": "/full", "writable": True, "free_bytes": 1e9}}},
            "1.0 GB are free for /full",
        ),
        ({"hub": {"reachable": False}}, "(https://hub) does not answer"),
        ({"gpu": {"nvml": True, "driver_gpus": 2}}, "2 GPU(s), torch sees none"),
        ({"gpu": {**GPU, "nvml": False, "why_not": "lost"}}, "NVML does not work (lost)"),
        ({"gpu": {**GPU, "warnings": ["no energy"]}}, "no energy"),
        ({"gpu": {**GPU, "now": [{**GPU_NOW, "used_bytes": 30e9}]}}, "cuda:0 has 30.0 GB in use"),
        (
            {"gpu": {**GPU, "now": [None, {**GPU_NOW, "throttle_reasons": ["hw_thermal"]}]}},
            "cuda:1 is slowed",
        ),
        ({"clocks": {"cuda:0": [CLOCK]}}, "differ by 2.0% from the host's clock over 50 ms"),
        ({"graphs": {"cuda:0": [GRAPHS]}}, "graphs in float32 say something else"),
        ({"graphs": {"cuda:0": [{**GRAPHS, "eager": "no memory"}]}}, "no CUDA graphs (no memory)"),
        (
            {"graphs": {"cuda:0": [{**GRAPHS, "shapes": {"target": ["2x1x64"], "draft network": []}}]}},
            "no CUDA graphs (none was made of the draft network)",
        ),
        ({"clocks": {"cuda:0": "CUDA out of memory"}}, "clocks could not be made: CUDA out of memory"),
        ({"graphs": {"cuda:0": "CUDA out of memory"}}, "graphs could not be made: CUDA out of memory"),
        ({"quantisation": {"failed": {"int4": "no kernel"}}}, "quantised to int4 does not work: no kernel"),
        ({"unmet": ["datasets 1.0 is installed, datasets>=3 is needed"]}, "datasets 1.0"),
    ],
)
def test_each_problem_is_one_note_and_does_not_stop_a_run(changes: dict[str, Any], said: str) -> None:
    (problem,) = problems(facts(**changes))
    assert said in problem.what
    assert problem.advice
    assert not problem.fatal
    assert problem.failed == bool(changes.keys() & {"clocks", "graphs", "quantisation"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory": {"available_bytes": 0.5e9}}, "only 0.5 GB of memory"),
        ({"unmet": ["torch 2.1 is installed, torch>=2.6 is needed"]}, "torch 2.1"),
        ({"broken": ["torch: libgomp.so.1 not found"]}, "cannot import torch: libgomp"),
    ],
)
def test_what_stops_every_run_comes_first(changes: dict[str, Any], said: str) -> None:
    found = problems(facts(hub={"reachable": False}, **changes))
    assert said in found[0].what
    assert found[0].fatal


def test_spare_cores_may_be_busy() -> None:
    assert problems(facts(quiet={"threads": 1, "busy_cores": 1.0, "load": 1.3})) == []


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.callback()(lambda: None)
    doctor.register(made)
    return made


def invoke(app: typer.Typer, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], *args: str) -> Any:
    monkeypatch.setattr(checks, "gather", lambda: found)
    return CliRunner().invoke(app, ["doctor", *args])


def test_json_is_one_document(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(app, monkeypatch, facts(hub={"reachable": False}), "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["ok"] is True
    assert document["bandwidth"]["cpu"]["copy_gb_s"] == 20.0
    assert [problem["fatal"] for problem in document["problems"]] == [False]


def test_the_page_names_what_it_found(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(app, monkeypatch, HEALTHY)
    assert result.exit_code == 0
    for text in ("torch 2.13.0", "Some [bold] CPU", "copy 20.0 GB/s", "https://hub answers", "12.0 GB free"):
        assert text in result.stdout
    assert "nothing to complain about" in result.stdout
    result = invoke(app, monkeypatch, facts(quiet={"load": 2.1}))
    assert "load 2.1 on 2 cores" in result.stdout


def test_where_no_run_can_work_it_prints_and_fails(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = dict.fromkeys((*checks.SECTIONS, "fingerprint"))
    broken = {**HEALTHY, **sections, "broken": ["torch: no such file"]}
    for args in ((), ("--json",)):
        result = invoke(app, monkeypatch, broken, *args)
        assert isinstance(result.exception, SpecbenchError)
        assert result.exception.exit_code == 2
        assert "torch: no such file" in result.stdout
    assert json.loads(result.stdout)["ok"] is False


def test_strict_fails_where_a_self_check_did(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    for graphs, code in ((GRAPHS, 1), ({**GRAPHS, "passed": True}, 0)):
        found = facts(graphs={"cuda:0": [graphs]})
        assert invoke(app, monkeypatch, found, "--strict").exit_code == code
        assert invoke(app, monkeypatch, found).exit_code == 0
    assert invoke(app, monkeypatch, facts(hub={"reachable": False}), "--strict").exit_code == 0


def test_strict_says_where_there_was_no_gpu_to_check(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "no GPU: no self-check of one was made\n"
    assert invoke(app, monkeypatch, HEALTHY, "--strict").stderr == said
    assert invoke(app, monkeypatch, facts(gpu=GPU), "--strict").stderr == ""
    assert invoke(app, monkeypatch, HEALTHY).stderr == ""


def test_a_gpu_whose_memory_is_taken_is_a_note_and_no_traceback(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_device: str) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256 MiB.\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("specbench.measure.clock_check.check_cuda_clock", full)
    monkeypatch.setattr("specbench.graph_check.check_graphs", full)
    found = facts(gpu=GPU, clocks=checks.clocks(), graphs=checks.graphs())
    result = invoke(app, monkeypatch, found, "--strict")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stdout.count("could not be made: ") == 2
    assert "Tried to allocate 256 MiB." in result.stdout
    assert json.loads(invoke(app, monkeypatch, found, "--json").stdout)["ok"] is True


def test_gathering_looks_at_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(checks, "_answers", lambda address, seconds: False)
    monkeypatch.setattr(checks, "busy_now", lambda seconds: 0.0)
    monkeypatch.setattr(checks, "measure_bandwidth", lambda device: checks_bandwidth())
    found = json.loads(json.dumps(checks.gather()))
    assert set(found) == {"schema", "versions", "unmet", "broken", "fingerprint", *checks.SECTIONS}
    assert found["broken"] == []
    assert found["unmet"] == []
    assert found["folders"]["specbench"]["path"].startswith(str(tmp_path))
    assert found["folders"]["specbench"]["writable"] is True
    assert found["folders"]["specbench"]["free_bytes"] > 0
    assert found["quiet"]["threads"] == torch.get_num_threads()
    assert found["bandwidth"]["cpu"]["copy_gb_s"] == 1.0
    assert isinstance(problems(found), list)


def checks_bandwidth() -> Any:
    from specbench.measure.bandwidth import Bandwidth

    return Bandwidth(1.0, 1.0, 4, 1)


def test_the_hub_is_not_asked_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    asked: list[str] = []
    monkeypatch.setattr(checks, "_answers", lambda address, seconds: asked.append(address) or True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert checks.hub()["reachable"] is True
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert checks.hub()["reachable"] is None
    assert len(asked) == 1


def test_a_server_that_is_not_there_does_not_answer() -> None:
    assert checks._answers("http://127.0.0.1:9", 0.5) is False


def test_requirements_are_compared_with_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99", "nowhere-to-be-found", "numpy>=1", "pandas>=99; extra == 'dev'"]
    monkeypatch.setattr(checks.importlib.metadata, "requires", lambda name: wanted)
    unmet = checks.unmet_requirements()
    assert len(unmet) == 2
    assert unmet[0].startswith("torch 2")
    assert unmet[1] == "nowhere-to-be-found is not installed, nowhere-to-be-found is needed"
    assert checks.broken_imports(("json", "nowhere_to_be_found"))[0].startswith("nowhere_to_be_found: ")


def test_the_state_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lib = FakeNvml(("nvmlDeviceGetTotalEnergyConsumption",))
    lib.bits = 0x40
    state = checks.gpu_state(lib)
    assert (state["nvml"], state["driver_gpus"], state["torch_gpus"]) == (True, 2, 1)
    assert state["now"][0]["throttle_reasons"] == ["hw_thermal"]
    assert len(state["warnings"]) == 1
    state = checks.gpu_state(FakeNvml(("nvmlInit",)))
    assert (state["nvml"], state["why_not"], state["now"]) == (False, "Init Not Supported", [])
