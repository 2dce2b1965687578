"""Multi-field BM25 in memory, rank for rank what SQLite's FTS5 answers, several times faster
(``benchmarks/shop_search.py``: 4 times at 300 products, 17 times at 20,000).

The score is FTS5's ``bm25()``: with column weights w and k1 = 1.2, b = 0.75,

    f(t, d)     = sum over the occurrences of t in d of the weight of their column
    score(q, d) = sum over the distinct terms t of q of idf(t) * f * (k1 + 1) / (f + k1 * (1 - b + b * |d| / mean |d|))
    idf(t)      = log((N - n + 0.5) / (n + 0.5)), or 1e-6 where that is not positive

Every factor but the sum over q is fixed when the index is built, so a query adds a few arrays. Ties go by asin
ascending. Invariants: immutable after building; the ranking depends on the products and the query alone; no word of a
query is special.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from rayrl.shop.catalogue import Product
from rayrl.shop.text import terms
from rayrl.shop.versions import MAX_RESULTS

COLUMNS = ("title", "brand", "category", "model", "attributes", "options", "bullets")
WEIGHTS = (3.0, 2.0, 2.0, 2.5, 1.5, 1.2, 0.8)
K1 = 1.2
B = 0.75

_LONGEST_CACHED = 128
"""Terms of a query that is kept; a policy's endless query is answered but takes no memory."""

_MODEL = re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z])[A-Za-z0-9]+\b", re.ASCII)


def document(product: Product) -> tuple[str, ...]:
    """The seven column texts of a product, in the order of :data:`COLUMNS`.

    ``model`` is what looks like a model number in the title (latin letters with digits); ``options`` is each axis
    followed by its values.
    """
    options = " ".join(" ".join([axis, *(v.label for v in values)]) for axis, values in product.axes.items())
    model = " ".join(_MODEL.findall(product.title))
    attributes = " ".join(product.attributes)
    return (product.title, product.brand, product.category, model, attributes, options, product.bullets)


class SearchIndex:
    """BM25 over a fixed set of products.

    Args:
        products: in any order; ranking does not depend on it.
        cache_size: queries whose ranking is kept (least recently used go first).
    """

    def __init__(self, products: list[Product], *, cache_size: int = 4096) -> None:
        ordered = sorted(products, key=lambda p: p.asin)
        self._asins: list[str] = [p.asin for p in ordered]
        self._postings = _postings(ordered)
        self._cache: OrderedDict[tuple[str, ...], tuple[str, ...]] = OrderedDict()
        self._cache_size = cache_size

    def search(self, query: str, limit: int = MAX_RESULTS) -> tuple[str, ...]:
        """Asins of the best ``limit`` products, best first; empty if no term of the query occurs anywhere."""
        key = tuple(dict.fromkeys(terms(query)))
        if limit != MAX_RESULTS or len(key) > _LONGEST_CACHED:
            return self._rank(key, limit)
        cached = self._cache.get(key)
        if cached is None:
            cached = self._cache[key] = self._rank(key, limit)
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return cached

    def _rank(self, key: tuple[str, ...], limit: int) -> tuple[str, ...]:
        found = [self._postings[term] for term in key if term in self._postings]
        if not found:
            return ()
        scores = np.zeros(len(self._asins))
        for documents, impacts in found:
            scores[documents] += impacts
        # FTS5 lists every document that holds a term, whatever the score; all impacts are positive
        hits = np.flatnonzero(scores)
        if len(hits) > limit:
            # everything that ties with the limit-th best must stay in the running, or ties would not go by asin
            threshold = np.partition(scores[hits], len(hits) - limit)[len(hits) - limit]
            hits = hits[scores[hits] >= threshold]
        order = hits[np.argsort(-scores[hits], kind="stable")][:limit]
        return tuple(self._asins[i] for i in order)


def _postings(products: list[Product]) -> dict[str, tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]]:
    """Term -> (document numbers ascending, the term's contribution to each document's score)."""
    raw: dict[str, tuple[list[int], list[float]]] = {}
    lengths = np.zeros(len(products))
    for number, product in enumerate(products):
        weights: dict[str, float] = {}
        length = 0
        for text, weight in zip(document(product), WEIGHTS, strict=True):
            words = terms(text)
            length += len(words)
            for word in words:
                weights[word] = weights.get(word, 0.0) + weight
        lengths[number] = length
        for word, frequency in weights.items():
            documents, frequencies = raw.setdefault(word, ([], []))
            documents.append(number)
            frequencies.append(frequency)
    mean = float(lengths.sum()) / len(products) if len(products) else 1.0
    out: dict[str, tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]] = {}
    for word, (documents, frequencies) in raw.items():
        idf = math.log((len(products) - len(documents) + 0.5) / (len(documents) + 0.5))
        if idf <= 0.0:
            idf = 1e-6
        where = np.asarray(documents, dtype=np.intp)
        f = np.asarray(frequencies)
        out[word] = (where, idf * ((f * (K1 + 1.0)) / (f + K1 * (1 - B + B * lengths[where] / mean))))
    return out
