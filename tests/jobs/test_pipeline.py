from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jobs.pipeline import STAGES, Pipeline, load_pipeline
from learners.selector import SelectorConfig, TrainedSelector, clone_set
from rayrl.errors import ConfigError, RunConflictError, UserError
from rayrl.schemas import ModelOutput
from rayrl.skills.bank import load_snapshot
from rayrl.skills.outcome_model import fit_outcome_model
from rayrl.traces.store import RunReader
from tests.jobs.skills_support import ENV, write_pipeline, write_shop

CHANGED = {"clone_steps": 20, "updates": 2, "seed": 1}
KILLER = """
import os, signal, sys
import jobs.skill_runs
from rayrl.skills.stages import Stages
target, when, config = sys.argv[1:4]
real = Stages.run
def run(self, name, inputs, files, work):
    if name != target or self.folder.name != "pipeline":
        return real(self, name, inputs, files, work)
    def dies():
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        facts = work()
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, name, inputs, files, dies)
Stages.run = run
if when == "inside":
    plays = jobs.skill_runs.SkillRuns.run
    def play(self, experiment):
        if target in experiment.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return plays(self, experiment)
    jobs.skill_runs.SkillRuns.run = play
from jobs.pipeline import load_pipeline, Pipeline
c, r, b = load_pipeline(config, [])
Pipeline(c, r, b).run()
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    write_shop(folder)
    return folder


def pipeline_of(folder: Path, **changes) -> Pipeline:
    config, run, base = load_pipeline(str(write_pipeline(folder, **changes)), [])
    return Pipeline(config, run, base)


@pytest.fixture(scope="module")
def finished(shop: Path) -> Pipeline:
    pipeline = pipeline_of(shop)
    pipeline.run()
    return pipeline


def test_the_loop_closes_and_says_what_it_found(finished: Pipeline):
    out = finished.out
    assert finished.stages.ran == list(STAGES)
    report = json.loads((out / "report.json").read_text())
    assert report["bank_sha256"] == load_snapshot(out / "skillbank.snapshot.json").sha256
    arms = report["evaluation"]["arms"]
    assert set(arms) == {"none", "all", "selected", "top_k", "threshold", "learned"}
    assert arms["none"]["injected_tokens"] == 0 < arms["all"]["injected_tokens"]
    assert arms["all"]["injected_skills"] == len(load_snapshot(out / "build/skillbank.snapshot.json").active())
    assert {"selected - none", "learned - all"} <= set(report["evaluation"]["pairs"])
    check = report["selector_confirmation"]
    assert check["tasks"] == 12 and check["rollouts"] == 12 * len(list((out / "runs").glob("p-check-*")))
    text = (out / "report.md").read_text()
    assert "The trained selector was played against all chunks on 12 tasks" in text
    assert "unseen tasks" in text and "| learned |" in text
    labels = (out / "diagnosis" / "episode_labels.jsonl").read_text().splitlines()
    assert len(labels) == 20


@pytest.mark.slow
def test_again_runs_nothing_and_a_changed_stage_runs_again_with_all_behind_it(shop: Path, finished: Pipeline):
    again = pipeline_of(shop)
    again.run()
    assert again.stages.ran == []
    changed = pipeline_of(shop, top_k=2)
    changed.run()
    assert changed.stages.ran == ["evaluation", "report"]
    tampered = finished.out / "skillbank.snapshot.json"
    kept = tampered.read_bytes()
    tampered.write_bytes(kept + b" ")
    mended = pipeline_of(shop, top_k=2)
    mended.run()
    assert mended.stages.ran == ["bank", "selector", "evaluation", "report"] and tampered.read_bytes() == kept


def test_a_second_process_is_refused(shop: Path, finished: Pipeline):
    from filelock import FileLock

    with FileLock(str(finished.out / ".lock")), pytest.raises(RunConflictError, match="in use"):
        pipeline_of(shop).run()


def test_stages_need_tasks_of_their_own(shop: Path):
    with pytest.raises(ConfigError, match="splits of their own"):
        pipeline_of(shop, unseen_split="gate")
    with pytest.raises(ConfigError, match="analyst_config"):
        pipeline_of(shop, analyst="llm")
    with pytest.raises(ConfigError, match="role test"):
        pipeline_of(shop, unseen_split="test")


def careless(made):
    """A selector that its model talked into leaving out everything."""
    policy = clone_set(
        made.pairs.data.features, made.nearness, made.tokens, np.zeros(len(made.tokens)), SelectorConfig(clone_steps=20)
    )
    model = fit_outcome_model(made.pairs.data)
    return TrainedSelector(policy, model, {"tuned_threshold": 0.5})


def after_the_gate(finished: Pipeline, folder: Path) -> Path:
    """A copy of the finished pipeline with no selector and nothing behind it; banks are named by their paths."""
    out = folder / "pipeline"
    shutil.copytree(finished.out, out, ignore=shutil.ignore_patterns("selector*", "p-check-*", "p-unseen-*", "report*"))
    state = json.loads((out / "state.json").read_text())
    for stage in ("selector", "evaluation", "report"):
        del state["stages"][stage]
    (out / "state.json").write_text(json.dumps(state))
    return out


@pytest.mark.slow
def test_an_overeager_selector_is_caught_and_killed_checks_are_not_played_again(
    shop: Path, finished: Pipeline, tmp_path: Path, monkeypatch
):
    import jobs.pipeline as module
    from jobs.skill_runs import SkillRuns

    out = after_the_gate(finished, tmp_path)
    monkeypatch.setattr(module, "train_from_pairs", careless)
    real, started = SkillRuns.run, []

    class Killed(BaseException):
        pass

    def play(self, experiment):
        if len(started) == 3:
            raise Killed
        started.append(experiment.name)
        return real(self, experiment)

    changes = {"output": str(out), "top_k": 2, "selector_check": {"hidden_loss": 0.3}}
    monkeypatch.setattr(SkillRuns, "run", play)
    with pytest.raises(Killed):
        pipeline_of(shop, **changes).run()
    assert [n.split("-")[2] for n in started] == ["all", "trained", "drop"] and not (out / "selector").exists()

    resumed = []

    def count(self, experiment):
        before = self.rollouts
        folder = real(self, experiment)
        resumed.append((experiment.name, self.rollouts - before))
        return folder

    monkeypatch.setattr(SkillRuns, "run", count)
    pipeline = pipeline_of(shop, **changes)
    pipeline.run()
    played = dict(resumed)
    assert pipeline.stages.ran == ["selector", "evaluation", "report"]
    assert [played[name] for name in started] == [0, 0, 0]
    check = json.loads((out / "report.json").read_text())["selector_confirmation"]
    assert check["trained"]["low"] < -0.01 and check["served"] in ("pruned", "all")
    chunks = len(load_snapshot(out / "build/skillbank.snapshot.json").active())
    assert len(check["tries"]) == chunks and check["rollouts"] == 12 * (chunks + 2)
    # what is served takes exactly the confirmed set, on tasks that nobody has seen before
    for folder in (out / "runs").glob("p-unseen-learned-*"):
        for record in RunReader(folder).results():
            assert {s["skill_id"] for s in record["selected_skills"]} == set(check["kept"])
    text = (out / "report.md").read_text()
    assert "It is not confirmed" in text and f"| {check['tries'][0]['chunk']} |" in text


@pytest.mark.slow
def test_without_confirmation_the_report_says_so(shop: Path, finished: Pipeline, tmp_path: Path):
    out = after_the_gate(finished, tmp_path)
    pipeline = pipeline_of(shop, output=str(out), selector_check=None, unseen_tasks=4)
    pipeline.run()
    assert "was not confirmed by rollouts" in (out / "report.md").read_text()
    assert not list((out / "runs").glob("p-check-*"))


def test_too_few_tasks_to_confirm_on_are_refused_before_anything_is_played(shop: Path):
    with pytest.raises(ConfigError, match=r"12 tasks of 'confirm' can hide a loss.*183 are needed"):
        pipeline_of(shop, selector_check={})
    with pytest.raises(ConfigError, match="splits of their own"):
        pipeline_of(shop, selector_check={"split": "gate", "hidden_loss": 0.3})
    gate = {"tasks": 24, "confirm_split": None}
    with pytest.raises(ConfigError, match="needs a split"):
        pipeline_of(shop, gate=gate)
    assert pipeline_of(shop, gate=gate, selector=None).check_split is None


def test_an_incomplete_stage_stops_what_follows(shop: Path, tmp_path: Path, monkeypatch):
    import jobs.pipeline as module

    pipeline = pipeline_of(shop, output=str(tmp_path / "p"))
    monkeypatch.setattr(module.Gate, "run", lambda self: (_ for _ in ()).throw(UserError("no")))
    with pytest.raises(UserError):
        pipeline.run()
    assert pipeline.stages.ran == ["rollouts", "diagnosis", "candidates"]
    assert not (tmp_path / "p" / "skillbank.snapshot.json").exists()


class Silent:
    """An analyst that never writes a card."""

    def __init__(self) -> None:
        pass

    def identity(self):
        return {"kind": "silent"}

    async def generate(self, messages, tools, *, seed):
        return ModelOutput(content="I would have to think about that.")

    async def aclose(self) -> None:
        pass


def test_an_analyst_that_gives_nothing_usable_ends_in_a_report_and_not_in_a_skill(
    shop: Path, finished: Pipeline, tmp_path: Path
):
    model = tmp_path / "analyst.yaml"
    model.write_text("model: {kind: 'tests.jobs.test_pipeline:Silent', name: silent}\n", encoding="utf-8")
    out = tmp_path / "p"
    shutil.copytree(finished.out, out)  # the same rollouts, and what another analyst led to
    config = {"analyst": "llm", "analyst_config": str(model), "max_episodes": 4, "output": str(out)}
    pipeline = pipeline_of(shop, **config)
    pipeline.run()
    assert pipeline.stages.ran == ["candidates", "report"]
    built = pipeline.stages.facts("candidates")
    assert built is not None and built["candidates"] == built["active"] == 0
    assert built["rejected"] == {"model: no_tool_call": built["episodes"]}
    text = (out / "report.md").read_text()
    assert f"model: no_tool_call {built['episodes']}" in text and "nothing was gated" in text
    assert json.loads((out / "report.json").read_text())["selected"] == []
    assert not (out / "evaluation.json").exists()
    again = pipeline_of(shop, **config)
    again.run()
    assert again.stages.ran == []


def kill(stage: str, when: str, config: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLER, stage, when, str(config)], env=ENV, capture_output=True, timeout=240
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]


@pytest.mark.slow
def test_killed_in_the_gate_it_resumes_to_the_same_bank(shop: Path, finished: Pipeline, tmp_path: Path):
    config = write_pipeline(shop, output=str(tmp_path / "pipeline"))
    kill("gate-s0-complement", "inside", config)
    resumed = pipeline_of(shop, output=str(tmp_path / "pipeline"))
    resumed.run(until="bank")
    assert resumed.stages.ran == ["gate", "bank"]
    assert (
        load_snapshot(tmp_path / "pipeline" / "skillbank.snapshot.json").sha256
        == load_snapshot(finished.out / "skillbank.snapshot.json").sha256
    )


@pytest.mark.slow
def test_killed_in_every_stage_it_resumes_to_the_same_bank(shop: Path, finished: Pipeline, tmp_path: Path):
    config = write_pipeline(shop, output=str(tmp_path / "pipeline"))
    for stage in STAGES:
        kill(stage, "before", config)
        kill(stage, "after", config)
    kill("p-check-trained", "inside", write_pipeline(shop, output=str(tmp_path / "pipeline"), selector=CHANGED))
    kill("p-unseen-all", "inside", write_pipeline(shop, output=str(tmp_path / "pipeline"), unseen_repeats=2))
    resumed = pipeline_of(shop, output=str(tmp_path / "pipeline"))
    resumed.run()
    mine = json.loads((tmp_path / "pipeline" / "report.json").read_text())
    theirs = json.loads((finished.out / "report.json").read_text())
    assert mine["bank_sha256"] == theirs["bank_sha256"]
    assert mine["selector_confirmation"] == theirs["selector_confirmation"]
    assert mine["stages"]["selector"]["policy_checksum"] == theirs["stages"]["selector"]["policy_checksum"]
    assert mine["evaluation"]["arms"]["learned"] == theirs["evaluation"]["arms"]["learned"]
