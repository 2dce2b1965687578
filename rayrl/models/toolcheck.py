"""Checking a call's arguments against its tool's parameter schema, enums aside.

A value outside an ``enum`` (a click on something that is not on the page) is a legal call with an illegal action: the
environment answers it. Everything else the schema demands (types, required, additional properties, lengths) is part of
the tool protocol and checked here. The common keywords are checked directly, since schemas change with every page and
compiling a validator for each would dominate; any other keyword is handed to ``jsonschema``.
"""

from __future__ import annotations

import math
from typing import Any

import jsonschema

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$schema", "enum"})
_DIRECT = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "minLength", "maxLength", "minimum", "maximum"}
)


def argument_error(arguments: Any, schema: dict[str, Any]) -> str | None:
    """Why ``arguments`` break ``schema`` (enums aside), or None. The message names the path, never a long value."""
    if _simple(schema):
        return _check(arguments, schema, "arguments")
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(_without_enums(schema)).iter_errors(arguments)
    )
    if error is None:
        return None
    return f"{'.'.join(['arguments', *map(str, error.absolute_path)])}: {error.message[:200]}"


def _simple(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key not in _DIRECT:
            return False
        if key == "properties" and not all(_simple(part) for part in value.values()):
            return False
        if key == "items" and not _simple(value):
            return False
        if key == "additionalProperties" and not isinstance(value, bool) and not _simple(value):
            return False
    return True


def _is_type(value: Any, name: str) -> bool:
    if name == "string":
        return isinstance(value, str)
    if name == "boolean":
        return isinstance(value, bool)
    if name == "integer":
        return (isinstance(value, int) and not isinstance(value, bool)) or (
            isinstance(value, float) and math.isfinite(value) and value.is_integer()
        )
    if name == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if name == "object":
        return isinstance(value, dict)
    if name == "array":
        return isinstance(value, list)
    return name == "null" and value is None


def _check(value: Any, schema: dict[str, Any], path: str) -> str | None:
    wanted = schema.get("type")
    if wanted is not None:
        names = wanted if isinstance(wanted, list) else [wanted]
        if not any(_is_type(value, name) for name in names):
            return f"{path}: expected {' or '.join(names)}, got {_type_name(value)}"
    if isinstance(value, dict):
        return _check_object(value, schema, path)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            problem = _check(item, schema["items"], f"{path}.{index}")
            if problem:
                return problem
    if isinstance(value, str):
        if len(value) > schema.get("maxLength", len(value)):
            return f"{path}: longer than {schema['maxLength']} characters"
        if len(value) < schema.get("minLength", 0):
            return f"{path}: shorter than {schema['minLength']} characters"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            return f"{path}: less than {schema['minimum']}"
        if value > schema.get("maximum", value):
            return f"{path}: greater than {schema['maximum']}"
    return None


def _check_object(value: dict[str, Any], schema: dict[str, Any], path: str) -> str | None:
    for name in schema.get("required", ()):
        if name not in value:
            return f"{path}: required property {name!r} is missing"
    properties = schema.get("properties", {})
    additional = schema.get("additionalProperties", True)
    for name, part in value.items():
        if name in properties:
            problem = _check(part, properties[name], f"{path}.{name}")
        elif additional is False:
            return f"{path}: unexpected property {name[:60]!r}"
        elif isinstance(additional, dict):
            problem = _check(part, additional, f"{path}.{name}")
        else:
            problem = None
        if problem:
            return problem
    return None


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return names.get(type(value), type(value).__name__)


def _without_enums(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_enums(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties" and isinstance(value, dict):
            out[key] = {name: _without_enums(part) for name, part in value.items()}
        elif key not in ("enum", "const"):
            out[key] = _without_enums(value)
    return out
