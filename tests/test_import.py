"""Other benchmarks' results as runs: their own numbers come out again, and what they cannot give is unknown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_folder import specbench

from specbench.analysis.compare import compare
from specbench.analysis.summary import summarise
from specbench.importers import FORMATS
from specbench.importers.spec_bench import split
from specbench.report import FORMATS as REPORTS
from specbench.store import read_run

CATEGORIES = ("writing", "math", "translation", "qa")
Answer = dict[str, Any]
QA = '{"question_id": 1, "category": "qa", "choices": '


# -- Spec-Bench ----------------------------------------------------------------------------------------------


def answers(method: str, seed: int, speed: float, most: int, count: int = 24, **changed: Any) -> list[Answer]:
    """Answers of known cost; a turn's text is one word a token, and a fast method accepts up to `most`."""
    random, made = np.random.default_rng(seed), []
    for number in range(count):
        category = CATEGORIES[number % len(CATEGORIES)]
        turns, steps, tokens, seconds, lengths = [], [], [], [], []
        for _ in range(2 if category in ("writing", "math") else 1):
            accepted = random.integers(1, most + 1, int(random.integers(4, 30))).tolist()
            lengths += accepted
            steps.append(len(accepted))
            tokens.append(sum(accepted))
            turns.append(" ".join(f"w{i}" for i in range(sum(accepted))))
            seconds.append(float(len(accepted) / speed * random.lognormal(0, 0.4)))
        choice = {"index": 0, "turns": turns, "decoding_steps": steps, "new_tokens": tokens}
        choice |= {"wall_time": seconds, "accept_lengths": lengths}
        made.append(
            {
                "question_id": 81 + number,
                "category": category,
                "answer_id": "x",
                "model_id": f"vicuna-7b-v1.3-{method}-float16-temp-0.0",
                "choices": [choice | changed],
                "tstamp": 1.7e9 + number,
            }
        )
    return made


def write(path: Path, rows: list[Answer]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def spec_bench(method: list[Answer], base: list[Answer], categories: tuple[str, ...]) -> tuple[float, float]:
    """Speedup and mean accepted tokens as Spec-Bench defines them: mean over questions of tokens/s, over the
    baseline's; its tokens counted from its text by a tokenizer that puts one BOS in front."""
    rates, rates_base, lengths = [], [], []
    for rows, into, retokenise in ((method, rates, False), (base, rates_base, True)):
        for row in rows:
            if row["category"] not in categories:
                continue
            (choice,) = row["choices"]
            counted = [len(["<s>", *text.split()]) - 1 for text in choice["turns"]]
            into.append(sum(counted if retokenise else choice["new_tokens"]) / sum(choice["wall_time"]))
            if not retokenise:
                lengths += choice["accept_lengths"]
    return float(np.mean(rates) / np.mean(rates_base)), float(np.mean(lengths))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    made = {
        "base": answers("vanilla", 1, 30, 1),
        "eagle3": answers("eagle3", 2, 25, 5),
        "pld": answers("pld", 3, 28, 2),
    }
    return {name: write(tmp_path / f"{name}.jsonl", rows) for name, rows in made.items()}


def bring(output: Path, *words: Any, name: str = "imported") -> Any:
    return specbench("import", *words, "--output", output, "--name", name)


def load(path: Path) -> list[Answer]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spec_bench_gets_its_own_numbers(files: dict[str, Path], tmp_path: Path) -> None:
    result = bring(
        tmp_path, "spec-bench", files["eagle3"], f"PLD={files['pld']}", "--baseline", files["base"]
    )
    assert result.code == 0, result.err
    run = read_run(tmp_path / "imported")
    assert not run.warnings
    summary = summarise([run])
    rows = {(row["method"], row["task"]): row for row in summary["rows"] if row["category"] is None}
    assert {method for method, _ in rows} == {"vanilla", "eagle3-float16-temp-0.0", "PLD"}
    tasks = {
        "mt_bench": ("writing", "math"),
        "translation": ("translation",),
        "qa": ("qa",),
        "overall": CATEGORIES,
    }
    for label, file in (("eagle3-float16-temp-0.0", "eagle3"), ("PLD", "pld")):
        for task, categories in tasks.items():
            speedup, accepted = spec_bench(load(files[file]), load(files["base"]), categories)
            row = rows[label, task]
            assert row["spec_bench_speedup"] == pytest.approx(speedup, abs=1e-9)
            assert row["tau"]["point"] == pytest.approx(accepted, abs=1e-9)
            assert row["prompts"] == sum(answer["category"] in categories for answer in load(files[file]))
    overall = rows["eagle3-float16-temp-0.0", "overall"]
    sums = [
        [sum(sum(a["choices"][0][key]) for a in load(files[file])) for key in ("wall_time", "new_tokens")]
        for file in ("base", "eagle3")
    ]
    (base_s, base_n), (s, n) = sums
    assert overall["speedup"]["point"] == pytest.approx((base_s / base_n) / (s / n), abs=1e-9)
    assert overall["speedup"]["low"] < overall["speedup"]["point"] < overall["speedup"]["high"]
    # The mean of rates weighs quick questions more than the seconds spent on them.
    assert abs(overall["spec_bench_speedup"] - overall["speedup"]["point"]) > 0.02
    assert overall["spec_bench_speedup"] > overall["speedup"]["point"]


def test_what_spec_bench_cannot_give_is_unknown(files: dict[str, Path], tmp_path: Path) -> None:
    result = bring(tmp_path, "spec-bench", files["eagle3"], "--baseline", files["base"])
    assert "not known: prompt tokens" in result.err
    run = read_run(tmp_path / "imported")
    row = next(r for r in summarise([run])["rows"] if r["method"] != "vanilla" and r["task"] == "overall")
    for name in (
        "ttft_s",
        "tpot_s",
        "alpha",
        "acceptance_rate",
        "draft_share",
        "peak_bytes",
        "lossless",
        "state",
    ):
        assert row[name] is None, name
    assert row["decode_speedup"]["point"] is None
    manifest = run.manifest
    assert manifest["target"]["name"] == "vicuna-7b-v1.3"
    assert manifest["target"]["dtype"] == "float16"
    assert manifest["config"] == {"temperature": 0.0}
    assert manifest["start"] == "2023-11-14T22:13:20+00:00"
    assert len(manifest["imported"]["files"]) == 2
    assert "memory" in manifest["imported"]["unknown"]
    for form in REPORTS.values():
        assert form.render(summarise([run]), [run])


def test_outputs_are_compared_as_text(files: dict[str, Path], tmp_path: Path) -> None:
    same = write(tmp_path / "same.jsonl", load(files["base"]))
    bring(tmp_path, "spec-bench", f"same={same}", f"other={files['pld']}", "--baseline", files["base"])
    rows = {
        r["method"]: r for r in summarise([read_run(tmp_path / "imported")])["rows"] if r["task"] == "overall"
    }
    assert (rows["same"]["identical"], rows["same"]["compared"]) == (36, 36)
    assert rows["other"]["identical"] < 36
    sampled = bring(
        tmp_path, "spec-bench", same, "--baseline", files["base"], "--temperature", 1, name="sampled"
    )
    assert sampled.code == 0
    assert all(t.agreement is None for t in read_run(tmp_path / "sampled").trials)


def test_older_files_and_odd_counts(files: dict[str, Path], tmp_path: Path) -> None:
    """`idxs` for `decoding_steps`, or passes that do not add up: each pass still counts once."""
    rows = load(files["eagle3"])
    for row in rows:
        choice = row["choices"][0]
        choice["idxs"] = [step - 1 for step in choice.pop("decoding_steps")]
    old = write(tmp_path / "old.jsonl", rows)
    bring(tmp_path, "spec-bench", f"e={old}", "--baseline", files["base"])
    row = next(
        r
        for r in summarise([read_run(tmp_path / "imported")])["rows"]
        if (r["method"], r["task"]) == ("e", "overall")
    )
    assert row["tau"]["point"] == pytest.approx(
        spec_bench(rows, load(files["base"]), CATEGORIES)[1], abs=1e-9
    )


@pytest.mark.parametrize(
    ("lengths", "steps", "tokens", "expected"),
    [
        ([1, 2, 3], [1, 2], [1, 5], [[1], [2, 3]]),
        ([1, 2, 3], None, [3, 3], [[1, 2], [3]]),
        ([1, 2, 3], [9, 9], [3, 3], [[1, 2], [3]]),
        ([2, 2, 2], None, [3, 1], [[2, 2], [2]]),
        ([], [2, 2], [3, 3], [[], []]),
        ([1, 1], None, [5, 5], [[1, 1], []]),
        ([1, 1, 7], None, [1, 1], [[1], [1, 7]]),
    ],
)
def test_passes_are_split_by_turn(lengths: list, steps: list | None, tokens: list, expected: list) -> None:
    assert split(lengths, steps, tokens) == expected
    assert [length for turn in split(lengths, steps, tokens) for length in turn] == lengths


def test_errors_and_repeats(files: dict[str, Path], tmp_path: Path) -> None:
    rows = load(files["pld"])
    rows[2]["choices"][0]["turns"] = ["ERROR"]
    broken = write(tmp_path / "broken.jsonl", rows[:-1])  # and one question is missing
    again = write(tmp_path / "again.jsonl", answers("pld", 9, 28, 2))
    bases = [word for _ in range(2) for word in ("--baseline", files["base"])]
    bring(tmp_path, "spec-bench", f"p={broken}", f"p={again}", *bases)
    run = read_run(tmp_path / "imported")
    assert {t.repeat for t in run.trials} == {0, 1}
    row = next(r for r in summarise([run])["rows"] if (r["method"], r["task"]) == ("p", "overall"))
    assert (row["failed"], row["prompts"]) == (1, 24)
    assert sum(t.error is not None for t in run.trials) == 1


def test_a_shorter_file_takes_nothing_from_the_others(files: dict[str, Path], tmp_path: Path) -> None:
    short = write(tmp_path / "short.jsonl", load(files["pld"])[:-3])
    bring(tmp_path, "spec-bench", f"p={short}", "--baseline", files["base"])
    run = read_run(tmp_path / "imported")
    assert not run.warnings
    rows = {r["method"]: r for r in summarise([run])["rows"] if r["task"] == "overall"}
    assert (rows["vanilla"]["prompts"], rows["p"]["prompts"]) == (24, 21)


def test_imported_runs_can_be_compared(files: dict[str, Path], tmp_path: Path) -> None:
    for name, seed in (("one", 2), ("two", 7)):
        made = write(tmp_path / f"{name}.jsonl", answers("eagle3", seed, 25, 5))
        bring(tmp_path, "spec-bench", f"e={made}", "--baseline", files["base"], name=name)
    found = compare(read_run(tmp_path / "one"), read_run(tmp_path / "two"))
    assert {(r["method"], r["paired"]) for r in found["rows"]} == {("e", True)}
    assert specbench("compare", "one", "two", "--metric", "tokens_per_s", "--results", tmp_path).code == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{", "line 1 is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"question_id": 1}', "is not an answer of Spec-Bench"),
        (QA + '[{"turns": ["a"]}]}', "new_tokens"),
        (
            QA + '[{"turns": ["a"], "new_tokens": [1, 2], "wall_time": [1]}]}',
            "is not an answer of Spec-Bench",
        ),
        (QA + '[{"turns": ["a"], "new_tokens": ["x"], "wall_time": [1]}]}', "is not an answer of Spec-Bench"),
        (QA + "7}", "is not an answer of Spec-Bench"),
        (
            QA + '[{"turns": ["a"], "new_tokens": [-4], "wall_time": [1]}]}',
            "what is no trial: output_tokens cannot be -4",
        ),
    ],
)
def test_broken_answer_files(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    result = bring(tmp_path, "spec-bench", tmp_path / "a.jsonl")
    assert result.code == 2
    assert said in result.err
    assert len(result.err.strip().splitlines()) == 2
    assert not (tmp_path / "imported").exists()


def test_refusals(files: dict[str, Path], tmp_path: Path) -> None:
    base = ("--baseline", files["base"])
    assert "no importer for mlperf" in bring(tmp_path, "mlperf", files["pld"]).err
    assert "cannot read" in bring(tmp_path, "spec-bench", tmp_path / "none.jsonl").err
    assert "names no method" in bring(tmp_path, "spec-bench", f"={files['pld']}").err
    assert "is a path" in bring(tmp_path, "spec-bench", files["pld"], name="a/b").err
    assert bring(tmp_path, "spec-bench", files["pld"], *base).code == 0
    assert "there is a run" in bring(tmp_path, "spec-bench", files["pld"], *base).err
    assert bring(tmp_path, "spec-bench", files["pld"], *base, "--fresh").code == 0
    assert "name it with --target" in bring(tmp_path, "spec-bench", files["pld"], name="alone").err
    alone = bring(tmp_path, "spec-bench", files["pld"], "--target", "vicuna", name="alone")
    assert "without --baseline there is no speedup" in alone.err


# -- vLLM and SGLang -----------------------------------------------------------------------------------------


def serving(count: int = 12, gap: float = 0.02, seed: int = 0, **changed: Any) -> dict[str, Any]:
    """A result of either load generator, one request at a time: the same prompts, `gap` seconds a token."""
    random = np.random.default_rng(seed)
    outputs = np.random.default_rng(99).integers(8, 40, count).tolist()
    ttfts = random.uniform(0.1, 0.2, count).tolist()
    itls = [(gap * random.lognormal(0, 0.1, n - 1)).tolist() for n in outputs]
    return {
        "duration": sum(ttfts) + sum(map(sum, itls)) + 0.01,
        "completed": count,
        "total_output_tokens": sum(outputs),
        "max_concurrency": 1,
        "input_lens": np.random.default_rng(98).integers(5, 50, count).tolist(),
        "output_lens": outputs,
        "ttfts": ttfts,
        "itls": itls,
        "generated_texts": ["text"] * count,
        "errors": [""] * count,
    } | changed


def vllm(**changed: Any) -> dict[str, Any]:
    return serving(**changed) | {
        "model_id": "org/model",
        "label": "openai",
        "request_rate": "inf",
        "burstiness": 1.0,
    }


def sglang(**changed: Any) -> dict[str, Any]:
    extra = {"request_rate": math.inf, "dataset_name": "sharegpt", "server_info": {"model_path": "org/model"}}
    return serving(**changed) | extra | {"accept_length": 2.4, "tag": None}


@pytest.mark.parametrize(("form", "make"), [("vllm", vllm), ("sglang", sglang)])
def test_serving_one_at_a_time(form: str, make: Any, tmp_path: Path) -> None:
    base, fast = make(gap=0.02, seed=1), make(gap=0.01, seed=2)
    paths = [write(tmp_path / f"{name}.json", [rows]) for name, rows in (("base", base), ("fast", fast))]
    result = bring(tmp_path, form, paths[1], "--baseline", paths[0])
    assert result.code == 0, result.err
    run = read_run(tmp_path / "imported")
    rows = {r["method"]: r for r in summarise([run])["rows"] if r["task"] == "overall"}
    seconds, tokens = (
        [sum(r["ttfts"]) + sum(map(sum, r["itls"])) for r in (base, fast)],
        sum(base["output_lens"]),
    )
    row = rows["fast"]
    assert row["speedup"]["point"] == pytest.approx(seconds[0] / seconds[1])
    assert row["speedup"]["low"] is not None
    assert row["tokens_per_s"] == pytest.approx(tokens / seconds[1])
    assert row["ttft_s"] == pytest.approx(np.mean(fast["ttfts"]))
    assert row["tpot_s"] == pytest.approx(sum(map(sum, fast["itls"])) / (tokens - 12))
    assert row["tau"]["point"] is None
    assert run.manifest["target"]["name"] == "org/model"
    assert run.manifest["imported"]["results"]["fast"][0]["completed"] == 12
    assert run.trials[0].prompt_tokens == base["input_lens"][0]
    assert "tokens per round" in result.err


@pytest.mark.parametrize(("form", "make"), [("vllm", vllm), ("sglang", sglang)])
def test_gaps_between_chunks_are_arrivals(form: str, make: Any, tmp_path: Path) -> None:
    """A chunk is a token only where there are as many of them; otherwise a chunk's tokens are not told."""
    result = make()
    result["itls"][1] = result["itls"][1][::2]
    result["errors"][2] = "timeout"
    assert bring(tmp_path, form, write(tmp_path / "a.json", [result])).code == 0
    run = read_run(tmp_path / "imported")
    whole, chunked, failed = run.trials[:3]
    ends = np.cumsum([result["ttfts"][0], *result["itls"][0]])
    assert whole.arrivals is not None
    assert whole.arrivals["at_s"] == pytest.approx(ends.tolist(), abs=1e-6)
    assert whole.arrivals["tokens"] == [1] * result["output_lens"][0]
    assert chunked.arrivals is not None
    assert chunked.arrivals["tokens"] == [None] * (1 + len(result["itls"][1]))
    assert failed.arrivals is None
    (row,) = [r for r in summarise([run])["rows"] if r["task"] == "overall"]
    gaps = [gap for i, itl in enumerate(result["itls"]) if i != 2 for gap in itl]
    assert row["itl_s"]["p50"] == pytest.approx(np.median(gaps), rel=1e-3)


def test_vllm_latencies_are_used(tmp_path: Path) -> None:
    result = vllm()
    result["latencies"] = [t + sum(i) + 1 for t, i in zip(result["ttfts"], result["itls"], strict=True)]
    bring(tmp_path, "vllm", write(tmp_path / "a.json", [result]))
    assert read_run(tmp_path / "imported").trials[0].total_s == pytest.approx(result["latencies"][0])


def test_concurrent_requests_are_one_batch(tmp_path: Path) -> None:
    """Tokens/s is then the tool's own output throughput."""
    made = {}
    for name, gap in (("base", 0.02), ("fast", 0.01)):
        results = [vllm(gap=gap), vllm(gap=gap) | {"max_concurrency": 4, "duration": 100 * gap}]
        made[name] = write(tmp_path / f"{name}.jsonl", results)  # as --append-result
    result = bring(tmp_path, "vllm", made["fast"], "--baseline", made["base"])
    assert "the whole file is one batch" in result.err
    run = read_run(tmp_path / "imported")
    assert not run.warnings
    assert len(run.trials) == 4 * 12
    rows = {(r["method"], r["concurrency"]): r for r in summarise([run])["rows"] if r["task"] == "overall"}
    row = rows["fast", 4]
    assert row["tokens_per_s"] == pytest.approx(sum(vllm()["output_lens"]) / 1.0)
    assert row["speedup"] == {"low": None, "point": pytest.approx(2.0), "high": None}
    assert row["decode_speedup"]["point"] == pytest.approx(2.0)  # of the requests' own decoding
    assert rows["fast", 1]["speedup"]["low"] is not None


@pytest.mark.parametrize(("form", "make"), [("vllm", vllm), ("sglang", sglang)])
def test_request_rates_stand_apart(form: str, make: Any, tmp_path: Path) -> None:
    """A rate is a load of its own, no repeat of another; its speedup counts the requests' own seconds."""
    results = {
        (method, rate): make(gap=gap * rate) | {"request_rate": rate, "max_concurrency": None}
        for method, gap in (("vanilla", 0.01), ("fast", 0.005))
        for rate in (8.0, 2.0)
    }
    paths = {key: write(tmp_path / f"{key[0]}{key[1]}.json", [made]) for key, made in results.items()}
    options = [part for (m, _), path in paths.items() if m == "vanilla" for part in ("--baseline", path)]
    result = bring(tmp_path, form, *(f"fast={p}" for (m, _), p in paths.items() if m == "fast"), *options)
    assert result.code == 0, result.err
    assert "the requests' own seconds" in result.err
    run = read_run(tmp_path / "imported")
    assert {(t.concurrency, t.request_rate, t.repeat) for t in run.trials} == {(None, 2.0, 0), (None, 8.0, 0)}
    rows = [r for r in summarise([run])["rows"] if r["task"] == "overall" and r["method"] == "fast"]
    assert [(r["concurrency"], r["request_rate"]) for r in rows] == [(None, 2.0), (None, 8.0)]
    for row in rows:
        seconds = {
            m: sum(sum(itl) for itl in results[m, row["request_rate"]]["itls"]) for m in ("vanilla", "fast")
        }
        first = sum(results["fast", 2.0]["ttfts"])
        whole = (first + seconds["vanilla"]) / (first + seconds["fast"])
        assert row["speedup"]["point"] == pytest.approx(whole)
        assert row["decode_speedup"]["point"] == pytest.approx(seconds["vanilla"] / seconds["fast"])
        assert row["ttft_s"] is not None
        assert row["tpot_s"] is not None


def test_a_rate_with_a_limit_is_another_load(tmp_path: Path) -> None:
    results = [vllm() | {"request_rate": 2.0, "max_concurrency": limit} for limit in (None, 4, 1)]
    bring(tmp_path, "vllm", write(tmp_path / "a.jsonl", results))
    trials = read_run(tmp_path / "imported").trials
    assert {(t.concurrency, t.request_rate) for t in trials} == {(None, 2.0), (4, 2.0), (1, None)}


def test_arrivals_from_a_file_have_no_speedup(tmp_path: Path) -> None:
    """Their rate is unknown: they set the throughput, and nobody knows to what."""
    paced = {"request_rate": "trace", "max_concurrency": None}
    paths = [write(tmp_path / f"{name}.json", [vllm() | paced]) for name in ("base", "fast")]
    result = bring(tmp_path, "vllm", paths[1], "--baseline", paths[0])
    assert "the moments of sending" in result.err
    rows = [r for r in summarise([read_run(tmp_path / "imported")])["rows"] if r["method"] == "fast"]
    assert rows[-1]["speedup"]["point"] is None
    assert rows[-1]["ttft_s"] is not None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"itls": None}, "holds totals only (itls missing)"),
        ({"ttfts": [0.1]}, "ttfts is not a list of 12 requests"),
        ({"duration": None}, "something that is not a number"),
        ({"itls": [["x"]] * 12}, "something that is not a number"),
        ({"max_concurrency": "all"}, "something that is not a number"),
        ({"generated_texts": [5] * 12}, "what is no trial: text cannot be 5"),
        (
            {
                "output_lens": [],
                "input_lens": [],
                "ttfts": [],
                "itls": [],
                "errors": [],
                "generated_texts": [],
            },
            "number",
        ),
    ],
)
def test_broken_serving_files(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = write(tmp_path / "a.json", [vllm() | changed])
    result = bring(tmp_path, "vllm", path)
    assert result.code == 2
    assert said in result.err
    assert len(result.err.strip().splitlines()) == 2


def test_files_must_belong_together(tmp_path: Path) -> None:
    base = write(tmp_path / "base.json", [vllm()])
    prompts = write(tmp_path / "prompts.json", [vllm() | {"input_lens": list(range(12))}])
    model = write(tmp_path / "model.json", [vllm() | {"model_id": "org/other"}])
    assert "other prompts" in bring(tmp_path, "vllm", prompts, "--baseline", base).err
    assert "another target" in bring(tmp_path, "vllm", model, "--baseline", base).err
    nameless = write(tmp_path / "nameless.json", [sglang() | {"server_info": None}])
    assert "name it with --target" in bring(tmp_path, "sglang", nameless).err
    assert bring(tmp_path, "sglang", nameless, "--target", "mine").code == 0


def test_failed_requests_are_counted(tmp_path: Path) -> None:
    result = vllm()
    result["errors"][3], result["output_lens"][5] = "timeout", 0
    bring(tmp_path, "vllm", write(tmp_path / "a.json", [result]))
    rows = [t for t in read_run(tmp_path / "imported").trials if t.error]
    assert [(t.question, t.error) for t in rows] == [("3", "timeout"), ("5", "no output")]


def test_files_of_one_name_are_no_silent_repeats(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    again = write(tmp_path / "b" / "pld.jsonl", load(files["pld"]))
    result = bring(tmp_path, "spec-bench", files["pld"], again, "--baseline", files["base"])
    assert "names pld-float16-temp-0.0 again" in result.err
    one, two = (write(tmp_path / name / "r.json", [vllm()]) for name in (".", "b"))
    assert "names r again" in bring(tmp_path, "vllm", one, two).err
    assert bring(tmp_path, "vllm", f"r={one}", f"r={two}").code == 0


def test_importers_are_listed() -> None:
    assert list(FORMATS) == ["spec-bench", "vllm", "sglang"]
