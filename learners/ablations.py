"""What each part of the training is worth: variants of the default, on validation folds cut from training questions.

Nothing here looks at unseen questions, so nothing goes to the ledger, and hyperparameters may be chosen by it. Every
variant is fitted on the same folds with the same seeds; differences are paired by question. One file per (variant,
fold), written atomically: an interrupted table goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learners.collect import LocalCollector, ShardPlayer
from learners.crossfit import CrossFitConfig, config_for
from learners.learner import Learner
from learners.methods import play
from learners.training import TrainConfig, inner_fold, make_learner, run_sft, train
from rayrl.config import apply_overrides, parse_config
from rayrl.retrieval.compare import Results, Units, bootstrap, per_question, weighted
from rayrl.retrieval.folds import Fold, make_folds
from rayrl.retrieval.score import balanced_return
from rayrl.retrieval.task import Material, Task, build_task, load_material
from rayrl.retrieval.world import World
from rayrl.schemas import canonical_json, sha256_hex

DEFAULT = "the default"
CURVE_EVERY = 10


def validation_folds(config: CrossFitConfig, base: Path | None = None) -> list[Fold]:
    """The outer folds whose training questions are cut once more; draws and splits alternate."""
    _, pool, far = load_material(config.train.task, base)
    manifest = make_folds(
        pool, far, splits=config.splits, draws=config.draws, n_folds=config.folds, seed=config.fold_seed
    )
    ordered = sorted(manifest.folds, key=lambda f: (f.half, f.fold, f.draw, f.split))
    return ordered[: config.ablation_folds]


def variants(config: CrossFitConfig) -> dict[str, TrainConfig]:
    """The default and every ablation, each a whole config.

    Raises:
        ConfigError: an override names no key of the training config.
    """
    raw = config.train.model_dump(mode="json")
    out = {DEFAULT: config.train}
    for name, overrides in config.ablations.items():
        source = f"ablation {name!r}"
        out[name] = parse_config(apply_overrides(raw, overrides, source=source), TrainConfig, source=source)
    return out


def run_ablations(
    config: CrossFitConfig, *, base: Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Fit what is missing and return the table, the default first.

    Returns:
        Per variant: balanced return and its interval, returns by class, paired difference to the default with
        interval, folds. Intervals are bootstraps over questions.
    """
    torch.set_num_threads(config.train.collect.threads)
    folds = validation_folds(config, base)
    categories: list[str] = []
    fitted: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for name, wanted in variants(config).items():
        material, _, _ = load_material(wanted.task, base)
        categories = [q.category for q in material.questions]
        parts = [_fit_or_read(config, wanted, material, fold) for fold in folds]
        fitted[name] = {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}
        progress(f"{name}: {len(folds)} validation folds")
    return table(fitted, categories, len(folds))


def table(
    fitted: dict[str, dict[str, np.ndarray[Any, Any]]], categories: list[str], folds: int
) -> list[dict[str, Any]]:
    """Figures from rows (``question``, ``kind``, ``returns``) of every variant, in the order given."""
    units = {name: _units(rows, categories) for name, rows in fitted.items()}
    first = next(iter(units))
    out = []
    for name, unit in units.items():
        difference = Units(unit.values - units[first].values, unit.category)
        by_class = np.nanmean(unit.values, axis=0)
        out.append(
            {
                "name": name,
                "balanced": weighted(unit.values),
                "balanced_interval": bootstrap(unit, by="question"),
                "return_a": float(by_class[0]),
                "return_near_b": float(by_class[1]),
                "return_far_b": float(by_class[2]),
                "delta": weighted(difference.values) if name != first else 0.0,
                "delta_interval": bootstrap(difference, by="question") if name != first else None,
                "folds": folds,
            }
        )
    return out


def _units(rows: dict[str, np.ndarray[Any, Any]], categories: list[str]) -> Units:
    nothing = np.zeros(len(rows["kind"]))
    results = Results(rows["question"], rows["kind"], nothing.astype(np.int64), nothing, nothing, nothing, {})
    return per_question(results, rows["returns"].astype(np.float64), categories)


def _fit_or_read(
    config: CrossFitConfig, wanted: TrainConfig, material: Material, fold: Fold
) -> dict[str, np.ndarray[Any, Any]]:
    train_config = config_for(config.model_copy(update={"train": wanted}), fold)
    key = sha256_hex(canonical_json([train_config.semantic(), fold.model_dump(mode="json")]))[:16]
    path = Path(config.output) / "ablations" / f"{fold.name}-{key}.npz"
    if not path.exists():
        task = _validation_task(material, train_config, fold)
        learner, player = make_learner(train_config, task.train)
        run_sft(learner, train_config)
        staleness = train_config.collect.staleness
        train(learner, LocalCollector(player, staleness), staleness=staleness)
        outcome = play(learner.policy, task.test, train_config.mdp, plan_weight=None)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp.npz")
        np.savez_compressed(
            temporary,
            question=task.test.question.numpy(),
            kind=task.test.kind.numpy(),
            returns=outcome.returns.numpy().astype(np.float32),
        )
        temporary.replace(path)
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def _validation_task(material: Material, config: TrainConfig, fold: Fold) -> Task:
    return build_task(material, config.task, inner_fold(material, fold), seed=config.seed, mdp=config.mdp)


def learning_curves(config: CrossFitConfig, *, base: Path | None = None) -> dict[str, list[list[float]]]:
    """Balanced return of the networks alone over updates, on training and on validation questions of one fold.

    Lines: the default, the default without dropout in its update, and the original (``seed``) update.
    """
    fold = validation_folds(config, base)[0]
    material, _, _ = load_material(config.train.task, base)
    train_config = config_for(config, fold)
    task = _validation_task(material, train_config, fold)
    curves: dict[str, list[list[float]]] = {}
    for name, changes in _curve_variants(train_config):
        learner, player = make_learner(changes, task.train)
        run_sft(learner, changes)
        curves |= _played(learner, player, {f"{name}, training": task.train, f"{name}, validation": task.test}, changes)
    return curves


def _played(
    learner: Learner, player: ShardPlayer, worlds: dict[str, World], config: TrainConfig
) -> dict[str, list[list[float]]]:
    points: dict[str, list[list[float]]] = {name: [] for name in worlds}

    def look(update: int, _metrics: object = None, _history: object = None) -> None:
        if update % CURVE_EVERY == 0:
            for name, world in worlds.items():
                value = balanced_return(play(learner.policy, world, config.mdp).returns, world.kind)
                if value is not None:
                    points[name].append([float(update), value])

    look(0)
    train(learner, LocalCollector(player, 0), on_update=look)
    return points


def _curve_variants(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    def changed(**values: Any) -> TrainConfig:
        return config.model_copy(update={"rl": config.rl.model_copy(update=values)})

    yield "TRACE", config
    if config.rl.dropout:
        yield "no dropout in the update", changed(dropout=False)
    yield "seed update", changed(estimator="seed")
