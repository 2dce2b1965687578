"""The sample: a fast/slow routing Skill in two versions, and 600 labelled in-car requests in three file formats."""

from __future__ import annotations

from pathlib import Path

from rayrl.schemas import JsonDict
from rayrl.workbench.mapping import FieldRule, MappingProfile
from rayrl.workbench.samples.generate import as_csv, as_jsonl, as_xlsx, generate

SKILL = "fast-slow-routing"
LABELS = {"fast": ["快", "0"], "slow": ["慢", "1"]}


def skill_folder(version: int) -> Path:
    """Folder of version 1 or 2 of the sample Skill; they differ in one rule."""
    return Path(__file__).parent / "skills" / f"v{version}" / SKILL


def sample_file(kind: str, n: int = 600) -> tuple[str, bytes]:
    """File name and bytes of the sample data set as ``csv``, ``xlsx`` or ``jsonl``."""
    write = {"csv": as_csv, "xlsx": as_xlsx, "jsonl": as_jsonl}[kind]
    return f"routing_{n}.{kind}", write(generate(n))


def sample_profile(kind: str) -> MappingProfile:
    """The mapping of one of the forms."""
    sources: dict[str, JsonDict] = {
        "csv": {
            "case_id": ["编号"],
            "query": ["用户query"],
            "gold_route": ["人工标签"],
            "domain": ["垂域"],
            "history": ["对话历史"],
            "context": ["上下文"],
        },
        "xlsx": {name: [name] for name in ("query", "domain", "history", "context")}
        | {"case_id": ["id"], "gold_route": ["label"]},
        "jsonl": {
            "case_id": ["data.id"],
            "query": ["data.query"],
            "gold_route": ["annotation.label"],
            "domain": ["annotation.domain"],
            "history": ["data.history"],
            "context": ["data.context"],
            "request_id": ["rid"],
        },
    }
    fields = {}
    for target, names in sources[kind].items():
        as_json = target in ("history", "context")
        fields[target] = FieldRule(sources=names, transforms=["json"] if as_json else ["strip"])
    return MappingProfile(fields=fields, labels=LABELS)
