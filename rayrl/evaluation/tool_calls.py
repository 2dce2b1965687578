"""Accuracy of tool choice and of each argument, where the right call is known.

A case is an expected call and the call that was made (``None`` for no usable call). Arguments are compared one by one,
given the right tool: ``right``, ``wrong``, ``missing`` (expected, not given) and ``invented`` (given, not expected).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from rayrl.evaluation.known_calls import CallCase
from rayrl.evaluation.statistics import LEVEL, wilson
from rayrl.evaluation.view import plain
from rayrl.schemas import JsonDict

NUMBER_TOLERANCE = 1e-9


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
