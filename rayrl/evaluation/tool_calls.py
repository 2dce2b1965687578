"""Accuracy of tool choice and of each argument, where the right call is known.

A case is an expected call and the call that was made (``None`` for no usable call). Arguments are compared one by one,
given the right tool: ``right``, ``wrong``, ``missing`` (expected, not given) and ``invented`` (given, not expected).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rayrl.errors import DataError
from rayrl.evaluation.statistics import LEVEL, wilson
from rayrl.evaluation.view import EpisodeView, plain
from rayrl.schemas import JsonDict

NUMBER_TOLERANCE = 1e-9


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


def same_value(expected: Any, actual: Any) -> bool:
    """Equality of arguments: text after normalisation, numbers within rounding, a list of alternatives by any."""
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return abs(expected - actual) <= NUMBER_TOLERANCE * max(1.0, abs(expected))
    if isinstance(expected, str) and isinstance(actual, str):
        return plain(expected) == plain(actual)
    return bool(expected == actual)


def compare_arguments(expected: JsonDict, actual: JsonDict) -> dict[str, str]:
    """Verdict per argument name: right, wrong, missing or invented."""
    out = {}
    for name, value in expected.items():
        out[name] = "missing" if name not in actual else "right" if same_value(value, actual[name]) else "wrong"
    return {**out, **{name: "invented" for name in actual if name not in expected}}


def _rate(right: int, n: int, level: float) -> JsonDict:
    low, high = wilson(right, n, level) if n else (None, None)
    return {"right": right, "n": n, "rate": right / n if n else None, "low": low, "high": high}


def call_accuracy(cases: Iterable[CallCase], *, level: float = LEVEL) -> dict[str, Any]:
    """Tool choice overall and per tool, whole calls, and each argument given the right tool; Wilson intervals.

    Assumes independent cases; steps of one episode are not quite that, so read intervals as optimistic there.
    """
    chosen: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    arguments: dict[str, Counter[str]] = defaultdict(Counter)
    confusion: Counter[tuple[str, str]] = Counter()
    exact = total = 0
    for case in cases:
        total += 1
        name = case.actual.name if case.actual else "(none)"
        right = name == case.expected.name
        chosen[case.expected.name][0] += right
        chosen[case.expected.name][1] += 1
        if not right:
            confusion[case.expected.name, name] += 1
            continue
        verdicts = compare_arguments(case.expected.arguments, case.actual.arguments if case.actual else {})
        for argument, verdict in verdicts.items():
            arguments[f"{case.expected.name}.{argument}"][verdict] += 1
        exact += all(verdict == "right" for verdict in verdicts.values())
    return {
        "cases": total,
        "tool_choice": _rate(sum(v[0] for v in chosen.values()), total, level),
        "exact_call": _rate(exact, total, level),
        "by_tool": {name: _rate(chosen[name][0], chosen[name][1], level) for name in sorted(chosen)},
        "by_argument": {
            name: {**_rate(counts["right"], sum(counts.values()), level), **{k: counts[k] for k in sorted(counts)}}
            for name, counts in sorted(arguments.items())
        },
        "confusion": [{"expected": a, "actual": b, "n": n} for (a, b), n in confusion.most_common(20)],
    }


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
