"""A runs folder with everything the pages show: rollouts, trainings, a cross-fit, banks and a gate, and damage."""

import orjson

from rayrl.skills.bank import GateResult, SkillRecord, make_bank, save_bank
from rayrl.skills.providers import BankEntry
from rayrl.testing.traces import TraceRecipe, write_run

EVIL = "<script>window.hit=1</script>\"'><img src=x onerror=window.hit=1>{{ 7*7 }}\u2028"
FAIR = {"tasks": 24, "samples": 2, "failure_rate": 0.1}


def put(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(value))


def lines(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(v) + b"\n" for v in values))


def make_root(root, text="plain"):
    """Fill ``root``; ``text`` goes wherever a model, a file or a user could have put it."""
    write_run(root / "worse", TraceRecipe(experiment="worse", competence=-1.0, **FAIR), v4_share=0.2)
    write_run(root / "better", TraceRecipe(experiment="better", competence=3.0, **FAIR), torn_tail=True, duplicates=0.1)
    write_run(root / "nested" / "runs" / "deep", TraceRecipe(experiment="deep", tasks=6))
    (root / "damaged").mkdir()
    (root / "damaged" / "manifest.json").write_text("{bad")
    (root / "damaged" / "traces.jsonl").write_text("nothing\n{}\n")
    lines(
        root / "worse" / "metrics.jsonl",
        [{"time": 10.0 + i, "rollout/tick": i, "rollout/complete": 3 * i} for i in range(9)],
    )
    lines(root / "worse" / "events.jsonl", [{"time": 1.0, "event": "retry", "reason": text}])
    hostile(root, text)
    training(root, text)
    crossfit(root)
    skills(root, text)
    return root


def hostile(root, text):
    write_run(root / "hostile", TraceRecipe(experiment="hostile", tasks=3, failure_rate=0.0))
    path = root / "hostile" / "traces.jsonl"
    records = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for record in records:
        from rayrl.traces.schema import expand

        record.update(expand(record))
        record["schema"] = "rayrl-episode-v1"
        record["interned"] = {
            "texts": [text],
            "states": [{"page_type": text}],
            "toolsets": [[{"function": {"name": text}}]],
        }
        for step in record["steps"]:
            reference = {"text": 0, "state": 0, "version": "1"}
            step.update(observation=reference, tools=0, protocol_error={"code": text, "message": text})
            step["model"] = {
                **(step.get("model") or {}),
                "reasoning": text,
                "content": text,
                "tool_calls": [{"name": text, "arguments": {text: text}}],
            }
            if step.get("environment"):
                step["environment"]["observation"] = reference
        record["conversation"] = [{"role": "system", "content": text}]
        record["reset"].update(
            instruction=text, persona={text: text}, observation={"text": 0, "state": 0, "version": "1"}
        )
        record["selected_skills"] = [{"skill_id": text, "version": "1", "content": text}]
        record["provenance"].update(model=text, checkpoint_id=text)
        record["final"]["purchase"] = {text: text}
        record["final"]["termination_reason"] = text
        record["final"]["reward_detail"]["note"] = text
    records[-1].update(
        status="failed",
        final=None,
        error={"class": text, "code": text, "message": text, "traceback": text, "stage": text},
    )
    lines(path, records)


def training(root, text):
    rows = [
        {"policy": name, "balanced": value, "balanced_interval": [value - 1, value + 1], "return_a": 3.0, "return_near_b": 7.0,
         "return_far_b": 9.0, "hit_rate": 0.5, "retrieval_rate_near_b": 0.1, "n": 40}
        for name, value in (("no retrieval", 3.2), ("tuned threshold", 5.5), ("SFT", 6.0), ("SFT + TRACE", 6.4), ("oracle", 8.2), (text, 1.0))
    ]  # fmt: skip
    quick = {
        "mode": "observable", "actions": 2, "split": "known", "unseen_questions": 40, "rows": rows, "updates": 9,
        "planned_updates": 10, "note": text,
        "differences": {"SFT + TRACE - SFT": {"mean": 0.4, "interval": [0.1, 0.7]}, "SFT + TRACE - tuned threshold": {"mean": 0.9, "interval": [-0.1, 1.9]}},
    }  # fmt: skip
    put(root / "quick" / "quickstart_training.json", quick)
    score = {
        "balanced": 6.0,
        "return_a": 3.0,
        "return_near_b": 7.0,
        "return_far_b": 9.0,
        "hit_rate": 0.5,
        "retrieval_rate_near_b": 0.1,
        "n": 40,
    }
    folder = root / "trained"
    put(
        folder / "config.json",
        {"config": {"rl": {"updates": 40}, "mdp": {"mode": "observable", "actions": 2}, "name": text}},
    )
    put(folder / "fold.json", {})
    put(
        folder / "result.json",
        {
            "updates": 40,
            "unseen": {"sft": score, "trained": {**score, "balanced": 6.4}, "oracle": 8.9, "oracle_balanced": 8.1},
        },
    )
    points = [
        {"update": i, "rl/kl": 0.01 * i, "rl/entropy": 0.4, "rl/degenerate_group_fraction": 0.4, "rollout/return_a": 3.0,
         **({"train/balanced": 6.0, "train/oracle": 8.0, "train/retrieval_rate_a": 0.8, "train/collapsed": float(i == 30)} if i % 10 == 0 else {})}
        for i in range(1, 41)
    ]  # fmt: skip
    lines(folder / "metrics.jsonl", points)
    put(root / "broken-training" / "quickstart_training.json", {"rows": []})


def crossfit(root):
    methods = {
        name: {
            "balanced": value,
            "balanced_interval": [value - 0.3, value + 0.3],
            "return_a": 4.0,
            "return_near_b": 7.0,
            "return_far_b": 9.0,
        }
        for name, value in (
            ("no_retrieval", 3.0),
            ("tuned_threshold", 5.0),
            ("sft", 6.0),
            ("sft_trace", 6.6),
            ("oracle", 8.6),
        )
    }
    comparisons = [
        {
            "a": "sft_trace",
            "b": b,
            "difference": d,
            "interval_questions": [d - 0.3, d + 0.3],
            "mcnemar": {"only_a": 9, "only_b": 2, "p": 0.06},
        }
        for b, d in (("tuned_threshold", 1.6), ("sft", 0.2))
    ]
    part = {
        "methods": methods,
        "comparisons": comparisons,
        "errors": [{"what": "near B, something held", "share": 0.1, "lost": 0.7}],
    }
    report = {
        "name": "cf",
        "mode": "observable",
        "draws": 5,
        "questions": {"near": 50, "far": 20},
        "splits": {"known": part, "unseen": part},
    }
    put(root / "cf" / "report.json", report)


def skills(root, text):
    entries = [
        BankEntry(skill_id="first", content=f"When asked.\n{text}"),
        BankEntry(skill_id="second", content="Old words here."),
    ]
    record = SkillRecord(
        title=text, mechanism=text, cards=["card-1"],
        evidence_for=[{"run": "deep", "episode_id": "task-000000__sample-000", "steps": [0]}],
        gate=GateResult(gate="g", effect=0.1, low=0.05, high=0.15, rank=1, status="selected"),
    )  # fmt: skip
    bank = make_bank(entries, {"first": record}, bank_version="one")
    folder = root / "pipeline"
    folder.mkdir()
    save_bank(bank, folder / "candidates.snapshot.json")
    changed = make_bank(
        [entries[0], BankEntry(skill_id="second", content="New words here."), BankEntry(skill_id="third", content=text)],
        {"first": record}, bank_version="two", parent=bank,
    )  # fmt: skip
    save_bank(changed, folder / "skillbank.snapshot.json")
    put(
        folder / "bank-edited.json",
        {**orjson.loads((folder / "candidates.snapshot.json").read_bytes()), "bank_version": "edited"},
    )
    card = {
        "card_id": "card-1",
        "kind": "success",
        "observed": [text],
        "source": {"run": "deep", "episode_id": "task-000000__sample-000", "steps": [0]},
        "privileged_audit": "SECRET",
    }
    lines(folder / "build" / "cards.jsonl", [card])
    contribution = {
        "skill_id": "first",
        "effect": 0.1,
        "interval": [0.05, 0.15],
        "adjusted_p": 0.001,
        "rank": 1,
        "status": "selected",
    }
    other = {
        "skill_id": text,
        "effect": -0.1,
        "interval": [-0.2, 0.1],
        "adjusted_p": 0.5,
        "rank": 2,
        "status": "undecided",
    }
    metric = [{"skill_id": c["skill_id"], "effect": 0.0, "interval": [-1.0, 1.0]} for c in (contribution, other)]
    put(
        folder / "gate" / "contributions.json",
        {"contributions": [contribution, other], "metrics": {"r_option": metric}, "looks": [], "stability": {}},
    )
    gate = {"schema": "rayrl-gate-v1", "status": "complete", "chunks": 2, "selected": ["first"], "rollouts": 100, "minimum_detectable_effect": 0.05,
            "checkpoint_id": text, "bank_sha256": bank.sha256, "selected_bank_sha256": changed.sha256}  # fmt: skip
    put(folder / "gate" / "gate.json", gate)
    difference = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 20}
    arms = {
        "none": {"reward": 0.3, "success": 0.2, "injected_tokens": 0.0},
        "all": {"reward": 0.8, "success": 0.7, "injected_tokens": 99.0},
    }
    put(folder / "evaluation.json", {"arms": arms, "episodes": 20, "pairs": {"all - none": {"difference": difference}}})
