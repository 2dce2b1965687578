"""Which skills does THIS task need? The retrieval policy over a bank, as a SkillProvider.

The memory is the bank, the question is the task (instruction and persona, nothing private). Chunks come up in bank
order; at each the policy network of :mod:`rayrl.retrieval.policy` decides to take it or to leave it, seeing the task's
features, which chunk it is, how near it is to the task, and what is held already, so that of two chunks that say the
same it can take one. A folder holds everything needed to serve: ``selector.json``, ``selector.safetensors``,
``bank.snapshot.json``. Training is in ``learners/selector.py``.

Simple competitors live here too: top-k by similarity, and a similarity threshold.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import torch
from safetensors.torch import load_file, save_file

from rayrl.errors import ConfigError, DataError, RunConflictError
from rayrl.retrieval.encoders import Encoder, make_encoder
from rayrl.retrieval.policy import PolicySpec, RetrievalPolicy, checksum
from rayrl.schemas import JsonDict, PublicContext, Skill
from rayrl.skills.bank import SkillBank, load_snapshot, save_bank
from rayrl.skills.estimators import FloatArray
from rayrl.skills.providers import BankEntry, bank_hash
from rayrl.skills.validation import BYTES_PER_TOKEN

SCHEMA = "rayrl-skill-selector-v1"
WEIGHTS, META, BANK = "selector.safetensors", "selector.json", "bank.snapshot.json"
Mode = Literal["off", "shadow", "enforce"]

FEATURES = (
    "chinese",
    "log_length",
    "names_amount",
    "parts",
    "persona",
    "persona_makers",
    "persona_variants",
    "persona_interests",
)


def task_features(instruction: str, persona: JsonDict) -> FloatArray:
    """Public features of a task, in the order of :data:`FEATURES`; all roughly within [0, 2]."""
    chinese = sum("\u4e00" <= c <= "\u9fff" for c in instruction)
    latin = sum(c.isascii() and c.isalpha() for c in instruction)
    keys = " ".join(str(k).lower() for k in persona)
    return np.array(
        [
            float(chinese > latin / 2),
            math.log1p(len(instruction)) / 3,
            float(re.search(r"\d", instruction) is not None),
            min(len(re.findall(r"[,，、;；]| and ", instruction)), 6) / 3,
            float(bool(persona)),
            float(re.search(r"品牌|brand", keys) is not None),
            float(re.search(r"规格|颜色|尺码|option|colou?r|size", keys) is not None),
            float(re.search(r"搜索|关键词|search|keyword|interest", keys) is not None),
        ]
    )


def question(instruction: str, persona: JsonDict) -> str:
    """The text that similarities are computed from."""
    return f"{instruction} {orjson.dumps(persona, option=orjson.OPT_SORT_KEYS).decode()}" if persona else instruction


def similarities(encoder: Encoder, entries: Sequence[BankEntry], questions: Sequence[str]) -> FloatArray:
    """Cosine of every question with every chunk, shape (questions, chunks)."""
    memory = encoder.encode([e.content for e in entries], "passage")
    return np.asarray(encoder.encode(list(questions), "query") @ memory.T, dtype=np.float64)


def tokens_of(entry: BankEntry) -> float:
    """Rough tokens a chunk adds to the prompt."""
    return len(entry.content.encode()) / BYTES_PER_TOKEN


def dynamic_width(chunks: int) -> int:
    """Width of the policy's dynamic input: which chunk, what is held, its similarity, tokens held."""
    return 2 * chunks + 2


def dynamic_input(chunk: int, held: torch.Tensor, similarity: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Dynamic input (n, 2k + 2) at one chunk for ``held`` (n, k), ``similarity`` (n, k), ``tokens`` (k,) of total 1."""
    which = torch.zeros_like(held)
    which[:, chunk] = 1.0
    spent = (held * tokens).sum(dim=1, keepdim=True)
    return torch.cat([which, held, similarity[:, chunk : chunk + 1], spent], dim=1)


def save_selector(
    folder: Path,
    bank: SkillBank,
    policy: RetrievalPolicy,
    *,
    encoder: str,
    encoder_identity: JsonDict,
    facts: JsonDict,
) -> str:
    """Write a selector folder (replaced as a whole); returns the policy's checksum."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_bank(bank, temporary / BANK)
    save_file({k: v.contiguous() for k, v in policy.state_dict().items()}, temporary / WEIGHTS)
    digest = checksum(policy)
    meta = {
        "schema": SCHEMA,
        "policy": policy.spec.model_dump(),
        "policy_checksum": digest,
        "bank_sha256": bank_hash(bank.active()),
        "encoder": encoder,
        "encoder_identity": encoder_identity,
        "features": list(FEATURES),
        "facts": facts,
    }
    (temporary / META).write_bytes(orjson.dumps(meta, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
    return digest


class LearnedSkills:
    """Serves a trained selector. Modes: ``off`` injects nothing, ``shadow`` decides but injects nothing, ``enforce``.

    In a config: ``skills: {kind: "rayrl.skills.selector:LearnedSkills", options: {folder: ...}}``.
    """

    def __init__(self, folder: str, mode: Mode = "enforce") -> None:
        """Load and check.

        Raises:
            DataError: no selector there, or weights or bank do not match what it says.
            RunConflictError: the encoder is not the one it was trained with.
        """
        if mode not in ("off", "shadow", "enforce"):
            raise ConfigError(f"skills.options.mode: {mode!r} is none of off, shadow, enforce")
        self.mode: Mode = mode
        path = Path(folder)
        try:
            self.meta: JsonDict = orjson.loads((path / META).read_bytes())
        except (OSError, orjson.JSONDecodeError):
            raise DataError(
                f"{folder} holds no skill selector; `rayrl pipeline` or `rayrl skills select` makes one"
            ) from None
        if self.meta.get("schema") != SCHEMA or self.meta["features"] != list(FEATURES):
            raise DataError(f"{folder}: made for other features or by another version; train it again")
        self.entries = load_snapshot(path / BANK).active()
        if bank_hash(self.entries) != self.meta["bank_sha256"]:
            raise DataError(f"{folder}: its bank is not the one it was trained on")
        self._policy = RetrievalPolicy(PolicySpec.model_validate(self.meta["policy"])).eval()
        self._policy.load_state_dict(load_file(path / WEIGHTS))
        if checksum(self._policy) != self.meta["policy_checksum"]:
            raise DataError(f"{folder}: the weights do not match their checksum")
        self._encoder = make_encoder(self.meta["encoder"], cached=False)
        if self._encoder.identity() != self.meta["encoder_identity"]:
            raise RunConflictError(
                f"{folder} was trained with the encoder {self.meta['encoder_identity']}, not {self._encoder.identity()}"
            )
        self._memory = self._encoder.encode([e.content for e in self.entries], "passage")
        tokens = torch.tensor([tokens_of(e) for e in self.entries])
        self._tokens = tokens / tokens.sum()

    def identity(self) -> dict[str, Any]:
        """Fingerprint part."""
        return {
            "kind": "learned",
            "mode": self.mode,
            "bank_sha256": self.meta["bank_sha256"],
            "policy_checksum": self.meta["policy_checksum"],
            "encoder": self.meta["encoder_identity"],
        }

    def decide(self, instruction: str, persona: JsonDict) -> list[tuple[BankEntry, float]]:
        """The chunks to take, each with the probability that it was taken with."""
        vector = self._encoder.encode([question(instruction, persona)], "query")
        similarity = torch.from_numpy(np.asarray(vector @ self._memory.T, dtype=np.float32))
        static = torch.from_numpy(task_features(instruction, persona).astype(np.float32))[None]
        held = torch.zeros(1, len(self.entries))
        taken: list[tuple[BankEntry, float]] = []
        with torch.inference_mode():
            projected = self._policy.project(static)
            for index, entry in enumerate(self.entries):
                logits = self._policy.act_logits(projected, dynamic_input(index, held, similarity, self._tokens))
                take = float(torch.softmax(logits, -1)[0, 0])
                if take > 0.5:
                    held[0, index] = 1.0
                    taken.append((entry, take))
        return taken

    async def select(self, context: PublicContext) -> list[Skill]:
        """The chosen skills, in bank order, with the probability in their metadata."""
        if self.mode == "off":
            return []
        chosen = self.decide(context.instruction, context.persona)
        if self.mode == "shadow":
            return []
        out = []
        for entry, probability in chosen:
            if entry.applies(context.job):
                skill = entry.skill()
                metadata = {**skill.metadata, "selector_probability": round(probability, 6)}
                out.append(skill.model_copy(update={"metadata": metadata}))
        return out


class SimilaritySkills:
    """The ``top_k`` chunks nearest to the task, those at or above ``threshold``, or both conditions."""

    def __init__(
        self, bank: str, encoder: str = "hash", top_k: int | None = None, threshold: float | None = None
    ) -> None:
        if top_k is None and threshold is None:
            raise ConfigError("skills.options: give top_k, threshold, or both")
        self.entries = load_snapshot(Path(bank)).active()
        self.top_k, self.threshold = top_k, threshold
        self._encoder = make_encoder(encoder, cached=False)

    def identity(self) -> dict[str, Any]:
        """Fingerprint part."""
        return {
            "kind": "similarity",
            "bank_sha256": bank_hash(self.entries),
            "encoder": self._encoder.identity(),
            "top_k": self.top_k,
            "threshold": self.threshold,
        }

    async def select(self, context: PublicContext) -> list[Skill]:
        """The nearest skills, in bank order."""
        text = question(context.instruction, context.persona)
        scores = similarities(self._encoder, self.entries, [text])[0]
        chosen = nearest(scores, top_k=self.top_k, threshold=self.threshold)
        return [e.skill() for e, take in zip(self.entries, chosen, strict=True) if take and e.applies(context.job)]


def nearest(scores: FloatArray, *, top_k: int | None, threshold: float | None) -> list[bool]:
    """Which chunks similarity takes."""
    order = np.argsort(-scores, kind="stable")
    best = set(order[: scores.size if top_k is None else top_k].tolist())
    return [i in best and (threshold is None or bool(s >= threshold)) for i, s in enumerate(scores)]
