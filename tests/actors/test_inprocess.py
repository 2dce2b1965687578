"""The backend without Ray under the pool: runs, retries, cancels, and never hangs or leaks."""

from __future__ import annotations

import threading
import time

import pytest

from actors import inprocess as inprocess_module
from actors.inprocess import InProcessBackend
from actors.ledger import Disposition
from actors.pool import RolloutPool, RunStalledError, TooManyFailuresError
from rayrl import worker as worker_module
from rayrl.errors import EnvironmentFaultError, RayrlError
from rayrl.settings import ExecutionConfig
from tests.doubles import FakeFactory, FakeModel, hang, job, raising
from tests.test_worker import spec


@pytest.fixture
def run(monkeypatch):
    def start(environments, *, worker_timeout_s=5.0, **execution):
        monkeypatch.setattr(worker_module, "build_environments", lambda *_, **__: environments)
        monkeypatch.setattr(worker_module, "build_model", lambda *_, **__: FakeModel())
        made = spec(concurrency=4)
        backend = InProcessBackend(made, worker_timeout_s=worker_timeout_s)
        events = []
        config = ExecutionConfig(mode="inprocess", retry_backoff_s=0.0, **execution)
        return RolloutPool(backend, made, config, on_event=events.append), events

    before = threading.active_count()
    yield start
    assert threading.active_count() <= before, "a run left a thread behind"


def test_every_job_completes_and_the_loop_is_closed(run):
    pool, _ = run(FakeFactory())
    with pool:
        pool.submit([job(n) for n in range(30)])
        found = list(pool.results())
    assert {d for _, d in found} == {Disposition.ACCEPTED} and len(found) == 30
    assert pool.backend._loop.is_closed()
    assert pool.gauges()["leases_open"] == 0


def test_failures_are_tried_again_with_the_next_number(run):
    def sick_once(env, job):
        seen.append(job.task_id)
        if seen.count(job.task_id) == 1:
            raise EnvironmentFaultError("no", code="http_500", stage="reset")

    seen: list[int] = []
    pool, events = run(FakeFactory(on_reset=sick_once))
    with pool:
        pool.submit([job(n) for n in range(5)])
        found = list(pool.results())
    assert sorted((f.number, d.value) for f, d in found) == [(1, "retry")] * 5 + [(2, "accepted")] * 5
    assert sum(e["event"] == "attempt_failed" for e in events) == 5


def test_a_failing_start_is_reported_and_leaves_nothing(run):
    class Down(FakeFactory):
        closed = 0

        async def start(self):
            raise EnvironmentFaultError("no server at http://x", code="unreachable", stage="reset")

        async def aclose(self):
            self.closed += 1

    down = Down()
    pool, _ = run(down)
    with pytest.raises(EnvironmentFaultError, match="no server"), pool:
        pass
    assert down.closed == 1 and pool.backend._loop.is_closed()


def test_too_many_failures_in_a_row_stop_the_run_with_its_books_closed(run):
    pool, _ = run(
        FakeFactory(on_reset=raising(EnvironmentFaultError("down", code="http_500", stage="reset"))),
        max_consecutive_failures=3,
        max_attempts=100,
    )
    found = []
    with pool:
        pool.submit([job(n) for n in range(20)])
        with pytest.raises(TooManyFailuresError, match="http_500: down"):
            for item in pool.results():
                found.append(item)
    counts = pool.ledger.counts
    assert counts.admitted == len(found) == counts.failed + counts.cancelled


def test_the_watchdog_names_what_hangs(run):
    pool, _ = run(FakeFactory(on_step=hang), watchdog_s=1.5)
    with pool:
        pool.submit([job(7)])
        with pytest.raises(RunStalledError, match=r"task-000007__sample-000 \(step click, step 0"):
            list(pool.results())
    pool.ledger.check_closed()


def test_cancel_ends_everything_with_records(run):
    pool, _ = run(FakeFactory(on_step=hang))
    with pool:
        pool.submit([job(n) for n in range(9)])
        threading.Timer(0.2, pool.cancel).start()
        found = list(pool.results())
    assert found and {f.status for f, _ in found} == {"cancelled"}


def test_code_that_blocks_the_loop_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(inprocess_module, "STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(worker_module, "build_environments", lambda *_, **__: FakeFactory(on_reset=block))
    monkeypatch.setattr(worker_module, "build_model", lambda *_, **__: FakeModel())
    block.release = threading.Event()
    backend = InProcessBackend(spec(), worker_timeout_s=0.3)
    backend.start(1)
    began = time.monotonic()
    with pytest.raises(RayrlError, match="blocks its event loop"):
        backend.submit("inprocess-1", [worker_module.Attempt(job(1), 1)])
    backend.cancel("inprocess-1")  # does not wait for what cannot answer
    assert time.monotonic() - began < 5
    block.release.set()
    backend.stop()


def block(*_):
    block.release.wait(20)


def test_use_before_start_is_an_error():
    backend = InProcessBackend(spec())
    with pytest.raises(RayrlError, match="before start"):
        backend.arm("inprocess-1")
    backend.stop()
