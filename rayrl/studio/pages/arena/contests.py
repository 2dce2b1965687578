"""Contests: sets of versions measured on the same questions or tasks, from the files where the results lie. Only reads.

Sources: a cross-fitted evaluation (``report.json``), the quickstart's training, the evaluation of a skill pipeline, and
rollout runs of the same tasks. Every one becomes the same shape: versions with their figure, and cells with the paired
difference row minus column.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from rayrl.errors import DataError
from rayrl.evaluation.paired import mcnemar_exact, paired_difference
from rayrl.evaluation.statistics import wilson
from rayrl.retrieval.report import LABELS
from rayrl.schemas import JsonDict, canonical_json, sha256_hex
from rayrl.studio.context import Context
from rayrl.studio.pages.background import BACKGROUND
from rayrl.studio.pages.places import Place, UnknownError, guarded, read_object, walk
from rayrl.studio.pages.runs.facts import held_locks, run_facts, run_index, runs_root
from rayrl.traces.manifest import read_manifest

PATIENCE_S = 1.5
"""How long the page waits for what is being read and computed for the first time; then it shows what is there."""
MOST = 10
"""Rollout runs of one contest; more make a matrix nobody reads."""


@dataclass
class Version:
    """One contestant."""

    name: str
    rate: JsonDict | None
    href: str | None = None
    more: JsonDict = field(default_factory=dict)
    """Further figures by the name of their message."""


@dataclass
class Contest:
    """What is compared with what."""

    kind: str
    slug: str
    name: str
    scale: tuple[float, float]
    versions: list[Version]
    cells: dict[tuple[str, str], JsonDict]
    """Row minus column: ``{value, low, high, p, href, only_row, only_column}``."""
    note: str = ""
    """Name of a message."""
    facts: JsonDict = field(default_factory=dict)
    waiting: bool = False
    problem: str | None = None

    def __post_init__(self) -> None:
        absent = dict.fromkeys(("draws", "training", "skills", "splits", "split", "errors", "metric", "questions"))
        self.facts = {**absent, "questions": {}, **self.facts}

    @property
    def href(self) -> str:
        """Its page."""
        return f"/arena/{self.kind}/{quote(self.slug)}"

    @property
    def hub(self) -> str | None:
        """The version that takes part in every comparison where no two others were compared."""
        shared = set.intersection(*(set(pair) for pair in self.cells)) if len(self.cells) > 1 else set()
        return next((v.name for v in self.versions if v.name in shared), None)

    @property
    def with_intervals(self) -> bool:
        """Whether any single version has an interval of its own."""
        return any(v.rate and v.rate.get("low") is not None for v in self.versions)

    @property
    def unpaired(self) -> bool:
        """Whether some pair of the compared versions was not compared with each other."""
        names = {name for pair in self.cells for name in pair}
        return len({frozenset(pair) for pair in self.cells}) < len(names) * (len(names) - 1) // 2

    def cell(self, row: str, column: str) -> JsonDict | None:
        """The difference row minus column, from whichever side it was computed."""
        if (row, column) in self.cells:
            return self.cells[row, column]
        other = self.cells.get((column, row))
        if other is None:
            return None
        turned = {"value": 0.0 - other["value"], "low": _minus(other["high"]), "high": _minus(other["low"])}
        swapped = {"only_row": other.get("only_column"), "only_column": other.get("only_row")}
        return {**other, **turned, **swapped, "href": other.get("href_back") or other.get("href")}


def _minus(value: float | None) -> float | None:
    return None if value is None else 0.0 - value


def listed(ctx: Context) -> list[JsonDict]:
    """All contests below the root, as links with what they hold."""
    out: list[JsonDict] = []
    places = walk(runs_root(ctx))
    for place in sorted(places, key=lambda p: p.changed, reverse=True):
        for kind, made in _FILES.items():
            name, check = made
            if name not in place.files:
                continue
            found, problem = guarded(lambda: check(read_object(place.path / name)))  # noqa: B023 - called at once
            if found is None and problem is None:
                continue
            out.append({"kind": kind, "slug": place.slug, "name": place.name, "versions": found, "problem": problem})
    for key, runs in groups(places).items():
        names = [run["name"].rpartition("/")[2] for run in runs]
        out.append({"kind": "runs", "slug": key, "name": _group_name(runs), "versions": names, "problem": None})
    return out


def _crossfit_versions(report: JsonDict) -> list[str] | None:
    return list(next(iter(report["splits"].values()))["methods"]) if "splits" in report and "draws" in report else None


_FILES: dict[str, tuple[str, Any]] = {
    "crossfit": ("report.json", _crossfit_versions),
    "training": ("quickstart_training.json", lambda result: [row["policy"] for row in result["rows"]]),
    "skills": ("evaluation.json", lambda result: list(result["arms"]) if "arms" in result else None),
}
ORDER = tuple(LABELS)


def crossfit(path: Path, slug: str, name: str, split: str) -> Contest:
    """A split of a cross-fitted evaluation.

    Raises:
        DataError: damaged, or no such split.
    """
    report = read_object(path / "report.json")
    if split not in report["splits"]:
        known = ", ".join(report["splits"])
        text = f"the evaluation has no split {split[:40]!r}; splits: {known}"
        raise UnknownError("shell.missing.split", text, name=split[:40], known=known)
    part = report["splits"][split]
    versions = []
    for key in sorted(part["methods"], key=lambda k: ORDER.index(k) if k in ORDER else 99):
        item = part["methods"][key]
        low, high = item.get("balanced_interval") or (None, None)
        more = {k: item.get(k) for k in ("return_a", "return_near_b", "return_far_b")}
        more |= {f"{k}_interval": item.get(f"{k}_interval") for k in ("return_a", "return_near_b", "return_far_b")}
        versions.append(Version(key, {"value": item["balanced"], "low": low, "high": high}, more=more))
    cells = {}
    for c in part["comparisons"]:
        low, high = c["interval_questions"]
        cells[c["a"], c["b"]] = {
            "value": c["difference"],
            "low": low,
            "high": high,
            "p": c.get("mcnemar_p_holm", c["mcnemar"]["p"]),
            "only_row": c["mcnemar"]["only_a"],
            "only_column": c["mcnemar"]["only_b"],
            "categories": c.get("interval_categories"),
        }
    facts = {
        "splits": list(report["splits"]),
        "split": split,
        "questions": report["questions"],
        "draws": report["draws"],
    }
    facts |= {"mode": report["mode"], "errors": part.get("errors") or [], "headroom_share": part.get("headroom_share")}
    return Contest("crossfit", slug, name, (0, 10), versions, cells, note="arena.note.crossfit", facts=facts)


def quick(path: Path, slug: str, name: str) -> Contest:
    """The quickstart's training.

    Raises:
        DataError: damaged.
    """
    result = read_object(path / "quickstart_training.json")
    versions = []
    for row in result["rows"]:
        low, high = row.get("balanced_interval") or (None, None)
        more = {k: row.get(k) for k in ("return_a", "return_near_b", "return_far_b")}
        versions.append(Version(row["policy"], {"value": row["balanced"], "low": low, "high": high}, more=more))
    cells = {}
    for label, d in result["differences"].items():
        a, _, b = label.partition(" - ")
        cells[a, b] = {"value": d["mean"], "low": d["interval"][0], "high": d["interval"][1], "p": None}
    facts = {
        "questions": {"n": result["unseen_questions"]},
        "mode": result["mode"],
        "training": f"/training/{quote(slug)}",
    }
    return Contest("training", slug, name, (0, 10), versions, cells, note="arena.note.training", facts=facts)


def skills(path: Path, slug: str, name: str) -> Contest:
    """The arms of a skill pipeline's evaluation.

    Raises:
        DataError: damaged.
    """
    result = read_object(path / "evaluation.json")
    versions = []
    for arm, item in result["arms"].items():
        more = {
            "success": _proportion(item.get("success"), result.get("episodes")),
            "injected_tokens": item.get("injected_tokens"),
        }
        low, high = item.get("reward_interval") or (None, None)
        versions.append(Version(arm, {"value": item["reward"], "low": low, "high": high}, more=more))
    cells = {}
    for label, pair in result["pairs"].items():
        a, _, b = label.partition(" - ")
        d = pair["difference"]
        cells[a, b] = {"value": d["mean"], "low": d["low"], "high": d["high"], "p": None}
    gate = f"/skills/gates/{quote(slug)}~gate"
    facts = {
        "questions": {"n": result.get("episodes")},
        "skills": gate if (path / "gate" / "gate.json").is_file() else None,
    }
    return Contest("skills", slug, name, (0, 1), versions, cells, note="arena.note.skills", facts=facts)


def _proportion(share: float | None, n: int | None) -> JsonDict | None:
    """A share of ``n`` tasks with its Wilson interval."""
    if share is None or not n:
        return None
    low, high = wilson(share * n, n)
    return {"value": share, "low": low, "high": high, "n": n}


def groups(places: list[Place]) -> dict[str, list[JsonDict]]:
    """Rollout runs of the same tasks and samples in the same environment, by a key; groups of one are left out."""
    locks = held_locks()
    found: dict[str, list[JsonDict]] = defaultdict(list)
    for place in places:
        if not place.is_run():
            continue
        facts = run_facts(place, locks)
        if not facts["trace_bytes"] or facts["expected"] is None:
            continue
        key, _ = guarded(lambda: _group_key(place.path))  # noqa: B023 - called at once
        if key:
            found[key].append(facts)
    return {
        key: sorted(runs, key=lambda run: run["created_at"])[-MOST:] for key, runs in found.items() if len(runs) > 1
    }


def _group_key(path: Path) -> str:
    manifest = read_manifest(path) or {}
    semantic = manifest["semantic"]
    what = [[job[0], job[1], job[3]] for job in semantic["jobs"]], semantic["environment"], semantic.get("limits")
    return sha256_hex(canonical_json(list(what)))[:12]


def _group_name(runs: list[JsonDict]) -> str:
    parts = {run["name"].rpartition("/")[0] for run in runs}
    where = parts.pop() if len(parts) == 1 else ""
    return f"{where + ' · ' if where else ''}{runs[0]['split']} · {runs[0]['expected']}"


def rollouts(ctx: Context, key: str, metric: str) -> Contest:
    """Rollout runs of the same tasks, every one against every other.

    Raises:
        UnknownError: no such group.
    """
    found = groups(walk(runs_root(ctx)))
    if key not in found:
        raise UnknownError("shell.missing.runs", "these runs are not there any more")
    runs = found[key]
    short = [run["name"].rpartition("/")[2] for run in runs]
    names = {run["slug"]: n if short.count(n) == 1 else run["name"] for run, n in zip(runs, short, strict=True)}
    until = time.monotonic() + PATIENCE_S
    versions, values, waiting, problem = [], {}, False, None
    for run in runs:
        index = run_index(ctx, run["path"])
        try:
            ready = index.update(max(0.0, until - time.monotonic()))
        except DataError as error:
            problem, ready = str(error), True
        waiting = waiting or not ready
        values[run["slug"]] = (index, index.stamp())
        more = {"success": run["success"], "model": run["model"], "skills": run["skills"]}
        versions.append(Version(names[run["slug"]], run[metric], href=f"/runs/{quote(run['slug'])}", more=more))
    cells = {}
    for i, a in enumerate(runs):
        for b in runs[:i]:
            pair = (values[a["slug"]], values[b["slug"]])
            cell = BACKGROUND.get(
                ("arena", metric, a["slug"], b["slug"]),
                (pair[0][1], pair[1][1]),
                partial(paired, pair[0][0], pair[1][0], metric),
                wait_s=max(0.0, until - time.monotonic()),
            )
            if cell is None:
                waiting = True
                continue
            if cell["value"] is not None:
                links = {"href": _link(b, a, metric), "href_back": _link(a, b, metric)}
                cells[names[a["slug"]], names[b["slug"]]] = {**cell, **links}
    facts = {"questions": {"n": runs[0]["expected"]}, "metric": metric}
    made = Contest("runs", key, _group_name(runs), (0, 1), versions, cells, note="arena.note.runs", facts=facts)
    made.waiting, made.problem = waiting, problem
    return made


def _link(first: JsonDict, second: JsonDict, metric: str) -> str:
    column = "r_success" if metric == "success" else metric
    return f"/runs/-/compare?a={quote(first['slug'])}&b={quote(second['slug'])}&metric={column}"


def paired(row: Any, column: Any, metric: str) -> JsonDict:
    """The paired difference of two runs on the episodes complete in both."""
    column_name = "success" if metric == "success" else "reward"
    sql = f"SELECT split, task, sample, {column_name} FROM attempts WHERE result AND complete"
    left, right = ({r[:3]: r[3] for r in index.query(sql) if r[3] is not None} for index in (row, column))
    keys = sorted(left.keys() & right.keys())
    x, y = np.array([right[k] for k in keys], dtype=float), np.array([left[k] for k in keys], dtype=float)
    # numbered in the order of the comparison's page: the bootstrap then draws the same tasks and both pages agree
    tasks = {task: n for n, task in enumerate(dict.fromkeys(k[:2] for k in keys))}
    found = paired_difference(x, y, np.array([tasks[k[:2]] for k in keys])).as_dict()["difference"]
    cell: JsonDict = {"value": found["mean"], "low": found["low"], "high": found["high"], "n": len(keys), "p": None}
    if metric == "success":
        cell |= {"only_row": int(((y == 1) & (x == 0)).sum()), "only_column": int(((x == 1) & (y == 0)).sum())}
        cell["p"] = mcnemar_exact(cell["only_column"], cell["only_row"])
    return cell
