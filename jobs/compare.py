"""``rayrl compare A B [C ...]``: what differs between runs, with its uncertainty; every run against the first."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from jobs.command import confidence_level
from jobs.output import console, print_json
from rayrl.errors import UserError
from rayrl.evaluation.comparable import check_comparable
from rayrl.evaluation.compare import compare_rows
from rayrl.evaluation.compare_report import html, markdown, tables
from rayrl.evaluation.paired import holm
from rayrl.evaluation.sources import Source, find_sources, load_goals, manifest_of, read_rows, split_unusable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories; the first is the baseline")
    parser.add_argument(
        "--may-differ",
        action="append",
        default=[],
        metavar="KEY",
        help="manifest key (dotted, a section, or a glob) in which the runs may differ; repeatable",
    )
    parser.add_argument("--metric", default="reward", help="metric the answer is about (default: reward)")
    parser.add_argument("--by", default="category", metavar="COLUMN", help="row column to break down by")
    parser.add_argument(
        "--private", action="store_true", help="take task categories from the private goals beside the traces"
    )
    parser.add_argument("--level", type=confidence_level, default=0.95, help="confidence level (default: 0.95)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write comparison.json, .md and .html there")


def compare_runs(
    locations: list[str],
    *,
    may_differ: list[str] | None = None,
    metric: str = "reward",
    by: str = "category",
    private: bool = False,
    level: float = 0.95,
) -> list[dict[str, Any]]:
    """Compare every further run with the first.

    Raises:
        UserError: fewer than two runs, runs that are not comparable, an unknown metric or column.
    """
    sources = find_sources(locations)
    if len(sources) < 2:
        raise UserError(f"compare needs at least two runs, {len(sources)} found in: {', '.join(locations)}")
    base, *others = sources
    manifests = [manifest_of(source) for source in sources]
    declared = [
        check_comparable(manifests[0], m, may_differ=may_differ or [], name_a=base.run, name_b=s.run)
        for s, m in zip(others, manifests[1:], strict=True)
    ]
    left = _rows(base, private)
    results = []
    for source, differences in zip(others, declared, strict=True):
        found = compare_rows(
            left, _rows(source, private), name_a=base.run, name_b=source.run, metric=metric, by=by, level=level
        )
        results.append({**found, "manifest_differences": [list(item) for item in differences]})
    p_values = [r["metrics"][metric]["p"] if r["metrics"] else 1.0 for r in results]
    for result, adjusted in zip(results, holm(p_values), strict=True):
        result["p_holm_over_runs"] = adjusted
    return results


def _rows(source: Source, private: bool) -> pa.Table:
    table, _ = split_unusable(read_rows([source]))
    if private:
        goals = load_goals(source)
        names = [(goals.get(task) or {}).get("category") for task in table["task_id"].to_pylist()]
        column = pa.array([None if n is None else str(n) for n in names], type=pa.string())
        table = table.set_column(table.schema.get_field_index("category"), "category", column)
    return table


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    results = compare_runs(
        args.runs,
        may_differ=args.may_differ,
        metric=args.metric,
        by=args.by,
        private=args.private,
        level=args.level,
    )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        dump = orjson.dumps(results, option=orjson.OPT_INDENT_2)
        (args.out / "comparison.json").write_bytes(dump)
        (args.out / "comparison.md").write_text(markdown(results), encoding="utf-8")
        (args.out / "comparison.html").write_text(html(results), encoding="utf-8")
    if args.json:
        print_json({"comparisons": results})
        return 0
    out = console()
    for result in results:
        for table in tables(result):
            out.print(table)
        out.print(result["sentence"], style="bold", soft_wrap=True)
    if args.out is not None:
        out.print(f"written: {args.out / 'comparison.html'}, comparison.md, comparison.json")
    return 0


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("compare", add_arguments, run, None))
