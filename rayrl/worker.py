"""RolloutWorker: K concurrent episodes over one model client and one environment factory, on one event loop.

The worker knows nothing of Ray. It takes batches of jobs, and gives back batches of finished attempts: never single
steps, because a batch of 64 episodes crosses a process border five times faster than 64 single ones.

Invariants:

* every job that was submitted yields exactly one :class:`FinishedAttempt`, cancelled ones included;
* ``drain`` returns within ``max_wait_s`` whatever the episodes do, so a worker that does not answer is broken;
* one capacity: ``target`` concurrent episodes, moved only by :class:`AdaptiveConcurrency`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from pydantic import SecretStr

from rayrl.environments.base import EnvironmentFactory
from rayrl.environments.config import AnyEnvironment, build_environments
from rayrl.errors import Blame
from rayrl.models.config import ModelConfig
from rayrl.models.registry import build_model
from rayrl.prompts import PromptBuilder, PromptConfig, PromptTemplate
from rayrl.runtime import AgentRuntime, EpisodeOutcome, Progress, RuntimeConfig
from rayrl.schemas import EpisodeJob, JsonDict
from rayrl.skills.base import SkillProvider
from rayrl.skills.providers import SkillsConfig, build_skills
from rayrl.traces.schema import is_complete

MAX_EVENTS = 1000
MODEL_GAUGES = frozenset({"requests", "retries", "throttled", "limiter_limit", "limiter_in_flight"})
"""Counters of a model's ``stats()`` (where it offers one) that are shown."""
LINGER_S = 0.02
"""Once something finished, wait this long for more: batches, at a latency nobody notices."""


@dataclass(frozen=True)
class WorkerSpec:
    """All a worker needs, picklable, without files of the driver's machine."""

    model: ModelConfig
    environment: AnyEnvironment
    prompt: PromptConfig
    template: PromptTemplate
    skills: SkillProvider | SkillsConfig
    """A built provider, or the config of one that is better built in place (a dotted path)."""
    runtime: RuntimeConfig
    provenance: JsonDict
    concurrency: int
    adaptive: bool = True
    admin_token: SecretStr | None = None
    """Opens the embedded server's private goals; lives in memory only."""


@dataclass(frozen=True)
class Attempt:
    """One admitted attempt at a job."""

    job: EpisodeJob
    number: int


@dataclass(frozen=True)
class FinishedAttempt:
    """A terminal result, serialised where it was made; the scalars spare the driver from parsing it."""

    episode_id: str
    number: int
    status: str
    complete: bool
    record: bytes
    private: bytes | None
    training: bytes | None
    blame: str | None = None
    code: str | None = None
    message: str | None = None
    reward: float = 0.0
    success: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model_steps: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True)
class DrainReport:
    """What a worker says when asked."""

    finished: list[FinishedAttempt]
    queued: int
    active: list[tuple[str, str, int, str, float]]
    """(episode id, stage, step, request, seconds in this stage) of every running episode."""
    transitions: int
    """Stage changes since the worker started; standing still while episodes run is what the watchdog looks for."""
    target: int
    events: list[JsonDict]
    gauges: dict[str, float]


class AdaptiveConcurrency:
    """Additive increase, multiplicative decrease of the number of concurrent episodes. Pure: time is passed in.

    Shortage of leases halves the target at most once per ``window_s``; every ``target`` healthy finishes add one.
    """

    def __init__(self, maximum: int, *, window_s: float = 2.0, enabled: bool = True) -> None:
        self.maximum = maximum
        self.target = maximum
        self.enabled = enabled
        self._window_s = window_s
        self._last_cut = float("-inf")
        self._healthy = 0

    def finished(self, code: str | None, now: float) -> None:
        """Account for one finished attempt; ``code`` is its failure code or ``None``."""
        if code in SHORTAGE_CODES:
            self.shortage(now)
        elif self.enabled and code is None and self.target < self.maximum:
            self._healthy += 1
            if self._healthy >= self.target:
                self._healthy = 0
                self.target += 1

    def shortage(self, now: float, *, active: int = 0) -> None:
        """Slots are short. With more than ``target`` episodes ``active`` the last cut has not shown yet."""
        if not self.enabled or active > self.target:
            return
        self._healthy = 0
        if now - self._last_cut >= self._window_s:
            self.target = max(1, self.target // 2)
            self._last_cut = now


SHORTAGE_CODES = frozenset({"no_free_slot", "queue_timeout"})
"""No lease within the reset time-out; no turn at the model endpoint."""
SHORTAGE_EVENTS = frozenset({"lease_queue_full"})
"""An environment turned a reset away for now: nobody fails, but fewer should wait."""


class RolloutWorker:
    """See the module docstring."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._events: deque[JsonDict] = deque(maxlen=MAX_EVENTS)
        self._environments: EnvironmentFactory = build_environments(
            spec.environment, admin_token=spec.admin_token, on_event=self._event
        )
        self._model = build_model(spec.model, on_event=lambda kind, facts: self._event({"event": kind, **facts}))
        skills = build_skills(spec.skills) if isinstance(spec.skills, SkillsConfig) else spec.skills
        self._runtime = AgentRuntime(
            model=self._model,
            environments=self._environments,
            skills=skills,
            prompts=PromptBuilder(spec.template, spec.prompt),
            config=spec.runtime,
            provenance=spec.provenance,
        )
        self._capacity = AdaptiveConcurrency(spec.concurrency, enabled=spec.adaptive)
        self._queue: deque[Attempt] = deque()
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._progress: dict[tuple[str, int], Progress] = {}
        self._finished: list[FinishedAttempt] = []
        self._something = asyncio.Event()
        self._transitions = 0
        self._totals = _Totals()

    async def start(self) -> None:
        """Check that the environment answers and is the one that was planned."""
        await self._environments.start()

    async def submit(self, attempts: list[Attempt]) -> None:
        """Queue attempts; they start as capacity allows."""
        self._queue.extend(attempts)
        self._fill()

    async def drain(self, max_wait_s: float = 1.0, max_items: int = 256) -> DrainReport:
        """Finished attempts, as soon as there are any or after ``max_wait_s``."""
        if not self._finished:
            try:
                await asyncio.wait_for(self._something.wait(), max_wait_s)
            except TimeoutError:
                pass
            else:
                if len(self._finished) < max_items and (self._tasks or self._queue):
                    await asyncio.sleep(LINGER_S)
        batch, self._finished = self._finished[:max_items], self._finished[max_items:]
        if not self._finished:
            self._something.clear()
        events = list(self._events)
        self._events.clear()
        now = time.monotonic()
        return DrainReport(
            finished=batch,
            queued=len(self._queue),
            active=[
                (p.episode_id, p.stage, p.step, p.request, round(now - p.since, 3)) for p in self._progress.values()
            ],
            transitions=self._transitions,
            target=self._capacity.target,
            events=events,
            gauges=self._gauges(),
        )

    async def cancel(self, episode_ids: list[str] | None = None) -> None:
        """Cancel the named episodes, or all; each still yields its (cancelled) result."""
        wanted = None if episode_ids is None else set(episode_ids)
        keep: deque[Attempt] = deque()
        for attempt in self._queue:
            if wanted is None or attempt.job.episode_id in wanted:
                self._deliver(attempt, cancelled_before_start(attempt, self.spec.provenance))
            else:
                keep.append(attempt)
        self._queue = keep
        for (name, _), task in list(self._tasks.items()):
            if wanted is None or name in wanted:
                task.cancel()

    async def stop(self) -> DrainReport:
        """Cancel what runs, close clients. Idempotent. The report says what happened meanwhile, and in its gauges how
        many leases could not be given back even now."""
        await self.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=20)
        try:
            await self._model.aclose()
        finally:
            await self._environments.aclose()
        return await self.drain(0.0)

    def _fill(self) -> None:
        while self._queue and len(self._tasks) < self._capacity.target:
            attempt = self._queue.popleft()
            key = (attempt.job.episode_id, attempt.number)
            self._progress[key] = Progress(attempt.job.episode_id)
            task = asyncio.create_task(self._run(attempt, key), name=f"episode {key[0]} attempt {key[1]}")
            self._tasks[key] = task
            task.add_done_callback(partial(self._ended, attempt, key))

    def _ended(self, attempt: Attempt, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        """Closes the books of a task that was cancelled before its first step: its body never ran."""
        if self._tasks.get(key) is not task:
            return
        del self._tasks[key]
        self._progress.pop(key, None)
        self._deliver(attempt, cancelled_before_start(attempt, self.spec.provenance))
        self._fill()

    async def _run(self, attempt: Attempt, key: tuple[str, int]) -> None:
        def on_step(progress: Progress) -> None:
            self._transitions += 1
            self._progress[key] = progress

        try:
            outcome = await self._runtime.run(attempt.job, attempt=attempt.number, on_step=on_step)
            finished = finish(attempt, outcome)
        except (Exception, asyncio.CancelledError) as failure:
            # the runtime never raises; if it does, the ledger must close all the same
            finished = failed_without_record(
                attempt,
                self.spec.provenance,
                blame=Blame.INFRASTRUCTURE,
                code="runtime_fault",
                message=f"{type(failure).__name__}: {failure}",
            )
        self._tasks.pop(key, None)
        self._progress.pop(key, None)
        self._capacity.finished(finished.code, time.monotonic())
        self._deliver(attempt, finished)
        self._fill()

    def _deliver(self, attempt: Attempt, finished: FinishedAttempt) -> None:
        self._totals.add(finished)
        self._finished.append(finished)
        self._something.set()

    def _event(self, event: JsonDict) -> None:
        self._events.append({"time": time.time(), **event})
        if event.get("event") in SHORTAGE_EVENTS:
            self._capacity.shortage(time.monotonic(), active=len(self._tasks))

    def _gauges(self) -> dict[str, float]:
        leases = getattr(self._environments, "leases_open", None)
        gauges = {
            "episodes_active": float(len(self._tasks)),
            "episodes_queued": float(len(self._queue)),
            "concurrency_target": float(self._capacity.target),
            "prompt_tokens": float(self._totals.prompt_tokens),
            "completion_tokens": float(self._totals.completion_tokens),
            "model_steps": float(self._totals.model_steps),
        }
        if isinstance(leases, int):
            gauges["leases_open"] = float(leases)
        stats = getattr(self._model, "stats", None)
        if callable(stats):
            gauges.update({f"model_{name}": float(value) for name, value in stats().items() if name in MODEL_GAUGES})
        return gauges


@dataclass
class _Totals:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model_steps: int = 0
    by_status: dict[str, int] = field(default_factory=dict)

    def add(self, finished: FinishedAttempt) -> None:
        self.prompt_tokens += finished.prompt_tokens
        self.completion_tokens += finished.completion_tokens
        self.model_steps += finished.model_steps
        self.by_status[finished.status] = self.by_status.get(finished.status, 0) + 1


def finish(attempt: Attempt, outcome: EpisodeOutcome) -> FinishedAttempt:
    """Serialise an outcome and pull out the scalars the driver needs."""
    record = outcome.record
    error: dict[str, Any] = record["error"] or {}
    final: dict[str, Any] = record["final"] or {}
    training = None
    if outcome.training:
        training = b"\n".join(orjson.dumps(item) for item in outcome.training)
    return FinishedAttempt(
        episode_id=attempt.job.episode_id,
        number=attempt.number,
        status=record["status"],
        complete=is_complete(record),
        record=orjson.dumps(record),
        private=orjson.dumps(outcome.private) if outcome.private is not None else None,
        training=training,
        blame=error.get("class"),
        code=error.get("code"),
        message=error.get("message"),
        reward=_number(final.get("reward")),
        success=_number((final.get("reward_detail") or {}).get("r_success")),
        prompt_tokens=record["usage"]["prompt_tokens"],
        completion_tokens=record["usage"]["completion_tokens"],
        model_steps=len(record["steps"]),
        duration_s=record["duration_s"],
    )


def _number(value: Any) -> float:
    # an environment may leave a detail out or null; that must not cost a finished episode
    return float(value) if isinstance(value, int | float) else 0.0


def failed_without_record(
    attempt: Attempt, provenance: JsonDict, *, blame: Blame, code: str, message: str, status: str = "failed"
) -> FinishedAttempt:
    """The terminal record of an attempt whose worker cannot tell any more."""
    from datetime import UTC, datetime

    from rayrl.schemas import EPISODE_SCHEMA

    now = datetime.now(UTC).isoformat()
    record = {
        "schema": EPISODE_SCHEMA,
        "episode_id": attempt.job.episode_id,
        "attempt": attempt.number,
        "status": status,
        "job": attempt.job.model_dump(),
        "provenance": provenance,
        "started_at": now,
        "ended_at": now,
        "duration_s": 0.0,
        "reset": None,
        "selected_skills": [],
        "conversation": [],
        "steps": [],
        "final": None,
        "error": {"class": blame.value, "code": code, "stage": "worker", "type": "WorkerDiedError", "message": message},
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "model_calls": 0},
        "interned": {"texts": [], "states": [], "toolsets": []},
    }
    return FinishedAttempt(
        episode_id=attempt.job.episode_id,
        number=attempt.number,
        status=status,
        complete=False,
        record=orjson.dumps(record),
        private=None,
        training=None,
        blame=blame.value,
        code=code,
        message=message,
    )


def cancelled_before_start(attempt: Attempt, provenance: JsonDict) -> FinishedAttempt:
    """The terminal record of an attempt that was cancelled while still queued."""
    return failed_without_record(
        attempt,
        provenance,
        blame=Blame.INFRASTRUCTURE,
        code="cancelled",
        message="cancelled before it started",
        status="cancelled",
    )
