"""Wanted against bought: which part of a wish a purchase missed, as the reward counted it."""

from rayrl.studio.pages.runs.wish import brand_of, goal_of, wish_of

GOAL = {
    "asin": "7001",
    "name": "Luma secret mat",
    "category": "a›b›mat",
    "attributes": ["天然橡胶", "带绑带", "Luma"],
    "goal_options": ["黑色", "8毫米"],
    "instruction_text": "a Luma mat, black, 8 mm, within 61",
    "price_upper": 61.0,
}
PURCHASE = {
    "name": "千叶 mat",
    "category": "a›b›mat",
    "price": 311.37,
    "attributes": ["天然橡胶 natural rubber", "带绑带 with strap"],
    "options": {"颜色分类": "雾霾蓝 haze blue", "尺码": "8毫米"},
}
DETAIL = {
    "r_type": 1.0,
    "r_att": 2 / 3,
    "r_option": 0.5,
    "r_price": 0.0,
    "num_attr_matches": 2,
    "num_option_matches": 1,
}


def verdicts(final, goal=GOAL):
    return {(row["part"], row["wanted"]): row["ok"] for row in wish_of(goal, final)["rows"]}


def test_each_part_is_met_or_missed_as_the_reward_counted_it():
    found = verdicts({"purchase": PURCHASE, "reward_detail": DETAIL})
    assert [k[1] for k, ok in found.items() if ok is False] == ["Luma", "黑色", "≤ 61"]
    assert all(ok is True for (_, wanted), ok in found.items() if wanted not in ("Luma", "黑色", "≤ 61"))


def test_what_the_record_cannot_tell_stays_undecided():
    # the reward found the brand in a text the record does not hold; one of two more hits would be a guess
    bare = {**PURCHASE, "attributes": []}
    found = verdicts({"purchase": bare, "reward_detail": DETAIL})
    assert found["attribute", "Luma"] is None and found["attribute", "天然橡胶"] is None
    full = verdicts({"purchase": bare, "reward_detail": {**DETAIL, "num_attr_matches": 3, "r_att": 1.0}})
    assert full["attribute", "Luma"] is True


def test_without_a_purchase_or_with_odd_shapes_nothing_is_claimed():
    assert set(verdicts({"purchase": {}, "reward_detail": {}}).values()) == {None}
    assert wish_of({"attributes": "x", "price_upper": "y"}, {"purchase": [], "reward_detail": 3})["rows"]


def test_beside_an_attribute_or_brand_stands_what_answers_it():
    final = {"purchase": PURCHASE, "reward_detail": DETAIL}
    shown = {row["wanted"]: row["bought"] for row in wish_of(GOAL, final, "千叶旗舰店")["rows"]}
    assert shown["天然橡胶"] == "天然橡胶 natural rubber"
    assert shown["Luma"].startswith("千叶 mat; 千叶旗舰店; 天然橡胶")  # missed: what was bought instead, with its brand
    met = wish_of({**GOAL, "attributes": ["千叶"]}, final)["rows"]
    assert next(row["bought"] for row in met if row["part"] == "attribute") == "千叶 mat"


def test_the_brand_is_that_of_the_page_of_the_bought_product():
    pages = ["商品 12\n- 品牌：A旗舰店\n- 价格：3", "商品 13\n- 品牌：B\n"]
    record = {"steps": [{"observation": {"text": text}} for text in pages] + [{"observation": None}]}
    assert brand_of(record, "12") == "A旗舰店" and brand_of(record, "13") == "B"
    assert brand_of(record, "14") is None and brand_of({}, None) is None


def test_the_product_the_goal_was_made_from_is_not_shown():
    shown = str(wish_of(GOAL, {"purchase": PURCHASE, "reward_detail": DETAIL}))
    assert "7001" not in shown and "secret" not in shown


def test_the_newest_goal_of_the_episode_is_read(tmp_path):
    lines = [b'{"episode_id":"a","goal":{"n":1}}', b"{torn a", b'{"episode_id":"ab","goal":{"n":2}}',
             b'{"episode_id":"a","goal":{"n":3}}', b'{"episode_id":"a","goal":4}']  # fmt: skip
    (tmp_path / "private.jsonl").write_bytes(b"\n".join(lines))
    assert goal_of(tmp_path, "a") == {"n": 3}
    assert goal_of(tmp_path / "none", "a") is None
