"""Are two runs comparable? Every difference of their manifests has a dotted name; what may differ is declared."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from rayrl.errors import UserError
from rayrl.schemas import JsonDict
from rayrl.traces.manifest import difference

Difference = tuple[str, Any, Any]


def manifest_differences(a: JsonDict | None, b: JsonDict | None) -> list[Difference]:
    """``(dotted key, value in A, value in B)`` of all semantic differences; ``manifest`` when one is missing."""
    if a is None or b is None:
        return [("manifest", "present" if a else "missing", "present" if b else "missing")] if a is not b else []
    return difference(a.get("semantic") or {}, b.get("semantic") or {})


def allowed(key: str, patterns: list[str]) -> bool:
    """Whether a dotted key is covered: by its own name, by a section above it, or by a glob."""
    return any(key == p or key.startswith(f"{p}.") or fnmatchcase(key, p) for p in patterns)


def check_comparable(
    a: JsonDict | None, b: JsonDict | None, *, may_differ: list[str], name_a: str = "A", name_b: str = "B"
) -> list[Difference]:
    """The declared differences of two comparable runs.

    Raises:
        UserError: something differs that was not declared; the message names each such key with both values and the
            option that would declare it.
    """
    found = manifest_differences(a, b)
    refused = [item for item in found if not allowed(item[0], may_differ)]
    if not refused:
        return found
    lines = [f"  {key}: {_short(before)} in {name_a}, {_short(after)} in {name_b}" for key, before, after in refused]
    options = " ".join(f"--may-differ {key}" for key in sorted({key.split(".")[0] for key, _, _ in refused}))
    raise UserError(
        f"{name_a} and {name_b} are not comparable; these differ:\n"
        + "\n".join(lines)
        + f"\nIf that is what you want to compare, declare it: {options}"
    )


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = "(none)" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
