"""Two runs on the same tasks: the paired comparison, and which episodes were won and lost."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from rayrl.evaluation.comparable import manifest_differences
from rayrl.evaluation.compare import EQUAL_WITHIN, LOWER_IS_BETTER, compare_rows
from rayrl.evaluation.sources import find_sources, read_rows, split_unusable
from rayrl.evaluation.statistics import LEVEL
from rayrl.schemas import JsonDict
from rayrl.studio.pages.apart import apart
from rayrl.studio.pages.background import AWAY, BACKGROUND
from rayrl.studio.pages.format import clip, num, signed
from rayrl.studio.pages.language import Translate
from rayrl.studio.pages.places import guarded
from rayrl.studio.pages.runs.index import LARGE, RunIndex
from rayrl.traces.manifest import MANIFEST, read_manifest

MOVES = ("won", "lost", "both", "neither")
EXPECTED = ("model", "skills", "prompt")
"""Parts of a manifest in which compared runs usually differ on purpose; a difference elsewhere is pointed out."""
PAGE = 50
CANDIDATES = 100
"""Runs that are looked through for the most suitable one to compare with."""


def compared(left: JsonDict, right: JsonDict, metric: str) -> JsonDict | None:
    """The comparison of run ``right`` with run ``left``; ``None`` while it is being computed.

    Raises:
        DataError: the runs cannot be compared (no such metric).
    """

    paths, names = (left["path"], right["path"]), (left["name"], right["name"])
    large = left["trace_bytes"] + right["trace_bytes"] >= LARGE

    def make() -> JsonDict:
        return apart(compare_runs, paths, names, metric) if large else compare_runs(paths, names, metric)

    stamp = tuple((str(run["path"]), run["trace_bytes"], run["fingerprint"]) for run in (left, right))
    where, wait_s = (AWAY, 0.0) if large else (BACKGROUND, 20.0)
    found: JsonDict | None = where.get(("compare", stamp, metric), stamp, make, wait_s=wait_s)
    return found


def compare_runs(paths: tuple[Path, Path], names: tuple[str, str], metric: str) -> JsonDict:
    """The comparison of two run folders out of their traces.

    Raises:
        DataError: the runs cannot be compared (no such metric).
    """
    rows = [split_unusable(read_rows(find_sources([str(path)])))[0] for path in paths]
    found: JsonDict = compare_rows(*rows, name_a=names[0], name_b=names[1], metric=metric)
    found["manifest_differences"] = manifest_differences(*map(read_manifest, paths))
    return found


def answer(t: Translate, found: JsonDict) -> tuple[str, str]:
    """``(kind, sentence)``: the answer with its uncertainty; kind is better, worse, unclear, equal, few,
    one or nothing."""
    metric, item, pairing = found["metric"], found["metrics"].get(found["metric"]), found["pairing"]
    difference = (item or {}).get("difference") or {}
    names = {"a": found["a"], "b": found["b"], "metric": metric, "pairs": pairing["pairs"], "tasks": pairing["tasks"]}
    if item is None or pairing["pairs"] == 0 or difference.get("mean") is None:
        return "nothing", t("runs.answer.nothing", **names)
    facts = names | {
        "mean_a": num(float(item["mean_a"]), 3),
        "mean_b": num(float(item["mean_b"]), 3),
        "difference": signed(difference["mean"]),
    }
    if difference["low"] is None:
        return "one", t("runs.answer.one", **facts)
    facts |= {"low": signed(difference["low"]), "high": signed(difference["high"])}
    if difference["low"] > 0 or difference["high"] < 0:
        better = (difference["mean"] > 0) != (metric in LOWER_IS_BETTER)
        kind = "better" if better else "worse"
        return kind, t(f"runs.answer.{kind}", **facts)
    share, _, upper = item["discordant"]
    if share == 0:
        kind = "equal" if upper <= EQUAL_WITHIN else "few"
        return kind, t(f"runs.answer.{kind}", **facts, upper=f"{100 * upper:.1f} %")
    mde = item.get("minimum_detectable_effect")
    text = t("runs.answer.unclear", **facts)
    return "unclear", text + (t("runs.answer.unseen", effect=num(float(mde), 3)) if mde is not None else "")


def metric_rows(found: JsonDict) -> list[JsonDict]:
    """A row per metric: both means, the difference as ``{value, low, high}``, p-values."""
    out = []
    for name, item in found["metrics"].items():
        d = item["difference"]
        out.append(
            {
                "name": name,
                "a": item["mean_a"],
                "b": item["mean_b"],
                "difference": {"value": d["mean"], "low": d["low"], "high": d["high"], "n": d.get("n")},
                "digits": 3 if abs(item["mean_a"] or 0) < 100 else 1,
                "p": item["p"],
                "p_holm": item.get("p_holm"),
                "lower": name in LOWER_IS_BETTER,
                "sure": d["low"] is not None and (d["low"] > 0 or d["high"] < 0) and _significant(item),
            }
        )
    return out


def _significant(item: JsonDict) -> bool:
    """Whether the p-value beside the mark, adjusted over all metrics, agrees with it."""
    p = item.get("p_holm", item["p"])
    return p is not None and p < 1 - LEVEL


def undeclared(t: Translate, found: JsonDict) -> list[str]:
    """Differences of the manifests beyond the usual ones, in words: they may explain the result instead."""
    out = []
    for key, before, after in found["manifest_differences"]:
        if key.split(".")[0] in EXPECTED:
            continue
        counted = job_counts(before, after) if key == "jobs" else None
        if counted is not None:
            text = t("runs.compare.jobs", **counted)
            out.append(text + (t("runs.compare.seeds", n=counted["seeds"]) if counted["seeds"] else ""))
        else:
            out.append(t("runs.compare.differs", key=key, a=_brief(t, before), b=_brief(t, after)))
    return out


def job_counts(before: Any, after: Any) -> dict[str, int] | None:
    """Planned episodes only in A, only in B, in both, and those in both with another seed; ``None`` if unreadable."""
    try:
        left, right = ({(job[0], job[1], job[3]): job[2] for job in jobs} for jobs in (before, after))
    except (TypeError, IndexError, KeyError):
        return None
    both = left.keys() & right.keys()
    seeds = sum(left[key] != right[key] for key in both)
    return {"a": len(left) - len(both), "b": len(right) - len(both), "both": len(both), "seeds": seeds}


def _brief(t: Translate, value: Any) -> str:
    if value is None:
        return t("runs.compare.unset")
    if isinstance(value, list) and len(value) > 6:
        return t("runs.compare.entries", n=len(value))
    return clip(", ".join(map(str, value)) if isinstance(value, list) else str(value), 60)


def partner(run: JsonDict, others: list[JsonDict]) -> str:
    """The slug of the run that shares most planned episodes with ``run``, empty where none does.

    Among equals: one of the same pipeline or gate, then the newest (the order of ``others``).
    """
    own = jobs_of(run["path"])
    best, found = (0, False), ""
    for other in [one for one in others if one["slug"] != run["slug"] and one["split"] == run["split"]][:CANDIDATES]:
        shared = len(own & jobs_of(other["path"])) if own else 0
        score = (shared, other["inside"] == run.get("inside"))
        if shared and score > best:
            best, found = score, other["slug"]
    return found


def jobs_of(path: Path) -> frozenset[Any]:
    """(catalogue, task, sample, split) of a run's planned episodes; empty where its manifest is missing or damaged."""
    try:
        stat = (path / MANIFEST).stat()
    except OSError:
        return frozenset()
    found, _ = guarded(lambda: _jobs(path, stat.st_mtime_ns, stat.st_size))
    return found or frozenset()


@lru_cache(maxsize=128)
def _jobs(path: Path, mtime_ns: int, size: int) -> frozenset[Any]:
    manifest = read_manifest(path) or {}
    semantic = manifest["semantic"]
    world = (semantic.get("environment") or {}).get("catalogue_sha256")
    return frozenset((world, job[0], job[1], job[3]) for job in semantic["jobs"])


def lacking(run: JsonDict, index: RunIndex) -> bool:
    """Whether a run nobody is writing lacks planned episodes or holds damaged lines: what is left may be easier."""
    if run["state"] == "running" or not index.current():
        return False
    meta = index.meta()
    bad = int(meta.get("malformed", 0)) + int(meta.get("foreign", 0))
    recorded = index.query("SELECT count(*) FROM attempts WHERE result")[0][0]
    run["lost"] = max(0, (run["expected"] or 0) - recorded)
    run["bad_lines"] = bad + int(meta.get("torn_size", "-1") != "-1")
    return bool(run["lost"] or run["bad_lines"])


_RESULTS = (
    "SELECT split, task, sample, episode, success, reward, labels FROM attempts WHERE result AND success IS NOT NULL"
)


def moves(left: RunIndex, right: RunIndex) -> dict[str, list[JsonDict]]:
    """Pairs complete in both runs by what became of them: won, lost, both, neither."""
    before = {row[:3]: row for row in left.query(_RESULTS)}
    out: dict[str, list[JsonDict]] = {name: [] for name in MOVES}
    for row in right.query(_RESULTS):
        old = before.get(row[:3])
        if old is None:
            continue
        name = ("neither", "won", "lost", "both")[int(row[4] == 1) + 2 * int(old[4] == 1)]
        out[name].append(
            {"task": row[1], "sample": row[2], "a": old[3], "b": row[3], "reward_a": old[5], "reward_b": row[5]}
        )
    for found in out.values():
        found.sort(key=lambda one: (one["task"], one["sample"]))
    return out
