"""What the list of runs and the head of a run's page say, from small files only: the traces are not read here."""

from __future__ import annotations

import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import orjson

from rayrl.evaluation.summary import summarize
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context
from rayrl.studio.pages.apart import apart
from rayrl.studio.pages.background import AWAY, BACKGROUND
from rayrl.studio.pages.places import SEPARATOR, Place, guarded, read_lines, read_object, resolve, walk
from rayrl.studio.pages.runs.index import BRIEF_S, LARGE, RunIndex, index_of
from rayrl.traces.manifest import MANIFEST, read_manifest
from rayrl.traces.store import TRACES

SUMMARY, METRICS, EVENTS = "summary.json", "metrics.jsonl", "events.jsonl"
COMPACT = "traces.parquet"
OWNER = frozenset({"gate.json", "evaluation.json", "state.json"})
"""A folder with one of these is a skill pipeline or gate; the runs inside are its own."""

_MANIFEST_FACTS = ("created_at", "expected", "model", "checkpoint", "level", "split", "role", "skills", "fingerprint")


def runs_root(ctx: Context) -> Path:
    """The folder that is shown."""
    return Path(ctx.config.runs).expanduser()


def run_index(ctx: Context, run_dir: Path) -> RunIndex:
    """The episode index of a run, in the studio's own folder."""
    return index_of(ctx.bench.store.root / "cache" / "runs", run_dir)


def rate(item: JsonDict | None) -> JsonDict | None:
    """An estimate of a summary as the pages show it: ``{value, low, high, n}``."""
    if not item or item.get("mean") is None:
        return None
    return {"value": item["mean"], "low": item.get("low"), "high": item.get("high"), "n": item.get("n")}


def runs_of(ctx: Context, patience_s: float = 0.0) -> list[JsonDict]:
    """Facts of every run below the root, newest first; damaged ones carry a ``problem``.

    Small runs no page has read yet are read within ``patience_s`` all together; until then their summary is believed.
    """
    locks, places = held_locks(), walk(runs_root(ctx))
    found = [run_facts(place, locks) for place in places if place.is_run()]
    owners = sorted((p.slug for p in places if not p.is_run() and p.files & OWNER), key=len)
    for run in found:  # the outermost folder counts: a pipeline holds a gate, and both hold runs
        run["inside"] = next((slug for slug in owners if run["slug"].startswith(slug + SEPARATOR)), None)
    until = time.monotonic() + patience_s
    for run in found:
        index = run_index(ctx, run["path"])
        if 0 < run["trace_bytes"] < LARGE and not index.current() and (left := until - time.monotonic()) > 0:
            guarded(partial(index.update, left))
        recount(run, index)
    return sorted(found, key=lambda run: (run["created_at"] or "", run["slug"]), reverse=True)


def one_run(ctx: Context, slug: str) -> JsonDict:
    """Facts of one run.

    Raises:
        MissingError: no folder of this name.
    """
    path = resolve(runs_root(ctx), slug)
    files = frozenset(entry.name for entry in path.iterdir())
    return run_facts(Place(slug, path, files, 0.0), held_locks())


def run_facts(place: Place, locks: frozenset[int]) -> JsonDict:
    """State, progress, key figures."""
    path = place.path
    manifest, problem = guarded(lambda: _manifest_facts(path, *_stat(path / MANIFEST)))
    facts: JsonDict = {
        "slug": place.slug,
        "name": place.name,
        "path": path,
        "problem": problem,
        **dict.fromkeys(_MANIFEST_FACTS),
        **(manifest or {}),
    }
    facts["trace_bytes"] = _stat(path / TRACES)[1]
    fresh = _stat(path / SUMMARY)[0] >= _stat(path / TRACES)[0] > 0
    summary, broken = guarded(lambda: _summary_facts(path, *_stat(path / SUMMARY)) if SUMMARY in place.files else None)
    facts |= {"trouble": problem, "problem": problem or broken, "claimed": None}
    live = _last_tick(path, *_stat(path / METRICS))
    facts |= {"success": None, "reward": None, "failed": None, **(summary or {})}
    facts["fresh"] = fresh and summary is not None
    if not facts["fresh"]:
        facts["complete"] = max(int(live.get("rollout/complete") or 0), int((summary or {}).get("complete") or 0))
    facts["live"] = live
    locked = _stat(path / ".lock")[2] in locks
    done = facts["expected"] is not None and facts["complete"] >= facts["expected"]
    left = "stopped" if manifest is not None else "unreadable" if facts["trouble"] else "unknown"
    facts["state"] = "running" if locked else "completed" if done else left
    return facts


def recount(run: JsonDict, index: RunIndex) -> None:
    """What the traces hold counts, not what a summary or a metric says; where they disagree, ``claimed`` is its number.

    Nothing changes while the traces have not been read.
    """
    if run["trace_bytes"]:
        if not index.current():
            return
        held = int(index.query("SELECT count(*) FROM attempts WHERE result AND complete")[0][0])
    elif (run["path"] / COMPACT).exists():
        return
    else:
        held = 0
    if run["state"] != "running" and held < run["complete"]:
        run |= {"claimed": run["complete"], "fresh": False, "success": None, "reward": None, "failed": None}
    run["complete"] = held
    if run["state"] in ("stopped", "completed") and run["expected"] is not None:
        run["state"] = "completed" if held >= run["expected"] else "stopped"


def held_locks() -> frozenset[int]:
    """Inodes of the files that some process holds a lock on (Linux); looking does not take part in the locking."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(int(words[5].rpartition(":")[2]) for line in lines if len(words := line.split()) > 5)


def _stat(path: Path) -> tuple[int, int, int]:
    """``(mtime in ns, size, inode)``, zeros where there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@lru_cache(maxsize=4096)
def _manifest_facts(path: Path, mtime_ns: int, size: int, inode: int) -> JsonDict | None:
    manifest = read_manifest(path)
    if manifest is None:
        return None
    semantic = manifest["semantic"]
    model, split, skills = semantic["model"], semantic.get("split") or {}, semantic.get("skills") or {}
    return {
        "created_at": str(manifest["created_at"]),
        "expected": len(semantic["jobs"]),
        "model": str(model.get("name") or model.get("kind")),
        "checkpoint": model.get("checkpoint_id"),
        "split": split.get("name"),
        "role": split.get("role"),
        "skills": str(skills.get("kind", "none")),
        "fingerprint": str(manifest["fingerprint"]),
        "level": (model.get("config") or {}).get("level"),
    }


@lru_cache(maxsize=4096)
def _summary_facts(path: Path, mtime_ns: int, size: int, inode: int) -> JsonDict:
    return summary_facts(read_object(path / SUMMARY))


def summary_facts(summary: JsonDict) -> JsonDict:
    """Key figures of a summary."""
    metrics, coverage = summary["metrics"], summary["coverage"]
    return {
        "success": rate(metrics.get("r_success")),
        "reward": rate(metrics.get("reward")),
        "complete": int(coverage["completed"]),
        "failed": int(coverage["failed"]),
    }


@lru_cache(maxsize=4096)
def _last_tick(path: Path, mtime_ns: int, size: int, inode: int) -> JsonDict:
    ticks = [line for line in read_lines(path / METRICS, most_bytes=32768) if "rollout/tick" in line]
    return ticks[-1] if ticks else {}


def summary_of(run: JsonDict, index: RunIndex) -> JsonDict | None:
    """The summary of a run: its file where that is up to date, else computed; ``None`` while it is being computed."""
    path: Path = run["path"]
    if run["fresh"]:
        return read_object(path / SUMMARY)

    def make() -> JsonDict:
        if run["trace_bytes"] < LARGE:
            return summarize_run(path, run["expected"])
        return apart(summarize_run, path, run["expected"])

    if not run["trace_bytes"]:
        return None
    where, wait_s = (BACKGROUND, 20.0) if run["trace_bytes"] < LARGE else (AWAY, 0.0)
    found: JsonDict | None = where.get((str(path), "summary"), _stat(path / TRACES), make, wait_s=wait_s)
    return found


def summarize_run(path: Path, expected: int | None) -> JsonDict:
    """The summary of a run out of its traces."""
    from rayrl.evaluation.sources import find_sources, read_rows, split_unusable

    rows, _ = split_unusable(read_rows(find_sources([str(path)])))
    found: JsonDict = summarize(rows, expected_jobs=expected)
    return found


def diagnosis_of(run: JsonDict, index: RunIndex) -> JsonDict | None:
    """Rates of the labels with intervals, main causes and examples; ``None`` while they are being computed."""

    def make() -> JsonDict:
        from rayrl.evaluation.label_rates import LabelTally

        tally = LabelTally()
        rows = index.query(
            "SELECT split, task, sample, episode, success, cause, labels FROM attempts"
            " WHERE result AND cause IS NOT NULL"
        )
        known = goals_known(run["path"])
        for split, task, sample, episode, success, cause, labels in rows:
            tally.add(
                {
                    **{"run": "", "split": split, "task_id": task, "sample_id": sample, "episode_id": episode},
                    **{"success": success, "diagnosis": cause, "labels": orjson.loads(labels), "goal_known": known},
                }
            )
        return tally.rates()

    wait_s = 20.0 if run["trace_bytes"] < LARGE else BRIEF_S
    found: JsonDict | None = BACKGROUND.get((str(run["path"]), "diagnosis"), index.stamp(), make, wait_s=wait_s)
    return found


def goals_known(path: Path) -> bool:
    """Whether the run has private goals beside its traces (labels about the target rest on them)."""
    return _stat(path / "private.jsonl")[1] > 0


def progress_points(path: Path, most: int = 400) -> dict[str, list[Any]]:
    """Progress over time out of ``metrics.jsonl``, thinned to ``most`` points: seconds, episodes, mean reward, rate."""
    ticks = [line for line in read_lines(path / METRICS) if isinstance(line.get("time"), int | float)]
    ticks = [line for line in ticks if "rollout/tick" in line]
    if len(ticks) > most:
        step = len(ticks) / most
        ticks = [*(ticks[int(i * step)] for i in range(most)), ticks[-1]]
    start = ticks[0]["time"] if ticks else 0
    return {
        "seconds": [round(line["time"] - start, 1) for line in ticks],
        "complete": [line.get("rollout/complete") for line in ticks],
        "reward": [line.get("rollout/reward_mean") for line in ticks],
        "rate": [line.get("rollout/episodes_per_s") for line in ticks],
    }


def events_of(path: Path) -> tuple[dict[str, int], list[JsonDict]]:
    """What happened around the episodes: counts by kind, and the newest 20."""
    lines = read_lines(path / EVENTS, most_bytes=1024 * 1024)
    counts: dict[str, int] = {}
    for line in lines:
        kind = str(line.get("event", "event"))
        counts[kind] = counts.get(kind, 0) + 1
    return counts, lines[-20:][::-1]
