from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import learners.selector
from jobs.train_selector import tuned_threshold
from learners.selector import SelectorConfig, clone_set, play, train_selector
from rayrl.errors import ConfigError, DataError, RunConflictError
from rayrl.retrieval.encoders import HashEncoder
from rayrl.schemas import EpisodeJob, PublicContext
from rayrl.skills.bank import BankEntry, make_bank, save_bank
from rayrl.skills.outcome_model import Rollouts, fit_outcome_model, greedy_masks
from rayrl.skills.selector import (
    FEATURES,
    LearnedSkills,
    SimilaritySkills,
    nearest,
    question,
    save_selector,
    similarities,
    task_features,
    tokens_of,
)

PERSONA = {"品牌偏好": ["Aster"], "规格偏好": ["白色"]}
TEXTS = ["Search with keywords.", "Turn the wish into keywords.", "Compare the price.", "Stay calm.", "Skip checks."]
QUICK = SelectorConfig(clone_steps=120, updates=5, samples=4)


def rollouts(n: int = 1500, seed: int = 0) -> Rollouts:
    """Chunks 0 and 1 say the same (+.2 once), 2 helps where a persona is there, 3 is idle, 4 harms."""
    rng = np.random.default_rng(seed)
    features = np.zeros((n, len(FEATURES)))
    features[:, 4] = rng.random(n) < 0.5
    first = (rng.random((n, 5)) < 0.5).astype(float)
    masks = np.stack([first, 1 - first], axis=1)
    either = np.maximum(masks[..., 0], masks[..., 1])
    mean = 0.4 + 0.2 * either + 0.15 * masks[..., 2] - 0.15 * masks[..., 4]
    rewards = mean + 0.15 * rng.normal(size=(n, 1)) + 0.1 * rng.normal(size=(n, 2))
    return Rollouts(features, masks, rewards)


def test_the_outcome_model_finds_effects_redundancy_and_what_is_supported():
    data = rollouts()
    model = fit_outcome_model(data)
    assert (0, 1) in model.pairs
    assert list(model.supported) == [True, True, True, False, False]
    assert model.average_effects == pytest.approx([0.1, 0.1, 0.15, 0, -0.15], abs=0.02)
    one = np.array([[1.0, 0, 1, 0, 0]])
    both = np.array([[1.0, 1, 1, 0, 0]])
    f = data.features[:1]
    assert model.predict(f, both)[0] == pytest.approx(model.predict(f, one)[0], abs=0.03)
    assert model.predict(f, one)[0] == pytest.approx(0.75, abs=0.05)


def test_the_best_sets_take_one_of_two_that_say_the_same():
    data = rollouts()
    sets = greedy_masks(fit_outcome_model(data), data.features, np.full(5, 0.02))
    assert (sets[:, 0] + sets[:, 1] == 1).all() and (sets[:, 2] == 1).all() and (sets[:, 3:] == 0).all()


def test_nothing_is_supported_where_there_is_only_noise():
    data = rollouts()
    noise = Rollouts(data.features, data.masks, np.random.default_rng(1).normal(size=(1500, 2)))
    model = fit_outcome_model(noise)
    assert not model.supported.any()
    assert not greedy_masks(model, data.features, np.full(5, 0.01)).any()


def test_unfit_rollouts_are_refused():
    with pytest.raises(ValueError, match="rollouts of shapes"):
        fit_outcome_model(Rollouts(np.zeros((0, 8)), np.zeros((0, 2, 5)), np.zeros((0, 2))))


def entries() -> list[BankEntry]:
    return [BankEntry(skill_id=f"s{i}", content=text) for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selector") / "selector"
    data = rollouts()
    near = np.tile(similarities(HashEncoder(), entries(), ["a task"]), (1500, 1))
    tokens = np.array([tokens_of(e) for e in entries()])
    trained = train_selector(data, near, tokens, QUICK)
    again = train_selector(data, near, tokens, QUICK)
    for key, value in trained.policy.state_dict().items():
        assert (value == again.policy.state_dict()[key]).all()
    assert trained.facts["model_value_of_policy"] >= trained.facts["model_value_of_all"] + 0.05
    save_selector(
        path,
        make_bank(entries()),
        trained.policy,
        encoder="hash",
        encoder_identity=HashEncoder().identity(),
        facts=trained.facts,
    )
    return path


@pytest.mark.parametrize("kept", [[0, 1, 0, 1, 1], [0] * 5, [1] * 5])
def test_a_fixed_set_is_cloned_exactly_on_every_task(kept: list[int]):
    data = rollouts(60)
    near = np.random.default_rng(0).random((60, 5))
    tokens = np.array([tokens_of(e) for e in entries()])
    policy = clone_set(data.features, near, tokens, np.array(kept, dtype=float), SelectorConfig(clone_steps=20))
    shares = torch.from_numpy(tokens / tokens.sum()).float()
    other = torch.from_numpy(np.random.default_rng(1).random((40, 5))).float()
    taken = play(policy, torch.from_numpy(rollouts(40, 5).features).float(), other, shares)
    assert (taken == torch.tensor(kept)).all()


def test_a_set_that_was_not_learned_is_an_error(monkeypatch):
    monkeypatch.setattr(learners.selector, "CLONE_ROUNDS", 1)
    with pytest.raises(DataError, match="clone_steps"):
        clone_set(
            np.zeros((4, 8)), np.zeros((4, 5)), np.ones(5), np.array([1.0, 0, 1, 0, 1]), SelectorConfig(clone_steps=1)
        )


def context(task: int = 1) -> PublicContext:
    job = EpisodeJob(task_id=task, sample_id=0, seed=0, split="val")
    return PublicContext(job=job, instruction="买台灯，100元以内", persona=PERSONA, observation_state={})


def test_the_served_selector_takes_what_training_said(folder: Path):
    provider = LearnedSkills(str(folder))
    chosen = [s.skill_id for s in asyncio.run(provider.select(context()))]
    assert "s2" in chosen and len({"s0", "s1"} & set(chosen)) == 1 and not {"s3", "s4"} & set(chosen)
    assert all(0.5 < s.metadata["selector_probability"] <= 1 for s in asyncio.run(provider.select(context())))
    assert asyncio.run(LearnedSkills(str(folder), mode="off").select(context())) == []
    assert asyncio.run(LearnedSkills(str(folder), mode="shadow").select(context())) == []
    assert (
        provider.identity()["policy_checksum"] == json.loads((folder / "selector.json").read_text())["policy_checksum"]
    )


def test_damaged_or_foreign_selectors_are_refused(folder: Path, tmp_path: Path):
    import shutil

    def copy(change) -> str:
        path = tmp_path / "copy"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder, path)
        meta = json.loads((path / "selector.json").read_text())
        change(path, meta)
        (path / "selector.json").write_text(json.dumps(meta))
        return str(path)

    with pytest.raises(DataError, match="no skill selector"):
        LearnedSkills(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="mode"):
        LearnedSkills(str(folder), mode="on")
    with pytest.raises(DataError, match="checksum"):
        LearnedSkills(copy(lambda _, m: m.update(policy_checksum="0")))
    with pytest.raises(DataError, match="other features"):
        LearnedSkills(copy(lambda _, m: m.update(features=["x"])))
    with pytest.raises(RunConflictError, match="encoder"):
        LearnedSkills(copy(lambda _, m: m["encoder_identity"].update(dim=1)))

    def other_bank(path, meta):
        (path / "bank.snapshot.json").unlink()
        save_bank(make_bank(entries()[:4]), path / "bank.snapshot.json")

    with pytest.raises(DataError, match="not the one it was trained on"):
        LearnedSkills(copy(other_bank))


def test_similarity_takes_the_nearest(tmp_path: Path):
    assert nearest(np.array([0.1, 0.5, 0.3]), top_k=2, threshold=None) == [False, True, True]
    assert nearest(np.array([0.1, 0.5, 0.3]), top_k=None, threshold=0.3) == [False, True, True]
    assert nearest(np.array([0.1, 0.5, 0.3]), top_k=1, threshold=0.9) == [False, False, False]
    bank = tmp_path / "b.json"
    save_bank(make_bank(entries()), bank)
    assert len(asyncio.run(SimilaritySkills(str(bank), top_k=2).select(context()))) == 2
    with pytest.raises(ConfigError, match="top_k"):
        SimilaritySkills(str(bank))


def test_the_threshold_is_tuned_on_worth():
    data = rollouts()
    model = fit_outcome_model(data)
    near = np.tile([0.9, 0.1, 0.8, 0.2, 0.0], (1500, 1))
    threshold, worth = tuned_threshold(model, data.features, near, np.full(5, 0.02))
    assert 0.2 < threshold <= 0.8 and worth == pytest.approx(0.31, abs=0.04)


def test_features_are_public_and_bounded():
    f = task_features("Looking for a lamp, within 100 yuan", {})
    assert f.shape == (len(FEATURES),) and f[0] == 0 and f[2] == 1 and f[4] == 0
    g = task_features("买台灯，100元以内", PERSONA)
    assert g[0] == 1 and g[4] == g[5] == g[6] == 1 and (g <= 2).all()
    assert "Aster" in question("x", PERSONA) and question("x", {}) == "x"
