"""Cross-fit folds, frozen before anything is trained: who is in memory, who is trained on, who is tested.

A *draw* splits the categories in two halves at random. For each half in turn, its memories are in memory (its questions
are class A) and the questions of the other half are near-domain class B. Every question is then tested once as A and
once as near B per draw, always unseen. Two kinds of split:

* ``known``   the test questions are a fifth of the questions; their categories occur in training
* ``unseen``  the test questions are those of a fifth of the categories; nothing of these categories is trained on

A fold manifest lists ids, not indices, with a hash of all inputs; loading checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rayrl.retrieval.pools import MemoryPool, Question, content_hash
from rayrl.schemas import Frozen, canonical_json, sha256_hex

Split = Literal["known", "unseen"]


class Fold(Frozen):
    """One outer fit."""

    split: Split
    draw: int
    half: int
    fold: int
    inside: tuple[str, ...]
    """Categories whose memories are in memory."""
    train: tuple[str, ...]
    """Question ids to learn from (validation folds are cut from these)."""
    test: tuple[str, ...]
    """Question ids never looked at before the final evaluation."""

    @property
    def name(self) -> str:
        """Short identifier."""
        return f"{self.split}-d{self.draw}h{self.half}f{self.fold}"


class FoldManifest(Frozen):
    """All folds of an evaluation with the hashes of what they were cut from."""

    pool: str
    pool_sha256: str
    far: str
    far_sha256: str
    seed: int
    folds: tuple[Fold, ...]

    def sha256(self) -> str:
        """Hash of the whole manifest; printed in reports and checkpoints."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))


def make_folds(
    pool: MemoryPool,
    far: MemoryPool,
    *,
    splits: Sequence[Split] = ("known", "unseen"),
    draws: int = 5,
    n_folds: int = 5,
    seed: int = 0,
) -> FoldManifest:
    """Cut all folds; a pure function of the pools' content and the seed."""
    categories = sorted({q.category for q in pool.questions})
    folds: list[Fold] = []
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        halves = _halves(pool.questions, categories, rng)
        far_fold = _balanced(len(far.questions), n_folds, rng)
        for split in splits:
            fold_of = _question_folds(pool.questions, categories, halves, split, n_folds, rng)
            for half in (0, 1):
                for fold in range(n_folds):
                    test = [q.id for q, f in zip(pool.questions, fold_of, strict=True) if f == fold]
                    train = [q.id for q, f in zip(pool.questions, fold_of, strict=True) if f != fold]
                    test += [q.id for q, f in zip(far.questions, far_fold, strict=True) if f == fold]
                    train += [q.id for q, f in zip(far.questions, far_fold, strict=True) if f != fold]
                    folds.append(
                        Fold(
                            split=split,
                            draw=draw,
                            half=half,
                            fold=fold,
                            inside=tuple(halves[half]),
                            train=tuple(train),
                            test=tuple(test),
                        )
                    )
    return FoldManifest(
        pool=pool.name,
        pool_sha256=content_hash(pool.questions),
        far=far.name,
        far_sha256=content_hash(far.questions),
        seed=seed,
        folds=tuple(folds),
    )


def _halves(questions: Sequence[Question], categories: list[str], rng: np.random.Generator) -> list[list[str]]:
    """Two sets of categories with about the same number of questions."""
    size = {c: sum(q.category == c for q in questions) for c in categories}
    order = [categories[i] for i in rng.permutation(len(categories))]
    halves: list[list[str]] = [[], []]
    counts = [0, 0]
    for category in order:
        target = 0 if counts[0] <= counts[1] else 1
        halves[target].append(category)
        counts[target] += size[category]
    return [sorted(h) for h in halves]


def _question_folds(
    questions: Sequence[Question],
    categories: list[str],
    halves: list[list[str]],
    split: Split,
    n_folds: int,
    rng: np.random.Generator,
) -> list[int]:
    if split == "known":
        fold_of = [0] * len(questions)
        for half in halves:
            members = [i for i, q in enumerate(questions) if q.category in half]
            for i, fold in zip(members, _balanced(len(members), n_folds, rng), strict=True):
                fold_of[i] = fold
        return fold_of
    by_category: dict[str, int] = {}
    for half in halves:
        size = {c: sum(q.category == c for q in questions) for c in half}
        counts = [0] * n_folds
        for i in rng.permutation(len(half)):
            target = int(np.argmin(counts))
            by_category[half[i]] = target
            counts[target] += size[half[i]]
    return [by_category[q.category] for q in questions]


def _balanced(n: int, n_folds: int, rng: np.random.Generator) -> list[int]:
    out = np.arange(n) % n_folds
    return [int(v) for v in rng.permutation(out)]
