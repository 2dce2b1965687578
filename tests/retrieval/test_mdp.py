import json
from itertools import product
from pathlib import Path

import pytest
import torch

from rayrl.retrieval.guard import Block
from rayrl.retrieval.mdp import MdpConfig, RetrievalEnv, dynamic_dim
from rayrl.retrieval.oracle import best_return, oracle_returns
from rayrl.retrieval.pools import Kind
from rayrl.retrieval.rewards import RewardConfig
from rayrl.retrieval.rollout import concat_batches, random_orders, rollout
from tests.retrieval.worlds import one_hot_world, tiny_world

VECTORS = json.loads((Path(__file__).parents[1] / "fixtures" / "returns.json").read_text())["oracle"]


def play(world, config, actions):
    env = RetrievalEnv(world, config)
    env.reset(torch.arange(world.rows))
    rewards = []
    for a in actions:
        reward, _ = env.step(torch.full((world.rows,), a))
        rewards.append(reward)
    return env, torch.stack(rewards)


@pytest.mark.parametrize(("actions", "key"), [(2, "two_actions"), (3, "three_actions")])
def test_oracle_vectors(actions, key):
    returns = oracle_returns(one_hot_world(), MdpConfig(actions=actions))
    torch.testing.assert_close(returns, torch.tensor([*VECTORS[key], VECTORS["class_b"]], dtype=torch.float32))


@pytest.mark.parametrize("actions", [2, 3])
@pytest.mark.parametrize("mode", ["seed", "observable"])
def test_expert_reaches_the_oracle_for_every_single_answer_pattern(actions, mode):
    k = 5
    patterns = [[j == i for j in range(k)] for i in range(k)] + [[False] * k, [False] * k]
    world = tiny_world(patterns, [Kind.A] * 6 + [Kind.FAR_B], n_right=[1] * 6 + [0])
    config = MdpConfig(actions=actions, mode=mode)
    batch = rollout(None, RetrievalEnv(world, config), torch.arange(world.rows))
    torch.testing.assert_close(batch.outcome.returns, oracle_returns(world, config))
    assert (batch.outcome.block == 0).all()


@pytest.mark.parametrize("actions", [2, 3])
def test_oracle_is_what_brute_force_over_action_strings_finds(actions):
    """The enumeration shares no code with the environment; here every action string is really played."""
    k, config = 3, MdpConfig(actions=actions, max_steps=7)
    patterns = list(product([False, True], repeat=k))
    world = tiny_world(
        patterns * 2, [Kind.A] * 8 + [Kind.NEAR_B] * 8, n_right=[max(1, sum(p)) for p in patterns] + [0] * 8
    )
    strings = torch.tensor(list(product(range(actions), repeat=7 if actions == 3 else 4)))
    best = torch.full((world.rows,), -1e9)
    for row in range(world.rows):
        env = RetrievalEnv(world, config)
        env.reset(torch.full((len(strings),), row))
        for t in range(strings.shape[1]):
            env.step(strings[:, t])
        finished = ~env.alive
        best[row] = env.returns[finished].max()
    torch.testing.assert_close(best, oracle_returns(world, config))


def test_rewards_of_the_original_design():
    config2, config3 = MdpConfig(mode="seed"), MdpConfig(actions=3, mode="seed")
    world = tiny_world([[False, False, True, False, False]], [Kind.A])
    _, rewards = play(world, config2, [0, 0, 0, 1])
    torch.testing.assert_close(rewards[:, 0], torch.tensor([-0.5, -0.5, -0.5, 10.0]))
    env, _ = play(world, config3, [0, 0, 0, 2])
    assert env.returns.item() == pytest.approx(7 - 1.5)  # right, distractors still held
    env, _ = play(world, config3, [0, 1, 0, 1, 0, 2])
    assert env.returns.item() == pytest.approx(10 - 1.5 - 0.4)
    env, _ = play(world, config2, [0, 1])
    assert env.returns.item() == pytest.approx(-4.0)
    other = tiny_world([[False] * 5], [Kind.FAR_B])
    env, _ = play(other, config2, [0, 1])
    assert env.returns.item() == pytest.approx(-9.0)
    env, _ = play(other, config3, [0, 1, 2])
    assert env.returns.item() == pytest.approx(10 - 0.7)


def test_partial_hits_interpolate_and_judged_answers_count():
    world = tiny_world([[True, False, True]], [Kind.A])
    env, _ = play(world, MdpConfig(), [0, 1])
    assert env.returns.item() == pytest.approx(-0.5 + (-3.5 + 13.5 / 2))
    wrong = torch.tensor([[False, False]])
    for kind, n_right, actions, expected in (
        (Kind.A, [1], [0, 1], -0.5 - 3.5),
        (Kind.FAR_B, [0], [1], -3.5),
        (Kind.FAR_B, [0], [0, 1], -0.5 - 8.5),
    ):
        world = tiny_world([[kind == Kind.A, False, False]], [kind], n_right=n_right)
        env = RetrievalEnv(world, MdpConfig(), answer_right=wrong)
        env.reset(torch.arange(1))
        for a in actions:
            env.step(torch.tensor([a]))
        assert env.returns.item() == pytest.approx(expected)


def test_exhausted_queue_ends_two_action_episodes_with_the_terminal_reward():
    world = tiny_world([[False] * 4 + [True]], [Kind.A])
    env, rewards = play(world, MdpConfig(), [0] * 5)
    assert not env.alive.any()
    torch.testing.assert_close(rewards[:, 0], torch.tensor([-0.5] * 4 + [9.5]))


def test_guard_rules_are_counted_and_penalised():
    world = tiny_world([[True, False, False]], [Kind.A])
    env, _ = play(world, MdpConfig(mode="seed"), [0, 0])
    assert env.block.item() == Block.AFTER_HITS
    assert env.returns.item() == pytest.approx(-0.5 - 6.5)
    env, _ = play(world, MdpConfig(mode="observable"), [0, 0, 1])
    assert env.block.item() == Block.NONE  # a server does not know
    env, _ = play(world, MdpConfig(actions=3), [1])
    assert env.block.item() == Block.REPEAT
    env, _ = play(world, MdpConfig(actions=3), [0, 0, 0, 0])
    assert env.block.item() == Block.LIMIT
    assert env.returns.item() == pytest.approx(-1.5 - 5.0)
    twice = tiny_world([[False, False, True]], [Kind.A], items=[[4, 4, 2]])
    env, _ = play(twice, MdpConfig(), [0, 0])
    assert env.block.item() == Block.REPEAT
    env, _ = play(world, MdpConfig(actions=3, max_steps=3), [0, 1, 0, 2])
    assert env.block.item() == Block.MAX_STEPS
    assert not env.outcome().right.any()


def test_forget_drops_the_last_one_held():
    world = tiny_world([[True, False, False]], [Kind.A])
    env, _ = play(world, MdpConfig(actions=3), [0, 0, 1])
    assert env.held[0].tolist() == [True, False, False]
    env, _ = play(world, MdpConfig(actions=3), [0, 0, 1, 1])
    assert not env.held.any()


def test_seed_state_is_two_numbers_and_observable_has_no_label():
    world = tiny_world([[True, False, False], [False, True, False]], [Kind.A, Kind.A])
    env = RetrievalEnv(world, MdpConfig(mode="seed"))
    first = env.reset(torch.arange(2))
    assert first.shape == (2, 2)
    assert (first[:, 1] == 0).all()
    env.step(torch.tensor([0, 0]))
    assert env.observe()[:, 1].tolist() == [1.0, 0.0]
    flipped = tiny_world([[False, True, False], [True, False, False]], [Kind.FAR_B, Kind.FAR_B], n_right=[0, 0])
    for mode in ("observable", "revealing"):
        a, b = (RetrievalEnv(w, MdpConfig(actions=3, mode=mode)) for w in (world, flipped))
        assert torch.equal(a.reset(torch.arange(2)), b.reset(torch.arange(2)))
        for action in (0, 1, 0):
            a.step(torch.full((2,), action))
            b.step(torch.full((2,), action))
            assert torch.equal(a.observe(), b.observe())
            assert a.observe().shape[1] == dynamic_dim(world, mode)


def test_revealing_shows_text_features_only_after_retrieving():
    world = tiny_world([[True, False, False]], [Kind.A], reveal=2)
    env = RetrievalEnv(world, MdpConfig(actions=3, mode="revealing"))
    base = dynamic_dim(world, "observable")
    assert (env.reset(torch.arange(1))[0, base : base + 4] == 0).all()
    env.step(torch.tensor([0]))
    torch.testing.assert_close(env.observe()[0, base + 2 : base + 4], world.reveal[0, 0])
    env.step(torch.tensor([1]))
    assert (env.observe()[0, base : base + 4] == 0).all()
    env.step(torch.tensor([0]))
    torch.testing.assert_close(env.observe()[0, base + 2 : base + 4], world.reveal[0, 1])


def test_random_orders_place_the_right_candidate_anywhere_but_first():
    world = tiny_world([[True, False, False, False, False]] * 400 + [[False] * 5], [Kind.A] * 400 + [Kind.FAR_B])
    order = random_orders(401, 5, world.right, seed=3)
    assert (order.sort(1).values == torch.arange(5)).all()
    place = world.right.gather(1, order)[:400].float().argmax(1)
    counts = torch.bincount(place, minlength=5)
    assert counts[0] == 0
    assert (counts[1:] > 60).all()


def test_rollout_depends_on_its_seed_alone():
    class Uniform:
        def project(self, static):
            return static[:, :1] * 0

        def act_logits(self, projected, dynamic):
            return torch.zeros(dynamic.shape[0], 3)

    world = one_hot_world()
    env = RetrievalEnv(world, MdpConfig(actions=3))
    rows = torch.arange(world.rows)
    a = rollout(Uniform(), env, rows, group_size=4, seed=11)
    torch.rand(7)
    b = rollout(Uniform(), RetrievalEnv(world, MdpConfig(actions=3)), rows, group_size=4, seed=11)
    c = rollout(Uniform(), env, rows, group_size=4, seed=12)
    assert torch.equal(a.actions, b.actions)
    assert not torch.equal(a.actions[:3], c.actions[:3])
    totals = (a.rewards * a.mask).sum(0)
    torch.testing.assert_close(totals, a.outcome.returns)
    joined = concat_batches([a, c])
    assert joined.episodes == 2 * a.episodes
    assert joined.group.tolist() == sorted(joined.group.tolist())


def test_a_dear_retrieval_is_not_worth_it():
    rewards = RewardConfig(retrieve=-20.0)
    world = one_hot_world()
    config = MdpConfig(rewards=rewards)
    assert best_return((True,), 1, True, 2, 12, rewards) == rewards.missed
    batch = rollout(None, RetrievalEnv(world, config), torch.arange(world.rows))
    torch.testing.assert_close(batch.outcome.returns, oracle_returns(world, config))
