"""Whatever hangs is ended, named, and costs nobody else anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.pool import RunStalledError
from rayrl.traces.store import RunReader
from tests.faults.support import check_books, events, null_config, plan, roll_out

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_a_straggler_is_tried_twice_then_set_aside(cluster: None, tmp_path: Path) -> None:
    switch = tmp_path / "mended"
    raw = null_config(tmp_path, "straggler", "HangsOnTask", episodes=40)
    task = plan({**raw, "model": {"kind": raw["model"]["kind"], "options": {"task_id": 0}}}).jobs[7].task_id
    raw["model"]["options"] = {"task_id": task, "stop_file": str(switch)}
    raw["runtime"] = {"deadline_s": 1.0}
    raw["execution"] |= {"max_attempts": 5, "max_deadline_attempts": 2}
    result = roll_out(raw)
    assert result.complete == 39 and result.exit_code == 6
    assert result.ledger["gave_up"] == {"deadline": 1} and result.ledger["failed"] == 2
    late = [r for r in RunReader(result.run_dir).iter_records() if r["status"] == "failed"]
    assert [(r["job"]["task_id"], r["attempt"]) for r in late] == [(task, 1), (task, 2)]
    assert all(r["error"]["class"] == "infrastructure" and r["error"]["code"] == "deadline" for r in late)
    assert all(r["error"]["stage"] == "model" and r["error"]["detail"]["request"] == "completion 1" for r in late)
    check_books(result)
    switch.touch()
    mended = roll_out(raw)
    assert mended.status == "complete" and mended.ran_now == 1
    check_books(mended)
    assert RunReader(result.run_dir).find(late[0]["episode_id"])["attempt"] == 3


@pytest.mark.slow
def test_the_watchdog_names_what_hangs(cluster: None, tmp_path: Path) -> None:
    raw = null_config(tmp_path, "stalled", "HangsAlways", episodes=20)
    raw["execution"] |= {"watchdog_s": 3.0}
    with pytest.raises(RunStalledError) as stalled:
        roll_out(raw)
    said = str(stalled.value)
    jobs = {job.episode_id for job in plan(raw).jobs}
    assert "nothing progressed for 3 s" in said and "completion 1" in said and "on rollout-" in said
    assert any(episode in said for episode in jobs)
    assert stalled.value.exit_code == 8
    run_dir = plan(raw).run_dir
    (event,) = events(run_dir, "watchdog")
    assert event["hanging"]
    scan = RunReader(run_dir).scan()
    assert scan.records == scan.cancelled == 12 and scan.complete == 0, "every admitted attempt has its record"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_ignores_even_cancellation_is_given_up(cluster: None, tmp_path: Path) -> None:
    raw = null_config(tmp_path, "deaf", "IgnoresCancellation", episodes=20)
    raw["execution"] |= {"watchdog_s": 2.0}
    raw["runtime"] = {"deadline_s": 1.0}
    with pytest.raises(RunStalledError):
        roll_out(raw)
    records = list(RunReader(plan(raw).run_dir).iter_records())
    assert len(records) == 12
    assert {r["error"]["message"] for r in records if r["status"] == "failed"} == {"did not answer to cancellation"}


@pytest.mark.slow
def test_a_worker_whose_event_loop_is_blocked_is_replaced(cluster: None, tmp_path: Path) -> None:
    raw = null_config(tmp_path, "blocked", "BlocksOnce", episodes=40)
    raw["model"]["options"] = {"marker": str(tmp_path / "blocked-once")}
    raw["execution"] |= {"worker_timeout_s": 6.0}
    result = roll_out(raw)
    assert result.status == "complete"
    (lost,) = events(result.run_dir, "worker_lost")
    assert "did not answer for 6 s" in lost["reason"] and lost["attempts"] >= 1
    assert result.ledger["failed"] == lost["attempts"]
    check_books(result)
