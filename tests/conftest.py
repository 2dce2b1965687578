"""Shared fixtures: a small shop, its splits, and run configs whose whole run takes a second or two.

``plain_run`` writes configs for the null environment (no server, no Ray, no tracking): a run of 4 episodes takes about
a tenth of a second. ``shop_run`` is the same on a real shop server that the session shares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrl.shop.catalogue import catalogue_hash
from rayrl.shop.config import ShopServerConfig
from rayrl.shop.generator import generate_catalogue
from rayrl.shop.process import ShopProcess
from rayrl.splits import build_splits, facts_from_products, make_split
from rayrl.tasks import SplitManifest
from tests.faults.support import KEY, KEY_ENV

os.environ.setdefault("OMP_NUM_THREADS", "1")
# before any test starts a Ray: actors inherit the environment of that moment
os.environ[KEY_ENV] = KEY

WriteConfig = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests come last: Playwright leaves an event loop running in its thread until the browser is closed."""
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)


@pytest.fixture(scope="session")
def products_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue of 60 generated products in the public format."""
    path = tmp_path_factory.mktemp("shop") / "products.json"
    path.write_text(json.dumps(generate_catalogue(60, 3), ensure_ascii=False), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def shop_splits(products_file: Path) -> Path:
    """Split manifest of ``products_file``: 4 val, 4 test, the rest train."""
    products = json.loads(products_file.read_text(encoding="utf-8"))
    manifest = build_splits(
        facts_from_products(products),
        val=4,
        test=4,
        seed=0,
        source={"kind": "shop_catalogue", "sha256": catalogue_hash(products)},
    )
    return write_manifest(products_file.with_name("splits.json"), manifest)


@pytest.fixture(scope="session")
def shop_url(products_file: Path) -> Iterator[str]:
    """A running server that sells ``products_file``."""
    server = ShopProcess(ShopServerConfig(products=products_file), admin_token="admin-of-the-tests")
    try:
        yield server.base_url
    finally:
        server.stop()


@pytest.fixture
def plain_splits(tmp_path: Path) -> Path:
    """Splits with holes over made-up tasks: train 8, val 4, test 4."""
    manifest = SplitManifest(
        source={"kind": "test"},
        splits={
            "train": make_split("train", [0, 2, 3, 5, 7, 11, 13, 17], None),
            "val": make_split("val", [20, 21, 23, 29], None),
            "test": make_split("test", [31, 37, 41, 43], None),
        },
    )
    return write_manifest(tmp_path / "splits.json", manifest)


@pytest.fixture
def plain_run(tmp_path: Path, plain_splits: Path) -> WriteConfig:
    """Writes a config of the null environment and a scripted model; keyword names are ``section__key``."""
    base: dict[str, Any] = {
        "experiment": {"name": "plain", "run_root": str(tmp_path / "runs")},
        "tasks": {"manifest": str(plain_splits), "split": "train", "sample_size": 4},
        "environment": {"kind": "rayrl.testing.null_environment:NullEnvironmentFactory", "options": {"steps": 2}},
        "model": {"kind": "scripted", "name": "walker"},
        "execution": {"mode": "inprocess", "retry_backoff_s": 0.01},
        "tracking": {"wandb": "disabled"},
    }
    return config_writer(tmp_path, base)


@pytest.fixture
def shop_run(tmp_path: Path, products_file: Path, shop_splits: Path, shop_url: str) -> WriteConfig:
    """As ``plain_run``, on the shared shop server."""
    base: dict[str, Any] = {
        "experiment": {"name": "shop", "run_root": str(tmp_path / "runs")},
        "tasks": {"manifest": str(shop_splits), "split": "train", "sample_size": 4},
        "environment": {"kind": "shop", "embedded": {"products": str(products_file)}, "base_urls": [shop_url]},
        "model": {"kind": "scripted", "name": "shopper", "scripted": {"level": "competent"}},
        "execution": {"mode": "inprocess", "retry_backoff_s": 0.01},
        "tracking": {"wandb": "disabled"},
    }
    return config_writer(tmp_path, base)


def config_writer(folder: Path, base: dict[str, Any]) -> WriteConfig:
    """A function that writes ``base`` with changes and returns the file."""

    def write(file: str = "config.yaml", **changes: Any) -> Path:
        config = json.loads(json.dumps(base))
        for name, value in changes.items():
            *sections, key = name.split("__")
            target = config
            for section in sections:
                target = target.setdefault(section, {})
            target[key] = value
        path = folder / file
        path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
        return path

    return write


def write_manifest(path: Path, manifest: SplitManifest) -> Path:
    """Write a split manifest as the command would."""
    path.write_text(manifest.model_dump_json(), encoding="utf-8")
    return path
