"""Scoring finished episodes: returns by class, balanced returns, rates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayrl.retrieval.mdp import Outcome
from rayrl.retrieval.pools import CLASS_WEIGHTS, Kind
from rayrl.schemas import Frozen

NAMES = {Kind.A: "a", Kind.NEAR_B: "near_b", Kind.FAR_B: "far_b"}


class Score(Frozen):
    """One method on one set of rows. ``None`` where a class is absent."""

    balanced: float | None
    """Half A, a quarter near B, a quarter far B (absent B classes give their share to the other)."""
    hard: float | None
    """Half A, half near B."""
    return_a: float | None
    return_near_b: float | None
    return_far_b: float | None
    retrieval_rate_a: float | None
    retrieval_rate_near_b: float | None
    retrieval_rate_far_b: float | None
    hit_rate: float | None
    """A: share that holds all answers at the end."""
    clean_rate: float | None
    """A: share that holds the answers and nothing else."""
    right_rate: float | None
    """Share of right decisions over all rows."""
    steps: float
    forget_rate: float | None
    """Share with at least one forget among episodes that retrieved a distractor."""
    blocked: int
    """Episodes the guard stopped."""
    n: int


def balanced_return(returns: Tensor, kind: Tensor) -> float | None:
    """Returns ``[B]`` of rows with classes ``kind [B]``, weighted as :attr:`Score.balanced` says."""
    return _balanced({k: _mean(returns, kind == int(k)) for k in Kind})


def _balanced(returns: dict[Kind, float | None]) -> float | None:
    a, near, far = returns[Kind.A], returns[Kind.NEAR_B], returns[Kind.FAR_B]
    near_or_far, far_or_near = (near if near is not None else far), (far if far is not None else near)
    if a is None or near_or_far is None or far_or_near is None:
        return None
    return CLASS_WEIGHTS[0] * a + CLASS_WEIGHTS[1] * near_or_far + CLASS_WEIGHTS[2] * far_or_near


def score(outcome: Outcome, kind: Tensor) -> Score:
    """Score ``B`` episodes with classes ``kind [B]``."""
    returns = {k: _mean(outcome.returns, kind == int(k)) for k in Kind}
    rates = {k: _mean((outcome.retrievals > 0).float(), kind == int(k)) for k in Kind}
    a = kind == int(Kind.A)
    hit = outcome.hit >= 1
    near = returns[Kind.NEAR_B]
    hard = None
    if returns[Kind.A] is not None and near is not None:
        hard = 0.5 * (returns[Kind.A] or 0.0) + 0.5 * near
    return Score(
        balanced=_balanced(returns),
        hard=hard,
        return_a=returns[Kind.A],
        return_near_b=near,
        return_far_b=returns[Kind.FAR_B],
        retrieval_rate_a=rates[Kind.A],
        retrieval_rate_near_b=rates[Kind.NEAR_B],
        retrieval_rate_far_b=rates[Kind.FAR_B],
        hit_rate=_mean(hit.float(), a),
        clean_rate=_mean((hit & ~outcome.distractor).float(), a),
        right_rate=_mean(outcome.right.float(), torch.ones_like(a)),
        steps=float(outcome.steps.float().mean()),
        forget_rate=_mean((outcome.forgets > 0).float(), outcome.saw_distractor),
        blocked=int((outcome.block > 0).sum()),
        n=int(kind.shape[0]),
    )


@dataclass(frozen=True)
class Collapse:
    """Signs that a policy has stopped deciding."""

    reasons: tuple[str, ...]

    @property
    def collapsed(self) -> bool:
        """Any sign at all."""
        return bool(self.reasons)


def detect_collapse(result: Score, *, entropy: float, kl: float, max_kl: float = 5.0) -> Collapse:
    """Retrieval stuck at 0 % or 100 % for every class, vanished entropy with poor returns, runaway KL."""
    reasons = []
    rates = [
        r for r in (result.retrieval_rate_a, result.retrieval_rate_near_b, result.retrieval_rate_far_b) if r is not None
    ]
    if len(rates) > 1 and max(rates) < 0.01:
        reasons.append("it never retrieves, whatever the class")
    if len(rates) > 1 and min(rates) > 0.99:
        reasons.append("it always retrieves, whatever the class")
    if kl > max_kl:
        reasons.append(f"KL to the reference is {kl:.2f}")
    if entropy < 1e-4 and result.right_rate is not None and result.right_rate < 0.5:
        reasons.append("it is certain and mostly wrong")
    return Collapse(tuple(reasons))


def _mean(values: Tensor, members: Tensor) -> float | None:
    return float(values[members].mean()) if bool(members.any()) else None
