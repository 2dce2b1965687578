"""One memory ready to be searched: vectors, words, and what is known about the memory itself.

Everything here depends on the memory alone, never on questions or labels, so that the same object serves training,
evaluation and the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayrl.errors import DataError
from rayrl.retrieval.encoders import Encoder
from rayrl.retrieval.lexical import LexicalIndex
from rayrl.retrieval.pools import Memory

Floats = NDArray[np.float32]
NEIGHBOURS = 5
_BLOCK = 1024
"""Rows whose neighbours are sought at a time."""


@dataclass(frozen=True)
class MemoryIndex:
    """A searchable memory of M texts."""

    memories: tuple[Memory, ...]
    vectors: Floats
    """``[M, d]`` unit rows."""
    lexical: LexicalIndex
    categories: tuple[str, ...]
    category_of: NDArray[np.int64]
    """``[M]`` index into ``categories``."""
    centroid: Floats
    """``[d]`` unit mean of the memory."""
    category_centroids: Floats
    """``[n_categories, d]`` unit rows."""
    density: Floats
    """``[M]`` mean cosine of a memory to its 5 nearest others: crowded neighbourhoods give false friends."""
    hubness: Floats
    """``[M]`` log1p of how many other memories have this one among their 5 nearest."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Memory ids in row order."""
        return tuple(m.id for m in self.memories)

    def similarities(self, queries: Floats) -> Floats:
        """``[Q, M]`` cosines of unit query rows."""
        return np.asarray(queries @ self.vectors.T, dtype=np.float32)


def build_index(
    memories: Sequence[Memory],
    encoder: Encoder,
    vectors: Floats | None = None,
    around: tuple[Floats, Floats] | None = None,
) -> MemoryIndex:
    """Embed (unless given) and index.

    Args:
        memories: M texts.
        encoder: theirs.
        vectors: ``[M, d]`` unit rows, where they are known.
        around: density and hubness ``[M]``, where they are known; all pairs are compared otherwise.

    Raises:
        DataError: fewer than 2 memories, or vectors of another shape.
    """
    if len(memories) < 2:
        raise DataError(f"a memory needs at least 2 entries, this one has {len(memories)}")
    if vectors is None:
        vectors = encoder.encode([m.text for m in memories], "passage")
    if vectors.shape != (len(memories), encoder.dim):
        raise DataError(f"vectors have shape {vectors.shape}, expected {(len(memories), encoder.dim)}")
    names = tuple(sorted({m.category for m in memories}))
    position = {name: i for i, name in enumerate(names)}
    category_of = np.array([position[m.category] for m in memories], np.int64)
    centroids = np.stack([_unit(vectors[category_of == i].mean(0)) for i in range(len(names))])
    density, hubness = around if around is not None else neighbourhoods(vectors)
    return MemoryIndex(
        memories=tuple(memories),
        vectors=vectors,
        lexical=LexicalIndex([m.text for m in memories]),
        categories=names,
        category_of=category_of,
        centroid=_unit(vectors.mean(0)),
        category_centroids=centroids.astype(np.float32),
        density=density,
        hubness=hubness,
    )


def neighbourhoods(vectors: Floats) -> tuple[Floats, Floats]:
    """Density and hubness of unit rows ``[M, d]``, each ``[M]``; see :class:`MemoryIndex`. Memory grows with M only."""
    m = len(vectors)
    k = min(NEIGHBOURS, m - 1)
    density = np.zeros(m, np.float32)
    hubs = np.zeros(m, np.int64)
    for start in range(0, m, _BLOCK):
        similarity = vectors[start : start + _BLOCK] @ vectors.T
        here = np.arange(len(similarity))
        similarity[here, start + here] = -np.inf
        nearest = np.argpartition(-similarity, k - 1, axis=1)[:, :k]
        density[start : start + _BLOCK] = np.take_along_axis(similarity, nearest, axis=1).mean(1)
        hubs += np.bincount(nearest.ravel(), minlength=m)
    return density, np.log1p(hubs).astype(np.float32)


def top_k(similarity: Floats, k: int) -> NDArray[np.int64]:
    """Row-wise indices of the k largest, best first, ties by index; ``[Q, k]``."""
    if similarity.shape[1] <= k:
        return np.argsort(-similarity, axis=1, kind="stable")
    part = np.sort(np.argpartition(-similarity, k - 1, axis=1)[:, :k], axis=1)
    order = np.argsort(-np.take_along_axis(similarity, part, axis=1), axis=1, kind="stable")
    return np.take_along_axis(part, order, axis=1)


def _unit(vector: Floats) -> Floats:
    return np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-9), dtype=np.float32)
