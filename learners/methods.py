"""Every method a report compares, fitted on one fold and played on its unseen questions.

Rules and regressions come from :mod:`rayrl.retrieval.baselines`, learned policies from :mod:`learners.training`. What
has a free number (cuts, shifts) tunes it on a validation part of the training questions, never on the test questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learners.collect import LocalCollector
from learners.exact import fit_exact
from learners.learner import Learner
from learners.training import TrainConfig, inner_fold, make_learner, run_sft, train
from rayrl.retrieval import baselines as base
from rayrl.retrieval.folds import Fold
from rayrl.retrieval.mdp import MdpConfig, Outcome, RetrievalEnv
from rayrl.retrieval.oracle import oracle_returns
from rayrl.retrieval.plans import all_plans, counts_as_plans, play_plans
from rayrl.retrieval.policy import MeanPolicy, RetrievalPolicy
from rayrl.retrieval.regressions import without_gain
from rayrl.retrieval.rollout import rollout
from rayrl.retrieval.task import Material, Task, build_task
from rayrl.retrieval.world import World, class_weight_per_row

METHODS = (
    "no_retrieval",
    "always_one",
    "fixed_040",
    "tuned_threshold",
    "logistic_cut",
    "logistic_plan",
    "sft",
    "sft_shifted",
    "sft_seed",
    "sft_plan",
    "sft_trace",
    "trace_plan",
    "exact_gradient",
    "perfect_gate",
)
"""In the order of the report; ``oracle`` is a bound and has returns only. ``sft_plan`` and ``trace_plan`` are the clone
and the trained policy deciding together with the planned regressions (``policy.plan_weight``), the others named after
learning are networks alone."""


@dataclass(frozen=True)
class Fitted:
    """Outcomes on the unseen rows by method, and what the report needs besides."""

    outcomes: dict[str, Outcome]
    oracle: Tensor
    """``[R]`` optimal returns of the unseen rows."""
    gate_probability: Tensor
    """``[R]`` P(retrieve first) of SFT+TRACE, as it decides in service; for the reliability plot."""
    logistic_probability: Tensor
    """``[R]`` P(class A) of the logistic regression."""
    tuned: dict[str, float]
    """Numbers that were tuned, by name."""


def fit_methods(
    material: Material, config: TrainConfig, fold: Fold, task: Task, *, methods: Sequence[str] = METHODS
) -> Fitted:
    """Fit and play ``methods`` on one fold.

    Args:
        material: embedded pools.
        config: hyperparameters of the learned policies.
        fold: the outer fold.
        task: its worlds.
        methods: names out of :data:`METHODS`.
    """
    mdp, world = config.mdp, task.test
    plans = all_plans(world.k, mdp.actions)
    rows_weight = class_weight_per_row(task.target_train, config.rl.class_weights)
    all_weight = class_weight_per_row(task.train, config.rl.class_weights)
    out: dict[str, Outcome] = {}
    tuned: dict[str, float] = {}

    def plan(name: str, numbers: Tensor) -> None:
        if name in methods:
            out[name] = play_plans(world, mdp, numbers, plans)

    def count(name: str, numbers: Tensor) -> None:
        plan(name, counts_as_plans(numbers, plans))

    count("no_retrieval", base.fixed_count(world, 0))
    count("always_one", base.fixed_count(world, 1))
    count("fixed_040", base.threshold_plan(world, base.FIXED_THRESHOLD, 2.0))
    if "tuned_threshold" in methods:
        choice = base.tune_threshold(task.target_train, mdp, rows_weight)
        tuned["threshold_gate"], tuned["threshold_bar"] = choice.gate, choice.bar
        count("tuned_threshold", base.threshold_plan(world, choice.gate, choice.bar))
    # the regressions never see what they say themselves (group R)
    plain = without_gain(world)
    logistic = base.PlannedLogistic().fit(without_gain(task.train), all_weight)
    probability = logistic.gate(plain)
    plan("logistic_plan", logistic.plan(plain, mdp))
    plan("perfect_gate", logistic.perfect_gate(plain, mdp))
    inner = None
    if {"logistic_cut", "sft_shifted"} & set(methods):
        inner = build_task(
            material,
            config.task,
            inner_fold(material, fold),
            seed=config.seed,
            wide_test=True,
            mdp=config.mdp,
        )
    if "logistic_cut" in methods and inner is not None:
        weight = class_weight_per_row(inner.train, config.rl.class_weights)
        plain_inner = base.PlannedLogistic().fit(without_gain(inner.train), weight)
        held = plain_inner.gate(without_gain(inner.test))
        cut, n = base.tune_cut(held, inner.test, mdp, class_weight_per_row(inner.test, config.rl.class_weights))
        tuned["logistic_cut"], tuned["logistic_count"] = cut, float(n)
        count("logistic_cut", base.cut_plan(probability, cut, n))
    gate = _learned(config, task, inner, methods, out, tuned)
    return Fitted(out, oracle_returns(world, mdp), gate, torch.from_numpy(probability), tuned)


def _learned(
    config: TrainConfig,
    task: Task,
    inner: Task | None,
    methods: Sequence[str],
    out: dict[str, Outcome],
    tuned: dict[str, float],
) -> Tensor:
    mdp, world, weight = config.mdp, task.test, config.policy.plan_weight
    learner, player = make_learner(config, task.train)
    run_sft(learner, config)
    if "sft" in methods:
        out["sft"] = play(learner.policy, world, mdp)
    if "sft_plan" in methods and weight:
        out["sft_plan"] = play(learner.policy, world, mdp, plan_weight=weight)
    start = learner.weights()
    if "sft_shifted" in methods and inner is not None:
        shifts = tune_shifts(fit_sft_only(config, inner.train).policy, inner.test, config)
        tuned["shift_start"], tuned["shift_continue"] = shifts
        out["sft_shifted"] = play(learner.policy, world, mdp, shifts)
    train(learner, LocalCollector(player, config.collect.staleness), staleness=config.collect.staleness)
    out["sft_trace"] = play(learner.policy, world, mdp)
    if "trace_plan" in methods and weight:
        out["trace_plan"] = play(learner.policy, world, mdp, plan_weight=weight)
    gate = first_step_probability(learner.policy, world, mdp)
    if "sft_seed" in methods:
        rl = config.rl.model_copy(update={"estimator": "seed"})
        other, other_player = make_learner(config.model_copy(update={"rl": rl}), task.train)
        other.policy.load_state_dict(start)
        other.freeze_reference()
        train(other, LocalCollector(other_player, config.collect.staleness), staleness=config.collect.staleness)
        out["sft_seed"] = play(other.policy, world, mdp)
    if "exact_gradient" in methods and mdp.actions == 2:
        other, _ = make_learner(config, task.train)
        other.policy.load_state_dict(start)
        fit_exact(other, steps=config.rl.updates)
        out["exact_gradient"] = play(other.policy, world, mdp)
    return gate


def fit_sft_only(config: TrainConfig, world: World) -> Learner:
    """Behaviour cloning alone."""
    learner, _ = make_learner(config, world)
    run_sft(learner, config)
    return learner


def play(
    policy: RetrievalPolicy,
    world: World,
    mdp: MdpConfig,
    shifts: tuple[float, float] = (0.0, 0.0),
    plan_weight: float | None = 0.0,
) -> Outcome:
    """Greedy episodes of the mean policy on every row: the network alone, unless ``plan_weight`` (None: the spec's)."""
    mean = MeanPolicy(policy, shifts, plan_weight)
    return rollout(mean, RetrievalEnv(world, mdp), torch.arange(world.rows)).outcome


def first_step_probability(policy: RetrievalPolicy, world: World, mdp: MdpConfig) -> Tensor:
    """``[R]`` probability that the first action is retrieve."""
    mean = MeanPolicy(policy)
    with torch.no_grad():
        dynamic = RetrievalEnv(world, mdp).reset(torch.arange(world.rows))
        return torch.softmax(mean.act_logits(mean.project(world.static), dynamic), -1)[:, 0]


def tune_shifts(policy: RetrievalPolicy, world: World, config: TrainConfig) -> tuple[float, float]:
    """Logit shifts for starting and for going on that do best on validation rows (a grid, then played)."""
    weight = class_weight_per_row(world, config.rl.class_weights)
    best, choice = -np.inf, (0.0, 0.0)
    grid_start = np.arange(-2.0, 3.01, 0.25).tolist()
    grid_go = np.arange(-5.0, 2.01, 0.5).tolist()
    if config.mdp.actions == 2:
        returns, margins = base.plan_table(world, config.mdp), retrieve_margins(policy, world, config.mdp)
        for start in grid_start:
            for go in grid_go:
                total = float((returns.gather(1, counts_from(margins, start, go)[:, None])[:, 0] * weight).sum())
                if total > best + 1e-9:
                    best, choice = total, (start, go)
        return choice
    for start in grid_start[::2]:
        for go in grid_go[::2]:
            total = float((play(policy, world, config.mdp, (start, go)).returns * weight).sum())
            if total > best + 1e-9:
                best, choice = total, (start, go)
    return choice


def retrieve_margins(policy: RetrievalPolicy, world: World, mdp: MdpConfig) -> Tensor:
    """``[R, K]`` the network's log-odds of retrieving at each place, along the always-retrieve path (2 actions)."""
    env, mean = RetrievalEnv(world, mdp), MeanPolicy(policy, plan_weight=0.0)
    dynamic = env.reset(torch.arange(world.rows))
    margins = []
    with torch.no_grad():
        projected = mean.project(world.static)
        for _ in range(world.k):
            logits = mean.act_logits(projected, dynamic)
            margins.append(logits[:, 0] - logits[:, 1])
            env.step(torch.zeros(world.rows, dtype=torch.int64))
            dynamic = env.observe()
    return torch.stack(margins, dim=1)


def counts_from(margins: Tensor, start: float, go: float) -> Tensor:
    """Number of retrievals of a greedy policy with shifted cut-offs; ``[R]``."""
    on = torch.cat([margins[:, :1] > start, margins[:, 1:] > go], dim=1)
    return on.long().cumprod(1).sum(1)
