from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest

from jobs.build_skills import (
    CANDIDATES,
    CARDS,
    CLUSTERS,
    SNAPSHOT,
    BuildSettings,
    analyse_chunk,
    analyse_record,
    build,
)
from jobs.curriculum import triage_run
from jobs.rollout import run_rollout
from rayrl.errors import ConfigError, DataError
from rayrl.evaluation.sources import find_sources, load_goals, plan_chunks
from rayrl.experiment import load_run_config, prepare
from rayrl.models.config import ModelConfig
from rayrl.schemas import ModelOutput, ToolCall
from rayrl.skills.bank import load_snapshot
from rayrl.skills.firewall import Protected, inspect
from rayrl.skills.stages import STATE, Stages
from rayrl.traces.store import RunReader
from tests.jobs.skills_support import write_bank, write_shop


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    config, base = load_run_config(write_shop(folder))
    return run_rollout(prepare(config, base), quiet=True).run_dir


def test_a_bank_is_built_and_every_skill_can_be_traced_back(run_dir: Path, tmp_path: Path):
    facts = build([str(run_dir)], tmp_path, BuildSettings())
    assert facts["ran"] == ["cards", "clusters", "candidates", "snapshot"] and facts["episodes"] == 20
    bank = load_snapshot(tmp_path / SNAPSHOT)
    assert 1 <= len(bank.skills) <= 16 and bank.sha256 == facts["bank_sha256"]
    known = {r["episode_id"] for r in RunReader(run_dir).results()}
    for skill in bank.skills:
        record = bank.record(skill.skill_id)
        refs = [*record.evidence_for, *record.evidence_against]
        assert refs and all(r.episode_id in known and r.steps for r in refs)
        assert record.builder.kind == "rules" and record.leak_check.checked
        assert inspect(skill.content, Protected()).passed
    cards = [orjson.loads(line) for line in (tmp_path / CARDS).read_bytes().splitlines()]
    clusters = json.loads((tmp_path / CLUSTERS).read_text())
    assert sorted(c["card_id"] for c in cards) == sorted(i for c in clusters for i in c["cards"])
    assert any(c["privileged_audit"] for c in cards)
    assert "privileged" not in (tmp_path / SNAPSHOT).read_text() + (tmp_path / CANDIDATES).read_text()


def test_again_it_rests_and_a_lost_file_is_made_anew_with_all_behind_it(run_dir: Path, tmp_path: Path):
    first = build([str(run_dir)], tmp_path, BuildSettings())
    assert build([str(run_dir)], tmp_path, BuildSettings())["ran"] == []
    (tmp_path / CLUSTERS).unlink()
    again = build([str(run_dir)], tmp_path, BuildSettings())
    assert again["ran"] == ["clusters", "candidates", "snapshot"] and again["bank_sha256"] == first["bank_sha256"]
    fewer = build([str(run_dir)], tmp_path, BuildSettings(limit=2))
    assert fewer["ran"] == ["candidates", "snapshot"] and fewer["candidates"] == 2
    some = build([str(run_dir)], tmp_path, BuildSettings(max_episodes=5))
    assert some["episodes"] == 5 and some["ran"][0] == "cards"


def test_a_stage_that_dies_leaves_no_entry(tmp_path: Path):
    stages = Stages(tmp_path)
    with pytest.raises(RuntimeError):
        stages.run("one", {}, ["f"], lambda: (_ for _ in ()).throw(RuntimeError("x")))
    assert not (tmp_path / STATE).exists()
    with pytest.raises(DataError, match="without its file"):
        stages.run("one", {}, ["f"], dict)
    (tmp_path / STATE).write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        Stages(tmp_path)


def test_byte_ranges_give_the_cards_of_the_whole_file(run_dir: Path):
    (source,) = find_sources([str(run_dir)])
    goals = {source.run: load_goals(source)}
    whole = [i for c in plan_chunks([source]) for i in analyse_chunk(c, goals)]
    parts = [i for c in plan_chunks([source], 20_000) for i in analyse_chunk(c, goals)]
    assert whole == parts and len(plan_chunks([source], 20_000)) > 1
    record = next(RunReader(run_dir).results())
    assert orjson.dumps(analyse_record(record, source.run, goals[source.run])) in whole


@pytest.mark.ray
@pytest.mark.slow
def test_ray_data_gives_the_same_bank(run_dir: Path, tmp_path: Path):
    local = build([str(run_dir)], tmp_path / "local", BuildSettings())
    ray = build([str(run_dir)], tmp_path / "ray", BuildSettings(engine="ray"))
    assert local["bank_sha256"] == ray["bank_sha256"]


class Writer:
    """An analyst whose every second answer is unusable and whose every third gives the answer away."""

    def __init__(self) -> None:
        self.calls = 0

    def identity(self):
        return {"kind": "writer"}

    async def generate(self, messages, tools, *, seed):
        self.calls += 1
        if self.calls % 2 == 0:
            return ModelOutput(content="I cannot.")
        title = "Buy 700000017094 at once" if self.calls % 3 == 0 else "Mind the price"
        arguments = {
            "mechanism": "price",
            "title": title,
            "applicable_when": "a limit is given",
            "behaviour": "the price was not looked at",
            "procedure": ["Compare the price with the budget."],
            "verify": "",
            "avoid": "",
            "confidence": 0.5,
        }
        return ModelOutput(tool_calls=[ToolCall(id="c", name="write_card", arguments=arguments)])

    async def aclose(self) -> None:
        pass


class Plain(Writer):
    """An analyst whose answers are all usable."""

    async def generate(self, messages, tools, *, seed):
        self.calls = 0
        return await super().generate(messages, tools, seed=seed)


def test_a_model_as_analyst_and_what_it_spoils_is_counted(run_dir: Path, tmp_path: Path):
    model = ModelConfig(kind="tests.jobs.test_skills_build:Writer", name="writer")
    facts = build([str(run_dir)], tmp_path, BuildSettings(analyst="llm", model=model, max_episodes=12, concurrency=1))
    assert facts["episodes"] == 12 and facts["cards"] == 4
    assert facts["rejected"]["model: no_tool_call"] == 6
    assert sum(n for reason, n in facts["rejected"].items() if reason.startswith("firewall")) >= 2
    (skill,) = load_snapshot(tmp_path / SNAPSHOT).skills
    assert "Compare the price" in skill.content
    with pytest.raises(ConfigError, match="model-config"):
        build([str(run_dir)], tmp_path / "x", BuildSettings(analyst="llm"))


def test_failures_can_be_replayed_for_the_analyst(run_dir: Path, tmp_path: Path):
    model = ModelConfig(kind="tests.jobs.test_skills_build:Plain", name="writer")
    settings = BuildSettings(
        analyst="llm", model=model, max_episodes=6, concurrency=1, replay=str(run_dir / "config.yaml")
    )
    build([str(run_dir)], tmp_path, settings)
    cards = [orjson.loads(line) for line in (tmp_path / CARDS).read_bytes().splitlines()]
    replays = [c["privileged_audit"]["replay"] for c in cards if c["privileged_audit"]]
    assert replays and all(r["repeats"] is True and "goal_listed_at" in r for r in replays)


def test_all_wrong_groups_are_retried_with_every_skill(run_dir: Path, tmp_path: Path):
    facts = triage_run(run_dir, write_bank(tmp_path), tmp_path / "triage")
    rows = [orjson.loads(line) for line in (tmp_path / "triage" / "triage.jsonl").read_bytes().splitlines()]
    assert facts["groups"] == len(rows) == 20 and facts["retried"] > 0
    retried = [r for r in rows if r["retry_reward"] is not None]
    assert len(retried) == facts["retried"] and {r["class"] for r in retried} <= {"internalisation_deficit", "analyst"}
    assert triage_run(run_dir, tmp_path / "bank.json", tmp_path / "triage") == facts


def test_fluent_text_without_a_mechanism_changes_nothing(run_dir: Path, tmp_path: Path):
    """A negative control: skills are obeyed for what they say."""
    idle = {
        "calm": "Work calmly and in order. Finish one step before beginning the next.",
        "goal": "Remember the goal and act decisively once it is clear.",
        "plan": "Make a plan of three steps before acting; revise it when new information arrives.",
    }
    config, base = load_run_config(
        run_dir / "config.yaml",
        ["experiment.name=idle", "skills.kind=bank", f"skills.path={write_bank(tmp_path, idle)}"],
    )
    with_text = run_rollout(prepare(config, base), quiet=True).run_dir
    rewards = [
        {r["episode_id"]: r["final"]["reward"] for r in RunReader(folder).results()} for folder in (run_dir, with_text)
    ]
    assert rewards[0] == rewards[1]
