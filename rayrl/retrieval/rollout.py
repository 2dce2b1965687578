"""Rolling out a policy in the vectorised MDP: a pure function of (weights, rows, order, seed).

The result is a padded time-first batch. One generator per call, seeded by the caller, draws all actions; the same call
gives the same bits wherever it runs, which is what makes local and Ray execution equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rayrl.retrieval.guard import RETRIEVE
from rayrl.retrieval.mdp import Outcome, RetrievalEnv


class ActsOnState(Protocol):
    """What a rollout needs of a policy."""

    def project(self, static: Tensor) -> Tensor:
        """Static features to what stays the same during an episode."""
        ...

    def act_logits(self, projected: Tensor, dynamic: Tensor) -> Tensor:
        """Logits of the actions."""
        ...


@dataclass(frozen=True)
class Batch:
    """B finished episodes, padded to the same length T; time first."""

    rows: Tensor
    """``[B]`` world rows."""
    order: Tensor
    """``[B, K]`` order of the candidates."""
    group: Tensor
    """``[B]`` group index; a group shares row and order."""
    dynamic: Tensor
    """``[T, B, D]`` observations."""
    actions: Tensor
    """``[T, B]`` int64."""
    log_probs: Tensor
    """``[T, B]`` log-probability of the action under the policy that acted."""
    rewards: Tensor
    """``[T, B]``"""
    mask: Tensor
    """``[T, B]`` bool, alive before the step."""
    outcome: Outcome
    expert: Tensor
    """``[T, B]`` what the expert would have done there (supervision and turn credit only)."""
    policy_version: int = 0

    @property
    def episodes(self) -> int:
        """B."""
        return self.rows.shape[0]

    @property
    def env_steps(self) -> int:
        """Live steps in the batch."""
        return int(self.mask.sum())


def rollout(
    policy: ActsOnState | None,
    env: RetrievalEnv,
    rows: Tensor,
    *,
    group_size: int = 1,
    order: Tensor | None = None,
    seed: int | None = None,
    version: int = 0,
    with_expert: bool = False,
    stray: float = 0.0,
) -> Batch:
    """Play ``group_size`` episodes on each of ``rows [n]``; B = n * group_size.

    Args:
        policy: None plays the expert.
        env: the environment; its state is overwritten.
        rows: world rows, one group each.
        group_size: members per group.
        order: ``[n, K]`` candidate order per group; None as ranked.
        seed: of the action sampling; None takes the most probable action.
        version: recorded as ``policy_version``.
        with_expert: also record what the expert would do (needed by supervision and turn credit).
        stray: with this probability the expert retrieves although it would not (drawn from ``seed``), so that states
            off its path are visited and labelled.
    """
    world = env.world
    b = rows.shape[0] * group_size
    full_rows = rows.repeat_interleave(group_size)
    full_order = order.repeat_interleave(group_size, dim=0) if order is not None else None
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    dynamic = env.reset(full_rows, full_order)
    with torch.no_grad():
        projected = policy.project(world.static[rows]).repeat_interleave(group_size, 0) if policy is not None else None
        steps: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        for _ in range(env.config.horizon(world.k)):
            alive = env.alive
            expert = env.expert_action() if with_expert or policy is None else torch.zeros(b, dtype=torch.int64)
            if policy is None or projected is None:
                action, log_prob = expert, torch.zeros(b)
                if stray and generator is not None:
                    lost = (torch.rand(b, generator=generator) < stray) & (env.position < world.k)
                    action = torch.where(lost, RETRIEVE, expert)
            else:
                log_probs = torch.log_softmax(policy.act_logits(projected, dynamic), -1)
                action = choose(log_probs, generator)
                log_prob = log_probs.gather(1, action[:, None])[:, 0]
            reward, _ = env.step(action)
            steps.append((dynamic, action, log_prob, reward, alive, expert))
            if not bool(env.alive.any()):
                break
            dynamic = env.observe()
    return Batch(
        rows=full_rows,
        order=full_order if full_order is not None else torch.arange(world.k).expand(b, -1),
        group=torch.arange(rows.shape[0]).repeat_interleave(group_size),
        dynamic=torch.stack([s[0] for s in steps]),
        actions=torch.stack([s[1] for s in steps]),
        log_probs=torch.stack([s[2] for s in steps]),
        rewards=torch.stack([s[3] for s in steps]),
        mask=torch.stack([s[4] for s in steps]),
        outcome=env.outcome(),
        expert=torch.stack([s[5] for s in steps]),
        policy_version=version,
    )


def choose(log_probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Sample actions ``[B]`` by inverting the cumulative distribution, or take the mode without a generator."""
    if generator is None:
        return log_probs.argmax(-1)
    draw = torch.rand(log_probs.shape[0], 1, generator=generator)
    cumulative = log_probs.exp().cumsum(-1)
    return (draw > cumulative[:, :-1]).sum(-1)


def random_orders(n: int, k: int, right: Tensor, seed: int, *, first: int = 1) -> Tensor:
    """``[n, K]`` orders that put a right candidate at a random place ``first..K-1`` and shuffle the others.

    Rows without a right candidate are only shuffled. Source: the original design randomises the place in training so
    that it cannot be learned by heart.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(n, k, generator=generator)
    order = noise.argsort(1)
    place = torch.randint(first, k, (n,), generator=generator)
    has = right.any(1)
    shuffled_right = right.gather(1, order)
    now = shuffled_right.float().argmax(1)
    rows = torch.arange(n)
    target = torch.where(has, place, now)
    swapped = order.clone()
    swapped[rows, now] = order[rows, target]
    swapped[rows, target] = order[rows, now]
    return swapped


def concat_batches(batches: list[Batch], members: int = 1) -> Batch:
    """Join equal shards of one batch, padding to the longest; group numbers are made distinct.

    Each shard is made of ``members`` blocks (see :mod:`rayrl.retrieval.policy`); so is the result.
    """
    if len(batches) == 1:
        return batches[0]
    t = max(b.mask.shape[0] for b in batches)
    episodes = batches[0].episodes
    if any(b.episodes != episodes for b in batches):
        raise ValueError("shards of a batch must have the same number of episodes")
    place = torch.arange(len(batches) * episodes).view(len(batches), members, -1).transpose(0, 1).reshape(-1)
    per_shard = int(batches[0].group.max()) + 1
    raw = torch.cat([b.group + i * per_shard for i, b in enumerate(batches)])[place]
    changes = torch.cat([raw.new_zeros(1), (raw[1:] != raw[:-1]).long()])
    group = changes.cumsum(0)

    def time_first(name: str) -> Tensor:
        parts = []
        for b in batches:
            x: Tensor = getattr(b, name)
            missing = t - x.shape[0]
            parts.append(torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x)
        return torch.cat(parts, dim=1)

    outcome = Outcome(**{f: torch.cat([getattr(b.outcome, f) for b in batches]) for f in Outcome.__dataclass_fields__})
    return Batch(
        rows=torch.cat([b.rows for b in batches])[place],
        order=torch.cat([b.order for b in batches])[place],
        group=group,
        dynamic=time_first("dynamic"),
        actions=time_first("actions"),
        log_probs=time_first("log_probs"),
        rewards=time_first("rewards"),
        mask=time_first("mask"),
        outcome=outcome,
        expert=time_first("expert"),
        policy_version=min(b.policy_version for b in batches),
    )
