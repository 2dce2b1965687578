"""Summaries and comparisons as rich tables for people at a terminal; nothing is computed here."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def figure(value: float | None, digits: int = 3) -> str:
    """A number for people; ``-`` where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.{digits}f}"


def interval(estimate: dict[str, Any], digits: int = 3) -> str:
    """``[low, high]`` of an estimate."""
    if estimate.get("low") is None:
        return "-"
    return f"[{figure(estimate['low'], digits)}, {figure(estimate['high'], digits)}]"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="", border_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _estimates(title: str, values: dict[str, dict[str, Any]], level: float) -> Table:
    table = _table(title, "metric", "mean", "SEM", f"{level:.0%} interval", "n", "tasks", "method")
    for name, item in values.items():
        table.add_row(
            name,
            figure(item["mean"]),
            figure(item["sem"]),
            interval(item),
            str(item["n"]),
            str(item["clusters"]),
            item["method"],
        )
    return table


def _words(title: str, values: dict[str, int]) -> Table:
    table = _table(title, "", "episodes")
    for name, count in values.items():
        table.add_row(name, str(count))
    return table


def summary_tables(summary: dict[str, Any]) -> list[Table]:
    """Coverage and failures first, then scores, then what the policy did and what it cost."""
    coverage = summary["coverage"]
    first = _table("Coverage", "", "")
    expected = coverage["expected"]
    rate = "-" if coverage["rate"] is None else f"{coverage['rate']:.1%}"
    for name, value in (
        ("expected", "unknown" if expected is None else str(expected)),
        ("completed", f"{coverage['completed']} ({rate})"),
        ("failed", str(coverage["failed"])),
        ("missing", str(coverage["missing"])),
        ("retried episodes", str(coverage["retried"])),
        ("attempts", str(coverage["attempts"])),
        ("duplicate records", str(coverage["duplicates"])),
    ):
        first.add_row(name, value)
    tables = [first]
    failures = summary["failures"]
    if failures["by_class"]:
        tables.append(_words("Failed episodes by class (not scored)", failures["by_class"]))
    if failures["by_code"]:
        tables.append(_words("Failed episodes by code", failures["by_code"]))
    level = summary["level"]
    tables.append(_estimates("Scores", summary["metrics"], level))
    if summary.get("metrics_without_retried"):
        tables.append(_estimates("Scores without retried episodes", summary["metrics_without_retried"], level))
    if summary.get("pass_at_k"):
        values = {f"pass@{k}": v for k, v in summary["pass_at_k"].items()}
        tables.append(_estimates("Several samples", {**values, "flake rate": summary["flake_rate"]}, level))
    behaviour = _table("Behaviour", "", "total", "mean", "p50", "p95", "max")
    for name, item in {**summary["counts"], **summary["costs"]}.items():
        behaviour.add_row(
            name, *(figure(item[key], 0 if key == "total" else 2) for key in ("total", "mean", "p50", "p95", "max"))
        )
    for name, value in summary["rates"].items():
        behaviour.add_row(name, "", figure(value), "", "", "")
    tables.append(behaviour)
    if summary["termination_reasons"]:
        tables.append(_words("Termination reasons", summary["termination_reasons"]))
    if summary["policy_failures"]:
        tables.append(_words("Policy failures (scored)", summary["policy_failures"]))
    return tables


def diagnosis_tables(diagnosis: dict[str, Any]) -> list[Table]:
    """Labels with their rates, main causes, and tool-call accuracy."""
    level = diagnosis["level"]
    table = _table(
        f"Labels over {diagnosis['episodes']} episodes ({diagnosis['goal_known']} with a known goal)",
        "label",
        "episodes",
        "rate",
        f"{level:.0%} interval",
        "success with",
        "without",
        "example",
    )
    for name, item in diagnosis["labels"].items():
        if item["episodes"]:
            first = item["examples"][0]
            steps = ", ".join(map(str, first["steps"][:4]))
            table.add_row(
                name,
                str(item["episodes"]),
                figure(item["mean"]),
                interval(item),
                figure(item["success_with"]),
                figure(item["success_without"]),
                f"{first['episode_id']} step {steps}",
            )
    tables = [table, _words("Main cause", diagnosis["diagnosis"])]
    calls = diagnosis.get("tool_calls")
    return [*tables, calls_table(calls, level)] if calls else tables


def calls_table(calls: dict[str, Any], level: float) -> Table:
    """Accuracy of tool choice and of each argument."""
    table = _table("Tool calls where the right one is known", "", "right", "of", "rate", f"{level:.0%} interval")
    rows = {"tool choice": calls["tool_choice"], "whole call": calls["exact_call"]}
    rows |= {f"tool {k}": v for k, v in calls["by_tool"].items()}
    rows |= {f"argument {k}": v for k, v in calls["by_argument"].items()}
    for name, item in rows.items():
        table.add_row(name, str(item["right"]), str(item["n"]), figure(item["rate"]), interval(item))
    return table
