"""A small safe language for choosing episodes: ``completed and reward_detail.r_success == 1 and steps <= 12``.

Grammar: ``and or not``, ``== != < <= > >= in not in``, dotted names, numbers, 'strings', ``true false null``, lists,
parentheses. No calls, no indexing, no arithmetic beyond a leading minus. The text is parsed, checked node by node and
interpreted here; nothing is ever evaluated by Python.

Missing values: an ordering comparison with a missing (or differently typed) value is false; ``== null`` asks for it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from rayrl.errors import UserError, did_you_mean
from rayrl.evaluation.rows import EPISODE_FIELDS, episode_row
from rayrl.schemas import JsonDict

MAX_LENGTH = 2000
MAX_NODES = 200

_EXTRA = ("completed", "success", "steps", "tokens", "retried")
_NESTED = ("reward_detail", "purchase", "job", "provenance")
NAMES = frozenset((*EPISODE_FIELDS, *_EXTRA, *_NESTED)) - {"run", "position", "components_json"}
"""Names a filter may use; below ``reward_detail``, ``purchase``, ``job`` and ``provenance`` any key."""

_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


class Filter:
    """A compiled filter. Calling it with a trace record gives whether the record passes."""

    def __init__(self, text: str) -> None:
        """Compile.

        Raises:
            UserError: the text is no filter; the message shows where and what would be possible.
        """
        self.text = text.strip()
        if not self.text:
            raise UserError(f"filter: it is empty (an unset variable?); {_HELP}")
        if len(self.text) > MAX_LENGTH:
            raise UserError(f"filter: longer than {MAX_LENGTH} characters")
        try:
            tree = ast.parse(self.text, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            column = getattr(error, "offset", None)
            where = f" at character {column}" if column else ""
            raise UserError(f"filter {self.text!r}: not understood{where}; {_HELP}") from None
        if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
            raise UserError(f"filter: more than {MAX_NODES} parts; split it")
        if isinstance(tree.body, ast.Constant):
            raise UserError(f"filter {self.text!r}: a constant would pass everything or nothing; {_HELP}")
        self._root = tree.body
        self._check(self._root)

    def __call__(self, record: JsonDict) -> bool:
        """Whether a trace record passes."""
        return self.matches(filter_values(record))

    def matches(self, values: JsonDict) -> bool:
        """Whether a dict of values (see :func:`filter_values`) passes."""
        return bool(_value(self._root, values))

    def _fail(self, node: ast.AST, what: str) -> UserError:
        column = getattr(node, "col_offset", 0) + 1
        return UserError(f"filter {self.text!r}: {what} at character {column}; {_HELP}")

    def _check(self, node: ast.expr) -> None:
        if isinstance(node, ast.BoolOp):
            children: list[ast.expr] = node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            children = [node.operand]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = node.operand
            if not (isinstance(number, ast.Constant) and type(number.value) in (int, float)):
                raise self._fail(node, "a minus is possible only before a number")
            children = []
        elif isinstance(node, ast.Compare):
            for operator in node.ops:
                if not isinstance(
                    operator, ast.Eq | ast.NotEq | ast.In | ast.NotIn | ast.Lt | ast.LtE | ast.Gt | ast.GtE
                ):
                    raise self._fail(node, "this comparison is not possible")
            children = [node.left, *node.comparators]
        elif isinstance(node, ast.List | ast.Tuple):
            children = node.elts
        elif isinstance(node, ast.Constant):
            if not isinstance(node.value, int | float | str | bool | None):
                raise self._fail(node, "this kind of value is not possible")
            children = []
        elif isinstance(node, ast.Name | ast.Attribute):
            self._check_name(node)
            children = []
        else:
            raise self._fail(node, f"{_KINDS.get(type(node).__name__, 'this')} is not possible")
        for child in children:
            self._check(child)

    def _check_name(self, node: ast.expr) -> None:
        path = _path(node)
        if path is None:
            raise self._fail(node, "only names and dotted names are possible")
        if len(path) == 1 and path[0] in _WORDS:
            return
        if path[0] not in NAMES:
            raise self._fail(node, f"unknown name {path[0]!r}{did_you_mean(path[0], sorted(NAMES))}")
        if len(path) > 1 and path[0] not in _NESTED:
            raise self._fail(node, f"{path[0]!r} has no parts")


_HELP = "use names, numbers, 'text', and, or, not, == != < <= > >= in, for example: completed and reward >= 0.5"
_KINDS = {
    "Call": "a call",
    "Subscript": "indexing",
    "BinOp": "arithmetic",
    "Lambda": "a lambda",
    "IfExp": "a conditional",
    "JoinedStr": "a formatted string",
    "NamedExpr": "an assignment",
}


def _path(node: ast.expr) -> list[str] | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def _value(node: ast.expr, values: JsonDict) -> Any:
    if isinstance(node, ast.BoolOp):
        results = (_value(child, values) for child in node.values)
        return all(results) if isinstance(node.op, ast.And) else any(results)
    if isinstance(node, ast.UnaryOp):
        inner = _value(node.operand, values)
        return (not inner) if isinstance(node.op, ast.Not) else -inner
    if isinstance(node, ast.Compare):
        left = _value(node.left, values)
        for operator, right_node in zip(node.ops, node.comparators, strict=True):
            right = _value(right_node, values)
            if not _compare(operator, left, right):
                return False
            left = right
        return True
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(child, values) for child in node.elts]
    if isinstance(node, ast.Constant):
        return node.value
    path = _path(node) or []
    if len(path) == 1 and path[0] in _WORDS:
        return _WORDS[path[0]]
    found: Any = values
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _compare(operator: ast.cmpop, left: Any, right: Any) -> bool:
    if isinstance(operator, ast.Eq):
        return bool(left == right)
    if isinstance(operator, ast.NotEq):
        return bool(left != right)
    if isinstance(operator, ast.In | ast.NotIn):
        if isinstance(right, str):
            inside = isinstance(left, str) and left in right
        else:
            inside = isinstance(right, list) and left in right
        return inside is isinstance(operator, ast.In)
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if numbers or (isinstance(left, str) and isinstance(right, str)):
        return _ORDER[type(operator)](left, right)
    return False


def filter_values(record: JsonDict) -> JsonDict:
    """What a filter can ask of a record: its flat row, a few short names, and the nested objects. Nothing private."""
    row = episode_row(record)
    final = record.get("final") or {}
    tokens = (row["prompt_tokens"] or 0) + (row["completion_tokens"] or 0)
    return {
        **row,
        "completed": row["complete"],
        "success": row["r_success"] == 1,
        "steps": row["model_steps"],
        "tokens": tokens,
        "retried": (row["attempt"] or 1) > 1,
        "reward_detail": final.get("reward_detail") or {},
        "purchase": final.get("purchase") or {},
        "job": record.get("job") or {},
        "provenance": record.get("provenance") or {},
    }
