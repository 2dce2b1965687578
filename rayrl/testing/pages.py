"""Pages of a small synthetic shop (text, structured state, tools), for generated traces only."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rayrl.schemas import JsonDict

VERSION = "shopping-observation-v7"
_KINDS = ("电饭煲", "保温杯", "台灯", "背包", "耳机", "键盘")
_BRANDS = ("Luma", "Nordik", "KAIYO", "千叶", "木石", "北辰", "云栖", "青禾")
_TRAITS = ("智能预约", "大容量", "静音", "防水", "便携", "复古")
_COLOURS = ("墨绿", "黑色", "rose | gold", "米白")


@dataclass(frozen=True)
class Page:
    """What the policy sees."""

    text: str
    state: JsonDict


def make_catalogue(seed: int, *, per_kind: int = 60) -> list[JsonDict]:
    """Deterministic products: asin, title, brand, category, attributes, one option axis with a price per value."""
    rng = random.Random(f"catalogue:{seed}")
    out: list[JsonDict] = []
    for kind in _KINDS:
        for _ in range(per_kind):
            brand, traits = rng.choice(_BRANDS), rng.sample(_TRAITS, 3)
            model = f"{rng.choice('ABKXZ')}{rng.randint(10, 99)}"
            values = rng.sample(_COLOURS, 3)
            base = rng.uniform(30, 900)
            out.append(
                {
                    "asin": f"7{len(out):011d}",
                    "title": f"{brand}{traits[0]}{kind} {model} {traits[1]} {traits[2]}",
                    "brand": brand,
                    "category": f"家居›{kind}",
                    "attributes": traits,
                    "axis": "颜色分类",
                    "values": values,
                    "prices": {value: round(base + 10 * n, 2) for n, value in enumerate(values)},
                }
            )
    return out


def _card(product: JsonDict, price: str | None = None) -> JsonDict:
    low, high = min(product["prices"].values()), max(product["prices"].values())
    return {
        "asin": product["asin"],
        "title": product["title"],
        "brand": f"{product['brand']}旗舰店",
        "category": product["category"],
        "price": price or f"{low} to {high}",
        "key_attributes": product["attributes"],
    }


def _lines(card: JsonDict) -> str:
    return (
        f"{card['title']}\n   ASIN：{card['asin']}\n   价格：{card['price']}\n   品牌：{card['brand']}\n"
        f"   类别：{card['category']}\n   关键属性：{'；'.join(card['key_attributes'])}\n"
    )


def _page(text: str, state: dict[str, Any], actions: list[str]) -> Page:
    full = {"observation_version": VERSION, "search_available": False, **state, "actions": actions}
    clickable = "\n可点击元素：\n" + "".join(f"- {a}\n" for a in actions) if actions else ""
    return Page(text + clickable, full)


@lru_cache(maxsize=1)
def home_page() -> Page:
    """The search page."""
    state = {"page_type": "search_home", "search_available": True}
    return _page("页面：搜索首页\n\n页面能力：\n- 支持商品搜索\n", state, [])


def results_page(query: str, products: list[JsonDict]) -> Page:
    """One page of results, at most 20 products."""
    cards = [{**_card(p), "rank": n} for n, p in enumerate(products[:20], 1)]
    listing = "".join(f"{card['rank']}. {_lines(card)}" for card in cards)
    text = f"页面：搜索结果\n搜索词：{query}\n结果：第 1/2 页，共 30 项\n\n商品列表：\n{listing}"
    state = {
        "page_type": "search_results",
        "search_text": query,
        "normalized_search_text": query.casefold(),
        "page": 1,
        "total_pages": 2,
        "total_results": 30,
        "rank_start": 1,
        "rank_end": len(cards),
        "products": cards,
    }
    return _page(text, state, ["back to search", "next >", *(card["asin"] for card in cards)])


def detail_page(product: JsonDict, chosen: dict[str, str]) -> Page:
    """A product with its option axis; ``buy now`` appears once it is chosen."""
    axis, values = product["axis"], product["values"]
    price = str(product["prices"][chosen[axis]]) if axis in chosen else None
    card = _card(product, price)
    missing = [] if axis in chosen else [axis]
    text = f"页面：商品详情\n商品：\n- {_lines(card)}\n规格选择：\n- {axis}：{chosen.get(axis, '尚未选择')}\n"
    text += f"  可选值：{' / '.join(values)}\n"
    state: JsonDict = {
        "page_type": "product_detail",
        "product": card,
        "selected_options": chosen,
        "available_options": {axis: values},
        "missing_option_axes": missing,
        "options_complete": not missing,
    }
    if price:
        state["selected_price"] = price
    actions = ["back to search", "< prev", *(f"{axis}={v}" for v in values if chosen.get(axis) != v)]
    return _page(text, state, [*actions, "buy now"] if not missing else actions)


@lru_cache(maxsize=1)
def terminal_page() -> Page:
    """The page after a purchase."""
    return _page("页面：任务已终止\n不能再执行操作。\n", {"page_type": "terminal"}, [])


def tools_of(page: Page) -> list[JsonDict]:
    """The function tools of a page, as the runtime builds them."""

    def tool(name: str, key: str, schema: JsonDict, description: str) -> JsonDict:
        parameters = {
            "type": "object",
            "properties": {key: schema},
            "required": [key],
            "additionalProperties": False,
        }
        return {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        }

    tools = []
    if page.state["search_available"]:
        tools.append(tool("search", "query", {"type": "string"}, "Search the shop for products."))
    values = page.state["actions"] or ["buy now"]
    tools.append(tool("click", "value", {"type": "string", "enum": values}, "Click one of the listed elements."))
    return tools
