"""Plans made beforehand: how many candidates to retrieve and, with 3 actions, which of them to keep.

A plan is a tuple of keep flags, one per retrieved candidate; the empty plan answers at once. With 2 actions everything
retrieved is kept, so there are K + 1 plans; with 3 actions there are 2^(K+1) - 1. Nothing a plan does depends on what
looking shows: this is the ceiling for every method that decides from the first observation alone.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrl.retrieval.mdp import MdpConfig, Outcome, RetrievalEnv
from rayrl.retrieval.world import World

Plan = tuple[bool, ...]
Doubles = NDArray[np.float64]


@cache
def all_plans(k: int, actions: int) -> tuple[Plan, ...]:
    """Every plan, shortest first."""
    if actions == 2:
        return tuple((True,) * n for n in range(k + 1))
    # a plan never ends on a candidate that is dropped again: leaving it out is cheaper and otherwise the same
    return ((), *((*p, True) for n in range(k) for p in product((False, True), repeat=n)))


def counts_as_plans(numbers: Tensor, plans: tuple[Plan, ...]) -> Tensor:
    """Plan numbers of "retrieve n and keep them all"; with 2 actions a count is its plan's number."""
    longest = max(len(p) for p in plans)
    return torch.tensor([plans.index((True,) * n) for n in range(longest + 1)])[numbers]


def play_plans(world: World, config: MdpConfig, plan_of_row: Tensor, plans: tuple[Plan, ...]) -> Outcome:
    """Play plan number ``plan_of_row [R]`` on every row, in the environment itself."""
    k = world.k
    script = torch.tensor([_script(p, k, config.actions) for p in plans])
    env = RetrievalEnv(world, config)
    env.reset(torch.arange(world.rows))
    for t in range(script.shape[1]):
        env.step(script[plan_of_row, t])
        if not bool(env.alive.any()):
            break
    return env.outcome()


def _script(plan: Plan, k: int, actions: int) -> list[int]:
    steps: list[int] = []
    for keep in plan:
        steps.append(0)
        if not keep:
            steps.append(1)
    length = k + 1 if actions == 2 else 2 * k + 1
    return steps + [actions - 1] * (length - len(steps))


def expected_returns(p_a: Doubles, p_slot: Doubles, config: MdpConfig, plans: tuple[Plan, ...]) -> Doubles:
    """Expected return of every plan under believed probabilities; ``[n, P]``.

    Args:
        p_a: ``[n]`` probability that the memory holds the answer.
        p_slot: ``[n, K]`` probability that candidate j is the answer, given class A (sums to at most 1).
        config: prices and number of actions.
        plans: the plans.
    """
    r = config.rewards
    k = p_slot.shape[1]
    keep = np.zeros((len(plans), k))
    cost = np.zeros(len(plans))
    for i, plan in enumerate(plans):
        keep[i, : len(plan)] = plan
        cost[i] = r.retrieve * len(plan) + r.forget * (len(plan) - sum(plan))
    kept = keep.sum(1)
    crowded = (config.actions == 3) & (kept > 1)
    top = np.where(crowded, r.right_with_distractor, r.right)
    hit = p_slot @ keep.T
    a = r.missed + (top[None] - r.missed) * hit
    b = np.where(kept > 0, r.wrong_category, r.right)
    return np.asarray(cost[None] + p_a[:, None] * a + (1 - p_a[:, None]) * b[None], dtype=np.float64)
