"""``rayrl export RUN --to FORMAT``: training data from frozen traces.

Formats: ``sft`` (conversations, or one record per reply), ``dpo`` (best and worst of a group), ``grpo`` (groups after
the dynamic-sampling filter), ``slime`` (samples) and ``slime-requests`` (what slime's rollout should play). Nothing
private, no reasoning and no persona leaves unless asked for. SFT takes completed episodes with r_success = 1 unless a
filter is given; the others take all results and let groups decide. ``calls`` makes a test set of function calls whose
right answer is known (it carries those answers, which come from the private goals).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from jobs.output import console, facts_table, print_json
from rayrl.errors import DataError, UserError
from rayrl.evaluation.sources import Source, find_sources, load_goals, manifest_of, plan_chunks, read_lines
from rayrl.export.calls import call_cases
from rayrl.export.conversation import ConversationOptions, messages_of
from rayrl.export.filters import Filter
from rayrl.export.quality import QualityReport, action_fingerprint
from rayrl.export.records import Group, dpo_record, dynamic_sampling, group_records, grpo_record, sft_record, sft_steps
from rayrl.export.select import Place, find_results, read_places
from rayrl.export.slime import request_from_job, sample_from_record
from rayrl.schemas import EpisodeJob, JsonDict
from rayrl.traces.store import TRAINING

FORMATS = ("sft", "dpo", "grpo", "slime", "slime-requests", "calls")
SFT_FILTER = "completed and r_success == 1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories or trace files")
    parser.add_argument("--to", choices=FORMATS, required=True, help="what to make")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines file to write")
    parser.add_argument("--filter", metavar="TEXT", help=f"which episodes (sft default: {SFT_FILTER!r})")
    parser.add_argument("--unit", choices=("episode", "step"), default="episode", help="sft: one record per what")
    parser.add_argument("--distinct", action="store_true", help="sft: of equal behaviours on a task keep the first")
    parser.add_argument("--min-groups", type=int, default=1, help="dpo, grpo: fewer groups with a signal is an error")
    parser.add_argument("--min-samples", type=int, default=2, help="dpo, grpo: complete samples a group needs")
    parser.add_argument("--reasoning", action="store_true", help="keep the model's reasoning")
    parser.add_argument("--persona", action="store_true", help="keep the persona in the prompts")
    parser.add_argument("--protocol-errors", action="store_true", help="keep replies that broke the protocol")


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """What to make, out of what."""

    to: str
    filter: str | None = None
    unit: str = "episode"
    distinct: bool = False
    min_groups: int = 1
    min_samples: int = 2
    reasoning: bool = False
    persona: bool = False
    protocol_errors: bool = False


def export(locations: list[str], out: Path, settings: ExportSettings) -> dict[str, Any]:
    """Write ``out`` and ``<out>.report.json``; returns the report.

    Raises:
        UserError: a filter that is none, runs without results, groups without a signal.
    """
    if settings.to not in FORMATS:
        raise UserError(f"--to {settings.to}: one of {', '.join(FORMATS)}")
    sources = find_sources(locations)
    text = settings.filter if settings.filter is not None else SFT_FILTER if settings.to == "sft" else None
    chosen = Filter(text) if text is not None else None
    report: dict[str, Any] = {
        "format": settings.to,
        "filter": text,
        "runs": [s.run for s in sources],
        "carries": {
            "reasoning": settings.reasoning,
            "persona": settings.persona,
            "protocol_errors": settings.protocol_errors,
            "private_goal": False,
        },
    }
    places: list[Place] = []
    for source in sources:
        found, counts = find_results(source)
        places += found
        report.setdefault("read", {})[source.run] = {"episodes": len(found), **counts}
    if settings.to == "slime-requests":
        lines = _requests(sources, report)
    elif settings.to == "calls":
        lines = _calls(places, chosen, settings, report)
    elif settings.to in ("sft", "slime"):
        maker = _sft if settings.to == "sft" else _slime
        lines = maker(places, chosen, settings, report, _expected_tasks(sources))
    else:
        lines = _groups(places, chosen, settings, report)
    report["records"] = _write(out, lines)
    if report["records"] == 0:
        out.unlink()
        raise UserError(f"nothing to export: no episode of {', '.join(report['runs'])} passes {text or 'the format'!r}")
    report["file"] = str(out)
    Path(f"{out}.report.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    return report


def _options(settings: ExportSettings, source: Source) -> ConversationOptions:
    prompt = ((manifest_of(source) or {}).get("semantic") or {}).get("prompt") or {}
    history = prompt.get("history")
    return ConversationOptions(
        reasoning=settings.reasoning,
        persona=settings.persona,
        protocol_errors=settings.protocol_errors,
        last_n=history.get("last_n") if isinstance(history, dict) else None,
    )


def _expected_tasks(sources: list[Source]) -> set[tuple[str, int]]:
    tasks: set[tuple[str, int]] = set()
    for source in sources:
        jobs = ((manifest_of(source) or {}).get("semantic") or {}).get("jobs")
        tasks |= {(str(job[3]), int(job[0])) for job in jobs or [] if isinstance(job, list) and len(job) == 4}
    return tasks


def _sft(
    places: list[Place],
    chosen: Filter | None,
    settings: ExportSettings,
    report: dict[str, Any],
    expected: set[tuple[str, int]],
) -> Iterator[JsonDict]:
    quality = QualityReport(expected)
    seen: set[str] = set()
    passed = repeated = 0
    for source, group in groupby(places, key=lambda p: p.source):
        options = _options(settings, source)
        for record in read_places([p for p in group if p.complete]):
            if chosen is not None and not chosen(record):
                continue
            passed += 1
            behaviour = action_fingerprint(record)
            if settings.distinct and behaviour in seen:
                repeated += 1
                continue
            seen.add(behaviour)
            quality.add(record, messages_of(record, options))
            if settings.unit == "step":
                yield from sft_steps(record, options)
            else:
                yield sft_record(record, options)
    report["passed"], report["left_out_as_repeated"] = passed, repeated
    report["quality"] = quality.as_dict()


def _slime(
    places: list[Place],
    chosen: Filter | None,
    settings: ExportSettings,
    report: dict[str, Any],
    expected: set[tuple[str, int]],
) -> Iterator[JsonDict]:
    counts = {"without_tokens": 0, "token_drift": 0, "failed": 0}
    index = 0
    groups: dict[tuple[str, str, int], int] = {}
    for source, group in groupby(places, key=lambda p: p.source):
        options = _options(settings, source)
        training = _training_lines(source)
        for record in read_places(list(group)):
            if chosen is not None and not chosen(record):
                continue
            job = record["job"]
            number = groups.setdefault((source.run, str(job.get("split")), job["task_id"]), len(groups))
            tokens = training.get((record["episode_id"], record.get("attempt") or 1))
            sample = sample_from_record(record, options, training=tokens, group_index=number, index=index)
            counts["without_tokens"] += not sample["tokens"]
            counts["token_drift"] += "token_drift_step" in sample["metadata"]["rayrl"]
            counts["failed"] += sample["status"] in ("failed", "aborted")
            index += 1
            yield sample
    report["samples"] = counts


def _calls(
    places: list[Place], chosen: Filter | None, settings: ExportSettings, report: dict[str, Any]
) -> Iterator[JsonDict]:
    """Steps whose right call is known, as a set to test models on. What is right comes from the private goals."""
    report["carries"]["private_goal"] = "the right call of each case"
    for source, group in groupby(places, key=lambda p: p.source):
        options, goals = _options(settings, source), load_goals(source)
        if not goals:
            raise DataError(f"{source.run}: no private goals beside the traces, so no right call is known")
        for record in read_places([p for p in group if p.complete]):
            if chosen is None or chosen(record):
                yield from call_cases(record, goals.get(record["job"]["task_id"]), options)


def _training_lines(source: Source) -> dict[tuple[str, int], list[JsonDict]]:
    """Per-step token lines by (episode, attempt), where the run recorded any."""
    filesystem, path = source.filesystem(), f"{source.directory}/{TRAINING}"
    info = filesystem.get_file_info(path)
    if not info.is_file:
        return {}
    out: dict[tuple[str, int], list[JsonDict]] = {}
    for chunk in plan_chunks([Source(source.run, path, source.base, info.size, "jsonl")]):
        for _, line, _ in read_lines(chunk):
            try:
                item = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            out.setdefault((item["episode_id"], item.get("attempt", 1)), []).append(item)
    return out


def _requests(sources: list[Source], report: dict[str, Any]) -> Iterator[JsonDict]:
    index = 0
    groups: dict[tuple[str, str, int], int] = {}
    for source in sources:
        jobs = ((manifest_of(source) or {}).get("semantic") or {}).get("jobs")
        if not isinstance(jobs, list):
            raise DataError(f"{source.run}: no manifest with jobs, so there is nothing to request")
        for task, sample, seed, split in jobs:
            number = groups.setdefault((source.run, split, task), len(groups))
            job = EpisodeJob(task_id=task, sample_id=sample, seed=seed, split=split)
            yield request_from_job(job, group_index=number, index=index)
            index += 1
    report["requests"] = index


def _groups(
    places: list[Place], chosen: Filter | None, settings: ExportSettings, report: dict[str, Any]
) -> Iterator[JsonDict]:
    totals: dict[str, int] = {}
    kept = 0
    for (source, _, _), members in groupby(places, key=lambda p: (p.source, p.split, p.task_id)):
        options = _options(settings, source)
        records = [r for r in read_places(list(members)) if chosen is None or chosen(r)]
        found: list[Group] = group_records(records)
        signal, counts = dynamic_sampling(found, min_size=settings.min_samples, min_groups=0)
        for name, value in dataclasses.asdict(counts).items():
            totals[name] = totals.get(name, 0) + value
        for group in signal:
            made = grpo_record(group, options) if settings.to == "grpo" else dpo_record(group, options)
            if made is not None:
                kept += 1
                yield made
    report["dynamic_sampling"] = totals
    if kept < settings.min_groups:
        raise UserError(_starved(kept, settings.min_groups, totals))


def _starved(kept: int, needed: int, totals: dict[str, int]) -> str:
    get = totals.get
    return (
        f"starved: {kept} of {get('groups', 0)} groups carry a signal, at least {needed} are needed "
        f"({get('too_small', 0)} have too few complete samples, {get('zero_spread_all_wrong', 0)} are all wrong, "
        f"{get('zero_spread_all_right', 0)} all right, {get('zero_spread_other', 0)} otherwise equal; "
        f"{get('failed_samples', 0)} samples failed). More samples per task (tasks.repeats) or other tasks would help"
    )


def _write(out: Path, lines: Iterator[JsonDict]) -> int:
    """Write JSON lines; the file appears whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    count = 0
    try:
        with temporary.open("wb") as file:
            for line in lines:
                file.write(orjson.dumps(line) + b"\n")
                count += 1
        temporary.replace(out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    names = [field.name for field in dataclasses.fields(ExportSettings)]
    report = export(args.runs, args.out, ExportSettings(**{name: getattr(args, name) for name in names}))
    if args.json:
        print_json(report)
        return 0
    facts: list[tuple[str, Any]] = [("records", report["records"]), ("filter", report["filter"] or "all results")]
    quality = report.get("quality")
    if quality:
        repetition, coverage = quality["repetition"], quality["coverage"]
        facts += [
            ("episodes", quality["episodes"]),
            ("repeated behaviours", f"{repetition['repeated_episodes']} ({repetition['share_repeated'] or 0:.1%})"),
            ("tasks covered", f"{coverage['tasks']} of {coverage['tasks_expected'] or 'unknown'}"),
            *[(f"rule {name}", item["episodes"]) for name, item in quality["rules"].items()],
        ]
    for name, value in (report.get("dynamic_sampling") or report.get("samples") or {}).items():
        facts.append((name.replace("_", " "), value))
    carried = [name for name, yes in report["carries"].items() if yes]
    facts += [("carries beyond the default", ", ".join(carried) or "nothing"), ("file", report["file"])]
    console().print(facts_table(f"Export: {report['format']}", facts))
    return 0


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("export", add_arguments, run, None))
