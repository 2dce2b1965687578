"""What masked rollouts say about any set of chunks on any task: a linear model with interactions and a prior.

reward = task part + sum of chunk effects + sum of pair effects + chunk effects that depend on the task's features.

Complementary pairs identify chunk effects through differences, in which task and luck cancel, and pair effects through
sums, in which they don't; so differences and sums enter with their own noise. Coefficients have normal priors around 0
whose scales say how large effects plausibly are; with few rollouts that is what keeps the model from believing noise.

Whoever optimises over sets meets the luckiest coefficients. So only what the rollouts support is used: pair effects
that pass Benjamini-Hochberg (a few among many), and chunks whose average effect is above 0 under the same control.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy import stats

from rayrl.evaluation.paired import benjamini_hochberg
from rayrl.skills.estimators import FloatArray


@dataclass(frozen=True)
class Scales:
    """Prior deviations of the coefficients."""

    chunk: float = 0.20
    pair: float = 0.20
    by_feature: float = 0.01
    task: float = 0.5


@dataclass(frozen=True)
class Rollouts:
    """Pairs of masked rollouts. ``features`` (n, f), ``masks`` (n, 2, k), ``rewards`` (n, 2)."""

    features: FloatArray
    masks: FloatArray
    rewards: FloatArray


@dataclass(frozen=True)
class OutcomeModel:
    """Posterior mean. ``mean`` and ``scale`` standardise features; coefficients in the order of :func:`_columns`.

    ``pairs`` are the pair effects that were kept; ``supported`` (k,) says which chunks are worth considering.
    """

    coefficients: FloatArray
    mean: FloatArray
    scale: FloatArray
    chunks: int
    pairs: tuple[tuple[int, int], ...]
    supported: npt.NDArray[np.bool_]
    average_effects: FloatArray
    noise_difference: float
    noise_sum: float

    def predict(self, features: FloatArray, masks: FloatArray) -> FloatArray:
        """Expected rewards (n,) of masks (n, k) on tasks with features (n, f)."""
        out: FloatArray = _columns(self._standard(features), masks, self.pairs) @ self.coefficients
        return out

    def set_values(self, features: FloatArray, masks: FloatArray, costs: FloatArray) -> FloatArray:
        """Value (n,) of sets beyond the empty one, prices (k,) taken off; unsupported chunks cost a whole reward."""
        f = self._standard(features)
        start = 1 + f.shape[1]
        x = _columns(f, masks, self.pairs)[:, start:]
        value: FloatArray = x @ self.coefficients[start:] - masks @ np.where(self.supported, costs, 1.0)
        return value

    def expected_loss(self, features: FloatArray, kept: FloatArray, chunk: int) -> float:
        """Reward that a set ``kept`` (k,) loses without one of its chunks, mean over tasks with features (n, f)."""
        masks = np.tile(kept, (len(features), 1))
        less = masks.copy()
        less[:, chunk] = 0.0
        return float((self.predict(features, masks) - self.predict(features, less)).mean())

    def _standard(self, features: FloatArray) -> FloatArray:
        out: FloatArray = (features - self.mean) * self.scale
        return out


def _columns(f: FloatArray, m: FloatArray, pairs: Sequence[tuple[int, int]]) -> FloatArray:
    """Intercept, features, chunks, the given pairs, chunk by feature."""
    both = [m[:, i] * m[:, j] for i, j in pairs]
    by_feature = (f[:, :, None] * m[:, None, :]).reshape(len(m), -1)
    parts = [np.ones((len(m), 1)), f, m, *([np.stack(both, axis=1)] if both else []), by_feature]
    return np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class _Posterior:
    mean: FloatArray
    covariance: FloatArray
    noise: FloatArray


def fit_outcome_model(
    data: Rollouts, scales: Scales | None = None, *, q_chunk: float = 0.05, q_pair: float = 0.2
) -> OutcomeModel:
    """Fit with all pairs, keep those that pass, fit again; see the module docstring.

    Raises:
        ValueError: shapes do not fit, or there are no rollouts.
    """
    scales = scales or Scales()
    n, arms, k = data.masks.shape
    if n == 0 or arms != 2 or data.rewards.shape != (n, 2) or data.features.shape[0] != n:
        raise ValueError(f"rollouts of shapes {data.features.shape}, {data.masks.shape}, {data.rewards.shape}")
    mean, std = data.features.mean(axis=0), data.features.std(axis=0)
    scale = np.where(std > 1e-9, 1 / np.maximum(std, 1e-9), 0.0)
    f = (data.features - mean) * scale
    start = 1 + f.shape[1]
    every = tuple(combinations(range(k), 2))
    full = _posterior(f, data, every, scales)
    spread = np.sqrt(np.diag(full.covariance))
    z = np.abs(full.mean / spread)[start + k : start + k + len(every)]
    passing = benjamini_hochberg([float(p) for p in 2 * stats.norm.sf(z)])
    kept = tuple(pair for pair, p in zip(every, passing, strict=True) if p <= q_pair)
    found = _posterior(f, data, kept, scales)
    # average over random subsets of the others: the chunk itself and half of each of its pairs
    average = np.zeros((k, len(found.mean)))
    average[:, start : start + k] = np.eye(k)
    for at, (i, j) in enumerate(kept):
        average[[i, j], start + k + at] = 0.5
    effects = average @ found.mean
    errors = np.sqrt(np.einsum("ij,jk,ik->i", average, found.covariance, average))
    supported = np.array(benjamini_hochberg([float(p) for p in stats.norm.sf(effects / errors)])) <= q_chunk
    return OutcomeModel(
        found.mean, mean, scale, k, kept, supported, effects, float(found.noise[0]), float(found.noise[1])
    )


def _posterior(f: FloatArray, data: Rollouts, pairs: Sequence[tuple[int, int]], scales: Scales) -> _Posterior:
    """Normal posterior on differences and sums of pairs; noise levels are estimated in three rounds."""
    n, _, k = data.masks.shape
    first, second = _columns(f, data.masks[:, 0], pairs), _columns(f, data.masks[:, 1], pairs)
    a, b = data.rewards[:, 0], data.rewards[:, 1]
    root = np.sqrt(2.0)
    x = np.concatenate([(first - second) / root, (first + second) / root])
    y = np.concatenate([(a - b) / root, (a + b) / root])
    width = f.shape[1]
    prior = np.concatenate(
        [
            np.full(1, 1.0),
            np.full(width, scales.task),
            np.full(k, scales.chunk),
            np.full(len(pairs), scales.pair),
            np.full(width * k, scales.by_feature),
        ]
    )
    noise, mean, covariance = np.array([0.3, 0.4]), np.zeros(x.shape[1]), np.eye(x.shape[1])
    for _ in range(3):
        w = np.repeat(1 / noise**2, n)
        covariance = np.linalg.inv((x * w[:, None]).T @ x + np.diag(1 / prior**2))
        mean = covariance @ (x.T @ (w * y))
        left = y - x @ mean
        noise = np.maximum([left[:n].std(), left[n:].std()], 1e-3)
    return _Posterior(mean, covariance, noise)


def greedy_masks(model: OutcomeModel, features: FloatArray, costs: FloatArray) -> FloatArray:
    """For every task the set that coordinate ascent from the empty set finds: flip the chunk that gains most until
    none gains. ``costs`` (k,) are in units of reward. Tasks with equal features are worked out once."""
    unique, inverse = np.unique(features, axis=0, return_inverse=True)
    k = model.chunks
    mask = np.zeros((len(unique), k))
    value = np.zeros(len(unique))
    for _ in range(4 * k):
        best, pick = np.full(len(unique), -np.inf), np.zeros(len(unique), dtype=np.int64)
        for j in range(k):
            flipped = mask.copy()
            flipped[:, j] = 1 - flipped[:, j]
            found = model.set_values(unique, flipped, costs)
            better = found > best
            best[better], pick[better] = found[better], j
        rows = np.flatnonzero(best > value + 1e-9)
        if rows.size == 0:
            break
        mask[rows, pick[rows]] = 1 - mask[rows, pick[rows]]
        value[rows] = best[rows]
    out: FloatArray = mask[inverse.ravel()]
    return out
