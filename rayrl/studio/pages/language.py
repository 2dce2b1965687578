"""The message catalogue: every visible string in every language, and which language a request wants.

Messages are YAML files ``messages/LANGUAGE/SECTION.yaml`` of nested keys; a key is ``section.path.to.message``. A
message may hold ``{name}`` places and, divided by `` | ``, a singular and a plural form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "messages"
LANGUAGES = {"en": "English", "zh": "中文"}
DEFAULT = "en"
Translate = Callable[..., str]
# text stays text: keys like `on` and `no` are what they are; in C where libyaml is there
LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


@lru_cache(maxsize=8)
def catalogue(language: str) -> dict[str, str]:
    """All messages of a language by key."""
    out: dict[str, str] = {}
    for path in sorted((FOLDER / language).glob("*.yaml")):
        out.update(_flat(path.stem, yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER) or {}))  # noqa: S506
    return out


def _flat(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            yield from _flat(name, value)
        else:
            yield name, str(value)


def translator(language: str) -> Translate:
    """``t(key, **places)``; an unknown key gives its last part, so that an unforeseen value shows as itself."""
    known, reserve = catalogue(language), catalogue(DEFAULT)

    def t(key: str, /, **places: Any) -> str:
        message = known.get(key, reserve.get(key))
        if message is None:
            return key.rpartition(".")[2]
        one, plural, many = message.partition(" | ")
        if plural:
            message = one if places.get("n") == 1 else many
        if not places:
            return message
        shown = {k: f"{v:,}" if type(v) is int else v for k, v in places.items()}
        return message.format(**shown)

    return t


def negotiate(asked: str | None, kept: str | None, accept: str) -> str:
    """The language of a request: named in the query, else kept in the cookie, else the browser's first known one."""
    for choice in (asked, kept):
        if choice in LANGUAGES:
            return choice
    weighted = []
    for order, part in enumerate(accept.split(",")[:20]):
        name, _, q = part.partition(";")
        try:
            weight = float(q.strip().removeprefix("q=") or 1)
        except ValueError:
            weight = 0.0
        weighted.append((-weight, order, name.strip().lower().partition("-")[0]))
    return next((name for weight, _, name in sorted(weighted) if name in LANGUAGES and weight < 0), DEFAULT)
