"""Feature group ``R``: what retrieving is expected to gain, by two regressions on all other features.

The regressions are those of :class:`~rayrl.retrieval.baselines.PlannedLogistic`: is the answer in the memory, and is
this candidate the answer if none before it was. With the prices of the decision they say what the best number of
retrievals brings over answering now. The network never sees this column. It counts when an action is chosen
(:class:`~rayrl.retrieval.policy.MeanPolicy`): a network and a regression err on different questions, so that deciding
together is worth more than either (figures in docs/training.md). The form is that of policy improvement under a KL
penalty, pi * exp(weight * advantage), with the regressions' expectation as the advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from rayrl.retrieval.baselines import PlannedLogistic
from rayrl.retrieval.index import Floats
from rayrl.retrieval.plans import Doubles
from rayrl.retrieval.pools import CLASS_WEIGHTS
from rayrl.retrieval.rewards import RewardConfig
from rayrl.retrieval.world import World, class_weight_per_row

GROUP = "R"
COLUMN = "planned_gain"


@dataclass(frozen=True)
class Regressions:
    """Two linear maps to log-odds, on features as they come (not standardised), and the prices; biases come last."""

    gate: Doubles
    """``[Fs + K * Fc + 1]``: the memory holds the answer."""
    slot: Doubles
    """``[Fc + Fs + K + 1]``: the candidate is the answer, given that the memory has it and no earlier one is it."""
    rewards: RewardConfig

    def gain(self, static: NDArray[np.floating], candidate: NDArray[np.floating]) -> Floats:
        """Expected return of the best plan that retrieves this candidate, less that of answering before it.

        Args:
            static: ``[n, Fs]``
            candidate: ``[n, K, Fc]``, in the order in which they come up.

        Returns:
            ``[n, K]``, in units of return; 2 actions, nothing is forgotten again.
        """
        n, k, width = candidate.shape
        gate = static @ self.gate[: static.shape[1]] + candidate.reshape(n, -1) @ self.gate[static.shape[1] : -1]
        inside = _chance(gate + self.gate[-1])[:, None]
        of_static = static @ self.slot[width : width + static.shape[1]]
        of_place = self.slot[width + static.shape[1] : -1]
        place = _chance(candidate @ self.slot[:width] + of_static[:, None] + of_place[:k] + self.slot[-1])
        missing = np.cumprod(1.0 - place, axis=1)
        prices = self.rewards
        hit = prices.right - (prices.right - prices.missed) * missing
        taken = prices.retrieve * np.arange(1, k + 1) + inside * hit + (1 - inside) * prices.wrong_category
        nothing = inside * prices.missed + (1 - inside) * prices.right
        best_from_here = np.maximum.accumulate(taken[:, ::-1], axis=1)[:, ::-1]
        gain = best_from_here - np.concatenate([nothing, taken[:, :-1]], axis=1)
        return np.asarray(gain, np.float32)

    def extend(self, world: World) -> World:
        """The world with this column behind the other candidate features."""
        gain = torch.from_numpy(self.gain(world.static.numpy(), world.candidate.numpy()))
        return replace(
            world,
            candidate=torch.cat([world.candidate, gain[:, :, None]], dim=2),
            candidate_names=(*world.candidate_names, COLUMN),
        )

    def arrays(self) -> dict[str, Doubles]:
        """For a gate's file; the prices stand beside it."""
        return {"regression/gate": self.gate, "regression/slot": self.slot}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]], rewards: RewardConfig) -> Regressions | None:
        """Of a gate's file; None where the group is off."""
        if "regression/gate" not in arrays:
            return None
        gate, slot = (np.asarray(arrays[f"regression/{name}"], np.float64) for name in ("gate", "slot"))
        return cls(gate, slot, rewards)


def fit_regressions(world: World, rewards: RewardConfig) -> Regressions:
    """Both regressions on all rows, classes balanced."""
    logistic = PlannedLogistic().fit(world, class_weight_per_row(world, CLASS_WEIGHTS))
    return Regressions(logistic.gate_weights(), logistic.slot_weights(world), rewards)


def without_gain(world: World) -> World:
    """The world without this group's column: what the regressions themselves are fitted on."""
    keep = [i for i, name in enumerate(world.candidate_names) if name != COLUMN]
    return replace(
        world,
        candidate=world.candidate[:, :, keep],
        candidate_names=tuple(world.candidate_names[i] for i in keep),
    )


def _chance(log_odds: Doubles) -> Doubles:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(log_odds, -30, 30))), np.float64)
