"""Ray actors for training: rollout workers that play shards, a collector that pipelines them, the learner as an actor.

Bits do not depend on the number of workers: a shard is a pure function of (update, shard, weights), and weights of a
batch are fixed by the staleness, not by who is fast. With staleness S, batches u..u+S are in flight while update u is
computed. A worker that dies is replaced and its shard is played again; after ``MAX_DEATHS`` the run stops with the
reason. Every wait has a limit.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import ray
import torch

from learners.checkpoint import restore_checkpoint, save_checkpoint
from learners.collect import ShardPlayer, Weights
from learners.learner import Learner
from learners.training import TrainConfig, make_learner, run_sft
from rayrl.errors import WorkerDiedError
from rayrl.retrieval.rollout import Batch, concat_batches
from rayrl.retrieval.world import World

WAIT_S = 300.0
MAX_DEATHS = 3


class RolloutWorker:
    """Plays shards; the world is sent once. Torch threads are pinned so that results match local execution."""

    def __init__(self, world: World, config: TrainConfig) -> None:
        torch.set_num_threads(config.collect.threads)
        _, self._player = make_learner(config, world)

    def play(self, update: int, shard: int, weights: Weights, version: int) -> Batch:
        """See :meth:`ShardPlayer.play`."""
        return self._player.play(update, shard, weights, version)

    def ready(self) -> bool:
        """Answers once the worker is up."""
        return True


class LearnerActor:
    """The learner behind Ray: ``fit_sft``, ``update``, ``weights``, ``save``, ``restore``."""

    def __init__(self, world: World, config: TrainConfig, identity: dict[str, Any]) -> None:
        torch.set_num_threads(config.collect.threads)
        self._config = config
        self._identity = identity
        self._learner, _ = make_learner(config, world)

    def fit_sft(self) -> dict[str, float]:
        """Clone the expert and freeze the reference."""
        return run_sft(self._learner, self._config)

    def update(self, batch: Batch) -> dict[str, float]:
        """One gradient step; the batch says which policy version acted."""
        return self._learner.update(batch)

    def weights(self) -> tuple[int, Weights]:
        """Version and weights."""
        return self._learner.state.version, self._learner.weights()

    def save(self, folder: str, history: list[Weights]) -> str:
        """Write a checkpoint; returns its path."""
        return str(save_checkpoint(Path(folder), self._learner, history, self._identity))

    def restore(self, checkpoint: str) -> list[Weights]:
        """Continue from a checkpoint; returns the weight history."""
        return restore_checkpoint(Path(checkpoint), self._learner, self._identity)

    def learner(self) -> Learner:
        """The learner itself, for a driver in the same process group (tests)."""
        return self._learner


class RayCollector:
    """See :class:`learners.collect.Collector`; shards go to whichever worker is next in turn."""

    def __init__(self, player: ShardPlayer, config: TrainConfig) -> None:
        self._config = config
        self._shards = config.collect.shards
        self._staleness = config.collect.staleness
        self._members = player.policy.members
        if not ray.is_initialized():
            ray.init(num_cpus=None, include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._world = ray.put(player.world)
        self._actor = ray.remote(num_cpus=0, max_restarts=0)(RolloutWorker)
        self._workers = [self._spawn() for _ in range(max(1, min(config.collect.workers, self._shards)))]
        self._flying: deque[list[tuple[int, int, Any, int, Any]]] = deque()
        self._history: deque[Weights] = deque(maxlen=self._staleness + 1)
        self._update = 0
        self._deaths = 0

    def start(self, update: int, history: list[Weights]) -> None:
        """Submit batches ``update .. update + staleness``: all whose weights are already known."""
        self._update = update
        self._history = deque(history, maxlen=self._staleness + 1)
        self._flying.clear()
        for ahead, weights in enumerate(history):
            self._submit(update + ahead, weights)

    def next(self) -> Batch:
        """Wait for the oldest batch in flight."""
        batch = [self._fetch(*call) for call in self._flying.popleft()]
        return concat_batches(batch, self._members)

    def publish(self, weights: Weights) -> None:
        """New weights: batch ``update + 1 + staleness`` can start."""
        self._history.append(weights)
        self._update += 1
        self._submit(self._update + self._staleness, weights)

    def close(self) -> None:
        """Stop the workers; Ray itself is left running."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []

    def _submit(self, update: int, weights: Weights) -> None:
        if update >= self._config.rl.updates:
            return
        stored = ray.put(weights)
        version = max(0, update - self._staleness)
        calls = []
        for shard in range(self._shards):
            worker = self._workers[shard % len(self._workers)]
            calls.append((update, shard, stored, version, worker.play.remote(update, shard, stored, version)))
        self._flying.append(calls)

    def _fetch(self, update: int, shard: int, weights: Any, version: int, reference: Any) -> Batch:
        while True:
            try:
                batch: Batch = ray.get(reference, timeout=WAIT_S)
                return batch
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                self._deaths += 1
                if self._deaths > MAX_DEATHS:
                    raise WorkerDiedError(
                        f"rollout workers died or stalled {self._deaths} times; last: {type(error).__name__} at update "
                        f"{update}, shard {shard}. The newest checkpoint can be resumed",
                        code="rollout_worker_died",
                        stage="worker",
                    ) from None
                slot = shard % len(self._workers)
                ray.kill(self._workers[slot])
                self._workers[slot] = self._spawn()
                reference = self._workers[slot].play.remote(update, shard, weights, version)

    def _spawn(self) -> Any:
        return self._actor.options(runtime_env=_runtime_env()).remote(self._world, self._config)


def _runtime_env() -> dict[str, Any]:
    """One arithmetic thread per worker process, before any library reads it."""
    return {"env_vars": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}}
