"""What an exported set is like: quality rules, repetition, coverage, lengths. Counts only; nothing is dropped here."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import orjson

from rayrl.evaluation.diagnosis import RULES
from rayrl.evaluation.view import view_of
from rayrl.schemas import JsonDict, sha256_hex

QUALITY_RULES = (
    "loop",
    "repeated_query",
    "protocol_error_streak",
    "invalid_action_streak",
    "bought_without_inspection",
    "option_axis_missed",
    "price_not_verified",
)
"""Diagnosis labels that make a demonstration a doubtful one."""


def actions_of(record: JsonDict) -> list[str]:
    """The actions that reached the environment, in order."""
    return [str(s["action"]) for s in record.get("steps") or [] if s.get("action") is not None]


def action_fingerprint(record: JsonDict) -> str:
    """Equal for two episodes of a task that did the same."""
    job = record.get("job") or {}
    return sha256_hex(orjson.dumps([job.get("split"), job.get("task_id"), actions_of(record)]))


def _persona_values(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _persona_values(item)]
    if isinstance(value, list):
        return [text for item in value for text in _persona_values(item)]
    return [value] if isinstance(value, str) and len(value) >= 2 else []


class QualityReport:
    """Collects facts about exported episodes, one ``add`` per episode; memory is a few hundred bytes each."""

    def __init__(self, expected_tasks: set[tuple[str, int]]) -> None:
        self._expected = expected_tasks
        self._n = 0
        self._rules: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = defaultdict(list)
        self._fingerprints: Counter[str] = Counter()
        self._tasks: Counter[tuple[str, int]] = Counter()
        self._categories: Counter[str] = Counter()
        self._skills: Counter[str] = Counter()
        self._tools: Counter[str] = Counter()
        self._lengths: dict[str, list[int]] = {"messages": [], "replies": [], "characters": []}

    def add(self, record: JsonDict, messages: list[JsonDict]) -> None:
        """One exported episode: its trace and the messages that went out."""
        self._n += 1
        view, job, reset = view_of(record), record.get("job") or {}, record.get("reset") or {}
        hits = [name for name in QUALITY_RULES if RULES[name](view) is not None]
        steps = record.get("steps") or []
        hits += ["has_protocol_errors"] if any(s.get("protocol_error") for s in steps) else []
        hits += (
            ["has_invalid_actions"]
            if any((s.get("action_feedback") or {}).get("valid") is False for s in steps)
            else []
        )
        text = "\n".join(str(m.get("content") or "") for m in messages if m["role"] in ("system", "user"))
        hits += (
            ["persona_value_in_prompt"] if any(v in text for v in _persona_values(reset.get("persona") or {})) else []
        )
        for name in hits:
            self._rules[name] += 1
            if len(self._examples[name]) < 5:
                self._examples[name].append(record["episode_id"])
        self._fingerprints[action_fingerprint(record)] += 1
        self._tasks[str(job.get("split") or ""), int(job.get("task_id") or 0)] += 1
        self._categories[str((reset.get("public") or {}).get("category") or "(none)")] += 1
        self._skills.update(str(s.get("skill_id")) for s in record.get("selected_skills") or [])
        self._tools.update(str(s.tool) for s in view.steps if s.tool is not None)
        self._lengths["messages"].append(len(messages))
        self._lengths["replies"].append(sum(m["role"] == "assistant" for m in messages))
        self._lengths["characters"].append(sum(len(str(m.get("content") or "")) for m in messages))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        n = self._n
        distinct = len(self._fingerprints)
        covered = self._expected & set(self._tasks)
        counts = list(self._tasks.values())
        return {
            "episodes": n,
            "rules": {
                name: {"episodes": count, "share": count / n, "examples": self._examples[name]}
                for name, count in self._rules.most_common()
            },
            "repetition": {
                "distinct_behaviours": distinct,
                "repeated_episodes": n - distinct,
                "share_repeated": (n - distinct) / n if n else None,
                "most_episodes_of_one_task": max(counts, default=0),
            },
            "coverage": {
                "tasks": len(self._tasks),
                "tasks_expected": len(self._expected) or None,
                "share": len(covered) / len(self._expected) if self._expected else None,
                "categories": dict(self._categories.most_common(50)),
                "skills": dict(self._skills.most_common(50)),
                "tools": dict(self._tools.most_common(50)),
            },
            "lengths": {name: _spread(values) for name, values in self._lengths.items()},
        }


def _spread(values: list[int]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p95 = np.quantile(values, [0.5, 0.95])
    return {"p50": float(p50), "p95": float(p95), "max": float(max(values))}
