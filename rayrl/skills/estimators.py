"""Linear estimation of chunk effects: least squares without intercept, with errors that survive what gates are like.

Rewards are skewed, mostly 0 or 1, and several rollouts share a task. So every estimate comes with

* **HC3**, right for unequal variances when each row is independent (one sample per task);
* its cluster form **CR3** (delete-one-task jackknife), equal to HC3 when every cluster is one row;
* a **cluster bootstrap** of tasks, which assumes neither normal rewards nor equal variances.

Shapes: ``x`` (n, k) design, ``y`` (n,) response, ``weights`` (n,) positive design weights, ``clusters`` (n,) labels.
All functions are pure; resampling takes its seed from the shape of the problem, so equal data give equal numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from rayrl.errors import DataError

FloatArray = npt.NDArray[np.float64]
RESAMPLES = 2000
_RANK_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Fit:
    """A least-squares fit. ``covariance`` is the robust one that ``method`` names; ``df`` its degrees of freedom."""

    names: tuple[str, ...]
    beta: FloatArray
    covariance: FloatArray
    method: str
    n: int
    clusters: int
    df: int
    residual_sd: float

    @property
    def se(self) -> FloatArray:
        """Standard errors, shape (k,)."""
        root: FloatArray = np.sqrt(np.maximum(np.diag(self.covariance), 0.0))
        return root

    def p_greater(self) -> FloatArray:
        """One-sided p values of ``beta > 0`` from Student's t; 0 or 1 where the error is exactly zero."""
        return _tail(self.beta, self.se, self.df)

    def p_less(self) -> FloatArray:
        """One-sided p values of ``beta < 0``."""
        return _tail(-self.beta, self.se, self.df)

    def interval(self, level: float) -> tuple[FloatArray, FloatArray]:
        """Two-sided t interval of confidence ``level`` for every coefficient."""
        half = float(stats.t.ppf(0.5 + level / 2, max(self.df, 1))) * self.se
        return self.beta - half, self.beta + half


def _tail(beta: FloatArray, se: FloatArray, df: int) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(se > 0, beta / np.where(se > 0, se, 1.0), np.where(beta > 0, np.inf, -np.inf))
    p: FloatArray = stats.t.sf(t, max(df, 1))
    return p


def check_rank(x: FloatArray, names: Sequence[str]) -> None:
    """Refuse a design whose coefficients are not all determined.

    Raises:
        DataError: names the columns that are empty, or a column that is a combination of earlier ones.
    """
    empty = [name for name, column in zip(names, x.T, strict=True) if not np.any(column)]
    if empty:
        raise DataError(f"the design says nothing about {', '.join(empty)}: no row has it")
    kept: list[int] = []
    for index in range(x.shape[1]):
        if np.linalg.matrix_rank(x[:, [*kept, index]], tol=_RANK_TOLERANCE * max(x.shape)) == len(kept):
            others = ", ".join(names[i] for i in kept)
            raise DataError(
                f"the design cannot tell {names[index]} apart from {others} (rank {len(kept)} of {x.shape[1]} columns, "
                f"{x.shape[0]} rows); more tasks, more repeats or another mask seed would"
            )
        kept.append(index)


def _prepare(
    x: FloatArray, y: FloatArray, weights: FloatArray | None
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    if x.ndim != 2 or y.shape != (x.shape[0],):
        raise ValueError(f"design {x.shape} and response {y.shape} do not fit")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("design and response must be finite")
    if weights is not None:
        if weights.shape != y.shape or not (np.isfinite(weights).all() and (weights > 0).all()):
            raise ValueError("weights must be positive, finite, one per row")
        root = np.sqrt(weights / weights.mean())
        x, y = x * root[:, None], y * root
    inverse = np.asarray(np.linalg.inv(x.T @ x), dtype=np.float64)
    return x, y, inverse, inverse @ (x.T @ y)


def fit_hc3(x: FloatArray, y: FloatArray, names: Sequence[str], *, weights: FloatArray | None = None) -> Fit:
    """Ordinary (or weighted) least squares with HC3 errors: residuals inflated by ``1 / (1 - leverage)``.

    Source: MacKinnon and White 1985; rows are taken as independent.
    """
    x, y, inverse, beta = _prepare(x, y, weights)
    residuals = y - x @ beta
    leverage = np.einsum("ij,jk,ik->i", x, inverse, x)
    scaled = residuals / np.maximum(1.0 - leverage, 1e-12)
    meat = (x * scaled[:, None] ** 2).T @ x
    return _fit(names, beta, inverse @ meat @ inverse, "hc3", y.size, y.size, residuals)


def fit_cluster(
    x: FloatArray,
    y: FloatArray,
    clusters: Sequence[Any] | npt.NDArray[Any],
    names: Sequence[str],
    *,
    weights: FloatArray | None = None,
    method: str = "cr3",
) -> Fit:
    """As :func:`fit_hc3` with rows of one cluster depending on each other in any way.

    ``cr3`` is the jackknife over clusters (Bell and McCaffrey 2002), slightly wide for few clusters; ``cr1`` the plain
    sandwich with the factor ``g/(g-1) * (n-1)/(n-k)``, what other packages call "cluster".
    """
    x, y, inverse, beta = _prepare(x, y, weights)
    grams, moments = cluster_moments(x, y, clusters)
    g, n, k = grams.shape[0], y.size, x.shape[1]
    residuals = y - x @ beta
    if g < 2:
        raise ValueError("one cluster has no error of its own")
    if method == "cr1":
        scores = moments - grams @ beta
        covariance = inverse @ (scores.T @ scores) @ inverse * (g / (g - 1)) * ((n - 1) / (n - k))
    elif method == "cr3":
        moved = _deleted(grams, moments) - beta
        covariance = moved.T @ moved
    else:
        raise ValueError(f"unknown cluster method {method!r}")
    return _fit(names, beta, covariance, method, n, g, residuals)


def _deleted(grams: FloatArray, moments: FloatArray) -> FloatArray:
    """Coefficients with each cluster left out in turn, shape (g, k)."""
    left, right = grams.sum(axis=0) - grams, moments.sum(axis=0) - moments
    try:
        solved: FloatArray = np.linalg.solve(left, right[..., None])[..., 0]
    except np.linalg.LinAlgError:
        raise DataError("without one of the tasks the design no longer determines every effect; add tasks") from None
    return solved


def _fit(
    names: Sequence[str],
    beta: FloatArray,
    covariance: FloatArray,
    method: str,
    n: int,
    clusters: int,
    residuals: FloatArray,
) -> Fit:
    df = clusters - len(beta) if method == "hc3" else clusters - 1
    sd = float(np.sqrt(residuals @ residuals / max(1, n - len(beta))))
    return Fit(tuple(names), beta, covariance, method, n, clusters, max(df, 1), sd)


def cluster_moments(
    x: FloatArray, y: FloatArray, clusters: Sequence[Any] | npt.NDArray[Any]
) -> tuple[FloatArray, FloatArray]:
    """Per cluster X'X, shape (g, k, k), and X'y, shape (g, k); clusters in sorted order."""
    _, inverse = np.unique(np.asarray(clusters), return_inverse=True)
    if inverse.shape != y.shape:
        raise ValueError(f"clusters {inverse.shape} and response {y.shape} differ in shape")
    order = np.argsort(inverse, kind="stable")
    starts = np.concatenate(([0], np.flatnonzero(np.diff(inverse[order])) + 1))
    xs, ys = x[order], y[order]
    grams = np.add.reduceat(xs[:, :, None] * xs[:, None, :], starts, axis=0)
    return grams, np.add.reduceat(xs * ys[:, None], starts, axis=0)


def bootstrap_draws(
    x: FloatArray,
    y: FloatArray,
    clusters: Sequence[Any] | npt.NDArray[Any],
    *,
    weights: FloatArray | None = None,
    resamples: int = RESAMPLES,
) -> FloatArray:
    """Coefficients of ``resamples`` refits on clusters drawn with replacement, shape (resamples, k).

    Draws whose design is singular are left out (only in tiny samples).
    """
    x, y, _, _ = _prepare(x, y, weights)
    grams, moments = cluster_moments(x, y, clusters)
    g, k = moments.shape
    digest = hashlib.sha256(f"gate-bootstrap:{g}:{k}:{resamples}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    counts = rng.multinomial(g, np.full(g, 1.0 / g), size=resamples).astype(np.float64)
    left = (counts @ grams.reshape(g, k * k)).reshape(resamples, k, k)
    right = counts @ moments
    usable = np.linalg.cond(left) < 1e12
    draws: FloatArray = np.linalg.solve(left[usable], right[usable][..., None])[..., 0]
    return draws


def bootstrap_interval(draws: FloatArray, level: float) -> tuple[FloatArray, FloatArray]:
    """Percentile intervals of bootstrap draws, one per column; NaN without draws."""
    if draws.shape[0] == 0:
        nothing = np.full(draws.shape[1], np.nan)
        return nothing, nothing
    tail = (1 - level) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
    return low, high
