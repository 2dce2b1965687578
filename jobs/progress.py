"""The live view of a run: a progress bar on a terminal, a line every few seconds elsewhere. Never stdout: stdout is
data."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 5.0


class RunProgress:
    """Shows done, failed, mean reward, tokens/s and what is in flight."""

    def __init__(self, title: str, total: int, done: int = 0, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
        self._title = title
        self._total = total
        self._done = done
        self._began = time.monotonic()
        self._start_done = done
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        self._quiet = quiet
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
                console=self._console,
                transient=False,
            )
            self._task = self._bar.add_task(title, total=total, completed=done, facts="")

    def __enter__(self) -> RunProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, *, done: int, failed: int, reward: float | None, tokens_per_s: float, in_flight: int) -> None:
        """Show the current figures."""
        self._done = done
        facts = f"failed {failed}  reward {'-' if reward is None else f'{reward:.3f}'}  {tokens_per_s:,.0f} tok/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, facts=facts)
            return
        now = time.monotonic()
        if self._quiet or now - self._last_line < LINE_EVERY_S:
            return
        self._last_line = now
        rate = (done - self._start_done) / max(1e-9, now - self._began)
        eta = f"{(self._total - done) / rate:.0f} s left" if rate > 0 else "no estimate yet"
        self._console.print(
            f"{self._title}: {done}/{self._total}  {facts}  in flight {in_flight}  {eta}", highlight=False
        )
