"""Training runs as their folders describe them: curves, headroom, the table of unseen questions. Only reads."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from rayrl.errors import DataError
from rayrl.retrieval.report import LABELS
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context
from rayrl.studio.pages.background import BACKGROUND
from rayrl.studio.pages.charts import Figure, lines
from rayrl.studio.pages.language import Translate
from rayrl.studio.pages.places import Place, guarded, read_lines, read_object, walk
from rayrl.studio.pages.runs.facts import held_locks, runs_root

QUICK = "quickstart_training.json"
POINTS = 500
CLASSES = ("a", "near_b", "far_b")
TRAINED = (LABELS["trace_plan"], LABELS["sft_trace"])
"""What the trained policy is called, deciding with the planned regressions or alone."""


def trainings(ctx: Context) -> list[JsonDict]:
    """Every training below the root, newest first."""
    locks = held_locks()
    found = [training_facts(place, locks) for place in walk(runs_root(ctx)) if place.is_training()]
    return sorted(found, key=lambda one: one["changed"], reverse=True)


def training_facts(place: Place, locks: frozenset[int]) -> JsonDict:
    """State and key figures of one training."""
    path = place.path
    facts: JsonDict = {"slug": place.slug, "name": place.name, "path": path, "changed": place.changed}
    found, problem = guarded(lambda: _figures(path))
    facts |= {"problem": problem, "updates": None, "planned": None, "mode": None, "actions": None}
    facts |= {"balanced": None, "oracle": None, "rivals": [], "example": None}
    facts |= found or {}
    try:
        locked = (path / ".lock").stat().st_ino in locks
    except OSError:
        locked = False
    done = (path / "result.json").exists() or (path / QUICK).exists()
    facts["state"] = "running" if locked else "completed" if done else "stopped"
    facts["gate"] = path / "gate" if (path / "gate" / "gate.json").is_file() else None
    facts["checkpoints"] = checkpoints(path)
    return facts


def checkpoints(path: Path) -> list[str]:
    """Names of the complete checkpoints, oldest first."""
    folder = path / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("step-") and (p / "state.json").is_file())


def _figures(path: Path) -> JsonDict:
    if (path / QUICK).exists():
        result = read_object(path / QUICK)
        rows = {row["policy"]: row for row in result["rows"]}
        trained = next((rows[name] for name in TRAINED if name in rows), None)
        return {
            "updates": result["updates"],
            "planned": result["planned_updates"],
            "mode": result["mode"],
            "actions": result["actions"],
            "example": result.get("example"),
            "balanced": _rate(trained) if trained else None,
            "oracle": rows["oracle"]["balanced"] if "oracle" in rows else None,
        }
    config = read_object(path / "config.json")["config"]
    facts: JsonDict = {
        "planned": config["rl"]["updates"],
        "mode": config["mdp"]["mode"],
        "actions": config["mdp"]["actions"],
    }
    if (path / "result.json").exists():
        result = read_object(path / "result.json")
        facts["updates"] = result["updates"]
        facts["balanced"] = {"value": result["unseen"]["trained"]["balanced"], "low": None, "high": None}
        facts["oracle"] = result["unseen"].get("oracle_balanced")
    else:
        last = read_lines(path / "metrics.jsonl", most_bytes=65536)
        steps = [line["update"] for line in last if isinstance(line.get("update"), int)]
        facts["updates"] = steps[-1] if steps else None
    return facts


def _rate(row: JsonDict) -> JsonDict:
    low, high = row.get("balanced_interval") or (None, None)
    return {"value": row["balanced"], "low": low, "high": high, "n": row.get("n")}


def unseen_table(path: Path) -> JsonDict | None:
    """Policies on unseen questions: rows with the balanced return (and its interval where one was computed), returns
    and retrieval rates by class, and paired differences; ``None`` where the training has not got there.

    Raises:
        DataError: a damaged file.
    """
    if (path / QUICK).exists():
        result = read_object(path / QUICK)
        differences = [
            {"pair": name.split(" - "), "value": d["mean"], "low": d["interval"][0], "high": d["interval"][1]}
            for name, d in result["differences"].items()
        ]
        names = {row["policy"] for row in result["rows"]}
        trained = next((name for name in TRAINED if name in names), None)
        rows = [{**row, "rate": _rate(row), "trained": row["policy"] == trained} for row in result["rows"]]
        return {"rows": rows, "differences": differences, "n": result["unseen_questions"], "note": result.get("note")}
    if not (path / "result.json").exists():
        return None
    result = read_object(path / "result.json")
    unseen = result["unseen"]
    trained = TRAINED[0] if result.get("plan_weight") else TRAINED[1]
    rows = [
        {"policy": name, **unseen[key], "rate": _rate(unseen[key]), "trained": key == "trained"}
        for name, key in ((LABELS["sft"], "sft"), (trained, "trained"))
    ]
    if unseen.get("oracle_balanced") is not None:  # older trainings kept only its mean, which weighs otherwise
        oracle = {"policy": LABELS["oracle"], "balanced": unseen["oracle_balanced"], "trained": False}
        rows.append({**oracle, "rate": _rate(oracle)})
    return {"rows": rows, "differences": [], "n": unseen["trained"]["n"], "note": None}


def headroom(table: JsonDict) -> list[JsonDict]:
    """What each policy leaves to the oracle, and its share of the way from the best rule to the oracle."""
    rows = {row["policy"]: row["balanced"] for row in table["rows"] if row.get("balanced") is not None}
    oracle = rows.get("oracle")
    if oracle is None:
        return []
    base = rows.get("tuned threshold", rows.get("no retrieval", rows.get("SFT")))
    out = []
    for name, value in rows.items():
        if name == "oracle":
            continue
        share = (value - base) / (oracle - base) if base is not None and oracle > base else None
        out.append({"policy": name, "left": oracle - value, "share": share})
    return sorted(out, key=lambda one: float(one["left"]))


def curves(path: Path, t: Translate) -> list[tuple[str, Figure]]:
    """Charts out of ``metrics.jsonl``: name of the message and figure."""
    points = [line for line in read_lines(path / "metrics.jsonl", most_bytes=64 * 1024 * 1024) if "update" in line]
    points = [line for line in points if isinstance(line["update"], int)]
    if len(points) < 2:
        return []

    def series(keys: dict[str, str]) -> tuple[list[float], dict[str, list[float | None]]]:
        held = [line for line in points if any(isinstance(line.get(key), int | float) for key in keys)]
        if len(held) > POINTS:
            step = len(held) / POINTS
            held = [*(held[int(i * step)] for i in range(POINTS)), held[-1]]
        values = {name: [line.get(key) for line in held] for key, name in keys.items()}
        return [line["update"] for line in held], {n: v for n, v in values.items() if any(x is not None for x in v)}

    groups: list[tuple[str, dict[str, str]]] = [
        (
            "returns",
            {"train/balanced": t("training.series.balanced"), "train/oracle": t("training.series.oracle_mean")},
        ),
        ("rollouts", {f"rollout/return_{k}": t(f"training.class.{k}") for k in CLASSES}),
        ("rates", {f"train/retrieval_rate_{k}": t(f"training.class.{k}") for k in CLASSES}),
        ("kl", {"rl/kl": "KL"}),
        ("entropy", {"rl/entropy": t("training.series.entropy")}),
        ("degenerate", {"rl/degenerate_group_fraction": t("training.series.degenerate")}),
        ("validation", {"validation/balanced": t("training.series.balanced")}),
    ]
    out = []
    for name, keys in groups:
        x, values = series(keys)
        if len(x) > 1 and values:
            figure = lines(x, values, x_title=t("training.update"))
            figure["layout"]["height"] = 220
            out.append((name, figure))
    return out


def collapsed(path: Path) -> int | None:
    """The first update at which the policy had collapsed, if it ever did."""
    for line in read_lines(path / "metrics.jsonl", most_bytes=64 * 1024 * 1024):
        if line.get("train/collapsed") == 1:
            update = line.get("update")
            return update if isinstance(update, int) else 0
    return None


@lru_cache(maxsize=4)
def _gate(path: str, mtime_ns: int) -> Any:
    from rayrl.retrieval.gate import RetrievalGate

    return RetrievalGate(Path(path))


def example(gate: Path) -> str | None:
    """A question the gate retrieves for; ``None`` while it is sought, and where there is none."""

    def make() -> str:
        from rayrl.retrieval.examples import suggest

        return suggest(_gate(str(gate), stamp)) or ""

    stamp = (gate / "gate.json").stat().st_mtime_ns
    found, _ = guarded(lambda: BACKGROUND.get((str(gate), "example"), stamp, make, wait_s=3.0))
    return found or None


def ask(gate: Path, question: str) -> JsonDict:
    """What a trained gate decides about a question, step by step.

    Raises:
        UserError: no gate there, or its encoder is not installed.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        raise DataError("the gate needs the package torch; install rayrl[data]") from None
    loaded = _gate(str(gate), (gate / "gate.json").stat().st_mtime_ns)
    found = loaded.decide(question)
    actions = loaded.meta["mdp"]["actions"]
    probabilities = [found.probability, *found.continue_probabilities]
    # with two actions the memories come up in the order of their similarity, so a step belongs to one of them
    steps = [
        {
            "n": i + 1,
            "probability": p,
            "retrieve": i < found.retrieve if actions == 2 else None,
            "memory": found.nearest[i].__dict__ if actions == 2 and i < len(found.nearest) else None,
        }
        for i, p in enumerate(probabilities)
    ]
    return {
        "retrieve": found.retrieve,
        "actions": actions,
        "steps": steps,
        "memories": [m.__dict__ for m in found.memories],
        "nearest": [m.__dict__ for m in found.nearest],
        "encode_ms": found.encode_ms,
        "decide_ms": found.decide_ms,
        "mode": loaded.meta["mdp"]["mode"],
    }
