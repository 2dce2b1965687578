"""Action text to one command: ``search[words]`` or ``click[value]``.

Invariants: total (every text gives an action or a named problem, nothing raises), pure, and what a query *says* is
never an instruction: brackets, keywords and page names inside it are only words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rayrl.shop.text import collapse

_COMMAND = re.compile(r"(search|click)\[(.*)\]", re.DOTALL)
_STARTS = ("search[", "click[")
# bounded repetition: the text is the policy's, and must not buy quadratic time
_CHAINED = re.compile(r"\][\s,;，；、.。&+]{0,8}(?:then|and|然后|再)?\s{0,8}(?:search|click)\[")
_ACTION_LINE = re.compile(r"^[ \t]{0,8}Action:(.*)$", re.MULTILINE)

FORMAT_MESSAGE = "动作必须使用 search[...] 或 click[...] 格式"
MULTIPLE_MESSAGE = "一次调用只能执行一个 search[...] 或 click[...] 动作"


@dataclass(frozen=True, slots=True)
class Action:
    """One well-formed command. ``canonical`` is how feedback repeats it."""

    kind: Literal["search", "click"]
    argument: str
    canonical: str


@dataclass(frozen=True, slots=True)
class BadAction:
    """What is wrong with a text that is no single command."""

    canonical: str
    reason: Literal["invalid_format", "multiple_actions_not_allowed", "empty_argument"]
    message: str


def parse_action(text: str) -> Action | BadAction:
    """Read one action out of raw model output.

    A text that starts with a command is that command. Otherwise exactly one line ``Action: ...`` is looked for; a
    literal backslash-n counts as a line break.
    """
    body = text.strip()
    if not body.startswith(_STARTS):
        unfolded = body.replace("\\n", "\n")
        lines = _ACTION_LINE.findall(unfolded)
        if len(lines) > 1:
            return BadAction(collapse(unfolded), "multiple_actions_not_allowed", MULTIPLE_MESSAGE)
        if lines:
            body = lines[0].strip()
    match = _COMMAND.fullmatch(body)
    if match is None:
        # "search[a] and more" is no single command either, but not two of them
        reason_multiple = body.startswith(_STARTS) and _CHAINED.search(body) is not None
        if reason_multiple:
            return BadAction(collapse(body), "multiple_actions_not_allowed", MULTIPLE_MESSAGE)
        return BadAction(collapse(body), "invalid_format", FORMAT_MESSAGE)
    if _CHAINED.search(body):
        return BadAction(collapse(body), "multiple_actions_not_allowed", MULTIPLE_MESSAGE)
    kind: Literal["search", "click"] = "search" if match.group(1) == "search" else "click"
    argument = collapse(match.group(2))
    if not argument:
        what = "关键词" if kind == "search" else "点击项"
        return BadAction(f"{kind}[]", "empty_argument", f"{kind}[...] 的{what}不能为空")
    return Action(kind, argument, f"{kind}[{argument}]")
