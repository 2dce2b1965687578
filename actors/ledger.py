"""The ledger of a pool: a pure state machine that decides what runs where, what runs again, and whether it all adds up.

No tasks, no Ray, no clock of its own (time is passed in). Invariants:

* every admitted attempt gets exactly one terminal record: at exit ``admitted == completed + failed + cancelled``;
* an episode has at most one live attempt; the first complete attempt wins, anything later is a duplicate;
* attempts are numbered per episode, across resumes too;
* higher priority first, then submission order; a failed episode waits out its back-off and goes first among its equals.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import Enum

from rayrl.errors import LedgerError
from rayrl.schemas import EpisodeJob
from rayrl.worker import Attempt, FinishedAttempt

MAX_BACKOFF_S = 30.0


@dataclass(frozen=True)
class RetryPolicy:
    """How often an episode may be attempted."""

    max_attempts: int = 3
    max_deadline_attempts: int = 2
    max_worker_deaths: int = 5
    backoff_s: float = 0.5

    def delay(self, attempts: int) -> float:
        """Seconds to wait after ``attempts`` failed attempts."""
        return min(MAX_BACKOFF_S, self.backoff_s * 2.0 ** max(0, attempts - 1))


class Disposition(Enum):
    """What became of a finished attempt."""

    ACCEPTED = "accepted"
    """The episode is complete."""
    RETRY = "retry"
    """Recorded as failed; the episode will be attempted again."""
    GAVE_UP = "gave_up"
    """Recorded as failed; the episode is set aside."""
    CANCELLED = "cancelled"
    """Recorded as cancelled."""
    DUPLICATE = "duplicate"
    """A late result of an attempt that was given up for lost; recorded nowhere but in the events."""


NOT_RETRYABLE = frozenset({"http_status", "reset_bad_task", "environment_version", "observation_version"})
"""Failures that a second attempt cannot mend: a 4xx of the model endpoint, an unknown task, another environment."""


@dataclass
class _Episode:
    job: EpisodeJob
    priority: int
    order: int
    attempts: int = 0
    failures: int = 0
    deadlines: int = 0
    deaths: int = 0
    live: int | None = None
    done: bool = False


@dataclass
class Counts:
    """Attempts and episodes so far."""

    admitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    duplicates: int = 0
    retried: int = 0
    gave_up: dict[str, int] = field(default_factory=dict)
    """Episodes set aside, by the code of their last failure."""


class Ledger:
    """See the module docstring."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self.counts = Counts()
        self.paused = False
        self._episodes: dict[str, _Episode] = {}
        self._ready: list[tuple[int, int, str]] = []
        self._waiting: list[tuple[float, str]] = []
        self._held: dict[str, dict[tuple[str, int], Attempt]] = {}
        self._order = 0
        self._cancelled = False

    def add(self, jobs: list[EpisodeJob], *, priority: int = 0, attempts_before: dict[str, int] | None = None) -> None:
        """Admit jobs to the queue; ``attempts_before`` numbers go on where an earlier process stopped.

        Raises:
            ValueError: an episode is already known.
        """
        before = attempts_before or {}
        for job in jobs:
            name = job.episode_id
            if name in self._episodes:
                raise ValueError(f"episode {name} was submitted twice")
            self._episodes[name] = _Episode(job, priority, self._order, attempts=before.get(name, 0))
            heapq.heappush(self._ready, (-priority, self._order, name))
            self._order += 1

    def take(self, worker: str, n: int, now: float) -> list[Attempt]:
        """At most ``n`` attempts for ``worker``; they are admitted and live from here on."""
        if self.paused or self._cancelled:
            return []
        self._wake(now)
        out: list[Attempt] = []
        while self._ready and len(out) < n:
            _, _, name = heapq.heappop(self._ready)
            episode = self._episodes[name]
            episode.attempts += 1
            episode.live = episode.attempts
            attempt = Attempt(episode.job, episode.attempts)
            self._held.setdefault(worker, {})[(name, attempt.number)] = attempt
            self.counts.admitted += 1
            out.append(attempt)
        return out

    def finished(self, worker: str, result: FinishedAttempt, now: float) -> Disposition:
        """Account for a terminal result."""
        attempt = self._held.get(worker, {}).pop((result.episode_id, result.number), None)
        if attempt is None:
            self.counts.duplicates += 1
            return Disposition.DUPLICATE
        episode = self._episodes[result.episode_id]
        episode.live = None
        if result.complete:
            self.counts.completed += 1
            episode.done = True
            return Disposition.ACCEPTED
        if result.status == "cancelled":
            self.counts.cancelled += 1
            return Disposition.CANCELLED
        self.counts.failed += 1
        if self._may_retry(episode, result):
            self.counts.retried += 1
            heapq.heappush(self._waiting, (now + self.policy.delay(episode.failures), result.episode_id))
            return Disposition.RETRY
        code = result.code or "unknown"
        self.counts.gave_up[code] = self.counts.gave_up.get(code, 0) + 1
        return Disposition.GAVE_UP

    def held_by(self, worker: str) -> list[Attempt]:
        """Live attempts of a worker."""
        return list(self._held.get(worker, {}).values())

    def in_flight(self, worker: str) -> int:
        """Number of live attempts of a worker."""
        return len(self._held.get(worker, {}))

    def cancel_queue(self) -> int:
        """Stop handing out work; returns how many episodes will not start. Live attempts go on until they report."""
        self._cancelled = True
        left = len(self._ready) + len(self._waiting)
        self._ready, self._waiting = [], []
        return left

    def cancel(self, episode_ids: set[str]) -> None:
        """Drop queued episodes; live ones are cancelled at their worker."""
        self._ready = [item for item in self._ready if item[2] not in episode_ids]
        heapq.heapify(self._ready)
        self._waiting = [item for item in self._waiting if item[1] not in episode_ids]
        heapq.heapify(self._waiting)

    @property
    def live(self) -> int:
        """Attempts that have been handed out and have not reported."""
        return sum(len(held) for held in self._held.values())

    @property
    def queued(self) -> int:
        """Episodes that are ready or waiting for their next attempt."""
        return len(self._ready) + len(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing left to do."""
        return self.live == 0 and self.queued == 0

    def next_wake(self) -> float | None:
        """When the earliest back-off ends."""
        return self._waiting[0][0] if self._waiting else None

    def check_closed(self) -> None:
        """The books must balance.

        Raises:
            LedgerError: some admitted attempt has no terminal record.
        """
        c = self.counts
        if self.live or c.admitted != c.completed + c.failed + c.cancelled:
            names = sorted(name for held in self._held.values() for name, _ in held)[:5]
            raise LedgerError(
                f"the ledger does not close: admitted {c.admitted}, completed {c.completed}, failed {c.failed}, "
                f"cancelled {c.cancelled}, still live {self.live}{' (' + ', '.join(names) + ')' if names else ''}"
            )

    def _may_retry(self, episode: _Episode, result: FinishedAttempt) -> bool:
        if self._cancelled or result.code in NOT_RETRYABLE:
            return False
        if result.code == "worker_died":
            # the worker's fault more often than the job's: counted apart, and more patiently
            episode.deaths += 1
            return episode.deaths < self.policy.max_worker_deaths
        episode.failures += 1
        if result.code == "deadline":
            episode.deadlines += 1
            if episode.deadlines >= self.policy.max_deadline_attempts:
                return False
        return episode.failures < self.policy.max_attempts

    def _wake(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            _, name = heapq.heappop(self._waiting)
            episode = self._episodes[name]
            heapq.heappush(self._ready, (-episode.priority, episode.order, name))
