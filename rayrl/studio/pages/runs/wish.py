"""What a shop task wanted beside what was bought, part by part of the reward.

Reads the private goal beside the traces for the page of one episode; nothing of it is kept. Which product the goal is
made from (its id and title) is never shown. Invariant: a part counts as met only where the reward counted it; where
the record does not hold enough to say which of several attributes or options failed, the part is undecided.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson

from rayrl.schemas import JsonDict
from rayrl.shop.reward import FUZZY_THRESHOLD
from rayrl.shop.text import option_label, token_set_ratio

PRIVATE = "private.jsonl"
_BRAND = re.compile(r"^- 品牌：(.+)$", re.MULTILINE)
"""The line of the shop's product page."""


def goal_of(run_dir: Path, episode: str) -> JsonDict | None:
    """The newest private goal of an episode, or ``None`` where there is none."""
    wanted, found = episode.encode(), None
    try:
        with (run_dir / PRIVATE).open("rb") as file:
            for line in file:
                if wanted in line:
                    found = _goal(line, episode) or found
    except OSError:
        return None
    return found


def _goal(line: bytes, episode: str) -> JsonDict | None:
    try:
        item = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(item, dict) or item.get("episode_id") != episode or not isinstance(item.get("goal"), dict):
        return None
    return dict(item["goal"])


def brand_of(record: JsonDict, asin: Any) -> str | None:
    """The brand the page of the bought product named when the episode saw it last; ``None`` where it was not seen."""
    for step in reversed(record.get("steps") or []):
        for seen in (_dict(step.get("environment")).get("observation"), step.get("observation")):
            text = str(_dict(seen).get("text") or "")
            if asin and str(asin) in text and (found := _BRAND.search(text)):
                return found[1].strip()
    return None


def wish_of(goal: JsonDict, final: JsonDict, brand: str | None = None) -> JsonDict:
    """Wanted against bought: ``instruction`` in full and ``rows`` of ``{part, wanted, bought, ok}``.

    ``ok`` is true, false or ``None`` (undecided, or nothing was bought). ``brand`` is that of the bought product, where
    it is known (see :func:`brand_of`). Beside an attribute stands what answers it, else all the product has.
    """
    bought, detail = _dict(final.get("purchase")), _dict(final.get("reward_detail"))
    rows = [_row("kind", goal.get("category"), bought.get("category") or bought.get("product_category"))]
    rows[0]["ok"] = _full(detail, "r_type") if bought else None
    attributes, options = _texts(goal.get("attributes")), _texts(goal.get("goal_options"))
    held = _texts(bought.get("attributes"))
    text = " ".join([str(bought.get("name") or ""), *held]).lower()
    hits = [any(_alike(one, own) for own in held) or one.lower() in text for one in attributes] if bought else []
    name = str(bought.get("name") or "")
    all_held = "; ".join(part for part in (name, brand, ", ".join(held)) if part)
    pieces = [*held, *([brand] if brand else []), *([name] if name else [])]
    shown = [next((p for p in pieces if _answers(one, p)), all_held) if bought else "" for one in attributes]
    rows += _many("attribute", attributes, hits, shown, detail, "num_attr_matches", "r_att")
    chosen = _dict(bought.get("options"))
    hits = (
        [any(_alike(option_label(one), str(value)) for value in chosen.values()) for one in options] if bought else []
    )
    shown = [", ".join(f"{k}: {v}" for k, v in chosen.items())] * len(options)
    rows += _many("option", options, hits, shown, detail, "num_option_matches", "r_option")
    if goal.get("price_upper") is not None:
        price = bought.get("price")
        rows.append({**_row("price", f"≤ {goal['price_upper']:g}" if _number(goal["price_upper"]) else None, price)})
        rows[-1]["ok"] = _full(detail, "r_price") if bought else None
    return {"instruction": str(goal.get("instruction_text") or ""), "rows": rows, "bought": bool(bought)}


def _many(
    part: str, wanted: list[str], hits: list[bool], shown: list[str], detail: JsonDict, count: str, score: str
) -> list[JsonDict]:
    """A row per attribute or option, with what is ``shown`` as bought.

    What the reward counted decides; the record says which ones as far as it can.
    """
    counted, share = detail.get(count), detail.get(score)
    n: int | None = int(counted) if isinstance(counted, int) else None
    if n is None and isinstance(share, int | float):
        n = round(float(share) * len(wanted))
    sure = bool(hits) and (n is None or n == sum(hits))
    rows = []
    for at, one in enumerate(wanted):
        ok: bool | None = None
        if hits and n in (0, len(wanted)):
            ok = n != 0
        elif sure or (hits and hits[at] and n is not None and n > sum(hits)):
            ok = hits[at]
        rows.append({**_row(part, one, shown[at]), "ok": ok})
    return rows


def _row(part: str, wanted: Any, bought: Any) -> JsonDict:
    return {"part": part, "wanted": wanted, "bought": bought if bought not in (None, "") else None, "ok": None}


def _full(detail: JsonDict, name: str) -> bool | None:
    value = detail.get(name)
    return bool(value == 1) if _number(value) else None


def _answers(wanted: str, piece: str) -> bool:
    return _alike(wanted, piece) or wanted.lower() in piece.lower()


def _alike(wanted: str, own: str) -> bool:
    return token_set_ratio(wanted, own) > FUZZY_THRESHOLD


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _dict(value: Any) -> JsonDict:
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> list[str]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [str(one) for one in items]
