"""Ten thousand scripted episodes through Ray actors and the embedded shop: does anything grow, leak or go missing?

    python benchmarks/soak.py [--episodes 10000] [--products 300] [--actors 2] [--concurrency 16] [--root DIR]

While the run goes, a thread samples the driver's resident memory, its open files and threads, and the bytes in Ray's
object store. Afterwards the shop server is asked for its free slots, and the traces are counted. Prints a table and one
JSON line; exit code 1 if a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from jobs.rollout import run_rollout
from rayrl.config import parse_config
from rayrl.experiment import prepare
from rayrl.schemas import canonical_json
from rayrl.settings import RunConfig
from rayrl.shop.catalogue import catalogue_hash
from rayrl.shop.config import ShopServerConfig
from rayrl.shop.generator import generate_catalogue
from rayrl.shop.process import ShopProcess
from rayrl.splits import build_splits, facts_from_products
from rayrl.traces.store import TRACES, RunReader

SEED = 11
SLOTS = 64
LIMITS = {"rss_growth": 0.10, "object_store_mib": 64.0, "bytes_per_step": 4096.0}
"""Driver memory of the last quarter beside the first; most bytes in the object store; trace bytes per model step."""


class Sampler:
    """Samples the driver and the object store in a thread, from the first trace on disk to the end."""

    def __init__(self, run_dir: Path, period_s: float = 0.5) -> None:
        self._traces = run_dir / TRACES
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)
        self.rss: list[int] = []
        self.files: list[int] = []
        self.threads: list[int] = []
        self.store: list[int] = []

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(self._period_s):
            if not self._traces.exists() or self._traces.stat().st_size == 0:
                continue
            self.rss.append(process.memory_info().rss)
            self.files.append(process.num_fds())
            self.threads.append(process.num_threads())
            if len(self.rss) % 4 == 0:
                self.store.append(object_store_bytes())


def object_store_bytes() -> int:
    """Bytes in the object stores of all living nodes."""
    import ray
    from ray._private.internal_api import node_stats  # what `ray memory` uses; there is no public call for it

    total = 0
    for node in ray.nodes():
        if node["Alive"]:
            reply = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
            total += int(reply.store_stats.object_store_bytes_used)
    return total


def soak(root: Path, *, episodes: int, products: int = 300, actors: int = 2, concurrency: int = 16) -> dict[str, Any]:
    """Play ``episodes`` episodes under ``root``; returns the figures."""
    catalogue = generate_catalogue(products, SEED)
    source = {"kind": "shop_catalogue", "sha256": catalogue_hash(catalogue)}
    manifest = build_splits(facts_from_products(catalogue), val=1, test=1, seed=0, source=source)
    tasks = len(manifest.splits["train"].task_ids)
    (root / "splits.json").write_bytes(canonical_json(manifest.model_dump(mode="json")))
    server = ShopServerConfig(generate=products, seed=SEED, slots=SLOTS)
    shop = ShopProcess(server, admin_token="token-of-the-soak")  # noqa: S106 - lives for this run only
    try:
        raw: dict[str, Any] = {
            "experiment": {"name": "soak", "seed": SEED, "run_root": str(root)},
            "tasks": {"manifest": str(root / "splits.json"), "split": "train", "repeats": -(-episodes // tasks)},
            "environment": {"embedded": {"generate": products, "seed": SEED}, "base_urls": [shop.base_url]},
            "model": {"kind": "scripted", "scripted": {"level": "naive"}},
            "execution": {"actors": actors, "concurrency": concurrency},
            "tracking": {"wandb": "disabled"},
        }
        experiment = prepare(parse_config(raw, RunConfig, source="soak"), root)
        with Sampler(experiment.run_dir) as sampler:
            result = run_rollout(experiment, quiet=True, install_signals=False)
        free = _free_slots(shop.base_url)
    finally:
        shop.stop()
    scan = RunReader(experiment.run_dir).scan()
    ledger = result.ledger
    return {
        "episodes": len(experiment.jobs),
        "complete": result.complete,
        "failed_attempts": ledger["failed"],
        "ledger_closed": ledger["admitted"] == ledger["completed"] + ledger["failed"] + ledger["cancelled"],
        "records": scan.records,
        "duplicates": scan.duplicates,
        "seconds": round(result.stage_seconds["episodes"], 1),
        "episodes_per_s": round(result.stats["episodes_per_s"], 1),
        "model_steps": int(result.stats["model_steps"]),
        "bytes_per_step": round(result.stats["bytes_written"] / max(1.0, result.stats["model_steps"]), 1),
        "leases_open": int(result.stats["leases_open"]),
        "slots_taken_at_server": SLOTS - free,
        "rss_first_quarter_mib": _mib(_quarter(sampler.rss, 0)),
        "rss_last_quarter_mib": _mib(_quarter(sampler.rss, 3)),
        "rss_growth": round(_quarter(sampler.rss, 3) / _quarter(sampler.rss, 0) - 1, 4),
        "open_files": [min(sampler.files), max(sampler.files)],
        "threads": [min(sampler.threads), max(sampler.threads)],
        "object_store_peak_mib": _mib(max(sampler.store, default=0)),
        "load_average": round(os.getloadavg()[0], 1),
        "samples": len(sampler.rss),
    }


def broken_limits(figures: dict[str, Any]) -> list[str]:
    """What the figures break, in words; empty if all is well."""
    checks = {
        "episodes without a complete result": figures["complete"] != figures["episodes"],
        "the ledger does not close": not figures["ledger_closed"],
        "records beside the ledger": figures["records"] != figures["complete"] + figures["failed_attempts"],
        "episodes counted twice": figures["duplicates"] > 0,
        "leases left open": figures["leases_open"] > 0 or figures["slots_taken_at_server"] > 0,
        "the driver's memory grows": figures["rss_growth"] > LIMITS["rss_growth"],
        "the object store fills": figures["object_store_peak_mib"] > LIMITS["object_store_mib"],
        "traces too large": figures["bytes_per_step"] > LIMITS["bytes_per_step"],
    }
    return [what for what, broken in checks.items() if broken]


def _quarter(samples: list[int], which: int) -> float:
    size = max(1, len(samples) // 4)
    part = samples[which * size : (which + 1) * size] or samples[-1:]
    return statistics.median(part) if part else 1.0


def _mib(size: float) -> float:
    return round(size / 2**20, 1)


def _free_slots(base_url: str, patience_s: float = 5.0) -> int:
    import urllib.request

    until = time.monotonic() + patience_s
    while True:
        with urllib.request.urlopen(f"{base_url}/healthz", timeout=10) as answer:
            free = int(json.load(answer)["free_slots"])
        if free == SLOTS or time.monotonic() > until:
            return free
        time.sleep(0.1)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--products", type=int, default=300)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--root", type=Path, help="where the run goes; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = args.root or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        figures = soak(
            root, episodes=args.episodes, products=args.products, actors=args.actors, concurrency=args.concurrency
        )
    for name, value in figures.items():
        print(f"{name:<24} {value}")
    broken = broken_limits(figures)
    print("limits: " + ("; ".join(broken) if broken else "all kept"))
    print(json.dumps(figures))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
