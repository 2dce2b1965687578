"""Text to terms: the one tokeniser of search and reward, and the normal form of option labels.

Invariants: pure and deterministic; a term is lower case (NFKC, case-folded); Han runs become bigrams (a lone character
stays itself), every other run of letters and digits is one term.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_RUN = re.compile(rf"[{_HAN}]+|(?:(?![{_HAN}])[^\W_])+")
_HAN_CHAR = re.compile(rf"[{_HAN}]")
_SPACE = re.compile(r"\s+")
_NOT_WORD = re.compile(r"[\W_]+")


def normalise(text: str) -> str:
    """NFKC, case-folded."""
    return unicodedata.normalize("NFKC", text).casefold()


def collapse(text: str) -> str:
    """Whitespace runs, line breaks included, to single spaces; ends stripped."""
    return _SPACE.sub(" ", text).strip()


def terms(text: str) -> list[str]:
    """Search terms of ``text`` in order, with repetitions."""
    out: list[str] = []
    for match in _RUN.finditer(normalise(text)):
        run = match.group()
        if len(run) == 1 or not _HAN_CHAR.match(run):
            out.append(run)
        else:
            out.extend(run[i : i + 2] for i in range(len(run) - 1))
    return out


def option_label(text: str) -> str:
    """Normal form of an option axis or value as it appears on a page: ``/`` as `` | ``, lower case, single spaces."""
    return collapse(text.strip().replace("/", " | ").lower())


@lru_cache(maxsize=65_536)
def token_set_ratio(left: str, right: str) -> float:
    """Fuzzy likeness of two short texts in [0, 100], insensitive to word order and repetition.

    The usual token-set ratio: words in common, and each side's words in common followed by the rest, are compared
    pairwise by the normalised indel similarity ``2 * LCS / (len + len)``; the best of the three counts. A side whose
    words are all contained in the other's gives 100; an empty side gives 0.
    """
    a, b = set(_words(left)), set(_words(right))
    if not a or not b:
        return 0.0
    common = a & b
    if common and (a == common or b == common):
        return 100.0
    base = " ".join(sorted(common))
    full_a = " ".join(filter(None, [base, *sorted(a - common)]))
    full_b = " ".join(filter(None, [base, *sorted(b - common)]))
    best = _indel_ratio(full_a, full_b)
    if base:
        best = max(best, _indel_ratio(base, full_a), _indel_ratio(base, full_b))
    return best


def _words(text: str) -> list[str]:
    return _NOT_WORD.sub(" ", text.lower()).split()


def _indel_ratio(a: str, b: str) -> float:
    """``200 * LCS(a, b) / (len(a) + len(b))``; O(len(a) * len(b)), meant for labels."""
    row = [0] * (len(b) + 1)
    for char in a:
        diagonal = 0
        for j, other in enumerate(b, start=1):
            above = row[j]
            row[j] = diagonal + 1 if char == other else max(above, row[j - 1])
            diagonal = above
    return 200.0 * row[-1] / (len(a) + len(b))
