"""Exports: escaped, complete, and a bundle that notices damage without rayrl."""

import csv
import io
import json
import subprocess
import sys
import zipfile

import pytest

from rayrl.workbench.exports import COLUMNS, bundle, compare_rows, escape_formula, export, result_rows, review_rows
from rayrl.workbench.readers.child import read_bytes
from rayrl.workbench.readers.rows import Limits, Options
from rayrl.workbench.reviews import add_review
from tests.workbench.conftest import drive, sample_experiment


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =cmd|' /C calc'!A0", "＝1", "\u3000=1", "\n=1"]
)
def test_formulas_are_escaped(text):
    assert escape_formula(text) == f"'{text}"
    (row,) = csv.DictReader(io.StringIO(export([{"a": text}], "csv", "x")[0].decode("utf-8-sig"), newline=""))
    assert row["a"].startswith("'")


def test_plain_text_and_numbers_are_left_alone():
    data = export([{"a": "你好", "n": -1.5, "none": None, "list": ["x"]}], "csv", "x")[0]
    assert data.startswith(b"\xef\xbb\xbf")
    assert list(csv.reader(io.StringIO(data.decode("utf-8-sig"))))[1] == ["你好", "-1.5", "", '["x"]']


def test_xlsx_runs_nothing_and_long_text_goes_to_a_side_file():
    rows = [{"a": "=1+1", "b": "http://x.y", "c": "007"}, {"a": "x" * 40_000, "b": "", "c": "1"}]
    data, name, kind = export(rows, "xlsx", "e")
    assert name == "e.zip" and kind == "application/zip"
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("texts/2-a.txt") == b"x" * 40_000
        book = archive.read("e.xlsx")
    with zipfile.ZipFile(io.BytesIO(book)) as package:
        xml = package.read("xl/worksheets/sheet1.xml").decode()
        assert "<f>" not in xml and "hyperlink" not in xml.lower()
    table = read_bytes(book, Options(format="xlsx"), Limits())
    assert table.rows[0] == {"a": "=1+1", "b": "http://x.y", "c": "007"}
    assert table.rows[1]["a"].startswith("[40000 characters, see texts/2-a.txt]")


def test_three_kinds_of_export_are_complete(bench):
    a, b = sample_experiment(bench, 40)["id"], sample_experiment(bench, 40, version=2)["id"]
    drive(bench, a)
    drive(bench, b)
    add_review(bench, a, 3, verdict="ambiguous", note="=1")
    results = list(result_rows(bench, a))
    assert len(results) == 40 and results[0]["source"] == "line 1" and results[0]["source_row"]["rid"] == "req-0001"
    assert {r["status"] for r in results} == {"completed"} and all(r["agent_session_id"] for r in results)
    assert [r["verdict"] for r in review_rows(bench, a)] == ["ambiguous"]
    compared = list(compare_rows(bench, a, b))
    assert all(tuple(row) == COLUMNS["compare"] for row in compared)
    groups = {row["group"] for row in compared}
    assert groups <= {"fixed", "regressed", "reason_changed", "evidence_gained", "evidence_lost"}


def test_exports_without_rows_have_their_header(bench):
    a = sample_experiment(bench, 3)["id"]
    drive(bench, a)
    add_review(bench, a, 0, verdict="ambiguous")
    for kind, rows in (("reviews", review_rows(bench, a)), ("compare", [])):
        given = list(rows)
        for found in (given, []):
            text = export(found, "csv", "x", COLUMNS[kind])[0].decode("utf-8-sig")
            assert text.splitlines()[0] == ",".join(COLUMNS[kind]) and len(text.splitlines()) == 1 + len(found)
        book = zipfile.ZipFile(io.BytesIO(export([], "xlsx", "x", COLUMNS[kind])[0]))
        assert COLUMNS[kind][-1] in book.read("xl/sharedStrings.xml").decode()


def test_bundle_verifies_itself_and_notices_every_kind_of_damage(bench, tmp_path):
    experiment = sample_experiment(bench, 15)["id"]
    drive(bench, experiment)
    data = bundle(bench, experiment)
    assert data == bundle(bench, experiment)

    def check(change=None):
        folder = tmp_path / str(change)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(folder)
        if change:
            change(folder)
        return subprocess.run([sys.executable, "-I", str(folder / "verify.py")], capture_output=True, text=True)

    good = check()
    assert good.returncode == 0 and "bundle is intact" in good.stdout and "of 15 labelled cases agree" in good.stdout

    def edit(folder):
        text = (folder / "results.jsonl").read_text()
        (folder / "results.jsonl").write_text(text.replace('"slow"', '"fast"', 1))

    def remove(folder):
        (folder / "skill/tree/SKILL.md").unlink()

    def add(folder):
        (folder / "extra.txt").write_text("x")

    def forge(folder):
        import hashlib

        edit(folder)
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        manifest["files"]["results.jsonl"] = hashlib.sha256((folder / "results.jsonl").read_bytes()).hexdigest()
        (folder / "MANIFEST.json").write_text(json.dumps(manifest))

    for change, message in (
        (edit, "results.jsonl is not what was exported"),
        (remove, "SKILL.md is missing"),
        (add, "extra.txt should not be there"),
        (forge, "metrics.json says"),
    ):
        bad = check(change)
        assert bad.returncode == 1 and message in bad.stderr
