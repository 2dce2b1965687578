"""SFT, DPO and GRPO records: pure functions from trace records.

``tools`` is JSON text in every record: as objects, loaders that infer one type for a column fill the fields that a tool
lacks with nulls and so change the schemas. TRL takes the text form; ``json.loads`` gives the list back.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from rayrl.errors import UserError
from rayrl.evaluation.rows import is_complete_row
from rayrl.export.conversation import ConversationOptions, messages_of, split_prompt, step_tools, tools_of, visible
from rayrl.schemas import JsonDict
from rayrl.traces.schema import interned

ZERO_SPREAD = 1e-6
"""Rewards of a group that differ by no more than this carry no signal."""
STD_FLOOR = 1e-6


def _identity(record: JsonDict) -> JsonDict:
    job, final = record.get("job") or {}, record.get("final") or {}
    provenance = record.get("provenance") or {}
    return {
        "episode_id": record["episode_id"],
        "split": job.get("split"),
        "task_id": job.get("task_id"),
        "sample_id": job.get("sample_id"),
        "seed": job.get("seed"),
        "reward": final.get("reward"),
        "fingerprint": provenance.get("fingerprint"),
        "checkpoint_id": provenance.get("checkpoint_id"),
    }


def _tools_text(tools: list[JsonDict]) -> str:
    return orjson.dumps(tools).decode()


def sft_record(record: JsonDict, options: ConversationOptions) -> JsonDict:
    """A whole conversation: ``{"messages", "tools", episode_id, ...}``."""
    messages = messages_of(record, options)
    # a conversation ends with the last reply: what follows it teaches nothing
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    return {"messages": messages, "tools": _tools_text(tools_of(record)), **_identity(record)}


def sft_steps(record: JsonDict, options: ConversationOptions) -> Iterator[JsonDict]:
    """One prompt-completion record per reply, each with the exact tools of its page."""
    record = {**record, "interned": interned(record)}  # unpacked once, not per step
    messages = messages_of(record, options)
    replies = [
        s
        for s in record.get("steps") or []
        if s.get("action") is not None or (options.protocol_errors and s.get("protocol_error"))
    ]
    turn = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        step = replies[turn]
        turn += 1
        if step.get("protocol_error"):
            continue  # kept as context where asked for, never as a target
        yield {
            "prompt": visible(messages[:index], options.last_n, options.stub),
            "completion": [message],
            "tools": _tools_text(step_tools(record, step)),
            "step": step.get("index", turn - 1),
            **_identity(record),
        }


@dataclass
class Group:
    """The samples of one task that can be compared: complete ones, in sample order; failures are only counted."""

    key: tuple[str, int]
    records: list[JsonDict] = field(default_factory=list)
    failed: int = 0

    @property
    def rewards(self) -> list[float]:
        """One per record."""
        return [float(r["final"]["reward"]) for r in self.records]


def group_records(records: Iterable[JsonDict]) -> list[Group]:
    """Groups by (split, task), in order. Siblings must share prompt and skills, else they are no group.

    Raises:
        UserError: two siblings saw different prompts or skills.
    """
    groups: dict[tuple[str, int], Group] = {}
    for record in records:
        job = record.get("job") or {}
        key = (str(job.get("split") or ""), int(job.get("task_id") or 0))
        group = groups.setdefault(key, Group(key))
        if is_complete_row(record) and _finite(record["final"].get("reward")):
            group.records.append(record)
        else:
            group.failed += 1
    for group in groups.values():
        group.records.sort(key=lambda r: r["job"]["sample_id"])
        starts = {
            orjson.dumps(
                [
                    split_prompt(messages_of(r, ConversationOptions(persona=True)))[0],
                    (r.get("provenance") or {}).get("checkpoint_id"),
                ]
            )
            for r in group.records
        }
        if len(starts) > 1:
            split, task = group.key
            raise UserError(
                f"the samples of task {task} ({split or 'no split'}) saw {len(starts)} different prompts, skills or "
                "checkpoints: they are not one group. Export runs of one experiment at a time"
            )
    return [groups[key] for key in sorted(groups)]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True)
class GroupReport:
    """What the dynamic-sampling filter kept and why the rest fell out."""

    groups: int
    kept: int
    zero_spread_all_wrong: int
    zero_spread_all_right: int
    zero_spread_other: int
    too_small: int
    failed_samples: int
    effective_samples: int


def dynamic_sampling(
    groups: list[Group], *, min_size: int = 2, tolerance: float = ZERO_SPREAD, min_groups: int = 1
) -> tuple[list[Group], GroupReport]:
    """Keep groups that carry a signal: at least ``min_size`` complete samples whose rewards differ by > ``tolerance``.

    Raises:
        UserError: fewer than ``min_groups`` are left; the message says why the others fell out.
    """
    counts: Counter[str] = Counter()
    kept = []
    for group in groups:
        rewards = group.rewards
        if len(rewards) < min_size:
            counts["too_small"] += 1
        elif max(rewards) - min(rewards) <= tolerance:
            level = rewards[0]
            counts["all_right" if level >= 1 - tolerance else "all_wrong" if level <= tolerance else "other"] += 1
        else:
            kept.append(group)
    report = GroupReport(
        groups=len(groups),
        kept=len(kept),
        zero_spread_all_wrong=counts["all_wrong"],
        zero_spread_all_right=counts["all_right"],
        zero_spread_other=counts["other"],
        too_small=counts["too_small"],
        failed_samples=sum(group.failed for group in groups),
        effective_samples=sum(len(group.records) for group in kept),
    )
    if len(kept) < min_groups:
        raise UserError(
            f"starved: {len(kept)} of {len(groups)} groups carry a signal, at least {min_groups} are needed "
            f"({report.too_small} have fewer than {min_size} complete samples, {report.zero_spread_all_wrong} are all "
            f"wrong, {report.zero_spread_all_right} all right, {report.zero_spread_other} otherwise equal; "
            f"{report.failed_samples} samples failed). More samples per task (tasks.repeats) or other tasks would help"
        )
    return kept, report


def advantages(rewards: list[float], *, tolerance: float = ZERO_SPREAD) -> list[float]:
    """Group-normalised advantages (r - mean) / std with the population deviation; zeros when the range is in tolerance.

    Raises:
        ValueError: a reward is not finite.
    """
    x = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(x).all():
        raise ValueError("a reward is not finite")
    if x.size == 0 or float(np.ptp(x)) <= tolerance:
        return [0.0] * x.size
    return [float(v) for v in (x - x.mean()) / max(float(x.std()), STD_FLOOR)]


def _components(final: JsonDict) -> str:
    """The reward components as JSON text; other details can speak of the private goal and stay behind."""
    detail = final.get("reward_detail") or {}
    return orjson.dumps({k: v for k, v in detail.items() if k.startswith("r_") and _finite(v)}).decode()


def grpo_record(group: Group, options: ConversationOptions) -> JsonDict:
    """A group: ``{"group_id", "prompt", "tools", "samples": [{"completion", "reward", ...}], "training"}``.

    Numbers that only training needs (advantages) live under ``training``, apart from the samples.
    """
    split, task = group.key
    samples = []
    prompt: list[JsonDict] = []
    for record in group.records:
        prompt, completion = split_prompt(messages_of(record, options))
        final = record["final"]
        samples.append(
            {
                "completion": completion,
                "termination_reason": final.get("termination_reason"),
                "reward_detail": _components(final),
                **_identity(record),
            }
        )
    rewards = group.rewards
    return {
        "group_id": f"{split}/task-{task:06d}",
        "split": split,
        "task_id": task,
        "prompt": prompt,
        "tools": _tools_text(_merged_tools(group.records)),
        "samples": samples,
        "training": {
            "reward_mean": float(np.mean(rewards)),
            "reward_std": float(np.std(rewards)),
            "advantages": advantages(rewards),
        },
    }


def _merged_tools(records: list[JsonDict]) -> list[JsonDict]:
    found: dict[str, JsonDict] = defaultdict(dict)
    for record in records:
        for tool in tools_of(record):
            found.setdefault(tool["function"]["name"], tool)
    return [found[name] for name in sorted(found)]


def dpo_record(group: Group, options: ConversationOptions, *, min_margin: float = ZERO_SPREAD) -> JsonDict | None:
    """Best against worst of a group: ``{"prompt", "chosen", "rejected", "tools", ...}``; ``None`` within the margin.

    Ties go to the lower sample id.
    """
    if len(group.records) < 2:
        return None
    rewards = group.rewards
    best, worst = int(np.argmax(rewards)), int(np.argmin(rewards))
    if rewards[best] - rewards[worst] <= min_margin:
        return None
    good, bad = group.records[best], group.records[worst]
    prompt, chosen = split_prompt(messages_of(good, options))
    _, rejected = split_prompt(messages_of(bad, options))
    split, task = group.key
    return {
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "tools": _tools_text(_merged_tools([good, bad])),
        "group_id": f"{split}/task-{task:06d}",
        "chosen_episode": good["episode_id"],
        "rejected_episode": bad["episode_id"],
        "chosen_reward": rewards[best],
        "rejected_reward": rewards[worst],
    }
