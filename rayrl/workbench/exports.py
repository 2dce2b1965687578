"""Exports: results, reviews or a comparison as CSV, XLSX or JSONL, and a bundle that verifies itself offline.

CSV is UTF-8 with a byte order mark, and text that a spreadsheet would run as a formula gets a leading apostrophe. XLSX
is written with formulas and links off; text beyond the 32,767 characters of a cell goes to a side file in the archive.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import and_, select

from rayrl.errors import DataError
from rayrl.schemas import JsonDict
from rayrl.workbench import tables
from rayrl.workbench.bundle_check import CHECKER
from rayrl.workbench.compare import compare
from rayrl.workbench.metrics import GOLD_VIEWS, experiment_metrics
from rayrl.workbench.reviews import list_reviews
from rayrl.workbench.workbench import Workbench

CELL = 32_767
_RISKY = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")
FORMATS = ("csv", "xlsx", "jsonl")
_R, _C = tables.results, tables.cases
_SIDE = ("prediction", "confidence", "reason", "evidence", "evidence_refs")
COLUMNS: dict[str, tuple[str, ...]] = {
    "results": (),
    "reviews": ("case_id", "ordinal", "version", "verdict", "note", "reviewer", "created_at"),
    "compare": ("group", "case_id", "query", "domain", "gold_route", *(f"{s}_{key}" for s in "ab" for key in _SIDE)),
}
"""Headers of exports that may be without rows."""


def result_rows(bench: Workbench, experiment_id: str) -> Iterator[JsonDict]:
    """Raw results with their input, label and evidence, in order."""
    experiment = bench.experiments.get(experiment_id)
    query = (
        select(_R, _C.c.query, _C.c.request_id, _C.c.body)
        .join(_C, and_(_C.c.dataset_id == experiment["dataset_id"], _C.c.ordinal == _R.c.ordinal))
        .where(_R.c.experiment_id == experiment_id)
        .order_by(_R.c.ordinal, _R.c.repeat)
    )
    with bench.store.read() as connection:
        for row in connection.execute(query).mappings():
            detail = row["detail"] or {}
            yield {
                "case_id": row["case_id"],
                "repeat": row["repeat"],
                "query": row["query"],
                "domain": row["domain"],
                "request_id": row["request_id"],
                "gold_route": row["gold"],
                "prediction": row["prediction"],
                "agrees": None if row["agrees"] is None else bool(row["agrees"]),
                "confidence": row["confidence"],
                "reason": row["reason"],
                "evidence": row["evidence"],
                "evidence_refs": detail.get("evidence_refs", []),
                "read_files": list(dict.fromkeys(r["path"] for r in detail.get("reads", []))),
                "status": row["state"],
                "failure": row["failure"],
                "error": (detail.get("error") or {}).get("message"),
                "attempts": row["attempts"],
                "raw_output": detail.get("raw_output"),
                "agent_session_id": row["session_id"],
                "model_calls": row["model_calls"],
                "prompt_tokens": row["prompt_tokens"],
                "completion_tokens": row["completion_tokens"],
                "source": row["body"].get("source_place"),
                "source_row": row["body"].get("source_row"),
            }


def review_rows(bench: Workbench, experiment_id: str) -> Iterator[JsonDict]:
    """Every review, earlier versions included."""
    for row in list_reviews(bench, experiment_id, history=True):
        yield {name: row[name] for name in COLUMNS["reviews"]}


def compare_rows(bench: Workbench, a: str, b: str) -> Iterator[JsonDict]:
    """One row per case and group of a comparison, with both verdicts."""
    found = compare(bench, a, b)
    sides = []
    for experiment_id in (a, b):
        rows = {row["case_id"]: row for row in result_rows(bench, experiment_id) if row["repeat"] == 0}
        sides.append(rows)
    for group, cases in found["groups"].items():
        for case_id in cases:
            left, right = sides[0].get(case_id, {}), sides[1].get(case_id, {})
            either = left or right
            out: JsonDict = {"group": group, "case_id": case_id}
            out |= {key: either.get(key) for key in ("query", "domain", "gold_route")}
            for name, side in (("a", left), ("b", right)):
                out |= {f"{name}_{key}": side.get(key) for key in _SIDE}
            yield out


def escape_formula(text: str) -> str:
    """Text that no spreadsheet takes for a formula, also after leading blanks."""
    return f"'{text}" if text.lstrip(" \n\u00a0\u3000").startswith(_RISKY) or text.startswith(_RISKY) else text


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return value


def write_csv(rows: Iterable[JsonDict], columns: Sequence[str] = ()) -> bytes:
    """CSV; numbers stay numbers, text is escaped. ``columns`` is the header where there are no rows."""
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    names: Sequence[str] = columns
    if columns:
        writer.writerow(columns)
    for row in rows:
        if not names:
            names = list(row)
            writer.writerow(names)
        cells = [_cell(value) for value in row.values()]
        writer.writerow([escape_formula(cell) if isinstance(cell, str) else cell for cell in cells])
    return b"\xef\xbb\xbf" + out.getvalue().encode("utf-8", "replace")


def write_jsonl(rows: Iterable[JsonDict]) -> bytes:
    """JSON Lines."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for row in rows)


def write_xlsx(rows: Iterable[JsonDict], sheet_name: str, columns: Sequence[str] = ()) -> tuple[bytes, dict[str, str]]:
    """A workbook, and the texts that do not fit a cell by file name."""
    import xlsxwriter  # type: ignore[import-untyped]

    out = io.BytesIO()
    options = {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False}
    book = xlsxwriter.Workbook(out, options)
    sheet = book.add_worksheet(sheet_name)
    side: dict[str, str] = {}
    names = list(columns)
    sheet.write_row(0, 0, names)
    for number, row in enumerate(rows, 1):
        if not names:
            names = list(row)
            sheet.write_row(0, 0, names)
        for column, (name, value) in enumerate(row.items()):
            cell = _cell(value)
            if cell is None:
                continue
            if isinstance(cell, bool):
                sheet.write_boolean(number, column, cell)
            elif isinstance(cell, int | float):
                sheet.write_number(number, column, cell)
            else:
                text = str(cell)
                if len(text.encode("utf-16-le")) // 2 > CELL:
                    key = f"texts/{number}-{name}.txt"
                    side[key] = text
                    text = f"[{len(text)} characters, see {key}] {text[:200]}"
                sheet.write_string(number, column, text)
    book.close()
    return out.getvalue(), side


def export(rows: Iterable[JsonDict], kind: str, name: str, columns: Sequence[str] = ()) -> tuple[bytes, str, str]:
    """Bytes, file name and media type of an export. A workbook with side files comes as a zip archive.

    Args:
        columns: names in the order of the rows, for a header where there are none.

    Raises:
        DataError: unknown format.
    """
    if kind == "csv":
        return write_csv(rows, columns), f"{name}.csv", "text/csv; charset=utf-8"
    if kind == "jsonl":
        return write_jsonl(rows), f"{name}.jsonl", "application/x-ndjson"
    if kind != "xlsx":
        raise DataError(f"export format {kind!r} is not known; use one of {', '.join(FORMATS)}")
    data, side = write_xlsx(rows, "export", columns)
    if not side:
        return data, f"{name}.xlsx", "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
    files = {f"{name}.xlsx": data} | {path: text.encode("utf-8", "replace") for path, text in side.items()}
    return _zip(files), f"{name}.zip", "application/zip"


def bundle(bench: Workbench, experiment_id: str) -> bytes:
    """Everything that makes the experiment, in one archive with the digest of each file and a script that checks them.

    The script needs Python alone: it compares every digest, recomputes the Skill's content hash and counts the
    agreement again from the raw results.
    """
    experiment = bench.experiments.get(experiment_id)
    dataset = bench.datasets.get(experiment["dataset_id"])
    skill = bench.snapshots.load(experiment["snapshot_id"])
    profile, saved = bench.datasets.profile(dataset["profile_name"], dataset["profile_version"])
    metrics = {view: experiment_metrics(bench.store, experiment, dataset["classes"], view=view) for view in GOLD_VIEWS}
    files: dict[str, bytes] = {
        "experiment.json": _json({k: v for k, v in experiment.items() if k not in ("driver", "driver_until")}),
        "dataset.json": _json(dataset),
        "mapping.json": _json({"name": saved["name"], "version": saved["version"], **profile.model_dump()}),
        "skill/snapshot.json": _json(skill.manifest.model_dump()),
        "metrics.json": _json(metrics),
        "results.jsonl": write_jsonl(result_rows(bench, experiment_id)),
        "reviews.jsonl": write_jsonl(review_rows(bench, experiment_id)),
        "verify.py": CHECKER.encode(),
    }
    files |= {f"skill/tree/{entry.path}": skill.files[entry.path] for entry in skill.manifest.files}
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in sorted(files.items())}
    files["MANIFEST.json"] = _json({"schema": "rayrl-workbench-bundle-v1", "files": digests})
    return _zip(files)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True, default=str).encode("utf-8", "replace")


def _zip(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            info = zipfile.ZipInfo(path, date_time=(2000, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return out.getvalue()
