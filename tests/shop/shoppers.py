"""Two shoppers that read only public state: a careless one and a careful one. They show that the shop tells skill
apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rayrl.shop.pages import Shop
from rayrl.shop.session import ShopEpisode
from rayrl.shop.vocabulary import CATEGORIES, COLOURS

State = dict[str, Any]


def play(shop: Shop, task_id: int, shopper: Any, *, persona: bool) -> dict[str, Any]:
    episode = ShopEpisode(shop, shop.catalogue.tasks[task_id], interaction_mode="single_turn", persona=persona)
    start = episode.start()
    turns: Iterator[str] = shopper(start["task_instruction"], start["user_persona"] if persona else {}, box := [start])
    for text in turns:
        result = episode.interact(text)
        box[0] = result
        if result["done"]:
            return result
    return episode.terminate("generation_length")


def careless(instruction: str, persona: State, box: list[State]) -> Iterator[str]:
    """Searches for the instruction as it is, takes the first hit, picks options it was told or the first, never
    looks at prices."""
    yield f"search[{instruction}]"
    products = box[0]["observation_state"]["products"]
    if not products:
        return
    yield f"click[{products[0]['asin']}]"
    yield from choose(box, instruction)
    yield "click[buy now]"


def choose(box: list[State], wanted: str) -> Iterator[str]:
    for axis, values in box[0]["observation_state"]["available_options"].items():
        named = [v for v in values if asked_for(v, wanted)]
        yield f"click[{axis}={(named or values)[0]}]"


def asked_for(value: str, text: str) -> bool:
    """Whether one language of a bilingual value, or a size as a whole word, is in the text."""
    text = text.lower().replace("/", " | ")
    zh, _, en = value.partition(" ")
    if re.fullmatch(r"[a-z0-9]+", zh):
        return re.search(rf"(?<![\w]){re.escape(zh)}(?!\w)", text.replace("、", " ").replace("，", " ")) is not None
    return zh in text or (bool(en) and en in text)


def careful(instruction: str, persona: State, box: list[State]) -> Iterator[str]:
    """Reads instruction and persona, checks attributes, brand and price of each hit, chooses options within the
    budget."""
    words = (
        instruction
        + " "
        + " ".join([*persona.get("最近14天搜索关键词", []), *persona.get("规格偏好", []), *persona.get("品牌偏好", [])])
    )
    limit = float(re.search(r"(\d+)\s*(?:元|yuan)", instruction).group(1))  # type: ignore[union-attr]
    category = next(c for c in CATEGORIES if c.noun.zh in words or c.noun.en in words)
    wanted = [w for w in category.attributes if w.zh in words or f" {w.en}" in words]
    brand = next(iter(persona.get("品牌偏好", [])), None) or named_brand(instruction)
    colours = [c.zh for c in COLOURS if c.zh in words or c.en in words]
    yield f"search[{' '.join(filter(None, [brand, category.noun.zh, *(w.zh for w in wanted), *colours]))}]"
    for _ in range(5):
        state = box[0]["observation_state"]
        for product in state["products"]:
            key = " ".join(product["key_attributes"])
            low = float(product["price"].split(" to ")[0])
            if (
                low > limit
                or not all(w.zh in key for w in wanted)
                or (brand and not product["title"].startswith(brand))
            ):
                continue
            yield f"click[{product['asin']}]"
            yield from within_budget(box, words, limit)
            detail = box[0]["observation_state"]
            price = detail.get("selected_price") or float(detail["product"]["price"].split(" to ")[0])
            if detail["options_complete"] and price <= limit and options_ok(detail, words):
                yield "click[buy now]"
                return
            yield "click[< prev]"
        if "next >" not in state["actions"]:
            return
        yield "click[next >]"


def within_budget(box: list[State], words: str, limit: float) -> Iterator[str]:
    for axis, values in box[0]["observation_state"]["available_options"].items():
        named = [v for v in values if asked_for(v, words)]
        for value in named or values:
            yield f"click[{axis}={value}]"
            if (box[0]["observation_state"].get("selected_price") or 0.0) <= limit:
                break


def options_ok(detail: State, words: str) -> bool:
    colour = detail["selected_options"].get("颜色分类")
    asked = [c for c in COLOURS if c.zh in words or c.en in words]
    return not asked or (colour is not None and asked_for(colour, words))


def named_brand(instruction: str) -> str | None:
    found = re.search(r"买一个(\S+?)的|buy a ([A-Z沐北云千青木]\S*) ", instruction)
    return next((g for g in found.groups() if g), None) if found else None
