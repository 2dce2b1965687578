"""The page state machine, the text of pages, and the reward of a purchase."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrl.shop.actions import parse_action
from rayrl.shop.catalogue import Catalogue, build_catalogue
from rayrl.shop.generator import generate_catalogue
from rayrl.shop.pages import Detail, Home, Results, Shop, Terminal
from rayrl.shop.render import FORBIDDEN, render
from rayrl.shop.reward import noun_share, purchase_reward, type_score
from rayrl.shop.session import EpisodeOverError, ShopEpisode


def product(asin: str, title: str, **more: Any) -> dict[str, Any]:
    return {
        "asin": asin,
        "title": title,
        "shop_name": "Luma旗舰店",
        "category": "家居用品›灯具›台灯",
        "pricing": [100],
        "attribute": ["护眼"],
        "customization_options": {},
        **more,
    }


COLOURS = {
    "颜色": [{"value": "Red/Gold", "price": 90}, {"value": "黑", "price": 120}],
    "尺码": [{"value": "S", "price": 90}],
}
TASK = {
    "task_id": 7,
    "instruction": "我想买一个台灯，要护眼、触控，规格黑，预算120元以内。",
    "instruction_simple": "想买台灯，120元以内",
    "attributes": ["护眼", "触控"],
    "instruction_options": ["黑"],
}
RAW = [
    product(
        "100000",
        "Luma护眼台灯 A1 desk lamp",
        pricing=[90, 120],
        customization_options=COLOURS,
        attribute=["护眼", "触控"],
        instructions=[TASK],
        user_persona={"用户ID": "u1"},
    ),
    product("100001", "Luma台灯 A2 desk lamp 触控", attribute=["可折叠"]),
    product("100002", "沐川乳胶枕 P1 pillow", category="家居用品›床上用品›枕头", attribute=["护颈"]),
    *(product(f"2000{n:02}", f"Nord台灯 N{n} desk lamp") for n in range(10, 60)),
]
CATALOGUE: Catalogue = build_catalogue(RAW)
SHOP = Shop(CATALOGUE, page_size=20)


def walk(*actions: str) -> tuple[Any, Any]:
    page: Any = Home()
    feedback: Any = None
    for action in actions:
        page, feedback = SHOP.step(page, parse_action(action))
    return page, feedback


def test_a_purchase_from_the_first_page() -> None:
    page, feedback = walk("search[台灯 护眼]", "click[100000]")
    assert isinstance(page, Detail)
    assert SHOP.clickable(page) == ["back to search", "< prev", "颜色=red | gold", "颜色=黑", "尺码=s"]
    page, feedback = walk("search[台灯 护眼]", "click[100000]", "click[尺码=s]", "click[颜色=黑]")
    assert isinstance(page, Detail)
    # selections are listed in the product's order, whatever the order of clicks
    assert page.selected == (("颜色", "黑"), ("尺码", "s"))
    assert SHOP.clickable(page) == ["back to search", "< prev", "buy now", "颜色=red | gold"]
    assert SHOP.state(page, feedback)["selected_price"] == 120
    page, feedback = SHOP.step(page, parse_action("click[buy now]"))
    assert page == Terminal("100000", (("颜色", "黑"), ("尺码", "s")))
    assert SHOP.clickable(page) == []


def test_turning_pages() -> None:
    page, _ = walk("search[台灯]")
    assert isinstance(page, Results)
    assert SHOP.total_pages(page) == 3
    assert SHOP.clickable(page)[:2] == ["back to search", "next >"]
    page, _ = walk("search[台灯]", "click[next >]")
    assert SHOP.clickable(page)[:3] == ["back to search", "< prev", "next >"]
    page, feedback = walk("search[台灯]", "click[next >]", "click[next >]", "click[next >]")
    assert (feedback.valid, feedback.reason) == (False, "unavailable_action")
    assert SHOP.state(page, None)["rank_end"] == 52
    page, _ = walk("search[台灯]", "click[next >]", f"click[{SHOP.shown(page.__class__('台灯', page.ranking, 2))[0]}]")
    assert isinstance(page, Detail)
    back, _ = SHOP.step(page, parse_action("click[< prev]"))
    assert isinstance(back, Results) and back.page == 2


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        (["click[buy now]"], "unavailable_action"),
        (["click[back to search]"], "unavailable_action"),
        (["search[台灯]", "search[台灯]"], "search_unavailable"),
        (["search[台灯]", "click[100002]"], "unavailable_action"),
        (["search[台灯]", "click[< prev]"], "unavailable_action"),
        (["search[台灯]", "click[Back to search]"], "unavailable_action"),
        (["search[护眼]", "click[100000]", "click[buy now]"], "incomplete_options"),
        (["search[护眼]", "click[100000]", "click[颜色=红]"], "unavailable_action"),
        (["search[护眼]", "click[100000]", "click[黑]"], "unavailable_action"),
        (["search[护眼]", "click[100000]", "click[颜色=黑]", "click[颜色=黑]"], "already_selected"),
        (["search[护眼]", "click[100000]", "search[x]"], "search_unavailable"),
    ],
)
def test_impossible_actions_leave_the_page(actions: list[str], reason: str) -> None:
    before, _ = walk(*actions[:-1])
    after, feedback = walk(*actions)
    assert (feedback.valid, feedback.reason) == (False, reason)
    assert after == before


def test_a_product_without_options_can_be_bought_at_once() -> None:
    page, feedback = walk("search[触控]", "click[100001]")
    state = SHOP.state(page, feedback)
    assert state["actions"] == ["back to search", "< prev", "buy now"]
    assert "selected_price" not in state
    assert "无需选择规格" in render(state)


def test_an_empty_result_is_a_page() -> None:
    page, feedback = walk("search[zzz]")
    state = SHOP.state(page, feedback)
    assert (state["total_results"], state["total_pages"], state["rank_start"], state["products"]) == (0, 1, 0, [])
    assert state["actions"] == ["back to search"]
    assert "没有找到商品" in render(state)


def test_a_clicked_id_may_be_in_lower_case() -> None:
    shop = Shop(build_catalogue([product("AB1234", "台灯", instructions=[{**TASK, "attributes": ["护眼"]}])]))
    page, _ = shop.step(Home(), parse_action("search[台灯]"))
    page, feedback = shop.step(page, parse_action("click[ab1234]"))
    assert feedback.valid and isinstance(page, Detail)


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_private_keys_are_not_rendered(name: str) -> None:
    state = SHOP.state(Home(), None)
    with pytest.raises(ValueError, match=name):
        render({**state, name: "x"})


WORDS = st.sampled_from(
    [
        "search[台灯]",
        "search[护眼 触控]",
        "search[zzz]",
        "search[]",
        "click[next >]",
        "click[< prev]",
        "click[back to search]",
        "click[100000]",
        "click[颜色=黑]",
        "click[尺码=s]",
        "click[颜色=red | gold]",
        "click[buy now]",
        "nonsense",
    ]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(WORDS | st.integers(0, 30), max_size=35))
def test_what_is_listed_can_be_clicked_and_nothing_else(moves: list[str | int]) -> None:
    """Random walks: a listed element always works, an unlisted one never moves the page, the budget always ends it."""
    episode = ShopEpisode(SHOP, CATALOGUE.tasks[7], interaction_mode="single_turn", persona=False)
    state = episode.start()["observation_state"]
    for number, move in enumerate(moves, start=1):
        listed = state["actions"]
        text = f"click[{listed[move % len(listed)]}]" if isinstance(move, int) and listed else str(move)
        before = episode.page
        result = episode.interact(text)
        feedback = result["action_feedback"]
        click = text[6:-1] if text.startswith("click[") else None
        if click is not None:
            assert feedback["valid"] == (click in listed)
        assert feedback["valid"] or episode.page == before
        assert not FORBIDDEN & result["observation_state"].keys()
        assert result["goal"] == {}
        state = result["observation_state"]
        if result["done"]:
            assert number == 30 or result["termination_reason"] == "purchase"
            with pytest.raises(EpisodeOverError):
                episode.interact("search[x]")
            return
        assert number < 30


@pytest.mark.parametrize(("mode", "budget"), [("single_turn", 30), ("multi_turn", 40)])
def test_action_budgets(mode: str, budget: int) -> None:
    episode = ShopEpisode(SHOP, CATALOGUE.tasks[7], interaction_mode=mode, persona=False)
    results = [episode.interact("click[nope]") for _ in range(budget)]
    assert [r["done"] for r in results] == [False] * (budget - 1) + [True]
    assert results[-1]["reward_detail"]["r_success"] == 0
    assert results[-1]["termination_reason"] == "action_limit"


def test_the_persona_gets_the_short_instruction() -> None:
    task = CATALOGUE.tasks[7]
    assert (
        ShopEpisode(SHOP, task, interaction_mode="single_turn", persona=True).start()["task_instruction"]
        == (TASK["instruction_simple"])
    )
    full = ShopEpisode(SHOP, task, interaction_mode="single_turn", persona=False).start()
    assert (full["task_instruction"], full["task_mode"]) == (TASK["instruction"], "standard")


def reward(asin: str, selected: dict[str, str], task: dict[str, Any] | None = None) -> dict[str, Any]:
    raw = [dict(item) for item in RAW]
    raw[0]["instructions"] = [{**TASK, **(task or {})}]
    catalogue = build_catalogue(raw)
    goal = catalogue.tasks[7]
    return purchase_reward(goal, catalogue.products[goal.asin], catalogue.products[asin], selected)


def test_the_target_with_the_right_options_is_a_success() -> None:
    detail = reward("100000", {"颜色": "黑", "尺码": "s"})
    assert detail["r_success"] == 1 and detail["r_strict"] == detail["r_loose"] == 1.0
    assert detail["price_upper"] == 120.0 and detail["target_asin_match"]


def test_each_component_can_fail_alone() -> None:
    wrong_option = reward("100000", {"颜色": "red | gold", "尺码": "s"})
    assert (wrong_option["r_option"], wrong_option["r_price"], wrong_option["r_strict"]) == (0.0, 1.0, 0.0)
    assert wrong_option["r_loose"] == pytest.approx(3 / 4)
    too_dear = reward("100000", {"颜色": "黑", "尺码": "s"}, {"price_upper": 119.99})
    assert (too_dear["r_price"], too_dear["r_success"], too_dear["r_loose"]) == (0.0, 0, pytest.approx(3 / 4))
    # a substring of the title counts as an attribute, and one of two is half
    other = reward("100001", {}, {"instruction_options": []})
    assert (other["r_type"], other["r_att"], other["r_option"], other["r_price"]) == (1.0, 0.5, 1.0, 1.0)
    assert other["r_strict"] == pytest.approx(0.5) and other["target_asin_match"] is False
    pillow = reward("100002", {})
    assert (pillow["category_match"], pillow["r_type"], pillow["r_loose"]) == (False, 0.0, 0.0)


def test_an_undecided_price_fails_a_budget_but_not_its_absence() -> None:
    raw = [dict(item) for item in RAW]
    raw[1] = product("100001", "Luma台灯", pricing=[10, 20])
    catalogue = build_catalogue(raw)
    goal = catalogue.tasks[7]
    detail = purchase_reward(goal, catalogue.products["100000"], catalogue.products["100001"], {})
    assert (detail["r_price"], detail["price_verifiable"]) == (0.0, False)
    no_limit = {"instruction": "台灯", "instruction_simple": "台灯", "price_upper": None}
    assert reward("100001", {}, no_limit)["r_price"] == 1.0


@pytest.mark.parametrize(
    ("match", "share", "score"),
    [(True, 0.0, 1.0), (False, 0.21, 1.0), (False, 0.2, 0.5), (False, 0.1, 0.5), (False, 0.09, 0.1), (False, 0.0, 0.0)],
)
def test_type_score(match: bool, share: float, score: float) -> None:
    assert type_score(match, share) == score


def test_nouns_are_latin_tokens_and_han_bigrams() -> None:
    assert noun_share("台灯 lamp", "台灯") == 0.5
    assert noun_share("…", "台灯") == 0.2
    assert noun_share("电饭煲", "饭煲") == 0.5


def test_generated_options_are_reachable_by_their_labels() -> None:
    shop = Shop(build_catalogue(generate_catalogue(60, 1)))
    for item in shop.catalogue.products.values():
        page: Any = Detail(item.asin, (), Results("x", (item.asin,), 1))
        for axis, values in item.axes.items():
            page, feedback = shop.step(page, parse_action(f"click[{axis}={values[-1].label}]"))
            assert feedback.valid
        assert "buy now" in shop.clickable(page)
