"""traces verify|show|import through the command."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.traces.test_imports import foreign


@pytest.fixture
def run_dir(command, plain_run):
    _, result = command("run", plain_run())
    return Path(result["run_dir"])


def test_a_sound_run(command, run_dir):
    code, found = command("traces", "verify", run_dir)
    assert code == 0 and found["ok"] and (found["complete"], found["expected"], found["missing"]) == (4, 4, 0)


def test_each_kind_of_damage_is_found(command, run_dir):
    traces = run_dir / "traces.jsonl"
    sound = traces.read_bytes()
    first = sound.splitlines(keepends=True)[0]
    stranger = orjson.loads(first) | {"episode_id": "task-000999__sample-000"}
    cases = {
        "duplicates": (sound + first, 1),
        "malformed_lines": (sound + b"{\n", 1),
        "torn_tail": (sound + first[:-20], True),
        "foreign_schema_lines": (sound + b'{"schema": "other"}\n', 1),
        "not_in_manifest": (sound + orjson.dumps(stranger) + b"\n", ["task-000999__sample-000"]),
    }
    for key, (data, value) in cases.items():
        traces.write_bytes(data)
        code, found = command("traces", "verify", run_dir)
        assert code == 6 and not found["ok"] and found[key] == value, key
        assert found["complete"] >= 4, "damage hid a complete record"
    traces.write_bytes(b"".join(sound.splitlines(keepends=True)[1:]))
    code, found = command("traces", "verify", run_dir)
    assert code == 0 and found["missing"] == 1  # nothing is wrong with what is there; the run can be resumed


def test_a_damaged_run_goes_on_and_comes_out_whole(command, run_dir, plain_run):
    traces = run_dir / "traces.jsonl"
    lines = traces.read_bytes().splitlines(keepends=True)
    kept = {orjson.loads(line)["episode_id"] for line in lines[:2]}
    traces.write_bytes(b"".join(lines[:2]) + lines[0] + lines[2][:50])
    code, result = command("run", plain_run())
    assert code == 0 and (result["ran_now"], result["complete"]) == (2, 4)
    records = [orjson.loads(line) for line in traces.read_bytes().splitlines() if line.endswith(b"}")]
    again = [r["episode_id"] for r in records[3:]]
    assert len(again) == 2 and not kept & set(again)


def test_show_prints_an_episode_in_the_clear(command, run_dir):
    name = orjson.loads((run_dir / "traces.jsonl").read_bytes().splitlines()[0])["episode_id"]
    code, shown = command("traces", "show", run_dir, name)
    assert code == 0 and shown["episode_id"] == name and "interned" not in shown
    assert shown["steps"][0]["observation"]["text"].startswith("Step 0")
    code, found = command("traces", "show", run_dir, name, "--attempt", 7)
    assert code == 2 and "attempt 7" in found["error"]["message"]


def test_import_makes_a_run_directory(command, tmp_path):
    source = tmp_path / "v4.jsonl"
    source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in (foreign(), {"schema": "x"}, foreign(13))))
    code, found = command("traces", "import", source, tmp_path / "run")
    assert code == 0 and found["imported"] == 2 and len(found["skipped"]) == 1
    code, verified = command("traces", "verify", tmp_path / "run")
    assert code == 0 and verified["expected"] == 2
    code, summary = command("summarize", tmp_path / "run")
    assert code == 0 and summary["coverage"]["completed"] == 2
    assert b"SECRET" not in (tmp_path / "run" / "traces.jsonl").read_bytes()
    code, found = command("traces", "import", source, tmp_path / "run")
    assert code == 3 and "already holds a run" in found["error"]["message"]


def test_a_failed_import_can_be_tried_again(command, tmp_path):
    source = tmp_path / "v4.jsonl"
    code, found = command("traces", "import", source, tmp_path / "run")
    assert code == 2 and "does not exist" in found["error"]["message"]
    source.write_bytes(b"{}\n")
    code, found = command("traces", "import", source, tmp_path / "run")
    assert code == 2 and "nothing could be imported" in found["error"]["message"]
    source.write_bytes(orjson.dumps(foreign()) + b"\n")
    code, found = command("traces", "import", source, tmp_path / "run")
    assert (code, found["imported"]) == (0, 1)
