"""One question at a time, fast: the same features and the same walk as the batch path, without its overhead.

:func:`rayrl.retrieval.features.compute` and the vectorised environment pay some microseconds per array operation, which
thousands of questions share and a single one does not. Here everything that depends on the memory alone is prepared
once, a question is plain vectors, and the policy's steps are one product: with two actions in the observable mode a
state depends on its position alone. Figures are the batch path's up to float32 rounding, which tests hold it to;
:class:`~rayrl.retrieval.gate.RetrievalGate` falls back to the batch path for other modes.

Nothing is written after construction, so one object serves all threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayrl.retrieval.features import SHAPE_K, TextCheck, TopicPrior
from rayrl.retrieval.index import Floats, MemoryIndex, top_k
from rayrl.retrieval.mdp import MdpConfig
from rayrl.retrieval.policy import RetrievalPolicy

SERVED_GROUPS = frozenset("SLCMNEPX")
_FAR = np.float32(-1.0)


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
    """Computes :class:`OneQuestion` against one memory, in the order of names of ``features.compute``."""

    def __init__(
        self,
        index: MemoryIndex,
        *,
        groups: str,
        k: int,
        prior: TopicPrior | None,
        basis: Floats | None,
        check: TextCheck | None,
    ) -> None:
        self._index = index
        self._groups = frozenset(groups)
        self._k = k
        self._wide = max(SHAPE_K, k)
        self._basis = basis
        self._check = check if self._groups & set("PX") else None
        self._prior = prior if prior is not None and len(prior.ids) >= 16 else None
        if self._prior is not None:
            self._inside = np.flatnonzero(self._prior.inside)
            self._outside = np.flatnonzero(~self._prior.inside)
        if self._check is not None:
            owner = self._check.owner
            self._starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])

    def of(self, text: str, query: Floats, second: Floats | None) -> OneQuestion:
        """Features of one question.

        Args:
            text: the question.
            query: ``[d]`` its unit vector.
            second: ``[d2]`` under the second encoder, where there is one.
        """
        index, groups = self._index, self._groups
        similarity = index.vectors @ query
        wide = top_k(similarity[None], self._wide)[0]
        top = np.zeros(self._wide, np.float32)
        top[: len(wide)] = similarity[wide]
        rows = wide[: self._k]
        cosine = top[: len(rows)]
        mean, std = _mean_std(similarity)
        static: list[Any] = []
        per: list[Floats] = []
        if "S" in groups:
            static += _shape(top, mean, std)
        if groups & {"L", "C"}:
            bm25, coverage, unseen = index.lexical.query(text)
            covered, weight = coverage[rows], bm25[rows]
            first, best, following = _two_best(bm25)
            if "L" in groups:
                static += (best / 10, (best - following) / 10, coverage.max(), covered.max(), covered[0])
                static += (weight[0] / 10, first in rows, first == rows[0], unseen)
            if "C" in groups:
                ahead = np.zeros_like(cosine)
                np.subtract(cosine[:-1], cosine[1:], out=ahead[:-1])
                z = (cosine - mean) / std
                per += (cosine, cosine[0] - cosine, ahead, z, weight / 10, (best - weight) / 10, covered)
        if "C" not in groups:
            per.append(cosine)
        if "M" in groups:
            static += self._around(query, wide, top)
            density, category = index.density[rows], index.category_of
            share = (category[wide] == category[rows][:, None]).mean(1)
            per += (density, cosine - density, index.hubness[rows], share)
        if "N" in groups:
            static += self._topic(query)
        if "E" in groups:
            shown = query * np.sqrt(np.float32(len(query))) if self._basis is None else query @ self._basis
            static += shown.tolist()
        if self._check is not None:
            if "P" in groups:
                sentence = np.maximum.reduceat(self._check.sentences @ query, self._starts)
                summary, mine = _ranked(sentence, rows)
                static += summary
                per += (*mine, mine[0] - cosine)
            if "X" in groups and self._check.second is not None and second is not None:
                summary, mine = _ranked(self._check.second @ second, rows)
                static += summary
                per += mine
        return OneQuestion(np.array(static, np.float32), np.array(per, np.float32).T, rows, cosine)

    def _around(self, query: Floats, wide: NDArray[np.int64], top: Floats) -> tuple[Any, ...]:
        index = self._index
        to_category = index.category_centroids @ query
        nearest, best, following = _two_best(to_category)
        first = wide[0]
        category = index.category_of
        return (
            index.centroid @ query,
            best,
            best - following,
            top[0] - best,
            np.count_nonzero(category[wide] == category[first]) / len(wide),
            top[0] - index.density[first],
            index.density[first],
            index.hubness[first],
            nearest == category[first],
        )

    def _topic(self, query: Floats) -> tuple[Any, ...]:
        prior = self._prior
        if prior is None:
            return (0.0,) * 8
        similarity = prior.vectors @ query
        # a reworded or repeated question would give its own answer away
        similarity[similarity > 0.999] = -np.inf
        inside, outside = _best3(similarity[self._inside]), _best3(similarity[self._outside])
        near = np.argpartition(-similarity, 14)[:15]
        near = near[np.argsort(-similarity[near], kind="stable")]
        weight = np.exp(np.maximum(similarity[near], -1) * 10)
        hit = prior.inside[near] * weight
        means = inside.mean(), outside.mean()
        return (
            *(inside[0], means[0], outside[0], means[1]),
            *(inside[0] - outside[0], means[0] - means[1]),
            *(hit[:5].sum() / weight[:5].sum(), hit.sum() / weight.sum()),
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
        answer_over_retrieve = np.clip(logits[:, :, 1] - logits[:, :, 0], -80, 80)
        return np.asarray((1.0 / (1.0 + np.exp(answer_over_retrieve))).mean(0), np.float32)

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


def _mean_std(values: Floats) -> tuple[np.float32, np.float32]:
    mean = np.add.reduce(values) / np.float32(len(values))
    apart = values - mean
    return mean, np.float32(np.sqrt(np.dot(apart, apart) / np.float32(len(values))) + np.float32(1e-6))


def _two_best(values: Floats) -> tuple[int, np.float32, np.float32]:
    """Place of the largest value, itself and the second largest; the same twice where there is one value."""
    first = int(values.argmax())
    best = values[first]
    if len(values) < 2:
        return first, best, best
    following = values[:first].max() if first else _FAR * np.inf
    if first + 1 < len(values):
        following = max(following, values[first + 1 :].max())
    return first, best, following


def _best3(values: Floats) -> Floats:
    best = np.full(3, _FAR)
    if len(values) > 3:
        values = np.partition(values, len(values) - 3)[-3:]
    finite = -np.sort(-values[np.isfinite(values)])
    best[: len(finite)] = finite
    return best


def _shape(top: Floats, mean: np.float32, std: np.float32) -> list[Any]:
    t = top[:SHAPE_K].tolist()
    ten = top[:SHAPE_K]
    return [
        *t,
        *(t[i - 1] - t[i] for i in (1, 2, 3, 5)),
        t[0] - t[4],
        t[0] - t[9],
        ten.std(),
        (ten[0] - mean) / std,
        mean,
        std,
        np.count_nonzero(ten > ten[0] - np.float32(0.05)) / SHAPE_K,
        np.count_nonzero(ten > 0.5) / SHAPE_K,
        t[0] * t[0],
    ]


def _ranked(similarity: Floats, rows: NDArray[np.int64]) -> tuple[tuple[Any, ...], tuple[Floats, ...]]:
    """Another similarity ``[M]``: its summary of the question, and of each candidate."""
    mean, std = _mean_std(similarity)
    mine = similarity[rows]
    leaders = -np.sort(-np.partition(similarity, -3)[-3:])
    above = np.count_nonzero(similarity > mine[:, None], axis=1)
    best = leaders[0]
    static = (
        best,
        (best - mean) / std,
        best - leaders[1],
        best - leaders[2],
        (mine >= best).any(),
        mine[0] >= best,
    )
    return static, (mine, (mine - mean) / std, np.log1p(above), best - mine)
