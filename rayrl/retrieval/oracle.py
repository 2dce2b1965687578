"""The best possible return of an episode, by exhaustive enumeration.

The oracle knows which candidates are right. It is computed with a scalar model of the rules that shares no code with
the vectorised environment, so each checks the other. Results are memoised by pattern; with 5 candidates there are few.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from rayrl.retrieval.mdp import MdpConfig
from rayrl.retrieval.rewards import RewardConfig
from rayrl.retrieval.world import World


@lru_cache(maxsize=4096)
def best_return(
    right: tuple[bool, ...], n_right: int, is_a: bool, actions: int, max_steps: int, rewards: RewardConfig
) -> float:
    """Optimal undiscounted return of one episode.

    Args:
        right: which candidates of the queue are right, in order.
        n_right: answers the question has in the memory (some may be outside the queue).
        is_a: class A.
        actions: 2 or 3.
        max_steps: the guard's limit.
        rewards: the price list.
    """

    def answer(stack: tuple[bool, ...]) -> float:
        if not is_a:
            return rewards.wrong_category if stack else rewards.right
        fraction = sum(stack) / max(n_right, 1)
        top = rewards.right_with_distractor if actions == 3 and not all(stack) else rewards.right
        return rewards.missed + (top - rewards.missed) * fraction

    @cache
    def value(position: int, stack: tuple[bool, ...], steps: int) -> float:
        best = answer(stack)
        if steps >= max_steps - 1:
            return best
        if position < len(right):
            grown = (*stack, right[position])
            last = actions == 2 and position + 1 == len(right)
            after = answer(grown) if last else value(position + 1, grown, steps + 1)
            best = max(best, rewards.retrieve + after)
        if actions == 3 and stack:
            best = max(best, rewards.forget + value(position, stack[:-1], steps + 1))
        return best

    return value(0, (), 0)


def oracle_returns(world: World, config: MdpConfig, order: Tensor | None = None) -> Tensor:
    """``[R]`` optimal return of every row (with candidates in ``order [R, K]``, default as ranked)."""
    right = world.right if order is None else world.right.gather(1, order)
    values = [
        best_return(tuple(map(bool, r)), int(n), bool(a), config.actions, config.max_steps, config.rewards)
        for r, n, a in zip(right.tolist(), world.n_right.tolist(), world.is_a.tolist(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float32)
