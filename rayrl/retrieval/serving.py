"""One question at a time, fast: the same features and the same walk as the batch path, without its overhead.

:func:`rayrl.retrieval.features.compute` and the vectorised environment pay some microseconds per array operation, which
thousands of questions share and a single one does not. Here everything that depends on the memory alone is prepared
once, a question is plain vectors, and the policy's steps are one product: with two actions in the observable mode a
state depends on its position alone. Figures are the batch path's up to float32 rounding, which tests hold it to;
:class:`~rayrl.retrieval.gate.RetrievalGate` falls back to the batch path for other modes.

Nothing is written after construction, so one object serves all threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayrl.retrieval.features import GROUPS, SHAPE_K, TextCheck, TopicPrior
from rayrl.retrieval.index import Floats, MemoryIndex
from rayrl.retrieval.mdp import MdpConfig
from rayrl.retrieval.policy import RetrievalPolicy
from rayrl.retrieval.regressions import Regressions

SERVED_GROUPS = frozenset(GROUPS)
_FAR = -1.0


@dataclass(frozen=True)
class OneQuestion:
    """Features of one question facing one memory."""

    static: Floats
    """``[Fs]``"""
    candidate: Floats
    """``[K, Fc]``"""
    rows: NDArray[np.int64]
    """``[K]`` memory rows, best first."""
    cosine: Floats
    """``[K]``"""


class QuestionFeatures:
    """Computes :class:`OneQuestion` against one memory, in the order of names of ``features.compute``.

    What is as long as the memory is a handful of array operations; what is as long as the queue is plain Python, which
    is faster at that length.
    """

    def __init__(
        self,
        index: MemoryIndex,
        *,
        groups: str,
        k: int,
        prior: TopicPrior | None,
        basis: Floats | None,
        check: TextCheck | None,
        regressions: Regressions | None = None,
    ) -> None:
        self._index = index
        self._regressions = regressions
        self._groups = frozenset(groups)
        self._k = k
        self._wide = max(SHAPE_K, k)
        self._basis = basis
        self._sentences = check.sentences if check is not None and "P" in groups else None
        self._second = check.second if check is not None and "X" in groups else None
        if check is not None:
            self._starts = np.flatnonzero(np.r_[True, check.owner[1:] != check.owner[:-1]])
        self._past: Floats | None = None
        if prior is not None and len(prior.ids) >= 16:
            # inside first, so that both sides are slices
            self._past = np.asfortranarray(prior.vectors[np.argsort(~prior.inside, kind="stable")])
            self._inside = int(prior.inside.sum())

    def of(self, text: str, query: Floats, second: Callable[[], Floats] | None) -> OneQuestion:
        """Features of one question.

        Args:
            text: the question.
            query: ``[d]`` its unit vector.
            second: gives ``[d2]`` under the second encoder, where there is one; asked for last, so that it may still be
                at work while the rest is computed.
        """
        index, groups = self._index, self._groups
        views = self._views(query)
        mean, std = _mean_std(views)
        wide = _best(views[0], self._wide)
        rows = wide[: self._k]
        mine = views[:, rows]
        z = (mine - mean) / std
        means, stds = mean[:, 0].tolist(), std[:, 0].tolist()
        top = views[0][wide].tolist() + [0.0] * (self._wide - len(wide))
        cosine = mine[0]
        static: list[float] = []
        per: list[Any] = []
        if "S" in groups:
            static += _shape(top, means[0], stds[0])
        if groups & {"L", "C"}:
            bm25, coverage, unseen = index.lexical.query(text)
            covered, weight = coverage[rows].tolist(), bm25[rows].tolist()
            first, best, following = _two_best(bm25)
            if "L" in groups:
                static += (best / 10, (best - following) / 10, float(coverage.max()), max(covered), covered[0])
                static += (weight[0] / 10, first in rows, first == rows[0], unseen)
            if "C" in groups:
                queue = top[: len(rows)]
                per += (cosine, [top[0] - c for c in queue])
                per += ([c - d for c, d in zip(queue, [*queue[1:], queue[-1]], strict=True)], z[0])
                per += ([w / 10 for w in weight], [(best - w) / 10 for w in weight], covered)
        if "C" not in groups:
            per.append(cosine)
        if "M" in groups:
            density, hubness = index.density[rows], index.hubness[rows].tolist()
            categories = index.category_of[wide].tolist()
            share = [categories.count(c) / len(wide) for c in categories[: len(rows)]]
            static += self._around(query, top[0], categories[0], share[0], float(density[0]), hubness[0])
            per += (density, cosine - density, hubness, share)
        if "N" in groups:
            static += self._topic(query)
        if "E" in groups:
            shown = query * np.sqrt(np.float32(len(query))) if self._basis is None else query @ self._basis
            static += shown.tolist()
        if self._sentences is not None:
            summary, columns = _ranked(views[1], mine[1], z[1], means[1], stds[1])
            static += summary
            per += (*columns, mine[1] - cosine)
        if self._second is not None and second is not None:
            view = (self._second @ second())[None]
            mean, std = _mean_std(view)
            chosen = view[0][rows]
            summary, columns = _ranked(
                view[0], chosen, (chosen - mean[0]) / std[0], float(mean[0, 0]), float(std[0, 0])
            )
            static += summary
            per += columns
        vector, queue_seen = np.array(static, np.float32), np.array(per, np.float32).T
        if self._regressions is not None:
            gain = self._regressions.gain(vector[None], queue_seen[None])[0]
            queue_seen = np.concatenate([queue_seen, gain[:, None]], axis=1)
        return OneQuestion(vector, queue_seen, np.array(rows), cosine)

    def _views(self, query: Floats) -> Floats:
        """``[1 or 2, M]`` similarity to the memories, and to their best sentences."""
        views = np.empty((1 + (self._sentences is not None), len(self._index.vectors)), np.float32)
        np.dot(self._index.vectors, query, out=views[0])
        if self._sentences is not None:
            np.maximum.reduceat(self._sentences @ query, self._starts, out=views[1])
        return views

    def _around(
        self, query: Floats, best: float, category: int, coherence: float, density: float, hubness: float
    ) -> tuple[float, ...]:
        to_category = (self._index.category_centroids @ query).tolist()
        nearest = max(to_category)
        place = to_category.index(nearest)
        following = max([*to_category[:place], *to_category[place + 1 :]], default=nearest)
        return (
            *(float(self._index.centroid @ query), nearest, nearest - following, best - nearest),
            *(coherence, best - density, density, hubness, place == category),
        )

    def _topic(self, query: Floats) -> tuple[float, ...]:
        if self._past is None:
            return (0.0,) * 8
        similarity = self._past @ query
        # a reworded or repeated question would give its own answer away
        similarity[similarity > 0.999] = -np.inf
        inside, outside = _best3(similarity[: self._inside]), _best3(similarity[self._inside :])
        near = _best(similarity, 15)
        weight = [math.exp(max(s, -1.0) * 10) for s in similarity[near].tolist()]
        hit = [w if place < self._inside else 0.0 for w, place in zip(weight, near, strict=True)]
        in_mean, out_mean = sum(inside) / 3, sum(outside) / 3
        return (
            *(inside[0], in_mean, outside[0], out_mean, inside[0] - outside[0], in_mean - out_mean),
            *(sum(hit[:5]) / sum(weight[:5]), sum(hit) / sum(weight)),
        )


class Walk:
    """The policy's decisions for one question: probabilities of retrieving at each position, all in one pass."""

    def __init__(self, policy: RetrievalPolicy, config: MdpConfig) -> None:
        if not can_walk(config):
            raise ValueError(f"a walk has two actions in the observable mode, not {config.actions} in {config.mode}")
        weights = {k: v.numpy().astype(np.float32) for k, v in policy.state_dict().items()}
        self._weights = weights
        self._hidden = [
            (weights[f"hidden.{i}.weight"], weights[f"hidden.{i}.bias"]) for i in range(policy.spec.layers - 2)
        ]
        self._skip = policy.spec.skip
        self._plan_weight, self._plan_column = policy.spec.plan_weight, policy.spec.plan_column
        self._config = config

    def probabilities(self, question: OneQuestion) -> Floats:
        """``[P]`` of retrieving at each position, up to where the environment would end the episode."""
        w, k = self._weights, len(question.rows)
        # retrieving with one action left is what the guard stops, so the walk ends there at the latest
        positions = min(k, max(self._config.max_steps, 1))
        dynamic = np.zeros((positions, k + 3 + question.candidate.shape[1]), np.float32)
        place = np.arange(positions)
        dynamic[place, place] = 1.0
        dynamic[:, k + 1] = place / k
        dynamic[:, k + 2] = place / self._config.max_steps
        dynamic[:, k + 3 :] = question.candidate[:positions]
        s = (question.static - w["static_mean"]) * w["static_scale"]
        x = (dynamic - w["dynamic_mean"]) * w["dynamic_scale"]
        h = (s @ w["static_layer.weight"])[:, None, :] + w["static_layer.bias"] + x @ w["dynamic_layer.weight"]
        np.maximum(h, 0, out=h)
        for weight, bias in self._hidden:
            h = h @ weight + bias
            np.maximum(h, 0, out=h)
        logits = h @ w["head.weight"] + w["head.bias"]
        if self._skip:
            logits = logits + (s @ w["static_skip.weight"])[:, None, :] + x @ w["dynamic_skip.weight"]
        odds = np.exp(np.clip(logits[:, :, 0] - logits[:, :, 1], -80, 80).astype(np.float64))
        retrieve, answer = (odds / (1.0 + odds)).mean(0), (1.0 / (1.0 + odds)).mean(0)
        if self._plan_weight:
            retrieve = retrieve * np.exp(self._plan_weight * dynamic[:, self._plan_column].astype(np.float64))
        return np.asarray(retrieve / (retrieve + answer), np.float32)

    def play(self, question: OneQuestion) -> tuple[int, list[float]]:
        """How many to retrieve, and the probability of retrieving at each position that came up."""
        seen: list[float] = []
        for step, p in enumerate(self.probabilities(question).tolist()):
            seen.append(p)
            # the environment takes the first of equal actions, and blocks a retrieval with one action left
            if p < 0.5 or step >= self._config.max_steps - 1:
                return step, seen
        return len(question.rows), seen


def can_walk(config: MdpConfig) -> bool:
    """Whether :class:`Walk` knows the decision process."""
    return config.actions == 2 and config.mode == "observable"


def _mean_std(views: Floats) -> tuple[Floats, Floats]:
    """Of each row ``[n, M]``, as columns ``[n, 1]``; the deviation never 0."""
    m = np.float32(views.shape[1])
    mean = np.asarray(np.add.reduce(views, axis=1, keepdims=True) / m, np.float32)
    apart = views - mean
    apart *= apart
    spread = np.sqrt(np.add.reduce(apart, axis=1, keepdims=True) / m).astype(np.float32)
    return mean, spread + np.float32(1e-6)


def _best(values: Floats, k: int) -> list[int]:
    """Places of the k largest, best first, ties by place."""
    if len(values) > k:
        places = np.argpartition(values, len(values) - k)[len(values) - k :]
        pairs = zip(values[places].tolist(), places.tolist(), strict=True)
    else:
        pairs = zip(values.tolist(), range(len(values)), strict=True)
    return [place for _, place in sorted((-value, place) for value, place in pairs)]


def _two_best(values: Floats) -> tuple[int, float, float]:
    """Place of the largest value, itself and the second largest (of at least two); the array is the caller's own."""
    first = int(values.argmax())
    best = values[first]
    values[first] = -np.inf
    following = float(values.max())
    values[first] = best
    return first, float(best), following


def _best3(values: Floats) -> list[float]:
    """The three largest, best first; -1 where there are fewer."""
    if len(values) > 3:
        values = np.partition(values, len(values) - 3)[-3:]
    found = sorted((v for v in values.tolist() if v > -np.inf), reverse=True)
    return found + [_FAR] * (3 - len(found))


def _shape(top: list[float], mean: float, std: float) -> list[float]:
    ten = top[:SHAPE_K]
    best = ten[0]
    middle = sum(ten) / SHAPE_K
    # compared as float32, as there
    near = np.float32(best) - np.float32(0.05)
    return [
        *ten,
        *(ten[i - 1] - ten[i] for i in (1, 2, 3, 5)),
        *(best - ten[4], best - ten[9]),
        math.sqrt(sum((t - middle) ** 2 for t in ten) / SHAPE_K),
        *((best - mean) / std, mean, std),
        sum(t > near for t in ten) / SHAPE_K,
        sum(t > 0.5 for t in ten) / SHAPE_K,
        best * best,
    ]


def _ranked(
    view: Floats, mine: Floats, z: Floats, mean: float, std: float
) -> tuple[tuple[float, ...], tuple[Floats, ...]]:
    """Another similarity ``[M]`` and the candidates' ``[K]``: what it says of the question, and of each candidate."""
    third, runner, best = sorted(np.partition(view, -3)[-3:].tolist())
    near = mine.tolist()
    static = (best, (best - mean) / std, best - runner, best - third, max(near) >= best, near[0] >= best)
    return static, (mine, z, np.log1p((view > mine[:, None]).sum(1)), np.float32(best) - mine)
