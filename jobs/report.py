"""``rayrl report RUN...``: one self-contained HTML page per run."""

from __future__ import annotations

import argparse
from pathlib import Path

import orjson

from jobs.command import confidence_level
from jobs.output import console, print_json
from rayrl.evaluation.collect import Collector
from rayrl.evaluation.pipeline import PassOptions, local_tables
from rayrl.evaluation.run_report import run_page
from rayrl.evaluation.sources import (
    Source,
    expected_jobs,
    find_sources,
    load_goals,
    manifest_of,
    plan_chunks,
    read_beside,
)
from rayrl.evaluation.statistics import LEVEL
from rayrl.evaluation.summary import as_table, results, summarize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, trace files, globs, s3:// URLs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: report.html in each run directory")
    parser.add_argument("--no-private", action="store_true", help="leave the private goals alone when diagnosing")
    parser.add_argument("--level", type=confidence_level, default=LEVEL, help="confidence level (default: 0.95)")


def make_page(source: Source, *, private: bool = True, level: float = LEVEL) -> str:
    """The report of one run as HTML."""
    goals = {source.run: load_goals(source)} if private else {}
    with Collector(labels=True) as collector:
        for table in local_tables([source], plan_chunks([source]), PassOptions(labels=True, goals=goals)):
            collector.add(table)
    rows, unusable = collector.table()
    manifest = manifest_of(source)
    summary = summarize(rows, expected_jobs=expected_jobs(manifest), level=level)
    beside = read_beside(source, "summary.json")
    if beside is not None:
        notice = orjson.loads(beside).get("test_split")
        if notice is not None:
            summary["test_split"] = notice
    chosen, _, _ = results(as_table(rows))
    scored = chosen.filter(chosen["complete"])
    return run_page(
        source.run,
        summary,
        manifest=manifest,
        diagnosis=collector.diagnosis(level=level),
        rewards=scored["reward"].to_pylist(),
        steps=[float(n) for n in scored["model_steps"].to_pylist()],
        unusable=unusable,
    )


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    written = []
    for source in find_sources(args.runs):
        target = args.out / f"{Path(source.run).name}.html" if args.out else Path(source.directory) / "report.html"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(make_page(source, private=not args.no_private, level=args.level), encoding="utf-8")
        written.append(str(target))
    if args.json:
        print_json({"reports": written})
    else:
        for path in written:
            console().print(path, soft_wrap=True)
    return 0


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("report", add_arguments, run, None))
