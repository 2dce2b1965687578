"""RolloutPool: feeds workers with bounded batches and yields finished attempts as they come.

It owns capacity alone. What runs where and what runs again is decided by :class:`~actors.ledger.Ledger`; this module
moves bytes, notices deaths and standstills, and keeps the books closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from actors.ledger import Disposition, Ledger, RetryPolicy
from rayrl.errors import Blame, RayrlError
from rayrl.schemas import EpisodeJob, JsonDict
from rayrl.settings import ExecutionConfig
from rayrl.worker import Attempt, DrainReport, FinishedAttempt, WorkerSpec, failed_without_record

POLL_S = 1.0
STOP_GRACE_S = 25.0
HASTY_GRACE_S = 2.0
CANCEL_PATIENCE_S = 60.0
"""After a cancellation, episodes that have not reported by then are given up."""
MAX_FRUITLESS_DEATHS = 5
"""Workers lost in a row without one finished attempt between them: the spec itself kills them."""


class WorkerBackend(Protocol):
    """How the pool reaches its workers; see :class:`actors.rollout.RayBackend`."""

    def start(self, n: int) -> list[str]: ...  # noqa: D102
    def replace(self, worker: str) -> str: ...  # noqa: D102
    def submit(self, worker: str, attempts: list[Attempt]) -> None: ...  # noqa: D102
    def arm(self, worker: str) -> None: ...  # noqa: D102
    def wait(self, timeout_s: float) -> list[tuple[str, DrainReport | str]]: ...  # noqa: D102
    def cancel(self, worker: str, episode_ids: list[str] | None = None) -> None: ...  # noqa: D102
    def stop(self, grace_s: float = ...) -> list[tuple[str, DrainReport | str]]: ...  # noqa: D102


class RunStalledError(RayrlError):
    """Nothing progressed for ``execution.watchdog_s``; the message names episodes, actors and requests."""

    exit_code = 8


class TooManyFailuresError(RayrlError):
    """So many attempts failed in a row that the endpoint or the environment must be down."""

    exit_code = 6


@dataclass
class _WorkerState:
    target: int
    transitions: int = 0
    active: list[tuple[str, str, int, str, float]] = field(default_factory=list)
    gauges: dict[str, float] = field(default_factory=dict)


class RolloutPool:
    """See the module docstring. Use as a context manager; drive it by iterating :meth:`results`."""

    def __init__(
        self,
        backend: WorkerBackend,
        spec: WorkerSpec,
        execution: ExecutionConfig,
        *,
        on_event: Callable[[JsonDict], None] | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        self.backend = backend
        self.spec = spec
        self.execution = execution
        self.ledger = Ledger(
            RetryPolicy(
                max_attempts=execution.max_attempts,
                max_deadline_attempts=execution.max_deadline_attempts,
                backoff_s=execution.retry_backoff_s,
            )
        )
        self._on_event = on_event or (lambda _: None)
        self.on_tick = on_tick or (lambda: None)
        """Called about once a second from :meth:`results`, also while nothing finishes; may cancel or pause."""
        self._workers: dict[str, _WorkerState] = {}
        self._cancel_at: float | None = None
        self._cancel_requested = False
        self._serials: dict[tuple[str, int], int] = {}
        self._failures_in_a_row = 0
        self._streak_began = 0
        self._last_failure = ""
        self._fruitless_deaths = 0
        self._progress_at = time.monotonic()
        self.peak_in_flight = 0

    def __enter__(self) -> RolloutPool:
        try:
            names = self.backend.start(self.execution.actors)
        except BaseException:
            self.backend.stop(0.0)  # __exit__ is not called when __enter__ fails
            raise
        for name in names:
            self._workers[name] = _WorkerState(self.spec.concurrency)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # somebody who interrupts for the second time does not want to wait; leases left behind expire
        at_once = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close(HASTY_GRACE_S if at_once else STOP_GRACE_S)

    def close(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the workers, giving them ``grace_s`` seconds to release what they hold. Afterwards the gauges say what
        they left open. Idempotent."""
        for worker, report in self.backend.stop(grace_s):
            if isinstance(report, str):
                self._on_event({"event": "worker_stop_failed", "worker": worker, "reason": report})
                continue
            for event in report.events:
                self._on_event({"worker": worker, **event})
            if worker in self._workers:
                self._workers[worker].gauges = report.gauges

    def submit(
        self, jobs: list[EpisodeJob], *, priority: int = 0, attempts_before: dict[str, int] | None = None
    ) -> None:
        """Queue jobs; may be called while :meth:`results` is being iterated. Higher priority first."""
        self.ledger.add(jobs, priority=priority, attempts_before=attempts_before)

    def pause(self) -> None:
        """Start no further attempts; running ones finish."""
        self.ledger.paused = True

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self.ledger.paused = False

    def stop_admitting(self) -> int:
        """Let running episodes finish and start no others (spending cap); returns how many will not start."""
        return self.ledger.cancel_queue()

    def cancel(self) -> None:
        """Cancel everything; safe to call from a signal handler (it only sets a flag)."""
        self._cancel_requested = True

    def gauges(self) -> dict[str, float]:
        """Sums over the workers' last reports, plus the ledger's own."""
        total: dict[str, float] = {"in_flight": float(self.ledger.live), "queued": float(self.ledger.queued)}
        for state in self._workers.values():
            for key, value in state.gauges.items():
                total[key] = total.get(key, 0.0) + value
        return total

    def results(self) -> Iterator[tuple[FinishedAttempt, Disposition]]:
        """Terminal results until nothing is left; each carries what the ledger made of it.

        Raises:
            RunStalledError, TooManyFailuresError, LedgerError: see their docstrings. All are raised after everything
                that had finished was yielded.
        """
        self._progress_at = time.monotonic()
        while not self.ledger.idle:
            self.on_tick()
            self._obey_cancel()
            self._top_up()
            if self.ledger.live == 0:
                if self.ledger.paused or self.ledger.queued:
                    time.sleep(self._nap())
                continue
            for worker, message in self.backend.wait(POLL_S):
                if isinstance(message, str):
                    yield from self._lost(worker, message)
                else:
                    yield from self._reported(worker, message)
            yield from self._check_failures()
            yield from self._check_watchdog()
        self.ledger.check_closed()

    def _top_up(self) -> None:
        now = time.monotonic()
        for name, state in self._workers.items():
            room = state.target + self.execution.prefetch - self.ledger.in_flight(name)
            # small refills would undo the batching, but what waits in the worker must outlast the way there and back;
            # an empty worker is always refilled
            refill = min(16, state.target // 4, self.execution.prefetch // 2)
            if room >= max(1, refill) or self.ledger.in_flight(name) == 0:
                attempts = self.ledger.take(name, room, now)
                if attempts:
                    last = self.ledger.counts.admitted
                    for serial, attempt in enumerate(attempts, last - len(attempts) + 1):
                        self._serials[(attempt.job.episode_id, attempt.number)] = serial
                    self.backend.submit(name, attempts)
            if self.ledger.in_flight(name):
                self.backend.arm(name)
        self.peak_in_flight = max(self.peak_in_flight, self.ledger.live)

    def _reported(self, worker: str, report: DrainReport) -> Iterator[tuple[FinishedAttempt, Disposition]]:
        state = self._workers[worker]
        if report.transitions != state.transitions or report.finished:
            self._progress_at = time.monotonic()
        state.target, state.transitions = report.target, report.transitions
        state.active, state.gauges = report.active, report.gauges
        for event in report.events:
            self._on_event({"worker": worker, **event})
        if self.ledger.in_flight(worker) > len(report.finished):
            self.backend.arm(worker)  # the worker goes on while the driver writes
        for finished in report.finished:
            self._fruitless_deaths = 0
            yield from self._account(worker, finished)

    def _account(self, worker: str, finished: FinishedAttempt) -> Iterator[tuple[FinishedAttempt, Disposition]]:
        disposition = self.ledger.finished(worker, finished, time.monotonic())
        serial = self._serials.pop((finished.episode_id, finished.number), 0)
        if finished.status == "failed":
            # one incident fails everything in flight at once: only attempts that began after the first failure say
            # that it lasts
            if self._failures_in_a_row == 0:
                self._streak_began = self.ledger.counts.admitted
                self._failures_in_a_row = 1
            elif serial > self._streak_began:
                self._failures_in_a_row += 1
            self._last_failure = f"{finished.code}: {finished.message}"
            self._on_event(
                {
                    "event": "attempt_failed",
                    "worker": worker,
                    "episode_id": finished.episode_id,
                    "attempt": finished.number,
                    "class": finished.blame,
                    "code": finished.code,
                    "message": finished.message,
                    "disposition": disposition.value,
                }
            )
        elif finished.status == "completed":
            self._failures_in_a_row = 0
        if disposition is Disposition.DUPLICATE:
            self._on_event({"event": "duplicate", "worker": worker, "episode_id": finished.episode_id})
        yield finished, disposition

    def _check_failures(self) -> Iterator[tuple[FinishedAttempt, Disposition]]:
        if self._failures_in_a_row < self.execution.max_consecutive_failures or self._cancel_requested:
            return
        count = self._failures_in_a_row
        yield from self._wind_down()
        raise TooManyFailuresError(
            f"{count} attempts in a row failed; the last one with {self._last_failure}. The run is stopped so that it "
            "can be resumed once the cause is mended (`rayrl doctor CONFIG` checks endpoint and environment)"
        )

    def _lost(self, worker: str, reason: str) -> Iterator[tuple[FinishedAttempt, Disposition]]:
        held = self.ledger.held_by(worker)
        self._on_event({"event": "worker_lost", "worker": worker, "reason": reason, "attempts": len(held)})
        self._fruitless_deaths += 1
        del self._workers[worker]
        # the replacement first kills the old actor, so that no late result can come from it
        failure: RayrlError | None = None
        if not self._cancel_requested:
            try:
                self._replace(worker, reason)
            except RayrlError as error:
                failure = error
        yield from self._give_up(worker, held, reason)
        if failure is not None and not self._workers:
            raise failure

    def _replace(self, worker: str, reason: str) -> None:
        if self._fruitless_deaths > MAX_FRUITLESS_DEATHS:
            raise RayrlError(f"{self._fruitless_deaths} workers in a row died without finishing anything: {reason}")
        name = self.backend.replace(worker)
        self._workers[name] = _WorkerState(self.spec.concurrency)
        self._on_event({"event": "worker_replaced", "worker": worker, "by": name})

    def _give_up(self, worker: str, held: list[Attempt], reason: str) -> Iterator[tuple[FinishedAttempt, Disposition]]:
        """Terminal records for attempts whose worker cannot tell any more."""
        for attempt in held:
            self._serials.pop((attempt.job.episode_id, attempt.number), None)
            result = failed_without_record(
                attempt, self.spec.provenance, blame=Blame.INFRASTRUCTURE, code="worker_died", message=reason
            )
            yield result, self.ledger.finished(worker, result, time.monotonic())

    def _obey_cancel(self) -> None:
        if self._cancel_requested and self._cancel_at is None:
            self._cancel_at = time.monotonic()
            self.ledger.cancel_queue()
            for name in self._workers:
                self.backend.cancel(name)

    def _wind_down(self, timeout_s: float = 30.0) -> Iterator[tuple[FinishedAttempt, Disposition]]:
        """Cancel all, collect what still reports, and give up the rest, so that the ledger closes."""
        self._cancel_requested = True
        self._obey_cancel()
        until = time.monotonic() + timeout_s
        while self.ledger.live and time.monotonic() < until:
            for name in self._workers:
                if self.ledger.in_flight(name):
                    self.backend.arm(name)
            for worker, message in self.backend.wait(POLL_S):
                if isinstance(message, str):
                    yield from self._lost(worker, message)
                else:
                    yield from self._reported(worker, message)
        for name in list(self._workers):
            yield from self._give_up(name, self.ledger.held_by(name), "did not answer to cancellation")
        self.ledger.check_closed()

    def _check_watchdog(self) -> Iterator[tuple[FinishedAttempt, Disposition]]:
        now = time.monotonic()
        if self.ledger.paused:
            self._progress_at = now
        if self._cancel_at is not None and now - self._cancel_at > CANCEL_PATIENCE_S:
            yield from self._wind_down(5.0)
            return
        if now - self._progress_at <= self.execution.watchdog_s:
            return
        hanging = [
            f"{episode} ({stage} {request}, step {step}, {age:.0f} s) on {name}"
            for name, state in self._workers.items()
            for episode, stage, step, request, age in sorted(state.active, key=lambda a: -a[4])[:3]
        ]
        what = "; ".join(hanging) or "no worker reports an active episode"
        self._on_event({"event": "watchdog", "hanging": hanging})
        yield from self._wind_down(5.0)
        raise RunStalledError(f"nothing progressed for {self.execution.watchdog_s:g} s. Oldest: {what}")

    def _nap(self) -> float:
        wake = self.ledger.next_wake()
        return 0.1 if wake is None else min(0.5, max(0.01, wake - time.monotonic()))
