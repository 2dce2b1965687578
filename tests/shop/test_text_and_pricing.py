"""Terms, labels, fuzzy likeness, prices and budgets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.shop.pricing import Axes, OptionValue, budget_in_text, display_price, price_upper, resolve_price
from rayrl.shop.text import option_label, terms, token_set_ratio


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("电饭煲", ["电饭", "饭煲"]),
        ("米", ["米"]),
        ("LumaIH加热 Z25", ["lumaih", "加热", "z25"]),
        ("Ｌuma　台灯", ["luma", "台灯"]),
        ("蓝牙5.3", ["蓝牙", "5", "3"]),
        ("search_results", ["search", "results"]),
        ("<r>", ["r"]),
        ("…！ ", []),
    ],
)
def test_terms(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


@pytest.mark.parametrize(
    ("raw", "label"),
    [(" Rose/Gold ", "rose | gold"), ("墨绿", "墨绿"), ("XL", "xl"), ("a / b", "a | b"), ("a  b", "a b")],
)
def test_option_labels(raw: str, label: str) -> None:
    assert option_label(raw) == label
    assert option_label(label) == label or "|" in label


# reference values computed with rapidfuzz 3.14 (fuzz.token_set_ratio, default_process)
@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("fuzzy was a bear", "fuzzy fuzzy was a bear", 100.0),
        ("防滑", "防滑 anti slip", 100.0),
        ("rose | gold", "玫瑰金 rose | gold", 100.0),
        ("墨绿", "墨绿", 100.0),
        ("墨绿", "墨蓝", 50.0),
        ("", "x", 0.0),
        ("!!", "!!", 0.0),
        ("new york mets", "new york yankees", 76.19),
        ("great is scala", "java is great", 81.48),
        ("l", "xl", 66.67),
        ("haze blue", "navy blue", 66.67),
    ],
)
def test_token_set_ratio(left: str, right: str, expected: float) -> None:
    assert token_set_ratio(left, right) == pytest.approx(expected, abs=0.01)


@settings(deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_token_set_ratio_is_symmetric_and_bounded(left: str, right: str) -> None:
    ratio = token_set_ratio(left, right)
    assert 0.0 <= ratio <= 100.0
    assert ratio == pytest.approx(token_set_ratio(right, left))


def axes(**values: dict[str, float | None]) -> Axes:
    return {name: tuple(OptionValue(label, price) for label, price in row.items()) for name, row in values.items()}


COLOUR = {"red": 10.0, "blue": 12.0}
SIZE = {"s": 10.0, "m": 10.0}


@pytest.mark.parametrize(
    ("pricing", "options", "selected", "method", "price"),
    [
        ((5.0,), {}, {}, "single_listing_price", 5.0),
        ((5.0, 6.0), {}, {}, "price_not_deterministic", None),
        ((), {}, {}, "price_not_deterministic", None),
        ((10.0, 12.0), {"c": COLOUR}, {"c": "blue"}, "selected_price_axis", 12.0),
        ((10.0, 12.0), {"c": COLOUR, "s": SIZE}, {"s": "m"}, "price_axis_unselected", None),
        ((10.0, 12.0), {"c": COLOUR, "s": SIZE}, {"c": "red", "s": "m"}, "selected_price_axis", 10.0),
        ((10.0,), {"s": SIZE}, {"s": "m"}, "constant_option_price", 10.0),
        ((10.0,), {"s": {"s": None}}, {"s": "s"}, "single_listing_price", 10.0),
        ((10.0, 12.0), {"c": {**COLOUR, "odd": None}}, {"c": "odd"}, "selected_variant_price_missing", None),
        ((10.0, 12.0), {"c": COLOUR, "d": COLOUR}, {"c": "red", "d": "red"}, "multiple_price_affecting_axes", None),
        ((10.0, 12.0), {"c": COLOUR}, {"c": "green"}, "invalid_selected_options", None),
        ((10.0, 12.0), {"c": COLOUR}, {"x": "red"}, "invalid_selected_options", None),
    ],
)
def test_resolve_price(pricing: Any, options: Any, selected: dict[str, str], method: str, price: float | None) -> None:
    resolution = resolve_price(pricing, axes(**options), selected)
    assert (resolution["method"], resolution["price"]) == (method, price)
    assert resolution["status"] == ("pass" if price is not None else "unverifiable")


@pytest.mark.parametrize(
    ("pricing", "text"),
    [((825.64,), "825.64"), ((2.0, 1.5), "1.5 to 2.0"), ((3, 3), "3"), ((), ""), ((693.7,), "693.7")],
)
def test_display_price(pricing: Any, text: str) -> None:
    assert display_price(pricing) == text


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("想买乳胶枕，841元以内", 841.0),
        ("要316不锈钢，预算99.5元以内", 99.5),
        ("within 336 yuan.", 336.0),
        ("¥120 以内", 120.0),
        ("预算200元左右", 220.0),
        ("大约 200 元", 220.0),
        ("around 200 yuan", 220.0),
        ("约200元", 220.0),
        ("一个316杯子", None),
        ("", None),
    ],
)
def test_budget_in_text(text: str, limit: float | None) -> None:
    assert budget_in_text(text) == limit


def test_the_budget_comes_from_the_field_then_the_simple_then_the_full_instruction() -> None:
    assert price_upper(50, "60元以内", "70元以内") == 50.0
    assert price_upper(None, "60元以内", "70元以内") == 60.0
    assert price_upper(None, "便宜", "70元以内") == 70.0
    assert price_upper(None, "便宜", "便宜") is None
