"""The tables behind the retrieval MDP: R rows, each one question facing one memory, with K candidates.

A world is tensors only; the environment steps through them without touching text. Worlds of several memories are
concatenated, so that a policy can be trained on random memories at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayrl.retrieval.features import Features
from rayrl.retrieval.index import MemoryIndex
from rayrl.retrieval.pools import Kind, Question, kind_of


@dataclass(frozen=True)
class World:
    """R rows of a retrieval task; float32 and int64 tensors on the CPU."""

    static: Tensor
    """``[R, Fs]`` features of the question."""
    candidate: Tensor
    """``[R, K, Fc]`` features of the candidates, known before they are read."""
    reveal: Tensor
    """``[R, K, Fr]`` features that reading a candidate reveals."""
    agreement: Tensor
    """``[R, K, K]`` cosines between candidates."""
    right: Tensor
    """``[R, K]`` bool: the candidate answers the question. Ground truth: rewards, oracle and the seed's mode only."""
    item: Tensor
    """``[R, K]`` identity of the candidate; equal numbers are the same memory."""
    n_right: Tensor
    """``[R]`` how many answers the question has in the memory (0 for class B)."""
    kind: Tensor
    """``[R]`` :class:`~rayrl.retrieval.pools.Kind`."""
    question: Tensor
    """``[R]`` number of the question, for joining results."""
    part: Tensor
    """``[R]`` which part of the training questions the row belongs to, for cross-fitted training."""
    static_names: tuple[str, ...] = ()
    candidate_names: tuple[str, ...] = ()
    reveal_names: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """R."""
        return self.kind.shape[0]

    @property
    def k(self) -> int:
        """Candidates per row."""
        return self.right.shape[1]

    @property
    def is_a(self) -> Tensor:
        """``[R]`` bool."""
        return self.kind == int(Kind.A)

    def take(self, rows: Tensor) -> World:
        """A world of some of the rows."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values[field.name] = value[rows] if isinstance(value, Tensor) else value
        return World(**values)


def make_world(
    index: MemoryIndex,
    features: Features,
    questions: Sequence[Question],
    numbers: Sequence[int],
    domains: set[str],
    parts: Sequence[int] | None = None,
) -> World:
    """Join features with ground truth.

    Args:
        index: the memory.
        features: of exactly these questions.
        questions: Q questions.
        numbers: their global numbers.
        domains: domains the memory covers; B questions of these are near, others far.
        parts: part of each question for cross-fitted training; None puts all in part 0.
    """
    ids = np.array(index.ids)
    known = frozenset(index.ids)
    right = np.zeros(features.candidates.shape, bool)
    n_right = np.zeros(len(questions), np.int64)
    kinds = np.zeros(len(questions), np.int64)
    for row, question in enumerate(questions):
        answers = set(question.answer_ids) & known
        right[row] = np.isin(ids[features.candidates[row]], list(answers))
        n_right[row] = len(answers)
        kinds[row] = int(kind_of(question, known, domains))
    return World(
        static=torch.from_numpy(features.static),
        candidate=torch.from_numpy(features.candidate),
        reveal=torch.from_numpy(features.reveal),
        agreement=torch.from_numpy(features.agreement),
        right=torch.from_numpy(right),
        item=torch.from_numpy(features.candidates.astype(np.int64)),
        n_right=torch.from_numpy(n_right),
        kind=torch.from_numpy(kinds),
        question=torch.tensor(list(numbers), dtype=torch.int64),
        part=torch.tensor(list(parts) if parts is not None else [0] * len(questions), dtype=torch.int64),
        static_names=features.static_names,
        candidate_names=features.candidate_names,
        reveal_names=features.reveal_names,
    )


def concat_worlds(worlds: Sequence[World]) -> World:
    """Rows of several worlds with the same features.

    Raises:
        ValueError: the features differ.
    """
    first = worlds[0]
    for other in worlds[1:]:
        if (other.static_names, other.candidate_names, other.k) != (
            first.static_names,
            first.candidate_names,
            first.k,
        ):
            raise ValueError("worlds with different features cannot be concatenated")
    values: dict[str, Any] = {}
    for field in fields(World):
        value = getattr(first, field.name)
        values[field.name] = torch.cat([getattr(w, field.name) for w in worlds]) if isinstance(value, Tensor) else value
    return World(**values)


def class_weight_per_row(world: World, weights: tuple[float, float, float]) -> Tensor:
    """``[R]`` weights that sum to 1, each class sharing its weight evenly; absent classes give theirs to the others."""
    out = torch.zeros(world.rows)
    for kind in Kind:
        members = world.kind == int(kind)
        count = int(members.sum())
        if count:
            out[members] = weights[int(kind)] / count
    total = out.sum()
    if total <= 0:
        raise ValueError(f"class weights {weights} give no weight to any question of the training set")
    return out / total
