"""One training run without Ray or files: build, clone, freeze, update; a callback sees every step.

:func:`build_run` turns a config into worlds and a learner, :func:`train` runs the loop over a collector. Both are used
by the job, the sweep, the evaluation and the quickstart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from learners.collect import CollectConfig, Collector, ShardPlayer, Weights, check_shards, pad_history
from learners.learner import Learner, RlConfig, SftConfig
from rayrl.config import Section, operational
from rayrl.errors import ConfigError
from rayrl.retrieval.folds import Fold, make_folds
from rayrl.retrieval.mdp import MdpConfig, RetrievalEnv, dynamic_dim
from rayrl.retrieval.policy import MeanPolicy, PolicyConfig, PolicySpec, RetrievalPolicy
from rayrl.retrieval.pools import MemoryPool
from rayrl.retrieval.regressions import COLUMN as GAIN
from rayrl.retrieval.rollout import random_orders, rollout
from rayrl.retrieval.score import Score, score
from rayrl.retrieval.task import Material, Task, TaskConfig, build_task, load_material
from rayrl.retrieval.world import World
from rayrl.schemas import canonical_json, sha256_hex, step_seed
from rayrl.tracking import TrackingConfig

SCRIPTED_ORDERS = 6
"""Random candidate orders per question that the expert is shown on (scripted queues)."""


class FoldConfig(Section):
    """Which part of the questions is learned from and which is kept unseen."""

    split: Literal["known", "unseen"] = "known"
    """Unseen questions of known categories, or of unseen categories."""
    draw: int = Field(0, ge=0)
    """Which random split of the categories into memory halves."""
    half: Literal[0, 1] = 0
    """Which half is in memory."""
    fold: int = 0
    """Which fifth is unseen."""
    folds: int = Field(5, ge=2)
    """Number of folds."""
    inside: Literal["half", "all"] = "half"
    """``half``: half of the categories are in memory, so that near-domain questions without an answer exist.
    ``all``: everything is (service); random memories then teach what "not inside" looks like."""
    validation: bool = False
    """Cut a validation quarter out of the training questions and evaluate on that; the fold's unseen questions are not
    looked at. For every choice of a hyperparameter (sweeps always set it)."""
    seed: int = 0
    """Of the fold manifest."""


class TrainConfig(Section):
    """A training run."""

    name: str = "train"
    """Name of the run."""
    output: str = operational("runs/train")
    """Run directory."""
    seed: int = 0
    """Seeds weights, shuffles, rows, orders and actions."""
    task: TaskConfig = TaskConfig()
    """Memory, questions, features."""
    queue: Literal["ranked", "scripted"] = "ranked"
    """``ranked``: the real top-k of the memory. ``scripted``: right candidate at a random place among distractors."""
    fold: FoldConfig = FoldConfig()
    """Train/unseen split."""
    mdp: MdpConfig = MdpConfig()
    """Decision process and rewards."""
    policy: PolicyConfig = PolicyConfig()
    """Network."""
    sft: SftConfig = SftConfig()
    """Behaviour cloning."""
    rl: RlConfig = RlConfig()
    """Policy gradient."""
    collect: CollectConfig = CollectConfig()
    """Rollouts."""
    evaluate_every: int = operational(25, ge=0)
    """Updates between evaluations on the training memory's own rows (never on unseen questions)."""
    checkpoint_every: int = operational(50, ge=0)
    """Updates between checkpoints; 0 writes only the last."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics."""

    def fingerprint(self) -> str:
        """Hash of everything that changes results."""
        return sha256_hex(canonical_json(self.semantic()))


@dataclass(frozen=True)
class Run:
    """What a training run works on."""

    config: TrainConfig
    task: Task
    fold: Fold
    material: Material
    learner: Learner
    player: ShardPlayer

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        return {
            "fingerprint": self.config.fingerprint(),
            "encoder": self.material.encoder.identity(),
            "features": sha256_hex(canonical_json([self.task.train.static_names, self.task.train.candidate_names])),
        }


def pick_fold(config: FoldConfig, pool: MemoryPool, far: MemoryPool) -> Fold:
    """The fold a config names.

    Raises:
        ConfigError: the fold number is out of range.
    """
    if not 0 <= config.fold < config.folds:
        raise ConfigError(f"fold.fold={config.fold} must be within 0..{config.folds - 1}")
    manifest = make_folds(
        pool, far, splits=(config.split,), draws=config.draw + 1, n_folds=config.folds, seed=config.seed
    )
    fold = next(f for f in manifest.folds if (f.draw, f.half, f.fold) == (config.draw, config.half, config.fold))
    if config.inside == "all":
        fold = fold.model_copy(update={"inside": tuple(sorted({m.category for m in pool.memories}))})
    return fold


def inner_fold(material: Material, fold: Fold, *, parts: int = 4, part: int = 0) -> Fold:
    """Cut a validation part out of the training questions, in the same manner as the outer split."""
    category = {q.id: q.category for q in material.questions}
    far = {q.id for q in material.questions if q.domain not in material.domains}
    rng = np.random.default_rng([7, fold.draw, fold.half, fold.fold])
    ids = list(fold.train)
    number = dict(zip(ids, (rng.permutation(len(ids)) % parts).tolist(), strict=True))
    if fold.split == "unseen":
        names = sorted({category[i] for i in ids if i not in far})
        of_category = dict(zip(names, (rng.permutation(len(names)) % parts).tolist(), strict=True))
        number.update({i: of_category[category[i]] for i in ids if i not in far})
    held = tuple(i for i in ids if number[i] == part)
    rest = tuple(i for i in ids if number[i] != part)
    return fold.model_copy(update={"train": rest, "test": held})


def build_run(config: TrainConfig, base: Path | None = None) -> Run:
    """Load data, cut the fold, compute features, make policy and learner."""
    check_shards(config.rl, config.collect)
    torch.set_num_threads(config.collect.threads)
    material, pool, far = load_material(config.task, base)
    fold = pick_fold(config.fold, pool, far)
    if config.fold.validation:
        fold = inner_fold(material, fold)
    if config.queue == "scripted":
        from rayrl.retrieval.scripted import scripted_task

        task = scripted_task(material, config.task, fold, seed=config.seed)
    else:
        task = build_task(material, config.task, fold, seed=config.seed, mdp=config.mdp)
    learner, player = make_learner(config, task.train)
    return Run(config, task, fold, material, learner, player)


def make_learner(config: TrainConfig, world: World) -> tuple[Learner, ShardPlayer]:
    """Policy, learner and local player for a training world."""
    column = _plan_column(config, world)
    spec = PolicySpec(
        static_dim=world.static.shape[1],
        dynamic_dim=dynamic_dim(world, config.mdp.mode, config.mdp.actions),
        actions=config.mdp.actions,
        plan_column=column,
        **config.policy.model_dump(),
    )
    policy = RetrievalPolicy(spec, seed=config.seed).eval()
    learner = Learner(policy, world, config.mdp, config.sft, config.rl, config.seed)
    player = ShardPlayer(world, config.mdp, spec, config.rl, config.collect, config.seed, config.queue == "scripted")
    return learner, player


def _plan_column(config: TrainConfig, world: World) -> int | None:
    """Where the expected gain of group R stands in an observation.

    Raises:
        ConfigError: ``policy.plan_weight`` without the group, or where a plan made beforehand is not all there is.
    """
    has_gain = GAIN in world.candidate_names
    if has_gain and config.mdp.mode == "observable" and config.mdp.actions == 2:
        features = dynamic_dim(world, config.mdp.mode, config.mdp.actions) - world.candidate.shape[2]
        return features + world.candidate_names.index(GAIN)
    if config.policy.plan_weight or has_gain:
        raise ConfigError(
            "policy.plan_weight and feature group R go together, with mdp.mode=observable and mdp.actions=2; here "
            f"policy.plan_weight={config.policy.plan_weight}, task.groups={config.task.groups}, "
            f"mdp.mode={config.mdp.mode}, mdp.actions={config.mdp.actions}"
        )
    return None


def run_sft(learner: Learner, config: TrainConfig) -> dict[str, float]:
    """Clone the expert (scripted queues: on freshly ordered candidates) and freeze the reference."""
    world = learner.world
    orders: list[torch.Tensor | None] = [None]
    if config.queue == "scripted":
        seeds = [step_seed(config.seed, i) for i in range(SCRIPTED_ORDERS)]
        orders = [random_orders(world.rows, world.k, world.right, seed) for seed in seeds]
    metrics = learner.fit_sft(orders=orders)
    learner.freeze_reference()
    return metrics


def train(
    learner: Learner,
    collector: Collector,
    *,
    staleness: int = 0,
    history: list[Weights] | None = None,
    on_update: Callable[[int, dict[str, float], list[Weights]], None] | None = None,
) -> None:
    """Run the remaining updates; ``history`` continues a restored run.

    ``on_update(update, metrics, history)`` is called after every update with the weights a checkpoint needs.
    """
    weights = pad_history(history or [learner.weights()], staleness)
    collector.start(learner.state.updates, weights)
    while learner.state.updates < learner.rl.updates:
        batch = collector.next()
        metrics = learner.update(batch)
        weights = [*weights[1:], learner.weights()]
        collector.publish(weights[-1])
        if on_update is not None:
            on_update(learner.state.updates, metrics, weights)


def evaluate(
    policy: RetrievalPolicy,
    world: World,
    mdp: MdpConfig,
    *,
    plan_weight: float | None = None,
    orders: Any = None,
) -> Score:
    """Greedy episodes of the (mean) policy on every row; ``plan_weight`` as in :class:`MeanPolicy`."""
    mean = MeanPolicy(policy, plan_weight=plan_weight)
    batch = rollout(mean, RetrievalEnv(world, mdp), torch.arange(world.rows), order=orders)
    return score(batch.outcome, world.kind)
