"""Products and tasks in the public JSON format, checked and frozen.

Invariants: nothing downstream sees a raw product dict; task ids are unique; every product has at most one option axis
that bears on its price (others are dropped, as the protocol's catalogue filter demands); a task without attributes is
not served. :func:`catalogue_hash` is over the raw products, so a plan can compute it without a server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rayrl.errors import DataError
from rayrl.schemas import canonical_json, sha256_hex
from rayrl.shop.pricing import Axes, Number, OptionValue, display_price, price_axes, price_upper
from rayrl.shop.text import option_label
from rayrl.shop.versions import MAX_KEY_ATTRIBUTES

RawProduct = dict[str, Any]

_ASIN = re.compile(r"[0-9A-Z]{6,20}")


@dataclass(frozen=True, slots=True)
class Product:
    """One product as pages, search and reward need it. ``axes`` is in normal form."""

    asin: str
    title: str
    brand: str
    category: str
    product_category: str
    pricing: tuple[Number, ...]
    axes: Axes
    attributes: tuple[str, ...]
    text: str
    """Title, bullets and description in one, lower case: where an attribute may also be found."""
    bullets: str
    summary: dict[str, Any] = field(compare=False)
    """The public part of a results row or detail page (asin, title, brand, category, price, key_attributes)."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task, private goal included; never handed to a page."""

    task_id: int
    task_uid: str
    asin: str
    instruction: str
    instruction_simple: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float | None
    persona: dict[str, Any]
    goal: dict[str, Any] = field(compare=False)
    """The full private goal in the protocol's form."""


@dataclass(frozen=True)
class Catalogue:
    """Frozen products by asin (catalogue order), tasks by id, and the hash of what they were made from."""

    products: dict[str, Product]
    tasks: dict[int, Task]
    sha256: str
    dropped: int
    """Products left out because more than one axis bears on their price."""


def catalogue_hash(products: list[RawProduct]) -> str:
    """SHA-256 over the canonical JSON of the products.

    Raises:
        DataError: a product holds something that has no canonical form (NaN, infinity).
    """
    try:
        return sha256_hex(canonical_json(products))
    except (ValueError, TypeError) as error:
        raise DataError(f"the products have no canonical JSON form: {error}") from None


def load_products(path: str | Path) -> list[RawProduct]:
    """Read a products file (a JSON list).

    Raises:
        DataError: no such file, not JSON, or not a list of objects.
    """
    file = Path(path)
    try:
        data = orjson.loads(file.read_bytes())
    except OSError as error:
        raise DataError(f"products file {file} cannot be read: {error.strerror or error}") from None
    except orjson.JSONDecodeError as error:
        raise DataError(f"products file {file} is not JSON: {error}") from None
    if not isinstance(data, list) or not data:
        raise DataError(f"products file {file}: the top level must be a non-empty list of products")
    for index, item in enumerate(data):
        if not isinstance(item, dict):
            raise DataError(f"products file {file}, product {index}: must be an object, not {type(item).__name__}")
    return data


def build_catalogue(products: list[RawProduct], *, source: str = "products") -> Catalogue:
    """Check and freeze raw products.

    Args:
        products: the public format, one dict per product.
        source: name for error messages.

    Raises:
        DataError: names source, product index and what is wrong.
    """
    frozen: dict[str, Product] = {}
    tasks: dict[int, Task] = {}
    dropped = 0
    for index, raw in enumerate(products):
        where = f"{source}, product {index}"
        product = _product(raw, where)
        if product.asin in frozen:
            raise DataError(f"{where}: asin {product.asin!r} occurs twice")
        if len(price_axes(product.axes)) > 1:
            dropped += 1
            continue
        frozen[product.asin] = product
        for task in _tasks(raw, product, where):
            if task.task_id in tasks:
                raise DataError(
                    f"{where}: task_id {task.task_id} occurs twice (also in product {tasks[task.task_id].asin})"
                )
            tasks[task.task_id] = task
    if not tasks:
        raise DataError(f"{source}: no product carries a task with a task_id and attributes")
    return Catalogue(products=frozen, tasks=tasks, sha256=catalogue_hash(products), dropped=dropped)


def _product(raw: RawProduct, where: str) -> Product:
    asin = _text(raw, "asin", where).upper()
    if not _ASIN.fullmatch(asin):
        raise DataError(f"{where}: asin {asin!r} must be 6 to 20 digits or capital letters")
    where = f"{where} ({asin})"
    title = _text(raw, "title", where)
    brand = _text(raw, "shop_name", where)
    category = _text(raw, "category", where)
    attributes = _texts(raw, "attribute", where)
    pricing = _pricing(raw.get("pricing"), where)
    bullets = " ".join(_texts(raw, "bullet_points", where))
    description = _text(raw, "full_description", where, default="")
    return Product(
        asin=asin,
        title=title,
        brand=brand,
        category=category,
        product_category=_text(raw, "product_category", where, default=category),
        pricing=pricing,
        axes=_axes(raw.get("customization_options"), where),
        attributes=attributes,
        text="\n".join((title, bullets, description)).lower(),
        bullets=bullets,
        summary={
            "asin": asin,
            "title": title,
            "brand": brand,
            "category": category,
            "price": display_price(pricing),
            "key_attributes": list(attributes[:MAX_KEY_ATTRIBUTES]),
        },
    )


def _axes(raw: Any, where: str) -> Axes:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise DataError(f"{where}: customization_options must be an object of axis -> values")
    axes: dict[str, tuple[OptionValue, ...]] = {}
    for name, values in raw.items():
        if not isinstance(values, list) or not values:
            raise DataError(f"{where}: customization_options[{name!r}] must be a non-empty list")
        found: dict[str, OptionValue] = {}
        for value in values:
            if not isinstance(value, dict) or not isinstance(value.get("value"), str) or not value["value"].strip():
                raise DataError(f"{where}: customization_options[{name!r}] holds a value without text")
            price = value.get("price")
            if price is not None and not _is_price(price):
                raise DataError(f"{where}: customization_options[{name!r}] holds a price that is no number: {price!r}")
            label = option_label(value["value"])
            found.setdefault(label, OptionValue(label, price))
        axes[option_label(str(name))] = tuple(found.values())
    return axes


def _tasks(raw: RawProduct, product: Product, where: str) -> Iterator[Task]:
    instructions = raw.get("instructions")
    if instructions is None:
        return
    if not isinstance(instructions, list):
        raise DataError(f"{where}: instructions must be a list")
    persona = {} if raw.get("user_persona") is None else raw["user_persona"]
    if not isinstance(persona, dict):
        raise DataError(f"{where}: user_persona must be an object or null")
    for number, item in enumerate(instructions):
        here = f"{where}, instruction {number}"
        if not isinstance(item, dict):
            raise DataError(f"{here}: must be an object")
        attributes = _texts(item, "attributes", here)
        if not attributes:
            continue
        task_id = item.get("task_id")
        if isinstance(task_id, bool) or not isinstance(task_id, int) or task_id < 0:
            raise DataError(f"{here}: task_id must be an integer >= 0, not {task_id!r}")
        full = _text(item, "instruction", here)
        simple = _text(item, "instruction_simple", here, default=full)
        stated = item.get("price_upper")
        if stated is not None and not _is_price(stated):
            raise DataError(f"{here}: price_upper must be a number or null, not {stated!r}")
        upper = price_upper(stated, simple, full)
        options = _option_texts(item.get("instruction_options"), here)
        uid = _text(item, "task_uid", here, default=f"task-{task_id}")
        goal = {
            "asin": product.asin,
            "attributes": list(attributes),
            "category": product.category,
            "goal_options": list(options),
            "instruction_simple": simple,
            "instruction_text": full,
            "name": product.title,
            "price_constraint": item.get("price_constraint"),
            "price_upper": upper,
            "reason_key": raw.get("reason_key"),
            "source_product_index": raw.get("source_product_index"),
            "task_id": task_id,
            "task_uid": uid,
            "user_persona": persona,
            "weight": 1,
        }
        yield Task(task_id, uid, product.asin, full, simple, attributes, options, upper, persona, goal)


def _option_texts(raw: Any, where: str) -> tuple[str, ...]:
    """Goal options come as a list of values or as an object of axis -> value."""
    values = list(raw.values()) if isinstance(raw, dict) else (raw if raw is not None else [])
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise DataError(f"{where}: instruction_options must be a list of texts or an object of axis -> text")
    return tuple(values)


def _pricing(raw: Any, where: str) -> tuple[Number, ...]:
    values = raw if isinstance(raw, list) else [] if raw is None else [raw]
    for value in values:
        if not _is_price(value):
            raise DataError(f"{where}: pricing must hold numbers, not {value!r}")
    return tuple(values)


def _is_price(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _text(raw: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = raw.get(key)
    if isinstance(value, str) and (value.strip() or default is not None):
        return value
    if value is None and default is not None:
        return default
    raise DataError(f"{where}: {key} must be a non-empty text, not {value!r}")


def _texts(raw: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = raw.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(f"{where}: {key} must be a list of texts")
    return tuple(value)
