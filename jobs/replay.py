"""``rayrl replay RUN EPISODE``: run an episode again against its recorded model outputs, and diff."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from jobs.output import console, facts_table, print_json
from jobs.shop_servers import Shops, embedded_shops
from rayrl.environments.config import build_environments
from rayrl.errors import ConfigError, DataError
from rayrl.experiment import Experiment, load_run_config, prepare
from rayrl.traces.manifest import difference, read_manifest
from rayrl.traces.replay import replay
from rayrl.traces.store import RunReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl replay``."""
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("episode", help="episode id, for example task-000012__sample-000")
    parser.add_argument(
        "overrides", nargs="*", help="section.key=value, for example environment.base_urls=[http://...]"
    )
    parser.add_argument("--config", help="the run's config; default: the copy inside the run directory")
    parser.add_argument("--attempt", type=int, help="replay this attempt instead of the episode's result")


def run(args: argparse.Namespace) -> int:
    """``rayrl replay``; exit code 0 when nothing differs, 6 when something does."""
    manifest = read_manifest(args.run)
    if manifest is None:
        raise DataError(f"{args.run} is no run directory: it has no manifest.json")
    record = RunReader(args.run).find(args.episode, attempt=args.attempt)
    config_path = args.config or args.run / "config.yaml"
    if not Path(config_path).exists() and args.config is None:
        raise ConfigError(f"{args.run} has no config.yaml; name the run's config with --config")
    config, base = load_run_config(config_path, args.overrides)
    experiment = prepare(config, base)
    drift = [
        row
        for row in difference(manifest["semantic"], experiment.semantic)
        if row[0].startswith(("environment", "prompt", "limits"))
    ]
    replayed, differences = asyncio.run(_replay(experiment, record))
    found = [{"where": d.where, "recorded": d.recorded, "replayed": d.replayed} for d in differences]
    if args.json:
        print_json(
            {
                "episode_id": args.episode,
                "identical": not found,
                "differences": found,
                "manifest_differences": [list(row) for row in drift],
                "final": replayed["final"],
            }
        )
        return 6 if found else 0
    out = console()
    final = record["final"] or {}
    out.print(
        facts_table(
            f"Replay of {args.episode}",
            [
                ("recorded steps", len(record["steps"])),
                ("recorded result", f"{record['status']}, reward {final.get('reward')}"),
                ("replayed result", f"{replayed['status']}, reward {(replayed['final'] or {}).get('reward')}"),
                ("differences", len(found) or "none: the environment answered as recorded"),
            ],
        )
    )
    for key, old, new in drift:
        out.print(f"  settings differ: {key}: {old} -> {new}", markup=False)
    for item in found[:10]:
        out.print(f"\n{item['where']}", style="bold")
        out.print(f"  recorded: {_short(item['recorded'])}", markup=False)
        out.print(f"  replayed: {_short(item['replayed'])}", markup=False)
    if len(found) > 10:
        out.print(f"\n… and {len(found) - 10} more (use --json)")
    return 6 if found else 0


async def _replay(experiment: Experiment, record: dict[str, Any]) -> Any:
    environment = experiment.config.environment
    with embedded_shops(environment, host="127.0.0.1", on_event=lambda _: None) as shops:
        return await _against(shops, experiment, record)


async def _against(shops: Shops, experiment: Experiment, record: dict[str, Any]) -> Any:
    factory = build_environments(shops.environment, admin_token=shops.admin_token)
    try:
        await factory.start()
        return await replay(record, environments=factory, prompts=experiment.prompts, limits=experiment.config.runtime)
    finally:
        await factory.aclose()


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else text[:397] + "..."
