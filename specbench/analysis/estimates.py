"""The fields of one summary row, from one method's trials and vanilla's of the same batches (design §6, §7).

`pairs` below is a table with one line a batch that both methods measured: the method's columns under their
own names, vanilla's with `_v` behind. Each batch's seconds stand there once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from specbench.analysis import intervals
from specbench.analysis.frame import COUNTS, MEMORY, SPANS
from specbench.analysis.intervals import SPEEDUP, Estimate, Floats, ratio_of_sums, sums_by
from specbench.analysis.rounds import percentiles
from specbench.thresholds import NEAR_TIE

Fields = dict[str, Any]


# What a batch's sums are the sums of: its column -> its rows'.
OWN = {"decode_s": "decode_s", "tokens": "output_tokens", "decode_tokens": "decode_tokens"}


def join(
    units: pd.DataFrame, baseline: pd.DataFrame, rows: pd.DataFrame, baseline_rows: pd.DataFrame
) -> pd.DataFrame:
    """The batches that both measured: `units` of a method beside `baseline`'s (columns named `…_v`).

    Where one of the two lacks a request, the batch's sums are over those that both answered.
    """
    timed = ["whole", "cost_s", "decode_s", "tokens", "decode_tokens", "passes", "verify", "floor_s"]
    pairs = units.merge(baseline[["pair", *timed]], on="pair", suffixes=("", "_v"))
    holes = ~(pairs["whole"] & pairs["whole_v"]).to_numpy(dtype=bool)
    if holes.any():
        both = _answered_by_both(rows, baseline_rows).reindex(pairs.loc[holes, "pair"])
        for name, own in OWN.items():
            for side in ("", "_v"):
                pairs[name + side] = pairs[name + side].astype(np.float64)
                pairs.loc[holes, name + side] = both[own + side].to_numpy()
    return pairs


def _answered_by_both(rows: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """Sums over the requests that both answered, by `pair`."""
    columns = ["pair", "question", *OWN.values()]
    mine, base = (table.loc[table["used"], columns] for table in (rows, baseline))
    both = mine.merge(base, on=["pair", "question"], suffixes=("", "_v"))
    return both.drop(columns="question").groupby("pair").sum()


def speed(pairs: pd.DataFrame) -> Fields:
    """Speedups of the method over vanilla, from the batches both measured.

    `speedup` is end to end (seconds of a batch, in an open loop of its requests, and output tokens),
    `decode_speedup` leaves out the prefill and the first token. `geomean_speedup` is the geometric mean of the
    questions' own ratios; `spec_bench_speedup` is Spec-Bench's formula, mean over questions of tokens/s divided by
    vanilla's mean, biased upwards. Where questions were in flight together, both are over these batches or blocks.
    """
    whole = _clusters(pairs, "cost_s", "tokens")
    decode = _clusters(pairs, "decode_s", "decode_tokens")
    fields: Fields = {
        "speedup": ratio_of_sums(whole, SPEEDUP),
        "speedup_bias": _bias(whole),
        "decode_speedup": ratio_of_sums(decode, SPEEDUP),
        "geomean_speedup": None,
        "spec_bench_speedup": None,
    }
    known = whole[np.all(whole > 0, axis=1)]
    if len(known):
        known = known[np.lexsort(known.T)]
        rate_v, rate = known[:, 1] / known[:, 0], known[:, 3] / known[:, 2]
        fields["geomean_speedup"] = float(np.exp(np.mean(np.log(rate / rate_v))))
        fields["spec_bench_speedup"] = float(rate.mean() / rate_v.mean())
    return fields


def _bias(clusters: Floats) -> float | None:
    """The bias of the speedup where it is larger than its own error; else it is noise."""
    bias = intervals.jackknife_bias(clusters, SPEEDUP)
    error = intervals.jackknife_bias_error(clusters, SPEEDUP)
    return bias if bias is not None and error is not None and abs(bias) > error else None


def clusters(pairs: pd.DataFrame) -> int:
    """How many questions (or batches of questions) the interval of the speedup rests on."""
    return len(_clusters(pairs, "cost_s", "tokens"))


def clusters_needed(pairs: pd.DataFrame, wanted: float) -> int | None:
    """How many of them would bring the speedup's half width to about `wanted`; None where it is unknown."""
    known = _clusters(pairs, "cost_s", "tokens")
    return intervals.clusters_needed(known, SPEEDUP, wanted) if np.all(known.sum(axis=0) > 0) else None


def _clusters(pairs: pd.DataFrame, seconds: str, tokens: str) -> Floats:
    """[clusters, 4]: vanilla's seconds and tokens, the method's seconds and tokens."""
    known = _known(pairs, "cluster", f"{seconds}_v", f"{tokens}_v", seconds, tokens)
    return sums_by(known[:, 0], known[:, 1:])


def cost(rows: pd.DataFrame, units: pd.DataFrame) -> Fields:
    """Rates and where decode time goes.

    `tokens_per_s` and `requests_per_s` are end to end, each batch's seconds once; `latency_s` is the mean of a
    request, `ttft_s` its mean prefill, `ttft` its percentiles; `tpot_s` the seconds of decode per decoded token of
    a request (a batch's rows each wait its whole round). Shares are of the batches' decode seconds.
    `joules_per_token` is over the batches whose energy is known.
    """
    prefill, whole = _known(rows, "prefill_s"), _known(rows, "total_s")
    shares = _known(units, "decode_s", *SPANS).sum(axis=0)
    return {
        "tokens_per_s": _per(units, "tokens", "batch_s"),
        "requests_per_s": _per(units, "requests", "batch_s"),
        "latency_s": float(whole.mean()) if len(whole) else None,
        "ttft_s": float(prefill.mean()) if len(prefill) else None,
        "ttft": percentiles(prefill[:, 0]),
        "tpot_s": _per(rows, "decode_s", "decode_tokens"),
        "joules_per_token": _per(units, "joules", "tokens"),
        **{f"{name}_share": _ratio(shares[i + 1], shares[0]) for i, name in enumerate(SPANS)},
    }


def pass_gain(pairs: pd.DataFrame) -> float | None:
    """Decoded tokens of a batch pass over those of vanilla's: what a pass of the same cost would speed decode up by.

    Of one request it is τ. A batch lasts as long as its longest row, so that with rows of unequal length it is that
    row's acceptance which counts, while τ is over the rounds of all.
    """
    tokens, passes, tokens_v, passes_v = _known(
        pairs, "decode_tokens", "passes", "decode_tokens_v", "passes_v"
    ).sum(axis=0)
    return _ratio(_ratio(tokens, passes), _ratio(tokens_v, passes_v))


def physics(
    pairs: pd.DataFrame, gain: float | None, decode_speedup: Estimate, overhead: float | None
) -> Fields:
    """What the parts of a round say the decode speedup should be.

    `verify_inflation` is the mean seconds of a verify pass over vanilla's. `predicted_speedup` =
    gain / (overhead + verify inflation), `predicted_residual` how far the measured one is from it;
    `free_draft_limit` = gain / verify inflation, what a drafter that costs nothing would reach.

    Args:
        gain: tokens a pass over vanilla's (`pass_gain`), τ for one request at a time.
    """
    fields: Fields = dict.fromkeys(
        ("verify_inflation", "predicted_speedup", "predicted_residual", "free_draft_limit")
    )
    columns = ("verify", "passes", "verify_v", "passes_v")
    verify, passes, verify_v, passes_v = _known(pairs, *columns).sum(axis=0)
    inflation = _ratio(_ratio(verify, passes), _ratio(verify_v, passes_v))
    if not inflation or gain is None:
        return fields
    fields |= {"verify_inflation": inflation, "free_draft_limit": gain / inflation}
    if overhead is not None:
        predicted = gain / (overhead + inflation)
        fields["predicted_speedup"] = predicted
        measured = _ratio(decode_speedup["point"], predicted)
        fields["predicted_residual"] = None if measured is None else measured - 1
    return fields


def roofline(pairs: pd.DataFrame, gain: float | None) -> Fields:
    """What the floors of the passes allow (`analysis.floors`).

    `roofline_limit` = gain (see `physics`) · vanilla's floor a pass / the method's, `roofline_share` = the method's
    floors / its verify seconds.
    """
    floor, passes, floor_v, passes_v = _known(pairs, "floor_s", "passes", "floor_s_v", "passes_v").sum(axis=0)
    inflation = _ratio(_ratio(floor, passes), _ratio(floor_v, passes_v))
    known = _known(pairs, "floor_s", "verify").sum(axis=0)
    return {"roofline_limit": _ratio(gain, inflation), "roofline_share": _ratio(known[0], known[1])}


def draft_overhead(pairs: pd.DataFrame) -> float | None:
    """Draft seconds a round over t₁, vanilla's seconds a round."""
    columns = ("draft", "passes", "decode_s_v", "passes_v")
    draft, passes, decode_v, passes_v = _known(pairs, *columns).sum(axis=0)
    return _ratio(_ratio(draft, passes), _ratio(decode_v, passes_v))


def memory(rows: pd.DataFrame, baseline: pd.DataFrame) -> Fields:
    """Bytes, from the method's own memory pass: one value a method, the same in all of its rows.

    `memory_overhead_bytes` is the method's total above vanilla's, where the total is `peak_bytes`: all
    that was held at the worst moment, weights and KV included. None where either is unknown.
    """
    fields: Fields = {name: _whole(rows[name].max()) for name in MEMORY}
    peak, base = fields["peak_bytes"], _whole(baseline["peak_bytes"].max())
    fields["memory_overhead_bytes"] = None if peak is None or base is None else peak - base
    return fields


def agreement(rows: pd.DataFrame) -> Fields:
    """How many outputs were compared with vanilla's, how many are identical, and how the others differ.

    `compared_by` says how: token ids where there are some, else texts. Texts that were compared beside ids (of
    engines) are counted apart.
    `near_ties` are differences where the target's top two logits are within NEAR_TIE of each other;
    `first_difference_median` is a token index, over the outputs that differ.
    """
    same, gap, first, lossless = (
        rows[name].to_numpy() for name in ("same", "logit_gap", "first_difference", "lossless")
    )
    compared, differ = int(np.isfinite(same).sum()), same == 0
    known = lossless[np.isfinite(lossless)]
    differences = first[differ & np.isfinite(first)]
    by_ids = rows["by_ids"].to_numpy()
    texts = np.where(by_ids, rows["same_text"].to_numpy(), same)
    known_texts = int(np.isfinite(texts).sum())
    return {
        "lossless": bool(known.all()) if len(known) else None,
        "identical": compared - int(differ.sum()) if compared else None,
        "compared": compared,
        "compared_by": _one_of(["ids" if ids else "text" for ids in by_ids[np.isfinite(same)]]),
        "identical_text": int((texts == 1).sum()) if known_texts else None,
        "compared_text": known_texts,
        "near_ties": int((gap[differ] <= NEAR_TIE).sum()) if compared else None,
        "first_difference_median": float(np.median(differences)) if len(differences) else None,
    }


def counts(rows: pd.DataFrame) -> Fields:
    """`prompts`: distinct questions that count; `trials`: all rows, `failed` and `excluded` ones included;
    `outliers`: rows that count though their pace stands out (see `steadiness`); `tokens`: output tokens of the
    rows that count."""
    used = rows["used"].to_numpy()
    excluded = rows["excluded"].notna().to_numpy()
    return {
        "state": _one_of(rows["state"].dropna()),
        "prompts": len(np.unique(rows["asked"].to_numpy()[used])),
        "trials": len(rows),
        "failed": int((rows["failed"].to_numpy() & ~excluded).sum()),
        "excluded": int(excluded.sum()),
        "outliers": int(rows["outlier"].to_numpy()[used].sum()),
        "tokens": int(rows["output_tokens"].to_numpy()[used].sum()),
    }


def told(rows: pd.DataFrame) -> Fields:
    """Where an engine's account of accepted and drafted tokens comes from, and whose requests it is of."""
    return {f"counts_{name}": _one_of(rows[name].dropna()) for name in COUNTS}


def _one_of(values: Iterable[Any]) -> str | None:
    """What all of them are; `mixed` where they differ, None where there are none."""
    found = set(values)
    return str(found.pop()) if len(found) == 1 else "mixed" if found else None


def _known(table: pd.DataFrame, *columns: str) -> Floats:
    """[lines, columns]: the lines in which none of these is unknown."""
    values = np.stack([table[name].to_numpy(dtype=np.float64) for name in columns], axis=1)
    return values[np.isfinite(values).all(axis=1)]


def _per(table: pd.DataFrame, top: str, bottom: str) -> float | None:
    """Σ top / Σ bottom over the lines that know both."""
    known = _known(table, top, bottom)
    return _ratio(known[:, 0].sum(), known[:, 1].sum()) if len(known) else None


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return float(top / bottom) if top is not None and bottom else None


def _whole(value: Any) -> int | None:
    return int(value) if np.isfinite(value) else None
