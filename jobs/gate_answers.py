"""Answer-and-judge: the three-way comparison of a trained gate by a chat model, and what the gate saves.

Called by ``rayrl evaluate-policy --answers MODEL.yaml --gate FOLDER``. The YAML holds a ``model`` section as
rollouts have (any OpenAI-compatible endpoint, or the local model) and optionally ``judge``; without it the same model
judges. Every finished item is on disk at once; running again does what is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.output import console, facts_table, print_json
from rayrl.config import Section, find_config, load_config
from rayrl.errors import ModelTransportError
from rayrl.models.base import ChatModel
from rayrl.models.config import ModelConfig
from rayrl.models.registry import build_model
from rayrl.retrieval.answers import (
    DIMENSIONS,
    JUDGE_TEMPERATURE,
    Complete,
    Item,
    Prices,
    read_store,
    records_of,
    run_items,
    savings,
    summarise,
)
from rayrl.retrieval.baselines import FIXED_THRESHOLD
from rayrl.retrieval.gate import RetrievalGate
from rayrl.retrieval.sources import pool_by_name
from rayrl.schemas import canonical_json, sha256_hex

SCORE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "score",
        "description": "Give the four scores, each from 0 to 10.",
        "parameters": {
            "type": "object",
            "properties": {d: {"type": "number", "minimum": 0, "maximum": 10} for d in DIMENSIONS},
            "required": list(DIMENSIONS),
            "additionalProperties": False,
        },
    },
}


class AnswersConfig(Section):
    """Which models answer and judge."""

    model: ModelConfig
    """Answers."""
    judge: ModelConfig | None = None
    """Scores; None lets the answering model judge itself at temperature .1, which flatters it."""
    judge_tool: bool = True
    """Ask for the scores as a tool call; without it as text that holds one JSON object."""
    pool: str = "zaragoza"
    """Questions with answers."""
    far: str = "trivia"
    """Questions from elsewhere; empty for none."""
    items: int = 60
    """Questions in all, evenly from both."""
    per_million_tokens: float = 0.5
    """Price of a million prompt tokens."""
    seconds_per_retrieval: float = 0.02
    """Time of one retrieval."""


def evaluate_answers(config_name: str, gate_folder: Path, output: Path, *, as_json: bool) -> int:
    """Run, summarise, print."""
    config = load_config(find_config(config_name), AnswersConfig)
    gate = RetrievalGate(gate_folder)
    items = make_items(config, gate)
    judging = config.judge or config.model.model_copy(update={"temperature": JUDGE_TEMPERATURE})
    answering, judge_model = build_model(config.model), build_model(judging)
    models = sha256_hex(canonical_json([answering.identity(), judge_model.identity(), config.judge_tool]))[:16]
    answer, close_answer = as_completion(answering)
    judge, close_judge = as_completion(judge_model, SCORE_TOOL if config.judge_tool else None)
    store = output / "answers.jsonl"
    try:
        counts = run_items(items, answer, judge, store, models)
    finally:
        close_answer()
        close_judge()
    prices = Prices(config.per_million_tokens, config.seconds_per_retrieval)
    result: dict[str, Any] = {
        "counts": counts,
        "scores": summarise(records_of(items, read_store(store), models)),
        "per_1000_questions": savings(items, prices),
        "store": str(store),
    }
    if as_json:
        print_json(result)
    else:
        for title, facts in result.items():
            if isinstance(facts, dict):
                console().print(facts_table(title, list(facts.items())))
    return 6 if counts["failed"] else 0


def make_items(config: AnswersConfig, gate: RetrievalGate) -> list[Item]:
    """Every n-th question of both pools with what each way would retrieve."""
    pool = pool_by_name(config.pool)
    truths = {m.id: m.text for m in pool.memories}
    questions = _spread(list(pool.questions), config.items - config.items // 2 if config.far else config.items)
    if config.far:
        questions += _spread(list(pool_by_name(config.far).questions), config.items // 2)
    items = []
    for question in questions:
        decision = gate.decide(question.text)
        nearest = max(decision.nearest, key=lambda m: m.cosine)
        fixed = (nearest.text,) if nearest.cosine >= FIXED_THRESHOLD else ()
        truth = next((truths[a] for a in question.answer_ids if a in truths), None)
        items.append(
            Item(
                question.id,
                question.text,
                truth,
                {"no_retrieval": (), "fixed_040": fixed, "gate": tuple(m.text for m in decision.memories)},
            )
        )
    return items


def as_completion(model: ChatModel, tool: dict[str, Any] | None = None) -> tuple[Complete, Callable[[], None]]:
    """A chat model as a plain ``prompt -> text`` function; with a tool, the arguments of its call as JSON.

    Where a model that should have called the tool did not, its text is what it said: reading it is the caller's task.
    """
    loop = asyncio.new_event_loop()
    tools = [tool] if tool is not None else []

    def complete(prompt: str) -> str:
        output = loop.run_until_complete(model.generate([{"role": "user", "content": prompt}], tools, seed=0))
        if output.tool_calls:
            return canonical_json(output.tool_calls[0].arguments).decode()
        if output.content:
            return output.content
        raise ModelTransportError("the model gave neither a call nor text", code="empty_reply", stage="model")

    def close() -> None:
        loop.run_until_complete(model.aclose())
        loop.close()

    return complete, close


def _spread(values: list[Any], n: int) -> list[Any]:
    return [values[i * len(values) // n] for i in range(min(n, len(values)))] if n > 0 else []
