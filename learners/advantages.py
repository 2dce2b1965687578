"""Advantage estimators: one small pure function per estimator, all on padded batches.

Conventions, shared by every function here:

* time first: ``rewards`` and ``mask`` are ``[T, B]``; ``mask[t, b]`` is True while episode b is alive at step t.
  A mask is a prefix: once False it stays False. Padded entries of every result are 0.
* ``group`` is ``[B]`` int64 with values ``0..n_groups-1``. Members of a group share the question AND the order of the
  candidates (:func:`check_groups`); only then is their mean a baseline for what the policy did.
* a group whose returns lie within ``tolerance`` of each other (a one-member group among them) carries no signal: its
  advantages are exactly 0 and it is counted as degenerate.
* standard deviations are population ones (divide by n), never below ``floor``.
* a NaN or infinite reward is refused: it would silently poison every weight of the policy.

The estimators that work (``return_to_go``, ``trace``, ``grpo``, ``rloo``, ``turn_credit``) compare an episode with its
group. ``seed_advantage`` compares an episode with itself and is kept to document the defect; see docs/trace.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

STD_FLOOR = 1e-3
TOLERANCE = 1e-6

Scale = Literal["group", "batch"]
"""What group estimators divide by: the spread of the group's returns, or one number for the whole batch.

``group`` makes every group count alike, however little is at stake in it: a question where all members lose, one
of them by half a point more, pushes as hard as one where ten points are decided (the difficulty bias of arXiv
2503.20783). ``batch`` keeps stakes in proportion, so the expected update is a gradient of the expected return."""


@dataclass(frozen=True)
class Advantages:
    """What an estimator gives: per-step advantages and how many groups had nothing to say."""

    values: Tensor
    """``[T, B]``, 0 where the mask is False."""
    degenerate_group_fraction: float
    """Share of groups whose members all had the same return."""


def check_rewards(rewards: Tensor, mask: Tensor) -> None:
    """Refuse what no estimator can use.

    Raises:
        ValueError: shapes differ, the mask is no prefix, or a live reward is NaN or infinite.
    """
    if rewards.shape != mask.shape or rewards.dim() != 2:
        raise ValueError(f"rewards {tuple(rewards.shape)} and mask {tuple(mask.shape)} must both be [T, B]")
    if bool((mask[1:] & ~mask[:-1]).any()):
        raise ValueError("the mask comes back to life after an episode ended; it must be a prefix")
    if not bool(torch.isfinite(rewards[mask]).all()):
        raise ValueError("a reward is NaN or infinite; failed episodes must be dropped before they reach the learner")


def check_groups(group: Tensor, question: Tensor, order: Tensor) -> None:
    """Members of a group must share question and candidate order, else the baseline compares different tasks.

    Args:
        group: ``[B]`` group index.
        question: ``[B]`` question index.
        order: ``[B, K]`` order of the candidates.

    Raises:
        ValueError: some group mixes questions or orders.
    """
    key = torch.cat([question[:, None], order], dim=1)
    n = int(group.max()) + 1 if group.numel() else 0
    first = torch.full((n,), group.numel(), dtype=torch.int64)
    first = first.scatter_reduce(0, group, torch.arange(group.numel()), reduce="amin")
    if bool((key != key[first[group]]).any()):
        raise ValueError("a group mixes questions or candidate orders; its mean is no baseline")


def return_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """``G[t] = r[t] + gamma * G[t+1]``; ``[T, B]``."""
    out = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[0])
    for t in range(rewards.shape[0] - 1, -1, -1):
        running = torch.where(mask[t], rewards[t] + gamma * running, torch.zeros_like(running))
        out[t] = running
    return out


def lambda_return(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """``L[t] = r[t] + gamma * ((1 - lam) * V[t+1] + lam * L[t+1])``, with V and L = 0 after the end; ``[T, B]``.

    ``values`` is ``[T, B]``. With ``lam=1`` this is the return-to-go whatever the values are.
    """
    out = torch.zeros_like(rewards)
    zero = torch.zeros_like(rewards[0])
    next_return, next_value = zero, zero
    for t in range(rewards.shape[0] - 1, -1, -1):
        target = rewards[t] + gamma * ((1.0 - lam) * next_value + lam * next_return)
        next_return = torch.where(mask[t], target, zero)
        next_value = torch.where(mask[t], values[t], zero)
        out[t] = next_return
    return out


def seed_recursion(rewards: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """The literal recursion ``A[t] = r[t] + gamma * ((1 - lam) * G[t+1] + lam * A[t+1])``.

    It mixes the return with itself, so it equals the return-to-go for every ``lam``.
    """
    return lambda_return(rewards, return_to_go(rewards, mask, gamma), mask, gamma, lam)


def normalise_per_trajectory(values: Tensor, mask: Tensor, *, bessel: bool = False, floor: float = 0.0) -> Tensor:
    """``(a - mean) / std`` inside each episode, as the original design does. Blind to the outcome by construction.

    With ``bessel=True`` a one-step episode gives NaN; with the population std it gives 0.
    """
    count = mask.sum(0)
    mean = (values * mask).sum(0) / count.clamp(min=1)
    centred = torch.where(mask, values - mean, torch.zeros_like(values))
    denominator = (count - 1) if bessel else count
    std = ((centred**2).sum(0) / denominator).sqrt().clamp(min=floor)
    if bessel:
        return torch.where(mask, centred / std, torch.zeros_like(centred))
    flat = std <= TOLERANCE
    return torch.where(mask & ~flat, centred / torch.where(flat, torch.ones_like(std), std), torch.zeros_like(centred))


def seed_advantage(rewards: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Advantages:
    """The original estimator: the recursion above, then normalised inside each trajectory. Kept as a specimen."""
    check_rewards(rewards, mask)
    values = normalise_per_trajectory(seed_recursion(rewards, mask, gamma, lam), mask)
    return Advantages(values, 0.0)


def group_mean_of_others(values: Tensor, alive: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """For each ``[t, b]``: mean of ``values[t, j]`` over the other live members j of b's group, and their number."""
    n = int(group.max()) + 1
    live = torch.where(alive, values, torch.zeros_like(values))
    shape = (values.shape[0], n)
    total = torch.zeros(shape, dtype=values.dtype).index_add_(1, group, live)
    count = torch.zeros(shape, dtype=values.dtype).index_add_(1, group, alive.to(values.dtype))
    others = count[:, group] - alive.to(values.dtype)
    return (total[:, group] - live) / others.clamp(min=1.0), others


def group_values(returns: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """Critic-free state values ``V[t, b]`` from the siblings' returns-to-go.

    ``V_b[t]`` is the mean of ``G_j[t]`` over siblings ``j != b`` still alive at ``t``; where none is alive, the mean
    over all siblings of their last ``G``; 0 in a one-member group.
    """
    alive_mean, alive_count = group_mean_of_others(returns, mask, group)
    last = last_step(mask)
    last_return = returns.gather(0, last[None])
    last_mean, _ = group_mean_of_others(last_return, torch.ones_like(last_return, dtype=torch.bool), group)
    values = torch.where(alive_count > 0.5, alive_mean, last_mean.expand_as(alive_mean))
    return torch.where(mask, values, torch.zeros_like(values))


def last_step(mask: Tensor) -> Tensor:
    """Index of each episode's last live step; ``[B]``. Every episode must have at least one step."""
    return (mask.sum(0) - 1).clamp(min=0)


def group_spread(outcome: Tensor, group: Tensor, floor: float = STD_FLOOR) -> tuple[Tensor, Tensor]:
    """Population std of ``outcome [B]`` inside each group (``[B]``, floored) and which episodes sit in a flat group."""
    n = int(group.max()) + 1
    count = torch.zeros(n, dtype=outcome.dtype).index_add_(0, group, torch.ones_like(outcome))
    mean = torch.zeros(n, dtype=outcome.dtype).index_add_(0, group, outcome) / count.clamp(min=1.0)
    centred = outcome - mean[group]
    variance = torch.zeros(n, dtype=outcome.dtype).index_add_(0, group, centred**2) / count.clamp(min=1.0)
    low = torch.full((n,), torch.inf, dtype=outcome.dtype).scatter_reduce(0, group, outcome, reduce="amin")
    high = torch.full((n,), -torch.inf, dtype=outcome.dtype).scatter_reduce(0, group, outcome, reduce="amax")
    return variance.sqrt().clamp(min=floor)[group], ((high - low) <= TOLERANCE)[group]


def spread(outcome: Tensor, group: Tensor, scale: Scale, floor: float) -> tuple[Tensor, Tensor]:
    """What to divide each episode by, ``[B]``, and the flat flags; see :data:`Scale`."""
    std, flat = group_spread(outcome, group, floor)
    if scale == "batch":
        std = outcome.std(correction=0).clamp(min=floor).expand_as(std)
    return std, flat


def _degenerate_fraction(flat: Tensor, group: Tensor) -> float:
    n = int(group.max()) + 1
    flags = torch.zeros(n).index_add_(0, group, flat.float())
    return float((flags > 0).float().mean())


def return_to_go_advantage(
    rewards: Tensor,
    mask: Tensor,
    group: Tensor,
    *,
    gamma: float,
    scale: Scale = "group",
    floor: float = STD_FLOOR,
) -> Advantages:
    """Return-to-go less the group's mean return at the start, over the group's spread: REINFORCE with a baseline."""
    check_rewards(rewards, mask)
    returns = return_to_go(rewards, mask, gamma)
    mean, _ = group_mean_of_others(returns[:1], mask[:1], group)
    std, flat = spread(returns[0], group, scale, floor)
    values = torch.where(mask & ~flat, (returns - mean) / std, torch.zeros_like(returns))
    return Advantages(values, _degenerate_fraction(flat, group))


def trace_advantage(
    rewards: Tensor,
    mask: Tensor,
    group: Tensor,
    *,
    gamma: float,
    lam: float,
    scale: Scale = "group",
    floor: float = STD_FLOOR,
) -> Advantages:
    """The default: lambda-return less a critic-free value from the group, over the group's spread.

    See :func:`group_values` for V and :func:`lambda_return` for L; the scale is the population std of the discounted
    returns, of the group or of the batch (:data:`Scale`).
    """
    check_rewards(rewards, mask)
    returns = return_to_go(rewards, mask, gamma)
    values = group_values(returns, mask, group)
    advantage = lambda_return(rewards, values, mask, gamma, lam) - values
    std, flat = spread(returns[0], group, scale, floor)
    return Advantages(
        torch.where(mask & ~flat, advantage / std, torch.zeros_like(advantage)), _degenerate_fraction(flat, group)
    )


def grpo_outcome(
    outcome: Tensor, group: Tensor, floor: float = STD_FLOOR, scale: Scale = "group"
) -> tuple[Tensor, Tensor]:
    """``(R - mean) / std`` inside each group, ``[B]``, and the flat flags."""
    std, flat = spread(outcome, group, scale, floor)
    n = int(group.max()) + 1
    count = torch.zeros(n, dtype=outcome.dtype).index_add_(0, group, torch.ones_like(outcome))
    mean = torch.zeros(n, dtype=outcome.dtype).index_add_(0, group, outcome) / count.clamp(min=1.0)
    return torch.where(flat, torch.zeros_like(outcome), (outcome - mean[group]) / std), flat


def grpo_advantage(
    rewards: Tensor,
    mask: Tensor,
    group: Tensor,
    *,
    gamma: float,
    scale: Scale = "group",
    floor: float = STD_FLOOR,
) -> Advantages:
    """GRPO (arXiv 2402.03300): the normalised outcome of the episode on each of its steps."""
    check_rewards(rewards, mask)
    outcome, flat = grpo_outcome(return_to_go(rewards, mask, gamma)[0], group, floor, scale)
    return Advantages(outcome * mask, _degenerate_fraction(flat, group))


def rloo_outcome(outcome: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Leave-one-out: ``R`` less the mean of the other members, ``[B]``, and the flat flags."""
    others, count = group_mean_of_others(outcome[None], torch.ones_like(outcome, dtype=torch.bool)[None], group)
    _, flat = group_spread(outcome, group)
    return torch.where(flat | (count[0] < 0.5), torch.zeros_like(outcome), outcome - others[0]), flat


def rloo_advantage(rewards: Tensor, mask: Tensor, group: Tensor, *, gamma: float) -> Advantages:
    """RLOO (arXiv 2402.14740): outcome less the leave-one-out mean, on each step; not divided by the spread."""
    check_rewards(rewards, mask)
    outcome, flat = rloo_outcome(return_to_go(rewards, mask, gamma)[0], group)
    return Advantages(outcome * mask, _degenerate_fraction(flat, group))


def turn_credit(
    log_likelihood: Tensor,
    mask: Tensor,
    outcome: Tensor,
    *,
    epsilon: float = 0.1,
    horizon: int = 3,
    gamma: float = 0.8,
    weight: float = 0.2,
) -> Tensor:
    """Turn-level credit of arXiv 2607.13988, ``[T, B]``.

    Args:
        log_likelihood: ``[T + 1, B]``, log-likelihood of the right answer under the frozen reference before step t.
        mask: ``[T, B]``.
        outcome: ``[B]``, the group-normalised outcome advantage.
        epsilon: keeps the distance ``d_t = -ell_t + epsilon`` positive.
        horizon: K, the number of steps a local change is averaged over.
        gamma: discount inside the window.
        weight: share of the local term.
    """
    distance = -log_likelihood + epsilon
    potential = torch.log(distance[:1] / distance)
    delta = torch.where(mask, potential[1:] - potential[:-1], torch.zeros_like(potential[1:]))
    steps = mask.shape[0]
    length = mask.sum(0)
    local = torch.zeros_like(delta)
    norm = torch.zeros_like(delta)
    for j in range(min(horizon, steps)):
        local[: steps - j] += gamma**j * delta[j:]
        norm[: steps - j] += gamma**j * mask[j:].to(delta.dtype)
    remaining = length[None] - torch.arange(steps)[:, None]
    fill = torch.where(remaining <= horizon, 2.0 * gamma ** remaining.clamp(min=0) * outcome, torch.zeros_like(delta))
    values = outcome + weight * (local / norm.clamp(min=1e-12) + fill)
    return torch.where(mask, values, torch.zeros_like(values))


def turn_credit_advantage(
    rewards: Tensor, mask: Tensor, group: Tensor, log_likelihood: Tensor, *, gamma: float, floor: float = STD_FLOOR
) -> Advantages:
    """:func:`turn_credit` over the GRPO outcome; degenerate groups stay exactly 0."""
    check_rewards(rewards, mask)
    outcome, flat = grpo_outcome(return_to_go(rewards, mask, gamma)[0], group, floor)
    values = turn_credit(log_likelihood, mask, outcome)
    return Advantages(torch.where(flat, torch.zeros_like(values), values), _degenerate_fraction(flat, group))
