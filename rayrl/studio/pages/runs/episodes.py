"""Choosing and showing episodes: the filtered, sorted list, one episode step by step, two beside each other."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from rayrl.errors import DataError
from rayrl.export.filters import Filter
from rayrl.schemas import EPISODE_SCHEMA, JsonDict
from rayrl.studio.pages.places import UnknownError
from rayrl.studio.pages.runs.index import RunIndex
from rayrl.traces.imports import convert
from rayrl.traces.schema import expand

PAGE = 50
STEPS = 40
SHOWN = 6000
"""Characters of one text that a page shows at once; the rest is behind a link."""
PIECE = 60_000
SORTS = {
    "recorded": "position",
    "task": "task, sample, position",
    "reward": "reward IS NULL, reward, position",
    "-reward": "reward IS NULL, reward DESC, position",
    "-steps": "steps DESC, position",
    "-tokens": "tokens DESC, position",
    "-duration": "duration DESC, position",
}
OUTCOMES = {
    "succeeded": "success = 1",
    "failed": "complete AND success = 0",
    "error": "NOT complete",
}
_ROW = (
    "position, episode, attempt, success, reward, steps, tokens, duration, ended, error, instruction, cause, labels,"
    " complete"
)


@dataclass(frozen=True)
class Choice:
    """What of a run is listed, and in which order."""

    filter: str = ""
    outcome: str = ""
    label: str = ""
    cause: str = ""
    sort: str = "recorded"

    def query(self, **more: Any) -> str:
        """As a query string."""
        kept = {k: v for k, v in self.__dict__.items() if v and v != "recorded"} | {k: v for k, v in more.items() if v}
        return f"?{urlencode(kept)}" if kept else ""


def choice_of(query: Any) -> Choice:
    """The choice in a query string.

    Raises:
        DataError: an outcome or order that does not exist.
    """
    found = Choice(**{name: query.get(name, "").strip() for name in ("filter", "outcome", "label", "cause")})
    sort = query.get("sort", "").strip() or "recorded"
    if sort not in SORTS or (found.outcome and found.outcome not in OUTCOMES):
        raise DataError(f"sort is one of {', '.join(SORTS)}; outcome one of {', '.join(OUTCOMES)}")
    return Choice(found.filter, found.outcome, found.label, found.cause, sort)


_lists: OrderedDict[tuple[tuple[str, ...], Choice], list[int]] = OrderedDict()


def positions(index: RunIndex, choice: Choice) -> list[int]:
    """Positions of the chosen episodes, in order; the lists asked for last are kept.

    Raises:
        UserError: the filter is none.
    """
    compiled = Filter(choice.filter) if choice.filter else None
    key = (index.stamp(), choice)
    if key not in _lists:
        _lists[key] = _positions(index, choice, compiled)
        while len(_lists) > 32:
            _lists.popitem(last=False)
    return _lists[key]


def _positions(index: RunIndex, choice: Choice, compiled: Filter | None) -> list[int]:
    where, arguments = ["result"], []
    if choice.outcome:
        where.append(OUTCOMES[choice.outcome])
    if choice.cause:
        where.append("cause = ?")
        arguments.append(choice.cause)
    if choice.label:
        where.append("position IN (SELECT position FROM found WHERE label = ?)")
        arguments.append(choice.label)
    columns = "position, facts" if compiled else "position"
    # every part of the statement is one of the constants above
    sql = f"SELECT {columns} FROM attempts WHERE {' AND '.join(where)} ORDER BY {SORTS[choice.sort]}"
    rows = index.query(sql, tuple(arguments))
    if compiled is None:
        return [row[0] for row in rows]
    return [row[0] for row in rows if compiled.matches(orjson.loads(row[1]))]


def rows_at(index: RunIndex, chosen: list[int]) -> list[JsonDict]:
    """Rows of the list for positions, in their order."""
    marks = ",".join("?" * len(chosen))
    found = {}
    for row in index.query(f"SELECT {_ROW} FROM attempts WHERE position IN ({marks})", tuple(chosen)):
        one = dict(zip(_ROW.split(", "), row, strict=True))
        one["labels"] = orjson.loads(one["labels"])
        found[one["position"]] = one
    return [found[position] for position in chosen if position in found]


def locate(index: RunIndex, episode: str, attempt: int | None = None) -> tuple[JsonDict, list[JsonDict]]:
    """The row of an episode (its result, or an attempt) and all its attempts.

    Raises:
        UnknownError: there is none.
    """
    found = index.query(
        "SELECT position, length, attempt, complete, result FROM attempts WHERE episode = ? ORDER BY position",
        (episode,),
    )
    names = ("position", "length", "attempt", "complete", "result")
    attempts = [dict(zip(names, row, strict=True)) for row in found]
    for one in attempts:
        if one["attempt"] == attempt if attempt is not None else one["result"]:
            return one | rows_at(index, [one["position"]])[0], attempts
    text = f"this run has no episode {episode[:100]!r}"
    if attempt is not None:
        key, places = "shell.missing.attempt", {"name": episode[:100], "attempt": attempt}
        raise UnknownError(key, f"{text} with attempt {attempt}", **places)
    raise UnknownError("shell.missing.episode", text, name=episode[:100])


def episode_url(slug: str, episode: str, query: str = "", step: int | None = None) -> str:
    """The page of an episode, at a step where one is given."""
    if step is not None:
        first = step // STEPS * STEPS
        if first:
            query += f"{'&' if query else '?'}from={first}"
    return f"/runs/{quote(slug)}/episodes/{quote(episode)}{query}" + (f"#step-{step}" if step is not None else "")


def text_of(value: Any) -> str:
    """Text as it is, anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


def clipped(value: Any, href: str) -> JsonDict | None:
    """A text for a page: its beginning, and where the whole of it is; ``None`` where there is none."""
    text = text_of(value)
    if not text:
        return None
    return {"text": text[:SHOWN], "left": max(0, len(text) - SHOWN), "href": href}


PARTS = ("observation", "reasoning", "content", "call", "after", "tools", "instruction", "system", "traceback")


def whole(record: JsonDict) -> JsonDict:
    """The record in the clear.

    Raises:
        DataError: it is damaged.
    """
    try:
        if record.get("schema") != EPISODE_SCHEMA:
            record, _ = convert(record, {})  # the public project's format; what is private in it stays out
        return expand({"conversation": [], "steps": [], **record})
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, zlib.error) as error:
        raise DataError(f"the record of {record.get('episode_id')!r} is damaged ({type(error).__name__})") from None


def part_of(record: JsonDict, step: int | None, part: str) -> Any:
    """One text of a record in the clear (see :data:`PARTS`).

    Raises:
        UnknownError: there is none.
    """
    if step is None:
        if part == "instruction":
            return (record.get("reset") or {}).get("instruction")
        if part == "system":
            return next((m.get("content") for m in record["conversation"] if m.get("role") == "system"), None)
        return (record.get("error") or {}).get(part)
    if not 0 <= step < len(record["steps"]):
        raise UnknownError("shell.missing.step", f"the episode has no step {step}", step=step)
    one = record["steps"][step]
    model = one.get("model") or {}
    if part == "observation":
        return one["observation"]["text"]
    if part == "after":
        return ((one.get("environment") or {}).get("observation") or {}).get("text")
    if part == "tools":
        return one["tools"]
    if part == "call":
        return model.get("tool_calls")
    return model.get(part)


def step_views(record: JsonDict, labels: list[JsonDict], start: int, stop: int, base: str) -> list[JsonDict]:
    """Steps ``[start, stop)`` of a record in the clear, as a page shows them."""
    out = []
    for at in range(start, min(stop, len(record["steps"]))):
        step = record["steps"][at]
        model, environment = step.get("model") or {}, step.get("environment") or {}
        feedback, error = step.get("action_feedback") or {}, step.get("protocol_error")
        failure = step.get("policy_failure")
        calls = model.get("tool_calls") or []
        number = step.get("index", at)
        name = calls[0].get("name") if len(calls) == 1 else None
        arguments = calls[0].get("arguments") if len(calls) == 1 else None
        state = step["observation"].get("state") or {}
        flags = [label["label"] for label in labels if number in label["steps"]]

        def link(part: str, at: int = at) -> str:
            return f"{base}&step={at}&part={part}"

        out.append(
            {
                "number": number,
                "tool": name,
                "brief": brief(arguments),
                "action": step.get("action"),
                "page": str(state.get("page_type") or "") if isinstance(state, dict) else "",
                "valid": feedback.get("valid"),
                "feedback": text_of(feedback.get("message") or feedback.get("reason")),
                "error": _code(error),
                "error_text": text_of(error.get("message")) if isinstance(error, dict) else "",
                "failure": _code(failure),
                "reward": environment.get("reward"),
                "done": environment.get("done"),
                "flags": flags,
                "bad": bool(error or failure or feedback.get("valid") is False),
                "tools": [tool_name(tool) for tool in step["tools"]],
                "tools_href": link("tools"),
                "latency": model.get("latency_ms"),
                "usage": model.get("usage") or {},
                "observation": clipped(step["observation"]["text"], link("observation")),
                "reasoning": clipped(model.get("reasoning"), link("reasoning")),
                "content": clipped(model.get("content"), link("content")),
                "call": clipped([{k: c.get(k) for k in ("name", "arguments")} for c in calls] or None, link("call")),
                "after": clipped((environment.get("observation") or {}).get("text"), link("after"))
                if at == len(record["steps"]) - 1
                else None,
            }
        )
    return out


def _code(value: Any) -> str:
    return text_of(value.get("code")) if isinstance(value, dict) else text_of(value)


def brief(arguments: Any, length: int = 160) -> str:
    """The arguments of a call on one line."""
    if isinstance(arguments, dict):
        text = "  ".join(f"{v}" if len(arguments) == 1 else f"{k}={v}" for k, v in arguments.items())
    else:
        text = text_of(arguments)
    text = " ".join(text[: 4 * length].split())
    return text if len(text) <= length else text[: length - 1] + "…"


def tool_name(tool: Any) -> str:
    """The name of a tool of a step."""
    if not isinstance(tool, dict):
        return text_of(tool)
    return text_of((tool.get("function") or tool).get("name"))
