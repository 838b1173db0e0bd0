"""scripts/gpu.sh: every command it would give exists, a step that fails is said, and on a CPU all of it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_workflows import check

ROOT = Path(__file__).parents[1]
# Of the packages that specbench or its extras need, those that a machine of the kind that GPUs come with lacked.
ABSENT = ("gguf", "datasets", "platformdirs", "pydivsufsort", "pyarrow", "xllamacpp", "msgspec")
STUB = """#!{python}
import json, os, pathlib, sys
argv = sys.argv[3:]
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps(argv) + "\\n")
broken = argv[0] == "run" and os.environ.get("BROKEN") == argv[argv.index("--name") + 1]
if broken or ("BARE" in os.environ and "--quantize" in argv):
    print("boom")
    sys.exit(2)
if argv[0] == "run":
    folder = pathlib.Path(argv[argv.index("--output") + 1]) / argv[argv.index("--name") + 1]
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{{}}")
print("said", argv[0])
"""
FLOATS, QUANTISED = ["eager-float32", "graphs-float32"], ["quantised-int8", "quantised-fp8"]
RUNS = [*FLOATS, "dense", "batches", "compiled", "mixture", *QUANTISED, "text"]
ON_A_CPU = {*RUNS} - {"compiled", "quantised-fp8"}


def gpu(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"SPECBENCH_GPU_OUTPUT": str(tmp_path), "SPECBENCH_GPU_DEVICE": "cpu",
                        "SPECBENCH_GPU_NAME": "here", **variables}  # fmt: skip
    return subprocess.run([ROOT / "scripts" / "gpu.sh"], env=env, capture_output=True, text=True, check=False)


def stubbed(tmp_path: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """The script with a Python that only writes down what it is asked for."""
    stub, seen = tmp_path / "python", tmp_path / "seen"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    done = gpu(tmp_path, PYTHON=str(stub), SEEN=str(seen), SPECBENCH_GPU_TEXT="smollm2-135m", **variables)
    return done, [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []


def test_every_command_of_the_script_exists(tmp_path: Path) -> None:
    done, seen = stubbed(tmp_path)
    assert done.returncode == 0, done.stdout
    assert [words[0] for words in seen[:2]] == ["doctor", "roofline"]
    assert [words[words.index("--name") + 1] for words in seen if words[0] == "run"] == RUNS
    for words in seen:
        check(words)
    runs = {words[words.index("--name") + 1]: words for words in seen if words[0] == "run"}
    for name in ("dense", "batches"):
        methods = [word for before, word in pairwise(runs[name]) if before == "--method"]
        for wanted in ("k=4", "k=8", "k=16", "tree=60", "eagle3:draft=random"):
            assert any(method.endswith(wanted) for method in methods), (name, wanted)
    assert "16,4" in runs["batches"]
    targets = {tuple(runs[name][runs[name].index("--target") :][:4]) for name in ("dense", "compiled")}
    assert len(targets) == 1, "both in one dtype, to stand side by side"
    (gate,) = [words for words in seen if words[0] == "compare"]
    assert "--identical" in gate
    assert (tmp_path / "reports/reference/here/table.md").read_text() == "said report\n"
    assert "said doctor" in (tmp_path / "reports/reference/here/log.txt").read_text()


def test_a_step_that_fails_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    done, seen = stubbed(tmp_path, BROKEN="dense")
    assert done.returncode == 1
    assert "failed: dense: exit 2" in done.stdout
    assert [words[words.index("--name") + 1] for words in seen if words[0] == "run"] == RUNS
    assert "dense" not in seen[-1]  # there is nothing to report of it
    assert "mixture" in seen[-1]


@pytest.mark.parametrize("variables", [{"SPECBENCH_GPU_SECONDS": "110"}, {"SPECBENCH_GPU_COMPILE": "0"}])
def test_compiling_is_left_out_where_it_may_not_fit(tmp_path: Path, variables: dict[str, str]) -> None:
    done, seen = stubbed(tmp_path, **variables)
    assert done.returncode == 0, done.stdout
    assert "the compiled run is left out" in done.stdout
    assert not any("--compile" in words for words in seen)


def test_what_cannot_be_quantised_here_is_left_out(tmp_path: Path) -> None:
    done, seen = stubbed(tmp_path, BARE="1")
    assert done.returncode == 0, done.stdout
    assert all(f"boom\nso the {run} run is left out" in done.stdout for run in QUANTISED)
    assert not {*QUANTISED} & {*seen[-1]}, "there is nothing to report of them"


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("SPECBENCH_GPU_SECONDS", ("abc", "0", "08", "1.5", "-3", "9" * 30)),
        ("PYTHON", ("/nonexistent", "/dev/null")),
    ],
)
def test_what_cannot_work_is_said_once_at_the_start(
    tmp_path: Path, variable: str, values: tuple[str, ...]
) -> None:
    for value in values:
        done = gpu(tmp_path, **{variable: value})
        assert done.returncode == 2, done.stdout
        (line,) = (done.stdout + done.stderr).splitlines()
        assert line.startswith(f"{variable}={value} is no ")
    assert not any(tmp_path.iterdir())


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    done, seen = stubbed(tmp_path, SPECBENCH_GPU_SECONDS="1", BROKEN="none")
    assert done.returncode == 1
    assert "failed: dense: no time left" in done.stdout
    assert seen == []


def folders(path: Path) -> dict[str, str]:
    """Tiny models with room for whole prompts: deep enough for EAGLE-3, and a mixture."""
    import tiny
    from test_routers import COMMON, EXPERTS
    from tiny_folder import save_folder
    from transformers import LlamaConfig, MixtralConfig

    ids = {
        "vocab_size": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 8192,
    }
    shape = COMMON | ids
    dense = {key: value for key, value in shape.items() if key != "num_experts_per_tok"} | {
        "num_hidden_layers": 8
    }
    made = {
        "TARGET": LlamaConfig(**dense),
        "SMALL": LlamaConfig(**dense | {"num_hidden_layers": 2}),
        "MOE": MixtralConfig(**shape, num_local_experts=EXPERTS),
        "TEXT": LlamaConfig(**dense),
    }
    found: dict[str, Any] = {}
    for name, config in made.items():
        folder = save_folder(path / name.lower())  # its tokenizer
        tiny.build(config).model.save_pretrained(folder)
        found[f"SPECBENCH_GPU_{name}"] = str(folder)
    return found


@pytest.mark.slow
def test_all_of_it_on_a_cpu_from_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    """Without packages that a GPU machine may lack: -S leaves the installed specbench out, and some are blocked."""
    import numpy

    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for module in ABSENT:
        (blocked / f"{module}.py").write_text(f"raise ImportError('{module} is not here')\n")
    python = tmp_path / "python"
    packages = Path(numpy.__file__).parents[1]
    python.write_text(f'#!/bin/sh\nPYTHONPATH={blocked}:{packages} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    settings = {
        "LIMIT": "2",
        "TOKENS": "8",
        "BATCHES": "2",
        "DTYPE": "float32",
        "SECONDS": "900",
        "COMPILE": "0",
    }
    variables = {f"SPECBENCH_GPU_{name}": value for name, value in settings.items()} | folders(tmp_path)
    done = gpu(
        tmp_path,
        PYTHON=str(python),
        OMP_NUM_THREADS="1",
        SPECBENCH_CACHE=str(tmp_path / "cache"),
        **variables,
    )
    assert done.returncode == 0, done.stdout
    results, reports = tmp_path / "results/reference/here", tmp_path / "reports/reference/here"
    assert {path.parent.name for path in results.glob("*/trials.jsonl")} == ON_A_CPU
    assert all((reports / run / "report.html").is_file() for run in (*ON_A_CPU, "eager-float32+6"))
    assert "it needs a CUDA device, and this is a cpu" in done.stdout
    assert "so the quantised-fp8 run is left out" in done.stdout
    table = (reports / "table.md").read_text()
    columns = (
        "verify inflation",
        "share of roofline",
        "experts woken a pass",
        "other share",
        "target's weights",
    )
    assert all(wanted in table for wanted in ("eagle3", "measured against predicted", *columns))
    assert "experts a layer" in (reports / "eager-float32+6" / "report.md").read_text()
    manifest = json.loads((results / "dense" / "manifest.json").read_text())
    assert manifest["drafters"]["eagle3:draft=random"]["source"] == "random"
