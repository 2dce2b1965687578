"""Feature group ``R``: what two logistic regressions on all other features think, as features of the policy.

The network sees its training questions again and again and soon knows them by heart; a regression's opinion of a
question it was *not* fitted on is the same kind of number in training and in service. So training rows get theirs from
a fit without their part of the questions (stacking, Wolpert 1992, doi:10.1016/S0893-6080(05)80023-1); unseen questions
and the gate in service get it from the fit on all of them. Policy gradient then only has to find where to act on it.

The regressions are those of :class:`~rayrl.retrieval.baselines.PlannedLogistic`: is the answer in the memory, and is
this candidate the answer if none before it was.
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
from rayrl.retrieval.world import World, class_weight_per_row

GROUP = "R"
PREFIX = "regression_"
FITS = 5
"""Parts of the training questions that are left out in turn."""
_CLIP = 1e-4


@dataclass(frozen=True)
class Regressions:
    """Two linear maps to log-odds, on features as they come (not standardised); the bias is the last entry."""

    gate: Doubles
    """``[Fs + K * Fc + 1]``: the memory holds the answer."""
    slot: Doubles
    """``[Fc + Fs + K + 1]``: the candidate is the answer, given that the memory has it and no earlier one is it."""

    def opinions(self, static: NDArray[np.floating], candidate: NDArray[np.floating]) -> tuple[Floats, Floats]:
        """Log-odds for ``static [n, Fs]`` and ``candidate [n, K, Fc]``.

        Returns:
            ``[n, 1 + K]``: of the gate, and of each place in the queue; ``[n, K]``: of each candidate when it comes up.
        """
        n, k, width = candidate.shape
        gate = static @ self.gate[: static.shape[1]] + candidate.reshape(n, -1) @ self.gate[static.shape[1] : -1]
        of_static = static @ self.slot[width : width + static.shape[1]]
        of_place = self.slot[width + static.shape[1] : -1]
        hazard = candidate @ self.slot[:width] + of_static[:, None] + of_place[:k] + self.slot[-1]
        chance = 1.0 / (1.0 + np.exp(-np.clip(hazard, -30, 30)))
        earlier = np.cumprod(1.0 - chance, axis=1)
        chance[:, 1:] *= earlier[:, :-1]
        first = np.concatenate([(gate + self.gate[-1])[:, None], _log_odds(chance)], axis=1)
        limit = -np.log(_CLIP)
        return np.clip(first, -limit, limit).astype(np.float32), np.clip(hazard, -limit, limit).astype(np.float32)

    def extend(self, world: World) -> World:
        """The world with this group's columns behind the others."""
        return _with(world, *self.opinions(world.static.numpy(), world.candidate.numpy()))

    def arrays(self) -> dict[str, Doubles]:
        """For a gate's file."""
        return {"regression/gate": self.gate, "regression/slot": self.slot}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Regressions | None:
        """Of a gate's file; None where the group is off."""
        if "regression/gate" not in arrays:
            return None
        return cls(np.asarray(arrays["regression/gate"], np.float64), np.asarray(arrays["regression/slot"], np.float64))


def fit_stacked(train: World) -> tuple[World, Regressions]:
    """Training rows with the opinion of fits without them, and the fit on all rows.

    Rows of one question, and of one category where ``prior_holdout`` says so, share a part (``World.part``).
    """
    part = (train.part % FITS).numpy()
    first = np.zeros((train.rows, 1 + train.k), np.float32)
    hazard = np.zeros((train.rows, train.k), np.float32)
    whole = fit_regressions(train)
    for left_out in range(FITS):
        out = np.flatnonzero(part == left_out)
        rest = np.flatnonzero(part != left_out)
        if not len(out):
            continue
        fitted = fit_regressions(train.take(torch.from_numpy(rest))) if len(rest) else whole
        first[out], hazard[out] = fitted.opinions(train.static.numpy()[out], train.candidate.numpy()[out])
    return _with(train, first, hazard), whole


def fit_regressions(world: World) -> Regressions:
    """Both regressions on all rows, classes balanced; constants where there is only one outcome."""
    is_a = world.is_a
    found = is_a & world.right.any(1)
    if not bool(is_a.any()) or bool(is_a.all()) or not bool(found.any()) or world.k < 2:
        share = float(is_a.float().mean().clamp(0.01, 0.99))
        fs, fc = world.static.shape[1], world.candidate.shape[2]
        gate, slot = np.zeros(fs + world.k * fc + 1), np.zeros(fc + fs + world.k + 1)
        gate[-1] = np.log(share / (1 - share))
        return Regressions(gate, slot)
    logistic = PlannedLogistic().fit(world, class_weight_per_row(world, CLASS_WEIGHTS))
    return Regressions(logistic.gate_weights(), logistic.slot_weights(world))


def without_opinions(world: World) -> World:
    """The world without this group's columns (the regressions themselves are fitted on the others)."""
    static = [i for i, name in enumerate(world.static_names) if not name.startswith(PREFIX)]
    candidate = [i for i, name in enumerate(world.candidate_names) if not name.startswith(PREFIX)]
    return replace(
        world,
        static=world.static[:, static],
        candidate=world.candidate[:, :, candidate],
        static_names=tuple(world.static_names[i] for i in static),
        candidate_names=tuple(world.candidate_names[i] for i in candidate),
    )


def _with(world: World, first: Floats, hazard: Floats) -> World:
    places = tuple(f"{PREFIX}slot{i + 1}" for i in range(world.k))
    return replace(
        world,
        static=torch.cat([world.static, torch.from_numpy(first)], dim=1),
        candidate=torch.cat([world.candidate, torch.from_numpy(hazard)[:, :, None]], dim=2),
        static_names=(*world.static_names, f"{PREFIX}gate", *places),
        candidate_names=(*world.candidate_names, f"{PREFIX}hazard"),
    )


def _log_odds(p: Doubles) -> Doubles:
    p = np.clip(p, _CLIP, 1 - _CLIP)
    return np.asarray(np.log(p / (1 - p)), np.float64)
