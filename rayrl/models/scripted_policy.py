"""How the scripted shopper decides: a pure function of what it reads, its competences and, for slips, a random source.

Invariants: reads the public conversation only; the same conversation and seed give the same call; the call is always
one of the page's legal ones; a shopper low on actions settles for the best it can see instead of running out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random
from typing import Any

import orjson

from rayrl.models.scripted_prompt import Page, Row, Wish

MAX_PAGES = 3
MAX_SEARCHES = 3
MAX_OPENED = 7
SETTLE_AFTER = 22
"""Actions after which the shopper buys what it has; episodes are 30 actions long."""

_ASIN = re.compile(r"[0-9A-Z]{6,20}")


@dataclass
class Past:
    """What the shopper did so far, read from its own calls in the conversation."""

    actions: int = 0
    searches: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    """Option clicks on the product opened last."""


@dataclass(frozen=True)
class Move:
    """A decision and the reason for it."""

    tool: str
    argument: str
    why: str


def read_past(messages: list[dict[str, Any]]) -> Past:
    """Collect the shopper's own calls."""
    past = Past()
    for message in messages:
        if message["role"] != "assistant":
            continue
        past.actions += 1
        for call in message.get("tool_calls") or ():
            function = call["function"]
            try:
                arguments = orjson.loads(function["arguments"])
            except orjson.JSONDecodeError:
                continue
            if function["name"] == "search":
                past.searches.append(str(arguments.get("query", "")))
                continue
            value = str(arguments.get("value", ""))
            if "=" in value:
                past.tried.append(value)
            elif _ASIN.fullmatch(value):
                past.opened.append(value)
                past.tried = []
    return past


class Shopper:
    """One decision: the situation and the switched-on competences, behind small methods."""

    def __init__(self, wish: Wish, page: Page, past: Past, clickable: list[str], competences: frozenset[str]) -> None:
        self.page = page
        self.past = past
        self.clickable = clickable
        self.can = competences.__contains__
        self.wish = wish
        persona = self.can("persona_preference")
        self.attributes = _unique(*wish.attributes, *(wish.persona_attributes if persona else ()))
        self.options = _unique(*wish.options, *(wish.persona_options if persona else ()))
        self.brands = _unique(wish.brand, *(wish.persona_brands if persona else ()))

    def decide(self, *, search: bool) -> Move:
        """The next move on this page."""
        if self.page.kind == "detail":
            return self._on_detail()
        if self.page.kind == "results" and self.clickable:
            return self._on_results()
        if search:
            return self._on_home()
        return Move("click", self.clickable[0], "nothing else is offered")

    def slip(self, rng: Random) -> Move:
        """A hasty move: any result, any variant, or buying unchecked."""
        if "buy now" in self.clickable:
            return Move("click", "buy now", "hasty: buying without a further look")
        products = [row.asin for row in self.page.rows if row.asin in self.clickable]
        variants = [value for value in self.clickable if "=" in value]
        return Move("click", rng.choice(products or variants or self.clickable), "hasty: taking whatever is there")

    def _on_home(self) -> Move:
        if not self.can("query_formulation"):
            first = re.split(r"[，,。.；;]", self.wish.text, maxsplit=1)[0].strip()
            return Move("search", first or "商品", "searching with the first words of the task")
        noun = self.wish.noun or self.wish.text[:40]
        variants = [
            " ".join([*self.brands, noun, *self.attributes]),
            " ".join([noun, *self.attributes]),
            " ".join([noun, *self.attributes[:1]]),
            noun,
            self.wish.text[:40],
        ]
        query = variants[min(len(self.past.searches), len(variants) - 1)]
        return Move("search", query.strip() or "商品", "searching with category, attributes and brand")

    def _on_results(self) -> Move:
        fresh = [row for row in self.page.rows if row.asin not in self.past.opened]
        settling = self._settling()
        if not fresh and not settling:
            return self._leave_results("every result here was opened before")
        rows = list(self.page.rows) if settling or not fresh else fresh
        if not rows:
            return self._leave_results("no results")
        ranked = sorted(rows, key=self._score, reverse=True)
        if not self.can("attribute_check"):
            ranked = rows
        best = ranked[0]
        if self.can("attribute_check") and self.can("pagination") and not settling and not self._fits(best):
            return self._leave_results("no result on this page shows every wanted attribute within the budget")
        return Move(
            "click", best.asin, f"opening rank-best result, {self._hits(best)}/{len(self.attributes)} attributes"
        )

    def _leave_results(self, why: str) -> Move:
        if self.can("pagination") and "next >" in self.clickable and self.page.page < MAX_PAGES:
            return Move("click", "next >", f"{why}; next page")
        if "back to search" in self.clickable and len(self.past.searches) < MAX_SEARCHES and not self._settling():
            return Move("click", "back to search", f"{why}; another query")
        rows = sorted(self.page.rows, key=self._score, reverse=True)
        target = rows[0].asin if rows else self.clickable[0]
        return Move("click", target, f"{why}; settling for the best seen")

    def _on_detail(self) -> Move:
        for axis, value in self.page.selected.items():
            wanted = self._wanted_value(axis, value)
            if wanted is not None:
                return Move("click", f"{axis}={wanted}", f"the task asks for {wanted}")
        if not self._settling() and self._options_missing():
            return self._leave_detail("this product does not come in the wanted variant")
        open_axes = [axis for axis, value in self.page.selected.items() if value is None]
        if open_axes:
            values = self._values(open_axes[0])
            if values:
                return Move("click", f"{open_axes[0]}={values[0]}", "the task leaves this open")
        if self._too_dear() and not self._settling():
            other = self._untried()
            if other is not None:
                return Move("click", other, "above the budget; another variant may be cheaper")
            return self._leave_detail("every open variant is above the budget")
        if "buy now" in self.clickable:
            return Move("click", "buy now", f"price {self.page.price}, budget {self.wish.budget}")
        return self._leave_detail("this product cannot be bought")

    def _leave_detail(self, why: str) -> Move:
        leaves = self.can("pagination") and len(self.past.opened) < MAX_OPENED
        if leaves:
            for label in ("< prev", "back to search"):
                if label in self.clickable:
                    return Move("click", label, f"{why}; going back")
        if "buy now" in self.clickable:
            return Move("click", "buy now", f"{why}; buying anyway")
        for axis, value in self.page.selected.items():
            if value is None and (values := self._values(axis)):
                return Move("click", f"{axis}={values[0]}", f"{why}; going on anyway")
        return Move("click", self.clickable[0], f"{why}; nothing else is left")

    def _wanted_value(self, axis: str, chosen: str | None) -> str | None:
        """The value to click on this axis now, or None where the choice stands or the task leaves it open."""
        if not self.can("option_matching"):
            return None
        if chosen is not None and self._asked_for(chosen):
            return None
        asked = [value for value in self._values(axis) if self._asked_for(value)]
        if asked and f"{axis}={asked[0]}" not in self.past.tried:
            return asked[0]
        return None

    def _asked_for(self, label: str) -> bool:
        if self.options:
            return any(option_matches(option, label) for option in self.options)
        text = self.wish.text.lower()
        return any(len(part) > 1 and part in text for part in [label.lower(), *label.lower().split()])

    def _options_missing(self) -> bool:
        """Whether a wanted option is offered on no axis of this product."""
        if not self.can("option_matching") or not self.options:
            return False
        labels = [value for value in self.page.selected.values() if value]
        labels += [value.partition("=")[2] for value in self.clickable if "=" in value]
        return any(not any(option_matches(option, label) for label in labels) for option in self.options)

    def _values(self, axis: str) -> list[str]:
        prefix = f"{axis}="
        return [value[len(prefix) :] for value in self.clickable if value.startswith(prefix)]

    def _untried(self) -> str | None:
        """An option click not made yet on an axis the task leaves open."""
        for axis, chosen in self.page.selected.items():
            if chosen is not None and self.can("option_matching") and self._asked_for(chosen):
                continue
            for value in self._values(axis):
                if f"{axis}={value}" not in self.past.tried:
                    return f"{axis}={value}"
        return None

    def _too_dear(self) -> bool:
        if not self.can("budget_check") or self.wish.budget is None or self.page.price is None:
            return False
        return self.page.price_is_final and self.page.price > self.wish.budget

    def _settling(self) -> bool:
        return self.past.actions >= SETTLE_AFTER

    def _hits(self, row: Row) -> int:
        return sum(attribute.lower() in row.haystack for attribute in self.attributes)

    def _fits(self, row: Row) -> bool:
        if self._hits(row) < len(self.attributes):
            return False
        if self.brands and not any(brand.lower() in row.haystack for brand in self.brands):
            return False
        affordable = self.wish.budget is None or row.low is None or row.low <= self.wish.budget
        return affordable or not self.can("budget_check")

    def _score(self, row: Row) -> tuple[float, ...]:
        branded = any(brand.lower() in row.haystack for brand in self.brands)
        budget = self.wish.budget
        affordable = not self.can("budget_check") or budget is None or row.low is None or row.low <= budget
        return (self._hits(row) + branded, float(affordable))


def option_matches(wanted: str, label: str) -> bool:
    """Whether an option label is the wanted value, in one of its languages: ``black`` matches ``黑色 black``."""
    want = " ".join(wanted.replace("/", " | ").split()).lower()
    have = " ".join(label.replace("/", " | ").split()).lower()
    if want == have or f" {want} " in f" {have} ":
        return True
    if len(want) < 2 or want.isascii():
        return False
    # written together without spaces, but 3升 is not in 13升
    return bool(re.search(rf"(?<!\d){re.escape(want)}", have) or re.search(rf"(?<!\d){re.escape(have)}", want))


def _unique(*values: str) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))
