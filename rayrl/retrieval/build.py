"""A memory pool from a user's own documents: JSONL, CSV or Markdown, incrementally.

* JSONL: one object per line. With ``text``: a memory (``id``, ``category``, ``domain`` optional). With ``question`` and
  ``answer``: both, the answer being the memory. With ``question`` and ``answer_ids`` (or neither): a question only.
* CSV: the same fields as columns; ``answer_ids`` separated by ``;``.
* Markdown: every section is a memory, its heading path the category; a heading that ends with a question mark (``?`` or
  ``？``) is a question answered by its section.

Ids are content hashes unless given, so building again with more files adds what is new and leaves the rest unchanged;
embeddings are cached by content, so only new texts are embedded.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rayrl.errors import DataError
from rayrl.retrieval.pools import Memory, MemoryPool, Question, load_pool
from rayrl.schemas import sha256_hex

SUFFIXES = (".jsonl", ".csv", ".md", ".markdown")
_HEADING = re.compile(r"^(#{1,6})\s+(.+?)\s*#*\s*$")


@dataclass
class Parsed:
    """What the files held, by id; the first of two equal ids wins when they agree."""

    memories: dict[str, Memory] = field(default_factory=dict)
    questions: dict[str, Question] = field(default_factory=dict)

    def add_memory(self, memory: Memory, where: str) -> None:
        """Add, or refuse another text under a known id."""
        known = self.memories.setdefault(memory.id, memory)
        if known.text != memory.text:
            raise DataError(f"{where}: the memory id {memory.id!r} already stands for another text")

    def add_question(self, question: Question, where: str) -> None:
        """Add, or refuse another text under a known id."""
        known = self.questions.setdefault(question.id, question)
        if known.text != question.text:
            raise DataError(f"{where}: the question id {question.id!r} already stands for another text")


@dataclass(frozen=True)
class BuildResult:
    """The pool and what this build added."""

    pool: MemoryPool
    new_memories: int
    new_questions: int


def build_pool(
    name: str,
    files: Sequence[Path],
    *,
    existing: Path | None = None,
    source: str = "",
    license: str = "",
    default_domain: str = "",
) -> BuildResult:
    """Read files into a pool, on top of an existing pool folder if there is one.

    Raises:
        DataError: unreadable file, wrong row (file and line named), conflicting ids, unknown answer id.
    """
    parsed = Parsed()
    before = (0, 0)
    if existing is not None and (existing / "pool.json").is_file():
        old = load_pool(existing)
        parsed.memories.update({m.id: m for m in old.memories})
        parsed.questions.update({q.id: q for q in old.questions})
        before = (len(parsed.memories), len(parsed.questions))
        source, license = source or old.source, license or old.license
    for file in expand(files):
        _read(file, parsed, default_domain or name)
    if not parsed.memories:
        raise DataError("no memories were found; see `rayrl memory build --help` for the formats")
    pool = MemoryPool(
        name=name,
        source=source,
        license=license,
        memories=tuple(parsed.memories.values()),
        questions=tuple(parsed.questions.values()),
    ).check()
    return BuildResult(pool, len(parsed.memories) - before[0], len(parsed.questions) - before[1])


def expand(files: Sequence[Path]) -> list[Path]:
    """Folders become their files of known kinds, sorted.

    Raises:
        DataError: missing, or of an unknown kind.
    """
    out: list[Path] = []
    for path in files:
        if path.is_dir():
            out += sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
        elif not path.is_file():
            raise DataError(f"{path} does not exist")
        elif path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: unknown kind {path.suffix!r}; known: {', '.join(SUFFIXES)}")
        else:
            out.append(path)
    return out


def _read(file: Path, parsed: Parsed, domain: str) -> None:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    if file.suffix.lower() in (".md", ".markdown"):
        _markdown(file, text, parsed, domain)
        return
    rows = _jsonl(file, text) if file.suffix.lower() == ".jsonl" else _csv(file, text)
    for line, row in rows:
        _record(f"{file}:{line}", row, parsed, domain)


def _jsonl(file: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{file}:{number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{file}:{number}: expected an object, found {type(row).__name__}")
        yield number, row


def _csv(file: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    # strict: an unclosed quote would otherwise swallow the rest of the file; newline="": cells may hold line breaks
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    fields = set(reader.fieldnames or [])
    if not fields & {"text", "question"}:
        raise DataError(f"{file}:1: no column `text` or `question`; found {', '.join(sorted(fields)) or 'nothing'}")
    for row in _rows(file, reader):
        if None in row or None in row.values():
            cells = sum(v is not None for k, v in row.items() if k is not None) + len(row.get(None) or [])  # type: ignore[call-overload]
            raise DataError(
                f"{file}:{reader.line_num}: {cells} cells under {len(fields)} columns; quote cells that hold commas"
            )
        clean: dict[str, Any] = {k: v for k, v in row.items() if k and v not in (None, "")}
        if "answer_ids" in clean:
            clean["answer_ids"] = [x.strip() for x in str(clean["answer_ids"]).split(";") if x.strip()]
        yield reader.line_num, clean


def _rows(file: Path, reader: csv.DictReader[str]) -> Iterator[dict[str, Any]]:
    try:
        yield from reader
    except csv.Error as error:
        raise DataError(f"{file}:{reader.line_num}: not CSV ({error})") from None


def _record(where: str, row: dict[str, Any], parsed: Parsed, domain: str) -> None:
    category, domain = _text(row, "category", where), _text(row, "domain", where) or domain
    question, answer, text = (_text(row, k, where) for k in ("question", "answer", "text"))
    if not question and not text:
        raise DataError(f"{where}: needs `text` (a memory) or `question`")
    answer_ids = row.get("answer_ids", [])
    if not isinstance(answer_ids, list) or not all(isinstance(x, str) for x in answer_ids):
        raise DataError(f"{where}: answer_ids must be a list of memory ids")
    if text or answer:
        body = text or answer
        identifier = str(row.get("id") or _id("m", body))
        parsed.add_memory(Memory(id=identifier, text=body, category=category, domain=domain), where)
        if question and not answer_ids:
            answer_ids = [identifier]
    if question:
        parsed.add_question(
            Question(
                id=str(row.get("question_id") or _id("q", question)),
                text=question,
                answer_ids=tuple(answer_ids),
                category=category,
                domain=domain,
            ),
            where,
        )


def _markdown(file: Path, text: str, parsed: Parsed, domain: str) -> None:
    path: list[str] = []
    for line, heading, level, body in _sections(text.splitlines()):
        path = [*path[: level - 1], heading] if heading else path
        if not body:
            continue
        category = path[-2] if len(path) > 1 else file.stem
        memory = Memory(id=_id("m", body), text=body, category=category, domain=domain)
        parsed.add_memory(memory, f"{file}:{line}")
        if heading.endswith(("?", "？")):
            question = Question(
                id=_id("q", heading), text=heading, answer_ids=(memory.id,), category=category, domain=domain
            )
            parsed.add_question(question, f"{file}:{line}")


def _sections(lines: Iterable[str]) -> Iterator[tuple[int, str, int, str]]:
    """(line of the heading, heading, level, body); code fences hide headings."""
    heading, level, start, body, fenced = "", 1, 1, [], False
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        found = None if fenced else _HEADING.match(line)
        if found is None:
            body.append(line)
            continue
        yield start, heading, level, "\n".join(body).strip()
        heading, level, start, body = found.group(2), len(found.group(1)), number, []
    yield start, heading, level, "\n".join(body).strip()


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key, "")
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} must be text, found {type(value).__name__}")
    return value.strip()


def _id(prefix: str, text: str) -> str:
    return f"{prefix}-{sha256_hex(text)[:12]}"
