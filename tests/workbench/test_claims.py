"""Leases and fencing: no case lost, none run twice unnoticed."""

import multiprocessing
import subprocess
import sys
import threading
import time

import pytest

from rayrl.workbench.claims import Claims, owner_alive, owner_name
from rayrl.workbench.evidence import Outcome
from rayrl.workbench.store import Store
from tests.workbench.conftest import sample_experiment


def runs(bench, experiment_id):
    with bench.store.read() as connection:
        query = (
            "SELECT ordinal, attempt, state FROM evaluation_case_runs WHERE experiment_id=? ORDER BY ordinal, attempt"
        )
        return [tuple(row) for row in connection.exec_driver_sql(query, (experiment_id,))]


def done(claim, prediction="fast"):
    return (claim, Outcome(state="completed", prediction=prediction, evidence="none"), None, None)


def test_claims_go_out_once_in_order_with_fresh_tokens(bench):
    experiment = sample_experiment(bench, 5)["id"]
    a, b = Claims(bench.store, experiment, "host:1:0"), Claims(bench.store, experiment, "host:2:0")
    first, second = a.take(3), b.take(10)
    assert [c.ordinal for c in first] == [0, 1, 2] and [c.ordinal for c in second] == [3, 4]
    assert a.take(1) == [] and {c.token for c in first + second} == {1}


def test_late_result_is_fenced_off_and_kept_in_the_history(bench):
    experiment = sample_experiment(bench, 1)["id"]
    slow = Claims(bench.store, experiment, "elsewhere:1:0", lease_s=0.0)
    (old,) = slow.take(1)
    time.sleep(0.01)
    other = Claims(bench.store, experiment, owner_name())
    assert other.recover() == 1
    (new,) = other.take(1)
    assert (new.token, new.attempt) == (2, 2)
    assert slow.finish([done(old, "slow")]) == [False]
    assert other.finish([done(new, "fast")]) == [True]
    assert slow.finish([done(old, "slow")]) == [False]
    assert runs(bench, experiment) == [(0, 1, "fenced"), (0, 2, "completed")]
    with bench.store.read() as connection:
        assert connection.exec_driver_sql("SELECT prediction FROM evaluation_results").scalar() == "fast"


def test_owner_that_is_gone_is_noticed_before_its_lease_ends(bench):
    code = "from rayrl.workbench.claims import owner_name; print(owner_name())"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert owner_alive(dead) is False and owner_alive(owner_name()) is True and owner_alive("other:1:2") is None
    experiment = sample_experiment(bench, 2)["id"]
    Claims(bench.store, experiment, dead, lease_s=3600).take(2)
    assert Claims(bench.store, experiment, owner_name()).recover() == 2
    assert [state for _, _, state in runs(bench, experiment)] == ["lost", "lost"]


def test_live_owner_keeps_its_lease_by_renewing(bench):
    experiment = sample_experiment(bench, 1)["id"]
    a = Claims(bench.store, experiment, "elsewhere:1:0", lease_s=0.2)
    a.take(1)
    b = Claims(bench.store, experiment, owner_name())
    for _ in range(3):
        time.sleep(0.1)
        assert a.renew() == 1 and b.recover() == 0
    time.sleep(0.3)
    assert b.recover() == 1


def _take_all(root, experiment, out):
    store = Store(root)
    claims = Claims(store, experiment, owner_name())
    found = []
    while batch := claims.take(7):
        found += [c.ordinal for c in batch]
        claims.finish([done(c) for c in batch])
    out.put(found)


def test_eight_writer_processes_share_the_work_without_locking_each_other_out(bench):
    experiment = sample_experiment(bench, 200)["id"]
    context = multiprocessing.get_context("forkserver")  # fresh processes, but what they import is imported once
    context.set_forkserver_preload([__name__])
    out = context.Queue()
    workers = [context.Process(target=_take_all, args=(bench.store.root, experiment, out)) for _ in range(8)]
    for worker in workers:
        worker.start()
    found = [out.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert sorted(n for part in found for n in part) == list(range(200))


def test_reads_that_turn_into_writes_do_not_fail_under_contention(bench):
    experiment = sample_experiment(bench, 1)["id"]
    failures = []

    def write():
        for _ in range(30):
            try:
                bench.experiments.set_concurrency(experiment, 3)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("state", ["completed", "failed"])
def test_again_renews_only_the_live_claim(bench, state):
    experiment = sample_experiment(bench, 1)["id"]
    claims = Claims(bench.store, experiment, owner_name())
    (claim,) = claims.take(1)
    claims.finish([(claim, Outcome(state=state, failure="infrastructure"), None, None)])
    renewed = claims.again(claim)
    assert renewed.token == claim.token + 1 and claims.again(claim) is None
