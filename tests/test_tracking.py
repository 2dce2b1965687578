"""metrics.jsonl first, W&B as a mirror that may fail without failing the run. The offline tests use the real wandb."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from rayrl.tracking import METRICS, Tracker, TrackingConfig, mirror_mode, stable_run_id

KEY = "0123456789abcdef0123456789abcdef01234567"


def tracker(run_dir, mode="disabled", **more):
    return Tracker(run_dir, TrackingConfig(wandb=mode), run_name="r", run_id="id-1", **more)


def rows(run_dir):
    return [orjson.loads(line) for line in (run_dir / METRICS).read_bytes().splitlines()]


def test_every_point_is_in_the_file_at_once(tmp_path):
    made = tracker(tmp_path)
    made.log({"loss": 0.5, "note": None, "bad": float("nan")}, 0, step_name="train/step")
    (row,) = rows(tmp_path)
    assert {k: v for k, v in row.items() if k != "time"} == {"train/step": 0, "loss": 0.5, "note": None, "bad": None}
    made.table("cases", ["a", "b"], [[1, "x"]])
    made.summary({"done": True})
    made.close()
    made.close()
    assert [sorted(row)[0] for row in rows(tmp_path)[1:]] == ["columns", "summary"]


def test_a_resume_appends_and_drops_what_lies_past_the_checkpoint(tmp_path):
    made = tracker(tmp_path)
    for step in range(6):
        made.log({"loss": step}, step, step_name="a")
        made.log({"reward": step}, step, step_name="b")
    made.summary({"x": 1})
    made.close()
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"a": 2, "lo')  # torn
    again = tracker(tmp_path)
    assert again.truncate_after(3, step_name="a") == 3
    again.log({"loss": 40}, 4, step_name="a")
    again.close()
    found = rows(tmp_path)
    assert [r["a"] for r in found if "a" in r] == [0, 1, 2, 3, 4]
    assert [r["b"] for r in found if "b" in r] == list(range(6))
    assert found[-1]["loss"] == 40 and any("summary" in r for r in found)


def test_a_torn_tail_does_not_swallow_the_next_point(tmp_path):
    (tmp_path / METRICS).write_bytes(b'{"a": 0}\n{"a": 1')
    made = tracker(tmp_path)
    made.log({"x": 1}, 2, step_name="a")
    made.close()
    assert orjson.loads((tmp_path / METRICS).read_bytes().splitlines()[-1])["a"] == 2


def test_truncating_keeps_lines_of_any_form(tmp_path):
    (tmp_path / METRICS).write_bytes(b'{"a": "text"}\n[1]\n3\n{"a": 9}\n')
    made = tracker(tmp_path)
    assert made.truncate_after(5, step_name="a") == 1
    made.close()
    assert (tmp_path / METRICS).read_bytes() == b'{"a": "text"}\n[1]\n3\n'


def test_the_run_id_depends_on_name_and_fingerprint_alone():
    assert stable_run_id("e", "f") == stable_run_id("e", "f") != stable_run_id("e", "g")
    assert len(stable_run_id("e", "f")) == 16 and stable_run_id("e", "f") != stable_run_id("x", "f")


def test_auto_is_online_with_a_key_and_offline_without(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert mirror_mode(TrackingConfig()) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert mirror_mode(TrackingConfig()) == "online"
    assert mirror_mode(TrackingConfig(wandb="disabled")) == "disabled"


class Broken:
    """A W&B run whose every call fails."""

    def __init__(self):
        self.calls = 0
        self.summary = self

    def __getattr__(self, name):
        def fail(*_, **__):
            self.calls += 1
            raise ConnectionError(f"api key {KEY} refused")

        return fail


def test_a_failing_mirror_is_said_once_without_its_message_and_then_left_alone(tmp_path):
    said = []
    made = tracker(tmp_path, warn=said.append)
    made._run = broken = Broken()
    for step in range(5):
        made.log({"x": step}, step)
    made.table("t", ["a"], [[1]])
    made.summary({"x": 1})
    made.close()
    assert broken.calls == 1 and made.mirror_failures == 1
    assert len(said) == 1 and "ConnectionError" in said[0] and KEY not in said[0]
    assert len(rows(tmp_path)) == 7


def test_a_missing_wandb_is_no_failure_either(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    said = []
    made = tracker(tmp_path, "offline", warn=said.append)
    made.log({"x": 1}, 0)
    made.close()
    assert len(said) == 1 and len(rows(tmp_path)) == 1


OFFLINE = """
import sys
from pathlib import Path
from rayrl.tracking import Tracker, TrackingConfig
made = Tracker(Path(sys.argv[1]), TrackingConfig(wandb="offline", project="p", tags=["t"]), run_name="r", run_id="id-1",
               job_type="rollout", config_dict={"model": {"name": "m"}})
for step in range(3):
    made.log({"loss": 1.0 / (step + 1)}, step, step_name="train/step")
    made.log({"reward": step}, 2 * step, step_name="eval/step")
made.table("cases", ["a", "b"], [[1, "x"], [2, "y"]])
made.artifact(Path(sys.argv[1]) / "metrics.jsonl", "metrics", "log")
made.summary({"complete": 3})
made.close()
print(made.mode, made.mirror_failures)
"""


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A run mirrored by the real wandb, offline, in a process that knows a key."""
    run_dir = tmp_path_factory.mktemp("wandb") / "run"
    env = {**os.environ, "WANDB_API_KEY": KEY, "WANDB_DIR": "", "HOME": str(run_dir.parent)}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(run_dir)], capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return run_dir, done


def test_the_real_wandb_mirrors_offline_and_leaves_stdout_alone(offline):
    run_dir, done = offline
    assert done.stdout == "offline 0\n"
    files = list((run_dir / "wandb").glob("offline-run-*-id-1/run-id-1.wandb"))
    assert len(files) == 1 and files[0].stat().st_size > 0
    data = files[0].read_bytes()
    assert b"train/step" in data and b"eval/step" in data and b"rollout" in data


def test_the_local_file_holds_every_point_of_every_series(offline):
    run_dir, _ = offline
    found = rows(run_dir)
    assert [r["train/step"] for r in found if "train/step" in r] == [0, 1, 2]
    assert [r["eval/step"] for r in found if "eval/step" in r] == [0, 2, 4]


def test_the_key_is_in_no_file_and_no_output(offline):
    run_dir, done = offline
    assert KEY not in done.stdout + done.stderr
    for path in Path(run_dir.parent).rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
