"""XLSX, read straight from its XML with bounded memory.

Cells are kept sparse, so one value in the last cell of a sheet costs one value; the declared dimension is ignored.
Chart sheets are skipped, hidden sheets shown, numbers printed as a person typed them (no ``.0``), formulas without a
stored result are an error that names the cell, merged ranges are offered for filling. A document type declaration is
refused, so there are no entities to expand.
"""

from __future__ import annotations

import io
import lzma
import math
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from rayrl.workbench.readers.rows import MAX_SAFE_INTEGER, Limits, Options, ReadError, RowError, Table, unique_columns

_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_STRICT = "{http://purl.oclc.org/ooxml/spreadsheetml/main}"
_REF = re.compile(r"^([A-Z]{1,3})([0-9]{1,7})$")
DAMAGE = (ParseError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, RuntimeError)
"""What a broken package or part raises, depending on the byte (an unknown compression is a RuntimeError)."""
_DATE_IDS = {*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)}


def check_zip(data: bytes, limits: Limits) -> zipfile.ZipFile:
    """Open the package after looking at its directory.

    Raises:
        ReadError: no zip file, encrypted, or one that would unpack to too much.
    """
    try:
        package = zipfile.ZipFile(io.BytesIO(data))
    except DAMAGE:
        hint = "it is an old .xls file; save it as .xlsx" if data[:4] == b"\xd0\xcf\x11\xe0" else "it is no zip package"
        raise ReadError(f"this is no XLSX file: {hint}") from None
    total = sum(info.file_size for info in package.infolist())
    if any(info.flag_bits & 1 for info in package.infolist()):
        raise ReadError("the workbook is encrypted; save it without a password")
    if total > limits.max_unpacked or (total > 10_000_000 and total > limits.max_ratio * max(1, len(data))):
        raise ReadError(
            f"the workbook would unpack from {len(data) / 1e6:.2f} to {total / 1e6:.0f} MB; it looks like a zip bomb"
        )
    return package


def read_xlsx(data: bytes, options: Options, limits: Limits) -> Table:
    """Rows of one sheet: the chosen one, else the first visible worksheet. The first filled row is the header.

    Raises:
        ReadError: names the sheet and cell.
    """
    package = check_zip(data, limits)
    reader = _Workbook(package, limits)
    sheets = reader.sheets()
    worksheets = [sheet for sheet in sheets if sheet["kind"] == "worksheet"]
    if not worksheets:
        raise ReadError("the workbook has no worksheet")
    wanted = options.sheet or next((s["name"] for s in worksheets if s["state"] == "visible"), worksheets[0]["name"])
    sheet = next((s for s in worksheets if s["name"] == wanted), None)
    if sheet is None:
        raise ReadError(f"there is no worksheet {wanted!r}; there are: {', '.join(s['name'] for s in worksheets)}")
    table = Table("xlsx", [], [], [], sheet=wanted)
    table.sheets = [{key: s[key] for key in ("name", "kind", "state")} for s in sheets]
    if any(s["state"] != "visible" for s in worksheets):
        table.warn("there are hidden sheets: " + ", ".join(s["name"] for s in worksheets if s["state"] != "visible"))
    cells, merged, spoilt = reader.cells(sheet, table)
    table.merged = [f"{_letters(a)}{r}:{_letters(b)}{s}" for a, r, b, s in merged]
    if options.fill_merged:
        _fill(cells, merged, limits)
    elif merged:
        table.warn(f"{len(merged)} merged ranges ({', '.join(table.merged[:5])}): only their first cell has the value")
    _rows(cells, table, limits, spoilt)
    return table


def _rows(cells: dict[int, dict[int, str]], table: Table, limits: Limits, spoilt: dict[int, str]) -> None:
    rows = [(row, values) for row, values in sorted(cells.items()) if any(v.strip() for v in values.values())]
    if not rows:
        return
    top, header = rows[0]
    for row, message in sorted(spoilt.items()):
        if row <= top:
            raise ReadError(message)
        table.reject(f"{table.sheet}!{row}", message)
    rows = [rows[0], *((row, values) for row, values in rows[1:] if row not in spoilt)]
    width = max(header)
    names = unique_columns([header.get(column, "") for column in range(1, width + 1)], []) if width <= 16384 else []
    # columns without a header exist only where some row has a value in them
    used = sorted({c for _, values in rows[1:] for c in values} | {c for c, v in header.items() if v.strip()})
    labels = {c: names[c - 1] if header.get(c, "").strip() else f"{_letters(c)} (no header)" for c in used}
    for column in used:
        if not header.get(column, "").strip():
            row = next(r for r, values in rows[1:] if column in values)
            table.warn(f"cell {_letters(column)}{row} has a value, but column {_letters(column)} has no header")
    if len(used) > limits.max_columns:
        raise ReadError(f"{len(used)} columns; at most {limits.max_columns} are read")
    if len(rows) - 1 > limits.max_rows:
        raise ReadError(f"more than {limits.max_rows} rows; split the file")
    table.columns = [labels[c] for c in used]
    for row, values in rows[1:]:
        table.rows.append({labels[c]: values.get(c, "") for c in used})
        table.places.append(f"{table.sheet}!{row}")


def _fill(cells: dict[int, dict[int, str]], merged: list[tuple[int, int, int, int]], limits: Limits) -> None:
    budget = limits.max_rows * 50
    for left, top, right, bottom in merged:
        value = cells.get(top, {}).get(left, "")
        budget -= (right - left + 1) * (bottom - top + 1)
        if budget < 0:
            raise ReadError("the merged ranges cover too many cells to fill")
        for row in range(top, bottom + 1):
            for column in range(left, right + 1):
                cells.setdefault(row, {}).setdefault(column, value)


class _Workbook:
    def __init__(self, package: zipfile.ZipFile, limits: Limits) -> None:
        self.package = package
        self.limits = limits
        self.strings: list[str] | None = None
        self.dates: list[bool] | None = None
        self.epoch = datetime(1899, 12, 30)

    def sheets(self) -> list[dict[str, Any]]:
        """Every sheet with name, kind, state and part name."""
        targets = self._relations("xl/workbook.xml")
        out = []
        for element in self._elements("xl/workbook.xml", {"sheet", "workbookPr"}):
            if _tag(element) == "workbookPr":
                if element.get("date1904") in ("1", "true"):
                    self.epoch = datetime(1904, 1, 1)
                continue
            relation = next((v for k, v in element.attrib.items() if k.endswith("}id")), "")
            kind, part = targets.get(relation, ("", ""))
            out.append(
                {
                    "name": element.get("name", ""),
                    "state": element.get("state", "visible"),
                    "kind": "worksheet" if kind.endswith("/worksheet") else (kind.rsplit("/", 1)[-1] or "unknown"),
                    "part": part,
                }
            )
        return out

    def cells(
        self, sheet: dict[str, Any], table: Table
    ) -> tuple[dict[int, dict[int, str]], list[tuple[int, int, int, int]], dict[int, str]]:
        """Sparse cells by row and column (from 1), merged ranges (left, top, right, bottom), and what spoils a row."""
        spoilt: dict[int, str] = {}
        out: dict[int, dict[int, str]] = {}
        merged: list[tuple[int, int, int, int]] = []
        row, column, count = 0, 0, 0
        for element in self._elements(sheet["part"], {"row", "c", "mergeCell"}, starts=frozenset({"row"})):
            tag = _tag(element)
            if tag == "row":
                row, column = _whole(element.get("r"), row + 1, f"a row of sheet {sheet['name']!r}"), 0
                continue
            if tag == "mergeCell":
                left, _, right = element.get("ref", "").partition(":")
                merged.append((*_place(left), *_place(right or left)))
                continue
            reference = element.get("r")
            if reference:
                column, row = _place(reference)
            else:
                column += 1
            try:
                value = self._value(element, f"{sheet['name']}!{_letters(column)}{row}", table)
            except RowError as error:
                spoilt.setdefault(row, str(error))
                continue
            if value != "":
                count += 1
                if count > self.limits.max_rows * 50:
                    raise ReadError(f"sheet {sheet['name']!r} has more than {self.limits.max_rows * 50} filled cells")
                out.setdefault(row, {})[column] = value
        return out, merged, spoilt

    def _value(self, cell: Element, where: str, table: Table) -> str:
        kind = cell.get("t", "n")
        raw, formula = None, False
        for child in cell:
            tag = _tag(child)
            if tag == "v":
                raw = child.text or ""
            elif tag == "f":
                formula = True
            elif tag == "is":
                raw, kind = _text(child), "str"
        if formula and (raw is None or (raw == "" and kind != "str")):
            raise RowError(f"cell {where} holds a formula without a stored result; open and save it in a spreadsheet")
        if raw is None:
            return ""
        if kind == "s":
            strings = self._strings()
            if not raw.isdigit() or int(raw) >= len(strings):
                raise ReadError(f"cell {where} refers to text that is not in the workbook")
            value = strings[int(raw)]
        elif kind == "b":
            value = "TRUE" if raw == "1" else "FALSE"
        elif kind == "e":
            raise RowError(f"cell {where} holds the error {raw}")
        elif kind == "n":
            value = self._number(raw, _whole(cell.get("s"), 0, f"the style of cell {where}"), where, table)
        else:
            value = raw
        if len(value) > self.limits.max_field:
            raise ReadError(f"cell {where} holds {len(value)} characters; at most {self.limits.max_field} are read")
        return value

    def _number(self, raw: str, style: int, where: str, table: Table) -> str:
        try:
            number = float(raw)
        except ValueError:
            return raw
        if not math.isfinite(number):
            return raw
        dates = self._date_styles()
        if style < len(dates) and dates[style] and 0 <= number < 2_958_466:
            moment = self.epoch + timedelta(seconds=round(number * 86400))
            return moment.date().isoformat() if number == int(number) else moment.isoformat(sep=" ")
        if number == int(number) and abs(number) < 1e21:
            exact = int(raw) if re.fullmatch(r"-?\d+", raw) else int(number)
            if abs(exact) > MAX_SAFE_INTEGER:
                table.warn(f"cell {where}: the integer {exact} is above 2^53; Excel has rounded it. Store ids as text")
            return str(exact)
        return repr(number)

    def _strings(self) -> list[str]:
        if self.strings is None:
            self.strings = []
            if "xl/sharedStrings.xml" in self.package.namelist():
                self.strings = [_text(item) for item in self._elements("xl/sharedStrings.xml", {"si"})]
        return self.strings

    def _date_styles(self) -> list[bool]:
        if self.dates is None:
            self.dates = []
            if "xl/styles.xml" in self.package.namelist():
                own: dict[int, bool] = {}
                for element in self._elements("xl/styles.xml", {"numFmt", "cellXfs"}):
                    if _tag(element) == "numFmt":
                        code = re.sub(r'"[^"]*"|\[[^\]]*\]|\\.', "", element.get("formatCode", "")).lower()
                        date = bool(re.search(r"[ymdhs]", code)) and "#" not in code
                        own[_whole(element.get("numFmtId"), 0, "a number format")] = date
                    else:
                        ids = [_whole(xf.get("numFmtId"), 0, "a cell format") for xf in element]
                        self.dates = [own.get(i, i in _DATE_IDS) for i in ids]
        return self.dates

    def _relations(self, part: str) -> dict[str, tuple[str, str]]:
        folder, name = posixpath.split(part)
        out = {}
        for element in self._elements(f"{folder}/_rels/{name}.rels", {"Relationship"}):
            target = element.get("Target", "")
            target = target.lstrip("/") if target.startswith("/") else posixpath.normpath(f"{folder}/{target}")
            out[element.get("Id", "")] = (element.get("Type", ""), target)
        return out

    def _elements(self, part: str, wanted: set[str], starts: frozenset[str] = frozenset()) -> Iterator[Element]:
        """Finished elements of the wanted names (started ones for ``starts``), cleared afterwards."""
        parser: Any = XMLPullParser(events=("start", "end"))
        stack: list[tuple[Element, bool]] = []
        try:
            with self.package.open(part) as stream:
                left, tail = self.limits.max_unpacked, b""
                while chunk := stream.read(1 << 16):
                    left -= len(chunk)
                    if left < 0:
                        raise ReadError(f"{part} unpacks to more than {self.limits.max_unpacked / 1e6:.0f} MB")
                    if b"<!DOCTYPE" in tail + chunk or b"<!ENTITY" in tail + chunk:
                        raise ReadError(f"{part} declares a document type; that is refused")
                    tail = chunk[-16:]
                    parser.feed(chunk)
                    yield from _finished(parser, stack, wanted, starts)
                parser.close()  # a part that ends too early is damaged, not short
                yield from _finished(parser, stack, wanted, starts)
        except KeyError:
            raise ReadError(f"the workbook lacks its part {part}") from None
        except DAMAGE as error:
            raise ReadError(f"{part} is damaged: {error}") from None


def _finished(
    parser: Any, stack: list[tuple[Element, bool]], wanted: set[str], starts: frozenset[str]
) -> Iterator[Element]:
    """``stack`` holds the open elements, each with whether it lies in (or is) one that is wanted whole."""
    whole = wanted - starts
    for event, element in parser.read_events():
        tag = _tag(element)
        if event == "start":
            stack.append((element, tag in whole or bool(stack and stack[-1][1])))
            if tag in starts:
                yield element
            continue
        stack.pop()
        if tag in whole:
            yield element
        if not (stack and stack[-1][1]):
            element.clear()
            if stack:
                stack[-1][0].remove(element)


def _tag(element: Element) -> str:
    return _local_name(element.tag)


@lru_cache(maxsize=1024)
def _local_name(tag: str) -> str:
    return tag.removeprefix(_MAIN).removeprefix(_STRICT).rsplit("}", 1)[-1]


def _text(item: Element) -> str:
    """Text of a string item: plain or rich runs, without phonetic guides."""
    out = []
    for child in item:
        tag = _tag(child)
        if tag == "t":
            out.append(child.text or "")
        elif tag == "r":
            out += [part.text or "" for part in child if _tag(part) == "t"]
    return re.sub(r"_x([0-9A-Fa-f]{4})_", lambda m: chr(int(m[1], 16)), "".join(out))


def _whole(text: str | None, default: int, what: str) -> int:
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ReadError(f"the workbook is damaged: {what} has the number {text[:40]!r}")
    return int(text)


def _place(reference: str) -> tuple[int, int]:
    found = _REF.match(reference)
    if not found:
        raise ReadError(f"{reference!r} is no cell reference")
    column = 0
    for letter in found[1]:
        column = column * 26 + ord(letter) - 64
    if column > 16384 or not 1 <= int(found[2]) <= 1_048_576:
        raise ReadError(f"{reference!r} lies outside of a sheet")
    return column, int(found[2])


def _letters(column: int) -> str:
    out = ""
    while column:
        column, rest = divmod(column - 1, 26)
        out = chr(65 + rest) + out
    return out
