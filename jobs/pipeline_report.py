"""What the pipeline says at the end: arms on unseen tasks compared in pairs, and a page for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson

from rayrl.evaluation.paired import paired_difference
from rayrl.evaluation.statistics import cluster_bootstrap, group, wilson
from rayrl.schemas import EpisodeJob, JsonDict
from rayrl.skills.validation import read_arm
from rayrl.traces.manifest import write_json_atomic
from rayrl.traces.store import RunReader

PAIRS = (
    ("selected", "none"),
    ("all", "none"),
    ("all", "selected"),
    ("learned", "none"),
    ("learned", "all"),
    ("learned", "selected"),
    ("learned", "top_k"),
    ("learned", "threshold"),
)


def compare_arms(folders: dict[str, Path], jobs: Sequence[EpisodeJob], good: set[str]) -> JsonDict:
    """Rewards, injected tokens, wrong injections per arm, and paired differences. ``good``: what the gate selected."""
    arms = {name: read_arm(folder, jobs, None) for name, folder in folders.items()}
    keys = [(j.task_id, j.sample_id) for j in jobs]
    clusters = [t for t, _ in keys]
    table: JsonDict = {}
    for name, arm in arms.items():
        values = [arm.metrics[k] for k in keys]
        reward, success = cluster_bootstrap(
            [group([v.get(metric, np.nan) for v in values], clusters) for metric in ("reward", "r_success")]
        )
        table[name] = {
            "reward": reward.mean,
            "reward_interval": [reward.low, reward.high],
            "success": success.mean,
            "success_interval": [success.low, success.high],
            "injected_tokens": float(np.mean([v["injected_tokens"] for v in values])),
            "injected_skills": float(np.mean([v["injected_skills"] for v in values])),
            "wrong_injections": _wrong(folders[name], good),
            "actions": float(np.mean([v.get("total_actions", float("nan")) for v in values])),
        }
    pairs: JsonDict = {}
    for a, b in PAIRS:
        if a in arms and b in arms:
            found = paired_difference([arms[b].reward(k) for k in keys], [arms[a].reward(k) for k in keys], clusters)
            pairs[f"{a} - {b}"] = found.as_dict()
    if "learned" in table and table["all"]["injected_tokens"]:
        table["learned"]["tokens_saved_against_all"] = (
            1 - table["learned"]["injected_tokens"] / table["all"]["injected_tokens"]
        )
    return {"tasks": len(set(clusters)), "episodes": len(keys), "arms": table, "pairs": pairs}


def _wrong(folder: Path, good: set[str]) -> float:
    """Mean number of injected skills per episode that the gate did not select."""
    counts = [
        sum(s.get("skill_id") not in good for s in record.get("selected_skills") or [])
        for record in RunReader(folder).results()
    ]
    return float(np.mean(counts)) if counts else 0.0


def write_report(out: Path, config: JsonDict, stages: JsonDict, gate: JsonDict, evaluation: JsonDict) -> JsonDict:
    """``report.json`` and ``report.md``; returns the main facts."""
    contributions = orjson.loads((out / "gate" / "contributions.json").read_bytes())["contributions"]
    facts = {
        "bank_sha256": (stages.get("bank") or {}).get("bank_sha256"),
        "selected": gate["selected"],
        "gate_rollouts": gate["rollouts"],
        "minimum_detectable_effect": gate["minimum_detectable_effect"],
        "confirmation": gate["confirmation"],
        "selector_confirmation": (stages.get("selector") or {}).get("confirmation"),
        "evaluation": evaluation,
    }
    write_json_atomic(out / "report.json", {"config": config, "stages": stages, **facts})
    (out / "report.md").write_text(_markdown(facts, stages, contributions, evaluation), encoding="utf-8")
    return facts


def write_empty_report(out: Path, config: JsonDict, stages: JsonDict) -> JsonDict:
    """The report of a loop whose analyst found nothing that can be used; returns its facts."""
    facts: JsonDict = {"bank_sha256": None, "selected": [], "gate_rollouts": 0, "evaluation": None}
    write_json_atomic(out / "report.json", {"config": config, "stages": stages, **facts})
    text = (
        f"{_built(stages)}\n\nNo usable skill came out, so nothing was gated and no bank was made; "
        "what was in use stays in use. More episodes, or another analyst, would help.\n"
    )
    (out / "report.md").write_text(text, encoding="utf-8")
    return facts


def _built(stages: JsonDict) -> str:
    built = stages.get("candidates") or {}
    rejected = ", ".join(f"{reason} {count}" for reason, count in (built.get("rejected") or {}).items())
    return (
        f"{built.get('episodes')} episodes gave {built.get('cards')} cards, {built.get('clusters')} clusters and "
        f"{built.get('candidates')} candidates; rejected: {rejected or 'none'}."
    )


def _markdown(facts: JsonDict, stages: JsonDict, contributions: list[JsonDict], evaluation: JsonDict) -> str:
    lines = [
        _built(stages),
        f"The gate played {facts['gate_rollouts']} rollouts; planned, it could see effects from "
        f"{facts['minimum_detectable_effect']:.3f} on.",
        "",
        "| skill | effect | 95 % interval | status |",
        "|---|---|---|---|",
    ]
    for row in sorted(contributions, key=lambda r: int(r["rank"])):
        low, high = row["interval"]
        lines.append(f"| {row['skill_id']} | {row['effect']:+.3f} | {low:+.3f} to {high:+.3f} | {row['status']} |")
    if "selector" in stages:
        lines += ["", *_selector(stages["selector"])]
    lines += [
        "",
        f"On {evaluation['tasks']} unseen tasks:",
        "",
        "| skills | reward | success | injected tokens | injected skills | of them not selected by the gate |",
        "|---|---|---|---|---|---|",
    ]
    for name, arm in evaluation["arms"].items():
        lines.append(
            f"| {name} | {_figure(arm, 'reward')} | {_figure(arm, 'success')} | {arm['injected_tokens']:.0f} | "
            f"{arm['injected_skills']:.1f} | {arm['wrong_injections']:.1f} |"
        )
    lines += ["", "| paired difference | reward | 95 % interval |", "|---|---|---|"]
    for name, pair in evaluation["pairs"].items():
        d = pair["difference"]
        lines.append(f"| {name} | {d['mean']:+.3f} | {d['low']:+.3f} to {d['high']:+.3f} |")
    if any(pair["difference"]["low"] == pair["difference"]["high"] for pair in evaluation["pairs"].values()):
        bound = wilson(0, evaluation["tasks"])[1]
        lines += [
            "",
            f"Where an interval has no width, no task differs. That {evaluation['tasks']} tasks do not differ "
            f"means that up to {bound:.1%} of all tasks may (Wilson, 95 %).",
        ]
    return "\n".join(lines) + "\n"


def _figure(arm: JsonDict, name: str) -> str:
    """A mean and its interval over tasks."""
    if arm[name] is None:
        return "-"
    low, high = arm[f"{name}_interval"]
    return f"{arm[name]:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")


def _selector(facts: JsonDict) -> list[str]:
    """What was confirmed of the selector, in words, and the tries in a table."""
    check = facts.get("confirmation")
    if check is None:
        return ["The learned selector was not confirmed by rollouts: what it leaves out rests on a fitted model alone."]
    first = check["trained"]
    low = "no bound" if first["low"] is None else f"{first['low']:+.3f}"
    lines = [
        f"The trained selector was played against all chunks on {check['tasks']} tasks of its own: "
        f"{first['mean']:+.3f}, lower bound {low}, margin {check['margin']:.3f}; {check['rollouts']} rollouts in all."
    ]
    if check["served"] == "trained":
        return [*lines, "It is confirmed and served as trained."]
    lines.append("It is not confirmed. Chunks were left out one by one instead, each set played against all chunks:")
    lines += ["", "| without | expected loss | difference to all | 95 % interval | dropped |", "|---|---|---|---|---|"]
    for row in check["tries"]:
        d = row["to_all"]
        interval = "none" if d["low"] is None else f"{d['low']:+.3f} to {d['high']:+.3f}"
        dropped = "yes" if row["dropped"] else "no"
        lines.append(f"| {row['chunk']} | {row['expected_loss']:+.3f} | {d['mean']:+.3f} | {interval} | {dropped} |")
    if check["served"] == "all":
        return [*lines, "", "No drop could be confirmed: the selector injects every chunk and saves nothing."]
    return [*lines, "", f"The selector takes the {len(check['kept'])} chunks that are left, on every task."]
