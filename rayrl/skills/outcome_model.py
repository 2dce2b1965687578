"""What masked rollouts say about any set of chunks on any task: a linear model with interactions and a prior.

reward = task part + sum of chunk effects + sum of pair effects + chunk effects that depend on the task's features.

Complementary pairs identify chunk effects through differences, in which task and luck cancel, and pair effects through
sums, in which they don't; so differences and sums enter with their own noise. Coefficients have normal priors around 0
whose scales say how large effects plausibly are; with few rollouts that is what keeps the model from believing noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rayrl.skills.estimators import FloatArray


@dataclass(frozen=True)
class Scales:
    """Prior deviations of the coefficients."""

    chunk: float = 0.10
    pair: float = 0.05
    by_feature: float = 0.02
    task: float = 0.5


@dataclass(frozen=True)
class Rollouts:
    """Pairs of masked rollouts. ``features`` (n, f), ``masks`` (n, 2, k), ``rewards`` (n, 2)."""

    features: FloatArray
    masks: FloatArray
    rewards: FloatArray


@dataclass(frozen=True)
class OutcomeModel:
    """Posterior mean. ``mean`` and ``scale`` standardise features; coefficients in the order of :func:`_columns`."""

    coefficients: FloatArray
    mean: FloatArray
    scale: FloatArray
    chunks: int
    noise_difference: float
    noise_sum: float

    def predict(self, features: FloatArray, masks: FloatArray) -> FloatArray:
        """Expected rewards (n,) of masks (n, k) on tasks with features (n, f)."""
        out: FloatArray = _columns(self._standard(features), masks) @ self.coefficients
        return out

    def parts(self, features: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """``(base (n,), chunk effects (n, k), pair effects (k, k) upper triangle)`` for fast evaluation of masks."""
        f = self._standard(features)
        k, width = self.chunks, f.shape[1]
        c = self.coefficients
        base = c[0] + f @ c[1 : 1 + width]
        chunk = c[1 + width : 1 + width + k]
        pairs = np.zeros((k, k))
        at = 1 + width + k
        for i, j in combinations(range(k), 2):
            pairs[i, j] = c[at]
            at += 1
        by_feature = c[at:].reshape(width, k)
        return base, chunk + f @ by_feature, pairs

    def _standard(self, features: FloatArray) -> FloatArray:
        out: FloatArray = (features - self.mean) * self.scale
        return out


def _columns(f: FloatArray, m: FloatArray) -> FloatArray:
    k = m.shape[1]
    pairs = [m[:, i] * m[:, j] for i, j in combinations(range(k), 2)]
    by_feature = (f[:, :, None] * m[:, None, :]).reshape(len(m), -1)
    parts = [np.ones((len(m), 1)), f, m, *([np.stack(pairs, axis=1)] if pairs else []), by_feature]
    return np.concatenate(parts, axis=1)


def fit_outcome_model(data: Rollouts, scales: Scales | None = None) -> OutcomeModel:
    """Posterior mean of the coefficients; noise levels are estimated in two rounds.

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
    first, second = _columns(f, data.masks[:, 0]), _columns(f, data.masks[:, 1])
    root = np.sqrt(2.0)
    x = np.concatenate([(first - second) / root, (first + second) / root])
    y = np.concatenate(
        [(data.rewards[:, 0] - data.rewards[:, 1]) / root, (data.rewards[:, 0] + data.rewards[:, 1]) / root]
    )
    width, pairs = f.shape[1], k * (k - 1) // 2
    prior = np.concatenate(
        [
            np.full(1, 1.0),
            np.full(width, scales.task),
            np.full(k, scales.chunk),
            np.full(pairs, scales.pair),
            np.full(width * k, scales.by_feature),
        ]
    )
    noise = np.array([0.3, 0.4])
    coefficients = np.zeros(x.shape[1])
    for _ in range(3):
        w = np.repeat(1 / noise**2, n)
        gram = (x * w[:, None]).T @ x + np.diag(1 / prior**2)
        coefficients = np.linalg.solve(gram, x.T @ (w * y))
        left = y - x @ coefficients
        noise = np.maximum([left[:n].std(), left[n:].std()], 1e-3)
    return OutcomeModel(coefficients, mean, scale, k, float(noise[0]), float(noise[1]))


def greedy_masks(model: OutcomeModel, features: FloatArray, costs: FloatArray, *, rounds: int = 3) -> FloatArray:
    """For every task the set that coordinate ascent finds: flip the chunk that gains most until none gains.

    ``costs`` (k,) are in units of reward. Starts from the empty and the full set and keeps the better end.
    """
    base, chunk, pairs = model.parts(features)
    both = pairs + pairs.T
    best = np.zeros_like(chunk)
    best_value = np.full(len(base), -np.inf)
    for start in (0.0, 1.0):
        mask = np.full_like(chunk, start)
        for _ in range(rounds * chunk.shape[1]):
            gain = (1 - 2 * mask) * (chunk + mask @ both - costs)
            pick = gain.argmax(axis=1)
            rows = np.flatnonzero(gain[np.arange(len(mask)), pick] > 1e-12)
            if rows.size == 0:
                break
            mask[rows, pick[rows]] = 1 - mask[rows, pick[rows]]
        value = set_values(chunk, pairs, mask, costs)
        better = value > best_value
        best[better], best_value[better] = mask[better], value[better]
    return best


def set_values(chunk: FloatArray, pairs: FloatArray, masks: FloatArray, costs: FloatArray) -> FloatArray:
    """Value of sets beyond the empty one, costs taken off; shapes (n, k), (k, k), (n, k), (k,)."""
    out: FloatArray = (masks * (chunk - costs)).sum(axis=1) + np.einsum("ni,ij,nj->n", masks, pairs, masks)
    return out
