"""From episode labels to rates with intervals and examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from rayrl.evaluation.diagnosis import RULES
from rayrl.evaluation.statistics import LEVEL, proportion_estimate
from rayrl.schemas import JsonDict

GOAL_RULES = frozenset({"target_never_surfaced", "surfaced_not_opened"})
"""Labels that cannot be decided without the private goal; their rates count only episodes whose goal is known."""


def label_rates(labels: Iterable[JsonDict], *, level: float = LEVEL, examples: int = 5) -> dict[str, Any]:
    """Rate of every label (Wilson, tasks as clusters), success with and without it, and example episodes.

    ``labels`` are lines of ``episode_labels.jsonl``, one per episode.
    """
    items = sorted(labels, key=lambda x: (str(x["run"]), str(x["split"]), x["task_id"], x["sample_id"]))
    tasks = np.array([f"{x['run']}:{x['split']}:{x['task_id']}" for x in items], dtype=object)
    success = np.array([bool(x["success"]) for x in items], dtype=np.float64)
    known = np.array([bool(x["goal_known"]) for x in items], dtype=bool)
    out: dict[str, Any] = {}
    for name in RULES:
        scope = known if name in GOAL_RULES else np.ones(len(items), dtype=bool)
        has = np.array([any(f["label"] == name for f in x["labels"]) for x in items], dtype=bool)
        rate = proportion_estimate(has[scope].astype(np.float64), tasks[scope].astype(str), level=level)
        with_label, without = scope & has, scope & ~has
        out[name] = {
            **rate.as_dict(),
            "episodes": int(has[scope].sum()),
            "success_with": float(success[with_label].mean()) if with_label.any() else None,
            "success_without": float(success[without].mean()) if without.any() else None,
            "examples": [
                {"episode_id": x["episode_id"], "steps": next(f["steps"] for f in x["labels"] if f["label"] == name)}
                for x, hit in zip(items, has, strict=True)
                if hit
            ][:examples],
        }
    causes = Counter(str(x["diagnosis"]) for x in items)
    return {
        "level": level,
        "episodes": len(items),
        "goal_known": int(known.sum()),
        "labels": dict(sorted(out.items(), key=lambda item: -item[1]["episodes"])),
        "diagnosis": dict(sorted(causes.items(), key=lambda item: (-item[1], item[0]))),
    }
