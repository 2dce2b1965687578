"""Which episodes belong to an update, and playing them.

Rows, orders and seeds are pure functions of (seed, update, shard). The number of shards is part of the config, the
number of workers is not: whoever plays a shard, with whatever neighbours, produces the same bits. Update ``u`` is
played with the weights left by update ``u - 1 - staleness``, in local execution as well, so pipelining changes when
things happen and never what happens.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from learners.learner import RlConfig, sample_for_members
from rayrl.config import Section, operational
from rayrl.errors import ConfigError
from rayrl.retrieval.mdp import MdpConfig, RetrievalEnv
from rayrl.retrieval.policy import PolicySpec, RetrievalPolicy
from rayrl.retrieval.rollout import Batch, concat_batches, random_orders, rollout
from rayrl.retrieval.world import World
from rayrl.schemas import step_seed

Weights = dict[str, Tensor]


class CollectConfig(Section):
    """How rollouts are produced."""

    shards: int = Field(2, ge=1)
    """Independent parts of each batch; must divide ``rl.questions``."""
    staleness: int = Field(0, ge=0)
    """Updates by which the acting weights lag behind; with 1 or more, rollouts and updates overlap under Ray."""
    execution: Literal["local", "ray"] = operational("local")
    """``local`` or ``ray``; the numbers are the same."""
    workers: int = operational(2, ge=1)
    """Ray rollout workers."""
    threads: int = operational(1, ge=1)
    """Torch threads of the learner and of each worker."""


class Collector(Protocol):
    """Hands out batches in order."""

    def start(self, update: int, history: list[Weights]) -> None:
        """Begin at ``update`` with the weights of the last ``staleness + 1`` versions, oldest first."""
        ...

    def next(self) -> Batch:
        """The batch of the current update."""
        ...

    def publish(self, weights: Weights) -> None:
        """Weights left by the current update; moves on to the next one."""
        ...

    def close(self) -> None:
        """Release workers. Idempotent."""
        ...


def check_shards(rl: RlConfig, collect: CollectConfig) -> None:
    """Refuse a batch that cannot be cut evenly.

    Raises:
        ConfigError: names both keys.
    """
    if rl.questions % collect.shards:
        raise ConfigError(
            f"collect.shards={collect.shards} must divide rl.questions={rl.questions}; "
            f"try rl.questions={max(1, rl.questions // collect.shards) * collect.shards}"
        )


class ShardPlayer:
    """Plays shards of updates with given weights; one per worker, or one in the learner's process."""

    def __init__(
        self,
        world: World,
        mdp: MdpConfig,
        spec: PolicySpec,
        rl: RlConfig,
        collect: CollectConfig,
        seed: int,
        scripted: bool,
    ) -> None:
        self.world = world
        self.env = RetrievalEnv(world, mdp)
        self.policy = RetrievalPolicy(spec).eval()
        self.rl = rl
        self.shards = collect.shards
        self.seed = seed
        self.scripted = scripted

    def play(self, update: int, shard: int, weights: Weights, version: int) -> Batch:
        """One shard of one update."""
        self.policy.load_state_dict(weights)
        seed = step_seed(self.seed, update)
        members = self.policy.members
        rows = sample_for_members(self.world, self.rl, members, seed)
        mine = rows.view(members, self.shards, -1)[:, shard].reshape(-1)
        shard_seed = step_seed(seed, shard)
        order = None
        if self.scripted:
            order = random_orders(mine.shape[0], self.world.k, self.world.right[mine], shard_seed)
        return rollout(
            self.policy,
            self.env,
            mine,
            group_size=self.rl.group_size,
            order=order,
            seed=shard_seed,
            version=version,
            with_expert=self.rl.estimator == "turn_credit",
        )


class LocalCollector:
    """Everything in this process, in the order Ray would do it."""

    def __init__(self, player: ShardPlayer, staleness: int) -> None:
        self._player = player
        self._staleness = staleness
        self._history: deque[Weights] = deque(maxlen=staleness + 1)
        self._update = 0

    def start(self, update: int, history: list[Weights]) -> None:
        """See :class:`Collector`."""
        self._update = update
        self._history = deque(history, maxlen=self._staleness + 1)

    def next(self) -> Batch:
        """See :class:`Collector`."""
        version = max(0, self._update - self._staleness)
        shards = [self._player.play(self._update, s, self._history[0], version) for s in range(self._player.shards)]
        return concat_batches(shards, self._player.policy.members)

    def publish(self, weights: Weights) -> None:
        """See :class:`Collector`."""
        self._history.append(weights)
        self._update += 1

    def close(self) -> None:
        """Nothing to release."""


def pad_history(history: list[Weights], staleness: int) -> list[Weights]:
    """The first updates have no older weights than the first ones: repeat those."""
    missing = staleness + 1 - len(history)
    return [history[0]] * missing + history if missing > 0 else history[-(staleness + 1) :]


def set_threads(n: int) -> None:
    """Pin torch's threads: results of matrix products depend on how they are split."""
    torch.set_num_threads(n)
