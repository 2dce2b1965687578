"""Paired tests, multiplicity control, power: what a comparison of two runs needs.

A pair is one (split, task, sample) in both runs. Differences are b - a.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from rayrl.evaluation.statistics import (
    LEVEL,
    RESAMPLES,
    Estimate,
    FloatArray,
    group,
    is_proportion,
    mean_estimate,
    wilson,
)


@dataclass(frozen=True)
class PairedDifference:
    """Mean of b - a over pairs with its interval, and how the pairs behave.

    ``correlation`` is Pearson's between the members of the pairs (``None`` when a side is constant);
    ``discordant`` is the share of pairs that differ, with a Wilson interval, so that "no pair differs" still carries an
    upper bound.
    """

    difference: Estimate
    mean_a: float | None
    mean_b: float | None
    correlation: float | None
    discordant: tuple[float, float, float] | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def paired_difference(
    a: Sequence[float] | FloatArray,
    b: Sequence[float] | FloatArray,
    clusters: Sequence[Any] | npt.NDArray[Any],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> PairedDifference:
    """Mean paired difference with its interval.

    Assumes clusters (tasks) are independent; pairs within one may depend on each other in any way. Values that are all
    0 or 1 get :func:`paired_proportions`, since few pairs may differ and all in one direction; others get
    :func:`rayrl.evaluation.statistics.cluster_bootstrap`, applied to the differences.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape:
        raise ValueError(f"pairs must have two members, got {x.shape} and {y.shape}")
    if x.size == 0:
        return PairedDifference(mean_estimate([], [], level=level), None, None, None, None)
    if is_proportion(x) and is_proportion(y):
        found = paired_proportions(x, y, clusters, level=level)
    else:
        found = mean_estimate(y - x, clusters, level=level, resamples=resamples)
    correlation = None
    if x.size > 1 and np.ptp(x) > 0 and np.ptp(y) > 0:
        order = np.lexsort((y, x))
        correlation = float(np.corrcoef(x[order], y[order])[0, 1])
    differing = int(np.count_nonzero(x != y))
    low, high = wilson(differing, x.size, level)
    return PairedDifference(
        found, float(np.sort(x).mean()), float(np.sort(y).mean()), correlation, (differing / x.size, low, high)
    )


def paired_proportions(
    x: FloatArray, y: FloatArray, clusters: Sequence[Any] | npt.NDArray[Any], *, level: float = LEVEL
) -> Estimate:
    """Difference of two paired proportions with the adjusted Wald interval of Bonett and Price (2012).

    Adds one pair to each kind of discordance. It covers well where few pairs differ, and has width even where none
    does. With several pairs per cluster, counts are scaled to the effective number of pairs (cluster-robust over
    binomial variance, kept between the number of clusters and of pairs). One cluster has no interval.
    """
    column = group(y - x, np.asarray(clusters))
    n, g = float(x.size), column.sums.size
    mean, se = column.mean, column.robust_sem()
    if g < 2:
        return Estimate(mean, None, None, None, x.size, g, level, "none")
    won, lost = float(np.count_nonzero(y > x)), float(np.count_nonzero(y < x))
    naive = ((won + lost) / n - mean * mean) / n
    effective = n
    if g < n:
        effective = float(g) if naive <= 0 or se == 0 else min(n, max(float(g), n * naive / (se * se)))
    scale = effective / n
    p_won, p_lost = (won * scale + 1) / (effective + 2), (lost * scale + 1) / (effective + 2)
    centre = p_won - p_lost
    half = float(stats.norm.ppf(0.5 + level / 2)) * math.sqrt((p_won + p_lost - centre * centre) / (effective + 2))
    low, high = max(-1.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))
    return Estimate(mean, se, low, high, x.size, g, level, "bonett_price" if g == x.size else "bonett_price_deff")


def cluster_t_p(
    a: Sequence[float] | FloatArray, b: Sequence[float] | FloatArray, clusters: Sequence[Any] | npt.NDArray[Any]
) -> float:
    """Two-sided cluster-robust t test of a zero mean difference, with clusters - 1 degrees of freedom.

    Assumes independent clusters, enough of them for the mean of differences to be near normal. 1.0 when no pair
    differs; 1.0 with a single cluster (nothing can be said).
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    column = group(y - x, np.asarray(clusters))
    g = column.sums.size
    if g < 2:
        return 1.0
    se = column.robust_sem()
    if se == 0:
        return 1.0 if column.mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(column.mean) / se, g - 1))


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Exact two-sided McNemar test from the discordant pairs (a right and b wrong; b right and a wrong).

    Assumes independent pairs; with several samples per task it is anticonservative, so test tasks then. 1.0 when no
    pair is discordant.
    """
    n = only_a + only_b
    if n == 0:
        return 1.0
    return float(stats.binomtest(min(only_a, only_b), n, 0.5).pvalue)


def wilcoxon(differences: Sequence[float] | FloatArray) -> float:
    """Wilcoxon signed-rank test, two-sided; zero differences are dropped, ties get mean ranks.

    Assumes independent differences, symmetric about their median under the null. Give it one difference per task. 1.0
    when all are zero. Exact for up to 50 untied differences, else the normal approximation with tie correction.
    """
    d = np.asarray(differences, dtype=np.float64)
    d = d[d != 0]
    if d.size == 0:
        return 1.0
    magnitudes = np.abs(d)
    tied = np.unique(magnitudes).size < d.size
    method = "exact" if d.size <= 50 and not tied else "asymptotic"
    return float(stats.wilcoxon(np.sort(d), zero_method="wilcox", method=method).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p values: controls the family-wise error rate under any dependence."""
    p = np.asarray(p_values, dtype=np.float64)
    m = p.size
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate((m - np.arange(m)) * p[order])
    out = np.empty(m)
    out[order] = np.minimum(adjusted, 1.0)
    return [float(v) for v in out]


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """BH-adjusted p values: controls the false discovery rate for independent or positively dependent tests."""
    p = np.asarray(p_values, dtype=np.float64)
    if p.size == 0:
        return []
    return [float(v) for v in stats.false_discovery_control(p, method="bh")]


def power_paired(effect: float, sd: float, n: int, *, alpha: float = 0.05) -> float:
    """Power of the two-sided paired t test to see a mean difference ``effect``.

    ``sd`` is the standard deviation of the differences (per task), ``n`` the number of independent tasks. Assumes
    normal means; exact through the non-central t distribution for normal differences.
    """
    if n < 2 or not sd > 0:
        raise ValueError(f"power needs n >= 2 and sd > 0, got n={n}, sd={sd}")
    df = n - 1
    critical = float(stats.t.ppf(1 - alpha / 2, df))
    shift = abs(effect) / sd * math.sqrt(n)
    upper = float(stats.nct.sf(critical, df, shift))
    lower = float(stats.nct.cdf(-critical, df, shift))
    if not math.isfinite(lower):  # underflows for large shifts, where it is 0
        lower = 0.0
    if not math.isfinite(upper):
        upper = float(stats.norm.sf(critical - shift))
    return min(1.0, upper + lower)


def minimum_detectable_effect(sd: float, n: int, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest mean difference the paired t test sees with probability ``power``; see :func:`power_paired`."""
    guess = sd / math.sqrt(n) * (float(stats.t.ppf(1 - alpha / 2, n - 1)) + float(stats.norm.ppf(power)))
    high = 2 * guess
    while power_paired(high, sd, n, alpha=alpha) < power:
        high *= 2
    return float(optimize.brentq(lambda e: power_paired(e, sd, n, alpha=alpha) - power, 0.0, high, xtol=1e-10))


def required_tasks(
    effect: float, sd: float, *, alpha: float = 0.05, power: float = 0.8, limit: int = 10_000_000
) -> int:
    """Fewest tasks with which the paired t test sees ``effect`` with probability ``power``.

    Raises:
        ValueError: more than ``limit`` would be needed (or the effect is zero).
    """
    if effect == 0 or power_paired(effect, sd, limit, alpha=alpha) < power:
        raise ValueError(f"an effect of {effect} needs more than {limit} tasks")
    low, high = 2, limit
    while low < high:
        middle = (low + high) // 2
        if power_paired(effect, sd, middle, alpha=alpha) >= power:
            high = middle
        else:
            low = middle + 1
    return low
