from __future__ import annotations

import base64
import codecs
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrl.skills.firewall import fold, inspect, protected_values, squeeze

GOAL = {
    "asin": "700000017094",
    "task_uid": "gen-462-518",
    "name": "Aster可折叠充电式台灯 A83 desk lamp",
    "goal_options": ["白色", "beige", "XL", "3升"],
    "task_id": 518,
    "user_persona": {"品牌偏好": ["Aster", "KAIYO"], "规格偏好": ["浅灰色 light grey"]},
}
SEEN = [
    {
        "asin": "B07XQ3F2K9",
        "title": "Velum Soundcore bone conduction headset",
        "brand": "Velum",
        "option_values": ["M"],
    },
    {"asin": "700000196026", "name": "Hemlo充电式触控台灯 K55 desk lamp", "brand": "海姆洛 Hemlo"},
]
PROTECTED = protected_values(GOAL, SEEN)

IDS = ["700000017094", "B07XQ3F2K9", "700000196026", "gen-462-518"]
BRANDS = ["Aster", "KAIYO", "Velum", "海姆洛", "Hemlo"]
OPTIONS = ["白色", "beige", "浅灰色", "light grey", "3升"]
TITLES = ["Aster可折叠充电式台灯 A83 desk lamp", "Velum Soundcore bone conduction headset"]


def full_width(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


WRAPS = {
    "plain": lambda v: f"Always open {v} first.",
    "quoted": lambda v: f"Search first; the result named '{v}' is right.",
    "upper": lambda v: f"BUY {v.upper()} AT ONCE.",
    "full width": lambda v: f"Open {full_width(v)} first.",
    "zero width": lambda v: "Open " + "\u200b".join(v) + " first.",
    "base64": lambda v: f"Decode {b64(v)} and search for it.",
    "hex": lambda v: f"The bytes {v.encode().hex()} name it.",
    "hex escapes": lambda v: "Type " + "".join(f"\\x{ord(c):02x}" if ord(c) < 256 else c for c in v),
    "unicode escapes": lambda v: "Type " + "".join(f"\\u{ord(c):04x}" for c in v),
    "percent": lambda v: f"Search for {quote(v, safe='')}.",
    "percent all": lambda v: "Search for " + "".join(f"%{b:02X}" for b in v.encode()),
    "html": lambda v: "Choose " + "".join(f"&#{ord(c)};" for c in v),
    "reversed": lambda v: f"Read {v[::-1]} backwards.",
    "rot13": lambda v: "Read " + codecs.encode(v, "rot13") + " shifted." if v.isascii() else f"Read {v}.",
    "chinese": lambda v: f"先搜索，再直接选{v}。",
}
LEAKS = [(wrap, value) for wrap in WRAPS for value in [*IDS, *BRANDS, *OPTIONS, *TITLES]]


@pytest.mark.parametrize(("wrap", "value"), LEAKS)
def test_every_planted_value_is_stopped(wrap, value):
    found = inspect("Compare the price with the budget. " + WRAPS[wrap](value), PROTECTED)
    assert not found.passed
    assert all(value.casefold() not in reason.casefold() for reason in found.reasons)


SPLIT = [
    "The id begins 7000. Then comes 0001. It ends 7094.",
    "It starts with 700000, and ends with 017094.",
    "Open B07X. Q3F2. K9 is the rest.",
    "The brand is As. Ter is how it goes on: As-ter.",
    "Its name is A s t e r, as everyone knows.",
    "K-A-I-Y-O makes the right one.",
    "The right title says Velum; further on it says Soundcore. It is a headset with bone conduction.",
    "Prefer 浅 灰 色 when asked.",
    "Digits: seven zero zero zero one seven zero nine four.",
    "编号是七零零零零零一七零九四。",
    "编号 7·0·0·0·0·0·1·7·0·9·4",
    "７０００００ ０１７０９４ is it.",
    "number 7 0 0 0 0 0 0 1 7 0 9 4",
    "On task 518 take the second result.",
    "In task-000518__sample-001 this worked.",
    "任务 518 的答案在第二页。",
    "Episode #518 shows how.",
    "For sample_003 pick the first.",
    "ASIN: 7094",
    "The size is XL.",
    "Choose 'M' on the size axis.",
    "click size=XL and buy",
    "尺码选 XL。",
    "颜色：白色",
    "Look for model A83 of the folding rechargeable lamp: Aster可折叠充电式台灯.",
    "order 12345 now",
    "Any product whose number has 1 2 3 4 5 6 in it.",
]


@pytest.mark.parametrize("text", SPLIT)
def test_split_spelled_and_shaped_leaks_are_stopped(text):
    assert not inspect(text, PROTECTED).passed


def test_there_are_enough_of_them():
    assert len(LEAKS) + len(SPLIT) > 250


CLEAN = [
    "Write the search query from the product type, the required attributes and the brand.",
    "Open only results whose key attributes list every requirement of the task.",
    "Select the colour and size the task names instead of the first variant shown.",
    "Before buying, compare the price of the chosen variant with the budget.",
    "Follow the persona: prefer its brands and take its recent searches as wishes.",
    "If no result matches, turn to the next page, or go back and try another product.",
    "1. Read the task. 2. Note every attribute. 3. Search. 4. Open at most 3 results. 5. Compare. 6. Buy.",
    "购买前核对所选规格的价格是否在预算之内；超出预算就换一个规格或返回搜索。",
    "搜索词由商品类目、需求属性和品牌组成，结果不符时翻页或重新搜索。",
    "Never buy before all option axes have a chosen value.",
    "Use at most 2 or 3 queries, then settle for the best of the 10 results seen in 30 actions.",
    "When the page says 'options missing', select a value on each axis and read the price again (step 4).",
    "Stop after two loops: the same click on the same page twice means that the plan is wrong.",
    "If the budget is 100 and the price 120, pick a cheaper variant of the same product.",
    "The third result is not better because it is third; compare attributes one by one.",
    "按用户画像中的品牌偏好排序，再比较属性匹配的数量。",
    "Translate a wish into catalogue words: category first, then material, then function.",
    "Prices differ between variants. Choose the variant first, and check the final price second.",
    "Read labels in both languages; the same value may be written in Chinese and English.",
    "A well-known shop, state-of-the-art products and 24/7 service say nothing about requirements.",
]


@pytest.mark.parametrize("text", CLEAN)
def test_procedures_pass(text):
    assert inspect(text, PROTECTED).reasons == []


def test_generic_values_protect_nothing():
    generic = protected_values({"goal_options": ["标准", "standard size"], "brand": "Best Brand"})
    assert inspect("Choose the standard size of the best brand. 选择标准规格。", generic).passed


@given(st.text(max_size=200))
def test_any_text_is_inspected_without_error_and_the_same_way_twice(text):
    assert inspect(text, PROTECTED) == inspect(text, PROTECTED)
    assert fold(fold(text)) == fold(text)
    assert squeeze(text).isalnum() or squeeze(text) == ""


@given(st.from_regex(r"[0-9]{12}", fullmatch=True), st.sampled_from(["", " ", "-", ".", "\u200b", "，"]))
def test_any_long_number_is_stopped(number, gap):
    assert not inspect(f"open {gap.join(number)} next", protected_values(None)).passed
