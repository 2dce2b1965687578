"""Train a skill selector from the masked runs of a gate, and the competitors' settings from the same data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from learners.selector import SelectorConfig, train_selector, tuned_threshold
from rayrl.errors import DataError
from rayrl.retrieval.encoders import make_encoder
from rayrl.schemas import JsonDict
from rayrl.skills.bank import SkillBank
from rayrl.skills.estimators import FloatArray
from rayrl.skills.outcome_model import Rollouts, fit_outcome_model
from rayrl.skills.selector import question, save_selector, similarities, task_features, tokens_of
from rayrl.traces.schema import is_complete
from rayrl.traces.store import RunReader


@dataclass(frozen=True)
class MaskedPairs:
    """Pairs of masked rollouts of the same jobs, and the questions they were about."""

    data: Rollouts
    questions: list[str]


def gate_pairs(gate: Path, name: str, bank: SkillBank) -> MaskedPairs:
    """The complementary pairs of a finished gate directory, read from its traces.

    Raises:
        DataError: the gate has no complementary runs, or halves that do not match.
    """
    column = {e.skill_id: i for i, e in enumerate(bank.active())}
    features: list[FloatArray] = []
    masks: list[list[FloatArray]] = []
    rewards: list[list[float]] = []
    questions: list[str] = []
    for stage in range(100):
        first, second = (gate / "runs" / f"{name}-s{stage}-{arm}" for arm in ("masked", "complement"))
        if not first.exists():
            break
        if not second.exists():
            raise DataError(f"{gate}: stage {stage} has no complementary run; the selector needs design: complement")
        others = dict(_results(second))
        for key, record in sorted(_results(first), key=lambda item: item[0]):
            if key not in others:
                raise DataError(f"{second}: no result for task {key[0]}, sample {key[1]}")
            reset = record.get("reset") or {}
            instruction, persona = str(reset.get("instruction") or ""), reset.get("persona") or {}
            features.append(task_features(instruction, persona))
            questions.append(question(instruction, persona))
            pair = (record, others[key])
            masks.append([_mask(r, column) for r in pair])
            rewards.append([float(r["final"]["reward"]) for r in pair])
    if not features:
        raise DataError(f"{gate}: no masked runs of a gate {name!r} there")
    return MaskedPairs(Rollouts(np.array(features), np.array(masks), np.array(rewards)), questions)


def _results(run_dir: Path) -> Iterator[tuple[tuple[int, int], JsonDict]]:
    for record in RunReader(run_dir).results():
        if is_complete(record):
            job = record["job"]
            yield (int(job["task_id"]), int(job["sample_id"])), record


def _mask(record: JsonDict, column: dict[str, int]) -> FloatArray:
    out = np.zeros(len(column))
    for skill in record.get("selected_skills") or []:
        out[column[skill["skill_id"]]] = 1.0
    return out


def train_from_gate(gate: Path, name: str, bank: SkillBank, out: Path, config: SelectorConfig) -> JsonDict:
    """Train, save to ``out``, and tune the similarity threshold on the same pairs; returns the facts."""
    pairs = gate_pairs(gate, name, bank)
    entries = bank.active()
    encoder = make_encoder(config.encoder, cached=False)
    nearness = similarities(encoder, entries, pairs.questions)
    tokens = np.array([tokens_of(e) for e in entries])
    trained = train_selector(pairs.data, nearness, tokens, config)
    costs = config.price * tokens / tokens.mean()
    threshold, worth = tuned_threshold(fit_outcome_model(pairs.data), pairs.data.features, nearness, costs)
    facts = {
        **trained.facts,
        "config": config.model_dump(mode="json"),
        "tuned_threshold": threshold,
        "tuned_threshold_value": worth,
    }
    digest = save_selector(
        out, bank, trained.policy, encoder=config.encoder, encoder_identity=encoder.identity(), facts=facts
    )
    return {**orjson.loads(orjson.dumps(facts)), "policy_checksum": digest}
