"""Train a skill selector from the masked runs of a gate, and the competitors' settings from the same data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson

from learners.selector import SelectorConfig, TrainedSelector, train_selector, tuned_threshold
from rayrl.errors import DataError
from rayrl.retrieval.encoders import Encoder, make_encoder
from rayrl.retrieval.policy import RetrievalPolicy
from rayrl.schemas import JsonDict
from rayrl.skills.bank import SkillBank
from rayrl.skills.estimators import FloatArray
from rayrl.skills.outcome_model import Rollouts
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
        others = dict(complete_results(second))
        for key, record in sorted(complete_results(first), key=lambda item: item[0]):
            if key not in others:
                raise DataError(f"{second}: no result for task {key[0]}, sample {key[1]}")
            public = public_task(record)
            features.append(task_features(*public))
            questions.append(question(*public))
            pair = (record, others[key])
            masks.append([_mask(r, column) for r in pair])
            rewards.append([float(r["final"]["reward"]) for r in pair])
    if not features:
        raise DataError(f"{gate}: no masked runs of a gate {name!r} there")
    return MaskedPairs(Rollouts(np.array(features), np.array(masks), np.array(rewards)), questions)


def public_task(record: JsonDict) -> tuple[str, JsonDict]:
    """Instruction and persona of an episode."""
    reset = record.get("reset") or {}
    return str(reset.get("instruction") or ""), reset.get("persona") or {}


def complete_results(run_dir: Path) -> Iterator[tuple[tuple[int, int], JsonDict]]:
    """Completed episodes of a run by (task, sample), in the order they were finished."""
    for record in RunReader(run_dir).results():
        if is_complete(record):
            job = record["job"]
            yield (int(job["task_id"]), int(job["sample_id"])), record


def _mask(record: JsonDict, column: dict[str, int]) -> FloatArray:
    out = np.zeros(len(column))
    for skill in record.get("selected_skills") or []:
        out[column[skill["skill_id"]]] = 1.0
    return out


@dataclass(frozen=True)
class SelectorData:
    """All that selectors of one bank are trained from."""

    bank: SkillBank
    pairs: MaskedPairs
    nearness: FloatArray
    """(n, k) similarity of the pairs' questions to the chunks."""
    tokens: FloatArray
    """(k,) of the chunks."""
    encoder: Encoder
    config: SelectorConfig

    def save(self, out: Path, policy: RetrievalPolicy, facts: JsonDict) -> str:
        """Write a selector folder; returns the policy's checksum."""
        return save_selector(
            out,
            self.bank,
            policy,
            encoder=self.config.encoder,
            encoder_identity=self.encoder.identity(),
            facts={**facts, "config": self.config.model_dump(mode="json")},
        )


def selector_data(gate: Path, name: str, bank: SkillBank, config: SelectorConfig) -> SelectorData:
    """Read the pairs of a finished gate and work out similarities."""
    pairs = gate_pairs(gate, name, bank)
    entries = bank.active()
    encoder = make_encoder(config.encoder, cached=False)
    nearness = similarities(encoder, entries, pairs.questions)
    return SelectorData(bank, pairs, nearness, np.array([tokens_of(e) for e in entries]), encoder, config)


def train_from_pairs(made: SelectorData) -> TrainedSelector:
    """Train, and tune the similarity threshold on the same pairs; the facts hold both."""
    config, data = made.config, made.pairs.data
    trained = train_selector(data, made.nearness, made.tokens, config)
    costs = config.price * made.tokens / made.tokens.mean()
    threshold, worth = tuned_threshold(trained.model, data.features, made.nearness, costs)
    facts = {**trained.facts, "tuned_threshold": threshold, "tuned_threshold_value": worth}
    return replace(trained, facts=orjson.loads(orjson.dumps(facts)))
