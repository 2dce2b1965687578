"""BM25 and word overlap without a search engine: an inverted index in three arrays.

One question adds up the postings of its terms, some microseconds each. Words are runs of Latin letters and digits with
light suffix stripping; Chinese is cut into character bigrams (and single characters where alone).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_WORD = re.compile(r"[a-z0-9\u00c0-\u024f]+|[\u4e00-\u9fff]+")
_STOP = frozenset(
    re.findall(
        r"\w+",
        """
        a an and are as at be been but by can could did do does for from had has have how i if in into is it its may me
        my no not of on or our should so such than that the their them then there these they this to was we were what
        when where which who whom why will with would you your
        """,
    )
)


def tokens(text: str) -> list[str]:
    """Terms of a text, lower-cased, without English function words."""
    out: list[str] = []
    for word in _WORD.findall(text.lower()):
        if "\u4e00" <= word[0] <= "\u9fff":
            out.extend(word[i : i + 2] for i in range(max(len(word) - 1, 1)))
        elif word not in _STOP:
            out.append(_stem(word))
    return out


def _stem(word: str) -> str:
    for suffix, keep in (("ies", 3), ("ing", 4), ("ed", 4), ("es", 4), ("s", 3)):
        if word.endswith(suffix) and len(word) - len(suffix) >= keep and not word.endswith("ss"):
            return word[: -len(suffix)]
    return word


class LexicalIndex:
    """BM25 (k1, b) as postings: for each term the memories that hold it and their weights; idf per term ``[V]``."""

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        counts = [Counter(tokens(t)) for t in texts]
        self.vocabulary = {term: i for i, term in enumerate(sorted({t for c in counts for t in c}))}
        self.memories = len(counts)
        lengths = np.array([sum(c.values()) for c in counts], np.float32)
        average = max(float(lengths.mean()), 1.0) if len(counts) else 1.0
        long = k1 * (1 - b + b * lengths / average)
        entries = sum(len(c) for c in counts)
        term = np.fromiter((self.vocabulary[t] for c in counts for t in c), np.int64, entries)
        often = np.fromiter((n for c in counts for n in c.values()), np.float64, entries)
        column = np.repeat(np.arange(len(counts)), [len(c) for c in counts])
        order = np.argsort(term, kind="stable")
        term, often, column = term[order], often[order], column[order]
        document_frequency = np.bincount(term, minlength=len(self.vocabulary)).astype(np.float32)
        self.idf: NDArray[np.float32] = np.log(
            1 + (len(counts) - document_frequency + 0.5) / (document_frequency + 0.5)
        ).astype(np.float32)
        self.starts: NDArray[np.int64] = np.searchsorted(term, np.arange(len(self.vocabulary) + 1))
        self.columns: NDArray[np.int64] = column
        saturated = (often * (k1 + 1)).astype(np.float32) / (often.astype(np.float32) + long[column])
        self.weights: NDArray[np.float32] = saturated * self.idf[term]
        self.unseen_idf = math.log(1 + (len(counts) + 0.5) / 0.5)

    def query(self, text: str) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
        """BM25 ``[M]``, idf-weighted coverage of the question by each memory ``[M]`` in 0..1, unseen idf share."""
        terms = sorted(set(tokens(text)))
        rows = [self.vocabulary[t] for t in terms if t in self.vocabulary]
        unseen = (len(terms) - len(rows)) * self.unseen_idf
        bm25, coverage = np.zeros(self.memories, np.float32), np.zeros(self.memories, np.float32)
        if not rows:
            return bm25, coverage, 1.0 if terms else 0.0
        for row in rows:
            # a memory is there once per term, so that adding by index adds each weight
            span = slice(self.starts[row], self.starts[row + 1])
            columns = self.columns[span]
            bm25[columns] += self.weights[span]
            coverage[columns] += self.idf[row]
        total = float(self.idf[rows].sum()) + unseen
        coverage /= np.float32(total)
        return bm25, coverage, unseen / total
