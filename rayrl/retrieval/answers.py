"""Answer and judge: does the gate's decision make better answers, and what does it save?

Three ways to answer each question (no retrieval, fixed threshold .40, the trained gate) by any chat endpoint with the
OpenAI protocol, each answer scored by a judge in four dimensions. A score that cannot be parsed is recorded as
missing, never as a middle value; a failed call leaves the item unfinished, and the next run takes it up again. Ways
that put the same into the prompt share one answer and one score, so that chance alone cannot tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rayrl.errors import RunIncompleteError
from rayrl.evaluation.paired import wilcoxon
from rayrl.schemas import sha256_hex

DIMENSIONS = ("relevance", "accuracy", "completeness", "depth")
WEIGHTS = (0.30, 0.25, 0.25, 0.20)
JUDGE_TEMPERATURE = 0.1
REPLY_KEPT = 500
"""Characters of a judge's reply that the record keeps, for a look at what could not be parsed."""
WAYS = ("no_retrieval", "fixed_040", "gate")

Complete = Callable[[str], str]
"""``prompt -> text``; raises when the endpoint fails."""


def answer_prompt(question: str, references: Sequence[str]) -> str:
    """The answering prompt, with or without references. Decisions live in the policy, so the prompt stays minimal."""
    if not references:
        return f"Answer the question.\n\nQuestion: {question}"
    listed = "\n".join(f"[{i}] {text}" for i, text in enumerate(references, start=1))
    return (
        f"Reference information:\n{listed}\n\nAnswer from the reference information; where it says nothing about the "
        f"question, answer from your own knowledge.\n\nQuestion: {question}"
    )


def judge_prompt(question: str, answer: str, truth: str | None) -> str:
    """The judging prompt; with the right answer where there is one."""
    known = f"\nRight answer: {truth}" if truth else ""
    return (
        f"Score the answer from 0 to 10 in four dimensions.\nQuestion: {question}{known}\nAnswer: {answer}\n\n"
        "Reply with one JSON object of numbers and nothing else: "
        '{"relevance": _, "accuracy": _, "completeness": _, "depth": _}'
    )


def parse_scores(text: str) -> dict[str, float] | None:
    """The four scores, or None when the reply does not hold exactly them, each within 0..10."""
    found = re.search(r"\{[^{}]*\}", text)
    if found is None:
        return None
    try:
        value = orjson.loads(found.group())
    except orjson.JSONDecodeError:
        return None
    scores = {d: value.get(d) for d in DIMENSIONS}
    if any(isinstance(s, bool) or not isinstance(s, int | float) or not 0 <= s <= 10 for s in scores.values()):
        return None
    return {d: float(s) for d, s in scores.items()}


def overall(scores: Mapping[str, float]) -> float:
    """Weighted mean: relevance .30, accuracy .25, completeness .25, depth .20."""
    return sum(w * scores[d] for d, w in zip(DIMENSIONS, WEIGHTS, strict=True))


@dataclass(frozen=True)
class Item:
    """One question with what each way would put into the prompt."""

    id: str
    question: str
    truth: str | None
    references: dict[str, tuple[str, ...]]


def run_items(
    items: Sequence[Item], answer: Complete, judge: Complete, store: Path, models: str = ""
) -> dict[str, int]:
    """Answer and judge what is not in ``store`` yet; one line per finished (item, way), flushed at once.

    Args:
        items: the questions.
        answer: gives the answer to a prompt.
        judge: gives the judge's reply to a prompt.
        store: JSONL file, made if need be; a torn last line is dropped.
        models: who answers and judges; records of others are not taken for done.

    Returns counts: done now, already there, failed calls (those items stay open), unparsed scores among those done now.

    Raises:
        RunIncompleteError: the first five calls failed.
    """
    records = records_of(items, read_store(store), models)
    done = {(r["id"], r["way"]) for r in records}
    by_prompt = {(r["id"], r["prompt"]): r for r in records}
    counts = {"done": 0, "kept": 0, "failed": 0, "unparsed": 0}
    store.parent.mkdir(parents=True, exist_ok=True)
    _mend(store)
    with store.open("ab") as handle:
        for item in items:
            for way in WAYS:
                if (item.id, way) in done:
                    counts["kept"] += 1
                    continue
                prompt = answer_prompt(item.question, item.references[way])
                key = _prompt_key(item, way)
                known = by_prompt.get((item.id, key))
                if known is None:
                    try:
                        text = answer(prompt)
                        reply = judge(judge_prompt(item.question, text, item.truth))
                    except Exception as error:  # the endpoint's own exceptions differ; the item stays open either way
                        counts["failed"] += 1
                        if counts["failed"] >= 5 and counts["done"] == 0:
                            raise RunIncompleteError(
                                f"the first {counts['failed']} calls failed, last with {type(error).__name__}; nothing "
                                "was answered. Check the model section, then run the same command again"
                            ) from None
                        continue
                    scores = parse_scores(reply)
                    known = {
                        "answer": text,
                        "scores": scores,
                        "overall": None if scores is None else overall(scores),
                        "reply": reply[:REPLY_KEPT],
                    }
                record = {
                    **known,
                    **{"id": item.id, "way": way, "prompt": key, "models": models},
                    "references": len(item.references[way]),
                }
                by_prompt[item.id, key] = record
                counts["done"] += 1
                counts["unparsed"] += record["scores"] is None
                handle.write(orjson.dumps(record) + b"\n")
                handle.flush()
    return counts


def records_of(items: Sequence[Item], records: Sequence[dict[str, Any]], models: str = "") -> list[dict[str, Any]]:
    """The records that belong to these items, prompts and models; a store may hold those of earlier settings too."""
    wanted = {(item.id, way, _prompt_key(item, way)) for item in items for way in WAYS}
    return [r for r in records if (r["id"], r["way"], r["prompt"]) in wanted and r.get("models", "") == models]


def _prompt_key(item: Item, way: str) -> str:
    return sha256_hex(answer_prompt(item.question, item.references[way]))[:16]


def _mend(store: Path) -> None:
    # what is appended behind half a line would be lost with it
    data = store.read_bytes() if store.exists() else b""
    if data and not data.endswith(b"\n"):
        with store.open("r+b") as handle:
            handle.truncate(data.rfind(b"\n") + 1)


def read_store(store: Path) -> list[dict[str, Any]]:
    """Finished records; a torn last line is ignored."""
    if not store.exists():
        return []
    out = []
    for line in store.read_bytes().splitlines():
        try:
            out.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            continue
    return out


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean scores per way, missing counts, paired Wilcoxon of the gate against the others (items scored in both).

    ``judge`` says what the judge is worth: how many of its replies (one per item and prompt) could be parsed, and how
    many different overall scores it gave. One that gives a single score says nothing about the ways.
    """
    by_way: dict[str, dict[str, float]] = {w: {} for w in WAYS}
    missing = dict.fromkeys(WAYS, 0)
    for record in records:
        if record["overall"] is None:
            missing[record["way"]] += 1
        else:
            by_way[record["way"]][record["id"]] = record["overall"]
    out: dict[str, Any] = {
        w: {"mean": float(np.mean(list(s.values()))) if s else None, "scored": len(s), "missing": missing[w]}
        for w, s in by_way.items()
    }
    judged = {(r["id"], r["prompt"]): r["overall"] for r in records}
    given = [score for score in judged.values() if score is not None]
    out["judge"] = {"replies": len(judged), "parsed": len(given), "different_scores": len(set(given))}
    for other in WAYS[:2]:
        both = sorted(set(by_way["gate"]) & set(by_way[other]))
        differences = [by_way["gate"][i] - by_way[other][i] for i in both]
        out[f"gate_minus_{other}"] = {
            "n": len(both),
            "mean": float(np.mean(differences)) if both else None,
            "wilcoxon_p": wilcoxon(differences) if any(differences) else None,
        }
    return out


@dataclass(frozen=True)
class Prices:
    """What a retrieval and its injected tokens cost."""

    per_million_tokens: float = 0.5
    seconds_per_retrieval: float = 0.02
    characters_per_token: float = 4.0


def savings(items: Sequence[Item], prices: Prices) -> dict[str, dict[str, float]]:
    """Per 1,000 questions and way: retrievals, injected tokens, seconds, cost; and what the gate saves against .40."""
    out: dict[str, dict[str, float]] = {}
    scale = 1000 / max(len(items), 1)
    for way in WAYS:
        texts = [t for item in items for t in item.references[way]]
        tokens = sum(len(t) for t in texts) / prices.characters_per_token * scale
        out[way] = {
            "retrievals": len(texts) * scale,
            "injected_tokens": tokens,
            "seconds": len(texts) * prices.seconds_per_retrieval * scale,
            "cost": tokens / 1e6 * prices.per_million_tokens,
        }
    out["gate_saves_against_fixed_040"] = {k: out["fixed_040"][k] - out["gate"][k] for k in out["gate"]}
    return out
