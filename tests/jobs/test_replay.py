"""replay through the command, against the real shop."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest


@pytest.fixture
def shop_result(command, shop_run):
    code, result = command("run", shop_run())
    assert code == 0
    return Path(result["run_dir"])


def episode(run_dir, n=0):
    return orjson.loads((run_dir / "traces.jsonl").read_bytes().splitlines()[n])["episode_id"]


def test_every_shop_episode_replays_without_a_difference(command, shop_result):
    for n in range(4):
        code, found = command("replay", shop_result, episode(shop_result, n))
        assert code == 0 and found["identical"], found["differences"]
        assert found["manifest_differences"] == []


def test_a_changed_record_is_found_and_exits_6(command, says, shop_result):
    traces = shop_result / "traces.jsonl"
    lines = traces.read_bytes().splitlines()
    record = orjson.loads(lines[0])
    record["final"]["reward"] = 0.123
    traces.write_bytes(b"\n".join([orjson.dumps(record), *lines[1:]]) + b"\n")
    code, found = command("replay", shop_result, record["episode_id"])
    assert code == 6 and [d["where"] for d in found["differences"]] == ["final"]
    code, out, _ = says("replay", shop_result, record["episode_id"])
    assert code == 6 and "final" in out and "0.123" in out


def test_other_settings_are_named(command, shop_result):
    code, found = command("replay", shop_result, episode(shop_result), "prompt.history=last_n")
    assert code == 0 and ["prompt.history", "full", None] in found["manifest_differences"]


def test_what_is_not_there(command, shop_result, tmp_path):
    code, found = command("replay", shop_result, "task-999999__sample-000")
    assert code == 2 and "no record of episode" in found["error"]["message"]
    code, found = command("replay", tmp_path, "task-000001__sample-000")
    assert code == 2 and "no run directory" in found["error"]["message"]
    (shop_result / "config.yaml").unlink()
    code, found = command("replay", shop_result, episode(shop_result))
    assert code == 2 and "--config" in found["error"]["message"]


def test_the_private_goals_never_reach_the_traces(shop_result):
    # the shared server has an admin token that this run does not know: its goals stay with it
    text = (shop_result / "traces.jsonl").read_bytes()
    assert b'"goal"' not in text and b"lease_id" not in text and b"reason_key" not in text
