"""The shop as a pure state machine: (page, action) -> (page, feedback).

Pages are values: a search home, a page of results, a product with chosen options, the end. Which page one is on is its
type, never a guess from text. Invariants: no I/O, no clock, no randomness; a page and a shop determine everything that
may be clicked, in display order (:func:`clickable`); an action that changes nothing says why in its feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rayrl.shop.actions import Action, BadAction
from rayrl.shop.catalogue import Catalogue, Product
from rayrl.shop.pricing import price_axes, resolve_price
from rayrl.shop.search import SearchIndex
from rayrl.shop.text import normalise
from rayrl.shop.versions import MAX_OPTION_VALUES, OBSERVATION_VERSION, PAGE_SIZE

_LONGEST_CACHED = 512
"""Characters of a query whose pages are kept."""

BACK = "back to search"
PREV = "< prev"
NEXT = "next >"
BUY = "buy now"


@dataclass(frozen=True, slots=True)
class Home:
    """The search page."""


@dataclass(frozen=True, slots=True)
class Results:
    """Page ``page`` (1-based) of the ranking of ``query``."""

    query: str
    ranking: tuple[str, ...]
    page: int


@dataclass(frozen=True, slots=True)
class Detail:
    """A product. ``selected`` holds (axis, value) in the order of the product's axes; ``origin`` is where prev
    leads."""

    asin: str
    selected: tuple[tuple[str, str], ...]
    origin: Results


@dataclass(frozen=True, slots=True)
class Terminal:
    """After a purchase."""

    asin: str
    selected: tuple[tuple[str, str], ...]


Page = Home | Results | Detail | Terminal


@dataclass(frozen=True, slots=True)
class Feedback:
    """What became of an action; ``missing`` names option axes that still need a choice."""

    action: str
    valid: bool
    reason: str
    message: str
    missing: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The protocol's form."""
        out: dict[str, Any] = {
            "action": self.action,
            "message": self.message,
            "reason": self.reason,
            "valid": self.valid,
        }
        if self.missing:
            out["missing_option_axes"] = list(self.missing)
        return out


class Shop:
    """A catalogue with its search index and the page rules.

    Args:
        catalogue: what is sold.
        page_size: products on a page of results.
        max_query_length: longest query in characters that is searched, ``None`` for any.
    """

    def __init__(
        self, catalogue: Catalogue, *, page_size: int = PAGE_SIZE, max_query_length: int | None = None
    ) -> None:
        self.catalogue = catalogue
        self.page_size = page_size
        self.max_query_length = max_query_length
        self._index = SearchIndex(list(catalogue.products.values()))
        self._results_view = lru_cache(maxsize=4096)(self._make_results_view)

    def step(self, page: Page, action: Action | BadAction) -> tuple[Page, Feedback]:
        """Apply ``action``. An impossible one leaves the page as it is."""
        if isinstance(action, BadAction):
            return page, Feedback(action.canonical, False, action.reason, action.message)
        if action.kind == "search":
            return self._search(page, action)
        return self._click(page, action)

    def _search(self, page: Page, action: Action) -> tuple[Page, Feedback]:
        if not isinstance(page, Home):
            return page, Feedback(action.canonical, False, "search_unavailable", "当前页面不提供搜索操作")
        if self.max_query_length is not None and len(action.argument) > self.max_query_length:
            message = f"search[...] 的关键词不能超过 {self.max_query_length} 个字符"
            return page, Feedback(action.canonical, False, "query_too_long", message)
        ranking = self._index.search(action.argument)
        return Results(action.argument, ranking, 1), Feedback(action.canonical, True, "executed", "搜索已执行")

    def _click(self, page: Page, action: Action) -> tuple[Page, Feedback]:
        value = action.argument
        done = Feedback(action.canonical, True, "executed", "点击已执行")
        match page:
            case Results():
                if value == BACK:
                    return Home(), done
                if value == PREV and page.page > 1:
                    return Results(page.query, page.ranking, page.page - 1), done
                if value == NEXT and page.page < self.total_pages(page):
                    return Results(page.query, page.ranking, page.page + 1), done
                if value.upper() in self.shown(page):
                    return Detail(value.upper(), (), page), done
            case Detail():
                if value == BACK:
                    return Home(), done
                if value == PREV:
                    return page.origin, done
                return self._click_detail(page, action, done)
            case _:
                pass
        return page, _unavailable(action)

    def _click_detail(self, page: Detail, action: Action, done: Feedback) -> tuple[Page, Feedback]:
        value = action.argument
        product = self.catalogue.products[page.asin]
        chosen = dict(page.selected)
        if value == BUY:
            missing = tuple(axis for axis in product.axes if axis not in chosen)
            if missing:
                message = f"购买前还需选择规格轴：{'、'.join(missing)}"
                return page, Feedback(action.canonical, False, "incomplete_options", message, missing)
            return Terminal(page.asin, page.selected), Feedback(action.canonical, True, "executed", "购买已执行")
        for axis, values in product.axes.items():
            for option in values[:MAX_OPTION_VALUES]:
                if value != f"{axis}={option.label}":
                    continue
                if chosen.get(axis) == option.label:
                    return page, Feedback(action.canonical, False, "already_selected", f"该规格已经选中：{value}")
                chosen[axis] = option.label
                selected = tuple((name, chosen[name]) for name in product.axes if name in chosen)
                return Detail(page.asin, selected, page.origin), done
        return page, _unavailable(action)

    def total_pages(self, page: Results) -> int:
        """At least 1: an empty ranking still has its one, empty, page."""
        return max(1, -(-len(page.ranking) // self.page_size))

    def shown(self, page: Results) -> tuple[str, ...]:
        """Asins on this page of results, in rank order."""
        start = (page.page - 1) * self.page_size
        return page.ranking[start : start + self.page_size]

    def clickable(self, page: Page) -> list[str]:
        """Everything that may be clicked, in display order."""
        match page:
            case Results():
                ends = (
                    [BACK] + ([PREV] if page.page > 1 else []) + ([NEXT] if page.page < self.total_pages(page) else [])
                )
                return ends + list(self.shown(page))
            case Detail():
                product = self.catalogue.products[page.asin]
                chosen = dict(page.selected)
                buy = [BUY] if len(chosen) == len(product.axes) else []
                options = [
                    f"{axis}={option.label}"
                    for axis, values in product.axes.items()
                    for option in values[:MAX_OPTION_VALUES]
                    if chosen.get(axis) != option.label
                ]
                return [BACK, PREV, *buy, *options]
            case _:
                return []

    def state(self, page: Page, feedback: Feedback | None) -> dict[str, Any]:
        """``observation_state`` of a page, fresh at top level (its product rows are shared: do not edit them)."""
        match page:
            case Home():
                out: dict[str, Any] = {"page_type": "search_home", "search_available": True, "actions": []}
            case Results():
                short = len(page.query) <= _LONGEST_CACHED
                out = dict(self._results_view(page) if short else self._make_results_view(page))
            case Detail():
                out = self._detail_state(page)
            case Terminal():
                out = {"page_type": "terminal", "search_available": False, "actions": []}
        out["observation_version"] = OBSERVATION_VERSION
        if feedback is not None:
            out["last_action"] = feedback.as_dict()
        return out

    def _make_results_view(self, page: Results) -> dict[str, Any]:
        shown = self.shown(page)
        start = (page.page - 1) * self.page_size
        return {
            "page_type": "search_results",
            "search_available": False,
            "actions": self.clickable(page),
            "search_text": page.query,
            "normalized_search_text": normalise(page.query),
            "page": page.page,
            "total_pages": self.total_pages(page),
            "total_results": len(page.ranking),
            "rank_start": start + 1 if shown else 0,
            "rank_end": start + len(shown),
            "products": [
                {**self.catalogue.products[asin].summary, "rank": start + offset}
                for offset, asin in enumerate(shown, start=1)
            ],
        }

    def _detail_state(self, page: Detail) -> dict[str, Any]:
        product = self.catalogue.products[page.asin]
        chosen = dict(page.selected)
        missing = [axis for axis in product.axes if axis not in chosen]
        out: dict[str, Any] = {
            "page_type": "product_detail",
            "search_available": False,
            "actions": self.clickable(page),
            "product": product.summary,
            "selected_options": chosen,
            "available_options": {
                axis: [option.label for option in values[:MAX_OPTION_VALUES]] for axis, values in product.axes.items()
            },
            "missing_option_axes": missing,
            "options_complete": not missing,
        }
        price = self._selected_price(product, chosen)
        if price is not None:
            out["selected_price"] = price
        return out

    def _selected_price(self, product: Product, chosen: dict[str, str]) -> int | float | None:
        """The variant's price once the axis that bears on it is chosen; ``None`` where no axis does."""
        if not chosen or not price_axes(product.axes):
            return None
        price: int | float | None = resolve_price(product.pricing, product.axes, chosen)["price"]
        return price


def _unavailable(action: Action) -> Feedback:
    return Feedback(action.canonical, False, "unavailable_action", f"当前页面不存在可点击项：{action.argument}")
