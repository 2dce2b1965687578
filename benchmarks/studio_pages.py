"""How long the workbench's pages take over an experiment of 100,000 cases and a record of 50 MB.

    python -m benchmarks.studio_pages [--cases 100000] [--root FOLDER] [--out FILE]

Builds a store with two experiments of made-up results (no model runs). Then, for each page: the first visit of a studio
that has just started, until Chromium shows something of it, until all figures are there, and the median of five later
visits (see :mod:`benchmarks.studio_visits`). At last all pages in a row, asked of one studio that has just started.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import random
import tempfile
from dataclasses import asdict
from pathlib import Path

import orjson
from sqlalchemy import bindparam, insert, update

from benchmarks.studio_visits import Studio, chromium, table, visit
from rayrl.workbench import tables
from rayrl.workbench.cases import Case
from rayrl.workbench.samples import skill_folder
from rayrl.workbench.store import now
from rayrl.workbench.workbench import Workbench

DOMAINS = ("navigation", "car", "media", "information", "calls")
REFS = ("knowledge/地图能力.md#到达电量预估", "knowledge/边界.md#开放式行程规划", "SKILL.md#默认")


def build(bench: Workbench, n: int) -> list[str]:
    """Two finished experiments over ``n`` cases; the first case of the first has a record of 50 MB."""
    draw = random.Random(0)
    cases = [
        Case(case_id=f"c{i:06d}", query=f"request {i} 电量够不够", gold_route=draw.choice(["fast", "slow"]),
             domain=draw.choice(DOMAINS), source_row={"row": i}, source_place=f"line {i + 2}")
        for i in range(n)
    ]  # fmt: skip
    blob = bench.store.put_blob(b"benchmark")
    dataset = bench.datasets.freeze(
        name="large", cases=cases, classes=["fast", "slow"], upload=blob, options={}, profile=("large", 1)
    )
    made = []
    for version in (1, 2):
        snapshot = bench.snapshots.add_folder(skill_folder(version))
        one = bench.experiments.create(
            name=f"large v{version}", dataset_id=dataset["id"], snapshot_id=snapshot["id"], model="reader"
        )
        made.append(one["id"])
        rows = []
        for i, case in enumerate(cases):
            ref = draw.choice(REFS)
            path, _, section = ref.partition("#")
            said = case.gold_route if draw.random() < 0.9 else draw.choice(["fast", "slow"])
            cited = {"ref": ref, "exists": True, "read": "file", "path": path, "section": section, "lines": [1, 3]}
            detail = {"evidence_refs": [ref], "reads": [], "raw_output": "submit" * 10,
                      "evidence": {"state": "supported", "cited": [cited], "read_not_cited": []}}  # fmt: skip
            rows.append(
                {"at": i, "state": "completed", "prediction": said, "reason": f"rule {draw.randrange(50)} applies",
                 "confidence": round(draw.random(), 3), "evidence": "supported", "agrees": int(said == case.gold_route),
                 "detail": detail, "attempts": 1, "model_calls": 3, "prompt_tokens": 900, "completion_tokens": 40}
            )  # fmt: skip
        r, e = tables.results, tables.experiments
        with bench.store.write() as connection:
            where = (r.c.experiment_id == one["id"]) & (r.c.ordinal == bindparam("at"))
            connection.execute(update(r).where(where), rows)
            connection.execute(update(e).where(e.c.id == one["id"]).values(state="completed"))
            bench.store.note(connection, one["id"], "completed", {})
    _record(bench, made[0])
    return made


def _record(bench: Workbench, experiment_id: str) -> None:
    step = {"index": 0, "model": {"content": "x" * 1000, "tool_calls": []}, "action_feedback": {"valid": True}}
    step |= {"observation": {"text": 0, "state": 0, "version": "1"}, "tools": 0}
    record = {"schema": "rayrl-episode-v1", "status": "completed", "usage": {}, "duration_s": 1.0, "conversation": [],
              "steps": [step | {"index": i} for i in range(45_000)],
              "interned": {"texts": ["page"], "states": [{}], "toolsets": [[]]}}  # fmt: skip
    packed = gzip.compress(orjson.dumps(record), 1)
    path = bench.store.root / "traces" / "large.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed)
    row = {"experiment_id": experiment_id, "ordinal": 0, "repeat": 0, "attempt": 1, "token": 1, "owner": "benchmark",
           "state": "completed", "trace": str(path.relative_to(bench.store.root)), "started_at": now(),
           "trace_sha256": hashlib.sha256(packed).hexdigest()}  # fmt: skip
    with bench.store.write() as connection:
        connection.execute(insert(tables.case_runs).values(row))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = args.root or Path(scratch)
        bench = Workbench(root)
        a, b = build(bench, args.cases)
        bench.close()
        base = f"/workbench/experiments/{a}"
        urls = ["/workbench", base, f"{base}/disagreements", f"{base}/disagreements?review=none", f"{base}/cases"]
        urls += [f"{base}/cases?cursor={args.cases * 9 // 10}.0", f"{base}/cases?search={args.cases - 1}"]
        urls += [f"{base}/cases?sort=confidence", f"{base}/versions", f"{base}/cases/{args.cases // 2}"]
        urls += [f"{base}/cases/0", f"{base}/cases/0?part=1000", f"/workbench/compare?a={a}&b={b}"]
        runs = Path(scratch) / "runs"
        runs.mkdir()

        def start() -> Studio:
            return Studio(root, runs)

        with chromium() as browser:
            found = {url.replace(a, "A").replace(b, "B"): visit(start, browser, url) for url in urls}
        with start() as studio:
            row = [round(studio.ask(url)[0]) for url in urls]
    print(table(found))
    print(f"all in a row, ms: {row}")
    if args.out:
        made = {"pages": {name: asdict(one) for name, one in found.items()}, "in_a_row_ms": row}
        args.out.write_bytes(orjson.dumps(made, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
