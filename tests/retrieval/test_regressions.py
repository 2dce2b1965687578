"""Group R: what two planned regressions expect retrieving to gain, and how it enters decisions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learners.methods import play
from learners.training import TrainConfig, make_learner
from rayrl.errors import ConfigError
from rayrl.retrieval.baselines import PlannedLogistic
from rayrl.retrieval.folds import Fold
from rayrl.retrieval.mdp import MdpConfig, RetrievalEnv
from rayrl.retrieval.plans import all_plans, expected_returns
from rayrl.retrieval.policy import MeanPolicy, PolicyConfig
from rayrl.retrieval.pools import CLASS_WEIGHTS, Kind
from rayrl.retrieval.regressions import COLUMN, Regressions, fit_regressions, without_gain
from rayrl.retrieval.rewards import RewardConfig
from rayrl.retrieval.task import TaskConfig, build_task
from rayrl.retrieval.world import class_weight_per_row
from tests.retrieval.test_serving import material
from tests.retrieval.worlds import tiny_world

PRICES = RewardConfig()


def world(rows=120, k=3, seed=0):
    """Half class A; the first static feature knows the class, the cosine the place."""
    rng = np.random.default_rng(seed)
    places = rng.integers(0, k, rows)
    is_a = np.arange(rows) % 2 == 0
    patterns = [[bool(a) and j == p for j in range(k)] for a, p in zip(is_a, places, strict=True)]
    kinds = [Kind.A if a else (Kind.NEAR_B, Kind.FAR_B)[i % 4 // 2] for i, a in enumerate(is_a)]
    static = torch.from_numpy(rng.normal(size=(rows, 4)).astype(np.float32))
    static[:, 0] += 2.0 * torch.from_numpy(is_a.astype(np.float32))
    made = tiny_world(patterns, kinds, static=static, seed=seed)
    return replace(made, candidate=made.candidate + 2.0 * made.right[:, :, None])


@pytest.mark.parametrize("prices", [PRICES, RewardConfig(retrieve=-2.0, missed=1.0, wrong_category=-1.0)])
def test_gain_is_that_of_the_best_plan_over_answering_before_the_candidate(prices):
    train, unseen = world(), world(seed=1)
    logistic = PlannedLogistic().fit(train, class_weight_per_row(train, CLASS_WEIGHTS))
    values = expected_returns(
        logistic.gate(unseen), logistic.slots(unseen), MdpConfig(rewards=prices), all_plans(unseen.k, 2)
    )
    expected = np.stack([values[:, j + 1 :].max(1) - values[:, j] for j in range(unseen.k)], axis=1)
    extended = fit_regressions(train, prices).extend(unseen)
    assert extended.candidate_names[-1] == COLUMN
    np.testing.assert_allclose(extended.candidate[:, :, -1], expected, atol=1e-4)
    assert (expected[:, 0] > 0.1).any() and (expected[:, 0] < -0.1).any()


def test_deciding_by_the_plan_alone_is_the_planned_logistic():
    train, unseen = world(), world(seed=1)
    extended = fit_regressions(train, PRICES).extend(unseen)
    config = TrainConfig(policy=PolicyConfig(width=4, layers=2, plan_weight=1e4))
    learner, _ = make_learner(config, extended)
    weight = class_weight_per_row(train, CLASS_WEIGHTS)
    planned = PlannedLogistic().fit(train, weight).plan(unseen, MdpConfig())
    assert torch.equal(play(learner.policy, extended, MdpConfig(), plan_weight=None).retrievals, planned)
    assert 0 < int((planned > 0).sum()) < unseen.rows


def test_plan_moves_the_log_odds_by_its_weight_and_the_network_does_not_see_it():
    extended = fit_regressions(world(), PRICES).extend(world(seed=1))
    learner, _ = make_learner(TrainConfig(policy=PolicyConfig(width=8, members=2, plan_weight=0.5)), extended)
    learner.fit_sft(epochs=2)
    seen = RetrievalEnv(extended, MdpConfig()).reset(torch.arange(extended.rows))

    def margin(policy, dynamic):
        logs = policy.act_logits(policy.project(extended.static), dynamic)
        return (logs[:, 0] - logs[:, 1]).detach()

    alone, together = MeanPolicy(learner.policy, plan_weight=0.0), MeanPolicy(learner.policy)
    gain = extended.candidate[:, 0, -1]
    torch.testing.assert_close(margin(together, seen) - margin(alone, seen), 0.5 * gain, atol=1e-4, rtol=0)
    other = seen.clone()
    other[:, learner.policy.spec.plan_column] += 3.0
    assert torch.equal(margin(alone, other), margin(alone, seen))


def test_the_column_comes_off_again_and_goes_through_a_file():
    train, unseen = world(), world(seed=2)
    regressions = fit_regressions(train, PRICES)
    extended = regressions.extend(unseen)
    bare = without_gain(extended)
    assert torch.equal(bare.candidate, unseen.candidate)
    assert bare.candidate_names == unseen.candidate_names
    again = Regressions.from_arrays(regressions.arrays(), PRICES)
    assert again is not None
    assert torch.equal(again.extend(unseen).candidate, extended.candidate)
    assert Regressions.from_arrays({}, PRICES) is None


@pytest.mark.parametrize("kind", [Kind.A, Kind.NEAR_B])
def test_with_one_class_retrieving_always_pays_or_never(kind):
    made = tiny_world([[kind == Kind.A, False]] * 6, [kind] * 6)
    gain = fit_regressions(made, PRICES).extend(made).candidate[:, 0, -1]
    assert bool((gain == gain[0]).all())
    assert (float(gain[0]) > 0) == (kind == Kind.A)


@pytest.mark.parametrize(
    "changes",
    [
        {"mdp": MdpConfig(actions=3), "policy": PolicyConfig(plan_weight=1.0)},
        {"mdp": MdpConfig(actions=3)},
        {"mdp": MdpConfig(mode="seed"), "policy": PolicyConfig(plan_weight=1.0)},
    ],
)
def test_decisions_that_no_plan_covers_are_refused(changes):
    extended = fit_regressions(world(), PRICES).extend(world())
    with pytest.raises(ConfigError, match="plan_weight and feature group R"):
        make_learner(TrainConfig(**changes), extended)


def test_a_plan_weight_without_the_group_is_refused():
    with pytest.raises(ConfigError, match="plan_weight and feature group R"):
        make_learner(TrainConfig(policy=PolicyConfig(plan_weight=0.4)), world())


def test_a_task_with_group_r_has_the_column_everywhere_and_its_view_adds_it():
    stuff = material(40)
    fold = Fold(
        split="known",
        draw=0,
        half=0,
        fold=0,
        inside=("roof", "tax"),
        train=tuple(f"q{i}" for i in range(24)) + tuple(f"x{i}" for i in range(7)),
        test=(*tuple(f"q{i}" for i in range(24, 30)), "x8", "x9"),
    )
    config = TaskConfig(groups="SLC", far="", distractors=(), random_memories=2)
    plain = build_task(stuff, config, fold, seed=0, mdp=MdpConfig())
    task = build_task(stuff, config.model_copy(update={"groups": "SLCR"}), fold, seed=0, mdp=MdpConfig())
    assert task.view.regressions is not None
    for with_r, without in (
        (task.train, plain.train),
        (task.target_train, plain.target_train),
        (task.test, plain.test),
    ):
        assert torch.equal(without_gain(with_r).candidate, without.candidate)
        assert with_r.candidate_names == (*without.candidate_names, COLUMN)
    assert torch.equal(task.view.regressions.extend(plain.test).candidate, task.test.candidate)
    dear = build_task(
        stuff,
        config.model_copy(update={"groups": "SLCR"}),
        fold,
        seed=0,
        mdp=MdpConfig(rewards=RewardConfig(wrong_category=-100.0)),
    )
    assert bool((dear.test.candidate[:, 0, -1] < task.test.candidate[:, 0, -1]).all())


def test_a_memory_whose_answer_is_always_first_is_planned_for():
    made = tiny_world([[True, False, False]] * 80 + [[False] * 3] * 80, [Kind.A] * 80 + [Kind.FAR_B] * 80)
    made.static[:80] += 5.0
    extended = fit_regressions(made, PRICES).extend(made)
    assert bool((extended.candidate[:80, 0, -1] > 0).all())
    assert bool((extended.candidate[:, 1:, -1] < 0).all()), "behind the first there is nothing to find"
