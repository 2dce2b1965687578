from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm

from rayrl.errors import DataError
from rayrl.skills.estimators import (
    bootstrap_draws,
    bootstrap_interval,
    check_rank,
    cluster_moments,
    fit_cluster,
    fit_hc3,
)
from rayrl.skills.validation import correlation_interval, pair_correlation

NAMES = ["a", "b", "c", "d"]


def data(seed: int = 0, n: int = 120, tasks: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = (rng.random((n, 4)) < 0.5).astype(float)
    clusters = rng.integers(0, tasks, n)
    shared = rng.normal(size=tasks)[clusters]
    y = x @ np.array([0.3, 0.0, -0.2, 0.1]) + rng.normal(size=n) * (0.2 + x[:, 0]) + 0.3 * shared
    return x, y, clusters


def test_least_squares_and_hc3_are_those_of_statsmodels():
    x, y, _ = data()
    ours, theirs = fit_hc3(x, y, NAMES), sm.OLS(y, x).fit(cov_type="HC3")
    assert ours.beta == pytest.approx(theirs.params, abs=1e-12)
    assert ours.covariance == pytest.approx(theirs.cov_params(), abs=1e-12)
    t = sm.OLS(y, x).fit(cov_type="HC3", use_t=True)
    low, high = ours.interval(0.95)
    assert np.column_stack([low, high]) == pytest.approx(t.conf_int(), abs=1e-10)
    two_sided = 2 * np.minimum(ours.p_greater(), ours.p_less())
    assert two_sided == pytest.approx(t.pvalues, abs=1e-10)


def test_weighted_least_squares_is_that_of_statsmodels():
    x, y, _ = data(1)
    w = np.random.default_rng(2).uniform(0.2, 3, y.size)
    ours, theirs = fit_hc3(x, y, NAMES, weights=w), sm.WLS(y, x, weights=w).fit(cov_type="HC3")
    assert ours.beta == pytest.approx(theirs.params, abs=1e-12)
    assert ours.covariance == pytest.approx(theirs.cov_params(), abs=1e-12)


def test_cr1_is_the_cluster_error_of_statsmodels():
    x, y, clusters = data(3)
    ours = fit_cluster(x, y, clusters, NAMES, method="cr1")
    theirs = sm.OLS(y, x).fit(cov_type="cluster", cov_kwds={"groups": clusters})
    assert ours.covariance == pytest.approx(theirs.cov_params(), abs=1e-12)


def test_cr3_is_the_jackknife_over_clusters_and_hc3_for_clusters_of_one():
    x, y, clusters = data(4)
    full = sm.OLS(y, x).fit().params
    moved = []
    for cluster in np.unique(clusters):
        kept = clusters != cluster
        moved.append(sm.OLS(y[kept], x[kept]).fit().params - full)
    expected = np.array(moved).T @ np.array(moved)
    assert fit_cluster(x, y, clusters, NAMES).covariance == pytest.approx(expected, abs=1e-12)
    alone = fit_cluster(x, y, np.arange(y.size), NAMES)
    assert alone.covariance == pytest.approx(fit_hc3(x, y, NAMES).covariance, abs=1e-12)


def test_the_bootstrap_agrees_with_refits_by_statsmodels_and_with_cr3():
    x, y, clusters = data(5, n=400, tasks=150)
    draws = bootstrap_draws(x, y, clusters, resamples=2000)
    rng = np.random.default_rng(6)
    members = [np.flatnonzero(clusters == c) for c in np.unique(clusters)]
    slow = []
    for _ in range(400):
        rows = np.concatenate([members[i] for i in rng.integers(0, len(members), len(members))])
        slow.append(sm.OLS(y[rows], x[rows]).fit().params)
    assert draws.std(axis=0) == pytest.approx(np.std(slow, axis=0), rel=0.12)
    assert draws.std(axis=0) == pytest.approx(fit_cluster(x, y, clusters, NAMES).se, rel=0.08)
    low, high = bootstrap_interval(draws, 0.95)
    assert (low < fit_hc3(x, y, NAMES).beta).all() and (high > fit_hc3(x, y, NAMES).beta).all()
    assert np.array_equal(draws, bootstrap_draws(x, y, clusters, resamples=2000))


def test_row_order_does_not_matter():
    x, y, clusters = data(7)
    order = np.random.default_rng(8).permutation(y.size)
    a, b = fit_cluster(x, y, clusters, NAMES), fit_cluster(x[order], y[order], clusters[order], NAMES)
    assert a.covariance == pytest.approx(b.covariance, abs=1e-12)
    grams, moments = cluster_moments(x, y, clusters)
    assert grams.sum(axis=0) == pytest.approx(x.T @ x)
    assert moments.sum(axis=0) == pytest.approx(x.T @ y)


def test_a_design_that_determines_nothing_is_refused_by_name():
    x, y, _ = data(9)
    with pytest.raises(DataError, match="nothing about c"):
        check_rank(x * np.array([1, 1, 0, 1]), NAMES)
    x[:, 3] = x[:, 0] + x[:, 1]
    with pytest.raises(DataError, match=r"tell d apart from a, b, c \(rank 3 of 4"):
        check_rank(x, NAMES)
    with pytest.raises(ValueError, match="finite"):
        fit_hc3(x[:, :3], np.where(np.arange(y.size) == 3, np.nan, y), NAMES[:3])


def test_an_error_of_zero_decides_by_sign():
    x = np.eye(4).repeat(3, axis=0)
    fit = fit_hc3(x, x @ np.array([1.0, 0, -1, 2]), NAMES)
    assert fit.p_greater() == pytest.approx([0, 1, 1, 0], abs=1e-9)


def test_the_interval_of_a_correlation_is_fishers():
    assert correlation_interval(0.5, 28) == pytest.approx([0.1559, 0.7357], abs=2e-4)  # tanh(atanh(.5) -+ 1.96 / 5)
    assert correlation_interval(None, 28) is None and correlation_interval(0.5, 3) is None
    assert correlation_interval(1.0, 50)[1] <= 1
    assert pair_correlation([0.0, 0.0, 0.0], [0.0, 1.0, 0.5]) is None
