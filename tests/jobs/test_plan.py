"""plan shows everything a run is, calls nothing outside and writes nothing."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("planning opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_a_plan_counts_and_names_everything(command, plain_run, no_network, tmp_path):
    before = {p for p in tmp_path.rglob("*") if p.is_file()}
    path = plain_run(model={"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "name": "m", "checkpoint_id": "c"})
    code, plan = command("plan", path, "tasks.repeats=3")
    assert code == 0
    assert (plan["episodes"], plan["tasks"], plan["repeats"]) == (12, 4, 3)
    assert len(plan["first_task_ids"]) == 4 and len(plan["first_seeds"]) == 3
    assert plan["split"]["role"] == "train" and plan["model"]["checkpoint_id"] == "c"
    assert plan["environment"]["version"] == "null-v1" and plan["skills"] == {"kind": "none"}
    assert plan["config"]["tasks"]["repeats"] == 3 and plan["test_guard"] is None
    assert {p for p in tmp_path.rglob("*") if p.is_file()} - before == {path}


def test_a_plan_knows_what_is_already_there(command, plain_run):
    path = plain_run()
    _, result = command("run", path)
    _, plan = command("plan", path)
    assert plan["run_directory"] == {"path": result["run_dir"], "exists": True, "same_experiment": True, "complete": 4}
    code, plan = command("plan", path, "runtime.max_actions=9")
    assert code == 0 and plan["run_directory"]["same_experiment"] is False
    assert "limits.max_actions: 30 -> 9" in plan["run_directory"]["difference"]


def test_a_plan_says_whether_the_guard_would_open(command, plain_run):
    code, plan = command("plan", plain_run(tasks__split="test"))
    assert code == 0 and "tasks.test_purpose" in plan["test_guard"]["refused"]


def test_people_see_the_same(says, plain_run, no_network):
    path = plain_run()
    code, out, _ = says("plan", path, "--resolved")
    assert code == 0 and "Plan of plain" in out and "4 = 4 tasks x 1" in out and "max_attempts: 3" in out
    says("run", path, "--quiet")
    _, out, _ = says("plan", path)
    assert "resumes: 4 of 4 complete" in " ".join(out.split())  # long paths wrap
    _, out, _ = says("plan", path, "runtime.max_actions=9")
    assert "REFUSED" in out and "limits.max_actions: 30 -> 9" in out


def test_overrides_win_and_mistakes_name_the_key(command, plain_run):
    _, plan = command("plan", plain_run(), "tasks.sample_size=2", "experiment.seed=5")
    assert plan["episodes"] == 2
    code, found = command("plan", plain_run(), "tasks.sample_sise=2")
    assert code == 2 and "tasks.sample_sise: unknown key (did you mean 'sample_size'?)" in found["error"]["message"]


def test_the_key_itself_is_never_shown(command, plain_run, monkeypatch):
    monkeypatch.setenv("PLANTED", "sk-very-secret-123")
    path = plain_run(model={"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "api_key_env": "PLANTED"})
    _, plan = command("plan", path)
    assert plan["config"]["model"]["api_key_env"] == "PLANTED" and "sk-very-secret-123" not in str(plan)


def test_a_relative_run_root_in_a_jobs_temporary_directory_is_refused(command, plain_run, tmp_path, monkeypatch):
    place = tmp_path / "runtime_resources/working_dir_files/_ray_pkg_x"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    code, found = command("plan", plain_run(experiment__run_root="runs"))
    assert code == 2 and "experiment.run_root" in found["error"]["message"]
    assert list(Path(place).iterdir()) == []
