"""From rollouts to a linear model: blocks of runs that share a task, a sample and a seed, and their contrasts.

A block holds the rewards of one (task, sample) under several arms: bare (no skill), masked (a random subset), perhaps
the complement of that subset. Whatever the arms share (difficulty of the task, the luck of the common random numbers)
cancels in differences inside the block. With bare and one masked arm the contrast is the familiar
``R - B = C' beta``; with a complementary pair it is ``R - R' = (2C - 1)' beta``, whose columns are orthogonal and whose
error per rollout is far smaller: per pair of rollouts the variance of an effect is ``sigma^2 / n`` instead of
``4 k / (k + 1) * sigma^2 / n`` for k chunks.

Invariant: contrasts are orthonormal inside a block, so least squares on them is the fixed-effects estimate and every
block of the same size counts the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rayrl.skills.estimators import FloatArray

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """Rewards and masks of all blocks with the same arms.

    ``rewards`` (n, arms); ``masks`` (n, arms, k) as 0/1, all zero for a bare arm; ``tasks`` (n,); ``weights`` (n,) or
    ``None`` for equal ones.
    """

    tasks: IntArray
    rewards: FloatArray
    masks: FloatArray
    weights: FloatArray | None = None


@dataclass(frozen=True)
class Design:
    """Contrast rows of all blocks, ready for :mod:`rayrl.skills.estimators`."""

    x: FloatArray
    y: FloatArray
    tasks: IntArray
    weights: FloatArray | None


@lru_cache(maxsize=16)
def _contrasts(arms: int) -> FloatArray:
    """Orthonormal contrasts, shape (arms - 1, arms): each row compares an arm with the mean of those after it."""
    rows = np.zeros((arms - 1, arms))
    for i in range(arms - 1):
        later = arms - 1 - i
        rows[i, i], rows[i, i + 1 :] = 1.0, -1.0 / later
        rows[i] /= np.sqrt(1 + 1 / later)
    return rows


def contrast_design(groups: list[Blocks]) -> Design:
    """Stack the contrasts of groups of blocks (each group has its own arms).

    Two arms give plain differences, first minus second, so that coefficients, residuals and errors are those of
    ``R - B`` on ``C`` to the last digit.

    Raises:
        ValueError: a group has fewer than two arms.
    """
    if not groups or any(g.rewards.ndim != 2 or g.rewards.shape[1] < 2 for g in groups):
        raise ValueError("a block needs at least two arms to be compared")
    plain = all(g.rewards.shape[1] == 2 for g in groups)
    xs, ys, tasks, weights = [], [], [], []
    weighted = any(g.weights is not None for g in groups)
    for g in groups:
        matrix = np.array([[1.0, -1.0]]) if plain else _contrasts(g.rewards.shape[1])
        y = g.rewards @ matrix.T
        x = np.einsum("ca,nak->nck", matrix, g.masks)
        xs.append(x.reshape(-1, x.shape[-1]))
        ys.append(y.ravel())
        tasks.append(np.repeat(g.tasks, matrix.shape[0]))
        w = g.weights if g.weights is not None else np.ones(g.rewards.shape[0])
        weights.append(np.repeat(w, matrix.shape[0]))
    return Design(
        np.concatenate(xs),
        np.concatenate(ys),
        np.concatenate(tasks),
        np.concatenate(weights) if weighted else None,
    )
