"""The quickstart's training stage: a policy on the real FAQ memory in about half a minute, with its rivals beside it.

One fold, unseen questions of known categories, observable mode, 2 actions. The full cross-fit with intervals is
``rayrl evaluate-policy --full``.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from rich.table import Table

from learners.collect import LocalCollector
from learners.methods import first_step_probability, play
from learners.training import Run, TrainConfig, build_run, run_sft, train
from rayrl.config import find_config, load_config
from rayrl.retrieval import baselines as base
from rayrl.retrieval.compare import Units, bootstrap, weighted
from rayrl.retrieval.gate import export_gate
from rayrl.retrieval.mdp import Outcome
from rayrl.retrieval.oracle import oracle_returns
from rayrl.retrieval.plans import all_plans, play_plans
from rayrl.retrieval.pools import Kind
from rayrl.retrieval.regressions import without_gain
from rayrl.retrieval.report import LABELS
from rayrl.retrieval.score import balanced_return, score
from rayrl.retrieval.world import class_weight_per_row

CONFIG = "train/quickstart"
TRAINED = LABELS["trace_plan"]
"""The policy as it decides in service."""
COLUMNS = ("balanced", "return_a", "return_near_b", "return_far_b", "hit_rate", "retrieval_rate_near_b")


class _OutOfTimeError(Exception):
    """Raised inside the update callback to leave the loop."""


def quickstart_training(out_dir: Path, *, seconds_budget: float = 30.0) -> dict[str, Any]:
    """Train and compare; returns the table's rows, seconds per phase and where the gate was written.

    The budget bounds the policy-gradient phase: when it is spent, training stops after the current update and the
    result says so (``updates`` below ``planned_updates``).
    """
    began = time.monotonic()
    config = load_config(find_config(CONFIG), TrainConfig, [f"output={orjson.dumps(str(out_dir)).decode()}"])
    run = build_run(config)
    data_seconds = time.monotonic() - began
    task, mdp, learner = run.task, config.mdp, run.learner
    world, plans = task.test, all_plans(task.test.k, config.mdp.actions)
    weight = class_weight_per_row(task.train, config.rl.class_weights)
    threshold = base.tune_threshold(
        task.target_train, mdp, class_weight_per_row(task.target_train, config.rl.class_weights)
    )
    logistic = base.PlannedLogistic().fit(without_gain(task.train), weight)
    planned = logistic.plan(without_gain(world), mdp)
    outcomes: dict[str, Outcome] = {
        "no retrieval": play_plans(world, mdp, base.fixed_count(world, 0), plans),
        "fixed .40": play_plans(world, mdp, base.threshold_plan(world, base.FIXED_THRESHOLD, 2.0), plans),
        "tuned threshold": play_plans(world, mdp, base.threshold_plan(world, threshold.gate, threshold.bar), plans),
        "planned logistic": play_plans(world, mdp, planned, plans),
    }
    run_sft(learner, config)
    outcomes["SFT"] = play(learner.policy, world, mdp)

    def on_update(update: int, _metrics: dict[str, float], _history: object) -> None:
        if time.monotonic() - began > seconds_budget and update < config.rl.updates:
            raise _OutOfTimeError

    with contextlib.suppress(_OutOfTimeError):
        train(learner, LocalCollector(run.player, config.collect.staleness), on_update=on_update)
    outcomes[LABELS["sft_trace"]] = play(learner.policy, world, mdp)
    outcomes[TRAINED] = play(learner.policy, world, mdp, plan_weight=None)
    oracle = oracle_returns(world, mdp)
    units = {name: _units(o.returns, world.kind) for name, o in outcomes.items()}
    rows = [
        {
            "policy": name,
            **score(o, world.kind).model_dump(),
            "balanced_interval": bootstrap(units[name], by="question"),
        }
        for name, o in outcomes.items()
    ]
    rows.append({"policy": "oracle", **_oracle_row(oracle, world.kind)})
    out_dir.mkdir(parents=True, exist_ok=True)
    gate = export_gate(out_dir / "gate", run.material, config.task, mdp, task.view, learner.policy)
    result: dict[str, Any] = {
        "mode": mdp.mode,
        "actions": mdp.actions,
        "split": config.fold.split,
        "unseen_questions": world.rows,
        "rows": rows,
        "differences": {
            f"{TRAINED} - {rival}": _difference(units[TRAINED], units[rival])
            for rival in ("tuned threshold", "planned logistic", "SFT")
        },
        "updates": learner.state.updates,
        "planned_updates": config.rl.updates,
        "env_steps": learner.state.env_steps,
        "gate": str(gate),
        "example": _example(run, outcomes[TRAINED]),
        "seconds": {"data": round(data_seconds, 2), "total": round(time.monotonic() - began, 2)},
        "note": "one fold, one memory; intervals are over its questions alone. All folds: rayrl evaluate-policy --full",
    }
    (out_dir / "quickstart_training.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    return result


def _example(run: Run, played: Outcome) -> str | None:
    """The unseen question whose answer the policy fetches most surely: what to ask the gate first."""
    world = run.task.test
    probability = first_step_probability(run.learner.policy, world, run.config.mdp)
    probability = torch.where(played.right & (played.hit >= 1), probability, torch.zeros_like(probability))
    best = int(probability.argmax())
    return run.material.questions[int(world.question[best])].text if probability[best] > 0 else None


def training_table(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal."""
    title = f"{result['unseen_questions']} unseen questions, {result['mode']} mode, {result['actions']} actions"
    headers = [c.replace("return_", "").replace("_", " ") for c in COLUMNS]
    table = Table("policy", headers[0], "95% interval", *headers[1:], title=title)
    for row in result["rows"]:
        figures = ["-" if row.get(c) is None else f"{row[c]:.2f}" for c in COLUMNS]
        low, high = row["balanced_interval"]
        table.add_row(row["policy"], figures[0], f"[{low:.2f}, {high:.2f}]", *figures[1:])
    return table


def difference_lines(result: dict[str, Any]) -> list[str]:
    """The paired differences of the trained policy as sentences' worth of text."""
    return [
        f"{name}: {d['mean']:+.2f}  95% interval [{d['interval'][0]:+.2f}, {d['interval'][1]:+.2f}]"
        for name, d in result["differences"].items()
    ]


def _units(returns: torch.Tensor, kind: torch.Tensor) -> Units:
    values = np.full((returns.shape[0], 3), np.nan)
    values[np.arange(returns.shape[0]), kind.numpy()] = returns.numpy()
    return Units(values, np.full(returns.shape[0], "question"))


def _difference(mine: Units, other: Units) -> dict[str, Any]:
    """Paired by question: the same rows in the same order."""
    units = Units(mine.values - other.values, mine.category)
    return {"mean": weighted(units.values), "interval": bootstrap(units, by="question")}


def _oracle_row(returns: torch.Tensor, kind: torch.Tensor) -> dict[str, Any]:
    by_kind = [float(returns[kind == int(k)].mean()) for k in Kind]
    return {
        "balanced": balanced_return(returns, kind),
        "balanced_interval": bootstrap(_units(returns, kind), by="question"),
        "return_a": by_kind[0],
        "return_near_b": by_kind[1],
        "return_far_b": by_kind[2],
    }
