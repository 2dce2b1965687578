"""run: what a resume counts, what an interrupt does at any moment, what a second process leaves alone."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import orjson
import pytest

from jobs.rollout import run_rollout
from rayrl.errors import RunConflictError
from rayrl.experiment import load_run_config, prepare
from rayrl.traces.store import RunReader

SLOW = {"kind": "tests.jobs.sick:Slow", "options": {"seconds": 60}}


def experiment(path, *overrides):
    return prepare(*load_run_config(path, list(overrides)))


def lines(run_dir):
    return (run_dir / "traces.jsonl").read_bytes().splitlines()


def interrupt_when(run_dir, attempts):
    """Sends this process a Ctrl-C once so many attempts are written, and some more are under way."""

    def work():
        until = time.monotonic() + 60
        path = run_dir / "traces.jsonl"
        while time.monotonic() < until and not (path.exists() and path.read_bytes().count(b"\n") >= attempts):
            time.sleep(0.02)
        time.sleep(0.3)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_any_cut_of_the_traces_resumes_to_the_same_multiset_of_finished_jobs(plain_run):
    whole = experiment(plain_run(), "tasks.sample_size=8")
    run_rollout(whole, quiet=True)
    data = (whole.run_dir / "traces.jsonl").read_bytes()
    want = sorted(job.episode_id for job in whole.jobs)
    for cut in range(0, len(data) + 1, max(1, len(data) // 12)):
        (whole.run_dir / "traces.jsonl").write_bytes(data[:cut])
        result = run_rollout(whole, quiet=True)
        assert result.status == "complete"
        done = [r["episode_id"] for r in RunReader(whole.run_dir).iter_records()]
        assert sorted(done) == want, f"cut at byte {cut}"


def test_results_do_not_depend_on_parallelism(shop_run):
    def outcome(name, *overrides):
        made = experiment(shop_run(f"{name}.yaml", experiment__name=name), *overrides)
        run_rollout(made, quiet=True)
        found = {}
        for record in RunReader(made.run_dir).results():
            found[record["episode_id"]] = (
                record["final"],
                [step.get("action") for step in record["steps"]],
                [step["seed"] for step in record["steps"]],
            )
        return found

    one = outcome("one", "execution.concurrency=1", "execution.prefetch=0")
    assert outcome("many", "execution.concurrency=8") == one
    assert len(one) == 4


def test_what_does_not_belong_to_the_run_does_not_complete_it(plain_run):
    made = experiment(plain_run())
    run_rollout(made, quiet=True)
    record = orjson.loads(lines(made.run_dir)[0])
    strangers = [orjson.dumps(record | {"episode_id": f"task-{n:06d}__sample-000"}) for n in range(900, 904)]
    (made.run_dir / "traces.jsonl").write_bytes(b"\n".join(strangers) + b"\n")
    result = run_rollout(made, quiet=True)
    assert (result.ran_now, result.complete) == (4, 4)


def test_attempts_are_numbered_on_after_a_resume(plain_run):
    sick = {"kind": "tests.jobs.sick:Flaky", "options": {"fail": [0, 2, 3, 5, 7, 11, 13, 17]}}
    made = experiment(plain_run(environment=sick), "execution.max_attempts=2", "tasks.sample_size=1")
    for _ in range(2):
        run_rollout(made, quiet=True)
    attempts = [orjson.loads(line)["attempt"] for line in lines(made.run_dir)]
    assert attempts == [1, 2, 3, 4]


def test_an_interrupt_is_obeyed_while_nothing_finishes(plain_run):
    made = experiment(plain_run(environment=SLOW))
    before = signal.getsignal(signal.SIGINT)
    thread = interrupt_when(made.run_dir, 0)
    began = time.monotonic()
    result = run_rollout(made, quiet=True)
    thread.join()
    assert time.monotonic() - began < 40
    assert (result.exit_code, result.ledger["cancelled"]) == (6, 4) and "interrupted" in result.reason
    assert {orjson.loads(line)["status"] for line in lines(made.run_dir)} == {"cancelled"}
    assert signal.getsignal(signal.SIGINT) is before  # the caller's own handling is back


def test_an_interrupt_after_a_spending_cap_still_stops_what_runs(plain_run):
    mixed = {"kind": "tests.jobs.sick:Mixed", "options": {"slow": [11, 13, 17]}}
    made = experiment(plain_run(environment=mixed, tasks__sample_size=None), "execution.max_tokens_total=1")
    thread = interrupt_when(made.run_dir, 5)
    began = time.monotonic()
    result = run_rollout(made, quiet=True)
    thread.join()
    assert time.monotonic() - began < 40
    assert result.exit_code == 6 and result.reason.startswith("spending cap reached")
    assert (result.complete, result.ledger["cancelled"]) == (5, 3)


def test_the_second_process_changes_nothing(plain_run):
    made = experiment(plain_run())
    run_rollout(made, quiet=True)
    before = {path.name: path.read_bytes() for path in made.run_dir.iterdir() if path.is_file()}
    other = experiment(plain_run(), "runtime.max_actions=9")
    with pytest.raises(RunConflictError, match="max_actions"):
        run_rollout(other, quiet=True)
    after = {path.name: path.read_bytes() for path in made.run_dir.iterdir() if path.is_file()}
    assert before == after


def test_private_goals_stay_beside_the_traces_with_the_owners_mode(shop_run, products_file):
    made = experiment(
        shop_run(environment={"kind": "shop", "embedded": {"products": str(products_file)}}), "tasks.sample_size=2"
    )
    result = run_rollout(made, quiet=True)
    assert result.status == "complete" and result.stats["leases_open"] == 0
    goals = RunReader(made.run_dir).private_goals()
    assert set(goals) == {job.episode_id for job in made.jobs}
    asins = {goal["asin"] for goal in goals.values()}
    assert all(asins) and (made.run_dir / "private.jsonl").stat().st_mode & 0o777 == 0o600
    for name in ("traces.jsonl", "summary.json", "events.jsonl", "manifest.json"):
        text = Path(made.run_dir / name).read_text(encoding="utf-8")
        assert '"goal"' not in text and "reason_key" not in text
