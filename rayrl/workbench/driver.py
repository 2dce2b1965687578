"""The driver of a running experiment: claims cases, feeds them to a rollout pool, records what comes back.

It knows the pool by a protocol only. One driver per experiment at a time (a lease on the experiment); several would
still be safe, since every case is claimed. Everything it knows is in the store, so that after ``kill -9`` the next
driver goes on where this one stopped.
"""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import orjson
from sqlalchemy import select, update

from rayrl.environments.config import CustomEnvironmentConfig
from rayrl.errors import DataError, RayrlError
from rayrl.models.config import ModelConfig
from rayrl.prompts import PromptConfig
from rayrl.runtime import RuntimeConfig
from rayrl.schemas import EpisodeJob, JsonDict, PublicContext, Skill, episode_seed
from rayrl.settings import ExecutionConfig
from rayrl.skills.snapshot import Taken
from rayrl.workbench import tables
from rayrl.workbench.canaries import check
from rayrl.workbench.claims import LEASE_S, Claim, Claims, owner_alive, owner_name
from rayrl.workbench.evidence import Outcome, normalise
from rayrl.workbench.experiments import MAX_CONCURRENCY, Params, get_experiment, prompt_template
from rayrl.workbench.store import now, write_atomic
from rayrl.workbench.workbench import Workbench
from rayrl.worker import FinishedAttempt, WorkerSpec

_E, _R, _V = tables.experiments, tables.results, tables.events
BATCH_PRIORITY = -10


class Pool(Protocol):
    """What the driver needs of a rollout pool; ``actors.pool.RolloutPool`` is one."""

    on_tick: Callable[[], None]

    def __enter__(self) -> Pool: ...
    def __exit__(self, *_: object) -> None: ...
    def submit(  # noqa: D102
        self, jobs: list[EpisodeJob], *, priority: int = 0, attempts_before: dict[str, int] | None = None
    ) -> None: ...
    def results(self) -> Iterator[tuple[FinishedAttempt, Any]]: ...  # noqa: D102
    def stop_admitting(self) -> int: ...  # noqa: D102
    def cancel(self) -> None: ...  # noqa: D102


MakePool = Callable[[WorkerSpec, ExecutionConfig, Callable[[JsonDict], None]], Pool]


class InjectedSkill:
    """The Skill provider of an experiment: the snapshot's main file, for every case, without recall."""

    def __init__(self, name: str, content_sha256: str, text: str) -> None:
        self._skill = Skill(skill_id=name, version=content_sha256[:12], content=text)
        self._identity = {"kind": "injected", "name": name, "content_sha256": content_sha256}

    def identity(self) -> dict[str, Any]:
        """Name and content hash."""
        return dict(self._identity)

    async def select(self, context: PublicContext) -> list[Skill]:
        """Always the one Skill."""
        return [self._skill]


def injected(skill: Taken) -> InjectedSkill:
    """The provider for a snapshot."""
    text = skill.files["SKILL.md"].decode("utf-8", "replace")
    return InjectedSkill(skill.manifest.name, skill.manifest.content_sha256, text)


class Driver:
    """See the module docstring."""

    def __init__(
        self,
        bench: Workbench,
        experiment_id: str,
        make_pool: MakePool,
        *,
        lease_s: float = LEASE_S,
        owner: str | None = None,
    ) -> None:
        self.bench = bench
        self.store = bench.store
        self.experiment_id = experiment_id
        self.make_pool = make_pool
        self.owner = owner or owner_name()
        self.claims = Claims(self.store, experiment_id, self.owner, lease_s=lease_s)
        self._live: dict[str, Claim] = {}
        self._buffer: list[tuple[Claim, FinishedAttempt, str]] = []
        self._renewed = 0.0
        self._stopping = False
        self._stop_requested = False

    def request_stop(self) -> None:
        """Stop after the running cases and give the rest back; safe from a signal handler or another thread."""
        self._stop_requested = True

    def run(self) -> JsonDict:
        """Drive until nothing is left, or the experiment is paused or cancelled; returns it.

        Raises:
            DataError: another driver is at work on it.
        """
        experiment = self._take_over()
        self.skill = self.bench.snapshots.load(experiment["snapshot_id"])
        dataset = self.bench.datasets.get(experiment["dataset_id"])
        self.classes: list[str] = dataset["classes"]
        self.params = Params.model_validate(experiment["params"])
        spec, execution = self._spec(experiment, dataset)
        try:
            self._check_canaries(spec, execution)
            while self._state()["state"] == "running" and not self._stop_requested:
                self.claims.recover()
                if not self._session(spec, execution):
                    if self._open_elsewhere():
                        time.sleep(min(1.0, self.claims.lease_s / 5))
                        continue
                    self._complete()
                    break
        except RayrlError as error:
            self._pause(str(error))
        finally:
            self.claims.give_back()
            with self.store.write() as connection:
                if get_experiment(connection, self.experiment_id)["state"] == "cancelled":
                    left = (_R.c.experiment_id == self.experiment_id) & (_R.c.state == "pending")
                    connection.execute(update(_R).where(left).values(state="cancelled", updated_at=now()))
                mine = (_E.c.id == self.experiment_id) & (_E.c.driver == self.owner)
                connection.execute(update(_E).where(mine).values(driver=None, driver_until=None))
        return self.bench.experiments.get(self.experiment_id)

    def _check_canaries(self, spec: WorkerSpec, execution: ExecutionConfig) -> None:
        """Before the first case: a harness that fails its canaries makes the experiment invalid."""
        with self.store.read() as connection:
            done = connection.execute(
                select(_V.c.id).where(_V.c.experiment_id == self.experiment_id, _V.c.kind == "canaries")
            ).first()
        if not self.params.canaries or done is not None or self._state()["state"] != "running":
            return
        try:
            problems, verdicts = check(
                self.params.canaries,
                make_pool=self.make_pool,
                spec=spec,
                blank_spec=lambda skill: replace(spec, skills=injected(skill)),
                execution=execution,
                skill=self.skill,
                seed=self.params.seed,
                folder=self.store.root / "canaries" / self.experiment_id,
                on_tick=self._tick_canaries,
            )
        except DataError:
            if self._stop_requested or self._state()["state"] != "running":
                return  # stopped before they ended: they run again when it goes on
            raise
        with self.store.write() as connection:
            self.store.note(connection, self.experiment_id, "canaries", {"passed": not problems, "verdicts": verdicts})
            if problems:
                values = {"state": "invalid", "reason": "; ".join(problems)[:2000], "ended_at": now()}
                running = (_E.c.id == self.experiment_id) & (_E.c.state == "running")
                connection.execute(update(_E).where(running).values(values))
                self.store.note(connection, self.experiment_id, "invalid", {"problems": problems[:50]})

    def _tick_canaries(self, pool: Pool) -> None:
        if self._stop_requested or self._state()["state"] != "running":
            pool.cancel()
        elif time.time() - self._renewed > self.claims.lease_s / 5:
            self._renewed = time.time()
            self._renew_driver()

    def _session(self, spec: WorkerSpec, execution: ExecutionConfig) -> bool:
        """One life of a pool; ``False`` when there was nothing to claim."""
        self._live, self._buffer, self._stopping, self._seen = {}, [], False, set[str]()
        first = self.claims.take(self._room())
        if not first:
            return False
        pool = self.make_pool(spec, execution, self._event)
        pool.on_tick = lambda: self._tick(pool)
        with pool:
            self._submit(pool, first)
            for finished, disposition in pool.results():
                claim = self._live.pop(finished.episode_id, None)
                if claim is None:
                    continue  # a late duplicate of an attempt the pool gave up
                self._buffer.append((claim, finished, disposition.value))
                if disposition.value == "retry":
                    self._flush()
                    renewed = self.claims.again(claim)
                    if renewed is not None:
                        self._live[finished.episode_id] = renewed
                self._refill(pool)
        self._flush()
        return True

    def _tick(self, pool: Pool) -> None:
        self._flush()
        state = self._state()
        if state["state"] == "cancelled" and not self._stopping:
            self._stopping = True
            pool.cancel()
        elif (state["state"] != "running" or self._stop_requested) and not self._stopping:
            self._stopping = True
            pool.stop_admitting()
        if time.time() - self._renewed > self.claims.lease_s / 5:
            self._renewed = time.time()
            self.claims.renew()
            self._renew_driver()
        self._refill(pool)

    def _refill(self, pool: Pool) -> None:
        if self._stopping or self._stop_requested:
            return
        room = self._room()
        if room >= max(1, min(8, self._concurrency // 4)) or not self._live:
            self._submit(pool, self.claims.take(room))

    def _submit(self, pool: Pool, claims: list[Claim]) -> None:
        jobs, before = [], {}
        for claim in claims:
            seed = episode_seed(self.params.seed, claim.ordinal, claim.repeat)
            job = EpisodeJob(task_id=claim.ordinal, sample_id=claim.repeat, seed=seed, split="workbench")
            if job.episode_id in self._seen:
                # chosen again while this pool already knows it: the next pool takes it
                self.claims.give_back_one(claim)
                self._stopping = True
                continue
            self._seen.add(job.episode_id)
            self._live[job.episode_id] = claim
            before[job.episode_id] = claim.attempt - 1
            jobs.append(job)
        if jobs:
            pool.submit(jobs, priority=BATCH_PRIORITY, attempts_before=before)

    def _room(self) -> int:
        self._concurrency = min(MAX_CONCURRENCY, int(self._state()["concurrency"]))
        return self._concurrency - len(self._live)

    def _flush(self) -> None:
        if not self._buffer:
            return
        items: list[tuple[Claim, Outcome, str | None, str | None]] = []
        for claim, finished, _ in self._buffer:
            outcome = normalise(orjson.loads(finished.record), self.skill)
            path = trace_path(self.experiment_id, claim)
            packed = gzip.compress(finished.record, 3, mtime=0)
            write_atomic(self.store.root / path, packed, sync=False)
            items.append((claim, outcome, path, hashlib.sha256(packed).hexdigest()))
        cancelled = [item for item in items if item[1].state == "cancelled"]
        self._buffer = []
        self.claims.finish(items)
        if cancelled and self._state()["state"] != "cancelled":
            self.claims.reopen([item[0] for item in cancelled])

    def _spec(self, experiment: JsonDict, dataset: JsonDict) -> tuple[WorkerSpec, ExecutionConfig]:
        skill = self.skill
        environment = CustomEnvironmentConfig(
            kind="rayrl.environments.skill_case:SkillCaseFactory",
            options={
                "cases": self.bench.datasets.inputs_file(dataset),
                "cases_sha256": dataset["content_sha256"],
                "snapshot": str(self.bench.snapshots.folder(experiment["snapshot_id"])),
                "skill_sha256": skill.manifest.content_sha256,
                "classes": self.classes,
                "tools": self.params.tools,
            },
        )
        spec = WorkerSpec(
            model=ModelConfig.model_validate(experiment["model"]),
            environment=environment,
            prompt=PromptConfig(),
            template=prompt_template(),
            skills=injected(skill),
            runtime=RuntimeConfig(max_actions=self.params.max_actions, deadline_s=self.params.deadline_s),
            provenance={
                "experiment_id": self.experiment_id,
                "fingerprint": experiment["fingerprint"],
                "skill": skill.manifest.content_sha256,
                "dataset": dataset["content_sha256"],
            },
            concurrency=MAX_CONCURRENCY if self.params.mode == "inprocess" else 64,
            adaptive=True,
        )
        execution = ExecutionConfig(
            mode=self.params.mode,
            actors=1,
            concurrency=spec.concurrency,
            prefetch=0,
            max_attempts=self.params.max_attempts,
            max_consecutive_failures=max(50, 4 * int(experiment["concurrency"])),
        )
        return spec, execution

    def _take_over(self) -> JsonDict:
        with self.store.write() as connection:
            row = get_experiment(connection, self.experiment_id)
            other = row["driver"]
            if (
                other
                and other != self.owner
                and owner_alive(other) is not False
                and (row["driver_until"] or 0) > time.time()
            ):
                raise DataError(f"experiment {self.experiment_id} is being driven by {other}")
            values = {"driver": self.owner, "driver_until": time.time() + self.claims.lease_s}
            connection.execute(update(_E).where(_E.c.id == self.experiment_id).values(values))
            self.store.note(connection, self.experiment_id, "driver", {"owner": self.owner})
        return row

    def _renew_driver(self) -> None:
        with self.store.write() as connection:
            mine = (_E.c.id == self.experiment_id) & (_E.c.driver == self.owner)
            values = {"driver_until": time.time() + self.claims.lease_s}
            if connection.execute(update(_E).where(mine).values(values)).rowcount == 0:
                self._stop_requested = True  # another driver took over; its claims fence ours off

    def _state(self) -> JsonDict:
        with self.store.read() as connection:
            return get_experiment(connection, self.experiment_id)

    def _open_elsewhere(self) -> bool:
        counts = self.bench.experiments.get(self.experiment_id)["counts"]
        return bool(counts["running"] + counts["pending"])

    def _complete(self) -> None:
        with self.store.write() as connection:
            row = get_experiment(connection, self.experiment_id)
            if row["state"] == "running":
                values = {"state": "completed", "ended_at": now(), "reason": ""}
                connection.execute(update(_E).where(_E.c.id == self.experiment_id).values(values))
                self.store.note(connection, self.experiment_id, "completed", {})

    def _pause(self, reason: str) -> None:
        with self.store.write() as connection:
            running = (_E.c.id == self.experiment_id) & (_E.c.state == "running")
            connection.execute(update(_E).where(running).values(state="paused", reason=reason[:2000]))
            self.store.note(connection, self.experiment_id, "paused", {"reason": reason[:2000]})

    def _event(self, event: JsonDict) -> None:
        if event.get("event") in ("worker_lost", "worker_replaced", "watchdog"):
            with self.store.write() as connection:
                self.store.note(
                    connection, self.experiment_id, str(event["event"]), {k: str(v)[:500] for k, v in event.items()}
                )


def trace_path(experiment_id: str, claim: Claim) -> str:
    """Where the trace of an attempt lies, relative to the store."""
    name = f"{claim.ordinal}-{claim.repeat}-{claim.attempt}.json.gz"
    return str(Path("traces") / experiment_id / str(claim.ordinal // 1000) / name)
