"""One command, one JSON object, one exit code per kind of trouble; errors included."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from jobs import cli
from jobs import command as command_module
from jobs.command import command_main
from rayrl.errors import (
    ConfigError,
    ConformanceError,
    DataError,
    EnvironmentFaultError,
    GuardError,
    LedgerError,
    RayrlError,
    RunConflictError,
    RunIncompleteError,
)
from rayrl.traces.store import RunLock

ROOT = Path(__file__).resolve().parents[2]

EXITS = [
    (ConfigError("key is wrong"), 2),
    (DataError("line is wrong"), 2),
    (RunConflictError("in use"), 3),
    (GuardError("refused"), 4),
    (ConformanceError("no"), 5),
    (RunIncompleteError("half"), 6),
    (EnvironmentFaultError("no server", code="unreachable", stage="reset"), 6),
    (LedgerError("open"), 7),
    (RayrlError("other"), 1),
    (KeyboardInterrupt(), 130),
    (ZeroDivisionError("bug"), 1),
]


def raising(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"), EXITS, ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else ""
)
@pytest.mark.parametrize("as_json", [True, False])
def test_every_failure_has_its_exit_code_and_one_voice(error, code, as_json, capfdbinary):
    words = ["--json"] if as_json else []
    assert command_main("x", lambda parser: None, raising(error), words) == code
    out, err = capfdbinary.readouterr()
    if as_json:
        body = orjson.loads(out)["error"]
        assert body["exit_code"] == code and body["type"] == type(error).__name__
        assert "Traceback" not in err.decode()
    else:
        assert out == b"" and err
        # people see a traceback only where rayrl itself is at fault
        assert ("Traceback" in err.decode()) == isinstance(error, ZeroDivisionError)


def test_the_documented_exit_codes_are_these():
    documented = {int(n) for n in re.findall(r"(?:^|[;:.]\s+|\s)(\d{1,3}) [a-z]", command_module.__doc__)}
    assert documented == {0, *(code for _, code in EXITS), 8}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan"], "the following arguments are required: config"),
        (["plan", "quickstart", "--nosuch"], "unrecognized arguments: --nosuch"),
        (["runs"], "required: command"),
        (["runs", "lsit"], "invalid choice: 'lsit'"),
        (["splits", "build", "--val", "x"], "invalid int value: 'x'"),
        (["rnu"], "no command 'rnu' \\(did you mean 'run'\\?\\)"),
        (["plan", "quickstart", "tasks.split"], "override 'tasks.split' is not of the form section.key=value"),
        (["run", "nowhere.yaml"], "config 'nowhere.yaml' does not exist"),
        (["summarize", "nowhere"], "nowhere is no run directory"),
        (["traces", "verify", "nowhere"], "nowhere holds neither"),
        (["check", "env", "no.such:Thing"], "module 'no' was not found"),
    ],
)
def test_wrong_words_are_one_json_object_too(command, says, words):
    code, found = command(*words)
    assert code == 2 and list(found) == ["error"]
    assert re.search(says[0] if isinstance(says, tuple) else says, found["error"]["message"])


def test_wrong_words_show_people_the_usage(says):
    code, out, err = says("plan")
    assert code == 2 and out == "" and "usage: rayrl plan" in err and "error: " in err


def test_the_overview_names_every_command_there_is(says):
    for words in ([], ["--help"], ["help"]):
        code, out, _ = says(*words)
        assert code == 0 and all(f"\n  {name} " in out for name in ("plan", "run", "replay", "doctor"))
    code, out, _ = says("--version")
    assert code == 0 and out.startswith("rayrl 0.")


@pytest.mark.parametrize("name", sorted(cli._available()))
def test_every_command_has_help_and_json(name, capsys):
    with pytest.raises(SystemExit) as leave:
        cli.main([name, "--help"])
    assert leave.value.code == 0
    text = capsys.readouterr().out
    module = importlib.import_module(cli.COMMANDS[name][0])
    assert f"usage: rayrl {name}" in text and module.__doc__
    assert "--json" in text or "{" in text  # sub-subcommands have it each


def test_a_run_from_plan_to_summary(command, plain_run):
    path = plain_run()
    code, plan = command("plan", path)
    assert code == 0 and plan["run_directory"]["exists"] is False
    code, result = command("run", path)
    assert (code, result["status"], result["complete"]) == (0, "complete", 4)
    assert result["fingerprint"] == plan["fingerprint"]
    assert result["ledger"]["admitted"] == result["ledger"]["completed"] == 4
    assert result["stats"]["leases_open"] == 0
    code, again = command("run", path)
    assert (code, again["ran_now"], again["complete"]) == (0, 0, 4)
    code, summary = command("summarize", result["run_dir"])
    assert code == 0 and summary["coverage"]["completed"] == 4
    written = {path.name for path in Path(result["run_dir"]).iterdir()}
    kept = {"manifest.json", "traces.jsonl", "private.jsonl", "summary.json", "events.jsonl", "config.yaml"}
    assert kept <= written


def test_people_get_tables_on_stdout_and_progress_on_stderr(says, plain_run):
    code, out, err = says("run", plain_run())
    assert code == 0 and "4 of 4 complete" in out and "Traceback" not in err


def test_an_incomplete_run_exits_6_and_says_how_to_go_on(command, plain_run):
    sick = {"kind": "tests.jobs.sick:Flaky", "options": {"fail": [0, 2]}}
    path = plain_run(environment=sick, tasks__sample_size=None, execution__max_attempts=1)
    code, result = command("run", path)
    assert (code, result["status"], result["complete"]) == (6, "incomplete", 6)
    assert "2 of 8 episodes have no complete result" in result["reason"]
    assert result["ledger"]["gave_up"] == {"http_500": 2}


def test_an_environment_that_is_down_exits_6(command, plain_run):
    code, found = command("run", plain_run(environment={"kind": "tests.jobs.sick:Down", "options": {}}))
    assert code == 6 and found["error"]["type"] == "EnvironmentFaultError"


def test_a_run_in_use_and_another_experiment_exit_3(command, plain_run):
    code, result = command("run", plain_run())
    with RunLock(Path(result["run_dir"])):
        code, found = command("run", plain_run())
        assert code == 3 and "in use by another process" in found["error"]["message"]
    code, found = command("run", plain_run(), "runtime.max_actions=9")
    assert code == 3 and "limits.max_actions: 30 -> 9" in found["error"]["message"]


def test_traces_without_their_manifest_exit_3(command, plain_run):
    _, result = command("run", plain_run())
    (Path(result["run_dir"]) / "manifest.json").unlink()
    code, found = command("run", plain_run())
    assert code == 3 and "holds traces but no manifest.json" in found["error"]["message"]


def test_a_guarded_split_exits_4(command, plain_run):
    code, found = command("run", plain_run(tasks__split="test"))
    assert code == 4 and "tasks.test_purpose" in found["error"]["message"]


def test_a_run_that_stalls_exits_8_and_names_what_hangs(command, plain_run):
    path = plain_run(environment={"kind": "tests.jobs.sick:Hanging", "options": {}}, execution__watchdog_s=1.5)
    code, found = command("run", path)
    assert code == 8 and "task-" in found["error"]["message"] and "reset" in found["error"]["message"]


def test_a_spending_cap_ends_cleanly_and_a_resume_goes_on(command, plain_run):
    path = plain_run(tasks__sample_size=None, execution__concurrency=1, execution__prefetch=0)
    code, result = command("run", path, "execution.max_tokens_total=1")
    assert code == 6 and result["reason"].startswith("spending cap reached") and 1 <= result["complete"] < 8
    code, more = command("run", path)
    assert (code, more["complete"], more["ran_now"]) == (0, 8, 8 - result["complete"])


def test_output_for_programs_stays_clean_when_the_reader_goes_away(plain_run, tmp_path):
    path = plain_run()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = f"{sys.executable} -m jobs.cli plan {path} --json | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.strip() == "{0" or done.stdout.split() == ["{", "0"]
    assert done.stderr == ""


@pytest.mark.slow
def test_python_m_jobs_rollout_is_the_same_command(plain_run):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "jobs.rollout", str(plain_run()), "--json"]
    done = subprocess.run(words, capture_output=True, env=env, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert orjson.loads(done.stdout)["complete"] == 4


def test_an_interrupted_run_stops_cleanly_and_goes_on_later(plain_run, command):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    slow = {"kind": "tests.jobs.sick:Slow", "options": {"seconds": 30}}
    path = plain_run(environment=slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.rollout", str(path), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
    )
    try:
        traces = path.parent / "runs" / "plain" / "traces.jsonl"
        until = time.monotonic() + 60
        while not traces.exists() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    result = orjson.loads(out)
    assert process.returncode == 6 and "interrupted" in result["reason"], err.decode()
    assert result["ledger"]["cancelled"] == result["ledger"]["admitted"] > 0
    assert b"Traceback" not in err
    code, after = command("traces", "verify", result["run_dir"])
    assert code == 0 and after["cancelled"] == result["ledger"]["cancelled"]
