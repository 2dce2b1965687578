"""ActionGuard: mechanical rules that stop an episode before it runs in circles; every block is counted.

Rules, in order of precedence:

* ``limit``      retrieving from an empty queue (or past the allowed number): nothing can come back
* ``repeat``     the next candidate was already retrieved in this episode, or there is nothing to forget
* ``after_hits`` retrieving although every answer is held; uses ground truth, so it exists in the seed's mode only
* ``max_steps``  the episode is too long

A blocked action is not executed and costs nothing by itself; the episode ends with the rule's penalty.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from rayrl.retrieval.rewards import RewardConfig

RETRIEVE, FORGET_OR_ANSWER = 0, 1
ACTIONS = {2: ("retrieve", "answer"), 3: ("retrieve", "forget", "answer")}


class Block(IntEnum):
    """Why the guard stopped an action."""

    NONE = 0
    LIMIT = 1
    REPEAT = 2
    AFTER_HITS = 3
    MAX_STEPS = 4


def blocked(
    action: Tensor,
    *,
    actions: int,
    queue_empty: Tensor,
    repeated: Tensor,
    held: Tensor,
    all_hit: Tensor | None,
    steps: Tensor,
    max_steps: int,
) -> Tensor:
    """Block code per episode, ``[B]`` int64.

    Args:
        action: ``[B]`` chosen actions.
        actions: 2 or 3.
        queue_empty: ``[B]`` no candidate left.
        repeated: ``[B]`` the next candidate was retrieved before.
        held: ``[B]`` number of candidates held.
        all_hit: ``[B]`` every answer is held, or None outside the seed's mode.
        steps: ``[B]`` actions taken so far.
        max_steps: an episode has at most this many actions.
    """
    retrieve = action == RETRIEVE
    code = torch.zeros_like(action)
    answer = action == actions - 1
    code = torch.where(~answer & (steps >= max_steps - 1), int(Block.MAX_STEPS), code)
    if all_hit is not None:
        code = torch.where(retrieve & all_hit, int(Block.AFTER_HITS), code)
    code = torch.where(retrieve & repeated, int(Block.REPEAT), code)
    if actions == 3:
        code = torch.where((action == 1) & (held == 0), int(Block.REPEAT), code)
    return torch.where(retrieve & queue_empty, int(Block.LIMIT), code)


def penalties(config: RewardConfig) -> Tensor:
    """Reward by block code; ``[5]``."""
    return torch.tensor([0.0, config.max_steps, config.repeated_loop, config.repeated_loop, config.max_steps])
