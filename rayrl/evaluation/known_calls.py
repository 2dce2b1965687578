"""Right calls that are known: from the goal of a shop task, or from a file. No statistics here: workers import this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from rayrl.errors import DataError
from rayrl.evaluation.view import EpisodeView, plain
from rayrl.schemas import JsonDict


@dataclass(frozen=True)
class Call:
    """A function call."""

    name: str
    arguments: JsonDict


@dataclass(frozen=True)
class CallCase:
    """What should have been called, and what was."""

    case_id: str
    expected: Call
    actual: Call | None


def known_calls(view: EpisodeView) -> Iterator[CallCase]:
    """The steps of a shop episode at which the goal leaves only one right call.

    On the target's page: choose the wanted value of a missing option axis; once the wanted options are all chosen,
    ``buy now``.
    """
    goal = view.goal or {}
    target = goal.get("asin")
    options = goal.get("goal_options") or []
    wanted = [plain(v) for v in (options.values() if isinstance(options, dict) else options)]
    for step in view.steps:
        if target is None or step.product != str(target):
            continue
        expected = _wanted_click(step.state, wanted)
        if expected is not None:
            actual = Call(step.tool, step.arguments) if step.tool is not None else None
            yield CallCase(f"{view.episode_id}#{step.index}", Call("click", {"value": expected}), actual)


def _wanted_click(state: JsonDict, wanted: list[str]) -> str | None:
    selected = {plain(v) for v in (state.get("selected_options") or {}).values()}
    missing, available = state.get("missing_option_axes") or [], state.get("available_options") or {}
    if missing:
        hits = [f"{axis}={v}" for axis in missing for v in available.get(axis) or () if plain(v) in wanted]
        return hits[0] if len(hits) == 1 else None
    return "buy now" if set(wanted) <= selected and "buy now" in (state.get("actions") or ()) else None


def read_expected(path: Path) -> dict[tuple[int, int], Call]:
    """Expected calls by (task id, step) from JSONL lines ``{task_id, step, name, arguments}``.

    Raises:
        DataError: a line is not such an object; the message names file and line.
    """
    out: dict[tuple[int, int], Call] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = orjson.loads(line)
            out[int(item["task_id"]), int(item["step"])] = Call(str(item["name"]), dict(item["arguments"]))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}:{number}: expected {{task_id, step, name, arguments}}: {type(error).__name__}: {error}"
            ) from None
    return out


def expected_cases(view: EpisodeView, task_id: int, expected: dict[tuple[int, int], Call]) -> Iterator[CallCase]:
    """Cases of an episode against a set of expected calls."""
    for step in view.steps:
        call = expected.get((task_id, step.index))
        if call is not None:
            actual = Call(step.tool, step.arguments) if step.tool is not None else None
            yield CallCase(f"{view.episode_id}#{step.index}", call, actual)
