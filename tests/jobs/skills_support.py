"""A shop, splits and configs small enough for a whole gate or pipeline within seconds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from rayrl.shop.catalogue import catalogue_hash
from rayrl.shop.generator import generate_catalogue
from rayrl.skills.bank import BankEntry, make_bank, save_bank
from rayrl.splits import build_splits, facts_from_products, make_split
from rayrl.tasks import SplitManifest

TEXTS = {
    "search": "Write the search query from the product type, the required attributes and the brand.",
    "options": "Select the colour and size the task names instead of the first variant shown.",
    "persona": "Follow the persona: prefer its brands and take its recent searches as wishes.",
    "plants": "Water your plants twice a week.",
}


def write_shop(folder: Path, products: int = 240) -> Path:
    """Products, splits and a rollout config ``shopper.yaml``; returns the config."""
    catalogue = generate_catalogue(products, 5)
    (folder / "products.json").write_text(json.dumps(catalogue, ensure_ascii=False), encoding="utf-8")
    facts = facts_from_products(catalogue)
    source = {"kind": "shop_catalogue", "sha256": catalogue_hash(catalogue)}
    outer = build_splits(facts, val=60, test=20, seed=0, source=source)
    val = set(outer.splits["val"].task_ids)
    inner = build_splits([f for f in facts if f.task_id in val], val=24, test=12, seed=0, source={})
    parts = {"gate": "val", "confirm": "test", "unseen": "train"}
    manifest = SplitManifest(
        source=source,
        splits={
            "train": outer.splits["train"],
            "test": outer.splits["test"],
            **{name: make_split("val", inner.splits[part].task_ids, None) for name, part in parts.items()},
        },
    )
    (folder / "splits.json").write_text(manifest.model_dump_json(), encoding="utf-8")
    config: dict[str, Any] = {
        "experiment": {"name": "base", "seed": 3, "run_root": str(folder / "runs")},
        "tasks": {"manifest": str(folder / "splits.json"), "split": "train", "sample_size": 20},
        "environment": {"kind": "shop", "persona": True, "embedded": {"products": str(folder / "products.json")}},
        "model": {"kind": "scripted", "name": "shopper", "checkpoint_id": "weights-1"},
        "execution": {"mode": "inprocess", "retry_backoff_s": 0.01, "concurrency": 32},
        "tracking": {"wandb": "disabled"},
    }
    path = folder / "shopper.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def write_bank(folder: Path, texts: dict[str, str] | None = None) -> Path:
    """A bank of a few skills."""
    path = folder / "bank.json"
    save_bank(make_bank([BankEntry(skill_id=k, content=v) for k, v in (texts or TEXTS).items()]), path)
    return path


def write_gate(folder: Path, **changes: Any) -> Path:
    """A gate config on ``write_shop``'s files."""
    config: dict[str, Any] = {
        "name": "g",
        "run": str(folder / "shopper.yaml"),
        "bank": str(folder / "bank.json"),
        "split": "gate",
        "confirm_split": "confirm",
        **changes,
    }
    path = folder / "gate.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def write_pipeline(folder: Path, **changes: Any) -> Path:
    """A pipeline config on ``write_shop``'s files."""
    config: dict[str, Any] = {
        "name": "p",
        "output": str(folder / "pipeline"),
        "run": str(folder / "shopper.yaml"),
        "train_tasks": 20,
        "max_chunks": 6,
        "gate": {"tasks": 24, "confirm_split": "confirm", "rule": {"fdr": 0.4}},
        "selector": {"clone_steps": 20, "updates": 2},
        "selector_check": {"hidden_loss": 0.3, "tries": 2},
        **changes,
    }
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
