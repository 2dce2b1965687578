"""``rayrl judge RUN``: score frozen traces with any model under a versioned rubric; never in the agent loop.

The judge model is the ``model`` section of a YAML file (the same section rollout configs have). Outputs are appended to
``judge_outputs.jsonl`` in the run directory; a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from jobs.output import console, print_json
from rayrl.config import Section, load_config
from rayrl.errors import DataError
from rayrl.evaluation.sources import Source, find_sources
from rayrl.evaluation.tables import figure
from rayrl.export.conversation import ConversationOptions
from rayrl.export.filters import Filter
from rayrl.export.select import find_results, read_places
from rayrl.judge.agreement import agreement, read_labels, score_summary
from rayrl.judge.rubric import Rubric, load_rubric
from rayrl.judge.stage import JUDGE_SCHEMA, Judge, JudgeJob, finished_keys, judge_job, output_key
from rayrl.models.config import ModelConfig
from rayrl.models.registry import build_model
from rayrl.schemas import JsonDict
from rayrl.traces.store import RunLock

OUTPUTS = "judge_outputs.jsonl"


class JudgeConfig(Section):
    """A judge config: which model judges."""

    model: ModelConfig
    """The judge."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run", help="run directory")
    parser.add_argument("--config", required=True, help="YAML with a model section: the judge")
    parser.add_argument("--rubric", type=Path, metavar="FILE", help="rubric YAML (default: the built-in one)")
    parser.add_argument("--filter", metavar="TEXT", help="which completed episodes (see docs/export.md)")
    parser.add_argument("--limit", type=int, help="judge at most this many more episodes")
    parser.add_argument("--concurrency", type=int, default=8, help="calls at a time (default: 8)")
    parser.add_argument("--persona", action="store_true", help="show the judge the persona")
    parser.add_argument("--labels", type=Path, metavar="FILE", help="human labels (JSON lines): report agreement")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the config")


async def judge_run(
    location: str,
    judge: Judge,
    *,
    text_filter: str | None = None,
    limit: int | None = None,
    persona: bool = False,
) -> dict[str, Any]:
    """Judge the completed episodes of a run that have no output yet; returns counts.

    Raises:
        UserError: no run, or one another process is judging.
    """
    source = find_sources([location])[0]
    directory = Path(source.directory)
    path = directory / OUTPUTS
    passes = Filter(text_filter) if text_filter else None
    options = ConversationOptions(persona=persona)
    counts = {"judged": 0, "failed": 0, "already": 0}
    with RunLock(directory / ".judge"), path.open("ab") as file:
        _end_torn_line(path, file)
        done = finished_keys(path.read_bytes().split(b"\n"))

        def todo() -> Iterator[JudgeJob]:
            given = 0
            for record in _complete_records(source):
                if passes is not None and not passes(record):
                    continue
                job = judge_job(record, judge.rubric, run=source.run, options=options)
                if output_key(judge.head(job)) in done:
                    counts["already"] += 1
                elif limit is not None and given >= limit:
                    return
                else:
                    given += 1
                    yield job

        async for output in judge.run(todo()):
            file.write(orjson.dumps(output) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            counts["judged" if output["status"] == "judged" else "failed"] += 1
    return counts


def _complete_records(source: Source) -> Iterator[JsonDict]:
    places, _ = find_results(source)
    yield from read_places([place for place in places if place.complete])


def _end_torn_line(path: Path, file: Any) -> None:
    data = path.read_bytes()[-1:] if path.exists() else b""
    if data and data != b"\n":
        file.write(b"\n")
        file.flush()


def read_outputs(path: Path, rubric: Rubric, judge_sha256: str | None = None) -> list[JsonDict]:
    """Judged outputs under a rubric (and judge), the newest per episode.

    Raises:
        DataError: there are none.
    """
    newest: dict[tuple[str, str], JsonDict] = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            item = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if not isinstance(item, dict) or item.get("schema") != JUDGE_SCHEMA or item.get("status") != "judged":
            continue
        if item["rubric_sha256"] == rubric.sha256() and judge_sha256 in (None, item["judge_sha256"]):
            newest[item["run"], item["episode_id"]] = item
    if not newest:
        raise DataError(f"{path}: no output of rubric {rubric.name} {rubric.version}")
    return list(newest.values())


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    config = load_config(args.config, JudgeConfig, args.overrides)
    rubric = load_rubric(args.rubric)

    async def work() -> tuple[dict[str, Any], str]:
        model = build_model(config.model)
        try:
            judge = Judge(model, rubric, concurrency=args.concurrency)
            counts = await judge_run(args.run, judge, text_filter=args.filter, limit=args.limit, persona=args.persona)
            return counts, judge.judge_sha256
        finally:
            await model.aclose()

    counts, judge_sha256 = asyncio.run(work())
    source = find_sources([args.run])[0]
    path = Path(source.directory) / OUTPUTS
    result: dict[str, Any] = {"counts": counts, "file": str(path), "rubric": [rubric.name, rubric.version]}
    if counts["judged"] + counts["already"]:
        outputs = read_outputs(path, rubric, judge_sha256)
        result["summary"] = score_summary(outputs, rubric)
        if args.labels is not None:
            result["agreement"] = agreement(outputs, read_labels(args.labels), rubric)
    if args.json:
        print_json(result)
    else:
        _print(result)
    return 6 if counts["failed"] else 0


def _print(result: dict[str, Any]) -> None:
    out = console()
    for title, items, columns in (
        ("Scores", (result.get("summary") or {}).get("criteria") or {}, ("n", "missing", "mean", "low", "high")),
        (
            "Agreement with human labels",
            result.get("agreement") or {},
            ("n", "left_out", "exact", "kappa", "quadratic_kappa", "quadratic_low", "quadratic_high"),
        ),
    ):
        if items:
            table = Table(title=title, title_justify="left", border_style="dim")
            for name in ("criterion", *columns):
                table.add_column(name)
            for name, item in items.items():
                cells = [item.get(column) for column in columns]
                table.add_row(name, *(str(c) if isinstance(c, int) else figure(c) for c in cells))
            out.print(table)
    counts = result["counts"]
    done = f"judged {counts['judged']}, failed {counts['failed']}, already there {counts['already']}"
    out.print(f"{done}: {result['file']}")
    if counts["failed"]:
        out.print("failed calls are tried again by the same command")


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("judge", add_arguments, run, None))
