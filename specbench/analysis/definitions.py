"""What each field of a summary row means, in one plain sentence each: printed by reports, and the row's order."""

from __future__ import annotations

from specbench.analysis.closed_form import LONGEST
from specbench.analysis.open_loop import LEAST, PILING, RAMP
from specbench.analysis.steadiness import LEAST_SPREAD, LEAST_TRIALS, OUTLYING
from specbench.thresholds import NEAR_TIE

_OVER = "over the batches that both vanilla and the method measured"
_PAIRED = (
    "95% interval: paired bootstrap-t over questions, which keep their turns and repeats (over batches or "
    "blocks of questions, where these were in flight together)"
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
    "request_rate": "Requests sent a second to a serving engine at random moments (a Poisson process), whatever is "
    "in flight: the rate offered; none where the next request waits for an answer (a closed loop).",
    "prompts": "Distinct questions with at least one trial that counts.",
    "clusters": "What the speedup's interval rests on: the questions that both vanilla and the method measured or, "
    "where some were in flight together, the batches or blocks of them.",
    "trials": "All trials, failed and excluded ones included.",
    "failed": "Trials that ended in an error; their batches count in no estimate. Of requests at an engine, beside "
    "each other, the others count, save in what needs the whole batch: throughput and speedup. What is no ratio to "
    "vanilla (τ, acceptance, latencies, identical outputs) is then over those that the method itself answered, which "
    "may be others than vanilla's.",
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
    "counts_source": "Where a serving engine's counts of accepted and drafted tokens come from: `response` its "
    "answer to each request, `metrics-delta` its counters before and after each block, `derived` what must follow "
    "from tokens and steps, `none` it does not tell, so that they are unknown, `mixed` if trials differ; none for "
    "specbench's own loop, which counts every round.",
    "counts_scope": "`request` if those counts are each request's own; `server` if they are of all requests that "
    "were in flight, shared out by output tokens: only their sums are measured.",
    "alpha": "Accepted length α = accepted drafted tokens / rounds, over all rounds, bonus excluded.",
    "acceptance_rate": "Accepted drafted tokens / drafted tokens; all nodes of a tree are drafted tokens.",
    "acceptance_by_position": "For each position i from 1: rounds that accepted at least i tokens / rounds whose "
    "draft reached depth i.",
    "conditional_by_position": "For each position i from 1: rounds that accepted at least i tokens / rounds that "
    "accepted at least i - 1, among those whose draft reached depth i.",
    "accepted_histogram": "For each number from 0: the rounds that accepted exactly that many drafted tokens.",
    "speedup": "(Σ vanilla's seconds / Σ vanilla's tokens) / (Σ the method's seconds / Σ the method's tokens), end "
    f"to end, {_OVER}, each batch's seconds once: a ratio of sums. At a request rate the "
    "moments of sending set how long a batch takes, so there the seconds are those of the requests, each from its "
    f"sending to its last token: the speedup is of the latency per token, not of the throughput. {_PAIRED}.",
    "speedup_bias": "By what share of itself the speedup reads too high on average at so many questions (too low, if "
    "negative), which is in the nature of a ratio of sums: jackknife over questions, itself good to about half a "
    "percentage point at n = 20, and none where it does not exceed its own standard error. Speedup · (1 - bias) is "
    "rid of it. It falls with n: in simulated runs +0.3% to +0.7% at n = 20, under 0.2% from n = 80 on. The "
    "interval allows for it.",
    "decode_speedup": "The same of the decode alone: seconds and tokens after the first token (of a served "
    f"stream: after its first event, which may bring several), without the pass over the prompt. {_PAIRED}.",
    "geomean_speedup": "Geometric mean of the questions' own end-to-end speedups, each question equally; of the "
    "batches' or blocks' own, where questions were in flight together.",
    "spec_bench_speedup": "Spec-Bench's formula, for comparison with its leaderboard: mean over questions of the "
    "method's tokens/s / mean over questions of vanilla's tokens/s; above the ratio of sums where short or easy "
    "questions gain more. Over batches or blocks, where questions were in flight together.",
    "pass_gain": "(Tokens decoded / target passes of a batch) / the same of vanilla, sums "
    f"{_OVER}: τ at batch size 1. A batch takes as many passes as its longest row, so at a larger batch size it is "
    "this, not τ (which is over the rounds of every row), that bounds the decode speedup.",
    "predicted_speedup": "Decode speedup that the parts of a round give: tokens per pass over vanilla's (τ at batch "
    "size 1) / (draft seconds a round / vanilla's seconds a round + verify inflation).",
    "predicted_residual": "Measured decode speedup / predicted speedup - 1: what the harness itself takes "
    "(negative) or what the parts do not explain.",
    "closed_form_speedup": "Leviathan's closed form (1 + p·(a + a² + … + a^k)) / (1 + p·c·k), for chains only: p the "
    "share of the rounds that had a draft (where all had, it is (1 - a^(k+1)) / ((1 - a)(c·k + 1))), k the usual "
    "depth of the drafts, a the acceptance of one token at which the drafts accept as many as they did on average, "
    "c the draft seconds of a drafted position / vanilla's seconds a round.",
    "best_k": f"The draft depth from 1 to {LONGEST} at which that closed form is largest.",
    "free_draft_limit": "Tokens per pass over vanilla's (τ at batch size 1) / verify inflation: the decode speedup "
    "if drafting cost nothing.",
    "roofline_limit": "Tokens per pass over vanilla's (τ at batch size 1) · floor of vanilla's pass / floor "
    "of the method's pass: the decode speedup that the device's memory bandwidth and matmul rate allow if drafting "
    "costs nothing and the passes of both take their floors. Where vanilla's are further from theirs, a measured "
    "speedup can exceed it.",
    "tokens_per_s": "Σ output tokens / Σ seconds, end to end, each batch's seconds once: of the whole server, where "
    "several requests are in flight; at a request rate it is bounded by that rate. Not comparable across machines.",
    "requests_per_s": "Requests answered / Σ seconds, end to end, each batch's seconds once; it differs from a "
    "request rate even where the server keeps up, by the chance of the arrivals, the wait for the last answers and, "
    "in short blocks, because n requests are sent within n - 1 gaps.",
    "queue_growth": "At a request rate: how much the number of unanswered requests rises with each one sent, after "
    f"the first {RAMP:.0%} of a block (slope of least squares); near 0 the server keeps up, from {PILING:g} on a "
    "queue grows and latencies depend on how long one measures. None where blocks are under "
    f"{LEAST} requests, or where it reaches that though later requests take no longer than earlier ones: then the "
    "block is still filling.",
    "latency_s": "Mean seconds of a request, from its sending to its last token.",
    "ttft_s": "Mean seconds to the first token of a request.",
    "ttft": "Median, 95th and 99th percentile of the seconds to the first token of a request.",
    "tpot_s": "Σ decode seconds / Σ decoded tokens of the requests: seconds per token after the first (of "
    "a served stream: after its first event).",
    "itl_s": "Inter-token latency: median, 95th and 99th percentile of the seconds before each decoded token as a "
    "streaming client sees them; a round's tokens arrive together, so its first one waits the whole round and "
    "the others 0. Requests whose engine does not tell how many tokens came at a time are left out.",
    "round_s": "Median, 95th and 99th percentile of the seconds of a round, each round of a batch once; none where "
    "an engine tells only a request's mean.",
    "draft_share": "Draft overhead: Σ seconds spent drafting / Σ decode seconds.",
    "verify_share": "Σ seconds of the target's forward passes / Σ decode seconds.",
    "accept_share": "Σ seconds spent deciding which tokens to keep / Σ decode seconds.",
    "other_share": "Σ decode seconds in no other part / Σ decode seconds.",
    "verify_inflation": "Mean seconds of the method's verify pass / mean seconds of vanilla's, over the same "
    "batches.",
    "experts": "Of a mixture of experts: how many different ones a verify pass woke, mean over its MoE layers and "
    "over passes; vanilla at batch size 1 wakes only those of one token.",
    "weights_bytes": "Bytes of the weights of target and drafter, with the copies packed for a CPU's kernels.",
    "draft_weights_bytes": "Of these the drafter's own.",
    "kv_bytes": "Bytes of the key-value caches of target and drafter.",
    "graph_bytes": "Most bytes that CUDA graphs held at the end of one of the method's trials: those of the target, "
    "which all methods make and share, and those of the method's own drafter; inputs, outputs and what capturing "
    "reserved, while none runs.",
    "peak_bytes": "Most bytes held while generating alone with the target: weights plus what the generation added.",
    "memory_overhead_bytes": "Peak bytes - vanilla's peak bytes.",
    "joules_per_token": "Σ joules of the GPU / Σ output tokens, over the batches whose energy is known.",
    "roofline_share": "Σ floors of the verify passes (the larger of bytes that must be read / measured bandwidth, "
    "of copying or of reading, whichever is faster, and operations / measured matmul rate; weights once, woken "
    "experts, keys and values) / Σ their seconds.",
    "lossless": "Whether the method promises the target's own output (greedy) or distribution (sampling).",
    "identical": "Greedy outputs identical to vanilla's, of those compared.",
    "compared": "Greedy outputs compared with vanilla's, by token ids where there are some, else by text.",
    "compared_by": "How the outputs were compared: `ids` token by token, `text` where an engine sends no ids, "
    "`mixed` if trials differ.",
    "identical_text": "Greedy outputs whose text is identical to vanilla's, of the texts compared (of serving "
    "engines, beside their ids).",
    "compared_text": "Greedy outputs whose texts were compared.",
    "near_ties": "Outputs that first differ where the target's top two logits are within "
    f"{NEAR_TIE:g} of each other, so that rounding decides.",
    "first_difference_median": "Median index of the first token that differs, over the outputs that differ.",
}
"""Field of a summary row -> its meaning."""
