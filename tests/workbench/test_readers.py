"""Trap files: the right value, or a clear error that names row and column."""

import json
import resource
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.errors import DataError
from rayrl.workbench.readers.child import guess_format, read_bytes, read_file
from rayrl.workbench.readers.rows import Limits, Options, ReadError
from tests.workbench.files import HEAD, cell, sheet, workbook


def read(data, kind, **options):
    return read_bytes(data, Options(format=kind, **options), Limits())


# --- encodings


def test_short_gbk_file_is_read_as_gb18030_and_said_so():
    table = read("编号,语句\n001,快\n".encode("gbk"), "csv")
    assert table.rows == [{"编号": "001", "语句": "快"}]
    assert table.encoding == "gb18030" and "not UTF-8" in table.warnings[0]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
def test_marks_win_and_utf8_is_tried_first(encoding):
    assert read("查询\n去公司\n".encode(encoding), "csv").rows == [{"查询": "去公司"}]


def test_bytes_that_are_neither_name_their_place_and_a_choice_helps():
    data = "查詢\n".encode() + "第二\n".encode("big5") + b"\xff\xff\n"
    with pytest.raises(ReadError, match=r"line 2.*choose the encoding"):
        read(data, "csv")
    assert read("查詢\n快慢\n".encode("big5"), "csv", encoding="big5").rows == [{"查詢": "快慢"}]
    with pytest.raises(ReadError, match="no encoding 'klingon'"):
        read(b"a\n1\n", "csv", encoding="klingon")


# --- CSV


def test_text_stays_text():
    rows = read(b"id,label,n\n007,NA,1.50\n008,null,1e5\n009,None,\n", "csv").rows
    assert [r["id"] for r in rows] == ["007", "008", "009"]
    assert [r["label"] for r in rows] == ["NA", "null", "None"]
    assert [r["n"] for r in rows] == ["1.50", "1e5", ""]


def test_unclosed_quote_is_an_error_at_its_line_and_swallows_nothing():
    data = b'id,query\n1,ok\n2,"never closed\n' + b"3,x\n" * 1000
    with pytest.raises(ReadError, match="line 3: the CSV quoting is broken"):
        read(data, "csv")


def test_a_field_beyond_the_limit_is_named_as_that():
    with pytest.raises(ReadError, match="line 2: a field has more than 1000000 characters"):
        read(b"id,query\n1," + b"x" * 1_000_001 + b"\n", "csv")


def test_rows_of_another_width_name_their_line_and_leave_the_others():
    table = read(b"a,b\n1,2\n1,2,3\n3,4\n", "csv")
    assert [row["a"] for row in table.rows] == ["1", "3"] and (table.n_bad, table.bad[0]["place"]) == (1, "line 3")
    assert table.bad[0]["message"].startswith("3 fields, but the header has 2")
    with pytest.raises(ReadError, match="line 2: 3 fields, but the header has 2"):  # nothing else is there
        read(b"a,b\n1,2,3\n", "csv")


def test_long_fields_line_breaks_and_delimiters_inside_quotes():
    long = "x" * 200_000
    table = read(f'id;query\n1;"a;b\nc"\n2;{long}\n'.encode(), "csv")
    assert table.delimiter == ";"
    assert [r["query"] for r in table.rows] == ["a;b\nc", long]
    assert table.places == ["line 2", "line 4"]


def test_header_twice_and_empty_and_no_rows():
    table = read(b"a,a,\n1,2,3\n", "csv")
    assert table.columns == ["a", "a_2", "column_3"] and len(table.warnings) == 2
    with pytest.raises(ReadError, match="no data rows"):
        read(b"a,b\n", "csv")
    with pytest.raises(ReadError, match="NUL"):
        read(b"a\nx\x00y\n", "csv")


# --- JSONL


def test_line_separator_inside_a_string_is_no_line_end():
    data = json.dumps({"q": "a\u2028b\u0085c"}, ensure_ascii=False).encode() + b'\n{"q": "d"}\n'
    assert [r["q"] for r in read(data, "jsonl").rows] == ["a\u2028b\u0085c", "d"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"q": 1', "line 2: no valid JSON at character 8: "),
        (b"[1]", "line 2: a JSON object is expected"),
        (b'{"q": NaN}', "line 2: NaN is no JSON value"),
        (b'{"q": 1, "q": 2}', "line 2: the key 'q' occurs twice"),
        (b'{"q": "\\ud800"}', "line 2: half a surrogate pair"),
        (b'{"q": "\xff"}', "line 2, byte 7: JSONL must be UTF-8"),
        (b'{"q": ' + b"[" * 100_000, "line 2: "),
    ],
)
def test_bad_lines_are_named(line, message):
    if "byte" in message:  # in another encoding every line would be misread
        with pytest.raises(ReadError, match=message):
            read(b'{"q": "ok"}\n' + line + b"\n", "jsonl")
        return
    table = read(b'{"q": "ok"}\n' + line + b'\n{"q": "too"}\n', "jsonl")
    assert [row["q"] for row in table.rows] == ["ok", "too"]
    assert message in f"{table.bad[0]['place']}: {table.bad[0]['message']}" and table.n_bad == 1
    with pytest.raises(ReadError, match=message.replace("line 2", "line 1")):
        read(line + b"\n", "jsonl")


def test_big_integers_stay_exact_and_are_warned_about():
    table = read(b'{"id": 9007199254740993, "x": 1.10, "n": 12}\n', "jsonl")
    assert table.rows == [{"id": "9007199254740993", "x": "1.10", "n": 12}]
    assert "2^53" in table.warnings[0]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=20), min_size=1), min_size=1, max_size=5)
)
def test_any_text_survives_jsonl(rows):
    data = b"".join(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n" for row in rows)
    assert read(data, "jsonl").rows == rows


# --- XLSX


def test_last_cell_of_the_sheet_costs_one_value():
    data = workbook(("S", sheet([HEAD, (2, [cell("A2", "1"), cell("B2", "q")]), (1048576, [cell("XFD1048576", "x")])])))
    assert len(data) < 4900
    table = read(data, "xlsx")
    assert len(table.rows) == 2 and table.places == ["S!2", "S!1048576"]
    assert table.rows[1]["XFD (no header)"] == "x" and "XFD1048576" in table.warnings[0]


def test_declared_dimension_is_ignored_and_chart_sheets_are_passed_over():
    chart = f'<chartsheet xmlns="{"x"}"/>'
    body = sheet([HEAD, (2, [cell("A2", "1"), cell("B2", "q")])], dimension="A1:XFD1048576")
    data = workbook(("C", chart), ("S", body), kinds={"C": "chartsheet"})
    table = read(data, "xlsx")
    assert table.sheet == "S" and len(table.rows) == 1
    assert [s["kind"] for s in table.sheets] == ["chartsheet", "worksheet"]


def test_hidden_sheets_are_shown_and_can_be_chosen():
    one, two = sheet([HEAD, (2, [cell("A2", "1")])]), sheet([HEAD, (2, [cell("A2", "2")])])
    data = workbook(("secret", one), ("open", two), states={"secret": "veryHidden"})
    table = read(data, "xlsx")
    assert table.sheet == "open" and "hidden sheets: secret" in table.warnings[0]
    assert read(data, "xlsx", sheet="secret").rows[0]["id"] == "1"
    with pytest.raises(ReadError, match="there are: secret, open"):
        read(data, "xlsx", sheet="other")


def test_numbers_print_as_typed_and_big_ones_are_warned_about():
    cells = ['<c r="A2"><v>1</v></c>', '<c r="B2"><v>0.1</v></c>']
    more = ['<c r="A3"><v>12345678901234567890</v></c>', '<c r="B3" t="b"><v>1</v></c>']
    table = read(workbook(("S", sheet([HEAD, (2, cells), (3, more)]))), "xlsx")
    assert table.rows[0] == {"id": "1", "query": "0.1"}
    assert table.rows[1] == {"id": "12345678901234567890", "query": "TRUE"}
    assert "S!A3" in table.warnings[0] and "2^53" in table.warnings[0]


def test_dates_are_iso_text():
    styles = '<cellXfs><xf numFmtId="0"/><xf numFmtId="14"/><xf numFmtId="22"/></cellXfs>'
    cells = ['<c r="A2" s="1"><v>45000</v></c>', '<c r="B2" s="2"><v>45000.5</v></c>']
    table = read(workbook(("S", sheet([HEAD, (2, cells)])), styles=styles), "xlsx")
    assert table.rows[0] == {"id": "2023-03-15", "query": "2023-03-15 12:00:00"}


def test_formula_without_stored_result_names_its_cell_and_one_with_it_gives_it():
    for value in ("", "<v/>", "<v></v>"):
        rows = [HEAD, (2, [f'<c r="A2"><f>1+1</f>{value}</c>']), (3, [cell("A3", "3")])]
        table = read(workbook(("S", sheet(rows))), "xlsx")
        assert [row["id"] for row in table.rows] == ["3"] and table.bad[0]["place"] == "S!2"
        assert "cell S!A2 holds a formula without a stored result" in table.bad[0]["message"]
    empty = workbook(("S", sheet([HEAD, (2, ['<c r="A2" t="str"><f>""</f><v></v></c>', cell("B2", "q")])])))
    assert read(empty, "xlsx").rows == [{"id": "", "query": "q"}]  # a stored result that is empty text
    good = workbook(("S", sheet([HEAD, (2, ['<c r="A2"><f>1+1</f><v>2</v></c>'])])))
    assert read(good, "xlsx").rows[0]["id"] == "2"
    broken = workbook(("S", sheet([HEAD, (2, ['<c r="B2" t="e"><v>#REF!</v></c>'])])))
    with pytest.raises(ReadError, match="cell S!B2 holds the error #REF!"):
        read(broken, "xlsx")


def test_merged_cells_are_offered_and_filled_on_demand():
    tail = '<mergeCells><mergeCell ref="A2:A3"/></mergeCells>'
    body = sheet([HEAD, (2, [cell("A2", "x"), cell("B2", "q")]), (3, [cell("B3", "r")])], tail=tail)
    data = workbook(("S", body))
    table = read(data, "xlsx")
    assert table.merged == ["A2:A3"] and table.rows[1]["id"] == ""
    assert read(data, "xlsx", fill_merged=True).rows[1]["id"] == "x"
    huge = sheet([HEAD, (2, [cell("A2", "x")])], tail='<mergeCells><mergeCell ref="A2:XFD1048576"/></mergeCells>')
    with pytest.raises(ReadError, match="too many cells"):
        read(workbook(("S", huge)), "xlsx", fill_merged=True)


def test_entities_encryption_old_files_and_damage():
    evil = '<!DOCTYPE x [<!ENTITY a "b">]>' + sheet([HEAD])
    with pytest.raises(ReadError, match="document type"):
        read(workbook(("S", evil)), "xlsx")
    with pytest.raises(ReadError, match=r"old \.xls"):
        read(b"\xd0\xcf\x11\xe0" + b"0" * 100, "xlsx")
    with pytest.raises(ReadError, match="no zip package"):
        read(b"PK\x03\x04 not really", "xlsx")
    with pytest.raises(ReadError, match="damaged"):
        read(workbook(("S", "<worksheet><sheetData>")), "xlsx")


def test_zip_bomb_is_seen_in_the_directory():
    data = workbook(("S", sheet([HEAD])), extra={"xl/media/x.bin": b"\0" * 60_000_000})
    assert len(data) < 100_000
    with pytest.raises(ReadError, match="zip bomb"):
        read(data, "xlsx")


# --- the child process


def test_child_gives_rows_and_errors_and_keeps_its_limits(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"id,q\n1,a\n")
    table = read_file(path, Options(format="csv"), Limits())
    assert table.rows == [{"id": "1", "q": "a"}] and table.places == ["line 2"]
    path.write_bytes(b"id,q\n1,a\n2,b\n3,c\n")
    table = read_file(path, Options(format="csv"), Limits(), keep=2)
    assert table.places == ["line 2", "line 3"] and table.head()["n_rows"] == 3
    path.write_bytes(b"id,q\n1,a,b\n")
    with pytest.raises(DataError, match="line 2: 3 fields"):
        read_file(path, Options(format="csv"), Limits())
    path.write_bytes(b"id,q\n" + b"1,aaaaaaaaaaaaaaaaaaaa\n" * 180_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="could not be read within"):
        read_file(path, Options(format="csv"), Limits(memory=100 * 1024 * 1024))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    with pytest.raises(DataError, match="at most 0 MB"):
        read_file(path, Options(format="csv"), Limits(max_bytes=100))


def test_format_is_told_by_content_first():
    assert guess_format("x.csv", b"PK\x03\x04") == "xlsx"
    assert guess_format("x", b' {"a": 1}') == "jsonl"
    assert guess_format("x.txt", b"a,b") == "csv"


def test_the_last_cell_of_a_sheet_is_read_in_a_small_child(tmp_path):
    """Readers that believe in the used range ask for hundreds of gigabytes here."""
    path = tmp_path / "f"
    path.write_bytes(workbook(("S", sheet([HEAD, (1048576, [cell("XFD1048576", "x")])]))))
    assert path.stat().st_size < 4900
    table = read_file(path, Options(format="xlsx"), Limits(memory=128 * 1024 * 1024, cpu_s=5))
    assert table.places == ["S!1048576"]


def damaged(data, random):
    out = bytearray(data)
    for _ in range(random.randint(1, 6)):
        at = random.randrange(len(out) + 1)
        kind = random.randrange(3)
        if kind == 0 and at < len(out):
            out[at] = random.randrange(256)
        elif kind == 1:
            out[at:at] = random.choice([b'"', b"\n", b"\0", b"<", b">", b"1e999", b"9" * 40, b"NaN", b"\xff", b"{"])
        else:
            del out[at : at + random.randint(1, 30)]
    return bytes(out)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "xlsx", "xlsx part"])
def test_damage_is_an_error_with_words_or_rows_and_nothing_else(kind):
    """Broken bytes anywhere: zip directory, compressed data, XML, numbers, quoting. Same seeds each time."""
    random = Random(3)
    styles = '<numFmts><numFmt numFmtId="170" formatCode="yyyy"/></numFmts><cellXfs><xf numFmtId="170"/></cellXfs>'
    body = sheet([HEAD, (2, [cell("A2", "1"), '<c r="B2" s="0"><v>45000.5</v></c>'])])
    whole = {"csv": b'id,q\n1,"a,b"\n2,c\n' * 5, "jsonl": b'{"id": 1, "q": {"x": [1, 2]}}\n' * 5}
    whole["xlsx"] = workbook(("S", body), styles=styles)
    for _ in range(400):
        if kind == "xlsx part":
            parts = {"styles": damaged(styles.encode(), random).decode("latin-1")} if random.random() < 0.5 else {}
            xml = body if parts else damaged(body.encode(), random).decode("latin-1")
            data = workbook(("S", xml), styles=parts.get("styles", styles))
        else:
            data = damaged(whole[kind], random)
        try:
            table = read_bytes(data, Options(format=kind.split()[0], fill_merged=True), Limits(max_rows=5000))
        except ReadError as error:
            assert str(error)
        else:
            assert table.rows and len(table.rows) == len(table.places)


def test_numbers_that_are_none_stay_text_and_bad_references_are_named():
    rows = [(2, ['<c r="A2"><v>1e999</v></c>', '<c r="B2"><v>NaN</v></c>'])]
    assert read(workbook(("S", sheet([HEAD, *rows]))), "xlsx").rows == [{"id": "1e999", "query": "NaN"}]
    with pytest.raises(ReadError, match="the style of cell S!A2 has the number 'x'"):
        read(workbook(("S", sheet([HEAD, (2, ['<c r="A2" s="x"><v>1</v></c>'])]))), "xlsx")
    with pytest.raises(ReadError, match="a row of sheet 'S' has the number 'zwei'"):
        read(workbook(("S", sheet([HEAD, ("zwei", ["<c><v>1</v></c>"])]))), "xlsx")
