"""Cross-fit evaluation: every method on every fold, one file per fold, resumable.

Results of a fold are arrays over its unseen rows (:data:`FIELDS` per method), kept as ``fits/<fold>.npz`` and written
atomically; a finished fold is never fitted again. Looking at unseen questions is recorded before the first fold is
fitted: the ledger says who looked, when, at which folds, with which config.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import torch
from pydantic import Field

from learners.methods import METHODS, Fitted, fit_methods
from learners.training import TrainConfig
from rayrl.config import Section, operational
from rayrl.errors import ConfigError, RunConflictError
from rayrl.retrieval.folds import Fold, FoldManifest, make_folds
from rayrl.retrieval.mdp import Outcome
from rayrl.retrieval.task import build_task, load_material
from rayrl.schemas import canonical_json, sha256_hex

FIELDS = ("returns", "right", "retrievals", "held", "hit", "distractor", "saw_distractor", "forgets", "steps", "block")


class CrossFitConfig(Section):
    """A cross-fit evaluation."""

    name: str = "crossfit"
    """Name of the evaluation."""
    output: str = operational("runs/crossfit")
    """Directory of results and report."""
    ledger: str = operational("runs/looks.jsonl")
    """Every look at unseen questions is appended here; the report prints it."""
    purpose: str = operational("evaluation")
    """What the look is for; stands in the ledger."""
    train: TrainConfig = TrainConfig()
    """Hyperparameters, data, features."""
    splits: tuple[Literal["known", "unseen"], ...] = ("known", "unseen")
    """Unseen questions of known categories, of unseen categories, or both."""
    draws: int = Field(5, ge=1)
    """Random memory draws; each has its own training seed."""
    folds: int = Field(5, ge=2)
    """Folds per half."""
    fold_seed: int = 0
    """Of the fold manifest."""
    methods: tuple[str, ...] = METHODS
    """Methods fitted on every fold."""
    first_draw_methods: tuple[str, ...] = ()
    """Further methods, on the first draw only."""
    holdout_for_unseen: bool = True
    """Hide whole categories from the topic prior of training rows in the ``unseen`` split."""
    max_folds: int = Field(0, ge=0)
    """Fit only so many folds per split (smoke runs); 0 fits all."""
    ablations: dict[str, list[str]] = operational(default_factory=dict)
    """Name to overrides of ``train`` (:mod:`learners.ablations`); played on validation folds, never on unseen ones."""
    ablation_folds: int = operational(8, ge=1)
    """Validation folds per ablation."""

    def fingerprint(self) -> str:
        """Hash of everything that changes results."""
        return sha256_hex(canonical_json(self.semantic()))


def run_crossfit(
    config: CrossFitConfig,
    *,
    base: Path | None = None,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[str], None] = lambda _: None,
) -> FoldManifest:
    """Fit all folds that are not there yet.

    ``part`` (i, n) takes every n-th fold from the i-th on, so that n processes can share one directory.

    Raises:
        RunConflictError: the directory holds another evaluation.
        ConfigError: an unknown method.
    """
    unknown = set(config.methods + config.first_draw_methods) - set(METHODS)
    if unknown:
        raise ConfigError(f"unknown methods {sorted(unknown)}; known: {', '.join(METHODS)}")
    torch.set_num_threads(config.train.collect.threads)
    output = Path(config.output)
    fits = output / "fits"
    fits.mkdir(parents=True, exist_ok=True)
    material, pool, far = load_material(config.train.task, base)
    manifest = make_folds(
        pool, far, splits=config.splits, draws=config.draws, n_folds=config.folds, seed=config.fold_seed
    )
    _claim(output, config, manifest)
    folds = chosen_folds(config, manifest)
    todo = [f for f in folds[part[0] :: part[1]] if not (fits / f"{f.name}.npz").exists()]
    if todo:
        record_look(Path(config.ledger), config, manifest, todo)
    began = time.monotonic()
    for number, fold in enumerate(todo, start=1):
        train = config_for(config, fold)
        task = build_task(material, train.task, fold, seed=train.seed, mdp=train.mdp)
        methods = config.methods + (config.first_draw_methods if fold.draw == 0 else ())
        fitted = fit_methods(material, train, fold, task, methods=methods)
        save_fit(fits / f"{fold.name}.npz", fitted, task.test.question.numpy(), task.test.kind.numpy())
        left = (time.monotonic() - began) / number * (len(todo) - number)
        progress(f"{fold.name}: {number}/{len(todo)} folds, about {left / 60:.1f} min left")
    return manifest


def chosen_folds(config: CrossFitConfig, manifest: FoldManifest) -> list[Fold]:
    """All folds, or the first ``max_folds`` of each split.

    The first draw, which has more methods, comes last; splits alternate, so that an unfinished evaluation has both.
    """
    if not config.max_folds:
        return sorted(manifest.folds, key=lambda f: (f.draw == 0, f.draw, f.half, f.fold, f.split))
    return [f for s in config.splits for f in [f for f in manifest.folds if f.split == s][: config.max_folds]]


def config_for(config: CrossFitConfig, fold: Fold) -> TrainConfig:
    """Hyperparameters of one fold: its own seed, and the topic prior's holdout by split."""
    task = config.train.task
    if config.holdout_for_unseen and fold.split == "unseen":
        task = task.model_copy(update={"prior_holdout": "category"})
    return config.train.model_copy(update={"task": task, "seed": config.train.seed + 1_000 * fold.draw})


def save_fit(path: Path, fitted: Fitted, question: np.ndarray[Any, Any], kind: np.ndarray[Any, Any]) -> None:
    """Write one fold's arrays."""
    arrays: dict[str, Any] = {
        "question": question,
        "kind": kind,
        "oracle": fitted.oracle.numpy(),
        "gate_probability": fitted.gate_probability.numpy(),
        "logistic_probability": fitted.logistic_probability.numpy(),
        "tuned": np.frombuffer(orjson.dumps(fitted.tuned), dtype=np.uint8),
    }
    for name, outcome in fitted.outcomes.items():
        for field in FIELDS:
            arrays[f"{name}/{field}"] = _compact(outcome, field)
    temporary = path.with_suffix(".tmp.npz")
    np.savez_compressed(temporary, **arrays)
    temporary.replace(path)


def _compact(outcome: Outcome, field: str) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = getattr(outcome, field).numpy()
    return values.astype(np.float32) if field in ("returns", "hit") else values.astype(np.int16)


def record_look(ledger: Path, config: CrossFitConfig, manifest: FoldManifest, folds: Sequence[Fold]) -> None:
    """Append one line before anything is seen."""
    ledger.parent.mkdir(parents=True, exist_ok=True)
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "evaluation": config.name,
        "purpose": config.purpose,
        "manifest_sha256": manifest.sha256(),
        "config_sha256": config.fingerprint(),
        "folds": len(folds),
        "splits": sorted({f.split for f in folds}),
        "mode": config.train.mdp.mode,
        "actions": config.train.mdp.actions,
    }
    with ledger.open("ab") as handle:
        handle.write(orjson.dumps(line) + b"\n")


def read_ledger(ledger: Path) -> list[dict[str, Any]]:
    """All recorded looks."""
    if not ledger.exists():
        return []
    return [orjson.loads(line) for line in ledger.read_bytes().splitlines() if line.strip()]


def _claim(output: Path, config: CrossFitConfig, manifest: FoldManifest) -> None:
    path = output / "manifest.json"
    facts = {"config_sha256": config.fingerprint(), "manifest_sha256": manifest.sha256()}
    if path.exists():
        stored = orjson.loads(path.read_bytes())
        if {k: stored.get(k) for k in facts} != facts:
            raise RunConflictError(
                f"{output} holds an evaluation of another config or other data; give output=... another directory"
            )
        return
    value = {**facts, "config": config.model_dump(mode="json"), "manifest": manifest.model_dump(mode="json")}
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(orjson.dumps(value))
    temporary.replace(path)
