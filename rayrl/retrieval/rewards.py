"""Costs and terminal rewards of the retrieval decision, as one config section and one pure tensor function."""

from __future__ import annotations

import torch
from torch import Tensor

from rayrl.config import Section


class RewardConfig(Section):
    """The price list. Defaults are those of the original design."""

    retrieve: float = -0.5
    """Added for every retrieval."""
    forget: float = -0.2
    """Added for every forget (3 actions)."""
    right: float = 10.0
    """A: all answers held and answered right; B: answered right with nothing held."""
    missed: float = -3.5
    """A: no answer held, or answered wrong; partial hits interpolate from here. B: answered wrong, nothing held."""
    right_with_distractor: float = 7.0
    """A, 3 actions: right, but a distractor is still held."""
    wrong_category: float = -8.5
    """B: anything held at the answer."""
    repeated_loop: float = -6.5
    """The guard stopped a loop: a repeated result, nothing left to forget, or retrieving after all hits."""
    max_steps: float = -5.0
    """The guard stopped at a limit: an empty queue, or too many steps."""


def terminal_reward(
    config: RewardConfig,
    *,
    actions: int,
    is_a: Tensor,
    hit_fraction: Tensor,
    held: Tensor,
    distractor_held: Tensor,
    answer_right: Tensor | None = None,
) -> Tensor:
    """Reward of answering now; ``[B]``.

    Args:
        config: the price list.
        actions: 2 or 3; only with 3 does a held distractor cost.
        is_a: ``[B]`` bool.
        hit_fraction: ``[B]`` share of the question's answers that are held.
        held: ``[B]`` bool, anything held.
        distractor_held: ``[B]`` bool.
        answer_right: ``[B]`` bool, an answer model's verdict; None without one ("right" is then what is held).
    """
    top = torch.full_like(hit_fraction, config.right)
    if actions == 3:
        top = torch.where(distractor_held, torch.full_like(top, config.right_with_distractor), top)
    a = config.missed + (top - config.missed) * hit_fraction
    b = torch.where(held, torch.full_like(top, config.wrong_category), torch.full_like(top, config.right))
    if answer_right is not None:
        missed = torch.full_like(top, config.missed)
        a = torch.where(answer_right, a, missed)
        b = torch.where(~held & ~answer_right, missed, b)
    return torch.where(is_a, a, b)
