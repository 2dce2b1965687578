"""shopsimrl-episode-v4 comes in without inventing anything and without a private word in the traces."""

from __future__ import annotations

import orjson
import pytest

from rayrl.errors import DataError
from rayrl.traces.imports import ImportReport, import_episodes
from rayrl.traces.schema import expand, is_complete
from rayrl.traces.store import RunReader, TraceWriter


def foreign(task=12, status="completed", **more):
    state = {"observation_version": "shopping-observation-v7", "page_type": "search", "goal": {"asin": "SECRET"}}
    tools = [{"type": "function", "function": {"name": "click", "parameters": {}}}]
    made = {"id": "c1", "type": "function", "function": {"name": "click", "arguments": '{"value": "buy now"}'}}
    step = {
        "observation": "page",
        "observation_state": state,
        "tools": tools,
        "model": {
            "tool_calls": [made],
            "reasoning_content": "hm",
            "usage": {"prompt_tokens": 7, "completion_tokens": 2},
        },
        "action": "click[buy now]",
        "environment": {
            "observation": "done",
            "observation_state": state,
            "done": True,
            "reward": 0.5,
            "reward_detail": {"r_type": 1, "reason_key": "SECRET"},
            "goal": {"asin": "SECRET"},
            "lease_id": "SECRET",
        },
        "action_feedback": {"valid": True},
    }
    return {
        "schema": "shopsimrl-episode-v4",
        "job": {"task_id": task, "sample_id": 1, "seed": 99, "split": "val"},
        "status": status,
        "reset": {
            "task_instruction": "买一个枕头",
            "observation": "page",
            "observation_state": state,
            "environment_version": "shopsimulator-paper-aligned-v8",
            "lease_id": "SECRET",
            "user_persona": {"风格": "简约"},
        },
        "conversation": [{"role": "system", "content": "s"}, {"role": "user", "content": "u" * 100}],
        "steps": [step],
        "final": {"done": True, "reward": 0.5, "reward_detail": {"r_type": 1}, "goal": {"asin": "SECRET"}},
        **more,
    }


def write(tmp_path, *rows):
    path = tmp_path / "v4.jsonl"
    path.write_bytes(b"".join((r if isinstance(r, bytes) else orjson.dumps(r)) + b"\n" for r in rows))
    return path


def run(path):
    report = ImportReport()
    return list(import_episodes(path, report)), report


def test_an_episode_keeps_what_it_said(tmp_path):
    (line,), report = run(write(tmp_path, foreign()))
    record = orjson.loads(line.record)
    assert is_complete(record) and report == ImportReport(imported=1)
    assert record["episode_id"] == "task-000012__sample-001" and record["job"]["seed"] == 99
    assert record["provenance"]["imported_from"] == "shopsimrl-episode-v4"
    full = expand(record)
    assert full["reset"]["instruction"] == "买一个枕头" and full["reset"]["persona"] == {"风格": "简约"}
    step = full["steps"][0]
    assert step["model"]["tool_calls"] == [{"id": "c1", "name": "click", "arguments": {"value": "buy now"}}]
    assert step["model"]["reasoning"] == "hm" and step["action"] == "click[buy now]"
    assert step["environment"]["observation"]["text"] == "done" and step["environment"]["reward"] == 0.5
    assert full["conversation"][1]["content"] == "u" * 100
    assert record["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "model_calls": 1}


def test_nothing_private_is_in_the_trace_and_the_goal_is_beside_it(tmp_path):
    (line,), _ = run(write(tmp_path, foreign()))
    assert "SECRET" not in orjson.dumps(expand(orjson.loads(line.record))).decode()
    assert orjson.loads(line.private) == {
        "episode_id": "task-000012__sample-001",
        "attempt": 1,
        "goal": {"asin": "SECRET"},
    }


def test_attempts_are_counted_in_file_order(tmp_path):
    lines, _ = run(
        write(tmp_path, foreign(status="failed", error={"stage": "model", "message": "x"}), foreign(), foreign(7))
    )
    records = [orjson.loads(line.record) for line in lines]
    assert [(r["episode_id"][:11], r["attempt"], r["status"]) for r in records] == [
        ("task-000012", 1, "failed"),
        ("task-000012", 2, "completed"),
        ("task-000007", 1, "completed"),
    ]
    assert records[0]["final"] is None and records[0]["error"]["message"] == "x"


def test_lines_that_cannot_be_converted_are_reported_with_their_number(tmp_path):
    rows = (b"{", foreign(), b"", {"schema": "other-v1"}, {"schema": "shopsimrl-episode-v4"}, b"[1]", foreign(13))
    lines, report = run(write(tmp_path, *rows))
    assert len(lines) == report.imported == 2
    assert [text.split(":")[0] for text in report.skipped] == ["line 1", "line 4", "line 5", "line 6"]
    assert "'other-v1'" in report.skipped[1] and "KeyError" in report.skipped[2]


@pytest.mark.parametrize("rows", [(), (b"{",), ({"schema": "x"},)])
def test_a_file_with_nothing_in_it_is_bad_input(tmp_path, rows):
    with pytest.raises(DataError, match=r"v4\.jsonl: nothing could be imported"):
        run(write(tmp_path, *rows))


def test_a_missing_file_is_bad_input(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        run(tmp_path / "none.jsonl")


def test_protocol_errors_and_policy_failures_stay_what_they_are(tmp_path):
    row = foreign()
    del row["steps"][0]["action"], row["steps"][0]["environment"]
    row["steps"][0]["model"]["tool_calls"] = []
    row["steps"][0]["protocol_error"] = {"code": "no_tool_call", "message": "none"}
    (line,), _ = run(write(tmp_path, row))
    step = orjson.loads(line.record)["steps"][0]
    assert step["protocol_error"]["code"] == "no_tool_call" and "environment" not in step and "action" not in step


def test_what_is_imported_reads_like_any_run(tmp_path):
    writer = TraceWriter(tmp_path / "run")
    lines, _ = run(write(tmp_path, foreign(), foreign(13)))
    for line in lines:
        writer.append(line)
    writer.close()
    report = RunReader(tmp_path / "run").scan()
    assert (report.complete, report.malformed_lines, report.prompt_tokens) == (2, 0, 14)
