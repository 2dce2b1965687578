"""Do nominal 95 % intervals cover 95 %? Simulated with clustered samples; the fast test is the slow one in small."""

import numpy as np
import pytest
from scipy import stats

from rayrl.evaluation.paired import paired_difference
from rayrl.evaluation.statistics import mean_estimate, wilson


def cover_mean(repeats, tasks, samples, rng):
    """Share of intervals that hold the true mean; task effects and noise of equal size."""
    hits = 0
    keys = np.repeat(np.arange(tasks), samples)
    for _ in range(repeats):
        x = np.repeat(rng.normal(size=tasks), samples) + rng.normal(size=tasks * samples)
        found = mean_estimate(x, keys)
        hits += found.low <= 0 <= found.high
    return hits / repeats


def cover_paired(repeats, tasks, samples, rng):
    """Binary outcomes of two policies on common tasks; the true difference is known from the task probabilities."""
    base, better = stats.norm.cdf(-0.3 / np.sqrt(2)), stats.norm.cdf(0.1 / np.sqrt(2))
    hits = 0
    keys = np.repeat(np.arange(tasks), samples)
    for _ in range(repeats):
        skill = np.repeat(rng.normal(size=tasks), samples)
        luck = rng.normal(size=tasks * samples)
        a, b = (skill + luck < -0.3).astype(float), (skill + luck < 0.1).astype(float)
        found = paired_difference(a, b, keys).difference
        hits += found.low <= better - base <= found.high
    return hits / repeats


def wilson_coverage(n, level=0.95):
    """Exact coverage over a grid of p: the binomial probability of the counts whose interval holds p."""
    bounds = np.array([wilson(k, n, level) for k in range(n + 1)])
    grid = np.linspace(0.01, 0.99, 197)
    out = []
    for p in grid:
        held = (bounds[:, 0] <= p) & (p <= bounds[:, 1])
        out.append(stats.binom.pmf(np.arange(n + 1), n, p)[held].sum())
    return np.array(out)


def test_wilson_covers_on_average():
    for n in (10, 30, 100, 400):
        coverage = wilson_coverage(n)
        assert coverage.mean() >= 0.94, (n, coverage.mean())
        assert coverage.min() > 0.82, (n, coverage.min())


def test_means_and_differences_cover_roughly():
    rng = np.random.default_rng(5)
    # 250 repeats: three standard errors are 0.041
    assert cover_mean(250, 30, 3, rng) == pytest.approx(0.95, abs=0.041)
    assert cover_paired(250, 60, 2, rng) == pytest.approx(0.95, abs=0.041)


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "samples"), [(20, 4), (50, 1), (100, 2), (400, 1)])
def test_means_and_differences_cover_93_to_97_percent(tasks, samples):
    rng = np.random.default_rng(11)
    assert 0.93 <= cover_mean(1500, tasks, samples, rng) <= 0.97
    assert 0.93 <= cover_paired(1500, tasks, samples, rng) <= 0.97
