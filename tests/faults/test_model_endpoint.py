"""An endpoint that misbehaves in every known way: each outcome is the designed one, and attempts are bounded."""

from __future__ import annotations

import json
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from jobs.rollout import RunResult, main
from rayrl.schemas import JsonDict, step_seed
from rayrl.splits import make_split
from rayrl.testing.mock_endpoint import MockEndpoint
from rayrl.traces.schema import is_complete
from rayrl.traces.store import RunReader
from tests.faults.support import (
    ThreadedMock,
    check_books,
    events,
    http_model,
    null_config,
    plan,
    roll_out,
)

REQUESTS, ATTEMPTS, ACTIONS, STEPS = 3, 2, 5, 3
FAST = {"max_attempts": REQUESTS, "backoff_initial_s": 0.01, "backoff_max_s": 0.05}

SCORED_AS_PROTOCOL_ERROR = {
    "truncated_json": "invalid_body",
    "not_json": "invalid_body",
    "json_list": "invalid_body",
    "no_choices": "no_choices",
    "no_message": "no_choices",
    "two_calls": "multiple_tool_calls",
    "no_call": "no_tool_call",
    "unknown_tool": "unknown_tool",
    "bad_json_args": "invalid_arguments_json",
    "missing_args": "invalid_arguments",
    "cut_body": "invalid_body",
}
"""HTTP 200 with something that is no single valid call: costs an action, is answered, is never asked for again."""

SCORED_AS_POLICY_FAILURE = {
    "length": "generation_length",
    "length_broken_call": "generation_length",
    "length_second_call": "generation_length",
    "context": "context_overflow",
}
"""The policy's own end: terminated, scored zero, no second sample."""

RETRIED = ["429", "500", "502", "503", "504", "408", "409", "425", "never", "reset"]
"""Retried inside the adapter, then a failed attempt of the episode."""

REFUSED = ["400", "401", "404", "422"]
"""Fail at once; a second attempt would not mend them."""

PLAYS_ON = ["ok", "length_whole_call", "text_beside_call", "reasoning"]
"""Not a fault."""

BEHAVIOURS = [*SCORED_AS_PROTOCOL_ERROR, *SCORED_AS_POLICY_FAILURE, *RETRIED, *REFUSED, *PLAYS_ON]


def split_file(root: Path, n: int) -> Path:
    path = root / "counting.json"
    split = make_split("train", list(range(n)), None).model_dump(mode="json")
    path.write_text(json.dumps({"version": "rayrl-splits-v1", "source": {}, "splits": {"train": split}}))
    return path


def marked(root: Path, name: str, mock: MockEndpoint, behaviours: list[str], n: int, **execution: Any) -> JsonDict:
    """A run of ``n`` tasks; task i meets behaviour ``i % len(behaviours)``."""
    raw = null_config(root, name, "Obedient")
    raw["tasks"] = {"manifest": str(split_file(root, n)), "split": "train"}
    raw["environment"] = {
        "kind": "tests.faults.environments:MarkedEnvironmentFactory",
        "options": {"behaviours": behaviours, "steps": STEPS},
    }
    timeouts = {"connect_s": 5.0, "read_s": 1.0, "attempt_s": 1.0, "total_s": 30.0}
    raw["model"] = http_model(mock.url, retries=FAST, timeouts=timeouts)
    raw["runtime"] = {"max_actions": ACTIONS}
    raw["execution"] |= {"max_attempts": ATTEMPTS, "max_consecutive_failures": 1000, "concurrency": 16, **execution}
    return raw


@pytest.mark.ray
def test_every_misbehaviour_has_its_outcome(cluster: None, tmp_path: Path) -> None:
    with ThreadedMock() as mock:
        raw = marked(tmp_path, "all", mock, BEHAVIOURS, len(BEHAVIOURS))
        result = roll_out(raw)
        per_seed = dict(mock.per_seed)
    jobs = {job.task_id: job for job in plan(raw).jobs}
    records: dict[str, list[JsonDict]] = {}
    for record in RunReader(result.run_dir).iter_records():
        records.setdefault(BEHAVIOURS[record["job"]["task_id"]], []).append(record)
    requests = {
        behaviour: [per_seed.get(str(step_seed(jobs[task].seed, step)), 0) for step in range(ACTIONS)]
        for task, behaviour in enumerate(BEHAVIOURS)
    }
    for behaviour, code in SCORED_AS_PROTOCOL_ERROR.items():
        (record,) = records[behaviour]
        assert is_complete(record) and record["final"]["termination_reason"] == "action_limit", behaviour
        assert [s["protocol_error"]["code"] for s in record["steps"]] == [code] * ACTIONS, behaviour
        assert all(s.get("environment") is None and s.get("action") is None for s in record["steps"])
        assert record["final"]["reward"] == 0.0 and requests[behaviour] == [1] * ACTIONS, behaviour
    for behaviour, code in SCORED_AS_POLICY_FAILURE.items():
        (record,) = records[behaviour]
        assert is_complete(record) and record["final"]["termination_reason"] == "generation_length", behaviour
        (step,) = record["steps"]
        assert step["policy_failure"]["code"] == code and step.get("environment") is None
        assert record["final"]["reward"] == 0.0 and requests[behaviour] == [1, 0, 0, 0, 0], behaviour
    for behaviour in RETRIED:
        failed = records[behaviour]
        assert [r["attempt"] for r in failed] == [1, 2] and all(r["status"] == "failed" for r in failed), behaviour
        assert {(r["error"]["class"], r["error"]["code"]) for r in failed} == {("model_transport", "retries_exhausted")}
        assert requests[behaviour] == [REQUESTS * ATTEMPTS, 0, 0, 0, 0], behaviour
        assert all(r["final"] is None for r in failed)
    for behaviour in REFUSED:
        (record,) = records[behaviour]
        assert record["status"] == "failed" and record["error"]["class"] == "model_transport", behaviour
        assert requests[behaviour] == [1, 0, 0, 0, 0], behaviour
    for behaviour in PLAYS_ON:
        (record,) = records[behaviour]
        assert is_complete(record) and record["final"]["reward"] == 1.0, behaviour
        assert requests[behaviour] == [1] * STEPS + [0, 0], behaviour
    check_books(result)
    assert result.status == "incomplete" and result.exit_code == 6
    assert result.episodes - result.complete == len(RETRIED) + len(REFUSED)
    assert result.ledger["gave_up"]["retries_exhausted"] == len(RETRIED)
    assert result.stats["leases_open"] == 0


@pytest.mark.ray
@pytest.mark.slow
def test_passing_faults_are_retried_where_they_happen(cluster: None, tmp_path: Path) -> None:
    """A burst of 429s, 500s and cut connections costs requests, never an attempt of an episode."""
    faults = ["429:0.1", "500", "reset", "503:0.1"] * 8
    with ThreadedMock(script=deque(faults)) as mock:
        result = roll_out(marked_ok(tmp_path, mock))
        stats = mock.stats()
    assert result.status == "complete" and result.ledger["failed"] == 0
    assert stats["script_left"] == 0 and stats["most_per_seed"] <= 8
    assert stats["requests"] == result.stats["model_steps"] + len(faults)
    retried = [s["model"]["metadata"]["retried"] for s in steps_of(result) if "retried" in s["model"]["metadata"]]
    assert sum(map(len, retried)) == len(faults)
    check_books(result)


def marked_ok(root: Path, mock: MockEndpoint) -> JsonDict:
    raw = null_config(root, "burst", "Obedient")
    retries = {"max_attempts": 8, "backoff_initial_s": 0.01, "backoff_max_s": 0.05}
    raw["model"] = http_model(mock.url, retries=retries)
    return raw


def steps_of(result: RunResult) -> list[JsonDict]:
    return [step for record in RunReader(result.run_dir).iter_records() for step in record["steps"]]


@pytest.mark.ray
@pytest.mark.slow
def test_a_dead_endpoint_stops_the_run_and_a_resume_completes_it(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadedMock(default="500") as mock:
        raw = null_config(tmp_path, "dead", "Obedient", episodes=60)
        raw["model"] = http_model(mock.url, retries={**FAST, "max_attempts": 2})
        raw["execution"] |= {"max_consecutive_failures": 10, "max_attempts": 3}
        config = tmp_path / "dead.yaml"
        config.write_text(json.dumps(raw))
        assert main([str(config), "--quiet"]) == 6
        said = capsys.readouterr().err
        assert "attempts in a row failed" in said and "HTTP 500" in said
        run_dir = plan(raw).run_dir
        scan = RunReader(run_dir).scan()
        assert scan.complete == 0 and 10 <= scan.failed < 60 * 3
        assert 2 * scan.failed <= mock.requests <= 2 * (scan.failed + scan.cancelled)
        assert len({(e["episode_id"], e["attempt"]) for e in events(run_dir, "attempt_failed")}) == scan.failed
        mock.default = "ok"
        result = roll_out(raw)
    assert result.status == "complete" and result.complete == 60
    check_books(result)
    # the failed attempts stay on record, and numbers go on where they stopped
    first = RunReader(run_dir).scan()
    assert first.failed == scan.failed and first.attempts_beyond_first >= 1


@pytest.mark.ray
@pytest.mark.slow
def test_one_incident_that_fails_everything_in_flight_does_not_stop_the_run(cluster: None, tmp_path: Path) -> None:
    """More episodes in flight than ``max_consecutive_failures`` allows in a row: it is about faults that last."""
    with ThreadedMock(default="never") as mock:
        raw = null_config(tmp_path, "incident", "Obedient", episodes=40)
        timeouts = {"connect_s": 5.0, "read_s": 2.0, "attempt_s": 2.0, "total_s": 4.0}
        raw["model"] = http_model(mock.url, retries={**FAST, "max_attempts": 1}, timeouts=timeouts)
        raw["execution"] |= {"max_consecutive_failures": 5, "actors": 1, "concurrency": 40, "max_attempts": 5}

        def mend() -> None:
            while mock.in_flight < 20:
                if stop.wait(0.01):
                    return
            mock.default = "ok"

        stop = threading.Event()
        thread = threading.Thread(target=mend)
        thread.start()
        result = roll_out(raw)
        stop.set()
        thread.join()
    assert result.status == "complete" and result.ledger["failed"] >= 20
    check_books(result)
