"""The text of a page, from its ``observation_state`` alone.

Invariant: nothing private can be rendered, because nothing private reaches this module: a state that holds a goal,
reward or answer key is refused.
"""

from __future__ import annotations

from typing import Any

FORBIDDEN = frozenset({"goal", "reward", "reward_detail", "target_asin", "answer", "goal_options", "private_goal"})


def render(state: dict[str, Any]) -> str:
    """Observation text of a state.

    Raises:
        ValueError: the state holds private keys, or is of no known page type.
    """
    if not FORBIDDEN.isdisjoint(state):
        raise ValueError(f"refusing to render a state that holds {sorted(FORBIDDEN & state.keys())}")
    match state["page_type"]:
        case "search_home":
            return f"页面：搜索首页\n{_last_action(state)}\n页面能力：\n- 支持商品搜索\n"
        case "search_results":
            return f"{_results(state)}{_last_action(state)}{_clickable(state)}"
        case "product_detail":
            return f"{_detail(state)}{_last_action(state)}{_clickable(state)}"
        case "terminal":
            return f"页面：任务已终止\n不能再执行操作。\n{_last_action(state)}{_clickable(state)}"
        case other:
            raise ValueError(f"unknown page type {other!r}")


def _results(state: dict[str, Any]) -> str:
    head = (
        f"页面：搜索结果\n搜索词：{state['search_text']}\n"
        f"结果：第 {state['page']}/{state['total_pages']} 页，共 {state['total_results']} 项，"
        f"当前显示排名 {state['rank_start']}-{state['rank_end']}\n\n商品列表：\n"
    )
    if not state["products"]:
        return f"{head}（没有找到商品）\n"
    return head + "".join(
        f"{p['rank']}. {p['title']}\n   ASIN：{p['asin']}\n   价格：{p['price']}\n   品牌：{p['brand']}\n"
        f"   类别：{p['category']}\n   关键属性：{'；'.join(p['key_attributes'])}\n"
        for p in state["products"]
    )


def _detail(state: dict[str, Any]) -> str:
    product = state["product"]
    price = state.get("selected_price", product["price"])
    lines = [
        "页面：商品详情",
        "商品：",
        f"- 标题：{product['title']}",
        f"- ASIN：{product['asin']}",
        f"- 价格：{price}",
        f"- 品牌：{product['brand']}",
        f"- 类别：{product['category']}",
        f"- 关键属性：{'；'.join(product['key_attributes'])}",
        "",
        "规格选择：",
    ]
    for axis, values in state["available_options"].items():
        chosen = state["selected_options"].get(axis)
        lines.append(f"- {axis}：已选择 {chosen}" if chosen is not None else f"- {axis}：尚未选择")
        lines.append(f"  可选值：{' / '.join(values)}")
    if state["missing_option_axes"]:
        lines.append(f"仍需选择：{'、'.join(state['missing_option_axes'])}")
    elif state["available_options"]:
        lines.append("规格状态：已选择全部规格，可以购买")
    else:
        lines.append("规格状态：无需选择规格，可以购买")
    return "\n".join(lines) + "\n"


def _last_action(state: dict[str, Any]) -> str:
    last = state.get("last_action")
    if not last:
        return ""
    result = "成功" if last["valid"] else "无效"
    code = "" if last["valid"] else f"- 原因代码：{last['reason']}\n"
    return f"\n上次交互结果：\n- 结果：{result}\n- 说明：{last['message']}\n{code}"


def _clickable(state: dict[str, Any]) -> str:
    if not state["actions"]:
        return "\n当前页面没有可交互元素。\n"
    return "\n可点击元素：\n" + "".join(f"- {label}\n" for label in state["actions"])
