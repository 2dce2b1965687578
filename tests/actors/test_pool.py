"""The pool against a backend made of lists: what it does on deaths, silence, pauses, cancellation and priorities."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import actors.pool as pool_module
from actors.ledger import Disposition
from actors.pool import RolloutPool, RunStalledError, TooManyFailuresError
from rayrl.errors import ConfigError, RayrlError
from rayrl.schemas import EpisodeJob, JsonDict
from rayrl.settings import ExecutionConfig
from rayrl.worker import Attempt, DrainReport, FinishedAttempt, cancelled_before_start

Play = Callable[[str, Attempt], "FinishedAttempt | None"]


def job(task_id: int) -> EpisodeJob:
    return EpisodeJob(task_id=task_id, sample_id=0, seed=task_id * 7, split="train")


def finished(attempt: Attempt, code: str | None = None) -> FinishedAttempt:
    return FinishedAttempt(
        episode_id=attempt.job.episode_id,
        number=attempt.number,
        status="completed" if code is None else "failed",
        complete=code is None,
        record=b"{}",
        private=None,
        training=None,
        code=code,
        message=code and f"it was {code}",
    )


class ListBackend:
    """Workers that finish what ``play`` says, one attempt per report; ``None`` means never."""

    def __init__(self, play: Play, *, target: int = 4) -> None:
        self.play = play
        self.target = target
        self.alive: dict[str, deque[Attempt]] = {}
        self.seen: list[tuple[str, str, int, int]] = []
        self.armed: set[str] = set()
        self.dying: dict[str, str] = {}
        self.most_held = 0
        self.stopped: list[float] = []
        self.created = 0
        self.replacements = 10**6
        self.now = 0.0
        self.obedient = True

    def sleep(self, seconds: float) -> None:
        self.now += 1.0

    def start(self, n: int) -> list[str]:
        return [self._create() for _ in range(n)]

    def _create(self) -> str:
        self.created += 1
        name = f"w{self.created}"
        self.alive[name] = deque()
        return name

    def replace(self, worker: str) -> str:
        self.alive.pop(worker, None)
        if self.replacements == 0:
            raise ConfigError("no room for another worker")
        self.replacements -= 1
        return self._create()

    def submit(self, worker: str, attempts: list[Attempt]) -> None:
        self.seen += [(worker, a.job.episode_id, a.number, a.job.seed) for a in attempts]
        self.alive[worker].extend(attempts)
        self.most_held = max(self.most_held, len(self.alive[worker]))

    def arm(self, worker: str) -> None:
        self.armed.add(worker)

    def wait(self, timeout_s: float) -> list[tuple[str, DrainReport | str]]:
        self.now += timeout_s
        out: list[tuple[str, DrainReport | str]] = []
        for worker in sorted(self.armed):
            if worker in self.dying:
                out.append((worker, self.dying.pop(worker)))
                self.alive.pop(worker)
                continue
            out.append((worker, self._report(worker)))
        self.armed.clear()
        return out

    def _report(self, worker: str) -> DrainReport:
        done: list[FinishedAttempt] = []
        for attempt in list(self.alive[worker]):
            result = self.play(worker, attempt)
            if result is not None:
                self.alive[worker].remove(attempt)
                done.append(result)
                break
        active = [(a.job.episode_id, "model", 2, "completion 3", 9.0) for a in self.alive[worker]]
        return DrainReport(done, 0, active, 0, self.target, [], {"leases_open": float(len(active))})

    def cancel(self, worker: str, episode_ids: list[str] | None = None) -> None:
        if self.obedient:
            self.play = lambda _, attempt: cancelled_before_start(attempt, {})

    def stop(self, grace_s: float = 25.0) -> list[tuple[str, DrainReport | str]]:
        self.stopped.append(grace_s)
        return [(name, self._quiet()) for name in self.alive]

    def _quiet(self) -> DrainReport:
        return DrainReport([], 0, [], 0, self.target, [{"event": "release_failed"}], {"leases_open": 0.0})


class Spec:
    """The two fields of a WorkerSpec that the pool reads."""

    concurrency = 4
    provenance: JsonDict = {}


def make(
    backend: ListBackend, monkeypatch: pytest.MonkeyPatch | None = None, **execution: Any
) -> tuple[RolloutPool, list[JsonDict]]:
    events: list[JsonDict] = []
    config = ExecutionConfig(**{"actors": 2, "prefetch": 2, "retry_backoff_s": 0.0, **execution})
    if monkeypatch is not None:  # the clock of the backend is the pool's
        clock = SimpleNamespace(monotonic=lambda: backend.now, sleep=backend.sleep)
        monkeypatch.setattr(pool_module, "time", clock)
    return RolloutPool(backend, Spec(), config, on_event=events.append), events  # type: ignore[arg-type]


def run(pool: RolloutPool) -> list[tuple[str, int, str, Disposition]]:
    return [(f.episode_id, f.number, f.status, disposition) for f, disposition in pool.results()]


def complete_ids(results: list[tuple[str, int, str, Disposition]]) -> list[str]:
    return sorted(name for name, _, _, disposition in results if disposition is Disposition.ACCEPTED)


def test_everything_is_played_once_within_bounds() -> None:
    backend = ListBackend(lambda worker, attempt: finished(attempt))
    pool, _ = make(backend)
    jobs = [job(i) for i in range(50)]
    with pool:
        pool.submit(jobs)
        results = run(pool)
    assert complete_ids(results) == sorted(j.episode_id for j in jobs) and len(results) == 50
    assert backend.most_held <= 4 + 2 and pool.peak_in_flight <= 2 * (4 + 2)
    assert {worker for worker, *_ in backend.seen} == {"w1", "w2"}
    pool.ledger.check_closed()


def test_a_dead_workers_attempts_run_again_with_the_same_seeds() -> None:
    backend = ListBackend(lambda worker, attempt: finished(attempt))
    pool, events = make(backend)
    with pool:
        pool.submit([job(i) for i in range(20)])
        results = []
        for result, disposition in pool.results():
            results.append((result.episode_id, result.number, result.status, disposition))
            if len(results) == 4:
                backend.dying["w1"] = "the actor died: killed"
    lost = [r for r in results if r[2] == "failed"]
    assert lost and all(disposition is Disposition.RETRY for *_, disposition in lost)
    assert len(complete_ids(results)) == 20
    seeds: dict[str, set[int]] = {}
    for _, name, _, seed in backend.seen:
        seeds.setdefault(name, set()).add(seed)
    assert all(len(s) == 1 for s in seeds.values())
    again = {(name, number) for _, name, number, _ in backend.seen if number == 2}
    assert again == {(name, 2) for name, *_ in lost}
    assert [e["event"] for e in events if e["event"].startswith("worker_")][:2] == ["worker_lost", "worker_replaced"]
    pool.ledger.check_closed()


def test_a_late_result_is_a_duplicate_and_counts_nowhere() -> None:
    attempts: list[Attempt] = []

    def play(worker: str, attempt: Attempt) -> FinishedAttempt:
        attempts.append(attempt)
        return finished(attempt)

    backend = ListBackend(play)
    pool, events = make(backend, actors=1)
    with pool:
        pool.submit([job(1), job(2)])
        results = []
        for _, disposition in pool.results():
            results.append(disposition)
            if len(results) == 1:  # the worker says the first one again, as after a lost acknowledgement
                backend.play = lambda worker, attempt: finished(attempts[0]) if len(results) == 1 else finished(attempt)
                backend.alive["w1"].appendleft(attempts[0])
    assert results.count(Disposition.ACCEPTED) == 2 and Disposition.DUPLICATE in results
    assert [e["episode_id"] for e in events if e["event"] == "duplicate"] == [job(1).episode_id]
    pool.ledger.check_closed()


def test_workers_that_only_die_end_the_run_with_the_reason() -> None:
    backend = ListBackend(lambda worker, attempt: None)
    pool, _ = make(backend, actors=1)
    with pool:
        pool.submit([job(i) for i in range(20)])
        pool.on_tick = lambda: backend.dying.update(dict.fromkeys(backend.alive, "out of memory"))
        with pytest.raises(RayrlError, match="6 workers in a row died without finishing anything: out of memory"):
            run(pool)
    # the first six were set aside before that: five workers died with them
    assert pool.ledger.counts.gave_up == {"worker_died": 6}
    pool.ledger.check_closed()


def test_a_worker_that_cannot_be_replaced_leaves_the_others_working() -> None:
    backend = ListBackend(lambda worker, attempt: finished(attempt))
    backend.replacements = 0
    pool, events = make(backend)
    with pool:
        pool.submit([job(i) for i in range(20)])
        backend.dying["w2"] = "node lost"
        results = run(pool)
    assert len(complete_ids(results)) == 20
    assert not [e for e in events if e["event"] == "worker_replaced"]


def test_failures_in_a_row_count_only_what_began_after_the_first() -> None:
    """Twelve attempts in flight fail at once: one incident. When the next ones fail too, it lasts."""
    broken = {"until": 12}

    def play(worker: str, attempt: Attempt) -> FinishedAttempt:
        broken["until"] -= 1
        return finished(attempt, "retries_exhausted" if broken["until"] >= 0 else None)

    pool, _ = make(ListBackend(play), max_consecutive_failures=5)
    with pool:
        pool.submit([job(i) for i in range(40)])
        results = run(pool)
    assert len(complete_ids(results)) == 40
    broken["until"] = 10**6
    backend = ListBackend(play)
    pool, _ = make(backend, max_consecutive_failures=5)
    with pool:
        pool.submit([job(i) for i in range(400)])
        with pytest.raises(TooManyFailuresError, match="attempts in a row failed; the last one with retries_exhaus"):
            run(pool)
    assert len(backend.seen) < 60
    pool.ledger.check_closed()


def test_a_pause_lets_running_episodes_finish_and_starts_no_others() -> None:
    backend = ListBackend(lambda worker, attempt: finished(attempt))
    pool, _ = make(backend)
    submitted_at_pause = 0
    ticks_paused = 0
    with pool:
        pool.submit([job(i) for i in range(40)])

        def on_tick() -> None:
            nonlocal ticks_paused
            if pool.ledger.paused and pool.ledger.live == 0:
                ticks_paused += 1
                assert len(backend.seen) == submitted_at_pause
                if ticks_paused == 3:
                    pool.resume()

        pool.on_tick = on_tick
        results = []
        for result, disposition in pool.results():
            results.append((result.episode_id, result.number, result.status, disposition))
            if len(results) == 5:
                pool.pause()
                submitted_at_pause = len(backend.seen)
    assert ticks_paused == 3 and len(complete_ids(results)) == 40


def test_a_paused_run_is_not_stalled_and_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ListBackend(lambda worker, attempt: finished(attempt))
    pool, _ = make(backend, monkeypatch, watchdog_s=5.0)
    ticks = 0
    with pool:
        pool.submit([job(i) for i in range(40)])
        pool.pause()

        def on_tick() -> None:
            nonlocal ticks
            ticks += 1
            if ticks == 30:
                pool.cancel()

        pool.on_tick = on_tick
        assert run(pool) == []
    assert ticks == 30 and pool.ledger.counts.admitted == 0


def test_higher_priority_goes_first_even_when_it_comes_later() -> None:
    backend = ListBackend(lambda worker, attempt: finished(attempt))
    pool, _ = make(backend, actors=1)
    with pool:
        pool.submit([job(i) for i in range(30)])
        results = []
        for result, disposition in pool.results():
            results.append((result.episode_id, result.number, result.status, disposition))
            if len(results) == 3:
                in_flight = len(backend.seen)
                pool.submit([job(100 + i) for i in range(3)], priority=1)
    order = [name for _, name, _, _ in backend.seen]
    assert set(order[in_flight : in_flight + 3]) == {job(100 + i).episode_id for i in range(3)}
    assert len(complete_ids(results)) == 33
    with pytest.raises(ValueError, match="submitted twice"):
        pool.submit([job(1)])


def test_cancel_records_what_runs_and_drops_what_waits() -> None:
    backend = ListBackend(lambda worker, attempt: finished(attempt))
    pool, _ = make(backend)
    with pool:
        pool.submit([job(i) for i in range(40)])
        results = []
        for result, disposition in pool.results():
            results.append((result.episode_id, result.number, result.status, disposition))
            if len(results) == 6:
                pool.cancel()
    counts = pool.ledger.counts
    assert counts.cancelled > 0 and counts.admitted == counts.completed + counts.cancelled < 40
    assert all(disposition is not Disposition.RETRY for *_, disposition in results)


def test_the_watchdog_names_episode_worker_and_request(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ListBackend(lambda worker, attempt: None)
    backend.obedient = False
    pool, events = make(backend, monkeypatch, watchdog_s=30.0)
    with pool:
        pool.submit([job(5)])
        with pytest.raises(RunStalledError) as stalled:
            run(pool)
    assert f"{job(5).episode_id} (model completion 3, step 2, 9 s) on w1" in str(stalled.value)
    assert [e["event"] for e in events][:1] == ["watchdog"]
    pool.ledger.check_closed()


def test_who_ignores_a_cancellation_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ListBackend(lambda worker, attempt: None)
    backend.obedient = False
    pool, _ = make(backend, monkeypatch, watchdog_s=10_000.0)
    with pool:
        pool.submit([job(5)])
        pool.on_tick = pool.cancel
        results = run(pool)
    # the cancellation came before anything was handed out
    assert results == [] and backend.seen == []
    pool, _ = make(backend, monkeypatch, watchdog_s=10_000.0)
    backend.alive.clear()
    with pool:
        pool.submit([job(5)])
        pool.on_tick = lambda: pool.cancel() if backend.seen else None
        results = run(pool)
    assert [(status, disposition) for _, _, status, disposition in results] == [("failed", Disposition.GAVE_UP)]
    assert backend.now < 200


def test_closing_reports_what_was_left_open_and_hurries_for_the_impatient() -> None:
    backend = ListBackend(lambda worker, attempt: finished(attempt))
    pool, events = make(backend)
    with pool:
        pool.submit([job(i) for i in range(8)])
        run(pool)
        pool.close()
        assert pool.gauges()["leases_open"] == 0.0
    assert [e["event"] for e in events].count("release_failed") >= 2
    assert backend.stopped[0] == pool_module.STOP_GRACE_S
    with pytest.raises(KeyboardInterrupt), pool:
        raise KeyboardInterrupt
    assert backend.stopped[-1] == pool_module.HASTY_GRACE_S
