"""The scripted reader: a deterministic policy that lists and reads a Skill's files and decides by the rules in them.

It is no language model and says so in ``identity()``. It knows nothing but the messages: the Skill's main file from the
system message, other files only after it has read them with the tools. Rules it understands are list items

    - 快：电量够、续航+目的地          (class word, then keywords; ``+`` joins words that must all occur)
    - 导航、电量：[地图](knowledge/地图.md)  (in the main file: when to read which file)
    - 快 = fast                        (in the main file: what the class words mean)
    - 默认：慢                         (in the main file: the verdict where no rule applies)

Where rules disagree, those of the file the main file links first (its boundaries) win, then the longest match.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass
from random import Random
from typing import Any

from rayrl.schemas import JsonDict, ModelOutput, ProtocolError, ToolCall, Usage
from rayrl.skills.markdown import slug

READER_VERSION = "1"
_INDEX = re.compile(r"^[-*] (.+?)[：:]\s*\[[^\]]*\]\(([^)#]+)(?:#([^)]+))?\)", re.M)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#([^)\s]+))?\)")
_RULE = re.compile(r"^[-*] (\S{1,12}?)[：:]\s*(.+)$")
_MEANING = re.compile(r"^[-*] (\S{1,12}) = (\S+)\s*$", re.M)
_DEFAULT = re.compile(r"^[-*] (?:默认|default)[：:]\s*(\S+?)[。.]?\s*$", re.M)
_HEADING = re.compile(r"^#{1,6} (.+)$")
MAX_FILES = 3


@dataclass(frozen=True)
class _Match:
    word: str
    keyword: str
    path: str
    heading: str
    boundary: bool


class ScriptedReader:
    """See the module docstring. Stateless.

    Args:
        noise: probability that a verdict is turned round, drawn from the call's seed.
        careless: probability that it cites a rule file it has not read.
        broken: probability per call of a reply without a tool call.
        latency_ms: artificial latency of one call.
    """

    def __init__(
        self,
        *,
        noise: float = 0.0,
        careless: float = 0.0,
        broken: float = 0.0,
        latency_ms: float = 0.0,
        name: str = "reader",
    ) -> None:
        self.noise, self.careless, self.broken = float(noise), float(careless), float(broken)
        self.latency_s = float(latency_ms) / 1000
        self.name = name

    def identity(self) -> dict[str, Any]:
        """What makes this reader this reader."""
        return {
            "kind": "scripted_reader",
            "scripted": True,
            "version": READER_VERSION,
            "name": self.name,
            "noise": self.noise,
            "careless": self.careless,
            "broken": self.broken,
        }

    async def generate(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, seed: int) -> ModelOutput:
        """The next call."""
        began = time.perf_counter()
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        random = Random(seed)
        usage = Usage(prompt_tokens=sum(len(str(m.get("content"))) for m in messages) // 3, completion_tokens=40)
        took = (time.perf_counter() - began) * 1000
        if random.random() < self.broken:
            error = ProtocolError(code="no_tool_call", message="the reply holds no tool call.")
            return ModelOutput(content="hmm", usage=usage, latency_ms=took, protocol_error=error)
        name, arguments = self._decide(messages, random)
        call = ToolCall(id=f"call_{seed}", name=name, arguments=arguments)
        return ModelOutput(tool_calls=[call], usage=usage, finish_reason="tool_calls", latency_ms=took)

    async def aclose(self) -> None:
        """Nothing is open."""

    def _decide(self, messages: list[JsonDict], random: Random) -> tuple[str, JsonDict]:
        main = str(messages[0].get("content", ""))
        case = _case(messages)
        done = _calls(messages)
        if not any(name == "list_files" for name, _, _ in done):
            return "list_files", {}
        said = _said(case)
        read = {(a.get("path"), a.get("section")) for name, a, _ in done if name == "read_file"}
        for path, section in _wanted(main, said):
            if (path, section) not in read:
                return "read_file", {"path": path, **({"section": section} if section else {})}
        return "submit", self._verdict(main, case, said, done, random)

    def _verdict(
        self, main: str, case: JsonDict, said: str, done: list[tuple[str, JsonDict, str]], random: Random
    ) -> JsonDict:
        classes = [str(c) for c in case.get("classes", [])]
        meaning = {word: value for word, value in _MEANING.findall(main) if value in classes}
        first = next((m[1] for m in _LINK.finditer(main)), None)
        found: list[_Match] = []
        for name, arguments, text in done:
            if name == "read_file":
                path = str(arguments.get("path"))
                found += _matches(path, text, said, set(meaning), boundary=path == first)
        found.sort(key=lambda m: (not m.boundary, -len(m.keyword.replace("+", ""))))
        fallback = _DEFAULT.search(main)
        word = found[0].word if found else (fallback[1] if fallback else "")
        prediction = meaning.get(word, classes[-1] if classes else "")
        against = [m for m in found if m.word != word]
        confidence = 0.5 if not found else 0.65 if against else 0.92
        if random.random() < self.noise and len(classes) > 1:
            prediction = next(c for c in classes if c != prediction)
            confidence = 0.55
        if found:
            reason = f"“{found[0].keyword}”符合「{found[0].heading}」的规则：{word}"
            refs = [f"{found[0].path}#{slug(found[0].heading)}"]
        else:
            reason, refs = f"没有规则适用，按默认判为{word or prediction}", []
        if random.random() < self.careless:
            unread = [m[2] for m in _INDEX.finditer(main) if not any(a.get("path") == m[2] for _, a, _ in done)]
            refs = [*refs, *unread[:1]]
        return {"prediction": prediction, "reason": reason, "confidence": confidence, "evidence_refs": refs}


def _case(messages: list[JsonDict]) -> JsonDict:
    for message in reversed(messages):
        text = str(message.get("content", ""))
        if message.get("role") == "user" and "{" in text:
            try:
                value, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
            except ValueError:
                continue
            if isinstance(value, dict) and "query" in value:
                return value
    return {"query": "", "classes": []}


def _said(case: JsonDict) -> str:
    history = case.get("history") or []
    return "\n".join([str(case.get("query", "")), *(json.dumps(h, ensure_ascii=False) for h in history)])


def _calls(messages: list[JsonDict]) -> list[tuple[str, JsonDict, str]]:
    """Calls so far with what they returned."""
    out: list[tuple[str, JsonDict, str]] = []
    answers = {m.get("tool_call_id"): str(m.get("content", "")) for m in messages if m.get("role") == "tool"}
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call["function"]
            out.append((function["name"], json.loads(function["arguments"]), answers.get(call["id"], "")))
    return out


def _wanted(main: str, said: str) -> list[tuple[str, str | None]]:
    """Files to read: the one linked first, then those whose index words occur, in order of the longest word."""
    out: list[tuple[str, str | None]] = []
    index = [(m[1], m[2], m[3]) for m in _INDEX.finditer(main)]
    indexed = {path for _, path, _ in index}
    first = _LINK.search(main)
    if first and first[1] not in indexed:
        out.append((first[1], first[2]))
    scored = []
    for words, path, section in index:
        hits = [w for w in words.split("、") if w and w in said]
        if hits:
            scored.append((-max(map(len, hits)), path, section))
    out += [(path, section) for _, path, section in sorted(scored, key=lambda s: s[0])[:MAX_FILES]]
    return out


def _matches(path: str, text: str, said: str, words: set[str], *, boundary: bool) -> list[_Match]:
    out, heading = [], ""
    for line in text.splitlines():
        if title := _HEADING.match(line):
            heading = title[1].strip()
        elif (rule := _RULE.match(line)) and rule[1] in words:
            for keyword in rule[2].rstrip("。").split("、"):
                parts = [part for part in keyword.strip().split("+") if part]
                if parts and all(part in said for part in parts):
                    out.append(_Match(rule[1], keyword.strip(), path, heading, boundary))
    return out
