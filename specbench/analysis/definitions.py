"""What each field of a summary row means, in one plain sentence each: printed by reports, and the row's order."""

from __future__ import annotations

from specbench.analysis.closed_form import LONGEST
from specbench.analysis.steadiness import LEAST_SPREAD, LEAST_TRIALS, OUTLYING
from specbench.thresholds import NEAR_TIE

_OVER = "over the batches that both vanilla and the method measured"
_PAIRED = (
    "95% interval: paired bootstrap-t over questions, which keep their turns and repeats (over batches of "
    "questions, where these were run together)"
)

DEFINITIONS = {
    "run": "The run's name.",
    "method": "The method's label: its normalised SPEC; `vanilla` is the baseline, `vanilla-again` the baseline "
    "measured once more.",
    "state": "`cold` if the method forgets each prompt before the next, `warm` if it keeps what earlier prompts "
    "taught it, `mixed` if trials differ.",
    "task": "The task, or `overall` for all tasks together.",
    "category": "The category within the task; none for the whole task.",
    "batch_size": "Prompts decoded together in one batch.",
    "concurrency": "Requests in flight at once at a serving engine; none where batches were asked for instead.",
    "prompts": "Distinct questions with at least one trial that counts.",
    "trials": "All trials, failed and excluded ones included.",
    "failed": "Trials that ended in an error; their batches count in no estimate.",
    "excluded": "Trials of a disturbed first attempt (`contended`, `throttled`, `captured`), repeated once and not "
    "counted.",
    "outliers": "Trials that count although their decode seconds a round (a token, where rounds are unknown) "
    f"are more than {OUTLYING:g} robust standard deviations from the median of the method's trials on that task "
    f"(in logs; 1.4826 × the median absolute deviation, at least {LEAST_SPREAD:.0%}; from {LEAST_TRIALS} trials "
    "on): flagged and kept.",
    "tokens": "Output tokens of the trials that count; EOS counts once, nothing after it.",
    "tau": "Tokens per round τ = emitted tokens / rounds after the prefill, over all rounds, the target's own "
    "bonus token included (Spec-Bench's mean accepted tokens); vanilla is 1. 95% interval: bootstrap-t over "
    "questions, its low end at least 1, which each round emits.",
    "tau_drafted": "Emitted tokens / rounds over the rounds that had a draft, bonus included (what vLLM's "
    "counters give).",
    "alpha": "Accepted length α = accepted drafted tokens / rounds, over all rounds, bonus excluded.",
    "acceptance_rate": "Accepted drafted tokens / drafted tokens; all nodes of a tree are drafted tokens.",
    "acceptance_by_position": "For each position i from 1: rounds that accepted at least i tokens / rounds whose "
    "draft reached depth i.",
    "conditional_by_position": "For each position i from 1: rounds that accepted at least i tokens / rounds that "
    "accepted at least i - 1, among those whose draft reached depth i.",
    "accepted_histogram": "For each number from 0: the rounds that accepted exactly that many drafted tokens.",
    "speedup": "(Σ vanilla's seconds / Σ vanilla's tokens) / (Σ the method's seconds / Σ the method's tokens), end "
    f"to end, {_OVER}, each batch's seconds once: a ratio of sums, whose bias falls with the number n of questions "
    f"(in simulated runs +0.3% to +0.7% at n = 20, under 0.2% from n = 80 on). {_PAIRED}.",
    "decode_speedup": "The same of the decode alone: seconds and tokens after the first token, without the pass "
    f"over the prompt. {_PAIRED}.",
    "geomean_speedup": "Geometric mean of the questions' own end-to-end speedups, each question equally.",
    "spec_bench_speedup": "Spec-Bench's formula, for comparison with its leaderboard: mean over questions of the "
    "method's tokens/s / mean over questions of vanilla's tokens/s; above the ratio of sums where short or easy "
    "questions gain more.",
    "predicted_speedup": "Decode speedup that the parts of a round give: τ / (draft seconds a round / vanilla's "
    "seconds a round + verify inflation).",
    "predicted_residual": "Measured decode speedup / predicted speedup - 1: what the harness itself takes "
    "(negative) or what the parts do not explain.",
    "closed_form_speedup": "Leviathan's closed form (1 + p·(a + a² + … + a^k)) / (1 + p·c·k), for chains only: p the "
    "share of the rounds that had a draft (where all had, it is (1 - a^(k+1)) / ((1 - a)(c·k + 1))), k the usual "
    "depth of the drafts, a the acceptance of one token at which the drafts accept as many as they did on average, "
    "c the draft seconds of a drafted position / vanilla's seconds a round.",
    "best_k": f"The draft depth from 1 to {LONGEST} at which that closed form is largest.",
    "free_draft_limit": "τ / verify inflation: the decode speedup if drafting cost nothing.",
    "roofline_limit": "τ · floor of vanilla's pass / floor of the method's pass: the decode speedup that the "
    "device's memory bandwidth and matmul rate allow if drafting costs nothing.",
    "tokens_per_s": "Σ output tokens / Σ seconds, end to end, each batch's seconds once; not comparable across "
    "machines.",
    "ttft_s": "Mean seconds to the first token of a request.",
    "ttft": "Median, 95th and 99th percentile of the seconds to the first token of a request.",
    "tpot_s": "Σ decode seconds / Σ decoded tokens of the requests: seconds per token after the first.",
    "itl_s": "Inter-token latency: median, 95th and 99th percentile of the seconds before each decoded token as a "
    "streaming client sees them; a round's tokens arrive together, so its first one waits the whole round and "
    "the others 0.",
    "round_s": "Median, 95th and 99th percentile of the seconds of a round, each round of a batch once.",
    "draft_share": "Draft overhead: Σ seconds spent drafting / Σ decode seconds.",
    "verify_share": "Σ seconds of the target's forward passes / Σ decode seconds.",
    "accept_share": "Σ seconds spent deciding which tokens to keep / Σ decode seconds.",
    "other_share": "Σ decode seconds in no other part / Σ decode seconds.",
    "verify_inflation": "Mean seconds of the method's verify pass / mean seconds of vanilla's, over the same "
    "batches.",
    "experts": "Of a mixture of experts: how many different ones a verify pass woke, mean over its MoE layers and "
    "over passes; vanilla at batch size 1 wakes only those of one token.",
    "weights_bytes": "Bytes of the weights of target and drafter.",
    "kv_bytes": "Bytes of the key-value caches of target and drafter.",
    "peak_bytes": "Most bytes held while generating alone with the target: weights plus what the generation added.",
    "memory_overhead_bytes": "Peak bytes - vanilla's peak bytes.",
    "joules_per_token": "Σ joules of the GPU / Σ output tokens, over the batches whose energy is known.",
    "roofline_share": "Σ floors of the verify passes (the larger of bytes that must be read / measured bandwidth "
    "and operations / measured matmul rate; weights once, woken experts, keys and values) / Σ their seconds.",
    "lossless": "Whether the method promises the target's own output (greedy) or distribution (sampling).",
    "identical": "Greedy outputs identical to vanilla's, of those compared.",
    "compared": "Greedy outputs compared with vanilla's, token by token.",
    "near_ties": "Outputs that first differ where the target's top two logits are within "
    f"{NEAR_TIE:g} of each other, so that rounding decides.",
    "first_difference_median": "Median index of the first token that differs, over the outputs that differ.",
}
"""Field of a summary row -> its meaning."""
