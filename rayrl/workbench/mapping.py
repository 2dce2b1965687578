"""Mapping profiles: from the rows of any file to unified cases.

A profile names, for each unified field, the source columns or JSON paths, how they are joined and transformed, and how
label spellings turn into classes. It is data, saved and versioned; applying it is a pure function. The literal column
name is always tried before a path, so ``data.query`` may be a column of a CSV or a path into a JSON object.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, field_validator

from rayrl.errors import DataError, did_you_mean
from rayrl.schemas import Frozen, JsonDict
from rayrl.workbench.cases import MAX_QUERY, Case, automatic_id, normal_label
from rayrl.workbench.readers.rows import Table

TARGETS = ("case_id", "query", "gold_route", "history", "context", "domain", "request_id")
SUGGESTIONS: dict[str, list[str]] = {
    "case_id": ["case_id", "caseid", "id", "编号", "序号", "用例id", "样本id", "no"],
    "query": [
        "query",
        "question",
        "text",
        "utterance",
        "input",
        "用户query",
        "问题",
        "语句",
        "请求",
        "用户输入",
        "说法",
    ],
    "gold_route": ["gold_route", "label", "gold", "route", "标签", "人工标签", "快慢", "分流", "人工标注", "标注"],
    "history": ["history", "dialog", "dialogue", "messages", "对话历史", "历史", "上文"],
    "context": ["context", "device", "上下文", "环境", "设备"],
    "domain": ["domain", "category", "垂域", "领域", "类别"],
    "request_id": ["request_id", "rid", "requestid", "trace_id", "请求id"],
}
WEAK_LABELS = ["category", "class", "target", "intent", "y", "类别", "分类", "类型", "意图"]
"""Columns that hold the label where no other one does."""
MAX_SUGGESTED = 20
DEFAULT_LABELS = {
    "fast": ["fast", "快", "快系统", "0", "f"],
    "slow": ["slow", "慢", "慢系统", "1", "s"],
}
Transform = Literal["strip", "nfkc", "lower", "collapse_spaces", "json", "split_lines"]
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


class FieldRule(Frozen):
    """Where a unified field comes from."""

    sources: list[str] = Field(min_length=1, max_length=20)
    """Column names or JSON paths; several are joined."""
    join: str = Field("\n", max_length=20)
    """Put between the sources; empty ones are left out."""
    transforms: list[Transform] = Field(["strip"], max_length=6)
    """Applied in order: ``json`` reads JSON text, ``split_lines`` makes a list."""
    default: str | None = Field(None, max_length=1000)
    """Used where all sources are missing or empty."""

    @field_validator("sources")
    @classmethod
    def _named(cls, value: list[str]) -> list[str]:
        if any(not item.strip() or len(item) > 300 for item in value):
            raise ValueError("a source must be a column name or JSON path of 1 to 300 characters")
        return value


class MappingProfile(Frozen):
    """How one kind of file turns into cases."""

    fields: dict[str, FieldRule]
    """By unified field; ``query`` is required."""
    labels: dict[str, list[str]] = Field(default_factory=lambda: {k: list(v) for k, v in DEFAULT_LABELS.items()})
    """Class to its spellings; compared after normalisation."""
    metadata: Literal["rest", "none"] = "rest"
    """Whether columns that no field uses are kept as metadata."""

    @field_validator("fields")
    @classmethod
    def _known(cls, value: dict[str, FieldRule]) -> dict[str, FieldRule]:
        for name in value:
            if name not in TARGETS:
                raise ValueError(f"there is no field {name!r}{did_you_mean(name, list(TARGETS))}")
        if "query" not in value:
            raise ValueError("the field query must be mapped")
        return value

    @field_validator("labels")
    @classmethod
    def _distinct(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        if not 2 <= len(value) <= 50:
            raise ValueError("2 to 50 classes are needed")
        seen: dict[str, str] = {}
        for label, spellings in value.items():
            if not label.strip() or len(label) > 100:
                raise ValueError("a class needs a name of 1 to 100 characters")
            for spelling in [label, *spellings]:
                form = normal_label(spelling)
                if seen.setdefault(form, label) != label:
                    raise ValueError(f"the spelling {spelling!r} stands for both {seen[form]!r} and {label!r}")
        return value

    def spellings(self) -> dict[str, str]:
        """Normalised spelling to class."""
        return {normal_label(text): label for label, texts in self.labels.items() for text in [label, *texts]}


@dataclass
class Mapped:
    """The outcome of applying a profile: cases, and what is wrong with the rows that gave none."""

    cases: list[Case] = field(default_factory=list)
    errors: list[JsonDict] = field(default_factory=list)
    n_errors: int = 0
    unlabelled: int = 0

    def error(self, place: str, target: str, message: str, value: Any = None) -> None:
        """Note a row that cannot be used; the first 200 are kept."""
        self.n_errors += 1
        if len(self.errors) < 200:
            self.errors.append({"place": place, "field": target, "message": message, "value": value})


def parse_path(path: str) -> list[str | int]:
    """Steps of a JSON path: ``data.query``, ``$.a[0].b``, Chinese keys.

    Raises:
        DataError: no path.
    """
    body = path.removeprefix("$").removeprefix(".")
    steps: list[str | int] = []
    at = 0
    while at < len(body):
        found = _STEP.match(body, at)
        if found is None or found.end() == at:
            raise DataError(f"{path!r} is no JSON path at character {at + 1}; write data.query or $.items[0].text")
        steps.append(int(found[2]) if found[2] is not None else found[1])
        at = found.end()
    return steps


def lookup(row: JsonDict, path: str) -> Any:
    """The value of a column or path, ``None`` where there is none. Text on the way is read as JSON if it is some."""
    if path in row:
        return row[path]
    value: Any = row
    for step in parse_path(path):
        if isinstance(value, str) and value[:1] in "{[":
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            value = value[step]
        elif isinstance(value, dict) and str(step) in value:
            value = value[str(step)]
        else:
            return None
    return value


def as_text(value: Any) -> str:
    """Text of a scalar as the file had it; structures as JSON."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _transform(value: Any, steps: list[Transform]) -> Any:
    for step in steps:
        if step == "json":
            value = json.loads(value) if isinstance(value, str) and value.strip() else value
            continue
        if not isinstance(value, str):
            continue
        if step == "strip":
            value = value.strip()
        elif step == "nfkc":
            value = unicodedata.normalize("NFKC", value)
        elif step == "lower":
            value = value.lower()
        elif step == "collapse_spaces":
            value = " ".join(value.split())
        elif step == "split_lines":
            value = [line for line in value.splitlines() if line.strip()]
    return value


def field_value(row: JsonDict, rule: FieldRule) -> Any:
    """The value of one unified field: a lone structure stays one, everything else is text.

    Raises:
        ValueError: a ``json`` transform met text that is no JSON.
    """
    found = [value for value in (lookup(row, source) for source in rule.sources) if value not in (None, "", [], {})]
    if not found:
        return _transform(rule.default, rule.transforms) if rule.default is not None else None
    value = found[0] if len(found) == 1 else rule.join.join(as_text(item) for item in found)
    return _transform(value if isinstance(value, dict | list) else as_text(value), rule.transforms)


def apply_profile(table: Table, profile: MappingProfile, *, limit: int | None = None) -> Mapped:
    """Map rows to cases. A row with an error gives no case; duplicate ids are errors that name both rows.

    Raises:
        DataError: a source is neither a column nor found in any row.
    """
    _check_sources(table, profile)
    out = Mapped(errors=[{**row, "field": "", "value": None} for row in table.bad], n_errors=table.n_bad)
    spellings = profile.spellings()
    used = {source for rule in profile.fields.values() for source in rule.sources}
    seen: dict[str, str] = {}
    automatic: dict[str, int] = {}
    for row, place in list(zip(table.rows, table.places, strict=True))[:limit]:
        case = _case(row, place, profile, spellings, used, out, automatic)
        if case is None:
            continue
        if case.case_id in seen:
            out.error(place, "case_id", f"the id occurs twice, first in {seen[case.case_id]}", case.case_id)
            continue
        seen[case.case_id] = place
        out.cases.append(case)
        out.unlabelled += case.gold_route is None
    return out


def _case(
    row: JsonDict,
    place: str,
    profile: MappingProfile,
    spellings: dict[str, str],
    used: set[str],
    out: Mapped,
    automatic: dict[str, int],
) -> Case | None:
    values: dict[str, Any] = {}
    for target, rule in profile.fields.items():
        try:
            values[target] = field_value(row, rule)
        except (ValueError, RecursionError):
            out.error(place, target, "is no JSON", as_text(lookup(row, rule.sources[0]))[:200])
            return None
    query = as_text(values.get("query"))
    if not query.strip():
        out.error(place, "query", "is missing or empty")
        return None
    if len(query) > MAX_QUERY:
        out.error(place, "query", f"has {len(query)} characters; at most {MAX_QUERY} are accepted")
        return None
    gold = None
    if (raw := as_text(values.get("gold_route"))).strip():
        gold = spellings.get(normal_label(raw))
        if gold is None:
            known = ", ".join(sorted(spellings))
            out.error(place, "gold_route", f"no class has this spelling; known: {known[:300]}", raw[:200])
            return None
    history = values.get("history")
    history = history if isinstance(history, list) else ([history] if history not in (None, "", {}) else [])
    context = values.get("context")
    context = (
        context if isinstance(context, dict) else ({"text": as_text(context)} if context not in (None, "") else {})
    )
    domain, request_id = as_text(values.get("domain")), as_text(values.get("request_id"))
    case_id = as_text(values.get("case_id")).strip()
    if len(case_id) > 200:
        out.error(place, "case_id", "has more than 200 characters", case_id[:60])
        return None
    if not case_id:
        if "case_id" in profile.fields:
            out.error(place, "case_id", "is empty; leave the field unmapped to have ids made from the content")
            return None
        case_id = automatic_id(query, history, context, request_id, domain)
        automatic[case_id] = automatic.get(case_id, 0) + 1
        if automatic[case_id] > 1:
            case_id = f"{case_id}-{automatic[case_id]}"
    rest = {key: value for key, value in row.items() if key not in used} if profile.metadata == "rest" else {}
    return Case(
        case_id=case_id,
        query=query,
        gold_route=gold,
        history=history,
        context=context,
        domain=domain,
        request_id=request_id,
        metadata=rest,
        source_row=row,
        source_place=place,
    )


def _check_sources(table: Table, profile: MappingProfile) -> None:
    for target, rule in profile.fields.items():
        for source in rule.sources:
            if source in table.columns or any(lookup(row, source) is not None for row in table.rows[:2000]):
                continue
            raise DataError(
                f"{target}: the file has no column or path {source!r}{did_you_mean(source, table.columns)}; "
                f"columns: {', '.join(table.columns[:30])}"
            )


def suggest(table: Table) -> dict[str, str]:
    """Likely source of each unified field: by name, also one level into JSON objects."""
    names = list(table.columns)
    for row in table.rows[:50]:
        for key, value in row.items():
            if isinstance(value, dict):
                names += [f"{key}.{inner}" for inner in value if f"{key}.{inner}" not in names]
    out: dict[str, str] = {}
    for target, known in SUGGESTIONS.items():
        forms = {normal_label(k).replace(" ", "").replace("_", ""): k for k in known}
        for name in names:
            if name in out.values():
                continue
            form = normal_label(name).replace(" ", "").replace("_", "")
            if form in forms or form.rsplit(".", 1)[-1] in forms:
                out[target] = name
                break
    if "gold_route" not in out:
        weak = next((name for name in names if normal_label(name) in WEAK_LABELS and _few(table, name)), None)
        if weak is not None:
            out = {target: name for target, name in out.items() if name != weak} | {"gold_route": weak}
    return out


def _few(table: Table, name: str) -> bool:
    """Whether a column has few enough values, some of them more than once, to be classes."""
    found = label_values(table, FieldRule(sources=[name]))
    return 2 <= len(found) <= MAX_SUGGESTED and len(found) < sum(found.values())


def label_values(table: Table, rule: FieldRule) -> dict[str, int]:
    """What a column has for labels, each in its first spelling, with how often."""
    found: dict[str, int] = {}
    first: dict[str, str] = {}
    for row in table.rows:
        try:
            raw = as_text(field_value(row, rule)).strip()
        except (ValueError, RecursionError):
            continue
        if form := normal_label(raw):
            name = first.setdefault(form, raw[:100])
            found[name] = found.get(name, 0) + 1
    return found


def suggest_labels(values: dict[str, int]) -> dict[str, list[str]]:
    """Classes for the values of a label column: the default ones where they fit most rows, else the values themselves.

    Values that are no classes (one only, or more than 20) leave the default too; the preview then says what is wrong.
    """
    known = {normal_label(text) for name, texts in DEFAULT_LABELS.items() for text in [name, *texts]}
    fit = sum(n for name, n in values.items() if normal_label(name) in known)
    if 2 * fit > sum(values.values()) or not 2 <= len(values) <= MAX_SUGGESTED:
        return {name: list(texts) for name, texts in DEFAULT_LABELS.items()}
    return {name: [] for name in sorted(values)}


def drift(known: list[str], table: Table, profile: MappingProfile) -> JsonDict:
    """What differs between the file a profile was made for (its columns) and another one."""
    used = {source for rule in profile.fields.values() for source in rule.sources}
    spellings = profile.spellings()
    rule = profile.fields.get("gold_route")
    labels: dict[str, int] = {}
    for row in table.rows if rule is not None else []:
        raw = as_text(field_value(row, rule)).strip() if rule is not None else ""
        if raw and normal_label(raw) not in spellings:
            labels[raw[:100]] = labels.get(raw[:100], 0) + 1
    missing = [name for name in known if name not in table.columns]
    return {
        "new_columns": [name for name in table.columns if name not in known],
        "missing_columns": missing,
        "missing_used": [name for name in missing if name in used],
        "unknown_labels": dict(sorted(labels.items(), key=lambda item: -item[1])[:20]),
        "drifted": bool(missing or labels or set(table.columns) - set(known)),
    }
