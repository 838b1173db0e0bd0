"""Limits: worked examples, a slow recount of a run's floors round by round, and the command."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from test_routers import ACTIVE, EXPERTS, mixture
from tiny_folder import Workplace, specbench
from trial_factory import FakeRun, blocks, trial

from specbench import manifest as manifests
from specbench.analysis.definitions import DEFINITIONS
from specbench.analysis.floors import with_floors
from specbench.analysis.frame import build
from specbench.analysis.gpus import GPUS, known_gpu
from specbench.analysis.roofline import Architecture, Device, Speculation, by_batch, cost, most_rows, pays_at
from specbench.analysis.summary import summarise
from specbench.errors import SpecbenchError
from specbench.measure import bandwidth
from specbench.measure import speed as speeds
from specbench.models import registry
from specbench.models.architecture import architecture, described
from specbench.models.kept import DISTURBED
from specbench.models.packed import BYTES_A_WEIGHT
from specbench.models.quantize import quantise
from specbench.report import FORMATS
from specbench.store import Rounds

PLAIN = Architecture(
    layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocab=16, tied=False,
    windows=((None, 1), (10, 1)), cached=4, attended=8, dense_parameters=1000, dense_bytes=2000,
)  # fmt: skip
MOE = replace(PLAIN, moe_layers=2, experts=4, active_experts=2, expert_parameters=50, expert_bytes=100)
SLOW = Device("slow", bandwidth=1000.0, rate=math.inf)
WEAK = Device("weak", bandwidth=math.inf, rate=1000.0)


# -- worked examples -----------------------------------------------------------------------------------------


def test_a_70b_model_in_fp16_at_two_terabytes_a_second_takes_70_ms_a_token() -> None:
    model = described("llama-70b").architecture.in_bytes(2, 2)
    device = Device("2 TB/s", 2e12, 312e12)
    one = cost(model, device, rows=1, query=1, context=0)
    assert one.seconds == pytest.approx(0.070, rel=0.01)
    assert one.bound == "memory"
    # nine tokens cost what one does, so a drafter that is right 3 times in a row gains all of it
    assert Speculation(9, 3.0).limit(model, device, 1, 0) == pytest.approx(3.0, rel=1e-3)
    # reading takes 2 bytes a weight / 2e12, one token 2 operations a weight / 312e12: 156 tokens as long as reading
    assert cost(model, device, 1, 150, 0).bound == "memory"
    assert cost(model, device, 1, 162, 0).bound == "compute"


def test_bytes_and_operations_by_hand() -> None:
    assert PLAIN.weight_bytes(1) == PLAIN.weight_bytes(7) == 2000
    # a full layer sees 20 + 3 tokens, a window of 10 sees 10 + 3; 4 numbers of 2 bytes each
    assert PLAIN.cache_bytes(3, 20) == (23 + 13) * 4 * 2
    assert PLAIN.cache_bytes(3, 4) == (7 + 7) * 4 * 2
    assert PLAIN.operations(3, 20) == 2 * 3 * (1000 + 8 * (21 + 11))
    assert cost(PLAIN, SLOW, rows=2, query=3, context=20).seconds == (2000 + 2 * 36 * 8) / 1000
    assert cost(PLAIN, WEAK, rows=2, query=3, context=20).seconds == 2 * PLAIN.operations(3, 20) / 1000
    half = PLAIN.in_bytes(0.5, 1)
    head = 16 * 4  # computes in what the cache holds: here one byte
    assert (half.dense_bytes, half.cache_bytes(3, 20)) == ((1000 - head) * 0.5 + head, 36 * 4)
    experts = MOE.in_bytes(0.5, 2, dense=2)
    assert (experts.dense_bytes, experts.expert_bytes) == (2000, 25)


def test_experts_expected_of_random_routing() -> None:
    assert MOE.unique_experts(1) == pytest.approx(2)
    assert MOE.unique_experts(2) == pytest.approx(3)  # 4 (1 - 1/4)
    dice = np.random.default_rng(0)
    woken = [len({e for _ in range(5) for e in dice.choice(128, 8, replace=False)}) for _ in range(2000)]
    qwen = replace(MOE, experts=128, active_experts=8)
    assert qwen.unique_experts(5) == pytest.approx(np.mean(woken), rel=0.01)
    assert MOE.weight_bytes(1) == 2000 + 2 * 100 * 2
    assert MOE.weight_bytes(9, experts=2.5) == 2000 + 2 * 100 * 2.5
    assert MOE.operations(1, 0) == 2 * (1000 + 2 * 2 * 50 + 8 * 2)
    assert MOE.all_bytes == 2000 + 2 * 4 * 100


def test_where_speculation_pays() -> None:
    device = Device("both", 1000.0, 10_000.0)
    how = Speculation(query=4, tau=2.0)
    ((first, last),) = pays_at(PLAIN, device, how, 0)
    assert first == 1
    assert last is not None
    assert how.limit(PLAIN, device, last, 0) > 1 >= how.limit(PLAIN, device, last + 1, 0)
    assert pays_at(PLAIN, WEAK, how, 0) == []
    assert pays_at(PLAIN, SLOW, how, 100) == [(1, None)]  # rows read their long contexts once either way
    assert how.limit(PLAIN, SLOW, 1, 0) == pytest.approx(2.0, rel=0.03)
    assert replace(how, draft=1.0).limit(PLAIN, SLOW, 1, 0) == pytest.approx(1.0, rel=0.03)
    # a mixture of many experts: at first each token wakes its own, in the end all are awake anyway
    sparse = replace(MOE, experts=128, active_experts=8, expert_bytes=1e6)
    ranges = pays_at(sparse, SLOW, Speculation(5, 3.0), 0)
    assert ranges[-1][1] is None
    paying = {rows for a, b in ranges for rows in range(a, min(b or 300, 300) + 1)}
    assert paying == {r for r in range(1, 301) if Speculation(5, 3.0).limit(sparse, SLOW, r, 0) > 1}
    assert 2 not in paying


# -- architectures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ["llama-8b", "llama-70b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b",
                                   "deepseek-v3", "olmoe-1b-7b", "smollm2-135m"])  # fmt: skip
def test_parameters_counted_are_those_published(alias: str) -> None:
    entry = registry.find(alias)
    stated = described(alias)
    found, dtype = stated.architecture, stated.dtype
    total = found.dense_parameters + found.moe_layers * found.experts * found.expert_parameters
    assert total + (0 if found.tied else found.vocab * found.hidden) == pytest.approx(
        entry.parameters, rel=0.005
    )
    assert dtype == entry.dtype
    assert Architecture.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_active_parameters_of_mixtures_are_those_published() -> None:
    for alias, billions in (
        ("qwen3-30b-a3b", 3.3),
        ("mixtral-8x7b", 12.9),
        ("gpt-oss-20b", 3.6),
        ("deepseek-v3", 37),
    ):
        found = described(alias).architecture
        active = found.dense_parameters + found.moe_layers * found.active_experts * found.expert_parameters
        embeddings = found.vocab * found.hidden
        assert active <= billions * 1e9 * 1.02
        assert active + embeddings >= billions * 1e9 * 0.98


def test_latent_attention_and_windows() -> None:
    deepseek = described("deepseek-v3").architecture
    assert (deepseek.cached, deepseek.moe_layers) == (
        512 + 64,
        58,
    )  # DeepSeek-V2's paper: 576 numbers a token
    oss = described("gpt-oss-20b").architecture
    assert oss.windows == ((128, 12), (None, 12))
    llama = described("random:llama-8b").architecture
    assert llama.cached * llama.layers * 2 == 131072  # 128 KiB a token in 16 bits


def test_a_loaded_model_is_counted_as_stored() -> None:
    target = tiny.llama()
    found = architecture(target)
    embeddings = target.embeddings.weight.numel()
    assert found.dense_parameters == sum(p.numel() for p in target.model.parameters()) - embeddings
    assert found.dense_bytes == 4 * found.dense_parameters
    target.model.to(torch.bfloat16)
    assert architecture(target).dense_bytes == 2 * found.dense_parameters
    tied = architecture(tiny.llama(tie_word_embeddings=True))
    assert tied.tied
    assert tied.dense_parameters == found.dense_parameters
    moe = mixture("qwen3_moe")
    counted = architecture(moe)
    assert (counted.experts, counted.active_experts, counted.moe_layers) == (EXPERTS, ACTIVE, 3)
    assert counted.expert_parameters == 3 * 32 * 16


def test_refs_that_are_not_known_here(tmp_path: Path) -> None:
    for ref in ("llama-8", "granite-3.1-1b-a400m", "nobody/nothing", str(tmp_path)):
        with pytest.raises(SpecbenchError):
            described(ref)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecbenchError, match=r"config\.json"):
        described(str(tmp_path))


# What repositories on the Hub hold, embeddings included: openai/gpt-oss-20b 13.8 GB (it has 1.2 GB of embeddings that
# no pass reads), deepseek-ai/DeepSeek-V3 about 671 GB without its MTP layer.
@pytest.mark.parametrize(
    ("target", "name", "gigabytes"),
    [
        ("gpt-oss-20b", "mxfp4", 12.6),
        ("random:gpt-oss-20b", "bfloat16", 40.7),
        ("gpt-oss-120b", "mxfp4", 64.1),
        ("deepseek-v3", "fp8", 671),
    ],
)
def test_aliases_are_read_as_the_hub_stores_them(target: str, name: str, gigabytes: float) -> None:
    facts = json.loads(specbench("roofline", "--target", target, "--gpu", "h200", "--tau", 2, "--json").out)
    assert facts["dtype"] == name
    assert facts["weights_bytes"] == pytest.approx(gigabytes * 1e9, rel=0.01)
    assert facts["architecture"]["number_bytes"] == 2, "the cache is not quantised"
    rate = 1979e12 if name == "fp8" else 989e12
    assert facts["device"]["operations_per_s"] == rate


@pytest.mark.parametrize(
    ("stored", "name", "weight"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq-4bit-g128", (4 + 16 / 128) / 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq-4bit-g64", (4 + 16 / 64) / 8),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes-8bit", 1),
    ],
)
def test_quantised_checkpoints_are_read_as_stored(
    tmp_path: Path, stored: dict[str, Any], name: str, weight: float
) -> None:
    plain = registry.find("llama-8b").config
    (tmp_path / "config.json").write_text(
        json.dumps({**plain, "dtype": "bfloat16", "quantization_config": stored})
    )
    shown = specbench("roofline", "--target", tmp_path, "--gpu", "h200", "--tau", 2, "--json")
    facts = json.loads(shown.out)
    head = 128256 * 4096
    dense = described("llama-8b").architecture.dense_parameters
    assert facts["dtype"] == name
    assert facts["weights_bytes"] == pytest.approx((dense - head) * weight + head * 2)
    asked = specbench(
        "roofline", "--target", tmp_path, "--gpu", "h200", "--tau", 2, "--dtype", "bfloat16", "--json"
    )
    assert json.loads(asked.out)["weights_bytes"] == dense * 2


def test_a_quantised_checkpoint_that_does_not_say_how_wide_it_is(tmp_path: Path) -> None:
    config = {**registry.find("llama-8b").config, "quantization_config": {"quant_method": "quip"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = specbench("roofline", "--target", tmp_path, "--gpu", "h200", "--tau", 2)
    assert shown.code == 2
    assert "quip" in shown.error_lines[0]
    assert "--dtype" in shown.error_lines[1]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_dtypes_are_what_quantize_makes_of_a_model(scheme: str) -> None:
    pytest.importorskip("torchao")
    target = tiny.llama(hidden=256)
    target.model.to(torch.bfloat16)
    before = architecture(target)
    quantise(target.model, scheme)
    made = architecture(target)
    said = before.in_bytes(BYTES_A_WEIGHT[scheme], 2)
    assert made.dense_bytes == pytest.approx(said.dense_bytes, rel=0.02)  # scales of int8, norms


# -- the floors of a run -------------------------------------------------------------------------------------


def manifest(target: Architecture = PLAIN) -> dict[str, Any]:
    speed = speeds.Speed("toy", "float32", 1, copy_gb_s=2e-6, read_gb_s=1e-6, matmul_tflop_s=4e-8)
    facts = {"architecture": target.to_json(), "speed": speed.to_json()}
    return {"name": "run", "target": {"name": "tiny"}, "roofline": json.loads(json.dumps(facts))}


def slow_floor(target: Architecture, rows: list[tuple[int, Rounds]]) -> float:
    """Round by round, row by row, in plain Python: bytes at 2000 a second, operations at 40000."""
    total = 0.0
    for number in range(max(len(rounds.emitted) for _, rounds in rows)):
        read, work, tokens, woken = target.dense_bytes, 0.0, 0, None
        for prompt, rounds in rows:
            if number >= len(rounds.emitted):
                continue
            context, query = prompt + sum(rounds.emitted[:number]), rounds.drafted[number] + 1
            query += rounds.probes[number] if rounds.probes else 0
            tokens += query
            woken = rounds.experts[number] if rounds.experts else None
            for window, layers in target.windows:
                seen = context if window is None else min(context, window)
                read += layers * (seen + query) * target.cached * target.number_bytes
                work += layers * 2 * query * target.attended * (seen + 1)
            active = (
                target.dense_parameters + target.moe_layers * target.active_experts * target.expert_parameters
            )
            work += 2 * query * active
        if target.experts:
            chance = 1 - target.active_experts / target.experts
            woken = target.experts * (1 - chance**tokens) if woken is None else woken
            read += target.moe_layers * woken * target.expert_bytes
        total += max(read / 2000, work / 40000)
    return total


def batch() -> list[tuple[int, Rounds]]:
    first = Rounds([3, 0, 4], [3, 0, 4], [3, 0, 2], [4, 1, 3], experts=[3.5, 2.0, 4.0])
    second = Rounds([2, 2], [2, 2], [0, 1], [1, 2], experts=[3.5, 2.0], probes=[0, 6])
    return [(5, first), (9, second)]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("target", [PLAIN, MOE])
def test_floors_of_a_ragged_batch(target: Architecture, known: bool) -> None:
    rows = batch()
    if not known:
        rows = [(prompt, replace(rounds, experts=None)) for prompt, rounds in rows]
    # listed out of order, and beside another method's, as a run's are
    trials = [
        trial(f"q{row}", "fast", batch_size=2, batch="q0+q1", prompt_tokens=prompt, rounds=rounds, order=1)
        for row, (prompt, rounds) in reversed(list(enumerate(rows)))
    ]
    trials += [trial(f"q{row}", batch_size=2, batch="q0+q1", prompt_tokens=5) for row in range(2)]
    batches = with_floors(build(trials), manifest(target)).batches
    (found,) = batches[batches["method"] == "fast"]["floor_s"]
    assert found == pytest.approx(slow_floor(target, rows))


def test_limit_and_share_of_a_summary_row() -> None:
    fast = {
        "accepted": [1] * 5,
        "drafted": 4,
        "prompt_tokens": 6,
        "spans": {"verify": 40.0, "draft": 1.0, "accept": 0.0},
    }
    vanilla = {"prompt_tokens": 6, "spans": {"verify": 50.0, "draft": 0.0, "accept": 0.0}}
    run = FakeRun(blocks(3, {"vanilla": vanilla, "fast": fast}), manifest())
    row = next(r for r in summarise([run])["rows"] if r["method"] == "fast" and r["task"] == "overall")
    floors = [
        slow_floor(PLAIN, [(6, next(t.rounds for t in run.trials if t.method == method))])
        for method in ("vanilla", "fast")
    ]
    assert row["roofline_share"] == pytest.approx(floors[1] / 40)
    assert row["roofline_limit"] == pytest.approx(2 * (floors[0] / 10) / (floors[1] / 5))
    assert row["experts"] is None
    assert "below-floor" not in {w["code"] for w in summarise([run])["warnings"]}
    facts = manifest()["roofline"]
    slow = facts | {"speed": facts["speed"] | {"copy_gb_s": 1e-7, "read_gb_s": 1e-7}}
    found = summarise([FakeRun(run.trials, manifest() | {"roofline": slow})])["warnings"]
    below = [w for w in found if w["code"] == "below-floor"]
    assert [w["method"] for w in below] == ["vanilla", "fast"]
    assert "--again --dtype float32 --device cpu --threads 1" in below[0]["cure"]
    old = FakeRun(run.trials, {"name": "run", "target": {"name": "tiny"}})
    assert {r["roofline_limit"] for r in summarise([old])["rows"]} == {None}


def test_rounds_that_are_not_told_apart_have_no_floor() -> None:
    trials = [trial(prompt_tokens=4, rounds=Rounds(None, None, [3], [5], count=[2], with_draft=[2]))]
    assert with_floors(build(trials), manifest()).batches["floor_s"].isna().all()
    failed = trial("q2", error="broken", rounds=Rounds())
    assert with_floors(build([failed]), manifest()).batches["floor_s"].isna().all()


def test_a_run_knows_its_limits(make_place: Any) -> None:
    place: Workplace = make_place("limits")
    assert place.run("--method", "lookahead:level=3,window=4,guess=4").code == 0
    probes = {row["method"]: row["rounds"]["probes"] for row in place.rows()}
    assert probes.pop("vanilla") is None
    (window,) = map(max, probes.values())
    assert 0 < window <= 4 + 5, "lookahead's window rides in the pass"
    facts = place.manifest()["roofline"]
    assert facts["architecture"]["layers"] == 2
    assert facts["speed"]["matmul_tflop_s"] > 0
    shown = specbench("report", "r", "--results", place.results, "--format", "json", "--output", "-")
    rows = json.loads(shown.out)["rows"]
    assert all(row["roofline_limit"] > 0 and row["roofline_share"] > 0 for row in rows)
    assert {row["roofline_limit"] for row in rows if row["method"] == "vanilla"} == {1.0}


def test_reports_explain_the_verify_inflation_of_a_mixture() -> None:
    woken = {"experts": [2.0] * 10}
    vanilla = trial(prompt_tokens=6, rounds=replace(trial().rounds, **woken))
    fast = trial(method="fast", accepted=[1] * 5, prompt_tokens=6, order=1, seconds=8.0)
    fast.rounds.experts = [3.5] * 5
    run = FakeRun([vanilla, fast], manifest(MOE))
    summary = summarise([run])
    floor = slow_floor(MOE, [(6, fast.rounds)]) / 5 / (slow_floor(MOE, [(6, vanilla.rounds)]) / 10)
    inflation = next(r["verify_inflation"] for r in summary["rows"] if r["method"] == "fast")
    said = (
        "A verify pass wakes 3.5 of 4 experts a layer and vanilla's 2.0, so that its floor is "
        f"{floor:.2f}x vanilla's; it takes {inflation:.2f}x as long (verify inflation)."
    )
    assert said in FORMATS["md"].render(summary, [run])
    assert said in html.unescape(FORMATS["html"].render(summary, [run]))
    dense = FakeRun([trial(), trial(method="fast", order=1)], manifest())
    assert "experts a layer" not in FORMATS["md"].render(summarise([dense]), [dense])


# -- the device ----------------------------------------------------------------------------------------------


class Probe:
    """A processor probe that says what the test wants."""

    contended = False

    def __init__(self, threads: int) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> Any:
        return self


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> type[Probe]:
    """The probe beside measurements, which themselves take no time: 5 GB/s copied, 6 read, 3 TFLOP/s."""
    memory = type("Memory", (), {"copy_gb_s": 5.0, "read_gb_s": 6.0})
    monkeypatch.setattr("specbench.models.kept.CpuProbe", Probe)
    monkeypatch.setattr(Probe, "contended", False)
    monkeypatch.setattr(speeds, "measure_bandwidth", lambda *a: memory)
    monkeypatch.setattr(speeds, "measure_matmul", lambda *a: 3e12)
    return Probe


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of specbench's own."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_disturbed_speed_is_told_of_and_can_be_measured_again(
    make_place: Any, probe: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Workplace = make_place("disturbed")
    probe.contended = True
    done = place.run("--method", "prompt-lookup")
    assert f"multiplies\n{DISTURBED}" in done.err
    assert place.manifest()["roofline"]["speed"]["disturbed"] is True
    shown = specbench("report", "r", "--results", place.results, "--format", "json", "--output", "-")
    (found,) = [w for w in json.loads(shown.out)["warnings"] if w["code"] == "disturbed-speed"]
    assert found["method"] is None
    (cure,) = re.findall("`specbench (.*?)`", found["cure"])
    busy = specbench(*shlex.split(cure), "--json")
    assert DISTURBED in busy.err
    assert json.loads(busy.out)["device"]["name"].endswith("(measured in float32 while it was busy)")
    # The cure is of this run's dtype and threads, whatever others there are: the next run finds what it keeps.
    probe.contended = False
    quiet = specbench(*shlex.split(cure))
    assert (quiet.code, quiet.err) == (0, "")
    assert "busy" not in quiet.out
    (kept,) = (cache / speeds.FOLDER).iterdir()
    assert json.loads(kept.read_text())["threads"] == 1
    monkeypatch.setattr(speeds, "measured", None)  # nothing is measured any more
    assert place.run("--method", "prompt-lookup", name="again").code == 0
    assert place.manifest("again")["roofline"]["speed"]["disturbed"] is False


def test_threads_and_dtype_choose_the_speed_that_is_measured(probe: Any, cache: Path) -> None:
    before = torch.get_num_threads()
    try:
        for argv in (("--threads", 2), ("--threads", 1, "--dtype", "float32"), ("--threads", "auto")):
            argv = ("--target", "llama-8b", "--tau", 2, "--device", "cpu", *argv)
            assert specbench("roofline", *argv).code == 0
    finally:
        torch.set_num_threads(before)
    kept = [json.loads(file.read_text()) for file in (cache / speeds.FOLDER).iterdir()]
    assert {(speed["dtype"], speed["threads"]) for speed in kept} == {
        ("bfloat16", 2), ("float32", 1), ("bfloat16", 1)
    }  # fmt: skip


def test_speed_is_measured_once_unless_somebody_disturbed_it(
    tmp_path: Path, probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    told: list[str] = []
    memory = speeds.measure_bandwidth("cpu")
    monkeypatch.setattr(speeds, "measure_bandwidth", lambda *a: calls.append(a) or memory)
    probe.contended = True

    def ask(**options: Any) -> Any:
        return speeds.device_speed("cpu", torch.float32, tmp_path, told.append, **options)

    disturbed = ask()
    assert (disturbed.matmul_tflop_s, disturbed.disturbed, told[-1]) == (3.0, True, DISTURBED)
    assert not list(tmp_path.rglob("*.json"))
    probe.contended = False
    told.clear()
    found = ask()
    assert (ask(), len(calls)) == (found, 2)
    assert (found, told) == (replace(disturbed, disturbed=False), [])
    assert len([ask(again=True)]) == 1
    assert len(calls) == 3
    assert speeds.device_speed("cpu", torch.int8, tmp_path, told.append).dtype == "bfloat16"
    assert len(calls) == 4
    assert Device.measured(found.to_json()).bandwidth == 6e9
    monkeypatch.setattr(
        speeds, "measure_bandwidth", lambda *a: (_ for _ in ()).throw(RuntimeError("no room"))
    )
    assert ask(again=True) is None


def test_float8_is_multiplied_as_it_is_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: dict[torch.dtype, float | Exception] = {torch.bfloat16: 2e12, torch.float8_e4m3fn: 4e12}

    def matmul(device: Any, dtype: torch.dtype, seconds: float) -> float:
        found = rates[dtype]
        if isinstance(found, Exception):
            raise found
        return found

    memory = type("Memory", (), {"copy_gb_s": 5.0, "read_gb_s": 6.0})
    monkeypatch.setattr(speeds, "measure_bandwidth", lambda *a: memory)
    monkeypatch.setattr(speeds, "measure_matmul", matmul)

    def ask(dtype: torch.dtype) -> tuple[str, float] | None:
        found = speeds.device_speed("cpu", dtype, tmp_path, print, again=True)
        return found and (found.dtype, found.matmul_tflop_s)

    assert ask(torch.float8_e4m3fn) == ("float8_e4m3fn", 4.0)
    assert ask(torch.bfloat16) == ("bfloat16", 2.0)
    assert ask(torch.int8) == ("bfloat16", 2.0)
    rates[torch.float8_e4m3fn] = RuntimeError("torch._scaled_mm is only supported on newer devices")
    assert ask(torch.float8_e4m3fn) == ("bfloat16", 2.0)
    rates[torch.bfloat16] = RuntimeError("out of memory")
    assert ask(torch.float8_e4m3fn) is None


def test_the_product_of_float8_that_is_timed_is_one() -> None:
    left, right = (torch.randn(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    made = bandwidth._product(left, right)()
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.float(), left.float() @ right.float().T, rtol=0.01, atol=0.05)


def test_a_target_in_float8_is_measured_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    monkeypatch.setattr(speeds, "device_speed", lambda device, dtype, *_: asked.append(dtype))
    plain, stored = tiny.llama(), tiny.llama()
    stored.config.quantization_config = {"quant_method": "fp8"}
    for target in (plain, stored):
        manifests.roofline(target, print)
    monkeypatch.setattr("specbench.models.quantize.scheme_of", lambda model: "fp8")
    manifests.roofline(plain, print)
    assert asked == [torch.float32, torch.float8_e4m3fn, torch.float8_e4m3fn]


def test_known_gpus() -> None:
    one, two = known_gpu("A100_40GB", "float16"), known_gpu("4090", "float32", 2)
    assert (one.bandwidth, one.rate) == (1555e9, 312e12)
    assert (two.bandwidth, two.rate, two.memory_bytes) == (2 * 1008e9, 2 * 82.6e12, 48e9)
    assert known_gpu("h200", "fp8").rate == 1979e12
    assert known_gpu("h100", "int4").rate == 989e12  # widened to 16 bits
    for gpu in GPUS.values():
        assert gpu.float32 < gpu.half < (gpu.float8 or math.inf)
    with pytest.raises(SpecbenchError, match="h300"):
        known_gpu("h300", "float16")


# -- the command ---------------------------------------------------------------------------------------------


def test_command_as_json_and_as_a_table(tmp_path: Path) -> None:
    argv = ("roofline", "--target", "qwen3-30b-a3b", "--gpu", "h200", "--tau", 3, "--batch-size", "1,64")
    facts = json.loads(specbench(*argv, "--json").out)
    model = Architecture.from_json(facts["architecture"])
    device = known_gpu("h200", "bfloat16")
    expected = list(by_batch(model, device, Speculation(5, 3.0), (1, 64), 1024))
    assert facts["batches"] == json.loads(json.dumps(expected))
    assert facts["weights_bytes"] == pytest.approx(60.4e9, rel=0.01)
    plot = tmp_path / "limit.svg"
    shown = specbench(*argv, "--plot", plot)
    assert shown.code == 0
    assert "8→35.3" in shown.out
    assert "speculation can pay at batch sizes" in shown.out
    assert plot.read_bytes().startswith(b"<?xml")
    assert "qwen3-30b-a3b, bfloat16" in plot.read_text()
    narrow = specbench("roofline", "--target", "llama-8b", "--gpu", "a100", "--tau", 3, "--dtype", "int4")
    assert "int4: 5.4 GB" in narrow.out  # the head in 16 bits, 5 bits each for the others
    assert "mxfp4, as stored: 12.6 GB" in specbench(*argv[:1], "--target", "gpt-oss-20b", *argv[3:]).out
    large = ("roofline", "--target", "llama-70b", "--gpu", "a100", "--tau", 3)
    assert "see --gpus 2" in specbench(*large).out
    assert "see --gpus 4" in specbench(*large[:4], "a100-40gb", *large[5:], "--gpus", 2).out


def test_batches_that_do_not_fit_are_named() -> None:
    card = replace(SLOW, memory_bytes=PLAIN.all_bytes + 3 * PLAIN.cache_bytes(5, 20) + 1)
    assert [most_rows(PLAIN, card, 5, context) for context in (20, 10**6)] == [3, 0]
    assert most_rows(PLAIN, replace(card, memory_bytes=1.0), 5, 20) == 0
    assert most_rows(PLAIN, SLOW, 5, 20) is None
    argv = ("roofline", "--target", "llama-8b", "--gpu", "h100", "--tau", 3)
    fits = json.loads(specbench(*argv, "--json").out)["largest_batch_that_fits"]
    assert fits == (80e9 - described("llama-8b").architecture.in_bytes(2, 2).all_bytes) // (131072 * 1029)
    assert (
        f"from batch size {fits + 1} on, weights, keys and values do not fit into 80 GB"
        in specbench(*argv).out
    )


def test_the_largest_numbers_that_are_taken() -> None:
    argv = ("--target", "llama-70b", "--gpu", "h200", "--gpus", 4096, "--batch-size", 2**20, "--tau", 2,
            "--draft-tokens", 2**17, "--context", 2**27, "--draft-cost", 1e9)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = specbench("roofline", *argv, "--json")
    assert found.code == 0
    (entry,) = json.loads(found.out)["batches"]
    model = described("llama-70b").architecture
    by_hand = model.dense_parameters + model.attended * model.layers * (2**27 + 1)
    assert entry["verify"]["operations"] == pytest.approx(2**20 * 2 * (2**17 + 1) * by_hand)


def test_definitions_say_what_the_limit_does_not_bound() -> None:
    assert "a measured speedup can exceed it" in DEFINITIONS["roofline_limit"]
    assert "of copying or of reading, whichever is faster" in DEFINITIONS["roofline_share"]


@pytest.mark.parametrize(
    "argv",
    [
        ("--tau", 9), ("--tau", 0.5), ("--tau", 2, "--gpu", "abacus"), ("--tau", 2, "--batch-size", "0"),
        ("--tau", 2, "--dtype", "int3"), ("--tau", 2, "--plot", "x.pdf"), ("--tau", 2, "--gpus", 2),
        ("--tau", 2, "--gpu", "a100", "--draft-cost", "inf"),
        ("--tau", 2, "--gpu", "a100", "--plot", "missing-folder/x.svg"), ("--tau", 2, "--target", ""),
        ("--tau", 2, "--gpu", "a100", "--batch-size", "9" * 23), ("--tau", 2, "--gpu", "a100", "--gpus", 4097),
        ("--tau", 2, "--gpu", "a100", "--draft-tokens", 2**17 + 1), ("--tau", 2, "--gpu", "a100", "--gpus", 0),
        ("--tau", 2, "--gpu", "a100", "--context", 2**27 + 1), ("--tau", 2, "--gpu", "a100", "--context", -1),
        ("--tau", 2, "--gpu", "a100", "--draft-cost", -1), ("--tau", 2, "--gpu", "a100", "--draft-cost", "nan"),
        ("--tau", 2, "--gpu", "a100", "--device", "cpu"), ("--tau", 2, "--gpu", "a100", "--threads", 1),
        ("--tau", 2, "--gpu", "a100", "--again"), ("--tau", 2, "--threads", 0), ("--tau", 2, "--threads", "all"),
        ("--tau", 2, "--threads", "9" * 23),
    ],
)  # fmt: skip
def test_bad_input_is_said_in_two_lines(argv: tuple[Any, ...]) -> None:
    found = specbench("roofline", "--target", "llama-8b", *argv)
    assert (found.code, len(found.error_lines)) == (2, 2)
    assert found.error_lines == found.err.splitlines()
    option = argv[-2] if len(argv) % 2 == 0 else argv[-1]
    assert option.removeprefix("--") in found.err


def test_a_plot_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "x.svg").mkdir()
    argv = ("--target", "llama-8b", "--tau", 2, "--gpu", "a100", "--plot", tmp_path / "x.svg")
    found = specbench("roofline", *argv)
    assert found.code == 2
    assert found.error_lines[1].endswith("with --plot")
