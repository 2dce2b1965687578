"""What a product costs: display price, the price of a chosen variant, and a task's budget.

Invariants: pure; a price is either decided or not, never guessed; option labels compare in normal form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rayrl.shop.versions import PRICE_VERSION

Number = int | float


@dataclass(frozen=True, slots=True)
class OptionValue:
    """One value of an axis in normal form, with the price it implies (``None`` if it says nothing about price)."""

    label: str
    price: Number | None


Axes = dict[str, tuple[OptionValue, ...]]
"""Axis label -> its values, both in normal form, in catalogue order."""


def price_axes(axes: Axes) -> list[str]:
    """Axes whose values differ in price."""
    return [name for name, values in axes.items() if len({v.price for v in values if v.price is not None}) > 1]


def display_price(pricing: tuple[Number, ...]) -> str:
    """``"825.64"`` or ``"948.03 to 968.03"``; empty without a price."""
    if not pricing:
        return ""
    low, high = min(pricing), max(pricing)
    return f"{low}" if low == high else f"{low} to {high}"


def resolve_price(pricing: tuple[Number, ...], axes: Axes, selected: dict[str, str]) -> dict[str, Any]:
    """Decide the price of the variant ``selected`` (axis -> value, normal form).

    Returns ``{status: pass|unverifiable, price, version, method, evidence}``; ``price`` is ``None`` unless it passes.
    """
    known = {name: {v.label: v.price for v in values} for name, values in axes.items()}
    invalid = {axis: value for axis, value in selected.items() if value not in known.get(axis, {})}
    if invalid:
        return _undecided("invalid_selected_options", {"invalid": invalid})
    bearing = price_axes(axes)
    if len(bearing) > 1:
        return _undecided("multiple_price_affecting_axes", {"price_axes": bearing})
    if bearing:
        axis = bearing[0]
        if axis not in selected:
            return _undecided("price_axis_unselected", {"price_axis": axis})
        price = known[axis][selected[axis]]
        if price is None:
            return _undecided("selected_variant_price_missing", {"price_axis": axis})
        return _decided(price, "selected_price_axis", {"price_axis": axis})
    stated = {v.price for values in axes.values() for v in values if v.price is not None}
    if len(stated) == 1:
        return _decided(stated.pop(), "constant_option_price", {})
    if len(stated) == 0 and len(set(pricing)) == 1:
        return _decided(pricing[0], "single_listing_price", {})
    return _undecided("price_not_deterministic", {})


def _decided(price: Number, method: str, evidence: dict[str, Any]) -> dict[str, Any]:
    return {"status": "pass", "price": price, "version": PRICE_VERSION, "method": method, "evidence": evidence}


def _undecided(method: str, evidence: dict[str, Any]) -> dict[str, Any]:
    return {"status": "unverifiable", "price": None, "version": PRICE_VERSION, "method": method, "evidence": evidence}


_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(?:元|块|rmb|cny|yuan)|[¥￥]\s*(\d+(?:\.\d+)?)", re.IGNORECASE)
_ABOUT = re.compile(r"左右|上下|大约|大概|约\s*[¥￥]?\d|\babout\b|\baround\b|\broughly\b", re.IGNORECASE)
_ABOUT_FACTOR = 1.1


def budget_in_text(text: str) -> float | None:
    """The upper price an instruction states, or ``None``. Wording such as "about" widens it by a tenth."""
    found = _BUDGET.search(text)
    if found is None:
        return None
    limit = float(found.group(1) or found.group(2))
    return round(limit * _ABOUT_FACTOR, 2) if _ABOUT.search(text) else limit


def price_upper(stated: Number | None, simple: str, full: str) -> float | None:
    """A task's budget: its numeric field, else the simple instruction, else the full one, else none."""
    if stated is not None:
        return float(stated)
    limit = budget_in_text(simple)
    return limit if limit is not None else budget_in_text(full)
