"""The vectorised retrieval MDP: B episodes step together, no Python per episode.

An episode is one world row with an order of its candidates. It ends on ``answer``, on a guard rule and, with 2 actions,
when the last candidate was retrieved. What the policy sees is the row's static features and a dynamic part, by mode:

* ``seed``        next candidate's cosine and the hit flag (with 3 actions also whether anything is held, without which
  nobody could know when to forget). The flag is ground truth and cannot exist in service.
* ``observable``  position, number held, next candidate's features: only what a server knows.
* ``revealing``   as observable, and what reading the retrieved texts has shown so far.

Held candidates are a stack: ``forget`` drops the one retrieved last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rayrl.config import Section
from rayrl.retrieval.guard import RETRIEVE, Block, blocked, penalties
from rayrl.retrieval.rewards import RewardConfig, terminal_reward
from rayrl.retrieval.world import World

Mode = Literal["seed", "observable", "revealing"]


class MdpConfig(Section):
    """The decision process."""

    actions: Literal[2, 3] = 2
    """2 = retrieve, answer; 3 = retrieve, forget, answer."""
    mode: Mode = "observable"
    """What the policy sees. Named in every result."""
    max_steps: int = 12
    """The guard ends an episode at this many actions."""
    rewards: RewardConfig = RewardConfig()
    """The price list."""

    def horizon(self, k: int) -> int:
        """Longest possible episode with K candidates."""
        return k if self.actions == 2 else min(self.max_steps, 2 * k + 2)


@dataclass(frozen=True)
class Outcome:
    """How each of B finished episodes ended."""

    returns: Tensor
    """``[B]`` undiscounted sum of rewards."""
    steps: Tensor
    """``[B]`` actions taken."""
    retrievals: Tensor
    """``[B]`` successful retrievals."""
    forgets: Tensor
    """``[B]`` successful forgets."""
    held: Tensor
    """``[B]`` candidates held at the end."""
    hit: Tensor
    """``[B]`` share of the answers held at the end (class A; 0 otherwise)."""
    distractor: Tensor
    """``[B]`` bool, a wrong candidate is held at the end."""
    saw_distractor: Tensor
    """``[B]`` bool, a wrong candidate was retrieved at some point."""
    block: Tensor
    """``[B]`` guard code, 0 when it ended by itself."""
    right: Tensor
    """``[B]`` bool, the right decision: A all answers held; B nothing held; no guard block."""


def dynamic_dim(world: World, mode: Mode, actions: int = 2) -> int:
    """Width of the dynamic part of the observation."""
    if mode == "seed":
        return actions
    base = world.k + 1 + 2 + world.candidate.shape[2]
    return base if mode == "observable" else base + 2 + 3 * world.reveal.shape[2]


class RetrievalEnv:
    """B parallel episodes over the rows of a world."""

    def __init__(self, world: World, config: MdpConfig, answer_right: Tensor | None = None) -> None:
        """``answer_right``: ``[R, 2]`` bool, an answer model's verdict without and with the answer held, if judged."""
        self.world = world
        self.config = config
        self.answer_right = answer_right
        self.dim = dynamic_dim(world, config.mode, config.actions)
        self._penalties = penalties(config.rewards)
        self._cosine = world.candidate_names.index("cosine") if world.candidate_names else 0

    def reset(self, rows: Tensor, order: Tensor | None = None) -> Tensor:
        """Start episodes on ``rows [B]`` with candidates in ``order [B, K]`` (None: as ranked); dynamic ``[B, D]``."""
        world, k, b = self.world, self.world.k, rows.shape[0]
        self.rows = rows
        self.order = order
        self._index = torch.arange(b)
        right, candidate, reveal, item = world.right[rows], world.candidate[rows], world.reveal[rows], world.item[rows]
        agreement = world.agreement[rows] if self.config.mode == "revealing" else None
        if order is not None:
            right, item = right.gather(1, order), item.gather(1, order)
            candidate = candidate.gather(1, order[:, :, None].expand_as(candidate))
            reveal = reveal.gather(1, order[:, :, None].expand_as(reveal))
            if agreement is not None:
                agreement = agreement[self._index[:, None, None], order[:, :, None], order[:, None, :]]
        self.right = right
        # one empty slot behind the queue: its features are 0
        self._candidate = torch.cat([candidate, torch.zeros_like(candidate[:, :1])], dim=1)
        self._reveal, self._agreement = reveal, agreement
        same = item[:, :, None] == item[:, None, :]
        self._repeated = torch.cat([same.tril(-1).any(2), torch.zeros(b, 1, dtype=torch.bool)], dim=1)
        self.is_a = world.is_a[rows]
        self.n_right = world.n_right[rows]
        self.position = torch.zeros(b, dtype=torch.int64)
        self.held = torch.zeros(b, k, dtype=torch.bool)
        self.steps = torch.zeros(b, dtype=torch.int64)
        self.alive = torch.ones(b, dtype=torch.bool)
        self.block = torch.zeros(b, dtype=torch.int64)
        self.returns = torch.zeros(b)
        self.forgets = torch.zeros(b, dtype=torch.int64)
        self._slots = torch.arange(k)
        return self.observe()

    def observe(self) -> Tensor:
        """Dynamic part of what the policy sees now; ``[B, D]`` float32."""
        upcoming = self._candidate[self._index, self.position]
        if self.config.mode == "seed":
            parts = [upcoming[:, self._cosine], self.hit_fraction()]
            if self.config.actions == 3:
                parts.append(self.held.any(1).float())
            return torch.stack(parts, dim=1)
        k = self.world.k
        parts = [
            torch.nn.functional.one_hot(self.position, k + 1).float(),
            (self.held.sum(1, keepdim=True) / k),
            (self.steps[:, None] / self.config.max_steps),
            upcoming,
        ]
        if self.config.mode == "revealing":
            parts += self._revealed()
        return torch.cat(parts, dim=1)

    def _revealed(self) -> list[Tensor]:
        held, top, any_held = self.held, self._top(), self.held.any(1)
        last = self._reveal[self._index, top] * any_held[:, None]
        seen = self._slots[None] < self.position[:, None]
        best_seen = torch.where(seen[:, :, None], self._reveal, torch.full_like(self._reveal, -2.0)).amax(1)
        best_held = torch.where(held[:, :, None], self._reveal, torch.full_like(self._reveal, -2.0)).amax(1)
        others = held & (self._slots[None] != top[:, None])
        if self._agreement is None:
            raise RuntimeError("reset() must come before observe()")
        agreement = self._agreement[self._index, top]
        mean = (agreement * others).sum(1, keepdim=True) / others.sum(1, keepdim=True).clamp(min=1)
        return [any_held[:, None].float(), mean, last, best_seen, best_held]

    def _top(self) -> Tensor:
        """Slot retrieved last and still held; 0 when nothing is held."""
        return torch.where(self.held, self._slots[None] + 1, 0).amax(1).sub(1).clamp(min=0)

    def hit_fraction(self) -> Tensor:
        """Share of the question's answers that are held; ``[B]``, 0 for class B."""
        return (self.held & self.right).sum(1) / self.n_right.clamp(min=1)

    def expert_action(self) -> Tensor:
        """What somebody who knows the labels does: drop a wrong one, retrieve while an answer is worth it, answer."""
        rewards = self.config.rewards
        cost = torch.full((self.world.k,), -rewards.retrieve)
        if self.config.actions == 3:
            cost = cost - rewards.forget
        ahead = self._slots[None] >= self.position[:, None]
        hits = self.right & ahead
        distance = torch.where(hits, self._slots[None] - self.position[:, None], 10**6).amin(1)
        price = distance * cost[0] - rewards.retrieve
        gain = (rewards.right - rewards.missed) / self.n_right.clamp(min=1)
        worth = self.is_a & (self.hit_fraction() < 1) & hits.any(1) & (price < gain)
        action = torch.where(worth, RETRIEVE, self.config.actions - 1)
        if self.config.actions == 3:
            wrong_top = self.held.any(1) & ~self.right[self._index, self._top()]
            action = torch.where(wrong_top, 1, action)
        return action

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Act with ``[B]`` actions; ended episodes stand still. Returns rewards ``[B]`` and who is alive ``[B]``."""
        config, k = self.config, self.world.k
        code = blocked(
            action,
            actions=config.actions,
            queue_empty=self.position >= k,
            repeated=self._repeated[self._index, self.position],
            held=self.held.sum(1),
            all_hit=(self.is_a & (self.hit_fraction() >= 1)) if config.mode == "seed" else None,
            steps=self.steps,
            max_steps=config.max_steps,
        )
        free = self.alive & (code == int(Block.NONE))
        retrieve = free & (action == RETRIEVE)
        ended = self.alive & ((action == config.actions - 1) | (code > 0))
        reward = retrieve * config.rewards.retrieve
        if config.actions == 3:
            forget = free & (action == 1)
            self.held &= ~(forget[:, None] & (self._slots[None] == self._top()[:, None]))
            self.forgets += forget
            reward = reward + forget * config.rewards.forget
        self.held |= retrieve[:, None] & (self._slots[None] == self.position[:, None])
        self.position += retrieve
        self.steps += self.alive
        if config.actions == 2:
            ended = ended | (retrieve & (self.position >= k))
        reward = reward + torch.where(ended, self._terminal(code), torch.zeros_like(reward))
        self.block = torch.where(self.alive, code, self.block)
        self.alive = self.alive & ~ended
        self.returns += reward
        return reward, self.alive

    def _terminal(self, code: Tensor) -> Tensor:
        hit = self.hit_fraction()
        held = self.held.any(1)
        verdict = None
        if self.answer_right is not None:
            verdict = self.answer_right[self.rows].gather(1, (hit >= 1).long()[:, None])[:, 0]
        natural = terminal_reward(
            self.config.rewards,
            actions=self.config.actions,
            is_a=self.is_a,
            hit_fraction=hit,
            held=held,
            distractor_held=(self.held & ~self.right).any(1),
            answer_right=verdict,
        )
        return torch.where(code > 0, self._penalties[code], natural)

    def outcome(self) -> Outcome:
        """How the episodes ended; meaningful once none is alive."""
        held = self.held.sum(1)
        hit = self.hit_fraction()
        distractor = (self.held & ~self.right).any(1)
        seen = self._slots[None] < self.position[:, None]
        return Outcome(
            returns=self.returns.clone(),
            steps=self.steps.clone(),
            retrievals=self.position.clone(),
            forgets=self.forgets.clone(),
            held=held,
            hit=hit,
            distractor=distractor,
            saw_distractor=(seen & ~self.right).any(1),
            block=self.block.clone(),
            right=(self.block == 0) & torch.where(self.is_a, hit >= 1, held == 0),
        )
