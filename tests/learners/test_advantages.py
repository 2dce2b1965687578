"""Every number of the vector file, and the properties the estimators promise."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learners import advantages as adv
from learners.divergence import entropy, forward_kl, reverse_kl

VECTORS = json.loads((Path(__file__).parents[1] / "fixtures" / "returns.json").read_text())
TOL = VECTORS["tolerance"]
GAMMA = VECTORS["gamma"]


def column(rewards):
    r = torch.tensor(rewards, dtype=torch.float64)[:, None]
    return r, torch.ones_like(r, dtype=torch.bool)


def padded(episodes):
    steps = max(len(e) for e in episodes)
    rewards = torch.zeros(steps, len(episodes), dtype=torch.float64)
    mask = torch.zeros(steps, len(episodes), dtype=torch.bool)
    for b, episode in enumerate(episodes):
        rewards[: len(episode), b] = torch.tensor(episode, dtype=torch.float64)
        mask[: len(episode), b] = True
    return rewards, mask


def close(actual, expected):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=TOL,
        rtol=0,
    )


@pytest.mark.parametrize("case", VECTORS["return_to_go"], ids=lambda c: c["id"])
def test_return_to_go_vectors(case):
    r, m = column(case["rewards"])
    g = adv.return_to_go(r, m, GAMMA)
    close(g[:, 0], case["G"])
    close(g.mean(), case["mean"])
    close(g.std(correction=0), case["population_std"])
    close(adv.normalise_per_trajectory(g, m)[:, 0], case["normalised_population"])
    if "normalised_bessel" in case:
        close(adv.normalise_per_trajectory(g, m, bessel=True)[:, 0], case["normalised_bessel"])


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("case", VECTORS["return_to_go"], ids=lambda c: c["id"])
def test_seed_recursion_is_the_return_for_every_lambda(case, lam):
    r, m = column(case["rewards"])
    close(adv.seed_recursion(r, m, GAMMA, lam)[:, 0], case["G"])


@pytest.mark.parametrize("lam", ["0", "0.95", "1"])
def test_lambda_return_vectors(lam):
    case = VECTORS["lambda_return"]
    r, m = column(case["rewards"])
    values = torch.tensor(case["V"][:-1], dtype=torch.float64)[:, None]
    result = adv.lambda_return(r, values, m, GAMMA, float(lam))
    close(result[:, 0], case[lam]["L"])
    close((result - values)[:, 0], case[lam]["advantage"])


def test_group_of_four_vectors():
    case = VECTORS["group_of_four"]
    outcome = torch.tensor(case["returns"], dtype=torch.float64)
    group = torch.zeros(4, dtype=torch.int64)
    close(adv.grpo_outcome(outcome, group)[0], case["population"])
    close(adv.rloo_outcome(outcome, group)[0], case["leave_one_out"])


def test_trace_group_vectors():
    case = VECTORS["trace_group"]
    r, m = padded([member["rewards"] for member in case["members"]])
    group = torch.zeros(len(case["members"]), dtype=torch.int64)
    returns = adv.return_to_go(r, m, case["gamma"])
    values = adv.group_values(returns, m, group)
    lam_return = adv.lambda_return(r, values, m, case["gamma"], case["lam"])
    std, _ = adv.group_spread(returns[0], group)
    close(std[0], case["scale_population_std_of_discounted_returns"])
    scaled = adv.trace_advantage(r, m, group, gamma=case["gamma"], lam=case["lam"]).values
    for b, member in enumerate(case["members"]):
        n = len(member["rewards"])
        close(returns[:n, b], member["G"])
        close(values[:n, b], member["V"])
        close(lam_return[:n, b], member["L"])
        close((lam_return - values)[:n, b], member["advantage"])
        close(scaled[:n, b], member["scaled"])
        assert (scaled[n:, b] == 0).all()


def test_turn_credit_vector():
    case = VECTORS["turn_credit_2607_13988"]
    ell = torch.tensor(case["ell"], dtype=torch.float64)[:, None]
    mask = torch.ones(3, 1, dtype=torch.bool)
    out = adv.turn_credit(
        ell,
        mask,
        torch.tensor([case["outcome_advantage"]], dtype=torch.float64),
        epsilon=case["epsilon"],
        horizon=case["K"],
        gamma=case["gamma"],
    )
    close(out[:, 0], case["A"])
    distance = -ell[:, 0] + case["epsilon"]
    potential = torch.log(distance[0] / distance)
    close(potential, case["V"])
    close(potential[1:] - potential[:-1], case["delta"])
    # local and fill are recovered from two outcomes: the local term does not depend on the outcome
    none = adv.turn_credit(ell, mask, torch.zeros(1, dtype=torch.float64))
    close(none[:, 0] / 0.2, case["local"])
    close((out - none)[:, 0] / 0.2 - 5.0, case["fill"])


def test_kl_vector_and_gradient():
    case = VECTORS["kl"]
    ref = torch.tensor(case["pi_ref"], dtype=torch.float64).log()
    logits = torch.tensor(case["pi"], dtype=torch.float64).log().requires_grad_()
    value = forward_kl(ref, torch.log_softmax(logits, -1))
    close(value.detach(), case["forward_kl_ref_pi"])
    value.backward()
    close(logits.grad, case["logit_gradient_forward"])
    close(reverse_kl(ref, torch.log_softmax(logits, -1)).detach(), case["reverse_kl_pi_ref"])


reward = st.floats(-20, 20, allow_nan=False, width=32)
episode = st.lists(reward, min_size=1, max_size=8)


@given(st.lists(episode, min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=80, deadline=None)
def test_seed_recursion_property(episodes, lam, gamma):
    r, m = padded(episodes)
    torch.testing.assert_close(adv.seed_recursion(r, m, gamma, lam), adv.return_to_go(r, m, gamma))


@given(
    st.integers(1, 7),
    st.floats(-8.5, 10),
    st.floats(0.1, 1.0),
)
@settings(max_examples=80, deadline=None)
def test_one_trajectory_normalisation_is_blind_to_the_outcome(retrievals, terminal, cost):
    """Every episode that beats -c / (1 - gamma) has first < 0 < last, won or lost."""
    rewards = [-cost] * retrievals + [terminal]
    if terminal <= -cost / (1 - GAMMA) + 1e-6:
        return
    r, m = column(rewards)
    values = adv.seed_advantage(r, m, gamma=GAMMA, lam=0.95).values[:, 0]
    assert values[0] < 0 < values[-1]
    if retrievals == 1:
        close(values, [-1.0, 1.0])


def test_one_step_constant_and_single_member():
    r, m = column([10.0])
    assert adv.seed_advantage(r, m, gamma=GAMMA, lam=0.95).values.item() == 0.0
    assert math.isnan(adv.normalise_per_trajectory(r, m, bessel=True).item())
    group = torch.zeros(1, dtype=torch.int64)
    for f in (adv.grpo_advantage, adv.rloo_advantage, adv.return_to_go_advantage):
        result = f(r, m, group, gamma=GAMMA)
        assert result.values.abs().max() == 0
        assert result.degenerate_group_fraction == 1.0
    r, m = padded([[-0.5, 10.0]] * 4 + [[-0.5, 10.0], [10.0]])
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    result = adv.trace_advantage(r, m, group, gamma=GAMMA, lam=0.95)
    assert result.values[:, :4].abs().max() == 0
    assert result.values[:, 4:].abs().max() > 0
    assert result.degenerate_group_fraction == 0.5


def test_tiny_spread_does_not_explode():
    outcome = torch.tensor([1.0, 1.0 + 2e-6, 1.0], dtype=torch.float64)
    values, _ = adv.grpo_outcome(outcome, torch.zeros(3, dtype=torch.int64))
    assert values.abs().max() < 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_reward_is_refused(bad):
    r, m = padded([[1.0, bad], [1.0, 2.0]])
    group = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="NaN"):
        adv.trace_advantage(r, m, group, gamma=GAMMA, lam=0.95)
    with pytest.raises(ValueError, match="NaN"):
        adv.seed_advantage(r, m, gamma=GAMMA, lam=0.95)


def test_mask_must_be_a_prefix():
    r = torch.zeros(2, 1)
    with pytest.raises(ValueError, match="prefix"):
        adv.check_rewards(r, torch.tensor([[False], [True]]))


def test_mixed_groups_are_refused():
    order = torch.arange(3).repeat(4, 1)
    adv.check_groups(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 7, 3, 3]), order)
    with pytest.raises(ValueError, match="mixes"):
        adv.check_groups(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 3, 3, 3]), order)
    other = order.clone()
    other[1] = torch.tensor([2, 1, 0])
    with pytest.raises(ValueError, match="mixes"):
        adv.check_groups(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 7, 3, 3]), other)


@given(st.lists(episode, min_size=2, max_size=6), st.permutations(range(6)))
@settings(max_examples=50, deadline=None)
def test_group_estimators_do_not_depend_on_the_order_of_members(episodes, permutation):
    r, m = padded(episodes)
    p = torch.tensor([i for i in permutation if i < len(episodes)])
    group = torch.zeros(len(episodes), dtype=torch.int64)
    a = adv.trace_advantage(r, m, group, gamma=GAMMA, lam=0.95).values
    b = adv.trace_advantage(r[:, p], m[:, p], group, gamma=GAMMA, lam=0.95).values
    torch.testing.assert_close(a[:, p], b, atol=1e-8, rtol=1e-6)


@given(st.lists(st.lists(st.floats(-6, 6), min_size=3, max_size=3), min_size=2, max_size=2))
@settings(max_examples=100, deadline=None)
def test_kl_is_non_negative_with_its_minimum_at_the_reference(logits):
    ref, pi = (torch.log_softmax(torch.tensor(x, dtype=torch.float64), -1) for x in logits)
    assert forward_kl(ref, pi) >= 0
    assert forward_kl(ref, ref) == 0
    assert 0 <= entropy(pi) <= math.log(3) + 1e-9
    x = ref.clone().requires_grad_()
    forward_kl(ref, torch.log_softmax(x, -1)).backward()
    torch.testing.assert_close(x.grad, torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0)
