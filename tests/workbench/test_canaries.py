"""Canaries: checks before the first case; a broken one makes the experiment invalid, a broken endpoint pauses it."""

import json
import threading

import pytest
from pydantic import ValidationError

from rayrl.errors import DataError
from rayrl.workbench.canaries import Canary, judge
from rayrl.workbench.evidence import Outcome
from rayrl.workbench.experiments import Params
from rayrl.workbench.metrics import experiment_metrics
from tests.workbench.conftest import drive, sample_experiment

FAST = {
    "query": "到公司电量够不够",
    "expect": "fast",
    "must_read": "knowledge/地图能力.md",
    "fails_without_skill": True,
}
SLOW = {"query": "帮我规划一下周末行程", "expect": "slow"}


def run(bench, *canaries, model="reader"):
    made = sample_experiment(bench, 5, model=model, params=Params(canaries=list(canaries), max_attempts=1))
    return drive(bench, made["id"])


def events(bench, experiment):
    with bench.store.read() as connection:
        query = "SELECT kind, data FROM events WHERE experiment_id=? ORDER BY id"
        return {row[0]: json.loads(row[1]) for row in connection.exec_driver_sql(query, (experiment["id"],))}


def test_canaries_that_hold_are_recorded_and_the_cases_run(bench):
    found = run(bench, FAST, SLOW)
    assert found["state"] == "completed" and found["counts"]["completed"] == 5
    noted = events(bench, found)["canaries"]
    assert noted["passed"]
    first, second = noted["verdicts"]
    assert (first["prediction"], first["without_skill"], second["prediction"]) == ("fast", "slow", "slow")
    plain = sample_experiment(bench, 5, params=Params(max_attempts=1), start=False)
    assert plain["fingerprint"] == found["fingerprint"], "checks do not change what is measured"


@pytest.mark.parametrize(
    ("canary", "message"),
    [
        ({**SLOW, "expect": "fast"}, "expected fast, got slow"),
        ({**SLOW, "must_read": "knowledge/车控能力.md"}, "knowledge/车控能力.md was not read"),
        ({**SLOW, "fails_without_skill": True}, "slow comes out without the Skill too"),
    ],
)
def test_broken_canary_makes_the_experiment_invalid_and_unscored(bench, canary, message):
    found = run(bench, FAST, canary)
    assert found["state"] == "invalid" and message in found["reason"] and "电量" not in found["reason"]
    assert found["counts"]["pending"] == 5 and not events(bench, found)["canaries"]["passed"]
    assert experiment_metrics(bench.store, found, ["fast", "slow"])["denominators"]["scored"] == 0


def test_endpoint_that_fails_pauses_and_the_canaries_run_again_after_it(bench):
    crash = {"kind": "tests.workbench.test_driver:Moody", "options": {"rules": {"电量": "crash"}}}
    bench.models.save("crash", crash, trusted=True)
    found = run(bench, FAST, model="crash")
    assert found["state"] == "paused" and "canary 1 could not run" in found["reason"] and "boom" in found["reason"]
    assert "canaries" not in events(bench, found)


def test_canaries_are_checked_when_an_experiment_is_made(bench):
    with pytest.raises(DataError, match="expects 'maybe', which is no class"):
        sample_experiment(bench, 3, params=Params(canaries=[{"query": "x", "expect": "maybe"}]))
    with pytest.raises(ValidationError, match="needs expect or must_read"):
        Params(canaries=[{"query": "x"}])
    with pytest.raises(ValidationError, match="fails_without_skill needs expect"):
        Canary(query="x", must_read="a.md", fails_without_skill=True)


def test_the_main_file_counts_as_read():
    assert judge(Canary(query="x", must_read="SKILL.md"), Outcome(state="completed", prediction="fast")) == []


def test_pause_during_the_canaries_is_obeyed_and_they_run_when_it_goes_on(bench):
    slow = {"kind": "rayrl.workbench.reader:ScriptedReader", "options": {"latency_ms": 150}}
    bench.models.save("slow", slow)
    made = sample_experiment(bench, 2, model="slow", params=Params(canaries=[FAST]))
    timer = threading.Timer(0.3, bench.experiments.move, (made["id"], "pause"))
    timer.start()
    found = drive(bench, made["id"])
    timer.join()
    assert (found["state"], found["reason"], found["counts"]["pending"]) == ("paused", "", 2)
    assert "canaries" not in events(bench, found)
    bench.experiments.move(made["id"], "resume")
    found = drive(bench, made["id"])
    assert found["state"] == "completed" and events(bench, found)["canaries"]["passed"]
