"""smoke: three tasks, what was seen, and nothing kept back when it goes wrong."""

from __future__ import annotations

from pathlib import Path


def test_three_tasks_and_what_happened(command, plain_run):
    code, found = command("smoke", plain_run(tasks__repeats=5, execution__mode="ray"))
    assert code == 0 and found["complete"] == 3 and len(found["episodes"]) == 3
    first = found["episodes"][0]
    assert first["reward"] == 1.0 and first["termination_reason"] == "finished" and len(first["steps"]) == 2
    assert "search[" in first["steps"][0] and "executed" in first["steps"][0]
    assert "-smoke-" in Path(found["run"]).name


def test_more_tasks_when_asked(command, plain_run):
    code, found = command("smoke", plain_run(), "--tasks", "5")
    assert code == 0 and found["complete"] == 5
    code, found = command("smoke", plain_run(), "--tasks", "99")
    assert code == 2 and "tasks.sample_size" in found["error"]["message"]


def test_failures_are_shown_and_exit_6(command, says, plain_run):
    sick = {"kind": "tests.jobs.sick:Flaky", "options": {"fail": [0, 2, 3, 5, 7, 11, 13, 17]}}
    path = plain_run(environment=sick)
    code, found = command("smoke", path)
    assert code == 6 and found["complete"] == 0
    assert found["episodes"][0]["error"].startswith("environment/http_500 in reset: HTTP 500")
    code, out, _ = says("smoke", path)
    assert code == 6 and "failed: environment/http_500" in out and "0 of 3 episodes complete" in out


def test_protocol_errors_are_named(command, plain_run):
    path = plain_run(model={"kind": "scripted", "scripted": {"protocol_noise": 1.0}}, runtime={"max_actions": 2})
    code, found = command("smoke", path)
    assert code == 0 and "protocol error no_tool_call" in found["episodes"][0]["steps"][0]


def test_the_longest_experiment_name_still_fits(command, plain_run):
    code, found = command("smoke", plain_run(experiment__name="n" * 100), "--tasks", "1")
    assert code == 0 and len(Path(found["run"]).name) <= 100


def test_a_shop_smoke(command, shop_run):
    code, found = command("smoke", shop_run())
    assert code == 0 and found["complete"] == 3
    assert any("click[buy now]" in line for line in found["episodes"][0]["steps"])


def test_people_read_steps(says, plain_run):
    code, out, _ = says("smoke", plain_run())
    assert code == 0 and "1. search[" in out and "3 of 3 episodes complete" in out
