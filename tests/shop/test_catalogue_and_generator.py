"""Loading products, and generating them."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from rayrl.errors import DataError
from rayrl.shop.catalogue import build_catalogue, catalogue_hash, load_products
from rayrl.shop.generator import FAMILY, generate_catalogue
from rayrl.shop.pages import Shop
from rayrl.shop.pricing import resolve_price
from rayrl.shop.reward import attribute_matches, option_matches, purchase_reward
from rayrl.shop.text import option_label, token_set_ratio
from rayrl.shop.vocabulary import BRANDS, CATEGORIES, COLOURS

from .conftest import PRODUCTS
from .shoppers import careful, careless, play

PINNED_HASH = "c9ba68c0f092bad0f0ae530515e8e06759f461c73a014d356b57ab701a50a1f9"

GOOD: dict[str, Any] = {
    "asin": "123456",
    "title": "台灯",
    "shop_name": "Luma",
    "category": "a›b",
    "pricing": [1.5],
    "attribute": ["护眼"],
    "instructions": [{"task_id": 3, "instruction": "台灯", "attributes": ["护眼"]}],
}


def test_the_recorded_catalogue() -> None:
    catalogue = build_catalogue(load_products(PRODUCTS))
    assert len(catalogue.products) == 300
    assert sorted(catalogue.tasks) == list(range(0, 120, 2))
    assert sum(bool(task.persona) for task in catalogue.tasks.values()) == 30
    assert catalogue.sha256 == catalogue_hash(json.loads(PRODUCTS.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"asin": "12"}, "product 0: asin '12'"),
        ({"asin": None}, "asin must be a non-empty text"),
        ({"title": "  "}, "product 0 .*: title must be a non-empty text"),
        ({"pricing": ["7"]}, "pricing must hold numbers"),
        ({"pricing": [True]}, "pricing must hold numbers"),
        ({"pricing": [-1]}, "pricing must hold numbers"),
        ({"attribute": "护眼"}, "attribute must be a list of texts"),
        ({"customization_options": []}, "customization_options must be an object"),
        ({"customization_options": {"c": []}}, "customization_options\\['c'\\] must be a non-empty list"),
        ({"customization_options": {"c": [{"price": 1}]}}, "holds a value without text"),
        ({"customization_options": {"c": [{"value": "x", "price": "1"}]}}, "price that is no number"),
        ({"user_persona": "u1"}, "user_persona must be an object or null"),
        ({"instructions": {}}, "instructions must be a list"),
        ({"instructions": ["x"]}, "instruction 0: must be an object"),
        ({"instructions": [{"attributes": ["a"], "instruction": "x"}]}, "instruction 0: task_id must be an integer"),
        ({"instructions": [{"attributes": ["a"], "task_id": "3", "instruction": "x"}]}, "task_id must be an integer"),
        ({"instructions": [{"attributes": ["a"], "task_id": 3}]}, "instruction must be a non-empty text"),
        (
            {"instructions": [{"attributes": ["a"], "task_id": 3, "instruction": "x", "price_upper": "9"}]},
            "price_upper must be a number or null",
        ),
        (
            {"instructions": [{"attributes": ["a"], "task_id": 3, "instruction": "x", "instruction_options": [1]}]},
            "instruction_options must be a list of texts",
        ),
        ({"instructions": []}, "no product carries a task"),
        ({"instructions": [{"attributes": [], "instruction": "x"}]}, "no product carries a task"),
    ],
)
def test_a_wrong_product_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^shop.json.*{message}"):
        build_catalogue([{**GOOD, **change}], source="shop.json")


def test_doubled_ids_are_named() -> None:
    with pytest.raises(DataError, match="product 1: task_id 3 occurs twice"):
        build_catalogue([GOOD, {**GOOD, "asin": "654321"}])
    with pytest.raises(DataError, match="product 1: asin '123456' occurs twice"):
        build_catalogue([GOOD, GOOD])


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("{}", "non-empty list"), ("[]", "non-empty list"), ("[1]", "product 0: must be an object")],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "products.json"
    file.write_text(content)
    with pytest.raises(DataError, match=f"{file.name}.*{message}"):
        load_products(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json cannot be read"):
        load_products(tmp_path / "absent.json")


def test_products_whose_price_hangs_on_two_axes_are_dropped() -> None:
    values = [{"value": "x", "price": 1}, {"value": "y", "price": 2}]
    double = {**GOOD, "asin": "654321", "instructions": [], "customization_options": {"a": values, "b": values}}
    catalogue = build_catalogue([GOOD, double])
    assert (list(catalogue.products), catalogue.dropped) == (["123456"], 1)


def test_goal_options_may_be_an_object() -> None:
    task = {**GOOD["instructions"][0], "instruction_options": {"颜色": "黑"}}
    assert build_catalogue([{**GOOD, "instructions": [task]}]).tasks[3].options == ("黑",)


def test_the_hash_sees_every_change_and_refuses_nan() -> None:
    assert catalogue_hash([GOOD]) != catalogue_hash([{**GOOD, "title": "灯"}])
    assert catalogue_hash([GOOD]) == catalogue_hash([dict(reversed(GOOD.items()))])
    with pytest.raises(DataError, match="canonical"):
        catalogue_hash([{**GOOD, "pricing": [float("nan")]}])


# ---- generator


def test_the_generator_is_a_function_of_size_and_seed() -> None:
    assert generate_catalogue(100, 5) == generate_catalogue(100, 5)
    hashes = {catalogue_hash(generate_catalogue(n, seed)) for n in (100, 101) for seed in (0, 1, 2)}
    assert len(hashes) == 6
    # pinned: the fingerprint of every experiment on a generated shop hangs on it
    assert catalogue_hash(generate_catalogue(24, 0)) == PINNED_HASH


def test_too_small_is_refused() -> None:
    with pytest.raises(DataError, match="at least 12"):
        generate_catalogue(11)
    assert len(build_catalogue(generate_catalogue(12)).products) == 12


@pytest.fixture(scope="module")
def raw() -> list[dict[str, Any]]:
    return generate_catalogue(1200, 0)


@pytest.fixture(scope="module")
def shop(raw: list[dict[str, Any]]) -> Shop:
    return Shop(build_catalogue(raw))


def test_every_task_can_be_solved(shop: Shop) -> None:
    """The target satisfies its own task with the asked options and the cheapest of the others."""
    for task in shop.catalogue.tasks.values():
        target = shop.catalogue.products[task.asin]
        selected = {}
        for axis, values in target.axes.items():
            fits = [v for v in values if any(option_matches(goal, {axis: v.label}) for goal in task.options)]
            assert len(fits) <= 1, (task, axis)
            selected[axis] = (fits or sorted(values, key=lambda v: v.price or 0))[0].label
        detail = purchase_reward(task, target, target, selected)
        assert detail["r_success"] == 1, (task, detail)


def test_catalogue_shape(raw: list[dict[str, Any]], shop: Shop) -> None:
    assert shop.catalogue.dropped == 0
    assert len({p["category"] for p in raw}) == 12
    ids = sorted(shop.catalogue.tasks)
    assert ids[-1] > len(ids) * 1.2, "task ids have holes"
    personas = [t.persona["用户ID"] for t in shop.catalogue.tasks.values() if t.persona]
    assert 0.3 < len(personas) / len(ids) < 0.7
    assert len(set(personas)) < 0.6 * len(personas), "users are shared by tasks"
    assert max(personas.count(user) for user in set(personas)) < 20
    english = [t for t in shop.catalogue.tasks.values() if t.instruction.startswith("I want")]
    assert 0.1 < len(english) / len(ids) < 0.4
    assert sum(t.price_upper is not None for t in shop.catalogue.tasks.values()) == len(ids)


def test_families_are_near_identical(raw: list[dict[str, Any]]) -> None:
    place = 12 * FAMILY
    members = raw[place : place + 12 * FAMILY : 12]
    assert len({p["shop_name"] for p in members}) == 1
    attributes = [frozenset(p["attribute"]) for p in members]
    assert all(len(a ^ b) <= 4 for a, b in combinations(attributes, 2))
    assert len(set(attributes)) > 1
    assert len({p["title"] for p in members}) == FAMILY


def test_persona_tasks_hide_what_the_persona_tells(shop: Shop) -> None:
    for task in shop.catalogue.tasks.values():
        if not task.persona:
            continue
        told = {*task.persona["最近14天搜索关键词"], *task.persona["规格偏好"], *task.persona["品牌偏好"]}
        assert set(task.attributes) | set(task.options) <= told
        assert not any(attribute in task.instruction_simple for attribute in task.attributes)


def test_variants_differ_in_price_and_some_exceed_the_budget(shop: Shop) -> None:
    tempting = 0
    for task in shop.catalogue.tasks.values():
        target = shop.catalogue.products[task.asin]
        prices = [
            resolve_price(target.pricing, target.axes, {axis: v.label})["price"]
            for axis, values in target.axes.items()
            for v in values
        ]
        limit = task.price_upper or 0.0
        tempting += any(price is not None and price > limit for price in prices)
    assert tempting > 0.5 * len(shop.catalogue.tasks)


def test_no_word_can_be_mistaken_for_another() -> None:
    for category in CATEGORIES:
        words = [text for word in category.attributes for text in (word.zh, word.en)]
        pairs = [
            (a, b) for one, two in combinations(category.attributes, 2) for a in (one.zh, one.en) for b in (two.both,)
        ]
        for a, b in pairs:
            assert token_set_ratio(a, b) <= 85 and a.lower() not in b.lower(), (a, b)
        for text in words:
            for other in (*BRANDS, category.noun.both, *(c.both for c in COLOURS)):
                assert text.lower() not in other.lower(), (text, other)
        for one, two in combinations(category.sizes, 2):
            assert token_set_ratio(option_label(one), option_label(two)) <= 85
    for left, right in combinations(COLOURS, 2):
        for text in (left.zh, left.en):
            assert token_set_ratio(option_label(text), option_label(right.both)) <= 85


def test_a_product_has_exactly_the_attributes_it_lists(shop: Shop) -> None:
    by_noun = {category.noun.zh: category for category in CATEGORIES}
    for product in list(shop.catalogue.products.values())[:300]:
        category = next(c for noun, c in by_noun.items() if noun in product.title)
        for word in category.attributes:
            assert attribute_matches(word.zh, product) == (word.both in product.attributes)


@pytest.mark.parametrize("persona", [False, True])
def test_care_pays(shop: Shop, persona: bool) -> None:
    """A shopper that reads everything clearly beats one that takes the first hit, for reasons the components show."""
    ids = [t.task_id for t in shop.catalogue.tasks.values() if bool(t.persona) == persona][:150]
    results = {
        f.__name__: [play(shop, i, f, persona=persona)["reward_detail"] for i in ids] for f in (careless, careful)
    }
    success = {name: sum(r["r_success"] for r in rows) / len(rows) for name, rows in results.items()}
    assert success["careful"] > 0.85
    assert (success["careless"] < 0.2) if persona else (0.2 < success["careless"] < 0.6)
    fails = {k: sum(r[k] < 1 for r in results["careless"]) for k in ("r_att", "r_option", "r_price")}
    assert fails["r_price"] > 10 and fails["r_option"] > 10
    assert fails["r_att"] > 10 or not persona
