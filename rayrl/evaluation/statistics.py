"""Statistics of evaluations: each function states what it assumes.

Invariants:

* identical data give identical results: resampling draws from a generator whose seed depends only on the number of
  clusters and resamples, and data are brought into a canonical order first, so row order never matters;
* episodes of one task are not independent, so the task is the sampling unit ("cluster") of every mean and difference;
* a proportion gets a Wilson interval, which does not collapse to zero width at 0 % or 100 %.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special, stats

FloatArray = npt.NDArray[np.float64]
LEVEL = 0.95
RESAMPLES = 2000
NORMAL_FROM_CLUSTERS = 1000
"""From this many clusters on, the bootstrap equals the normal interval within its own Monte Carlo error."""
_BLOCK = 500_000
"""Picks drawn at a time: bounds the memory of a bootstrap to some 12 MB."""


@dataclass(frozen=True)
class Estimate:
    """A point estimate with its uncertainty.

    ``n`` observations in ``clusters`` sampling units; ``sem`` is the (cluster-robust) standard error; ``low`` and
    ``high`` bound the interval of confidence ``level``; ``method`` names how. Unknown numbers are ``None``.
    """

    mean: float | None
    sem: float | None
    low: float | None
    high: float | None
    n: int
    clusters: int
    level: float
    method: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def sem(values: Sequence[float] | FloatArray) -> float:
    """Standard error of the mean of independent values: sample deviation (n - 1) over root n; NaN below 2 values."""
    x = np.asarray(values, dtype=np.float64)
    return float(np.std(x, ddof=1) / math.sqrt(x.size)) if x.size > 1 else math.nan


def wilson(successes: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """Wilson score interval of a proportion, without continuity correction.

    Assumes ``n`` independent Bernoulli trials. Fractional counts are accepted, so that an effective sample size can be
    used for clustered trials. Always inside [0, 1]; at 0 or n successes it still has width.

    Raises:
        ValueError: ``n`` is not positive or ``successes`` not within 0..n.
    """
    if not n > 0 or not 0 <= successes <= n:
        raise ValueError(f"wilson needs 0 <= successes <= n and n > 0, got {successes} of {n}")
    z = float(special.ndtri(0.5 + level / 2))
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


@dataclass(frozen=True)
class Clustered:
    """Sums and counts per cluster, clusters in sorted key order: all a clustered mean needs."""

    sums: FloatArray
    counts: FloatArray

    @property
    def mean(self) -> float:
        """Ratio of totals: every observation weighs the same."""
        return float(self.sums.sum() / self.counts.sum())

    def robust_sem(self) -> float:
        """Linearised cluster-robust standard error of the mean, with the g/(g-1) correction; NaN for one cluster.

        With one observation per cluster this is exactly :func:`sem`.
        """
        g = self.sums.size
        if g < 2:
            return math.nan
        residuals = self.sums - self.mean * self.counts
        return float(math.sqrt(g / (g - 1) * float(np.sum(residuals**2))) / self.counts.sum())


def group(values: Sequence[float] | FloatArray, clusters: Sequence[Any] | npt.NDArray[Any]) -> Clustered:
    """Sum values by cluster in an order that does not depend on the order of rows."""
    x = np.asarray(values, dtype=np.float64)
    keys = np.asarray(clusters)
    if x.shape != keys.shape:
        raise ValueError(f"values {x.shape} and clusters {keys.shape} differ in shape")
    if x.size == 0:
        return Clustered(np.zeros(0), np.zeros(0))
    unique, inverse = np.unique(keys, return_inverse=True)
    order = np.lexsort((x, inverse))
    counts = np.bincount(inverse, minlength=unique.size)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    sums = np.add.reduceat(x[order], starts)
    return Clustered(sums, counts.astype(np.float64))


def _resampled_means(sums: FloatArray, counts: FloatArray, resamples: int) -> FloatArray:
    """Means of ``resamples`` draws of clusters with replacement; columns are metrics. Shape (resamples, metrics)."""
    g = sums.shape[0]
    digest = hashlib.sha256(f"cluster-bootstrap:{g}:{resamples}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    out = np.empty((resamples, sums.shape[1]))
    block = max(1, _BLOCK // g)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        picks = rng.integers(0, g, size=(rows, g))
        flat = (picks + np.arange(rows)[:, None] * g).ravel()
        weights = np.bincount(flat, minlength=rows * g).reshape(rows, g).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            out[start : start + rows] = (weights @ sums) / (weights @ counts)
    return out


def _expanded_tail(g: int, level: float) -> float:
    """Tail probability of the expanded percentile interval (Hesterberg 2015): widens by what Student's t adds."""
    t = float(stats.t.ppf(0.5 + level / 2, g - 1))
    return float(special.ndtr(-math.sqrt(g / (g - 1)) * t))


def cluster_bootstrap(
    columns: Sequence[Clustered], *, level: float = LEVEL, resamples: int = RESAMPLES
) -> list[Estimate]:
    """Estimates of the means of several metrics that share their clusters, from one set of resamples.

    Assumes clusters (tasks) are a random sample and independent of each other; nothing about what is inside one.
    Method: percentile bootstrap over clusters, tails expanded to Student's t with g - 1 degrees of freedom, which
    repairs the known too-narrow percentile interval of small samples. From ``NORMAL_FROM_CLUSTERS`` clusters on, the
    cluster-robust normal interval. One cluster has no interval. All values equal give zero width.

    Raises:
        ValueError: the columns have different numbers of clusters.
    """
    if len({c.sums.size for c in columns}) > 1:
        raise ValueError("columns must share their clusters")
    if not columns:
        return []
    g = columns[0].sums.size
    if g == 0:
        return [Estimate(None, None, None, None, 0, 0, level, "none") for _ in columns]
    totals = [int(c.counts.sum()) for c in columns]
    if g == 1:
        return [
            Estimate(c.mean if n else None, None, None, None, n, 1, level, "none")
            for c, n in zip(columns, totals, strict=True)
        ]
    if g >= NORMAL_FROM_CLUSTERS:
        z = float(special.ndtri(0.5 + level / 2))
        out = []
        for column, n in zip(columns, totals, strict=True):
            mean, se = column.mean, column.robust_sem()
            out.append(Estimate(mean, se, mean - z * se, mean + z * se, n, g, level, "cluster_robust_normal"))
        return out
    tail = _expanded_tail(g, level)
    means = _resampled_means(
        np.column_stack([c.sums for c in columns]), np.column_stack([c.counts for c in columns]), resamples
    )
    out = []
    for index, (column, n) in enumerate(zip(columns, totals, strict=True)):
        if n == 0:
            out.append(Estimate(None, None, None, None, 0, 0, level, "none"))
            continue
        draws = means[:, index]
        draws = draws[np.isfinite(draws)]
        low, high = np.quantile(draws, [tail, 1 - tail])
        held = int(np.count_nonzero(column.counts))
        out.append(
            Estimate(column.mean, column.robust_sem(), float(low), float(high), n, held, level, "cluster_bootstrap")
        )
    return out


def mean_estimate(
    values: Sequence[float] | FloatArray,
    clusters: Sequence[Any] | npt.NDArray[Any],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Mean with a cluster bootstrap interval; see :func:`cluster_bootstrap`."""
    return cluster_bootstrap([group(values, clusters)], level=level, resamples=resamples)[0]


def proportion_estimate(
    values: Sequence[float] | FloatArray, clusters: Sequence[Any] | npt.NDArray[Any], *, level: float = LEVEL
) -> Estimate:
    """Proportion of ones with a Wilson interval.

    With one observation per cluster: plain Wilson. With several, trials are not independent and n is replaced by the
    effective sample size n / design effect (cluster-robust variance over binomial variance), kept between the number of
    clusters and n; at 0 % or 100 %, where the design effect is unknowable, by the number of clusters.
    """
    column = group(values, clusters)
    g = column.sums.size
    n = int(column.counts.sum())
    if n == 0:
        return Estimate(None, None, None, None, 0, 0, level, "none")
    p = min(1.0, max(0.0, column.mean))
    se = column.robust_sem() if g > 1 else math.nan
    effective: float = n
    if g < n:
        variance = se * se if g > 1 else math.nan
        if not math.isfinite(variance) or variance == 0 or p in (0.0, 1.0):
            effective = g
        else:
            effective = min(float(n), max(float(g), p * (1 - p) / variance))
    low, high = wilson(p * effective, effective, level)
    return Estimate(p, se if math.isfinite(se) else None, low, high, n, g, level, "wilson" if g == n else "wilson_deff")


def is_proportion(values: FloatArray) -> bool:
    """Whether every value is 0 or 1 (then Wilson applies)."""
    return bool(np.all((values == 0) | (values == 1)))


def estimate(
    values: Sequence[float] | FloatArray, clusters: Sequence[Any] | npt.NDArray[Any], *, level: float = LEVEL
) -> Estimate:
    """:func:`proportion_estimate` when all values are 0 or 1, else :func:`mean_estimate`."""
    x = np.asarray(values, dtype=np.float64)
    if is_proportion(x):
        return proportion_estimate(x, clusters, level=level)
    return mean_estimate(x, clusters, level=level)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased probability that at least one of ``k`` samples is right, from ``c`` right ones among ``n`` samples.

    1 - C(n-c, k) / C(n, k) (Chen et al. 2021). Assumes the samples of a task are exchangeable.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def flake_rate(successes: Sequence[int], trials: Sequence[int], *, level: float = LEVEL) -> Estimate:
    """Probability that two samples of the same task disagree, averaged over tasks with at least two samples.

    Per task the unbiased 2c(n-c) / (n(n-1)); interval by bootstrap over tasks. Assumes exchangeable samples.
    """
    rates = [2 * c * (n - c) / (n * (n - 1)) for c, n in zip(successes, trials, strict=True) if n > 1]
    return mean_estimate(rates, list(range(len(rates))), level=level)
