"""Function-calling test sets: conversations up to a step, the tools of its page, and the one right call.

A case is ``{"case_id", "messages", "tools", "expected": {"name", "arguments"}}``; ``tools`` and ``arguments`` are JSON
text, as in the other exports. Sets of your own have the same form.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson

from rayrl.errors import DataError
from rayrl.evaluation.known_calls import Call, known_calls
from rayrl.evaluation.view import view_of
from rayrl.export.conversation import ConversationOptions
from rayrl.export.records import sft_steps
from rayrl.schemas import JsonDict


def call_cases(record: JsonDict, goal: JsonDict | None, options: ConversationOptions) -> Iterator[JsonDict]:
    """The cases of one complete episode; none without a goal."""
    known = {int(c.case_id.rpartition("#")[2]): c for c in known_calls(view_of(record, goal))} if goal else {}
    if not known:
        return
    for step in sft_steps(record, options):
        case = known.get(step["step"])
        if case is not None:
            arguments = orjson.dumps(case.expected.arguments).decode()
            yield {
                "case_id": case.case_id,
                "messages": step["prompt"],
                "tools": step["tools"],
                "expected": {"name": case.expected.name, "arguments": arguments},
                "split": step["split"],
                "task_id": step["task_id"],
            }


def _parsed(value: object) -> object:
    return orjson.loads(value) if isinstance(value, str) else value


def read_cases(path: Path) -> list[tuple[str, list[JsonDict], list[JsonDict], Call]]:
    """``(case id, messages, tools, expected call)`` of a test set; tools and arguments as text or as objects.

    Raises:
        DataError: a line is no case; names file and line.
    """
    out = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = orjson.loads(line)
            tools, arguments = _parsed(item["tools"]), _parsed(item["expected"]["arguments"])
            if not isinstance(tools, list) or not isinstance(arguments, dict) or not isinstance(item["messages"], list):
                raise TypeError("messages and tools must be lists, arguments an object")
            call = Call(str(item["expected"]["name"]), arguments)
            out.append((str(item.get("case_id", number)), item["messages"], tools, call))
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number}: expected {{case_id, messages, tools, expected: {{name, arguments}}}}: "
                f"{type(error).__name__}: {error}"
            ) from None
    if not out:
        raise DataError(f"{path}: holds no cases")
    return out
