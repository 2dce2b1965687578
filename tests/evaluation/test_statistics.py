"""Every statistic against an independent implementation, on random inputs."""

import itertools
import math

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as sm_mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.proportion import proportion_confint

from rayrl.evaluation import paired, statistics
from rayrl.evaluation.statistics import Clustered, cluster_bootstrap, estimate, group, mean_estimate, wilson

many = settings(max_examples=200, deadline=None)
values = st.lists(st.floats(-100, 100, allow_nan=False, width=32), min_size=2, max_size=40)
levels = st.sampled_from([0.8, 0.9, 0.95, 0.99])


@st.composite
def clustered(draw, min_clusters=2, max_clusters=12, low=-50.0, high=50.0):
    sizes = draw(st.lists(st.integers(1, 4), min_size=min_clusters, max_size=max_clusters))
    keys = [k for k, n in enumerate(sizes) for _ in range(n)]
    xs = draw(st.lists(st.floats(low, high, width=32), min_size=len(keys), max_size=len(keys)))
    return np.array(xs), np.array(keys)


@many
@given(values)
def test_sem_equals_scipy(xs):
    assert statistics.sem(xs) == pytest.approx(stats.sem(xs), rel=1e-9, abs=1e-12)


@many
@given(st.integers(1, 400), st.floats(0, 1), levels)
def test_wilson_equals_statsmodels(n, share, level):
    k = round(share * n)
    low, high = wilson(k, n, level)
    expected_low, expected_high = proportion_confint(k, n, alpha=1 - level, method="wilson")
    assert low == pytest.approx(expected_low, abs=1e-12)
    assert high == pytest.approx(expected_high, abs=1e-12)


@pytest.mark.parametrize("k", [0, 20])
def test_wilson_keeps_width_at_the_edges(k):
    low, high = wilson(k, 20)
    assert high - low > 0.1
    assert 0 <= low <= high <= 1


@pytest.mark.parametrize(("k", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_nonsense(k, n):
    with pytest.raises(ValueError, match="wilson needs"):
        wilson(k, n)


@many
@given(clustered())
def test_robust_sem_equals_statsmodels_cluster_covariance(data):
    xs, keys = data
    fit = sm.OLS(xs, np.ones_like(xs)).fit(cov_type="cluster", cov_kwds={"groups": keys})
    found = group(xs, keys)
    assert found.mean == pytest.approx(fit.params[0], rel=1e-9, abs=1e-9)
    assert found.robust_sem() == pytest.approx(fit.bse[0], rel=1e-6, abs=1e-9)


@many
@given(values)
def test_robust_sem_with_single_observations_is_the_ordinary_sem(xs):
    assert group(xs, range(len(xs))).robust_sem() == pytest.approx(stats.sem(xs), rel=1e-9, abs=1e-12)


@many
@given(clustered(max_clusters=8), st.integers(5, 40))
def test_resampled_means_equal_a_plain_loop(data, resamples):
    xs, keys = data
    column = group(xs, keys)
    found = statistics._resampled_means(column.sums[:, None], column.counts[:, None], resamples)[:, 0]
    members = [xs[keys == k] for k in np.unique(keys)]
    digest = statistics.hashlib.sha256(f"cluster-bootstrap:{len(members)}:{resamples}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    picks = rng.integers(0, len(members), size=(resamples, len(members)))
    slow = [np.concatenate([members[i] for i in row]).mean() for row in picks]
    assert found == pytest.approx(slow, rel=1e-9, abs=1e-9)


def test_bootstrap_distribution_equals_full_enumeration():
    xs, keys = np.array([0.0, 1.0, 5.0, 2.0, 2.5, 9.0, 4.0]), np.array([0, 0, 1, 2, 2, 2, 3])
    column = group(xs, keys)
    draws = statistics._resampled_means(column.sums[:, None], column.counts[:, None], 40_000)[:, 0]
    members = [xs[keys == k] for k in range(4)]
    every = np.array([np.concatenate([members[i] for i in c]).mean() for c in itertools.product(range(4), repeat=4)])
    assert draws.mean() == pytest.approx(every.mean(), abs=0.03)
    assert draws.std() == pytest.approx(every.std(), rel=0.03)
    for q in (0.1, 0.5, 0.9):
        assert np.quantile(draws, q) == pytest.approx(np.quantile(every, q), abs=0.2)


def test_large_numbers_of_clusters_take_the_normal_interval_and_it_agrees_with_the_bootstrap(monkeypatch):
    rng = np.random.default_rng(1)
    xs = rng.gamma(2.0, size=1000)
    normal = mean_estimate(xs, np.arange(1000))
    assert normal.method == "cluster_robust_normal"
    monkeypatch.setattr(statistics, "NORMAL_FROM_CLUSTERS", 10**9)
    boot = mean_estimate(xs, np.arange(1000), resamples=20_000)
    assert boot.method == "cluster_bootstrap"
    assert boot.low == pytest.approx(normal.low, abs=0.15 * normal.sem)
    assert boot.high == pytest.approx(normal.high, abs=0.15 * normal.sem)


@many
@given(clustered(), st.randoms(use_true_random=False))
def test_identical_data_give_identical_intervals_in_any_order(data, random):
    xs, keys = data
    order = list(range(xs.size))
    random.shuffle(order)
    assert estimate(xs, keys) == estimate(xs[order], keys[order])


@many
@given(clustered(low=0.0, high=1.0))
def test_intervals_hold_the_mean_and_stay_in_the_range_of_the_data(data):
    xs, keys = data
    found = mean_estimate(xs, keys)
    assert xs.min() - 1e-9 <= found.low <= found.high <= xs.max() + 1e-9
    assert found.low <= found.mean + 1e-9
    assert found.high >= found.mean - 1e-9


def test_one_cluster_has_no_interval_and_nothing_has_no_mean():
    one = mean_estimate([1.0, 2.0], [7, 7])
    assert (one.mean, one.low, one.high, one.clusters) == (1.5, None, None, 1)
    assert mean_estimate([], []).mean is None


def test_proportions_of_several_samples_use_the_number_of_tasks_at_the_edges():
    ones = estimate([1.0] * 40, np.repeat(np.arange(10), 4))
    assert ones.method == "wilson_deff"
    assert (ones.low, ones.high) == wilson(10, 10)


def test_proportion_with_fully_dependent_samples_is_as_wide_as_one_sample_per_task():
    once = estimate([0.0, 1.0] * 20, np.arange(40))
    thrice = estimate(np.repeat([0.0, 1.0] * 20, 3), np.repeat(np.arange(40), 3))
    assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high), abs=0.01)


def test_columns_must_share_clusters():
    a = Clustered(np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match="share"):
        cluster_bootstrap([a, Clustered(np.ones(2), np.ones(2))])


@many
@given(st.data())
def test_pass_at_k_equals_enumeration(data):
    n = data.draw(st.integers(1, 9))
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    outcomes = [1] * c + [0] * (n - c)
    picks = list(itertools.combinations(outcomes, k))
    assert statistics.pass_at_k(n, c, k) == pytest.approx(sum(any(p) for p in picks) / len(picks), abs=1e-12)


@many
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8))
def test_flake_rate_equals_enumeration_of_pairs(tasks):
    found = statistics.flake_rate([sum(t) for t in tasks], [len(t) for t in tasks])
    rates = []
    for t in tasks:
        pairs = list(itertools.combinations(t, 2))
        if pairs:
            rates.append(sum(a != b for a, b in pairs) / len(pairs))
    if rates:
        assert found.mean == pytest.approx(np.mean(rates), abs=1e-12)
    else:
        assert found.mean is None


@many
@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_equals_statsmodels(only_a, only_b):
    expected = sm_mcnemar([[5, only_a], [only_b, 7]], exact=True).pvalue if only_a + only_b else 1.0
    assert paired.mcnemar_exact(only_a, only_b) == pytest.approx(min(1.0, expected), abs=1e-12)


@many
@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=9, unique_by=abs))
def test_wilcoxon_equals_enumeration_of_signs(numbers):
    d = np.array([x for x in numbers if x != 0], dtype=float)
    if d.size == 0:
        assert paired.wilcoxon(numbers) == 1.0
        return
    ranks = stats.rankdata(np.abs(d))
    observed = min(ranks[d > 0].sum(), ranks[d < 0].sum())
    sums = [ranks[np.array(signs)].sum() for signs in itertools.product([True, False], repeat=d.size)]
    p = min(1.0, 2 * np.mean(np.array(sums) <= observed))
    assert paired.wilcoxon(numbers) == pytest.approx(p, abs=1e-12)


@many
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=80))
def test_wilcoxon_with_ties_equals_the_corrected_normal_approximation(numbers):
    d = np.array([x for x in numbers if x != 0], dtype=float)
    if d.size == 0 or np.unique(np.abs(d)).size == d.size:
        return
    ranks, n = stats.rankdata(np.abs(d)), d.size
    _, ties = np.unique(np.abs(d), return_counts=True)
    variance = n * (n + 1) * (2 * n + 1) / 24 - (ties**3 - ties).sum() / 48
    z = (ranks[d > 0].sum() - n * (n + 1) / 4) / math.sqrt(variance)
    assert paired.wilcoxon(numbers) == pytest.approx(2 * stats.norm.sf(abs(z)), abs=1e-9)


p_values = st.lists(st.floats(0, 1), min_size=1, max_size=30)


@many
@given(p_values)
def test_holm_equals_its_definition(ps):
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    expected = [0.0] * len(ps)
    for rank, i in enumerate(order):
        steps = [(len(ps) - k) * ps[j] for k, j in enumerate(order[: rank + 1])]
        expected[i] = min(1.0, max(steps))
    assert paired.holm(ps) == pytest.approx(expected, abs=1e-12)


def test_holm_equals_statsmodels():  # a few inputs: its implementation takes 0.15 s a call
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 30):
        ps = rng.uniform(size=n) ** 2
        assert paired.holm(ps) == pytest.approx(multipletests(ps, method="holm")[1], abs=1e-12)


@many
@given(p_values)
def test_benjamini_hochberg_equals_statsmodels(ps):
    assert paired.benjamini_hochberg(ps) == pytest.approx(multipletests(ps, method="fdr_bh")[1], abs=1e-12)


@many
@given(st.floats(0.01, 2), st.integers(3, 300), st.sampled_from([0.01, 0.05, 0.1]))
def test_power_equals_statsmodels(effect, n, alpha):
    expected = TTestPower().power(effect, n, alpha, alternative="two-sided")
    if np.isnan(expected):  # its lower tail underflows where it is 0
        expected = TTestPower().power(effect, n, alpha / 2, alternative="larger")
    assert paired.power_paired(effect * 3.0, 3.0, n, alpha=alpha) == pytest.approx(expected, abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(st.integers(4, 400), st.floats(0.1, 5), st.sampled_from([0.7, 0.8, 0.9]))
def test_minimum_detectable_effect_has_the_power_asked_for(n, sd, power):
    found = paired.minimum_detectable_effect(sd, n, power=power)
    assert TTestPower().power(found / sd, n, 0.05, alternative="two-sided") == pytest.approx(power, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 1.5))
def test_required_tasks_is_the_fewest(effect):
    n = paired.required_tasks(effect, 1.0)
    assert paired.power_paired(effect, 1.0, n) >= 0.8
    assert n == 2 or paired.power_paired(effect, 1.0, n - 1) < 0.8


def test_required_tasks_refuses_the_impossible():
    with pytest.raises(ValueError, match="more than"):
        paired.required_tasks(0.0, 1.0)


@many
@given(clustered(min_clusters=3), st.randoms(use_true_random=False))
def test_paired_differences_equal_their_parts(data, random):
    xs, keys = data
    ys = xs[::-1] + np.array([random.uniform(2, 3) for _ in xs])
    found = paired.paired_difference(xs, ys, keys)
    assert found.difference == mean_estimate(ys - xs, keys)
    assert found.mean_a == pytest.approx(xs.mean(), abs=1e-6)
    if np.ptp(xs) > 1e-3 and np.ptp(ys) > 1e-3:
        assert found.correlation == pytest.approx(stats.pearsonr(xs, ys)[0], abs=1e-6)
    back = paired.paired_difference(ys, xs, keys).difference
    assert back.mean == pytest.approx(-found.difference.mean, abs=1e-9)


@many
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60))
def test_paired_proportions_equal_the_published_formula(pairs):
    a, b = np.array(pairs, dtype=float).T
    found = paired.paired_difference(a, b, np.arange(a.size)).difference
    n, n12, n21 = a.size, sum(p == (True, False) for p in pairs), sum(p == (False, True) for p in pairs)
    p12, p21 = (n12 + 1) / (n + 2), (n21 + 1) / (n + 2)
    half = 1.959963984540054 * math.sqrt((p12 + p21 - (p21 - p12) ** 2) / (n + 2))
    assert found.mean == pytest.approx((n21 - n12) / n)
    assert found.low == pytest.approx(max(-1, min(found.mean, p21 - p12 - half)))
    assert found.high == pytest.approx(min(1, max(found.mean, p21 - p12 + half)))
    assert found.low < found.high
    twice = paired.paired_difference(np.repeat(a, 2), np.repeat(b, 2), np.repeat(np.arange(a.size), 2)).difference
    assert (twice.low, twice.high) == pytest.approx((found.low, found.high), abs=0.03)


@many
@given(values)
def test_cluster_t_equals_scipy_with_one_pair_per_task(xs):
    d = np.array(xs)
    if np.std(d) < 1e-6:
        return
    expected = stats.ttest_1samp(d, 0.0).pvalue
    assert paired.cluster_t_p(np.zeros_like(d), d, np.arange(d.size)) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_no_differing_pair_still_has_an_upper_bound():
    same = np.array([0.0, 1.0, 1.0, 0.0])
    found = paired.paired_difference(same, same, np.arange(4))
    assert found.difference.low == -found.difference.high < 0
    share, low, high = found.discordant
    assert (share, low) == (0.0, 0.0)
    assert high > 0.4
    assert paired.cluster_t_p(same, same, np.arange(4)) == 1.0
