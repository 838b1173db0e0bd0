"""A machine whose speedup is known: trials of simulated questions, to see whether estimates find the truth.

Questions are drawn anew in every simulated run from a population in which prompts, answers' lengths and
acceptance differ; the truth is the population's own ratio of sums. Times follow known costs, with noise,
outliers and a clock that slows down over the run, in the order of the real schedule (`specbench.plan`).

A ratio of sums is biased by about bias₁/n, upwards here: bias₁, a property of the population, follows from the delta
method (`bias_of`) and is what the simulated runs show. At 20 questions the speedup reads 0.3% (even), 0.5% (spread)
and 0.7% (skewed) too high, at 80 and more under 0.2%: a small part of its interval (`spread`: ±17% at 20, ±8% at 80).
Each run's own estimate of it, `speedup_bias`, is right on average: what it leaves over is under 0.2% at 20 too.

As a script it prints what the intervals cover: `python tests/simulator.py [RUNS]`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from specbench.analysis.intervals import RATIO, SPEEDUP, Estimate, half_width, jackknife_bias, ratio_of_sums
from specbench.config import RunConfig
from specbench.plan import in_order, plan
from specbench.questions import Question, Task
from specbench.store import Rounds, Trial

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TASK = "simulated"
METHODS = {"vanilla": 0, "draft-2": 2, "draft-4": 4, "draft-6": 6}  # label: tokens drafted a round
JUDGED = "draft-6"  # the farthest from vanilla in the order
PAIR = ("vanilla", JUDGED)
NEW_TOKENS = 256
CHUNK = 1_000  # questions at once


@dataclass(frozen=True)
class Population:
    """What questions are drawn from. A drafted token is accepted with the question's own probability, which
    is Beta(`likes`, `dislikes`), or, for the share `easy` of the questions, 0.97."""

    likes: float
    dislikes: float
    easy: float = 0.0

    def draw(self, count: int, generator: np.random.Generator) -> tuple[Ints, Ints, Floats]:
        """Prompt tokens, output tokens and acceptance of `count` questions."""
        prompt = np.ceil(generator.lognormal(5.0, 0.8, count)).astype(np.int64)
        tokens = np.clip(np.ceil(generator.lognormal(4.3, 0.7, count)), 2, NEW_TOKENS).astype(np.int64)
        rate = generator.beta(self.likes, self.dislikes, count)
        return prompt, tokens, np.where(generator.random(count) < self.easy, 0.97, np.minimum(rate, 0.97))


@dataclass(frozen=True)
class Machine:
    """Costs in seconds, and what disturbs them."""

    prefill_s: float = 1e-4  # a prompt token
    pass_s: float = 2e-2  # a pass of the target over one token
    wider: float = 0.01  # each drafted token makes it longer by this share
    draft_s: float = 6e-4  # a drafted token
    other_s: float = 4e-4  # a round
    noise: float = 0.02  # of a trial, standard deviation of its log
    outliers: float = 0.02  # share of the trials that take half as long again
    drift: float = 0.0  # by how much the last trial of the run is slower than the first


EVEN = Population(20, 12)  # like a learned drafter's: questions' τ differ by a quarter
SPREAD = Population(8, 5.5)  # by a third
SKEWED = Population(1.5, 6, easy=0.08)  # like prompt-lookup's: a few questions accept nearly everything


@dataclass(frozen=True)
class Decoded:
    """The rounds of one method on some questions, [questions, rounds]; `real` marks those that took place."""

    depth: Ints
    accepted: Ints
    real: NDArray[np.bool_]

    @property
    def rounds(self) -> Ints:
        return self.real.sum(axis=1)

    def cost(self, machine: Machine) -> dict[str, Floats]:
        """Undisturbed seconds of draft, verify and other, [questions, rounds]."""
        return {
            "draft": self.real * machine.draft_s * self.depth,
            "verify": self.real * machine.pass_s * (1 + machine.wider * self.depth),
            "other": self.real * machine.other_s,
        }


def decode(tokens: Ints, rate: Floats, depth: int, generator: np.random.Generator) -> Decoded:
    """Draft-verify rounds until each question has its tokens; the first came with the prefill."""
    shape = (len(tokens), int(tokens.max()) - 1)
    if depth:  # a floored exponential is geometric: tokens accepted in a row
        run = generator.standard_exponential(shape) / -np.log(rate)[:, None]
        emitted = np.minimum(run, depth).astype(np.int64) + 1
    else:
        emitted = np.ones(shape, dtype=np.int64)
    left = (tokens - 1)[:, None] - (np.cumsum(emitted, axis=1) - emitted)  # before each round
    real = left > 0
    width = int(real.sum(axis=1).max())
    left, emitted, real = left[:, :width], emitted[:, :width], real[:, :width]
    depths = np.where(real, np.minimum(depth, left - 1), 0)
    return Decoded(depths, np.where(real, np.minimum(emitted - 1, depths), 0), real)


@dataclass(frozen=True)
class Simulated:
    """One run: per block, the question's numbers and what each method did with it in how many seconds."""

    machine: Machine
    prompt: Ints
    tokens: Ints
    decoded: dict[str, Decoded]
    factor: dict[str, Floats]  # what noise, outliers and drift made of each trial's seconds

    def seconds(self, method: str) -> tuple[Floats, Floats]:
        """Prefill and decode of each block."""
        cost = sum(part.sum(axis=1) for part in self.decoded[method].cost(self.machine).values())
        return self.prompt * self.machine.prefill_s * self.factor[method], cost * self.factor[method]

    def steady(self) -> Simulated:
        """The same run on a machine that does not drift."""
        drift = {method: 1 + self.machine.drift * when for method, when in moments(len(self.tokens)).items()}
        return replace(
            self, factor={method: factor / drift[method] for method, factor in self.factor.items()}
        )

    def speed_sums(self, method: str) -> Floats:
        """[questions, 4], as `intervals.SPEEDUP` wants them, end to end."""
        columns = [c for m in ("vanilla", method) for c in (sum(self.seconds(m)), self.tokens)]
        return np.stack(columns, axis=1).astype(np.float64)

    def tau_sums(self, method: str) -> Floats:
        """[questions, 2]: emitted after the prefill, rounds."""
        return np.stack([self.tokens - 1, self.decoded[method].rounds], axis=1).astype(np.float64)


def simulate(
    questions: int,
    generator: np.random.Generator,
    population: Population = SPREAD,
    machine: Machine = Machine(),
    methods: Sequence[str] = tuple(METHODS),
) -> Simulated:
    """One run over questions drawn anew; only `methods` are worked out, the others just take their turns."""
    prompt, tokens, rate = population.draw(questions, generator)
    decoded = {method: decode(tokens, rate, METHODS[method], generator) for method in methods}
    when = moments(questions)
    factor = {}
    for method in methods:
        noise = generator.lognormal(-(machine.noise**2) / 2, machine.noise, questions)
        slow = np.where(generator.random(questions) < machine.outliers, 1.5, 1.0)
        factor[method] = noise * slow * (1 + machine.drift * when[method])
    return Simulated(machine, prompt, tokens, decoded, factor)


@lru_cache
def schedule(questions: int) -> tuple[tuple[str, ...], ...]:
    """The methods in the order of each block, from the real plan."""
    asked = tuple(Question(f"q{i:05}", TASK, None, ("?",)) for i in range(questions))
    config = RunConfig(target="simulated", methods=(), tasks=(TASK,))
    blocks = plan(config, [Task(TASK, "", "", NEW_TOKENS, asked, "", "")])
    return tuple(tuple(in_order(list(METHODS), block)) for block in blocks)


@lru_cache
def moments(questions: int) -> dict[str, Floats]:
    """When each method's turn comes in each block, from 0 (the run's first trial) to 1 (its last)."""
    orders = schedule(questions)
    last = len(orders) * len(METHODS) - 1
    return {
        method: np.array([(i * len(METHODS) + order.index(method)) / last for i, order in enumerate(orders)])
        for method in METHODS
    }


def trials(run: Simulated) -> list[Trial]:
    """The run as the recorder would have written it."""
    return [
        _trial(run, method, block, order)
        for block, methods in enumerate(schedule(len(run.tokens)))
        for order, method in enumerate(methods)
    ]


def _trial(run: Simulated, method: str, block: int, order: int) -> Trial:
    decoded, factor = run.decoded[method], run.factor[method][block]
    own = slice(0, int(decoded.rounds[block]))
    cost = {name: part[block, own] * factor for name, part in decoded.cost(run.machine).items()}
    prefill, each = float(run.prompt[block] * run.machine.prefill_s * factor), sum(cost.values())
    accepted, depth = decoded.accepted[block, own], decoded.depth[block, own].tolist()
    return Trial(
        task=TASK,
        question=f"q{block:05}",
        category=None,
        turn=0,
        method=method,
        batch_size=1,
        repeat=0,
        block=block,
        batch=f"q{block:05}",
        order=order,
        prompt_tokens=int(run.prompt[block]),
        output_tokens=int(run.tokens[block]),
        finish="length" if run.tokens[block] == NEW_TOKENS else "eos",
        prefill_s=prefill,
        decode_s=float(each.sum()),
        batch_s=prefill + float(each.sum()),
        total_s=prefill + float(each.sum()),
        spans={"accept": 0.0} | {name: float(part.sum()) for name, part in cost.items()},
        rounds=Rounds(
            drafted=depth,
            depth=depth,
            accepted=accepted.tolist(),
            emitted=(accepted + 1).tolist(),
            draft_s=cost["draft"].tolist(),
            verify_s=cost["verify"].tolist(),
            round_s=each.tolist(),
        ),
        lossless=True,
    )


# -- the study -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """The population's means of the columns that speedup and τ are made of, and n times the bias of a speedup from
    n questions, as a share of the truth."""

    speed: Floats
    tau: Floats
    bias: float

    @property
    def speedup(self) -> float:
        return float(np.exp(np.log(self.speed) @ np.array(SPEEDUP)))

    @property
    def tokens_per_round(self) -> float:
        return float(self.tau[0] / self.tau[1])


@lru_cache
def truth(population: Population, questions: int = 200_000, seed: int = 99) -> Truth:
    """From many questions on a machine that does not drift: known to about 0.1%."""
    generator = np.random.default_rng(seed)
    runs = (simulate(CHUNK, generator, population, methods=PAIR) for _ in range(questions // CHUNK))
    speed, tau = map(
        np.concatenate, zip(*((run.speed_sums(JUDGED), run.tau_sums(JUDGED)) for run in runs), strict=True)
    )
    return Truth(speed.mean(axis=0), tau.mean(axis=0), bias_of(speed, SPEEDUP))


def bias_of(questions: Floats, signs: tuple[float, ...]) -> float:
    """n times the bias of a ratio of the sums over n such questions, as a share of the ratio, by the delta method.

    With C the columns' covariance as a share of their means, E[log of the ratio] is off by -Σ signᵢ·Cᵢᵢ / 2n, and its
    variance signs·C·signs / n adds half of itself to the mean of the ratio.
    """
    weights, covariance = np.array(signs), np.cov(questions / questions.mean(axis=0), rowvar=False)
    return float(weights @ covariance @ weights - weights @ np.diag(covariance)) / 2


@dataclass(frozen=True)
class Case:
    """One line of the study."""

    name: str
    population: Population
    questions: int
    drift: float


CASES = tuple(
    Case(name, population, questions, drift)
    for name, population in (("even", EVEN), ("spread", SPREAD), ("skewed", SKEWED))
    for questions in (20, 80, 480)
    for drift in (0.0, 0.06)
)


@dataclass(frozen=True)
class Found:
    """What many simulated runs of a case gave: bias of the speedup as a share of the truth, the share of the
    intervals that held the truth, their mean half width as a share of the point, the bias left when each run takes
    its own estimate of it off, and the standard error of the bias found."""

    bias: float
    covered: float
    width: float
    tau_covered: float
    percentile_covered: float
    percentile_width: float
    bias_left: float
    bias_error: float


def study(case: Case, runs: int, seed: int = 7) -> Found:
    """`runs` simulated runs of a case."""
    generator = np.random.default_rng(seed)
    machine, known = Machine(drift=case.drift), truth(case.population)
    lines = []
    for _ in range(runs):
        run = simulate(case.questions, generator, case.population, machine, PAIR)
        sums = run.speed_sums(JUDGED)
        estimate, tau = ratio_of_sums(sums, SPEEDUP), ratio_of_sums(run.tau_sums(JUDGED), RATIO)
        plain = percentile(sums, SPEEDUP)
        luck = (run.steady().speed_sums(JUDGED).mean(axis=0) / known.speed - 1) @ np.array(SPEEDUP)
        read = estimate["point"] / known.speedup
        lines.append(
            (
                # Which questions were drawn moves the estimate, but on average not at all: a control variate.
                read - 1 - luck,
                holds(estimate, known.speedup),
                half_width(estimate),
                holds(tau, known.tokens_per_round),
                holds(plain, known.speedup),
                half_width(plain),
                read * (1 - jackknife_bias(sums, SPEEDUP)) - 1 - luck,
            )
        )
    return Found(*np.mean(lines, axis=0).tolist(), float(np.std(lines, axis=0)[0] / np.sqrt(runs)))


def holds(estimate: Estimate, value: float) -> bool:
    return estimate["low"] <= value <= estimate["high"]


def percentile(sums: Floats, signs: tuple[float, ...]) -> Estimate:
    """The plain percentile bootstrap, for comparison."""
    log = np.log(draws(len(sums)) @ sums) @ np.array(signs)
    low, high = np.exp(np.quantile(log, [0.025, 0.975]))
    return {"low": low, "point": float(np.exp(np.log(sums.sum(axis=0)) @ np.array(signs))), "high": high}


@lru_cache
def draws(count: int) -> Floats:
    """[1000, count]: how often each of `count` questions is drawn."""
    return np.random.default_rng(count).multinomial(count, np.full(count, 1 / count), 1000).astype(np.float64)


def report(runs: int) -> Iterator[str]:
    """The table of the study, a line at a time."""
    yield f"{runs} simulated runs a line; {JUDGED} against vanilla, order of the real schedule"
    yield (
        "questions from   n  drift  truth    bias   theory  left over  covered  ± width  τ covered"
        "  percentile covers  ± width"
    )
    for case in CASES:
        found, known = study(case, runs), truth(case.population)
        theory = known.bias / case.questions
        yield (
            f"{case.name:14} {case.questions:3}  {case.drift:5.0%}  {known.speedup:.3f}  {found.bias:+.2%}"
            f"   {theory:+.2%}     {found.bias_left:+.2%}   {found.covered:6.1%}   {found.width:6.1%}"
            f"     {found.tau_covered:6.1%}             {found.percentile_covered:6.1%}"
            f"   {found.percentile_width:6.1%}"
        )


if __name__ == "__main__":
    for line in report(int(sys.argv[1]) if len(sys.argv) > 1 else 1000):
        print(line, flush=True)
