"""Dropping chunks one by one, each drop confirmed by an evaluation. Pure: whoever calls brings the evaluation.

A model that says "this chunk adds nothing" may be wrong, and a helpful chunk is worth far more than its tokens. So the
set starts full, a chunk leaves only when the smaller set was really played, and a drop must hold against two sets: all
chunks, so that losses too small to be seen alone cannot add up over many drops; and the set before the drop, so that
what one drop gained does not pay for the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Kept = frozenset[int]
MISS = 0.025
"""Probability with which a set that loses too much may show no loss at all; the one side of a 95 % interval."""


def tasks_needed(share: float) -> int:
    """Tasks to play so that a set that loses on this share of all tasks loses on one of them, but for :data:`MISS`.

    Where no pair differs a bootstrap interval has no width, however few the tasks; this says when that means something.
    """
    return math.ceil(math.log(MISS) / math.log1p(-share))


@dataclass(frozen=True)
class SetDifference:
    """Paired difference between two sets of chunks with its interval; bounds are ``None`` where there is none."""

    mean: float
    low: float | None
    high: float | None

    def within(self, margin: float) -> bool:
        """Does the interval exclude losses larger than ``margin``? Without a bound nothing is excluded."""
        return self.low is not None and self.low >= -margin


@dataclass(frozen=True)
class Try:
    """One chunk left out: the loss that the model expected, the set without it against all chunks and against the set
    with it, and whether the drop was kept."""

    chunk: int
    expected_loss: float
    to_all: SetDifference
    to_before: SetDifference
    dropped: bool


@dataclass(frozen=True)
class Pruned:
    """The set that is left, and the tries in the order they were made."""

    kept: Kept
    tries: tuple[Try, ...]


def prune(
    chunks: int,
    expected_loss: Callable[[Kept, int], float],
    compare: Callable[[Kept, Kept], SetDifference],
    *,
    margin: float,
    tries: int | None = None,
) -> Pruned:
    """From all chunks down: try the one whose loss is expected to be least, keep the drop if it is within ``margin``.

    Args:
        chunks: how many there are.
        expected_loss: of a kept set, without this chunk of it (ties: lower index). It is asked again after each drop,
            because of two chunks that say the same the second is dear once the first is gone.
        compare: the first set minus the second; each try asks about one set not played before.
        margin: loss of reward that is tolerated.
        tries: sets played at most; ``None`` tries every chunk once.
    """
    everything: Kept = frozenset(range(chunks))
    kept = everything
    untried = set(range(chunks))
    made: list[Try] = []
    while untried and (tries is None or len(made) < tries):
        losses = {j: expected_loss(kept, j) for j in sorted(untried)}
        chunk = min(losses, key=lambda j: (losses[j], j))
        untried.discard(chunk)
        smaller = kept - {chunk}
        to_all, to_before = compare(smaller, everything), compare(smaller, kept)
        fits = to_all.within(margin) and to_before.within(margin)
        made.append(Try(chunk, losses[chunk], to_all, to_before, fits))
        if fits:
            kept = smaller
    return Pruned(kept, tuple(made))
