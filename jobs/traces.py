"""``rayrl traces verify|show|import|compact``."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from jobs.output import console, facts_table, print_json
from rayrl.errors import DataError, RunConflictError
from rayrl.schemas import JsonDict
from rayrl.traces.imports import FOREIGN_SCHEMA, ImportReport, import_episodes
from rayrl.traces.manifest import MANIFEST, make_manifest, read_manifest, write_json_atomic
from rayrl.traces.schema import expand
from rayrl.traces.store import PRIVATE, TRACES, RunLock, RunReader, TraceWriter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl traces``."""
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="check a run's traces: torn lines, duplicates, coverage")
    verify.add_argument("run", type=Path)
    show = commands.add_parser("show", help="print one episode in the clear")
    show.add_argument("run", type=Path)
    show.add_argument("episode", help="episode id")
    show.add_argument("--attempt", type=int, help="this attempt instead of the episode's result")
    importing = commands.add_parser("import", help=f"convert a {FOREIGN_SCHEMA} file into a run directory")
    importing.add_argument("file", type=Path)
    importing.add_argument("run", type=Path, help="run directory to create")
    if importlib.util.find_spec("jobs.compact") is not None:
        from jobs import compact

        compact.add_arguments(commands.add_parser("compact", help="write Parquet beside the JSONL"))


def run(args: argparse.Namespace) -> int:
    """``rayrl traces``."""
    if args.command == "verify":
        return _verify(args.run, args.json)
    if args.command == "show":
        record = RunReader(args.run).find(args.episode, attempt=args.attempt)
        print_json(expand(record))
        return 0
    if args.command == "import":
        return _import(args.file, args.run, args.json)
    from jobs import compact

    return compact.run(args)


def verify(run_dir: Path) -> JsonDict:
    """What a pass over the traces of ``run_dir`` finds; ``ok`` when nothing is wrong."""
    manifest = read_manifest(run_dir)
    if manifest is None and not (run_dir / TRACES).exists():
        raise DataError(f"{run_dir} holds neither {MANIFEST} nor {TRACES}")
    report = RunReader(run_dir).scan()
    jobs = {f"task-{t:06d}__sample-{s:03d}" for t, s, _, _ in manifest["semantic"]["jobs"]} if manifest else set()
    foreign = sorted(report.complete_ids - jobs) if manifest and jobs else []
    return {
        "records": report.records,
        "complete": report.complete,
        "failed": report.failed,
        "cancelled": report.cancelled,
        "expected": len(jobs) if manifest else None,
        "missing": len(jobs - report.complete_ids) if manifest else None,
        "duplicates": report.duplicates,
        "duplicate_ids": report.duplicate_ids[:20],
        "not_in_manifest": foreign[:20],
        "malformed_lines": report.malformed_lines,
        "foreign_schema_lines": report.foreign_schema,
        "torn_tail": report.torn_tail,
        "ok": not (report.duplicates or report.malformed_lines or report.foreign_schema or foreign or report.torn_tail),
    }


def _verify(run_dir: Path, as_json: bool) -> int:
    found = verify(run_dir)
    if as_json:
        print_json(found)
    else:
        console().print(facts_table(f"Traces of {run_dir}", list(found.items())))
    return 0 if found["ok"] else 6


def _import(file: Path, run_dir: Path, as_json: bool) -> int:
    if read_manifest(run_dir) is not None or (run_dir / TRACES).exists():
        raise RunConflictError(f"{run_dir} already holds a run; import into a new directory")
    report = ImportReport()
    jobs: list[list[object]] = []
    with RunLock(run_dir):
        writer = TraceWriter(run_dir)
        try:
            import orjson

            for line in import_episodes(file, report):
                job = orjson.loads(line.record)["job"]
                row = [job["task_id"], job["sample_id"], job["seed"], job["split"]]
                if row not in jobs[-1:]:
                    jobs.append(row)
                writer.append(line)
            writer.flush()
        except BaseException:
            # half an import is no run: the same command must work again once the cause is mended
            for name in (TRACES, PRIVATE):
                (run_dir / name).unlink(missing_ok=True)
            raise
        finally:
            writer.close()
        unique = [list(row) for row in dict.fromkeys(tuple(row) for row in jobs)]
        splits = sorted({str(row[3]) for row in unique})
        semantic: JsonDict = {
            "trace_schema": "rayrl-episode-v1",
            "jobs": unique,
            "split": {"name": ",".join(splits), "role": splits[0] if len(splits) == 1 else "mixed"},
            "model": {"kind": "imported"},
            "environment": {"kind": "imported"},
            "prompt": {"sha256": None},
            "skills": {"kind": "unknown"},
            "limits": {},
        }
        manifest = make_manifest(
            experiment=run_dir.name,
            semantic=semantic,
            operational={"imported_from": file.name},
            versions={},
        )
        write_json_atomic(run_dir / MANIFEST, manifest)
    result = {"imported": report.imported, "skipped": report.skipped, "run": str(run_dir)}
    if as_json:
        print_json(result)
    else:
        out = console()
        out.print(f"imported {report.imported} episodes into {run_dir}")
        for reason in report.skipped[:10]:
            out.print(f"  skipped {reason}", markup=False)
        if len(report.skipped) > 10:
            out.print(f"  … and {len(report.skipped) - 10} more (use --json)")
    return 0
