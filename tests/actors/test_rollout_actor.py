"""The Ray backend on a real local Ray: placement, deaths, start failures, last reports."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.cluster import connect
from actors.ledger import Disposition
from actors.pool import RolloutPool
from actors.rollout import RayBackend
from rayrl.errors import ConfigError, RayrlError
from rayrl.settings import ExecutionConfig
from rayrl.worker import Attempt, DrainReport, WorkerSpec
from tests.faults.fixtures import cluster
from tests.faults.support import null_config, plan, raw_config, roll_out, wait_until

__all__ = ["cluster"]
pytestmark = pytest.mark.ray


def spec_of(raw: dict[str, Any]) -> tuple[WorkerSpec, list[Attempt]]:
    experiment = plan(raw)
    return experiment.worker_spec(experiment.config.environment), [Attempt(job, 1) for job in experiment.jobs]


def collect(backend: RayBackend, worker: str, n: int) -> list[str]:
    """Names of the next ``n`` finished episodes of a worker."""
    names: list[str] = []

    def done() -> bool:
        backend.arm(worker)
        for name, message in backend.wait(1.0):
            assert name == worker and isinstance(message, DrainReport), message
            names.extend(item.episode_id for item in message.finished)
        return len(names) >= n

    wait_until(done, f"{n} episodes of {worker}")
    return names


def test_batches_in_batches_out_and_a_last_report(cluster: None, tmp_path: Path) -> None:
    spec, attempts = spec_of(null_config(tmp_path, "batches", "Obedient"))
    backend = RayBackend(spec, cpus_per_actor=0.5, worker_timeout_s=60)
    (worker,) = backend.start(1)
    try:
        assert backend.pid(worker) != os.getpid()
        backend.submit(worker, attempts)
        assert sorted(collect(backend, worker, 30)) == sorted(a.job.episode_id for a in attempts)
    finally:
        pid = backend.pid(worker)
        ((name, last),) = backend.stop()
    assert name == worker and isinstance(last, DrainReport) and last.gauges["leases_open"] == 0
    assert backend.stop() == []
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the actor's process is gone")


def test_a_killed_actor_is_reported_not_raised_and_can_be_replaced(cluster: None, tmp_path: Path) -> None:
    raw = null_config(tmp_path, "killed", "HangsAlways")
    spec, attempts = spec_of(raw)
    backend = RayBackend(spec, cpus_per_actor=0.5, worker_timeout_s=60)
    (worker,) = backend.start(1)
    try:
        backend.submit(worker, attempts[:4])
        os.kill(backend.pid(worker), signal.SIGKILL)
        messages: list[tuple[str, Any]] = []

        def reported() -> bool:
            backend.arm(worker)
            messages.extend(m for m in backend.wait(1.0) if isinstance(m[1], str))
            return bool(messages)

        wait_until(reported, "the death is noticed")
        assert messages[0][0] == worker and "died" in messages[0][1]
        other = backend.replace(worker)
        assert other != worker
        backend.arm(other)
        wait_until(lambda: any(isinstance(m, DrainReport) for _, m in backend.wait(1.0)), "the new one answers")
    finally:
        backend.stop()


def test_pause_priorities_and_cancel_reach_the_actors(cluster: None, tmp_path: Path) -> None:
    raw = null_config(tmp_path, "steered", "Obedient")
    raw["model"]["options"] = {"delay_s": 0.05}
    spec, attempts = spec_of(raw)
    jobs = [attempt.job for attempt in attempts]
    config = ExecutionConfig(actors=1, prefetch=0)
    pool = RolloutPool(RayBackend(spec, cpus_per_actor=0.5, worker_timeout_s=60), spec, config)
    order: list[tuple[str, Disposition]] = []
    paused_for = at_pause = 0

    def on_tick() -> None:
        nonlocal paused_for
        if pool.ledger.paused and pool.ledger.live == 0:
            paused_for += 1
            if paused_for == 3:
                pool.submit(jobs[20:24], priority=1)
                pool.resume()

    with pool:
        pool.on_tick = on_tick
        pool.submit(jobs[:20])
        for result, disposition in pool.results():
            order.append((result.episode_id, disposition))
            if len(order) == 2:
                pool.pause()
            elif paused_for and len(order) >= at_pause + 4 and not pool.ledger.paused:
                pool.cancel()
            if not paused_for:
                at_pause = len(order)
    done = [name for name, disposition in order if disposition is Disposition.ACCEPTED]
    assert set(done[at_pause : at_pause + 4]) == {job.episode_id for job in jobs[20:24]}
    counts = pool.ledger.counts
    assert counts.admitted == counts.completed + counts.cancelled and counts.failed == 0
    assert len(done) < 24, "the cancellation came in time"


def test_actors_that_cannot_be_placed_are_refused_with_the_numbers(cluster: None, tmp_path: Path) -> None:
    spec, _ = spec_of(null_config(tmp_path, "large", "Obedient"))
    have = int(ray.cluster_resources()["CPU"])
    with pytest.raises(ConfigError) as refused:
        RayBackend(spec, cpus_per_actor=1.5, worker_timeout_s=60).start(have)
    said = str(refused.value)
    assert f"{have} actors of 1.5 CPUs need {have * 1.5:g} CPUs" in said and f"the cluster has {have}" in said
    assert f"room for {int(have / 1.5)} of them" in said and "lower execution.actors" in said
    # a tenth does not add up to one in binary; ten of them fit a CPU all the same
    RayBackend(spec, cpus_per_actor=0.1, worker_timeout_s=60)._require_room(10 * have)
    raw = raw_config(tmp_path, "refused", execution={"actors": 100, "cpus_per_actor": 1.0})
    with pytest.raises(ConfigError, match="100 actors of 1 CPUs need 100 CPUs"):
        roll_out(raw)


@pytest.mark.slow
def test_a_full_cluster_is_said_after_the_start_time_out(cluster: None, tmp_path: Path) -> None:
    @ray.remote
    class Hog:
        def ready(self) -> bool:
            return True

    spec, _ = spec_of(null_config(tmp_path, "full", "Obedient"))
    hog = Hog.options(num_cpus=ray.cluster_resources()["CPU"]).remote()
    ray.get(hog.ready.remote(), timeout=120)
    backend = RayBackend(spec, cpus_per_actor=0.5, worker_timeout_s=60, start_timeout_s=2.0)
    try:
        with pytest.raises(ConfigError, match=r"of 0.5 CPUs did not start within 2 s; the cluster has 0 of \d+ CPUs"):
            backend.start(2)
    finally:
        ray.kill(hog)
        backend.stop()


@pytest.mark.slow
def test_an_environment_that_is_not_there_ends_the_start_with_its_own_error(cluster: None, tmp_path: Path) -> None:
    raw = raw_config(tmp_path, "absent", environment={"base_urls": ["http://127.0.0.1:9"]})
    spec, _ = spec_of(raw)
    backend = RayBackend(spec, cpus_per_actor=0.5, worker_timeout_s=60)
    with pytest.raises(RayrlError, match="no shop server answers"):
        backend.start(2)
    assert backend.stop() == []


def test_a_slow_start_of_ray_is_tried_again_and_then_explained(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Exception | None] = [Exception("The current node timed out during startup."), None]
    given: list[dict[str, Any]] = []

    def init(**settings: Any) -> None:
        given.append(settings)
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert connect()["local"] is True and len(given) == 2
    outcomes[:] = [Exception("The current node timed out during startup.")] * 2
    with pytest.raises(ConfigError, match=r"did not start on this machine in 2 attempts.*execution.mode=inprocess"):
        connect()
    outcomes[:] = [ValueError("num_cpus must be positive")]
    with pytest.raises(ConfigError, match="num_cpus must be positive"):
        connect()
    assert outcomes == []
    assert Path(f"/proc/{ray_pid()}").exists(), "the Ray that was there before is left alone"


def ray_pid() -> int:
    return int(ray._private.worker._global_node.all_processes["raylet"][0].process.pid)
