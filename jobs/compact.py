"""``rayrl traces compact RUN``: JSON lines to Parquet (zstd), and verification of one against the other."""

from __future__ import annotations

import argparse
from pathlib import Path

from jobs.output import console, print_json
from rayrl.errors import DataError
from rayrl.evaluation.compact import ZSTD_LEVEL, compact, verify
from rayrl.evaluation.sources import PARQUET, Source, find_sources
from rayrl.traces.store import TRACES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run", help="run directory or traces file")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: {PARQUET} in the run directory")
    parser.add_argument("--verify", action="store_true", help="compare every record and column afterwards")
    parser.add_argument("--only-verify", action="store_true", help="compare an existing file, write nothing")
    parser.add_argument("--zstd-level", type=int, default=ZSTD_LEVEL, help=f"compression level (default {ZSTD_LEVEL})")


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    directory = Path(args.run)
    location = str(directory / TRACES) if directory.is_dir() else args.run
    source: Source = find_sources([location])[0]
    target = args.out or Path(source.directory) / PARQUET
    if args.only_verify and not target.exists():
        raise DataError(f"{target}: does not exist; leave --only-verify out to write it")
    report = None if args.only_verify else compact(source, target, zstd_level=args.zstd_level)
    if args.verify or args.only_verify:
        report = verify(source, target)
    if report is None:  # one of the two ran
        raise DataError("nothing to do")
    if report.mismatches:
        raise DataError(f"{target} does not hold what {source.url} holds:\n  " + "\n  ".join(report.mismatches))
    if args.json:
        print_json({"file": str(target), **report.as_dict(), "verified": bool(args.verify or args.only_verify)})
        return 0
    skipped = ", ".join(f"{n} {kind}" for kind, n in report.unusable.items() if n)
    console().print(
        f"{target}: {report.records} records, {report.json_bytes / 1e6:.1f} MB of JSON lines in "
        f"{report.parquet_bytes / 1e6:.1f} MB"
        + (f"; left out: {skipped}" if skipped else "")
        + ("; verified" if args.verify or args.only_verify else "")
    )
    return 0


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("compact", add_arguments, run, None))
