"""Memory of a run, bytes as stored, and the description of the machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specbench.measure import bandwidth, machine
from specbench.measure.memory import KEYS, measure_memory, module_bytes, tensor_bytes


def allocate(megabytes: int) -> None:
    torch.ones(megabytes * 2**18)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_of_a_run_is_its_own_peak_not_an_earlier_one() -> None:
    large = measure_memory(lambda: allocate(96), "cpu")
    small = measure_memory(lambda: allocate(32), "cpu")
    for reading, megabytes in ((large, 96), (small, 32)):
        assert tuple(reading) == KEYS
        peak, before = reading["peak_bytes"], reading["before_bytes"]
        assert peak is not None
        assert before is not None
        assert 0.9 * megabytes < (peak - before) / 2**20 < megabytes + 16
        assert reading["reserved_bytes"] is None
        assert reading["nvml_used_bytes"] is None


def test_memory_that_is_not_told_is_null(tmp_path: Path) -> None:
    assert set(measure_memory(lambda: None, "cpu", proc=tmp_path).values()) == {None}
    with pytest.raises(MemoryError):
        measure_memory(lambda: (_ for _ in ()).throw(MemoryError), "cpu")


def test_memory_on_cuda_is_the_allocators_over_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    held, peak = [100, 10], [900, 900]

    def generation() -> None:
        peak[0] = 700

    fakes = {
        "device_count": lambda: 2,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda n: peak.__setitem__(n, held[n]),
        "memory_allocated": held.__getitem__,
        "max_memory_allocated": peak.__getitem__,
        "max_memory_reserved": lambda n: 2 * peak[n],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    gpu = SimpleNamespace(used_bytes=lambda: 5000, process_bytes=lambda: None)
    reading = measure_memory(generation, torch.device("cuda:0"), gpu)
    assert [reading[key] for key in KEYS[:4]] == [710, 110, 110, 1420]
    assert reading["nvml_used_bytes"] == 5000
    assert reading["nvml_process_bytes"] is None


def test_bytes_as_stored() -> None:
    first, second = torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(8, 4)
    second.weight = first.weight
    second.register_buffer("narrow", torch.zeros(3, dtype=torch.bfloat16))
    assert module_bytes(first) == 128
    assert module_bytes(first, second) == 128 + 16 + 6
    base = torch.ones(100)
    assert tensor_bytes([base[:10], base[50:60], base[:10]]) == 80
    assert tensor_bytes([torch.ones(10).expand(50, 10)]) == 40
    assert tensor_bytes([torch.ones(4).view(2, 2), torch.ones(4, dtype=torch.int8)]) == 20
    packed = torch.nn.Parameter(torch.zeros(16, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = SimpleNamespace(absmax=torch.ones(2), nested=SimpleNamespace(code=torch.ones(3)))
    assert tensor_bytes([packed]) == 16 + 8 + 12
    wrapper = SimpleNamespace(inner=torch.zeros(5, dtype=torch.int8), scale=torch.ones(1))
    wrapper.__tensor_flatten__ = lambda: (["inner", "scale"], None)
    assert tensor_bytes([wrapper]) == 9


def test_buffers_are_larger_than_all_the_caches(tmp_path: Path) -> None:
    for number, shared in enumerate(("0-1", "0-1", "2-3")):
        folder = tmp_path / f"cpu{number}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text("102400K\n")
        (folder / "shared_cpu_list").write_text(shared)
    assert bandwidth.last_level_cache_bytes(tmp_path) == 2 * 100 * 2**20
    assert bandwidth.last_level_cache_bytes(tmp_path / "none") == 0


def test_the_machine_is_described_without_saying_whose_it_is() -> None:
    found = machine.describe("cpu")
    text = json.dumps([found, machine.versions()])
    for private in (machine.platform.node(), str(Path.home()), str(Path.cwd())):
        assert not private or private not in text
    assert found["cpu"]["cores_usable"] >= 1
    assert found["torch"]["threads"] == torch.get_num_threads()
    assert found["gpus"] == [] or found["gpus"][0]["name"]
    assert machine.versions()["torch"] == torch.__version__


def test_fingerprint_knows_machines_not_software() -> None:
    found = machine.describe("cpu")
    same = {**found, "python": "9.9", "memory_bytes": found["memory_bytes"] + 1000, "torch": {"threads": 99}}
    assert machine.fingerprint(same) == machine.fingerprint(json.loads(json.dumps(found)))
    assert machine.fingerprint({**found, "gpus": [{"name": "H200"}]}) != machine.fingerprint(found)
    other = {**found, "cpu": {**found["cpu"], "model": "another"}}
    assert machine.fingerprint(other) != machine.fingerprint(found)


def test_git_state_of_a_checkout(tmp_path: Path) -> None:
    def git(*args: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *args], check=True, capture_output=True)

    assert machine.git_state(tmp_path) is None
    git("init")
    assert machine.git_state(tmp_path) is None  # no commit yet
    (tmp_path / ".gitignore").write_text("venv/\n")
    git("add", ".")
    git("commit", "-m", "one")
    state = machine.git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "venv").mkdir()
    assert machine.git_state(tmp_path / "venv") is None  # an environment inside somebody's checkout
    (tmp_path / "new.py").write_text("")
    assert machine.git_state(tmp_path)["dirty"] is True
