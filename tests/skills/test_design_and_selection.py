from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.evaluation.paired import benjamini_hochberg
from rayrl.skills.design import Blocks, contrast_design
from rayrl.skills.estimators import Fit, fit_cluster, fit_hc3
from rayrl.skills.selection import (
    adjusted_interval,
    decided_effects,
    family_winners,
    lower_bound,
    minimum_detectable,
    planned_se,
    positive_top_k,
    power_of_effect,
    rank_correlation,
)


def fit_of(beta, se, names=None):
    beta = np.asarray(beta, float)
    names = names or [f"s{i}" for i in range(beta.size)]
    return Fit(tuple(names), beta, np.diag(np.square(np.asarray(se, float))), "cr3", 400, 400, 399, 0.4)


def masks(n=200, k=5, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.random((n, k)) < 0.5).astype(float), rng


def test_bare_pairs_are_plain_differences():
    m, rng = masks()
    bare, masked = rng.random(200), rng.random(200)
    arms = np.stack([m, np.zeros_like(m)], axis=1)
    design = contrast_design([Blocks(np.arange(200), np.stack([masked, bare], axis=1), arms)])
    names = [str(i) for i in range(5)]
    ours = fit_hc3(design.x, design.y, names)
    theirs = fit_hc3(m, masked - bare, names)
    assert ours.beta == pytest.approx(theirs.beta, abs=1e-14)
    assert ours.se == pytest.approx(theirs.se, abs=1e-14)


def test_contrasts_are_the_fixed_effects_estimate():
    m, rng = masks()
    arms = np.stack([m, 1 - m, np.zeros_like(m)], axis=1)
    beta = np.array([0.1, 0, -0.05, 0.2, 0])
    rewards = rng.normal(size=(200, 1)) + arms @ beta + 0.1 * rng.normal(size=(200, 3))
    design = contrast_design([Blocks(np.arange(200), rewards, arms)])
    dummies = np.kron(np.eye(200), np.ones((3, 1)))
    full = np.concatenate([arms.reshape(-1, 5), dummies], axis=1)
    expected = np.linalg.lstsq(full, rewards.ravel(), rcond=None)[0][:5]
    assert fit_cluster(design.x, design.y, design.tasks, list("abcde")).beta == pytest.approx(expected, abs=1e-10)


def test_complement_pairs_have_the_planned_error_and_bare_pairs_theirs():
    rng = np.random.default_rng(3)
    n, k, sd = 4000, 16, 0.5
    m = (rng.random((n, k)) < 0.5).astype(float)
    noise = rng.normal(size=n) * sd
    for x, design in ((2 * m - 1, "complement"), (m, "independent")):
        se = fit_hc3(x, noise, [str(i) for i in range(k)]).se.mean()
        assert se == pytest.approx(
            planned_se(tasks=n, repeats=1, chunks=k, inclusion=0.5, sd=sd, design=design), rel=0.03
        )


def test_one_arm_is_nothing_to_compare():
    with pytest.raises(ValueError, match="two arms"):
        contrast_design([Blocks(np.arange(3), np.zeros((3, 1)), np.zeros((3, 1, 2)))])


def test_lower_bound_selects_what_benjamini_hochberg_rejects_above_zero():
    fit = fit_of([0.08, 0.06, 0.03, 0.0, -0.08], [0.02] * 5)
    adjusted = benjamini_hochberg(list(fit.p_greater()))
    found = lower_bound(fit, q=0.05)
    assert [v.status for v in found] == ["selected", "selected", "undecided", "undecided", "harmful"]
    assert [v.adjusted_p for v in found] == pytest.approx(adjusted)
    assert [v.rank for v in found] == [1, 2, 3, 4, 5]


def test_undecided_chunks_share_one_rank():
    statuses = ["selected", "undecided", "harmful", "undecided", "family_loser"]
    first = decided_effects(np.array([0.1, 0.01, -0.1, -0.02, 0.05]), statuses)
    again = decided_effects(np.array([0.1, -0.02, -0.1, 0.01, 0.05]), statuses)
    assert list(first) == [0.1, 0.0, -0.1, 0.0, 0.05] and rank_correlation(first, again) == pytest.approx(1)


def test_the_adjusted_interval_of_a_selected_chunk_lies_above_zero():
    rng = np.random.default_rng(1)
    for _ in range(50):
        fit = fit_of(rng.normal(0.03, 0.05, 8), rng.uniform(0.01, 0.04, 8))
        found = lower_bound(fit, q=0.05)
        chosen = [i for i, v in enumerate(found) if v.status == "selected"]
        low, _ = adjusted_interval(fit, len(chosen), q=0.05)
        assert all(low[i] > 0 for i in chosen)


def test_budget_keeps_the_largest_and_families_send_one():
    fit = fit_of([0.08, 0.09, 0.07, 0.10], [0.01] * 4, ["a", "a2", "b", "c"])
    families = {"a": "a", "a2": "a"}
    assert family_winners(fit.names, fit.beta, families) == {"a2", "b", "c"}
    status = {v.name: v.status for v in lower_bound(fit, budget=2, families=families)}
    assert status == {"a": "family_loser", "a2": "selected", "b": "beyond_budget", "c": "selected"}
    top = {v.name: v.status for v in positive_top_k(fit, budget=2, families=families)}
    assert top == status


def test_positive_top_k_does_not_ask_about_chance():
    fit = fit_of([0.001, -0.001, 0.002], [1.0] * 3)
    assert [v.status for v in positive_top_k(fit, budget=None)] == ["selected", "undecided", "selected"]
    assert all(v.status == "undecided" for v in lower_bound(fit))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-0.2, 0.2), min_size=2, max_size=16),
    st.integers(1, 5),
)
def test_selection_rules_keep_their_word(beta, budget):
    fit = fit_of(beta, [0.02] * len(beta))
    for found in (lower_bound(fit, budget=budget), positive_top_k(fit, budget=budget)):
        chosen = [v for v in found if v.status == "selected"]
        assert len(chosen) <= budget
        assert all(fit.beta[fit.names.index(v.name)] > 0 for v in chosen)
        assert sorted(v.rank for v in found) == list(range(1, len(beta) + 1))


def test_the_minimum_detectable_effect_has_the_power_it_promises():
    effect = minimum_detectable(0.02, 399, 16)
    assert power_of_effect(effect, 0.02, 399, alpha=0.05 / 16) == pytest.approx(0.8, abs=1e-6)
    assert minimum_detectable(0.01, 399, 16) == pytest.approx(effect / 2, rel=1e-6)
    rng = np.random.default_rng(0)
    found = rng.standard_t(399, 20000) * 0.02 + effect
    critical = 0.02 * 2.7475  # t quantile of 1 - .05/16 with 399 degrees of freedom
    assert (found > critical).mean() == pytest.approx(0.8, abs=0.02)
