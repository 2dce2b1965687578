"""``rayrl summarize``: the summary of a run directory, made afresh from its traces."""

from __future__ import annotations

import argparse
from pathlib import Path

from jobs.output import console, print_json
from jobs.rollout import SUMMARY, summarize_run
from rayrl.errors import DataError
from rayrl.evaluation.tables import summary_tables
from rayrl.guard import read_notice
from rayrl.schemas import JsonDict
from rayrl.traces.manifest import read_manifest, write_json_atomic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl summarize``."""
    parser.add_argument("run", type=Path, help="run directory")


def summarize_directory(run_dir: Path) -> JsonDict:
    """Summarise a run directory and refresh its ``summary.json``.

    Raises:
        DataError: it is no run directory.
    """
    manifest = read_manifest(run_dir)
    if manifest is None:
        raise DataError(
            f"{run_dir} is no run directory: it has no manifest.json (`rayrl runs list` shows those there are)"
        )
    summary = summarize_run(run_dir, expected_jobs=len(manifest["semantic"]["jobs"]))
    notice = read_notice(run_dir)
    if notice is not None:
        summary["test_split"] = notice
    write_json_atomic(run_dir / SUMMARY, summary)
    return summary


def run(args: argparse.Namespace) -> int:
    """``rayrl summarize``."""
    summary = summarize_directory(args.run)
    if args.json:
        print_json(summary)
        return 0
    out = console()
    for table in summary_tables(summary):
        out.print(table)
    return 0
