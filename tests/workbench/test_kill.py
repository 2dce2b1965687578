"""``kill -9`` of the driver, the server, Ray workers and the whole tree at random points.

No case is lost; a case whose model was called by an attempt that died has that attempt in its history as lost (or
fenced); model calls beyond the recorded ones are counted and bounded by the lost attempts.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from rayrl.workbench.workbench import Workbench
from tests.workbench.conftest import make_pool, sample_experiment

ROOT = Path(__file__).parents[2]
MAX_CALLS = 12


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def counting_experiment(bench, log, n, *, latency_ms=15, **more):
    options = {"log": str(log), "latency_ms": latency_ms}
    bench.models.save("counting", {"kind": "tests.workbench.models:CountingReader", "options": options}, trusted=True)
    return sample_experiment(bench, n, model="counting", concurrency=8, **more)


def audit(bench, experiment_id, log, n):
    """Everything about the books; returns the number of extra model calls."""
    with bench.store.read() as connection:
        rows = connection.exec_driver_sql(
            "SELECT r.ordinal, r.state, r.attempts, r.model_calls, c.query FROM evaluation_results r JOIN"
            " evaluation_experiments e ON e.id=r.experiment_id JOIN evaluation_cases c ON c.dataset_id=e.dataset_id AND"
            " c.ordinal=r.ordinal WHERE r.experiment_id=?",
            (experiment_id,),
        ).all()
        runs = connection.exec_driver_sql(
            "SELECT ordinal, attempt, state, COALESCE(model_calls, 0) FROM evaluation_case_runs WHERE experiment_id=?",
            (experiment_id,),
        ).all()
    assert len(rows) == n and {row.state for row in rows} == {"completed"}
    history, completed, recorded = Counter(), Counter(), Counter()
    for ordinal, _, state, calls in runs:
        history[ordinal] += 1
        completed[ordinal] += state == "completed"
        recorded[ordinal] += calls
    assert {row.ordinal: row.attempts for row in rows} == dict(history), "an attempt is missing in the history"
    assert set(completed.values()) == {1}, "a case was completed more than once"
    made = Counter(json.loads(line) for line in log.read_text().splitlines())
    extra = 0
    for query, ordinals in _by_query(rows).items():
        more = made[query] - sum(recorded[o] for o in ordinals)
        unfinished = sum(history[o] - 1 for o in ordinals)
        assert 0 <= more <= unfinished * MAX_CALLS, f"{query}: {more} calls of nobody, {unfinished} lost attempts"
        extra += more
    return extra


def _by_query(rows):
    out = {}
    for row in rows:
        out.setdefault(row.query, []).append(row.ordinal)
    return out


@pytest.mark.parametrize(
    ("seed", "n", "wanted"),
    [(0, 20, 1), *(pytest.param(seed, 60, 3, marks=pytest.mark.slow) for seed in range(1, 4))],
)
def test_driver_killed_at_random_points(bench, tmp_path, seed, n, wanted):
    log = tmp_path / "calls"
    experiment = counting_experiment(bench, log, n)["id"]
    draw, kills = random.Random(seed), 0
    command = [sys.executable, "-m", "jobs.workbench", "drive", "--root", str(bench.store.root), experiment]
    for _ in range(20):
        process = subprocess.Popen(command, cwd=ROOT, env=environment())
        until = time.monotonic() + 60
        goal = bench.experiments.get(experiment)["counts"]["completed"] + draw.randint(1, n // 3)
        while process.poll() is None and time.monotonic() < until and kills < wanted:
            if bench.experiments.get(experiment)["counts"]["completed"] >= goal:
                time.sleep(draw.random() * 0.1)
                process.kill()
                kills += 1
                break
            time.sleep(0.01)
        if process.wait(60) == 0:
            break
    assert kills == wanted
    audit(bench, experiment, log, n)


def start_server(root):
    command = [sys.executable, "-m", "jobs.cli", "studio", "--root", str(root), "--port", "0", "--json"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    text = ""
    while "}" not in text:
        line = process.stdout.readline()
        assert line, "the server did not start"
        text += line
    return process, json.loads(text)["url"]


def wait_http(url, experiment, state="completed", timeout_s=90):
    until = time.monotonic() + timeout_s
    while True:
        found = httpx.get(f"{url}/api/evaluations/{experiment}", timeout=30).json()
        if found["state"] == state:
            return found
        assert time.monotonic() < until, found
        time.sleep(0.1)


def family(process):
    """The server's process and all below it, drivers of their own session included."""
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


@pytest.mark.slow
@pytest.mark.parametrize("whole_tree", [False, True], ids=["server", "tree"])
def test_server_killed_alone_or_with_all_its_drivers(tmp_path, whole_tree):
    n, log, root = 80, tmp_path / "calls", tmp_path / "store"
    bench = Workbench(root)
    experiment = counting_experiment(bench, log, n, latency_ms=40)["id"]
    draw = random.Random(1)
    for goal in (10, 40):
        process, _ = start_server(root)
        until = time.monotonic() + 90
        while bench.experiments.get(experiment)["counts"]["completed"] < goal + draw.randint(0, 10):
            assert time.monotonic() < until
            time.sleep(0.02)
        victims = family(process) if whole_tree else [psutil.Process(process.pid)]
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        process.wait(30)
    process, url = start_server(root)
    try:
        wait_http(url, experiment)
    finally:
        process.terminate()
        process.wait(60)
    audit(bench, experiment, log, n)
    bench.close()


@pytest.mark.slow
@pytest.mark.ray
def test_ray_worker_killed(bench, tmp_path):
    from jobs.workbench import make_pool as make_ray_pool
    from rayrl.workbench.driver import Driver
    from rayrl.workbench.experiments import Params

    n, log = 60, tmp_path / "calls"
    experiment = counting_experiment(bench, log, n, latency_ms=60, params=Params(mode="ray"))["id"]
    killed = []

    def make(spec, execution, on_event):
        pool = make_ray_pool(spec, execution, on_event)
        submit = pool.submit

        def submit_and_kill(jobs, **facts):
            submit(jobs, **facts)
            done = bench.experiments.get(experiment)["counts"]["completed"]
            if len(killed) < 2 and done >= 10 * (len(killed) + 1):
                (name,) = pool._workers
                killed.append(pool.backend.pid(name))
                os.kill(killed[-1], signal.SIGKILL)

        pool.submit = submit_and_kill
        return pool

    found = Driver(bench, experiment, make).run()
    assert found["state"] == "completed" and len(killed) == 2
    audit(bench, experiment, log, n)


def test_this_file_drives_as_the_command_does(bench, tmp_path):
    """The audit itself can fail: calls of nobody are seen."""
    from rayrl.workbench.driver import Driver

    log = tmp_path / "calls"
    experiment = counting_experiment(bench, log, 5, latency_ms=0)["id"]
    Driver(bench, experiment, make_pool).run()
    assert audit(bench, experiment, log, 5) == 0
    log.write_text(log.read_text() + log.read_text().splitlines()[0] + "\n")
    with pytest.raises(AssertionError, match="calls of nobody"):
        audit(bench, experiment, log, 5)
