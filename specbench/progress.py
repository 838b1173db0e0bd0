"""What a run shows on standard error while it goes: blocks, time left, and the speedup so far."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from specbench.build import VANILLA

if TYPE_CHECKING:
    from specbench.plan import Block
    from specbench.store import Trial

PLAIN_EVERY_S = 20
SAID = 60  # characters of what goes on


class Progress:
    """A bar on a terminal, a line now and then elsewhere (CI logs), nothing when not `enabled`."""

    def __init__(
        self, console: Console, blocks: Sequence[Block], done: Sequence[Trial], *, enabled: bool
    ) -> None:
        self._console, self._total = console, len(blocks)
        self._finished = len({trial.block for trial in done})
        self._skipped = self._finished
        self._began = self._last_line = time.monotonic()
        # Seconds and tokens so far, by method: a glimpse, not the estimate.
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._plain = enabled and not console.is_terminal
        self._bar: Bar | None = None
        if enabled and console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(elapsed_when_finished=False),
                TextColumn("{task.fields[live]}"),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                "warming up", total=self._total, completed=self._finished, live=""
            )
        elif self._plain:
            self._console.print(
                f"warming up; {self._total - self._finished} blocks to measure", soft_wrap=True
            )
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Something that goes on before or between blocks: a server that starts."""
        if self._bar is not None:
            self._bar.update(self._task, description=text[:SAID])
        elif self._plain and time.monotonic() - self._last_line > PLAIN_EVERY_S:
            self._last_line = time.monotonic()
            self._console.print(text, markup=False, soft_wrap=True)

    def block_done(self, block: Block, rows: Sequence[Trial]) -> None:
        """Count a block whose rows are on disk."""
        self._finished += 1
        for row in {row.method: row for row in rows if not (row.error or row.excluded)}.values():
            self._sums[row.method][0] += row.batch_s or 0.0
        for row in rows:
            if not (row.error or row.excluded):
                self._sums[row.method][1] += row.output_tokens
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=block.task.name, live=self._live())
        elif self._plain and time.monotonic() - self._last_line > PLAIN_EVERY_S:
            self._last_line = time.monotonic()
            self._console.print(
                f"{self._finished}/{self._total} blocks, {self._left()} left  {self._live()}", soft_wrap=True
            )

    def _left(self) -> str:
        done = self._finished - self._skipped
        seconds = (time.monotonic() - self._began) / max(done, 1) * (self._total - self._finished)
        return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"

    def _live(self) -> str:
        seconds, tokens = self._sums[VANILLA]
        if not tokens:
            return ""
        pieces = [f"vanilla {tokens / seconds:.1f} tok/s"] if seconds else []
        for method, (s, n) in self._sums.items():
            if method != VANILLA and s and n:
                pieces.append(f"{method.partition(':')[0]} {(seconds / tokens) / (s / n):.2f}x")
        return ", ".join(pieces[:4])
