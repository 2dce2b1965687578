"""CSV and JSONL. Encodings: byte order mark, then strict UTF-8, then GB18030; the person may choose another.

Detectors misread short GBK files, so none is used: what is not UTF-8 is tried as GB18030 and said to be a guess.
JSONL is split on ``\\n`` bytes only: U+2028 inside a string is no line end.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import unicodedata
from typing import Any

from rayrl.workbench.readers.rows import MAX_SAFE_INTEGER, Limits, Options, ReadError, RowError, Table, unique_columns

_MARKS = [
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
]
DELIMITERS = [",", "\t", ";", "|"]


def decode(data: bytes, encoding: str | None) -> tuple[str, str, bool]:
    """Text, encoding, and whether the encoding is only a guess.

    Raises:
        ReadError: no encoding fits; the message says where the first bad byte is.
    """
    if encoding:
        try:
            return data.decode(encoding).removeprefix("\ufeff"), encoding, False
        except LookupError:
            raise ReadError(f"there is no encoding {encoding!r}; try utf-8, gb18030, big5 or utf-16") from None
        except UnicodeDecodeError as error:
            raise ReadError(f"{_where(data, error.start)} is not {encoding}; choose another encoding") from None
    for mark, name in _MARKS:
        if data.startswith(mark):
            try:
                return data[len(mark) :].decode(name), name, False
            except UnicodeDecodeError as error:
                raise ReadError(f"{_where(data, error.start)}: the file claims {name} but is not") from None
    try:
        return data.decode("utf-8"), "utf-8", False
    except UnicodeDecodeError as utf8:
        try:
            return data.decode("gb18030"), "gb18030", True
        except UnicodeDecodeError:
            raise ReadError(
                f"{_where(data, utf8.start)} is neither UTF-8 nor GB18030; choose the encoding by hand"
            ) from None


def _where(data: bytes, offset: int) -> str:
    return f"line {data.count(bytes([10]), 0, offset) + 1}, byte {offset}"


def _delimiter(line: str) -> str:
    counts = {d: line.count(d) for d in DELIMITERS}
    best = max(DELIMITERS, key=lambda d: counts[d])
    return best if counts[best] else ","


def read_csv(data: bytes, options: Options, limits: Limits) -> Table:
    """Rows of a CSV file; every value is text. Rows of another width are rejected.

    Raises:
        ReadError: bad encoding, quoting or size; names the line. What follows an open quote cannot be told apart.
    """
    text, encoding, guessed = decode(data, options.encoding)
    if "\x00" in text:
        line = text.count("\n", 0, text.index("\x00")) + 1
        raise ReadError(f"line {line} holds a NUL character: this is no CSV file, or one in UTF-16 without its mark")
    first = text.split("\n", 1)[0]
    delimiter = options.delimiter or _delimiter(first)
    if len(delimiter) != 1:
        raise ReadError(f"the delimiter must be one character, not {delimiter!r}")
    csv.field_size_limit(limits.max_field)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    table = Table("csv", [], [], [], encoding=encoding, delimiter=delimiter)
    if guessed:
        table.warn(
            "the file is not UTF-8; it was read as GB18030. Look at the preview, and choose another if it is odd"
        )
    start = 1
    try:
        for record in reader:
            place, start = start, reader.line_num + 1
            if not any(value.strip() for value in record):
                continue
            if not table.columns:
                if len(record) > limits.max_columns:
                    raise ReadError(f"line {place}: {len(record)} columns; at most {limits.max_columns} are read")
                table.columns = unique_columns(record, table.warnings)
                continue
            if len(record) != len(table.columns):
                table.reject(
                    f"line {place}",
                    f"{len(record)} fields, but the header has {len(table.columns)}; "
                    "a value with a delimiter or line break needs quotes",
                )
                continue
            if len(table.rows) >= limits.max_rows:
                raise ReadError(f"line {place}: more than {limits.max_rows} rows; split the file")
            table.rows.append(dict(zip(table.columns, record, strict=True)))
            table.places.append(f"line {place}")
    except csv.Error as error:
        if "field limit" in str(error):
            raise ReadError(
                f"line {start}: a field has more than {limits.max_field} characters; is a quote left open?"
            ) from None
        raise ReadError(f"line {start}: the CSV quoting is broken: {error}") from None
    return table


def read_jsonl(data: bytes, options: Options, limits: Limits) -> Table:
    """Rows of a JSON Lines file; values keep their JSON form, floats keep their spelling as text.

    Lines that hold no JSON object are rejected.

    Raises:
        ReadError: bad encoding or too much of something; names the line.
    """
    text_encoding = "utf-8"
    if options.encoding or data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF8)):
        text, text_encoding, _ = decode(data, options.encoding)
        data = text.encode("utf-8", "surrogatepass")
    table = Table("jsonl", [], [], [], encoding=text_encoding)
    columns: dict[str, None] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        if len(table.rows) >= limits.max_rows:
            raise ReadError(f"line {number}: more than {limits.max_rows} rows; split the file")
        try:
            row = _object(line, number, table)
        except RowError as error:
            table.reject(f"line {number}", str(error))
            continue
        columns.update(dict.fromkeys(row))
        if len(columns) > limits.max_columns:
            raise ReadError(f"line {number}: more than {limits.max_columns} different keys")
        table.rows.append(row)
        table.places.append(f"line {number}")
    table.columns = list(columns)
    return table


def _object(line: bytes, number: int, table: Table) -> dict[str, Any]:
    def integer(literal: str) -> Any:
        # int() of a huge literal is refused by Python itself; such a value is an id and stays text
        if len(literal) > 18 or abs(int(literal)) > MAX_SAFE_INTEGER:
            table.warn(f"line {number}: the integer {literal[:40]} is above 2^53; spreadsheets would round it")
            return literal
        return int(literal)

    def constant(literal: str) -> Any:
        raise RowError(f"{literal} is no JSON value")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            names = [key for key, _ in items]
            twice = next(key for key in names if names.count(key) > 1)
            raise RowError(f"the key {twice!r} occurs twice")
        return out

    try:
        text = line.decode("utf-8")
        value = json.loads(text, parse_int=integer, parse_float=str, parse_constant=constant, object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        raise ReadError(
            f"line {number}, byte {error.start}: JSONL must be UTF-8; choose the encoding by hand"
        ) from None
    except RecursionError:
        raise RowError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise RowError(f"no valid JSON at character {error.pos + 1}: {error.msg}") from None
    except ValueError as error:
        raise RowError(f"no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RowError(f"a JSON object is expected, found {type(value).__name__}")
    if any(unicodedata.category(c) == "Cs" for c in json.dumps(value, ensure_ascii=False)):
        raise RowError("half a surrogate pair (\\ud800 to \\udfff) is no character")
    return value
