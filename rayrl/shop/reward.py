"""The reward of a purchase, component by component.

With goal G, bought product P and chosen options S:

* ``r_type`` 1 if two nodes of the category path agree or more than 0.2 of the goal title's nouns occur in P's title; 0
  if none does, 0.1 below 0.1, else 0.5. Nouns are latin tokens and Han bigrams; a goal title without any counts as a
  share of 0.2.
* ``r_att`` share of goal attributes found in P; ``r_option`` share of goal options found in S (1 if none are asked).
* ``r_price`` 1 without a budget, or if the chosen variant's price can be decided and is within it; else 0.
* ``r_strict`` the product of the four (this is *the* reward), ``r_loose`` ``r_type * (hits + r_price) / (wanted + 1)``,
  ``r_success`` 1 iff all four are 1.

Invariants: pure; whether P is the very target is reported, never rewarded.
"""

from __future__ import annotations

import re
from typing import Any

from rayrl.shop.catalogue import Product, Task
from rayrl.shop.pricing import resolve_price
from rayrl.shop.text import option_label, terms, token_set_ratio
from rayrl.shop.versions import REWARD_VERSION

FUZZY_THRESHOLD = 85.0
_CATEGORY_SEPARATOR = re.compile(r"[›>/|»→]+")


def zero_reward(reason: str) -> dict[str, Any]:
    """``reward_detail`` of an episode that ended without a purchase."""
    return {
        "price_verifiable": False,
        "r_att": 0.0,
        "r_loose": 0.0,
        "r_option": 0.0,
        "r_price": 0.0,
        "r_strict": 0.0,
        "r_success": 0,
        "r_type": 0.0,
        "reward_version": REWARD_VERSION,
        "target_asin_match": False,
        "termination_reason": reason,
    }


def purchase_reward(task: Task, goal_product: Product, bought: Product, selected: dict[str, str]) -> dict[str, Any]:
    """``reward_detail`` of buying ``bought`` with options ``selected`` (axis -> value, normal form)."""
    category_match = len(_nodes(goal_product.category) & _nodes(bought.category)) >= 2
    title_score = noun_share(goal_product.title, bought.title)
    r_type = type_score(category_match, title_score)

    attributes = sum(attribute_matches(goal, bought) for goal in task.attributes)
    r_att = attributes / len(task.attributes) if task.attributes else 1.0

    options = sum(option_matches(goal, selected) for goal in task.options)
    r_option = options / len(task.options) if task.options else 1.0

    resolution = resolve_price(bought.pricing, bought.axes, selected)
    verifiable = resolution["status"] == "pass"
    if task.price_upper is None:
        r_price = 1.0
    else:
        r_price = 1.0 if verifiable and resolution["price"] <= task.price_upper else 0.0

    wanted = len(task.attributes) + len(task.options) + 1
    r_strict = r_type * r_att * r_option * r_price
    return {
        "category_match": category_match,
        "num_attr_matches": attributes,
        "num_option_matches": options,
        "price_resolution": resolution,
        "price_upper": task.price_upper,
        "price_verifiable": verifiable,
        "r_att": r_att,
        "r_loose": r_type * (attributes + options + r_price) / wanted,
        "r_option": r_option,
        "r_price": r_price,
        "r_strict": r_strict,
        "r_success": int(r_type == r_att == r_option == r_price == 1.0),
        "r_type": r_type,
        "reward_version": REWARD_VERSION,
        "target_asin_match": bought.asin == task.asin,
        "termination_reason": "purchase",
        "title_score": title_score,
    }


def type_score(category_match: bool, title_score: float) -> float:
    """``r_type`` from its two ingredients."""
    if category_match or title_score > 0.2:
        return 1.0
    if title_score == 0.0:
        return 0.0
    return 0.1 if title_score < 0.1 else 0.5


def noun_share(goal_title: str, title: str) -> float:
    """Share of the goal title's distinct terms that the other title has; 0.2 if the goal has none."""
    wanted = set(terms(goal_title))
    if not wanted:
        return 0.2
    return len(wanted & set(terms(title))) / len(wanted)


def attribute_matches(goal: str, product: Product) -> bool:
    """Whether a goal attribute is among the product's (fuzzily) or literally in its text."""
    if any(token_set_ratio(goal, own) > FUZZY_THRESHOLD for own in product.attributes):
        return True
    return goal.lower() in product.text


def option_matches(goal: str, selected: dict[str, str]) -> bool:
    """Whether some chosen option value is the goal value (fuzzily, in normal form)."""
    wanted = option_label(goal)
    return any(token_set_ratio(wanted, value) > FUZZY_THRESHOLD for value in selected.values())


def _nodes(category: str) -> set[str]:
    return {node.strip() for node in _CATEGORY_SEPARATOR.split(category) if node.strip()}
