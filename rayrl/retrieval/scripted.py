"""The original design's scripted queue: the right candidate among distractors, its place drawn at random.

No search happens here; the queue of a question is fixed up to its order, which :func:`random_orders` draws per group.
Static features are the question's embedding, the candidate's only feature is its cosine: with the hit flag of the
``seed`` mode this is the original 386-dimensional state.
"""

from __future__ import annotations

import numpy as np
import torch

from rayrl.errors import DataError
from rayrl.retrieval.folds import Fold
from rayrl.retrieval.pools import Kind
from rayrl.retrieval.task import Material, Task, TaskConfig, View, build_view
from rayrl.retrieval.world import World


def scripted_task(material: Material, config: TaskConfig, fold: Fold, *, seed: int) -> Task:
    """Worlds with scripted queues for a fold; class B questions get distractors only."""
    inside = set(fold.inside)
    memory = [i for i, m in enumerate(material.memories) if m.category in inside]
    view = build_view(material, config.model_copy(update={"groups": "E"}), memory, [])
    train = scripted_world(material, config, view, material.numbers(fold.train), seed=seed)
    test = scripted_world(material, config, view, material.numbers(fold.test), seed=seed + 1)
    return Task(train, train, test, view)


def scripted_world(material: Material, config: TaskConfig, view: View, numbers: list[int], *, seed: int) -> World:
    """One row per question; the right candidate stands first until an order moves it.

    Raises:
        DataError: the memory holds too few wrong candidates to fill a queue.
    """
    ids = {identifier: row for row, identifier in enumerate(view.index.ids)}
    k, m = config.k, len(view.index.memories)
    if m <= k:
        raise DataError(f"a scripted queue of {k} needs more than {k} memories, there are {m}")
    rng = np.random.default_rng([seed, 17])
    queue = np.zeros((len(numbers), k), np.int64)
    right = np.zeros((len(numbers), k), bool)
    kinds = np.zeros(len(numbers), np.int64)
    for row, number in enumerate(numbers):
        question = material.questions[number]
        answers = [ids[a] for a in question.answer_ids if a in ids]
        wrong = rng.choice(np.setdiff1d(np.arange(m), answers), size=k, replace=False)
        if answers:
            queue[row] = np.r_[answers[0], wrong[: k - 1]]
            right[row, 0] = True
        else:
            queue[row] = wrong
            kinds[row] = int(Kind.NEAR_B if question.domain in material.domains else Kind.FAR_B)
    vectors = material.question_vectors[numbers]
    cosine = np.einsum("qd,qkd->qk", vectors, view.index.vectors[queue]).astype(np.float32)
    texts = view.index.vectors[queue]
    return World(
        static=torch.from_numpy(vectors),
        candidate=torch.from_numpy(cosine[:, :, None]),
        reveal=torch.zeros(len(numbers), k, 0),
        agreement=torch.from_numpy(np.asarray(texts @ texts.transpose(0, 2, 1), np.float32)),
        right=torch.from_numpy(right),
        item=torch.from_numpy(queue),
        n_right=torch.from_numpy(right.sum(1).astype(np.int64)),
        kind=torch.from_numpy(kinds),
        question=torch.tensor(numbers),
        part=torch.zeros(len(numbers), dtype=torch.int64),
        static_names=tuple(f"e{i}" for i in range(vectors.shape[1])),
        candidate_names=("cosine",),
    )
