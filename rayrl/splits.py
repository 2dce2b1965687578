"""Building, importing and checking split manifests.

Tasks that share a product, an instruction, a persona fingerprint or a user id would leak from one split into another,
so they are joined by union-find and a whole component goes to one side; components too large for val or test stay in
train. The assignment is deterministic: it depends on the tasks and the seed alone.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayrl.errors import DataError
from rayrl.schemas import canonical_json, sha256_hex
from rayrl.tasks import Role, Split, SplitManifest, task_ids_sha256


@dataclass(frozen=True)
class TaskFacts:
    """What decides whether two tasks are related. Empty values relate nothing."""

    task_id: int
    product: str = ""
    instruction: str = ""
    persona: str = ""
    """Canonical JSON of the persona, or empty."""
    user: str = ""

    def keys(self) -> list[Hashable]:
        """The relations this task takes part in."""
        pairs = (("product", self.product), ("instruction", self.instruction), ("persona", self.persona))
        return [pair for pair in (*pairs, ("user", self.user)) if pair[1]]


USER_ID_KEYS = ("用户ID", "user_id", "userId", "uid")


def facts_from_products(products: Iterable[dict[str, Any]]) -> list[TaskFacts]:
    """One record per task of a shop catalogue in the public product format."""
    facts = []
    for product in products:
        persona = product.get("user_persona") or {}
        user = next((str(persona[key]) for key in USER_ID_KEYS if persona.get(key)), "")
        # the fingerprint leaves the user id out: the same profile under two ids is still the same profile
        profile = {k: v for k, v in persona.items() if k not in USER_ID_KEYS}
        for item in product.get("instructions") or []:
            facts.append(
                TaskFacts(
                    task_id=int(item["task_id"]),
                    product=str(product["asin"]),
                    instruction=" ".join(str(item.get("instruction", "")).split()),
                    persona=canonical_json(profile).decode() if profile else "",
                    user=user,
                )
            )
    return facts


def facts_from_file(path: Path) -> list[TaskFacts]:
    """One record per line of a JSONL file: ``task_id`` and, where known, product, instruction, persona, user.

    Raises:
        DataError: names the file and the line.
    """
    known = ("product", "instruction", "persona", "user")
    facts = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            values = {key: _text_of(row[key]) for key in known if row.get(key) is not None}
            facts.append(TaskFacts(task_id=int(row["task_id"]), **values))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: expected an object with a whole task_id ({error})") from None
    if not facts:
        raise DataError(f"{path}: holds no task")
    return facts


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value).decode()


def components(facts: list[TaskFacts]) -> list[list[int]]:
    """Connected components of related tasks; each sorted, all sorted by their smallest id."""
    parent = {fact.task_id: fact.task_id for fact in facts}

    def find(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    first: dict[Hashable, int] = {}
    for fact in facts:
        for key in fact.keys():  # noqa: SIM118 - TaskFacts.keys is a method of ours, not a mapping
            root, other = find(fact.task_id), find(first.setdefault(key, fact.task_id))
            if root != other:
                parent[max(root, other)] = min(root, other)
    groups: dict[int, list[int]] = defaultdict(list)
    for fact in facts:
        groups[find(fact.task_id)].append(fact.task_id)
    return [sorted(ids) for _, ids in sorted(groups.items())]


def build_splits(
    facts: list[TaskFacts],
    *,
    val: int,
    test: int,
    seed: int,
    source: dict[str, Any],
    persona: bool | None = None,
) -> SplitManifest:
    """Assign whole components to val and test until they hold ``val`` and ``test`` tasks; the rest is train.

    A component larger than a tenth of the smaller of val and test stays in train, so that no single family of tasks
    dominates an evaluation.

    Raises:
        DataError: duplicate task ids, or too few small components to fill val and test.
    """
    for name, size in (("val", val), ("test", test)):
        if size < 0:
            raise DataError(f"{name}: {size} is negative; use 0 for none")
    ids = [fact.task_id for fact in facts]
    if len(set(ids)) != len(ids):
        seen: set[int] = set()
        twice = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
        raise DataError(f"task id {twice} occurs twice; every task needs its own id")
    groups = components(facts)
    limit = max(1, min(val, test) // 10) if min(val, test) else max(1, max(val, test) // 10)
    small = [g for g in groups if len(g) <= limit]
    random.Random(seed).shuffle(small)
    chosen: dict[Role, list[int]] = {"val": [], "test": []}
    wanted: dict[Role, int] = {"val": val, "test": test}
    for group in small:
        for role in ("val", "test"):
            if len(chosen[role]) + len(group) <= wanted[role]:
                chosen[role] += group
                break
    for role, n in wanted.items():
        if len(chosen[role]) < n:
            raise DataError(
                f"only {len(chosen[role])} of {n} {role} tasks can be filled without splitting related tasks; "
                f"ask for fewer, or bring more tasks ({len(ids)} tasks in {len(groups)} components)"
            )
    taken = set(chosen["val"]) | set(chosen["test"])
    train = sorted(i for i in ids if i not in taken)
    if not train:
        raise DataError("val and test take every task; nothing is left for train")
    lists: dict[Role, list[int]] = {"train": train, "val": sorted(chosen["val"]), "test": sorted(chosen["test"])}
    return SplitManifest(
        source=source,
        splits={role: make_split(role, ids, persona) for role, ids in lists.items() if ids},
        grouping={
            "keys": ["product", "instruction", "persona", "user"],
            "seed": seed,
            "components": len(groups),
            "largest_component": max(len(g) for g in groups),
            "component_limit_outside_train": limit,
        },
    )


def make_split(role: Role, task_ids: list[int], persona: bool | None) -> Split:
    """A split with its hash filled in."""
    ids = sorted(task_ids)
    return Split(role=role, task_ids=ids, task_ids_sha256=task_ids_sha256(ids), persona=persona)


def check_splits(manifest: SplitManifest, facts: list[TaskFacts]) -> list[str]:
    """Problems of a manifest against the tasks it claims to split: unknown ids and related tasks on two sides."""
    known = {fact.task_id for fact in facts}
    side = {task_id: name for name, split in manifest.splits.items() for task_id in split.task_ids}
    problems = []
    unknown = sorted(set(side) - known)
    if unknown:
        problems.append(f"{len(unknown)} task ids are not in the source, the first is {unknown[0]}")
    for group in components(facts):
        sides = sorted({side[i] for i in group if i in side})
        if len(sides) > 1:
            first = {name: next(i for i in group if side.get(i) == name) for name in sides}
            where = ", ".join(f"{task} in {name}" for name, task in first.items())
            problems.append(f"related tasks lie on {len(sides)} sides: {where}")
    return problems


def import_splits(path: Path) -> SplitManifest:
    """Read a foreign split file: ``persona_splits.v1.json`` (explicit ids), or legacy ``range`` splits.

    Accepted shapes per split (at the top level or under ``splits``): a list of ids; ``{"task_ids": [...]}``;
    ``{"range": [start, stop]}`` (stop excluded) or ``{"start": a, "end": b}`` likewise. Roles come from ``role`` or
    from the split's name.

    Raises:
        DataError: names the file and the split that cannot be understood.
    """
    try:
        data = path.read_bytes()
        raw = json.loads(data)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from None
    body = raw.get("splits", raw) if isinstance(raw, dict) else None
    if not isinstance(body, dict):
        raise DataError(f"{path}: expected an object of splits")
    splits: dict[str, Split] = {}
    for name, value in body.items():
        try:
            ids = _ids_of(value)
            if ids is None and (name in _METADATA_KEYS or not isinstance(value, dict | list)):
                continue
            if ids is None:
                raise DataError(f"{path}: split {name!r}: no task_ids, range or start/end found")
            role = value.get("role", name) if isinstance(value, dict) else name
            role = {"validation": "val", "dev": "val"}.get(str(role), str(role))
            if role not in ("train", "val", "test"):
                raise DataError(f"{path}: split {name!r}: role {role!r} is none of train, val, test")
            persona = value.get("persona") if isinstance(value, dict) else None
            splits[name] = make_split(role, ids, persona if isinstance(persona, bool) else None)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}: split {name!r}: {_reason(error)}") from None
    if not splits:
        raise DataError(f"{path}: holds no split")
    try:
        return SplitManifest(
            source={"kind": "import", "file": path.name, "sha256": sha256_hex(data)},
            splits=splits,
            grouping={k: raw[k] for k in ("grouping", "version", "schema_version") if k in raw},
        )
    except ValueError as error:
        raise DataError(f"{path}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The first problem on one line, without what pydantic adds around it."""
    return str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)


_METADATA_KEYS = {"grouping", "source", "metadata", "statistics", "stats", "counts", "method"}


def _ids_of(value: Any) -> list[int] | None:
    if isinstance(value, list) and all(isinstance(i, int) for i in value):
        return list(value)
    if not isinstance(value, dict):
        return None
    for key in ("task_ids", "ids", "tasks"):
        if isinstance(value.get(key), list):
            return [int(i) for i in value[key]]
    if isinstance(value.get("range"), list) and len(value["range"]) == 2:
        return list(range(int(value["range"][0]), int(value["range"][1])))
    if "start" in value and ("end" in value or "stop" in value):
        return list(range(int(value["start"]), int(value["end"] if "end" in value else value["stop"])))
    return None
