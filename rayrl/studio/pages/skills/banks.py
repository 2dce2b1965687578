"""Skill banks and gates as their files describe them; nothing is written, a bank that was edited is named as such."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from rayrl.schemas import JsonDict
from rayrl.skills.bank import SkillBank, load_snapshot
from rayrl.studio.context import Context
from rayrl.studio.pages.places import Place, guarded, read_lines, read_object, walk
from rayrl.studio.pages.runs.facts import runs_root
from rayrl.workbench.store import MissingError

GATE, CONTRIBUTIONS, CARDS = "gate.json", "contributions.json", "cards.jsonl"
GATE_SCHEMA = "rayrl-gate-v1"


def is_bank(name: str) -> bool:
    """Whether a file may be a bank, by its name."""
    return name.endswith(".snapshot.json") or (name.startswith(("skillbank", "bank")) and name.endswith(".json"))


@lru_cache(maxsize=256)
def _bank(path: str, mtime_ns: int, size: int) -> SkillBank:
    return load_snapshot(Path(path))


def read_bank(path: Path) -> SkillBank:
    """A bank, kept in memory until its file changes.

    Raises:
        DataError: unreadable, or edited by hand.
    """
    stat = path.stat()
    return _bank(str(path), stat.st_mtime_ns, stat.st_size)


def banks(places: list[Place]) -> tuple[list[JsonDict], list[tuple[str, str]]]:
    """Every bank by content (several files may hold the same), newest first, and the files that are damaged."""
    found: dict[str, JsonDict] = {}
    damaged = []
    for place in places:
        for name in sorted(place.files):
            if not is_bank(name):
                continue
            path = place.path / name
            bank, problem = guarded(lambda: read_bank(path))  # noqa: B023 - called at once
            if problem is not None:
                damaged.append((f"{place.name}/{name}", problem))
                continue
            one = found.setdefault(bank.sha256, {"sha": bank.sha256, "bank": bank, "files": [], "changed": 0.0})
            one["files"].append(f"{place.name}/{name}")
            one["changed"] = max(one["changed"], place.changed)
    out = sorted(found.values(), key=lambda one: (one["changed"], one["bank"].parent is not None), reverse=True)
    for one in out:
        one["active"] = len(one["bank"].active())
        records = one["bank"].records.values()
        one["reviewed"] = sum(record.review.status != "unreviewed" for record in records)
        one["measured"] = sum(record.gate is not None for record in records)
    return out, damaged


def bank_of(ctx: Context, sha: str) -> tuple[JsonDict, list[JsonDict], list[Place]]:
    """A bank by the beginning of its hash, all banks, all places.

    Raises:
        MissingError: none, or several, begin like this.
    """
    places = walk(runs_root(ctx))
    every, _ = banks(places)
    found = [one for one in every if len(sha) >= 8 and one["sha"].startswith(sha)]
    if len(found) != 1:
        raise MissingError(f"there is no bank {sha[:64]!r} below the runs root")
    return found[0], every, places


def gates(places: list[Place]) -> list[JsonDict]:
    """Gates, newest first."""
    out = []
    for place in sorted(places, key=lambda p: p.changed, reverse=True):
        if GATE not in place.files:
            continue
        gate, problem = guarded(lambda: read_object(place.path / GATE))  # noqa: B023 - called at once
        if gate is not None and gate.get("schema") != GATE_SCHEMA:
            continue  # a retrieval gate's folder holds a gate.json too
        out.append({"slug": place.slug, "name": place.name, "gate": gate or {}, "problem": problem})
    return out


def effects(path: Path, metric: str) -> list[JsonDict]:
    """Effect of every chunk with its interval, best first.

    Raises:
        DataError: no such file, or damaged.
    """
    found = read_object(path / CONTRIBUTIONS)
    status = {one["skill_id"]: one for one in found["contributions"]}
    if metric == "reward":
        rows = [
            {
                "skill": one["skill_id"],
                "rate": {"value": one["effect"], "low": one["interval"][0], "high": one["interval"][1]},
                "p": one.get("adjusted_p"),
                "rank": one["rank"],
                "status": one["status"],
                "family": one.get("family"),
            }
            for one in found["contributions"]
        ]
    else:
        if metric not in found["metrics"]:
            raise MissingError(f"the gate measured no {metric[:60]!r}; it has {', '.join(sorted(found['metrics']))}")
        rows = [
            {
                "skill": one["skill_id"],
                "rate": {"value": one["effect"], "low": one["interval"][0], "high": one["interval"][1]},
                "p": None,
                "rank": status[one["skill_id"]]["rank"],
                "status": status[one["skill_id"]]["status"],
                "family": None,
            }
            for one in found["metrics"][metric]
        ]
    return sorted(rows, key=lambda row: -row["rate"]["value"])


def accepted_at(looks: list[JsonDict]) -> dict[str, JsonDict]:
    """The look that accepted each selected chunk, ``{look, pairs}``, counted from 1; later looks take nothing back."""
    out: dict[str, JsonDict] = {}
    for number, look in enumerate(looks, 1):
        for name in look.get("accepted") or []:
            out.setdefault(name, {"look": number, "pairs": look.get("pairs")})
    return out


def cards_of(places: list[Place], wanted: set[str], most: int = 12) -> list[JsonDict]:
    """Cards a chunk was compiled from, wherever a build of them lies; only their deployable halves."""
    out: list[JsonDict] = []
    for place in places:
        if CARDS not in place.files:
            continue
        for card in read_lines(place.path / CARDS, most_bytes=32 * 1024 * 1024):
            if card.get("card_id") in wanted and len(out) < most:
                source = card.get("source") if isinstance(card.get("source"), dict) else {}
                out.append({k: card.get(k) for k in ("card_id", "kind", "observed", "confidence")} | {"source": source})
    return out


def run_links(places: list[Place]) -> dict[str, str]:
    """Page of a run by its experiment's name, for evidence that names runs."""
    return {place.name.rpartition("/")[2]: f"/runs/{quote(place.slug)}" for place in places if place.is_run()}
