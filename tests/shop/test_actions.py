"""The action grammar."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.shop.actions import Action, BadAction, parse_action


@pytest.mark.parametrize(
    ("text", "kind", "argument"),
    [
        ("search[红色 台灯]", "search", "红色 台灯"),
        ("  click[buy now]\n", "click", "buy now"),
        ("Thought: hmm\nAction: search[电饭煲 智能预约]", "search", "电饭煲 智能预约"),
        ("Thought: hmm\\nAction: click[next >]", "click", "next >"),
        ("Action: click[颜色分类=rose | gold]", "click", "颜色分类=rose | gold"),
        ("search[a\n b]", "search", "a b"),
        ("search[brackets [inside] too]", "search", "brackets [inside] too"),
        ("search[what search[ means]", "search", "what search[ means"),
        ("search[x\nAction: click[y]", "search", "x Action: click[y"),
        ("click[Buy Now]", "click", "Buy Now"),
    ],
)
def test_one_command(text: str, kind: str, argument: str) -> None:
    parsed = parse_action(text)
    assert isinstance(parsed, Action)
    assert (parsed.kind, parsed.argument, parsed.canonical) == (kind, argument, f"{kind}[{argument}]")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "invalid_format"),
        ("finish", "invalid_format"),
        ("search", "invalid_format"),
        ("search[x", "invalid_format"),
        ("search x]", "invalid_format"),
        ("Search[x]", "invalid_format"),
        ("buy[x]", "invalid_format"),
        ("I would search[x] now", "invalid_format"),
        ("search[x] and then some", "invalid_format"),
        ("Thought: a\nsearch[x]", "invalid_format"),
        ("Action: finish", "invalid_format"),
        ("click[黑色], click[白色]", "multiple_actions_not_allowed"),
        ("search[a] click[b]", "multiple_actions_not_allowed"),
        ("search[a]\nclick[b]", "multiple_actions_not_allowed"),
        ("search[a] then click[b] please", "multiple_actions_not_allowed"),
        ("Action: search[a]\nAction: search[b]", "multiple_actions_not_allowed"),
        ("search[]", "empty_argument"),
        ("search[  ]", "empty_argument"),
        ("click[]", "empty_argument"),
    ],
)
def test_no_command(text: str, reason: str) -> None:
    parsed = parse_action(text)
    assert isinstance(parsed, BadAction)
    assert parsed.reason == reason


@pytest.mark.parametrize(
    "text",
    [
        "search[" + "] " * 200_000,
        "search[a]" + " " * 400_000 + "x",
        "Action:" + " " * 400_000 + "x",
        "]" * 400_000,
        "search[" + "[" * 400_000 + "]",
        "Action: a\n" * 100_000,
    ],
    ids=["brackets", "spaces", "action spaces", "closing", "opening", "lines"],
)
def test_long_texts_take_linear_time(text: str) -> None:
    """Quadratic matching would need minutes here, and stop every episode of the server."""
    parse_action(text)


@settings(deadline=None)
@given(
    st.text(alphabet=st.sampled_from("searchclick[]Action: \n\\n,，台灯<r>=xyz"), max_size=80) | st.text(max_size=80)
)
def test_every_text_is_parsed_and_canonical_forms_are_stable(text: str) -> None:
    parsed = parse_action(text)
    assert parse_action(text) == parsed
    assert "\n" not in parsed.canonical
    if isinstance(parsed, Action):
        assert parsed.argument == parsed.argument.strip() != ""
        assert parse_action(parsed.canonical) == parsed


@settings(deadline=None)
@given(st.text(min_size=1, max_size=40).filter(lambda t: t.strip() and "]" not in t and "[" not in t))
def test_any_words_without_brackets_are_searched_for(words: str) -> None:
    parsed = parse_action(f"search[{words}]")
    assert isinstance(parsed, Action)
    assert parsed.argument.split() == words.split()
