"""runs list|show|rm, and summarize."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayrl.traces.store import RunLock


@pytest.fixture
def two_runs(command, plain_run):
    dirs = []
    for name in ("one", "two"):
        _, result = command("run", plain_run(experiment__name=name))
        dirs.append(Path(result["run_dir"]))
    return dirs


def test_list_and_show(command, two_runs):
    root = two_runs[0].parent
    code, found = command("runs", "list", "--root", root)
    assert code == 0 and [r["experiment"] for r in found["runs"]] == ["one", "two"]
    assert found["runs"][0]["episodes"] == 4 and found["runs"][0]["trace_bytes"] > 0
    code, shown = command("runs", "show", two_runs[0])
    assert code == 0 and shown["records"]["complete"] == 4 and shown["summary"]["coverage"]["completed"] == 4


def test_one_broken_directory_does_not_hide_the_others(command, says, two_runs):
    root = two_runs[0].parent
    for name, text in (("broken", "{"), ("training", '{"schema": "something-else"}')):
        (root / name).mkdir()
        (root / name / "manifest.json").write_text(text)
    code, found = command("runs", "list", "--root", root)
    assert code == 0 and len(found["runs"]) == 2 and len(found["unreadable"]) == 2
    code, out, err = says("runs", "list", "--root", root)
    assert code == 0 and "one" in out and "left out" in err


def test_an_empty_root_and_the_default_one(command, says, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYRL_RUNS", str(tmp_path / "nothing"))
    code, found = command("runs", "list")
    assert code == 0 and found["runs"] == [] and found["root"] == str(tmp_path / "nothing")
    code, out, _ = says("runs", "list")
    assert code == 0 and "no runs under" in out


def test_rm_asks_refuses_while_running_and_deletes(command, two_runs):
    one = two_runs[0]
    code, found = command("runs", "rm", one)
    assert code == 2 and "4 episodes" in found["error"]["message"] and "--yes" in found["error"]["message"]
    with RunLock(one):
        code, found = command("runs", "rm", one, "--yes")
    assert code == 3 and one.is_dir()
    code, found = command("runs", "rm", one, "--yes")
    assert code == 0 and not one.exists() and two_runs[1].is_dir()


@pytest.mark.parametrize("what", ["show", "rm"])
def test_what_is_no_run_is_left_alone(command, tmp_path, what):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    words = [*(["--yes"] if what == "rm" else [])]
    code, found = command("runs", what, tmp_path / "precious", *words)
    assert code == 2 and "no run directory" in found["error"]["message"]
    assert (tmp_path / "precious" / "file").exists()


def test_summarize_is_made_afresh_from_the_traces(command, says, two_runs):
    one = two_runs[0]
    (one / "summary.json").write_text("{")
    code, found = command("runs", "show", one)
    assert code == 2 and "rayrl summarize" in found["error"]["message"]
    code, summary = command("summarize", one)
    assert code == 0 and summary["coverage"]["rate"] == 1.0
    assert json.loads((one / "summary.json").read_bytes())["coverage"] == summary["coverage"]
    with (one / "traces.jsonl").open("ab") as file:
        file.write(b'{"schema": "rayrl-episode-v1", "episo')
    code, again = command("summarize", one)
    assert code == 0 and again["coverage"] == summary["coverage"]
    code, out, _ = says("summarize", one)
    assert code == 0 and "reward" in out
