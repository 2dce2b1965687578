"""``rayrl runs list|show|rm``: the run directories under a run root."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import orjson
from rich.table import Table

from jobs.output import console, facts_table, print_json
from rayrl.errors import DataError, RunConflictError, UserError
from rayrl.schemas import JsonDict
from rayrl.traces.manifest import MANIFEST, read_manifest
from rayrl.traces.store import TRACES, RunLock, RunReader


def default_root() -> Path:
    """``$RAYRL_RUNS``, else ``./runs``."""
    return Path(os.environ.get("RAYRL_RUNS", "runs")).expanduser()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl runs``."""
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="all runs under a root")
    listing.add_argument("--root", type=Path, default=None, help="run root (default: $RAYRL_RUNS or ./runs)")
    show = commands.add_parser("show", help="one run")
    show.add_argument("run", type=Path)
    remove = commands.add_parser("rm", help="delete a run directory")
    remove.add_argument("run", type=Path)
    remove.add_argument("--yes", action="store_true", help="really delete")


def run(args: argparse.Namespace) -> int:
    """``rayrl runs``."""
    if args.command == "list":
        return _list(args.root or default_root(), args.json)
    if args.command == "show":
        return _show(args.run, args.json)
    return _remove(args.run, args.yes, args.json)


def describe(run_dir: Path) -> JsonDict:
    """Facts of one run from its manifest and summary; cheap, the traces are not read."""
    manifest = read_manifest(run_dir)
    if manifest is None:
        raise DataError(f"{run_dir} is no run directory: it has no {MANIFEST}")
    semantic = manifest["semantic"]
    facts: JsonDict = {
        "directory": str(run_dir),
        "experiment": manifest["experiment"],
        "fingerprint": manifest["fingerprint"],
        "created_at": manifest["created_at"],
        "episodes": len(semantic["jobs"]),
        "split": semantic["split"]["name"],
        "role": semantic["split"]["role"],
        "model": semantic["model"].get("name", semantic["model"].get("kind")),
        "trace_bytes": (run_dir / TRACES).stat().st_size if (run_dir / TRACES).exists() else 0,
    }
    summary = run_dir / "summary.json"
    if summary.exists():
        try:
            facts["summary"] = orjson.loads(summary.read_bytes())
        except orjson.JSONDecodeError as error:
            raise DataError(f"{summary}: not JSON ({error}); make it again with `rayrl summarize`") from None
    return facts


def _list(root: Path, as_json: bool) -> int:
    rows, unreadable = [], []
    for path in sorted(root.glob(f"*/{MANIFEST}")) if root.is_dir() else []:
        try:
            rows.append(describe(path.parent))
        except DataError as error:
            unreadable.append(str(error))  # one broken directory must not hide the others
    if as_json:
        runs = [{k: v for k, v in r.items() if k != "summary"} for r in rows]
        print_json({"root": str(root), "runs": runs, "unreadable": unreadable})
        return 0
    for text in unreadable:
        print(f"left out: {text}", file=sys.stderr)
    if not rows:
        console().print(f"no runs under {root} (choose another root with --root, or set RAYRL_RUNS)")
        return 0
    table = Table(
        "folder",
        "experiment",
        "split",
        "model",
        "episodes",
        "traces",
        "fingerprint",
        "created",
        title=f"Runs in {root}",
    )
    for row in rows:
        table.add_row(
            Path(row["directory"]).name,
            row["experiment"],
            f"{row['split']} ({row['role']})",
            str(row["model"]),
            str(row["episodes"]),
            f"{row['trace_bytes'] / 1e6:.1f} MB",
            row["fingerprint"][:12],
            row["created_at"][:16].replace("T", " "),
        )
    console().print(table)
    return 0


def _show(run_dir: Path, as_json: bool) -> int:
    facts = describe(run_dir)
    report = RunReader(run_dir).scan()
    facts["records"] = {
        "records": report.records,
        "complete": report.complete,
        "failed": report.failed,
        "cancelled": report.cancelled,
        "duplicates": report.duplicates,
        "malformed_lines": report.malformed_lines,
        "torn_tail": report.torn_tail,
    }
    if as_json:
        print_json(facts)
        return 0
    rows = [(k, v) for k, v in facts.items() if k not in ("summary", "records")]
    rows += list(facts["records"].items())
    console().print(facts_table(facts["experiment"], rows))
    return 0


def _remove(run_dir: Path, yes: bool, as_json: bool) -> int:
    facts = describe(run_dir)
    if not yes:
        raise UserError(
            f"{run_dir} holds {facts['episodes']} episodes ({facts['trace_bytes'] / 1e6:.1f} MB); "
            "add --yes to delete it"
        )
    try:
        with RunLock(run_dir):
            shutil.rmtree(run_dir)
    except RunConflictError:
        raise RunConflictError(f"{run_dir} is in use by a running process; stop it first") from None
    if as_json:
        print_json({"removed": str(run_dir)})
    else:
        console().print(f"removed {run_dir}")
    return 0
