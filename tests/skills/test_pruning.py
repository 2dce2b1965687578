from __future__ import annotations

import numpy as np
import pytest

from rayrl.evaluation.statistics import mean_estimate
from rayrl.skills.pruning import MISS, Kept, SetDifference, prune, tasks_needed

IDLE, FIRST, TWIN, SMALL, HARMFUL = range(5)
ALL = frozenset(range(5))


def reward(kept: Kept) -> float:
    """IDLE does nothing, FIRST and TWIN say the same (+.2 once), SMALL helps a little, HARMFUL harms."""
    return 0.5 + 0.2 * bool(kept & {FIRST, TWIN}) + 0.03 * (SMALL in kept) - 0.1 * (HARMFUL in kept)


class Played:
    """Rewards of every set on the same tasks: common luck cancels, ``noise`` per task and set stays."""

    def __init__(self, noise: float, tasks: int = 200, seed: int = 0) -> None:
        self._rng, self._noise, self._tasks = np.random.default_rng(seed), noise, tasks
        self._sets: dict[Kept, np.ndarray] = {}

    def __call__(self, kept: Kept, other: Kept) -> SetDifference:
        found = mean_estimate(self._rewards(kept) - self._rewards(other), range(self._tasks))
        return SetDifference(found.mean, found.low, found.high)

    def _rewards(self, kept: Kept) -> np.ndarray:
        if kept not in self._sets:
            self._sets[kept] = reward(kept) + self._noise * self._rng.normal(size=self._tasks)
        return self._sets[kept]

    @property
    def evaluations(self) -> int:
        return len(self._sets) - 1


def wrong_model(kept: Kept, chunk: int) -> float:
    """Believes that SMALL is worth nothing, and that TWIN is worth much only when FIRST is gone."""
    return {IDLE: 0.0, FIRST: -0.02, TWIN: 0.01 if FIRST in kept else 0.2, SMALL: -0.05, HARMFUL: -0.01}[chunk]


def test_a_wrong_model_drops_no_chunk_that_helps():
    compare = Played(0.02)
    found = prune(5, wrong_model, compare, margin=0.01)
    assert [t.chunk for t in found.tries] == [SMALL, FIRST, HARMFUL, IDLE, TWIN]
    assert [t.dropped for t in found.tries] == [False, True, True, True, False]
    assert found.kept == {TWIN, SMALL} and compare.evaluations == 5


def test_what_one_drop_gained_does_not_pay_for_the_next():
    def harmful_first(kept: Kept, chunk: int) -> float:
        return float(chunk != HARMFUL)

    found = prune(5, harmful_first, Played(0.02), margin=0.01)
    assert found.tries[0].chunk == HARMFUL and found.tries[0].dropped
    small = next(t for t in found.tries if t.chunk == SMALL)
    assert small.to_all.low > 0 and small.to_before.mean < -0.02 and not small.dropped


def test_losses_too_small_to_be_seen_alone_do_not_add_up():
    def compare(kept: Kept, other: Kept) -> SetDifference:
        loss = 0.004 * (len(other) - len(kept))
        return SetDifference(-loss, -loss, -loss)

    found = prune(16, lambda kept, chunk: 0.0, compare, margin=0.01)
    assert [t.dropped for t in found.tries] == [True, True] + [False] * 14
    assert found.kept == set(range(2, 16))


@pytest.mark.parametrize("tries", [0, 2])
def test_tries_are_counted_and_nothing_is_dropped_without_a_bound(tries: int):
    def unsure(kept: Kept, other: Kept) -> SetDifference:
        return SetDifference(0.0, None, None)

    found = prune(5, wrong_model, unsure, margin=0.01, tries=tries)
    assert found.kept == ALL and len(found.tries) == tries


@pytest.mark.slow
def test_the_share_of_bad_sets_that_slip_through_is_what_it_says():
    share, margin, runs = 0.02, 0.01, 4000
    n = tasks_needed(share)
    assert n == 183 and (1 - share) ** n <= MISS < (1 - share) ** (n - 1)
    rng = np.random.default_rng(0)
    slipped = 0
    for _ in range(runs):
        found = mean_estimate(-(rng.random(n) < share).astype(float), range(n))
        slipped += SetDifference(found.mean, found.low, found.high).within(margin)
    assert slipped / runs == pytest.approx(MISS, abs=0.008)
