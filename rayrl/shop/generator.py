"""A catalogue of any size out of a seed: products in near-identical families, personas, tasks with budget and options.

What makes careless shopping fail, and what a careful shopper can see on the pages:

* families of four products share brand and title words; members differ in one attribute, in price, or in the colours
  offered, which only the key attributes, the price and the option list show;
* a task asks for attributes of which at least one is not in the target's title;
* the budget lies just above the target variant, so most look-alikes and many variants of the target are too dear;
  variants differ in price along exactly one axis, and their order says nothing about the price;
* the short instruction of a persona task leaves out attributes, options and brand: they stand in the persona.

Invariants: a pure function of (n, seed); every task can be solved (its target satisfies it); task ids have holes; user
ids are shared by several persona tasks, so that splits have groups to keep together.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

from rayrl.errors import DataError
from rayrl.shop.catalogue import RawProduct
from rayrl.shop.vocabulary import (
    AGES,
    BRANDS,
    CATEGORIES,
    COLOUR_AXIS,
    COLOURS,
    SIZE_AXIS,
    STYLES,
    Category,
    Word,
)

FAMILY = 4
"""Products in a family of look-alikes."""

_FIRST_ASIN = 700_000_000_000
_TASK_SHARE = 0.6
_PERSONA_SHARE = 0.5
_ENGLISH_SHARE = 0.25
_ABOUT_SHARE = 0.1


def generate_catalogue(n: int, seed: int = 0) -> list[RawProduct]:
    """Make ``n`` products in the public JSON format.

    Args:
        n: number of products, at least one per category (12).
        seed: any integer; the same (n, seed) gives the same list.

    Raises:
        DataError: ``n`` is too small.
    """
    if n < len(CATEGORIES):
        raise DataError(f"a catalogue needs at least {len(CATEGORIES)} products (one per category), not {n}")
    rng = Random(f"rayrl-shop:{seed}")
    families: dict[int, dict[str, Any]] = {}
    products: list[RawProduct] = []
    for index in range(n):
        number, place = divmod(index, len(CATEGORIES))
        category = CATEGORIES[place]
        member = number % FAMILY
        if member == 0:
            families[place] = _family(rng, category)
        products.append(_product(rng, index, category, families[place], member))
    _add_tasks(rng, products)
    return products


def _family(rng: Random, category: Category) -> dict[str, Any]:
    """What the members have in common. The first two attributes stand in the title."""
    return {
        "brand": rng.choice(BRANDS),
        "attributes": rng.sample(category.attributes, 4),
        "letter": rng.choice("ABDHKMQTXZ"),
        "number": rng.randrange(10, 90),
        # log-uniform: as many cheap products as dear ones
        "price": category.low * (category.high / category.low) ** rng.random(),
        "colours": rng.sample(COLOURS, rng.randint(3, 5)) if rng.random() < 0.9 else [],
        "sizes": list(category.sizes),
        "price_axis": SIZE_AXIS if category.sizes and rng.random() < 0.35 else COLOUR_AXIS,
        "step": rng.uniform(0.08, 0.16),
    }


def _product(rng: Random, index: int, category: Category, family: dict[str, Any], member: int) -> RawProduct:
    attributes: list[Word] = list(family["attributes"])
    price = family["price"] * rng.uniform(0.97, 1.03)
    colours: list[Word] = list(family["colours"])
    if member in (1, 3):
        others = [word for word in category.attributes if word not in attributes]
        attributes[rng.choice((2, 3))] = rng.choice(others)
    if member == 2:
        price = family["price"] * rng.uniform(1.2, 1.6)
    if member == 3 and len(colours) > 2:
        colours.pop(rng.randrange(len(colours)))
    base = round(price, 2)
    code = f"{family['letter']}{family['number'] + member}"
    in_title = "".join(word.zh for word in attributes[:2])
    title = f"{family['brand']}{in_title}{category.noun.zh} {code} {category.noun.en}"
    shown = attributes[:]
    rng.shuffle(shown)
    options = _options(rng, base, colours, family)
    prices = sorted({value["price"] for values in options.values() for value in values}) or [base]
    return {
        "asin": str(_FIRST_ASIN + index * 37),
        "title": title,
        "shop_name": f"{family['brand']}旗舰店",
        "category": category.path,
        "product_category": category.path,
        "pricing": [prices[0]] if len(prices) == 1 else [prices[0], prices[-1]],
        "customization_options": options,
        "attribute": [word.both for word in shown],
        "full_description": title,
        "images": [""],
        "source_product_index": index,
        "reason_key": None,
        "user_persona": None,
        "instructions": [],
    }


def _options(rng: Random, base: float, colours: list[Word], family: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    axes: dict[str, list[str]] = {}
    if colours:
        axes[COLOUR_AXIS] = [colour.both for colour in colours]
    if family["sizes"]:
        axes[SIZE_AXIS] = family["sizes"]
    bearing = family["price_axis"] if family["price_axis"] in axes else next(iter(axes), None)
    out: dict[str, list[dict[str, Any]]] = {}
    for axis, values in axes.items():
        steps = list(range(len(values)))
        rng.shuffle(steps)
        out[axis] = [
            {
                "value": value,
                "price": round(base * (1 + family["step"] * step), 2) if axis == bearing else base,
                "image": None,
            }
            for value, step in zip(values, steps, strict=True)
        ]
    return out


def _add_tasks(rng: Random, products: list[RawProduct]) -> None:
    task_id = 0
    users = max(1, round(len(products) * _TASK_SHARE * _PERSONA_SHARE / 2.5))
    ages = [rng.choice(AGES) for _ in range(users)]
    styles = [rng.choice(STYLES) for _ in range(users)]
    for place, product in enumerate(products):
        if place and rng.random() >= _TASK_SHARE:
            continue
        persona = rng.random() < _PERSONA_SHARE
        for _ in range(1 if persona or rng.random() < 0.9 else 2):
            english = rng.random() < _ENGLISH_SHARE
            goal = _goal(rng, product, english=english, persona=persona)
            if persona:
                user = rng.randrange(users)
                product["user_persona"] = {
                    "用户ID": f"u{user}",
                    "年龄段": ages[user],
                    "风格偏好": styles[user],
                    "品牌偏好": [goal["brand"]],
                    "最近14天搜索关键词": [goal["noun"], *goal["wanted"]],
                    "规格偏好": list(goal["options"].values()),
                }
            product["instructions"].append(_instruction(rng, product, goal, task_id, english=english))
            task_id += rng.choice((1, 1, 2, 3))


def _goal(rng: Random, product: RawProduct, *, english: bool, persona: bool) -> dict[str, Any]:
    """Attributes, options and budget that the product satisfies. Words come in the language of the task."""
    category = CATEGORIES[product["source_product_index"] % len(CATEGORIES)]
    by_both = {word.both: word for word in category.attributes}
    own = [by_both[text] for text in product["attribute"]]
    hidden = [word for word in own if word.zh not in product["title"]]
    first = rng.choice(hidden)
    rest = rng.sample([word for word in own if word is not first], 1 if persona else rng.choice((1, 2)))
    wanted = [word.en if english else word.zh for word in (first, *rest)]
    rng.shuffle(wanted)
    options: dict[str, str] = {}
    price = product["pricing"][0]
    for axis, values in product["customization_options"].items():
        asked = rng.random() < (0.75 if axis == COLOUR_AXIS else 0.5)
        # what is not asked for is the shopper's choice, and the budget then allows the cheapest only
        chosen = rng.choice(values) if asked else min(values, key=lambda value: float(value["price"]))
        if asked:
            options[axis] = _option_word(chosen["value"], english)
        if len({value["price"] for value in values}) > 1:
            price = chosen["price"]
    return {
        "brand": product["shop_name"].removesuffix("旗舰店"),
        "noun": category.noun.en if english else category.noun.zh,
        "wanted": wanted,
        "options": options,
        "budget": math.ceil(price * rng.uniform(1.005, 1.06)),
        "persona": persona,
    }


def _option_word(value: str, english: bool) -> str:
    """One language of a bilingual option value; a size stays as it is."""
    zh, _, en = value.partition(" ")
    return en if english and en else zh


def _instruction(
    rng: Random, product: RawProduct, goal: dict[str, Any], task_id: int, *, english: bool
) -> dict[str, Any]:
    about = rng.random() < _ABOUT_SHARE
    budget, options = goal["budget"], list(goal["options"].values())
    brand = goal["brand"] if goal["persona"] else ""
    if english:
        limit = f"around {budget} yuan" if about else f"within {budget} yuan"
        spec = f", option {', '.join(options)}" if options else ""
        what = f"{brand} {goal['noun']}" if brand else goal["noun"]
        full = f"I want to buy a {what} with {', '.join(goal['wanted'])}{spec}, {limit}."
        simple = f"Looking for a {goal['noun']}, {limit}"
    else:
        limit = f"{budget}元左右" if about else f"{budget}元以内"
        spec = f"，规格{'、'.join(options)}" if options else ""
        what = f"{brand}的{goal['noun']}" if brand else goal["noun"]
        full = f"我想买一个{what}，要{'、'.join(goal['wanted'])}{spec}，预算{limit}。"
        simple = f"想买{goal['noun']}，{limit}"
    return {
        "instruction": full,
        "instruction_simple": simple,
        "attributes": [*goal["wanted"], *([brand] if brand else [])],
        "instruction_options": options,
        # half the tasks state the budget as a number, half only in words
        "price_upper": float(budget) if not about and rng.random() < 0.5 else None,
        "task_uid": f"gen-{product['source_product_index']}-{task_id}",
        "task_id": task_id,
    }
