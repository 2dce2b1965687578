"""What a learned policy has to beat: rules and regressions on exactly the features it sees.

* no retrieval, always one retrieval, the fixed threshold .40 on the best cosine (one retrieval above it)
* tuned threshold: start when the best cosine reaches a gate, go on while the next one reaches a second bar
* logistic regression for "the memory has it", with a tuned cut, or with planning by expected return
* perfect A/B gate with learned stopping: what better discrimination alone would bring

Rules give a number of retrievals per row, regressions a plan (see :mod:`rayrl.retrieval.plans`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from rayrl.retrieval.mdp import MdpConfig
from rayrl.retrieval.plans import Doubles, all_plans, counts_as_plans, expected_returns, play_plans
from rayrl.retrieval.world import World

FIXED_THRESHOLD = 0.40


def fixed_count(world: World, n: int) -> Tensor:
    """The count ``n`` on every row."""
    return torch.full((world.rows,), n)


def best_cosine(world: World) -> Tensor:
    """``[R, K]`` cosines of the queue."""
    return world.candidate[:, :, world.candidate_names.index("cosine")]


def threshold_plan(world: World, gate: float, bar: float) -> Tensor:
    """Number of retrievals: 0 under the gate, else 1 and one more while the next cosine reaches the bar; ``[R]``."""
    cosine = best_cosine(world)
    more = (cosine[:, 1:] >= bar).long().cumprod(1).sum(1)
    return torch.where(cosine[:, 0] >= gate, 1 + more, 0)


@dataclass(frozen=True)
class Threshold:
    """A tuned gate and bar on cosines."""

    gate: float
    bar: float


def tune_threshold(world: World, config: MdpConfig, weight: Tensor) -> Threshold:
    """Best gate and bar on these rows by exhaustive search over a grid; ``weight [R]`` balances the classes."""
    returns = count_table(world, config)
    best, choice = -np.inf, Threshold(FIXED_THRESHOLD, 2.0)
    quantiles = torch.linspace(0.0, 1.0, 61)
    gates = torch.quantile(best_cosine(world)[:, 0], quantiles)
    bars = [*torch.quantile(best_cosine(world)[:, 1:].reshape(-1), torch.linspace(0, 1, 31)).tolist(), 2.0]
    cosine = best_cosine(world)
    for bar in bars:
        n = 1 + (cosine[:, 1:] >= bar).long().cumprod(1).sum(1)
        started = returns.gather(1, n[:, None])[:, 0]
        gain = torch.where(cosine[None, :, 0] >= gates[:, None], started[None], returns[None, :, 0])
        total = (gain * weight[None]).sum(1)
        i = int(total.argmax())
        if float(total[i]) > best:
            best, choice = float(total[i]), Threshold(float(gates[i]), float(bar))
    return choice


def plan_table(world: World, config: MdpConfig) -> Tensor:
    """``[R, P]`` return of every plan on every row, with the labels."""
    plans = all_plans(world.k, config.actions)
    return torch.stack(
        [play_plans(world, config, torch.full((world.rows,), i), plans).returns for i in range(len(plans))], dim=1
    )


def count_table(world: World, config: MdpConfig) -> Tensor:
    """``[R, K + 1]`` return of retrieving n and keeping all of them, on every row, with the labels."""
    plans = all_plans(world.k, config.actions)
    return plan_table(world, config)[:, counts_as_plans(torch.arange(world.k + 1), plans)]


def design(world: World) -> Doubles:
    """``[R, Fs + K * Fc]``: everything the first observation holds, flattened."""
    return np.concatenate([world.static.numpy(), world.candidate.flatten(1).numpy()], axis=1).astype(np.float64)


@dataclass
class PlannedLogistic:
    """Two logistic regressions: is it in the memory, and is the next candidate the one (given the memory has it).

    The second is a hazard: fitted on the candidates up to and including the right one, it gives the probability of each
    place in the queue.
    """

    c_gate: float = 0.02
    """Inverse regularisation of the gate."""
    c_slot: float = 0.05
    """Inverse regularisation of the hazard."""

    def fit(self, world: World, weight: Tensor) -> PlannedLogistic:
        """Fit on rows with class-balancing weights ``[R]``."""
        x = design(world)
        self._scale_x = _Scale(x)
        y = world.is_a.numpy().astype(int)
        w = (weight * world.rows).numpy()
        self._gate = _fit(self.c_gate, self._scale_x(x), y, w)
        slots = self._slot_design(world)
        self._scale_s = _Scale(slots.reshape(-1, slots.shape[2]))
        right = world.right.numpy()
        before = np.cumsum(right, axis=1) - right
        use = (y[:, None] == 1) & (before == 0)
        self._hazard = _fit(self.c_slot, self._scale_s(slots[use]), right[use].astype(int))
        return self

    def gate(self, world: World) -> Doubles:
        """``[R]`` probability that the memory holds the answer."""
        return np.asarray(self._gate.predict_proba(self._scale_x(design(world)))[:, 1], np.float64)

    def slots(self, world: World) -> Doubles:
        """``[R, K]`` probability that candidate j is the answer, given that the memory has it."""
        slots = self._slot_design(world)
        flat = self._hazard.predict_proba(self._scale_s(slots.reshape(-1, slots.shape[2])))[:, 1]
        hazard = flat.reshape(slots.shape[:2])
        survive = np.cumprod(1 - hazard, axis=1)
        before = np.concatenate([np.ones((len(hazard), 1)), survive[:, :-1]], axis=1)
        return np.asarray(hazard * before, np.float64)

    def plan(self, world: World, config: MdpConfig) -> Tensor:
        """Best plan by expected return; ``[R]`` plan numbers."""
        values = expected_returns(self.gate(world), self.slots(world), config, all_plans(world.k, config.actions))
        return torch.from_numpy(values.argmax(1))

    def perfect_gate(self, world: World, config: MdpConfig) -> Tensor:
        """The plan of somebody who knows the class but not the place."""
        truth = world.is_a.numpy().astype(np.float64)
        values = expected_returns(truth, self.slots(world), config, all_plans(world.k, config.actions))
        return torch.from_numpy(values.argmax(1))

    def gate_weights(self) -> Doubles:
        """The gate as weights on :func:`design`, the bias last."""
        return _unscaled(self._gate, self._scale_x)

    def slot_weights(self, world: World) -> Doubles:
        """The hazard as weights on (candidate, static, place), the bias last; ``world`` names the features."""
        fitted = _unscaled(self._hazard, self._scale_s)
        width, k = world.candidate.shape[2], world.k
        keep = [i for i, n in enumerate(world.static_names) if not _is_embedding(n)]
        static = np.zeros(len(world.static_names))
        static[keep] = fitted[width : width + len(keep)]
        return np.concatenate([fitted[:width], static, fitted[-k - 1 :]])

    def _slot_design(self, world: World) -> Doubles:
        keep = [i for i, n in enumerate(world.static_names) if not _is_embedding(n)]
        k = world.k
        static = world.static[:, keep][:, None, :].expand(-1, k, -1)
        place = torch.eye(k)[None].expand(world.rows, -1, -1)
        return torch.cat([world.candidate, static, place], dim=2).numpy().astype(np.float64)


def tune_cut(p: NDArray[np.float64], world: World, config: MdpConfig, weight: Tensor) -> tuple[float, int]:
    """Best cut on P(A) and fixed number of retrievals above it, on these rows."""
    returns = count_table(world, config)
    probability = torch.from_numpy(p)
    cuts = torch.quantile(probability, torch.linspace(0, 1, 101, dtype=torch.float64))
    best, choice = -np.inf, (0.5, 1)
    for n in range(1, world.k + 1):
        gain = torch.where(probability[None] >= cuts[:, None], returns[None, :, n], returns[None, :, 0])
        total = (gain * weight[None]).sum(1)
        i = int(total.argmax())
        if float(total[i]) > best:
            best, choice = float(total[i]), (float(cuts[i]), n)
    return choice


def cut_plan(p: NDArray[np.float64], cut: float, n: int) -> Tensor:
    """``n`` retrievals where ``p`` reaches the cut."""
    return torch.where(torch.from_numpy(p) >= cut, n, 0)


class _Scale:
    def __init__(self, x: Doubles) -> None:
        self.mean = x.mean(0)
        std = x.std(0)
        self.scale = np.where(std > 1e-6, 1 / np.maximum(std, 1e-6), 0.0)

    def __call__(self, x: Doubles) -> Doubles:
        return np.asarray((x - self.mean) * self.scale, np.float64)


def _unscaled(model: LogisticRegression, scale: _Scale) -> Doubles:
    weight = model.coef_[0] * scale.scale
    return np.append(weight, model.intercept_[0] - weight @ scale.mean)


def _fit(c: float, x: Doubles, y: NDArray[np.int_], weight: Doubles | None = None) -> LogisticRegression:
    """A logistic regression; where there is but one outcome (an easy memory: always the first), its odds."""
    warnings.filterwarnings("ignore", message="lbfgs failed to converge", module="sklearn")
    model = LogisticRegression(C=c, max_iter=200)
    if len(np.unique(y)) > 1:
        return model.fit(x, y, sample_weight=weight)
    share = (y.sum() + 0.5) / (len(y) + 1)
    model.classes_ = np.array([0, 1])
    model.coef_, model.intercept_ = np.zeros((1, x.shape[1])), np.array([np.log(share / (1 - share))])
    model.n_features_in_ = x.shape[1]
    return model


def _is_embedding(name: str) -> bool:
    return name.startswith("e") and name[1:].isdigit()
