"""From a config to everything a run is: pure, the same on every machine, refused where it cannot be right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from rayrl.errors import ConfigError, DataError
from rayrl.experiment import EPHEMERAL_MARK, load_run_config, prepare, run_root
from rayrl.schemas import episode_seed
from rayrl.settings import RunConfig
from rayrl.splits import make_split
from rayrl.tasks import SplitManifest
from tests.conftest import write_manifest

KEY = "sk-planted-9876543210"


def plan(path, *overrides):
    return prepare(*load_run_config(path, list(overrides)))


def test_jobs_follow_from_split_seed_and_repeats(plain_run):
    experiment = plan(plain_run(), "experiment.seed=7", "tasks.repeats=3")
    assert len(experiment.jobs) == 12
    assert {job.seed for job in experiment.jobs} == {episode_seed(7, j.task_id, j.sample_id) for j in experiment.jobs}
    assert experiment.semantic["jobs"][0] == [
        experiment.jobs[0].task_id,
        0,
        experiment.jobs[0].seed,
        "train",
    ]


def test_parallelism_and_places_are_not_the_experiment(plain_run):
    one = plan(plain_run())
    overrides = ["execution.actors=9", "execution.concurrency=1", "experiment.name=other", "runtime.deadline_s=5"]
    assert plan(plain_run(), *overrides).fingerprint == one.fingerprint


PRINT = "import sys; from rayrl.experiment import *; print(prepare(*load_run_config(sys.argv[1])).fingerprint)"


def test_the_fingerprint_is_the_same_in_another_process_with_another_hash_seed(plain_run, tmp_path):
    path = plain_run()
    env = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(Path.cwd()), "TZ": "Asia/Tokyo"}
    done = subprocess.run(
        [sys.executable, "-c", PRINT, str(path)], capture_output=True, text=True, env=env, cwd=tmp_path, check=True
    )
    assert done.stdout.strip() == plan(path).fingerprint


def test_the_manifest_and_the_resolved_config_hold_no_secret(plain_run, monkeypatch):
    monkeypatch.setenv("PLANTED", KEY)
    path = plain_run(model={"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "api_key_env": "PLANTED"})
    experiment = plan(path)
    assert KEY not in json.dumps([experiment.manifest(), experiment.resolved_config()])
    assert "PLANTED" not in json.dumps(experiment.semantic)
    spec = experiment.worker_spec(experiment.config.environment)
    assert KEY not in repr(spec)


def test_the_resolved_config_leads_to_the_same_experiment_from_anywhere(plain_run, tmp_path, monkeypatch):
    bank = {"schema": "rayrl-skillbank-v1", "skills": [{"skill_id": "a", "content": "x"}]}
    (tmp_path / "bank.json").write_text(json.dumps(bank))
    path = plain_run(
        tasks__manifest="splits.json",
        skills={"kind": "bank", "path": "bank.json"},
        prompt={"file": "prompts/shop_v1.yaml"},
    )
    experiment = plan(path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    again = prepare(RunConfig.model_validate(experiment.resolved_config()), elsewhere)
    assert again.fingerprint == experiment.fingerprint and again.run_dir == experiment.run_dir


def test_provenance_says_what_an_episode_needs_to_be_understood_alone(plain_run):
    experiment = plan(plain_run(model__checkpoint_id="step-7"))
    provenance = experiment.worker_spec(experiment.config.environment).provenance
    assert provenance["fingerprint"] == experiment.fingerprint and provenance["scripted"] is True
    assert (provenance["checkpoint_id"], provenance["environment_version"]) == ("step-7", "null-v1")
    assert provenance["skills"] == {"kind": "none"} and len(provenance["prompt_sha256"]) == 64
    orjson.dumps(provenance)


def test_a_provider_of_ones_own_is_built_where_it_runs(plain_run):
    experiment = plan(plain_run(skills={"kind": "tests.doubles:OptionSkills", "options": {"a": 1}}))
    spec = experiment.worker_spec(experiment.config.environment)
    assert spec.skills == experiment.config.skills
    assert experiment.semantic["skills"] == {"kind": "own", "a": 1}


def test_a_relative_run_root_starts_here_and_is_refused_in_a_temporary_place(plain_run, tmp_path, monkeypatch):
    config, _ = load_run_config(plain_run(experiment__run_root="out"))
    monkeypatch.chdir(tmp_path)
    assert run_root(config) == tmp_path / "out"
    temporary = tmp_path / EPHEMERAL_MARK / "_ray_pkg_1"
    temporary.mkdir(parents=True)
    monkeypatch.chdir(temporary)
    with pytest.raises(ConfigError, match=r"experiment\.run_root: 'out' is relative.*run_root=~/rayrl-runs"):
        run_root(config)
    home, _ = load_run_config(plain_run(experiment__run_root="~/runs"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert run_root(home) == tmp_path / "home" / "runs"


def test_persona_mode_and_split_must_agree(shop_run, tmp_path):
    path = shop_run()
    config, _ = load_run_config(path)
    raw = json.loads((tmp_path / config.tasks.manifest).read_text(encoding="utf-8"))
    raw["splits"]["train"]["persona"] = True
    own = tmp_path / "persona.json"
    own.write_text(json.dumps(raw))
    with pytest.raises(
        ConfigError, match=r"environment\.persona is false, but the split 'train' is made for persona true"
    ):
        plan(shop_run(tasks__manifest=str(own)))
    assert plan(shop_run(tasks__manifest=str(own), environment__persona=True)).jobs


def test_a_manifest_of_another_catalogue_is_refused(shop_run, tmp_path):
    other = SplitManifest(
        source={"kind": "shop_catalogue", "sha256": "0" * 64}, splits={"train": make_split("train", [0, 1], None)}
    )
    path = write_manifest(tmp_path / "other.json", other)
    with pytest.raises(ConfigError, match=r"tasks\.manifest was built for another catalogue \(000000000000"):
        plan(shop_run(tasks__manifest=str(path), tasks__sample_size=1))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"tasks__manifest": "nowhere.json"}, ConfigError, "nowhere.json"),
        ({"tasks__split": "dev"}, ConfigError, r"tasks\.split: no split 'dev'"),
        ({"tasks__sample_size": 99}, ConfigError, r"tasks\.sample_size: 99 tasks asked for"),
        ({"prompt": {"file": "prompts/none.yaml"}}, ConfigError, r"prompts/none\.yaml"),
        ({"prompt": {"history": "last_n", "last_n": 0}}, ConfigError, r"prompt\.last_n"),
        ({"skills": {"kind": "bank"}}, ConfigError, r"skills\.path"),
        ({"environment__kind": "no.such:Thing"}, ConfigError, "module 'no' was not found"),
        ({"environment__options": {"speed": 3}}, ConfigError, r"environment\.options"),
        (
            {"environment__kind": "tests.doubles:FakeModel", "environment__options": {}},
            Exception,
            "no EnvironmentFactory",
        ),
        ({"model__kind": "tests.doubles:OptionSkills"}, Exception, "no ChatModel"),
        ({"model__kind": "opnai"}, ConfigError, r"did you mean 'openai'"),
    ],
)
def test_what_can_be_known_to_be_wrong_is_refused_before_the_first_request(plain_run, changes, error, says):
    with pytest.raises(error, match=says):
        plan(plain_run(**changes))


def test_a_broken_split_manifest_is_named(plain_run, plain_splits):
    plain_splits.write_text("{")
    with pytest.raises(DataError, match=r"splits\.json:1: not JSON"):
        plan(plain_run())
