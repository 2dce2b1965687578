"""From episode labels to rates with intervals and examples; labels stream by, a few numbers per episode stay."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from rayrl.evaluation.diagnosis import RULES
from rayrl.evaluation.statistics import LEVEL, proportion_estimate
from rayrl.schemas import JsonDict

GOAL_RULES = frozenset({"target_never_surfaced", "surfaced_not_opened"})
"""Labels that cannot be decided without the private goal; their rates count only episodes whose goal is known."""

Key = tuple[str, str, int, int]


class LabelTally:
    """Adds up label lines, one per episode, in any order; memory is some hundred bytes per episode."""

    def __init__(self, *, examples: int = 5) -> None:
        self._examples = examples
        self._names = list(RULES)
        self._bits = {name: 1 << n for n, name in enumerate(self._names)}
        self._rows: list[tuple[Key, bool, bool, int]] = []
        self._causes: Counter[str] = Counter()
        self._kept: dict[str, list[tuple[Key, str, list[int]]]] = {name: [] for name in self._names}

    def add(self, item: JsonDict) -> None:
        """One line of ``episode_labels.jsonl``."""
        key: Key = (str(item["run"]), str(item["split"]), int(item["task_id"]), int(item["sample_id"]))
        mask = 0
        for finding in item["labels"]:
            name = finding["label"]
            mask |= self._bits[name]
            kept = self._kept[name]
            kept.append((key, item["episode_id"], finding["steps"]))
            if len(kept) > 20 * self._examples:
                self._kept[name] = heapq.nsmallest(self._examples, kept)
        self._rows.append((key, bool(item["success"]), bool(item["goal_known"]), mask))
        self._causes[str(item["diagnosis"])] += 1

    def rates(self, *, level: float = LEVEL) -> dict[str, Any]:
        """Rate of every label (Wilson, tasks as clusters), success with and without it, and example episodes."""
        rows = sorted(self._rows)
        tasks = np.array([f"{key[0]}:{key[1]}:{key[2]}" for key, *_ in rows], dtype=np.str_)
        success = np.array([row[1] for row in rows], dtype=np.float64)
        known = np.array([row[2] for row in rows], dtype=bool)
        masks = np.array([row[3] for row in rows], dtype=np.int64)
        everyone = np.ones(len(rows), dtype=bool)
        out: dict[str, Any] = {}
        for name in self._names:
            scope = known if name in GOAL_RULES else everyone
            has = (masks & self._bits[name]) != 0
            rate = proportion_estimate(has[scope].astype(np.float64), tasks[scope], level=level)
            inside, outside = scope & has, scope & ~has
            out[name] = {
                **rate.as_dict(),
                "episodes": int(inside.sum()),
                "success_with": float(success[inside].mean()) if inside.any() else None,
                "success_without": float(success[outside].mean()) if outside.any() else None,
                "examples": [
                    {"episode_id": episode, "steps": steps}
                    for _, episode, steps in heapq.nsmallest(self._examples, self._kept[name])
                ],
            }
        return {
            "level": level,
            "episodes": len(rows),
            "goal_known": int(known.sum()),
            "labels": dict(sorted(out.items(), key=lambda item: (-item[1]["episodes"], item[0]))),
            "diagnosis": dict(sorted(self._causes.items(), key=lambda item: (-item[1], item[0]))),
        }


def label_rates(labels: Iterable[JsonDict], *, level: float = LEVEL, examples: int = 5) -> dict[str, Any]:
    """Rates of an iterable of label lines; see :class:`LabelTally`."""
    tally = LabelTally(examples=examples)
    for item in labels:
        tally.add(item)
    return tally.rates(level=level)
