"""The gold firewall: what an analyst saw of the answer must not reach a skill.

Checked is every deployable text, against two things: shapes that no procedure needs (product ids, long digit runs, task
and episode ids, however written) and the protected values of the episodes it came from (ids, titles, brands, option
values). The text is looked at as it is, folded (full-width forms, accents, zero-width characters, case), squeezed
(no spaces or punctuation, so that a value split over sentences closes up), and decoded (Base64, hex, percent, HTML
and backslash escapes, ROT13, reversed).

A rejection names its reasons, never the value. When in doubt the firewall rejects: losing a sentence costs little.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import html
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from rayrl.schemas import JsonDict

LONG_DIGITS = 5
TITLE_SHARE = 0.6
"""Share of a title's telling words that may not be reached."""

_SPELLED = "zero one two three four five six seven eight nine"
_DIGIT_WORDS = {
    **{c: str(i) for i, c in enumerate("零一二三四五六七八九")},
    **{c: str(i) for i, c in enumerate("〇壹贰叁肆伍陆柒捌玖")},
    **{w: str(i) for i, w in enumerate(_SPELLED.split())},
    "两": "2",
    "oh": "0",
}
_PROCEDURAL = """
a an and any all the of to in on at for from with without by or not no is are be it its if when then than more most less
least other another every each one two three first second last next before after above below over under within product
products item items shop shopping search query queries keyword keywords result results page pages option options variant
variants size sizes colour color colours colors price prices budget brand brands attribute attributes feature features
requirement requirements task user persona preference preferences buy now click open choose select check verify compare
match matches back prev title category type name value values text standard set new list best cheap cheaper good same
right wrong kind words
商品 产品 搜索 结果 规格 颜色 尺码 价格 预算 品牌 属性 需求 用户 画像 任务 标准 购买 点击
"""
_COMMON = frozenset(_PROCEDURAL.split())
"""Words of procedures; a protected value made of these alone protects nothing."""

_IDS = (
    (
        "task id",
        re.compile(
            r"(?:task|episode|sample|goal|job|任务|样本|题目|目标)(?:[\s_#:：=\-（(第]|no\.?){0,6}\d+", re.IGNORECASE
        ),
    ),
    ("product id", re.compile(r"\bB0[0-9A-Z]{6,}\b")),
    ("product id", re.compile(r"\basin\b\W{0,3}[0-9a-z]*\d[0-9a-z]*", re.IGNORECASE)),
    ("product id", re.compile(r"\b(?=[A-Za-z0-9]*\d)(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{6,}\b")),
    ("task id", re.compile(r"\bgen-\d+")),
)
_DIGIT_RUN = re.compile(rf"(?:\d[\s\-._,，、·/|]{{0,3}}){{{LONG_DIGITS},}}")
_TOKEN = re.compile(r"[a-z0-9]+|[\u3400-\u9fff]+")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{6,}={0,2}")
_HEX = re.compile(r"(?:0x|\\x)?(?:[0-9a-fA-F]{2}[\s:]?(?:\\x)?){4,}")
_ESCAPE = re.compile(r"\\(?:u\{?([0-9a-fA-F]{4,6})\}?|x([0-9a-fA-F]{2}))|U\+([0-9A-Fa-f]{4,6})")


@dataclass(frozen=True)
class Protected:
    """Values that must not be said. Build it with :func:`protected_values`."""

    ids: frozenset[str] = frozenset()
    titles: frozenset[str] = frozenset()
    brands: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()

    def __or__(self, other: Protected) -> Protected:
        return Protected(
            self.ids | other.ids,
            self.titles | other.titles,
            self.brands | other.brands,
            self.options | other.options,
        )


@dataclass(frozen=True)
class Inspection:
    """Outcome; ``reasons`` is empty when the text may go on."""

    reasons: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the text may go on."""
        return not self.reasons


@lru_cache(maxsize=8192)
def fold(text: str) -> str:
    """NFKC, accents and invisible characters dropped, lower case, single spaces."""
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text))
    kept = (c for c in text if unicodedata.category(c) not in ("Mn", "Cf", "Cc") or c in "\n\t ")
    return " ".join("".join(kept).casefold().split())


@lru_cache(maxsize=8192)
def squeeze(text: str) -> str:
    """Folded, letters and digits only."""
    return "".join(_TOKEN.findall(fold(text)))


def protected_values(goal: JsonDict | None, seen: Iterable[JsonDict] = ()) -> Protected:
    """What one episode must not give away: its goal, and the products it met (``asin``, ``title``/``name``, ``brand``,
    ``options``)."""
    ids: set[str] = set()
    titles: set[str] = set()
    brands: set[str] = set()
    options: set[str] = set()
    for item in ([goal] if goal else []) + list(seen):
        ids.update(_texts(item.get("asin"), item.get("task_uid"), item.get("product_id"), item.get("id")))
        titles.update(_texts(item.get("name"), item.get("title")))
        brands.update(_texts(item.get("brand")))
        options.update(_texts(item.get("goal_options"), item.get("option_values")))
        chosen = item.get("options")
        options.update(_texts(list(chosen.values()) if isinstance(chosen, dict) else chosen))
        persona = item.get("user_persona")
        for key, value in (persona or {}).items() if isinstance(persona, dict) else ():
            if "品牌" in key or "brand" in key.lower():
                brands.update(_texts(value))
            if "规格" in key or "option" in key.lower():
                options.update(_texts(value))
    return Protected(frozenset(ids), frozenset(titles), frozenset(brands), frozenset(options))


def _texts(*values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, str) and value.strip():
            yield value.strip()
        elif isinstance(value, list | tuple):
            yield from _texts(*value)
        elif isinstance(value, dict):
            yield from _texts(*value.values())


def inspect(text: str, protected: Protected) -> Inspection:
    """Whether a deployable text may go on; see the module docstring. Pure and deterministic."""
    reasons: dict[str, None] = {}
    for how, version in _versions(text):
        for reason in _shapes(version):
            reasons[reason + how] = None
        for reason in _values(version, protected):
            reasons[reason + how] = None
    return Inspection(list(reasons))


def leaks(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Reasons against each text (by name) that looks as if it held an answer, whatever it came from."""
    return {name: reasons for name, text in texts.items() if (reasons := inspect(text, Protected()).reasons)}


def _versions(text: str) -> Iterator[tuple[str, str]]:
    """The text, and everything that can be decoded out of it."""
    plain = unicodedata.normalize("NFKC", text)
    plain = "".join(c for c in plain if unicodedata.category(c) != "Cf")
    yield "", plain
    for name, decoded in (("percent-encoded", unquote(plain)), ("HTML-escaped", html.unescape(plain))):
        if decoded != plain:
            yield f" ({name})", decoded
    unescaped = _ESCAPE.sub(lambda m: chr(min(int(m[1] or m[2] or m[3], 16), 0x10FFFF)), plain)
    if unescaped != plain:
        yield " (escaped)", unescaped
    for word in _BASE64.findall(plain):
        for candidate in (word, word.replace("-", "+").replace("_", "/")):
            revealed = _decoded(base64.b64decode, candidate + "=" * (-len(candidate) % 4))
            if revealed is not None:
                yield " (Base64)", revealed
                break
    for match in _HEX.findall(plain):
        digits = re.sub(r"0x|\\x|[^0-9a-fA-F]", "", match)
        unhexed = _decoded(binascii.unhexlify, digits[: len(digits) // 2 * 2])
        if unhexed is not None:
            yield " (hex)", unhexed
    yield " (reversed)", plain[::-1]
    yield " (ROT13)", codecs.decode(plain, "rot13")


def _decoded(decode: Any, data: str) -> str | None:
    """The text behind an encoding; ``None`` unless it is printable text of some length."""
    try:
        found = str(decode(data).decode("utf-8"))
    except (ValueError, binascii.Error):
        return None
    return found if len(found) >= 2 and found.isprintable() else None


def _shapes(text: str) -> Iterator[str]:
    folded = fold(text)
    for name, pattern in _IDS:
        if pattern.search(text) or (pattern.flags & re.IGNORECASE and pattern.search(folded)):
            yield f"looks like a {name}"
    # a digit run, also when spelled out or broken up
    words = re.sub(r"[a-z]+", lambda m: _DIGIT_WORDS.get(m[0], m[0]), folded)
    words = "".join(_DIGIT_WORDS.get(c, c) for c in words)
    if _DIGIT_RUN.search(words):
        yield "holds a long run of digits"


def _values(text: str, protected: Protected) -> Iterator[str]:
    folded, squeezed = fold(text), squeeze(text)
    tokens = set(_TOKEN.findall(folded))
    if any(_id_inside(i, squeezed, tokens) for i in protected.ids):
        yield "holds a protected id"
    if any(_title_inside(t, folded, squeezed) for t in protected.titles):
        yield "holds a product title"
    if any(_value_inside(b, folded, squeezed) for b in protected.brands):
        yield "holds a protected brand"
    if any(_value_inside(o, folded, squeezed) for o in protected.options):
        yield "holds a protected option value"


def _id_inside(value: str, squeezed: str, tokens: set[str]) -> bool:
    want = squeeze(value)
    if len(want) < 3:
        return False
    if want in squeezed:
        return True
    # a part of an id is as good as the id: four characters with a digit, standing alone
    return any(len(t) >= 4 and any(c.isdigit() for c in t) and t in want for t in tokens)


def _title_inside(title: str, folded: str, squeezed: str) -> bool:
    want = squeeze(title)
    if len(want) >= 6 and want in squeezed:
        return True
    telling = [t for t in _telling(title) if len(t) >= 2]
    if len(telling) < 2:
        return False
    return sum(_token_inside(t, folded) for t in telling) / len(telling) >= TITLE_SHARE


def _value_inside(value: str, folded: str, squeezed: str) -> bool:
    """A brand or option value, or one of its spellings (bilingual values hold two)."""
    for part in {fold(value), *_pieces(value)}:
        compact = squeeze(part)
        if not compact or all(t in _COMMON for t in _TOKEN.findall(part)):
            continue
        cjk = re.search(r"[\u3400-\u9fff]", compact) is not None
        short = len(compact) == 1 or (not cjk and (len(compact) == 2 or (compact.isdigit() and len(compact) < 4)))
        if short:
            found = _short_inside(compact, folded)
        else:
            closed = len(compact) >= (3 if cjk else 5) and compact in squeezed
            spelled = not cjk and len(compact) == 4 and compact in squeezed and _spaced_inside(compact, folded)
            found = closed or spelled or _token_inside(part, folded)
        if found:
            return True
    return False


@lru_cache(maxsize=8192)
def _pieces(value: str) -> frozenset[str]:
    """Runs of one script: ``黑色 black`` is two values. Single characters are no value of their own."""
    runs = re.findall(r"[\u3400-\u9fff]+|[^\u3400-\u9fff]+", fold(value))
    return frozenset(" ".join(run.split()) for run in runs if len(run.strip()) > 1)


@lru_cache(maxsize=8192)
def _telling(title: str) -> tuple[str, ...]:
    return tuple(t for t in dict.fromkeys(_TOKEN.findall(fold(title))) if t not in _COMMON)


def _token_inside(part: str, folded: str) -> bool:
    edge = r"[a-z0-9]"
    return part in folded and re.search(rf"(?<!{edge}){re.escape(part)}(?!{edge})", folded) is not None


def _spaced_inside(compact: str, folded: str) -> bool:
    """Spelled with separators: ``a-s-t-e-r``. Called for what the squeezed text holds."""
    pattern = r"[\W_]+".join(map(re.escape, compact))
    return re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", folded) is not None


def _short_inside(compact: str, folded: str) -> bool:
    """A value of one or two characters counts where it is given as a value: quoted, after = or :, or after an axis."""
    if compact not in folded:
        return False
    short = re.escape(compact)
    axis = r"(?:size|colou?r|option|variant|value|choose|select|pick|click|尺码|颜色|规格|选择?|选项|型号|尺寸)"
    return (
        re.search(rf"(?<![a-z])[\"'“”‘’「『=:：(（]\s*{short}\s*(?:[\"'“”‘’」』)）]|$|[\s,.;，。；])", folded)
        is not None
        or re.search(rf"{axis}(?:\s+is|\s*[是为])?\W{{0,3}}{short}(?![a-z0-9\u3400-\u9fff])", folded) is not None
    )
