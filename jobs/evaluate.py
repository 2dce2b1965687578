"""``rayrl evaluate RUN...``: stream one or many runs into rows, Parquet, summaries and labels.

Engines: ``local`` reads byte ranges one after the other in this process; ``ray`` hands them to Ray Data tasks. Both
run the same function on the same kind of ranges, and the same reduction, so their numbers are identical. ``auto`` takes
the one that should end sooner (:func:`choose_engine`). Compacted Parquet is read in this process: its summary columns
are small.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.command import confidence_level
from jobs.output import console, print_json
from rayrl.errors import DataError
from rayrl.evaluation.collect import Collector
from rayrl.evaluation.known_calls import read_expected
from rayrl.evaluation.pipeline import PassOptions, local_tables, process_chunk, step_table
from rayrl.evaluation.rows import STEP_ARROW
from rayrl.evaluation.sources import Chunk, Source, expected_jobs, find_sources, load_goals, manifest_of, plan_chunks
from rayrl.evaluation.statistics import LEVEL
from rayrl.evaluation.summary import summarize
from rayrl.evaluation.tables import diagnosis_tables, summary_tables
from rayrl.traces.manifest import write_json_atomic

Engine = Literal["auto", "local", "ray"]
LOCAL_BYTES_PER_S = 300e6
"""What one core reads, measured; only the choice of an engine depends on it."""
RAY_SHARE = 0.7
"""What a core reads inside Ray, as a share of that."""
RAY_START_S, RAY_JOIN_S = 5.0, 2.0
CLUSTER_CPUS = 8
"""CPUs assumed of a named cluster before joining it."""
RAY_CHUNK_BYTES = 16 * 1024**2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, trace files, globs, s3:// URLs")
    parser.add_argument("--engine", choices=("auto", "local", "ray"), default="auto", help="see docs/evaluation.md")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write summary.json, episodes.parquet, ... there")
    parser.add_argument("--labels", action="store_true", help="diagnose: labels with step references, and their rates")
    parser.add_argument("--steps", action="store_true", help="with --out: write steps.parquet too")
    parser.add_argument("--calls", type=Path, metavar="FILE", help="known right calls (JSON lines); implies --labels")
    parser.add_argument("--no-private", action="store_true", help="leave the private goals alone when diagnosing")
    parser.add_argument("--level", type=confidence_level, default=LEVEL, help="confidence level (default: 0.95)")
    parser.add_argument("--address", default=None, help="Ray cluster to join; default RAY_ADDRESS or a local Ray")


def choose_engine(engine: Engine, json_bytes: int, *, address: str | None = None) -> Literal["local", "ray"]:
    """The rule for ``auto``: Ray when starting (or joining) it and sharing the work should end sooner than one core.

    On 2 CPUs that is from about 5 GB of JSON lines on, on 8 from 1.8 GB, with a cluster named from 0.7 GB.
    """
    if engine != "auto":
        return engine
    cluster = bool(address or os.environ.get("RAY_ADDRESS"))
    cpus = CLUSTER_CPUS if cluster else os.cpu_count() or 1
    local = json_bytes / LOCAL_BYTES_PER_S
    ray = (RAY_JOIN_S if cluster else RAY_START_S) + json_bytes / (LOCAL_BYTES_PER_S * RAY_SHARE * cpus)
    return "ray" if ray < local else "local"


def ray_tables(chunks: list[Chunk], options: PassOptions | None, *, address: str | None = None) -> Iterator[pa.Table]:
    """Row tables of the chunks from Ray Data, in order; ``options=None`` gives step rows."""
    from actors.cluster import connect

    connect(address)
    import ray

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # a plan and a tick per pass interest nobody here
    # goals can be large: they travel once, through the object store, not with every task
    shared = ray.put(options)

    def process(batch: dict[str, Any]) -> pa.Table:
        given = ray.get(shared)
        made = []
        for run, url, base, size, start, stop in zip(
            *(batch[k].tolist() for k in ("run", "url", "base", "size", "start", "stop")), strict=True
        ):
            chunk = Chunk(Source(run, url, base, size, "jsonl"), start, stop)
            made.append(step_table(chunk) if given is None else process_chunk(chunk, given))
        return pa.concat_tables(made)

    items = [
        {
            "run": c.source.run,
            "url": c.source.url,
            "base": c.source.base,
            "size": c.source.size,
            "start": c.start,
            "stop": c.stop,
        }
        for c in chunks
    ]
    dataset = ray.data.from_items(items, override_num_blocks=len(items))
    rows = dataset.map_batches(process, batch_size=None, batch_format="numpy", zero_copy_batch=True)
    yield from rows.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2)


def evaluate(
    locations: list[str],
    *,
    engine: Engine = "auto",
    out: Path | None = None,
    labels: bool = False,
    steps: bool = False,
    private: bool = True,
    calls: Path | None = None,
    level: float = LEVEL,
    address: str | None = None,
    chunk_bytes: int | None = None,
) -> dict[str, Any]:
    """Evaluate runs: ``{"engine", "runs": {name: summary}, "unusable_lines", "diagnosis", "read"}``.

    Raises:
        UserError: nothing to read, a file that is no trace file, or an option that does not fit.
    """
    sources = find_sources(locations)
    labels = labels or calls is not None
    size = sum(s.size for s in sources if s.kind == "jsonl")
    chosen = choose_engine(engine, size, address=address)
    chunks = plan_chunks(sources, chunk_bytes or (RAY_CHUNK_BYTES if chosen == "ray" else 8 * 1024**2))
    options = PassOptions(
        wide=out is not None,
        labels=labels,
        goals={s.run: load_goals(s) for s in sources} if labels and private else {},
        expected=read_expected(calls) if calls is not None else {},
    )
    started = time.perf_counter()
    with Collector(out, labels=labels) as collector:
        for table in local_tables(sources, [] if chosen == "ray" else chunks, options):
            collector.add(table)
        if chosen == "ray" and chunks:
            for table in ray_tables(chunks, options, address=address):
                collector.add(table)
    rows, unusable = collector.table()
    runs = {}
    for source in sources:
        mine = rows if len(sources) == 1 else rows.filter(pc.equal(rows["run"], source.run))
        runs[source.run] = summarize(mine, expected_jobs=expected_jobs(manifest_of(source)), level=level)
    seconds = time.perf_counter() - started
    result = {
        "engine": chosen,
        "runs": runs,
        "unusable_lines": unusable,
        "diagnosis": collector.diagnosis(level=level),
        "read": {"bytes": size, "seconds": seconds, "records": rows.num_rows},
    }
    if out is not None:
        if steps:
            _write_steps(out, chunks, chosen, address)
        write_json_atomic(out / "summary.json", {k: v for k, v in result.items() if k != "diagnosis"})
        if labels:
            write_json_atomic(out / "diagnosis.json", result["diagnosis"])
    elif steps:
        raise DataError("--steps needs --out: steps.parquet has to go somewhere")
    return result


def _write_steps(out: Path, chunks: list[Chunk], engine: str, address: str | None) -> None:
    temporary = out / ".steps.parquet.tmp"
    with pq.ParquetWriter(temporary, STEP_ARROW, compression="zstd") as writer:
        tables = ray_tables(chunks, None, address=address) if engine == "ray" else map(step_table, chunks)
        for table in tables:
            writer.write_table(table)
    temporary.replace(out / "steps.parquet")


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    result = evaluate(
        args.runs,
        engine=args.engine,
        out=args.out,
        labels=args.labels,
        steps=args.steps,
        private=not args.no_private,
        calls=args.calls,
        level=args.level,
        address=args.address,
    )
    if args.json:
        print_json(result)
        return 0
    out = console()
    for name, summary in result["runs"].items():
        out.rule(name, align="left")
        for table in summary_tables(summary):
            out.print(table)
    if result["diagnosis"] is not None:
        for table in diagnosis_tables(result["diagnosis"]):
            out.print(table)
    unusable = {kind: n for kind, n in result["unusable_lines"].items() if n}
    if unusable:
        out.print("lines that are no episode record: " + ", ".join(f"{n} {kind}" for kind, n in unusable.items()))
    read = result["read"]
    out.print(
        f"{read['records']} records, {read['bytes'] / 1e6:.1f} MB of JSON lines in {read['seconds']:.2f} s "
        f"({result['engine']} engine)"
    )
    if args.out is not None:
        out.print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("evaluate", add_arguments, run, None))
