"""What the scripted shopper can read: the task and persona of the first user message, and the page in an observation.

Pure text in, frozen facts out. Nothing but the public conversation is looked at. Labels are accepted in English and
Chinese; an instruction in free form still gives its text, from which wanted words are recognised when they are seen.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

_TASK_LABEL = re.compile(
    r"(?:^|\n)[#*\s]*(?:Task|Instruction|任务|用户需求|购物需求|指令)\s*\**[:：]\s*", re.IGNORECASE
)
_PERSONA_LABEL = re.compile(r"(?:^|\n)[#*\s]*(?:Persona|User persona|用户画像|画像|人设)\s*\**[:：]\s*", re.IGNORECASE)
_OBSERVATION_LABEL = re.compile(
    r"(?:^|\n)[#*\s]*(?:Observation|Current page|观察|观测|环境观测|当前页面)\s*\**[:：]\s*|\n(?=页面：)", re.IGNORECASE
)
_SKILLS_LABEL = re.compile(r"(?:^|\n)[#*\s]*(?:Skills?|技能|经验)\b[^:：\n]{0,60}[:：]", re.IGNORECASE)

_BUDGET_ZH = re.compile(r"(\d+(?:\.\d+)?)\s*(?:元|块)")
_BUDGET_EN = re.compile(
    r"(?:within|under|below|around|about|less than|at most|up to|budget(?: of| is)?)\s*[$¥]?\s*(\d+(?:\.\d+)?)",
    re.IGNORECASE,
)
_NOUN_ZH = re.compile(r"(?:买|找|要)(?:一[个款双只件台条把套张])?(?:[^，,。、的]{1,12}的)?([^，,。；]+)")
_NOUN_EN = re.compile(
    r"(?:(?:want|need|like|wish)\s+to\s+)?(?:buy|looking for|look for|searching for|purchase|find|get|need|want)\s+"
    r"(?:(?:an?|some|the)\s+)?"
    r"(.+?)(?=\s+with\b|[,.]|$)",
    re.IGNORECASE,
)
_WANTED_ZH = re.compile(r"(?<!想)要(?!买)([^，,。；]+)")
_WANTED_EN = re.compile(r"\bwith\s+(.+?)(?=,\s*(?:options?|within|around|under|below)\b|\.(?:\s|$)|$)", re.IGNORECASE)
_OPTIONS_ZH = re.compile(r"规格([^，,。；]+)")
_OPTIONS_EN = re.compile(r"\boptions?\s+(.+?)(?=,\s*(?:within|around|under|below|about)\b|\.(?:\s|$)|$)", re.IGNORECASE)
_BRAND_ZH = re.compile(r"(?:买|找)(?:一[个款双只件台条把套张])?([^，,。、的]{1,12})的")
_SPLIT_ZH = re.compile(r"[、和及]|\s+and\s+")
_SPLIT_EN = re.compile(r",\s*(?:and\s+)?|\s+and\s+")

_RESULT = re.compile(
    r"^(\d+)\. (.*)\n   ASIN：(\S+)\n   价格：(.*)\n   品牌：(.*)\n   类别：(.*)\n   关键属性：(.*)$", re.MULTILINE
)
_PAGES = re.compile(r"第 (\d+)/(\d+) 页")
_AXIS = re.compile(r"^- (.+?)：(?:已选择 (.+)|尚未选择)$", re.MULTILINE)
_FIELD = re.compile(r"^- (标题|ASIN|价格|品牌|关键属性)：(.*)$", re.MULTILINE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Wish:
    """What the shopper was asked for, as far as the text says it."""

    text: str
    noun: str = ""
    attributes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    budget: float | None = None
    brand: str = ""
    persona_brands: tuple[str, ...] = ()
    persona_attributes: tuple[str, ...] = ()
    persona_options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A search result, or the product of a detail page."""

    asin: str
    title: str
    low: float | None
    haystack: str
    """Title, brand and key attributes, lower case."""


@dataclass(frozen=True)
class Page:
    """The current page. ``kind``: home, results, detail, other."""

    kind: str
    rows: tuple[Row, ...] = ()
    page: int = 1
    pages: int = 1
    price: float | None = None
    price_is_final: bool = False
    selected: dict[str, str | None] = field(default_factory=dict)
    """Axis to chosen value (None where still open), on a detail page."""


@lru_cache(maxsize=4096)
def read_wish(first_user_message: str) -> Wish:
    """Task and persona of the first user message."""
    start = _TASK_LABEL.search(first_user_message)
    begin = start.end() if start else 0
    ends = [
        m.start() for label in (_PERSONA_LABEL, _OBSERVATION_LABEL) if (m := label.search(first_user_message, begin))
    ]
    text = first_user_message[begin : min(ends, default=len(first_user_message))].strip()
    persona = _persona(first_user_message)
    # an English task may name a Chinese size, and a Chinese one an English brand: the majority decides
    chinese = sum("\u4e00" <= char <= "\u9fff" for char in text) > sum(
        char.isascii() and char.isalpha() for char in text
    )
    budget = _BUDGET_ZH.search(text) or _BUDGET_EN.search(text)
    noun = (_NOUN_ZH if chinese else _NOUN_EN).search(text)
    wanted = (_WANTED_ZH if chinese else _WANTED_EN).search(text)
    options = (_OPTIONS_ZH if chinese else _OPTIONS_EN).search(text)
    brand = _BRAND_ZH.search(text) if chinese else None
    split = _SPLIT_ZH if chinese else _SPLIT_EN
    name = noun.group(1).strip() if noun else ""
    return Wish(
        text=text,
        noun=name,
        attributes=_parts(wanted, split),
        options=_parts(options, split),
        budget=float(budget.group(1)) if budget else None,
        brand=brand.group(1).strip() if brand else "",
        persona_brands=_persona_values(persona, ("品牌", "brand")),
        persona_attributes=tuple(
            word
            for word in _persona_values(persona, ("关键词", "搜索", "search", "keyword", "interest"))
            if word != name
        ),
        persona_options=_persona_values(persona, ("规格", "颜色", "尺码", "option", "colour", "color", "size")),
    )


def _parts(match: re.Match[str] | None, split: re.Pattern[str]) -> tuple[str, ...]:
    if match is None:
        return ()
    return tuple(part.strip() for part in split.split(match.group(1)) if part.strip())


def _persona(message: str) -> dict[str, Any]:
    label = _PERSONA_LABEL.search(message)
    brace = message.find("{", label.end()) if label else -1
    if brace < 0:
        return {}
    try:
        value, _ = json.JSONDecoder().raw_decode(message, brace)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _persona_values(persona: dict[str, Any], words: tuple[str, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for key, value in persona.items():
        if any(word in str(key).lower() for word in words):
            values = value if isinstance(value, list) else [value]
            found += [item.strip() for item in values if isinstance(item, str) and item.strip()]
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=1024)
def skills_section(system_message: str) -> str:
    """The text below the skills label of the system message; empty when there is none."""
    label = _SKILLS_LABEL.search(system_message)
    return system_message[label.end() :] if label else ""


def observation_of(message: str) -> str:
    """The observation inside a first user message (after its label), or the whole text of a tool message."""
    label = _OBSERVATION_LABEL.search(message)
    return message[label.end() :] if label else message


def read_page(text: str) -> Page:
    """Parse an observation text."""
    head = text.lstrip()[:12]
    if head.startswith("页面：搜索结果"):
        numbers = _PAGES.search(text)
        rows = tuple(
            Row(m[3], m[2], _first_number(m[4]), f"{m[2]}\n{m[5]}\n{m[7]}".lower()) for m in _RESULT.finditer(text)
        )
        page, pages = (int(numbers[1]), int(numbers[2])) if numbers else (1, 1)
        return Page("results", rows=rows, page=page, pages=pages)
    if head.startswith("页面：商品详情"):
        return _detail(text)
    if head.startswith("页面：搜索首页"):
        return Page("home")
    return Page("other")


def _detail(text: str) -> Page:
    facts = dict(_FIELD.findall(text.partition("规格选择：")[0]))
    options = text.partition("规格选择：")[2].partition("上次交互结果：")[0]
    price = facts.get("价格", "")
    numbers = _NUMBER.findall(price)
    haystack = "\n".join(facts.get(key, "") for key in ("标题", "品牌", "关键属性")).lower()
    row = Row(facts.get("ASIN", ""), facts.get("标题", ""), _first_number(price), haystack)
    selected = {m[1]: m[2] for m in _AXIS.finditer(options)}
    final = len(numbers) == 1 and all(value is not None for value in selected.values())
    return Page("detail", rows=(row,), price=row.low, price_is_final=final, selected=selected)


def _first_number(text: str) -> float | None:
    match = _NUMBER.search(text)
    return float(match[0]) if match else None
