"""The rollout actor: a :class:`~rayrl.worker.RolloutWorker` inside a Ray process, and the backend that speaks to many.

Every call to an actor has a time-out on the caller's side; an actor that does not answer is killed and counted as lost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rayrl.errors import ConfigError, RayrlError
from rayrl.worker import Attempt, DrainReport, RolloutWorker, WorkerSpec

DRAIN_WAIT_S = 1.0


@ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=64)
class RolloutActor:
    """K concurrent episodes, their environment leases and one model client, in a process of their own."""

    def __init__(self, spec: WorkerSpec, name: str) -> None:
        from ray.util.metrics import Gauge

        self._spec = spec
        self._name = name
        self._worker: RolloutWorker | None = None
        self._metrics: dict[str, Any] = {}
        self._gauge = Gauge

    async def start(self) -> int:
        """Build the clients on this actor's event loop and check the environment; returns the process id."""
        import os

        self._worker = RolloutWorker(self._spec)
        await self._worker.start()
        return os.getpid()

    async def submit(self, attempts: list[Attempt]) -> None:
        """See :meth:`RolloutWorker.submit`."""
        await self._ready().submit(attempts)

    async def drain(self, max_wait_s: float) -> DrainReport:
        """See :meth:`RolloutWorker.drain`; also exports the gauges to Ray's metrics."""
        report = await self._ready().drain(max_wait_s)
        for key, value in report.gauges.items():
            if key not in self._metrics:
                self._metrics[key] = self._gauge(f"rayrl_{key}", tag_keys=("actor",))
            self._metrics[key].set(value, tags={"actor": self._name})
        return report

    async def cancel(self, episode_ids: list[str] | None) -> None:
        """See :meth:`RolloutWorker.cancel`."""
        await self._ready().cancel(episode_ids)

    async def stop(self) -> DrainReport | None:
        """See :meth:`RolloutWorker.stop`."""
        return await self._worker.stop() if self._worker is not None else None

    def _ready(self) -> RolloutWorker:
        if self._worker is None:
            raise RayrlError("the actor was used before start()")
        return self._worker


@dataclass
class _Member:
    handle: Any
    pid: int
    drain: Any = None
    armed_at: float = 0.0


class RayBackend:
    """Speaks to rollout actors in batches; reports deaths instead of raising them."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        cpus_per_actor: float,
        worker_timeout_s: float,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._spec = spec
        self._cpus = cpus_per_actor
        self._timeout = worker_timeout_s
        self._start_timeout = start_timeout_s
        self._members: dict[str, _Member] = {}
        self._created = 0

    def start(self, n: int) -> list[str]:
        """Create ``n`` actors; returns their names.

        Raises:
            ConfigError: the cluster has no room for them.
            RayrlError: the environment is not the planned one, or cannot be reached.
        """
        self._require_room(n)
        pending = [self._create() for _ in range(n)]
        try:
            return [self._await(name, handle, ref) for name, handle, ref in pending]
        except RayrlError:
            self._members.clear()
            for _, handle, _ in pending:
                ray.kill(handle, no_restart=True)
            raise

    def _require_room(self, n: int) -> None:
        nodes = sorted((float(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), reverse=True)
        # an actor lives on one node: what is left over on two of them makes no room for one more
        room = sum(int((cpus + 1e-9) / self._cpus) for cpus in nodes) if self._cpus else n
        if room < n:
            raise ConfigError(
                f"execution.actors: {n} actors of {self._cpus:g} CPUs need {self._cpus * n:g} CPUs, the cluster has "
                f"{sum(nodes):g} on {len(nodes)} node{'s' if len(nodes) != 1 else ''} and room for {room} of them; "
                "lower execution.actors or execution.cpus_per_actor"
            )

    def replace(self, worker: str) -> str:
        """Kill a member and put a new one in its place; returns the new name."""
        self._kill(worker)
        return self._await(*self._create())

    def submit(self, worker: str, attempts: list[Attempt]) -> None:
        """Send a batch; a death shows in the next :meth:`wait`."""
        self._members[worker].handle.submit.remote(attempts)

    def arm(self, worker: str) -> None:
        """Ask for the next report, after everything submitted so far."""
        member = self._members[worker]
        if member.drain is None:
            member.drain = member.handle.drain.remote(DRAIN_WAIT_S)
            member.armed_at = time.monotonic()

    def wait(self, timeout_s: float) -> list[tuple[str, DrainReport | str]]:
        """Reports that are there, waiting at most ``timeout_s``; a string instead says why a worker is lost."""
        armed = {m.drain: name for name, m in self._members.items() if m.drain is not None}
        if not armed:
            return []
        ready, _ = ray.wait(list(armed), num_returns=1, timeout=timeout_s)
        if ready:
            more, _ = ray.wait(list(armed), num_returns=len(armed), timeout=0)
            ready = more or ready
        out: list[tuple[str, DrainReport | str]] = []
        for ref in ready:
            name = armed[ref]
            self._members[name].drain = None
            out.append((name, self._collect(ref)))
        now = time.monotonic()
        done = {name for name, _ in out}
        for name, member in self._members.items():
            if name not in done and member.drain is not None and now - member.armed_at > self._timeout:
                member.drain = None
                out.append((name, f"the actor (pid {member.pid}) did not answer for {self._timeout:g} s"))
        return out

    def cancel(self, worker: str, episode_ids: list[str] | None = None) -> None:
        """Ask a worker to cancel episodes; their results come through :meth:`wait`."""
        self._members[worker].handle.cancel.remote(episode_ids)

    def stop(self, grace_s: float = 25.0) -> list[tuple[str, DrainReport | str]]:
        """Let every member close its clients, then end it; returns their last reports. Idempotent."""
        refs = {m.handle.stop.remote(): name for name, m in self._members.items()}
        ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=grace_s) if refs else ([], [])
        out: list[tuple[str, DrainReport | str]] = [(refs[ref], self._collect(ref)) for ref in ready]
        out += [(refs[ref], f"did not stop within {grace_s:g} s") for ref in late]
        for name in list(self._members):
            self._kill(name)
        return out

    def pid(self, worker: str) -> int:
        """Process id of a member."""
        return self._members[worker].pid

    def _collect(self, ref: Any) -> DrainReport | str:
        try:
            report: DrainReport = ray.get(ref, timeout=self._timeout)
        except RayActorError as error:
            return f"the actor died: {str(error).splitlines()[0]}"
        except (GetTimeoutError, RayTaskError) as error:
            return f"the actor failed: {type(error).__name__}: {str(error).splitlines()[-1]}"
        return report

    def _create(self) -> tuple[str, Any, Any]:
        self._created += 1
        name = f"rollout-{self._created}"
        handle = RolloutActor.options(num_cpus=self._cpus).remote(self._spec, name)  # type: ignore[attr-defined]
        return name, handle, handle.start.remote()

    def _await(self, name: str, handle: Any, ref: Any) -> str:
        try:
            pid = ray.get(ref, timeout=self._start_timeout)
        except GetTimeoutError:
            ray.kill(handle)
            free, have = (resources().get("CPU", 0.0) for resources in (ray.available_resources, ray.cluster_resources))
            raise ConfigError(
                f"a rollout actor of {self._cpus:g} CPUs did not start within {self._start_timeout:g} s; the cluster "
                f"has {free:g} of {have:g} CPUs free: others use the rest; wait for them, or lower execution.actors or "
                "execution.cpus_per_actor"
            ) from None
        except RayTaskError as error:
            cause = error.cause if isinstance(getattr(error, "cause", None), Exception) else error
            raise (cause if isinstance(cause, RayrlError) else RayrlError(f"a rollout actor failed: {cause}")) from None
        except RayActorError as error:
            raise RayrlError(f"a rollout actor died at its start: {error}") from None
        self._members[name] = _Member(handle, pid)
        return name

    def _kill(self, worker: str) -> None:
        member = self._members.pop(worker, None)
        if member is not None:
            ray.kill(member.handle, no_restart=True)
