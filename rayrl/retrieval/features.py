"""What the policy sees of a question and of each candidate, in named groups that can be switched off.

Only what a server knows at that moment; no label enters. Groups:

* ``S`` shape of the similarities: top-10 cosines, gaps, spread, z-score of the best, counts near the best
* ``L`` words: BM25 of the best and its lead, idf-weighted coverage, share of words the memory has never seen
* ``C`` per candidate: cosine, distance to the best and to the next, BM25, coverage, z-score
* ``M`` the memory around the question: centroid, category margin and coherence, the candidate's density and hubness
* ``N`` topic prior: similarity to past questions known to be inside or outside THIS memory, the own question left out
* ``E`` the question's embedding (optionally its first principal directions within the memory)
* ``P`` passages: the question against single sentences of the memory, for the queue and for each candidate
* ``X`` a second encoder's view: its best match, its lead, and what it thinks of each candidate
* ``R`` what regressions on all of these expect retrieving to gain; fitted in :mod:`rayrl.retrieval.regressions`

In the ``revealing`` mode P and X are not known beforehand: they are what reading a candidate reveals, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayrl.retrieval.encoders import Encoder
from rayrl.retrieval.index import Floats, MemoryIndex, top_k

GROUPS = "SLCMNEPXR"
SHAPE_K = 10
_FAR = -1.0


@dataclass(frozen=True)
class TopicPrior:
    """Past questions and whether this memory answered them; rows are unit vectors."""

    vectors: Floats
    inside: NDArray[np.bool_]
    ids: tuple[str, ...]


@dataclass(frozen=True)
class TextCheck:
    """What a closer look uses: the sentences of the memory and, optionally, a second encoder's vectors.

    ``sentences`` are unit vectors of all sentences of the memory, ``owner`` the memory row of each.
    """

    sentences: Floats
    owner: NDArray[np.int64]
    second: Floats | None = None
    """``[M, d2]`` the memory under a second encoder."""


@dataclass(frozen=True)
class Features:
    """Feature tensors of Q questions against one memory, K candidates each."""

    static: Floats
    """``[Q, Fs]``"""
    candidate: Floats
    """``[Q, K, Fc]``"""
    reveal: Floats
    """``[Q, K, Fr]``, Fr = 0 outside the revealing mode."""
    agreement: Floats
    """``[Q, K, K]`` cosine between candidates' texts."""
    candidates: NDArray[np.int64]
    """``[Q, K]`` memory rows, best first."""
    quality: Floats
    """``[Q, K]`` cosines, the only candidate feature of the seed's state."""
    static_names: tuple[str, ...]
    candidate_names: tuple[str, ...]
    reveal_names: tuple[str, ...]


def make_text_check(index: MemoryIndex, encoder: Encoder, second: Encoder | None = None) -> TextCheck:
    """Embed the sentences of every memory (cached with the encoder)."""
    texts: list[str] = []
    owner: list[int] = []
    for row, memory in enumerate(index.memories):
        for sentence in split_sentences(memory.text):
            texts.append(sentence)
            owner.append(row)
    other = second.encode([m.text for m in index.memories], "passage") if second is not None else None
    return TextCheck(encoder.encode(texts, "passage"), np.array(owner, np.int64), other)


def split_sentences(text: str) -> list[str]:
    """Sentences of at least 3 characters; the text itself when it has none."""
    parts = [p.strip() for p in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9])|(?<=[。！？；])|\n+", text)]
    return [p for p in parts if len(p) >= 3] or [text]


def compute(
    index: MemoryIndex,
    queries: Floats,
    texts: Sequence[str],
    ids: Sequence[str],
    *,
    groups: str = GROUPS,
    k: int = 5,
    prior: TopicPrior | None = None,
    blind: NDArray[np.bool_] | None = None,
    basis: Floats | None = None,
    check: TextCheck | None = None,
    second_queries: Floats | None = None,
    reveal: bool = False,
) -> Features:
    """Features of ``Q`` questions.

    Args:
        index: the memory.
        queries: ``[Q, d]`` unit rows.
        texts: the questions' texts, for the lexical groups.
        ids: the questions' ids; a question never sees itself in the topic prior.
        groups: letters out of :data:`GROUPS`.
        k: candidates in the queue.
        prior: needed by group ``N``.
        blind: ``[Q, P]`` past questions a row must not see in the topic prior, besides itself.
        basis: ``[d, p]`` projection for group ``E``; None keeps the whole embedding.
        check: needed by groups ``P`` and ``X`` and by ``reveal``.
        second_queries: ``[Q, d2]`` under the check's second encoder.
        reveal: put P and X behind the act of retrieving instead of showing them beforehand.
    """
    similarity = index.similarities(queries)
    q = len(texts)
    wide = top_k(similarity, max(SHAPE_K, k))
    top = np.take_along_axis(similarity, wide, axis=1)
    if top.shape[1] < max(SHAPE_K, k):
        top = np.pad(top, ((0, 0), (0, max(SHAPE_K, k) - top.shape[1])), constant_values=0.0)
    candidates = wide[:, :k]
    rows = np.arange(q)[:, None]
    quality = similarity[rows, candidates]
    mean = similarity.mean(1, keepdims=True)
    std = similarity.std(1, keepdims=True) + 1e-6
    static: list[tuple[str, Floats]] = []
    per: list[tuple[str, Floats]] = []
    lexical = _lexical(index, texts) if set(groups) & set("LC") or reveal else None
    if "S" in groups:
        static += _shape(top, mean, std)
    if "L" in groups and lexical is not None:
        static += _words(lexical, candidates)
    if "C" in groups and lexical is not None:
        per += _candidates(quality, mean, std, lexical, candidates)
    elif "C" not in groups:
        per.append(("cosine", quality))
    if "M" in groups:
        static += _around(index, queries, wide, top)
        per.append(("density", index.density[candidates]))
        per.append(("above_density", quality - index.density[candidates]))
        per.append(("hubness", index.hubness[candidates]))
        same = index.category_of[wide][:, None, :] == index.category_of[candidates][:, :, None]
        per.append(("category_share", same.mean(2).astype(np.float32)))
    if "N" in groups:
        static += _topic(prior, queries, ids, blind)
    if "E" in groups:
        embedding = queries if basis is None else queries @ basis
        scale = np.sqrt(embedding.shape[1]).astype(np.float32) if basis is None else np.float32(1.0)
        static += [(f"e{i}", embedding[:, i] * scale) for i in range(embedding.shape[1])]
    closer_static, closer = _closer_look(queries, quality, candidates, groups, check, second_queries)
    shown: list[tuple[str, Floats]] = []
    if reveal and lexical is not None:
        shown = [*closer, ("text_coverage", lexical.coverage[rows, candidates])]
    else:
        static += closer_static
        per += closer
    texts_of_queue = index.vectors[candidates]
    return Features(
        static=_stack([v for _, v in static], q),
        candidate=np.stack([v for _, v in per], axis=2).astype(np.float32),
        reveal=np.stack([v for _, v in shown], axis=2).astype(np.float32)
        if shown
        else np.zeros((q, candidates.shape[1], 0), np.float32),
        agreement=np.asarray(texts_of_queue @ texts_of_queue.transpose(0, 2, 1), np.float32),
        candidates=candidates,
        quality=quality.astype(np.float32),
        static_names=tuple(n for n, _ in static),
        candidate_names=tuple(n for n, _ in per),
        reveal_names=tuple(n for n, _ in shown),
    )


def principal_directions(vectors: Floats, p: int) -> Floats:
    """``[d, p]`` leading directions of the centred rows, scaled so that each projection has unit variance.

    The sign of a direction is fixed by its largest entry, so the result does not depend on the LAPACK build's choice.
    """
    centred = vectors - vectors.mean(0)
    _, singular, right = np.linalg.svd(centred, full_matrices=False)
    basis = right[:p].T
    signs = np.sign(basis[np.abs(basis).argmax(0), np.arange(basis.shape[1])])
    scale = np.sqrt(len(vectors)) / np.maximum(singular[: basis.shape[1]], 1e-6)
    return np.asarray(basis * signs * scale, dtype=np.float32)


@dataclass(frozen=True)
class _Lexical:
    bm25: Floats
    coverage: Floats
    unseen: Floats


def _lexical(index: MemoryIndex, texts: Sequence[str]) -> _Lexical:
    parts = [index.lexical.query(text) for text in texts]
    m = len(index.memories)
    return _Lexical(
        np.stack([p[0] for p in parts]) if parts else np.zeros((0, m), np.float32),
        np.stack([p[1] for p in parts]) if parts else np.zeros((0, m), np.float32),
        np.array([p[2] for p in parts], np.float32),
    )


def _shape(top: Floats, mean: Floats, std: Floats) -> list[tuple[str, Floats]]:
    best = top[:, :1]
    out = [(f"top{i + 1}", top[:, i]) for i in range(SHAPE_K)]
    out += [(f"gap{i}{i + 1}", top[:, i - 1] - top[:, i]) for i in (1, 2, 3, 5)]
    out += [
        ("gap_to_fifth", top[:, 0] - top[:, 4]),
        ("gap_to_tenth", top[:, 0] - top[:, 9]),
        ("spread", top[:, :SHAPE_K].std(1)),
        ("z_best", ((best - mean) / std)[:, 0]),
        ("mean", mean[:, 0]),
        ("std", std[:, 0]),
        ("near_best", (top[:, :SHAPE_K] > best - 0.05).mean(1)),
        ("over_half", (top[:, :SHAPE_K] > 0.5).mean(1)),
        ("best_squared", top[:, 0] ** 2),
    ]
    return [(n, np.asarray(v, np.float32)) for n, v in out]


def _words(lexical: _Lexical, candidates: NDArray[np.int64]) -> list[tuple[str, Floats]]:
    rows = np.arange(len(candidates))[:, None]
    leaders = -np.partition(-lexical.bm25, 1, axis=1)[:, :2]
    best_bm25 = leaders[:, 0]
    out = [
        ("bm25_best", best_bm25 / 10),
        ("bm25_lead", (leaders[:, 0] - leaders[:, 1]) / 10),
        ("coverage_best", lexical.coverage.max(1)),
        ("coverage_queue", lexical.coverage[rows, candidates].max(1)),
        ("coverage_first", lexical.coverage[rows, candidates][:, 0]),
        ("bm25_first", lexical.bm25[rows, candidates][:, 0] / 10),
        ("bm25_agrees", (lexical.bm25.argmax(1)[:, None] == candidates).any(1)),
        ("bm25_agrees_first", lexical.bm25.argmax(1) == candidates[:, 0]),
        ("unseen", lexical.unseen),
    ]
    return [(n, np.asarray(v, np.float32)) for n, v in out]


def _candidates(
    quality: Floats, mean: Floats, std: Floats, lexical: _Lexical, candidates: NDArray[np.int64]
) -> list[tuple[str, Floats]]:
    rows = np.arange(len(candidates))[:, None]
    following = np.concatenate([quality[:, 1:], quality[:, -1:]], axis=1)
    bm25 = lexical.bm25[rows, candidates]
    return [
        ("cosine", quality),
        ("behind_best", quality[:, :1] - quality),
        ("ahead_of_next", quality - following),
        ("z", (quality - mean) / std),
        ("bm25", bm25 / 10),
        ("bm25_behind", (lexical.bm25.max(1, keepdims=True) - bm25) / 10),
        ("coverage", lexical.coverage[rows, candidates]),
    ]


def _around(index: MemoryIndex, queries: Floats, wide: NDArray[np.int64], top: Floats) -> list[tuple[str, Floats]]:
    to_category = queries @ index.category_centroids.T
    ordered = -np.sort(-to_category, axis=1)[:, :2]
    if ordered.shape[1] < 2:
        ordered = np.repeat(ordered, 2, axis=1)
    same = index.category_of[wide] == index.category_of[wide[:, :1]]
    first = wide[:, 0]
    out = [
        ("to_centroid", queries @ index.centroid),
        ("to_category", ordered[:, 0]),
        ("category_margin", ordered[:, 0] - ordered[:, 1]),
        ("best_over_category", top[:, 0] - ordered[:, 0]),
        ("coherence", same.mean(1)),
        ("best_over_density", top[:, 0] - index.density[first]),
        ("density_first", index.density[first]),
        ("hubness_first", index.hubness[first]),
        ("category_agrees", to_category.argmax(1) == index.category_of[first]),
    ]
    return [(n, np.asarray(v, np.float32)) for n, v in out]


def _topic(
    prior: TopicPrior | None, queries: Floats, ids: Sequence[str], blind: NDArray[np.bool_] | None
) -> list[tuple[str, Floats]]:
    names = ("in_best", "in_mean3", "out_best", "out_mean3", "in_minus_out", "in_minus_out3", "share5", "share15")
    if prior is None or len(prior.ids) < 16:
        return [(n, np.zeros(len(queries), np.float32)) for n in names]
    similarity = queries @ prior.vectors.T
    place = {identifier: i for i, identifier in enumerate(prior.ids)}
    for row, identifier in enumerate(ids):
        if identifier in place:
            similarity[row, place[identifier]] = -np.inf
    if blind is not None:
        similarity = np.where(blind, -np.inf, similarity)
    # a reworded or repeated question would give its own answer away as well
    similarity = np.where(similarity > 0.999, -np.inf, similarity)
    inside = _best3(np.where(prior.inside, similarity, -np.inf))
    outside = _best3(np.where(prior.inside, -np.inf, similarity))
    near = np.argpartition(-similarity, 14, axis=1)[:, :15]
    values = np.take_along_axis(similarity, near, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    near = np.take_along_axis(near, order, axis=1)
    weight = np.exp(np.clip(np.take_along_axis(values, order, axis=1), -1, 1) * 10)
    hit = prior.inside[near] * weight
    columns = (
        inside[:, 0],
        inside.mean(1),
        outside[:, 0],
        outside.mean(1),
        inside[:, 0] - outside[:, 0],
        inside.mean(1) - outside.mean(1),
        hit[:, :5].sum(1) / weight[:, :5].sum(1),
        hit.sum(1) / weight.sum(1),
    )
    return [(n, np.asarray(v, np.float32)) for n, v in zip(names, columns, strict=True)]


def _best3(similarity: Floats) -> Floats:
    best = -np.partition(-similarity, 2, axis=1)[:, :3] if similarity.shape[1] >= 3 else similarity
    best = -np.sort(-best, axis=1)
    return np.asarray(np.where(np.isfinite(best), best, _FAR), np.float32)


def _closer_look(
    queries: Floats,
    quality: Floats,
    candidates: NDArray[np.int64],
    groups: str,
    check: TextCheck | None,
    second_queries: Floats | None,
) -> tuple[list[tuple[str, Floats]], list[tuple[str, Floats]]]:
    """Groups P and X: features of the question and of each candidate."""
    static: list[tuple[str, Floats]] = []
    per: list[tuple[str, Floats]] = []
    if check is None:
        return static, per
    if "P" in groups:
        to_sentence = np.asarray(queries @ check.sentences.T, np.float32)
        starts = np.flatnonzero(np.r_[True, check.owner[1:] != check.owner[:-1]])
        best = np.maximum.reduceat(to_sentence, starts, axis=1)
        chosen, static_part = _ranked("sentence", best, candidates)
        static += static_part
        per += [*chosen, ("sentence_over_text", chosen[0][1] - quality)]
    if "X" in groups and check.second is not None and second_queries is not None:
        chosen, static_part = _ranked("second", np.asarray(second_queries @ check.second.T, np.float32), candidates)
        static += static_part
        per += chosen
    return static, per


def _ranked(
    name: str, similarity: Floats, candidates: NDArray[np.int64]
) -> tuple[list[tuple[str, Floats]], list[tuple[str, Floats]]]:
    """Another similarity ``[Q, M]`` summarised for the candidates, and for the question as a whole."""
    rows = np.arange(len(candidates))[:, None]
    mean, std = similarity.mean(1, keepdims=True), similarity.std(1, keepdims=True) + 1e-6
    leaders = -np.sort(-np.partition(similarity, -3, axis=1)[:, -3:], axis=1)
    mine = similarity[rows, candidates]
    above = np.stack([(similarity > mine[:, j : j + 1]).sum(1) for j in range(mine.shape[1])], axis=1)
    per = [
        (name, mine),
        (f"{name}_z", (mine - mean) / std),
        (f"{name}_rank", np.log1p(above)),
        (f"{name}_behind", leaders[:, :1] - mine),
    ]
    static = [
        (f"{name}_best", leaders[:, 0]),
        (f"{name}_best_z", ((leaders[:, :1] - mean) / std)[:, 0]),
        (f"{name}_lead", leaders[:, 0] - leaders[:, 1]),
        (f"{name}_lead2", leaders[:, 0] - leaders[:, 2]),
        (f"{name}_agrees", (mine >= leaders[:, :1]).any(1)),
        (f"{name}_agrees_first", mine[:, 0] >= leaders[:, 0]),
    ]
    return [(n, np.asarray(v, np.float32)) for n, v in per], [(n, np.asarray(v, np.float32)) for n, v in static]


def _stack(columns: Sequence[Floats], rows: int) -> Floats:
    return np.stack(columns, axis=1).astype(np.float32) if columns else np.zeros((rows, 0), np.float32)
