"""Tools over a frozen Skill: one registry for batch cases and interactive sessions.

A tool gets the Skill and its arguments and answers with text for the model and a log entry for the record. The log is
the evidence: it says what was really read, whatever the model later claims. Paths are looked up in the snapshot's own
list of files, so nothing outside of it can be reached by any spelling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from rayrl.errors import ConfigError, did_you_mean
from rayrl.registry import is_dotted, resolve_dotted
from rayrl.schemas import JsonDict
from rayrl.skills.markdown import find_section, headings, lines_of
from rayrl.skills.snapshot import Taken, file_bytes

PAGE = 16_000
"""Characters one read returns at most."""


@dataclass(frozen=True)
class Answer:
    """What a tool says: ``text`` to the model, ``log`` to the record; a call that did nothing is not ``valid``."""

    text: str
    valid: bool = True
    reason: str = "executed"
    log: JsonDict = field(default_factory=dict)


class SkillTool(Protocol):
    """One tool."""

    name: str
    description: str
    parameters: JsonDict

    async def run(self, skill: Taken, arguments: JsonDict) -> Answer:
        """Act; a wrong argument is an answer, not an exception."""
        ...


def function_tool(tool: SkillTool) -> JsonDict:
    """The OpenAI form of a tool."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


class ListFiles:
    """``list_files``: paths and sizes of the Skill."""

    name = "list_files"
    description = "List the files of the Skill with their sizes."
    parameters: JsonDict = {"type": "object", "properties": {}, "additionalProperties": False}

    async def run(self, skill: Taken, arguments: JsonDict) -> Answer:
        """See :class:`SkillTool`."""
        files = skill.manifest.files
        shown = "\n".join(f"{entry.path} ({entry.size} bytes)" for entry in files[:500])
        more = f"\n... and {len(files) - 500} more" if len(files) > 500 else ""
        return Answer(shown + more, log={"listed": len(files)})


class ReadFile:
    """``read_file``: a whole file, or one section of a Markdown file."""

    name = "read_file"
    description = "Read a file of the Skill; with `section`, only the part under that heading."
    parameters: JsonDict = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Path as list_files gives it."},
            "section": {"type": "string", "description": "A heading of the file, or its slug."},
        },
        "required": ["path"],
        "additionalProperties": False,
    }

    async def run(self, skill: Taken, arguments: JsonDict) -> Answer:
        """See :class:`SkillTool`."""
        path, section = str(arguments.get("path", "")), arguments.get("section")
        data = file_bytes(skill, path)
        if data is None:
            known = [entry.path for entry in skill.manifest.files]
            return Answer(f"There is no file {path!r}{did_you_mean(path, known)}.", False, "no_such_file")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return Answer(f"{path} is a binary file of {len(data)} bytes.", False, "binary_file")
        found = None
        if section:
            found = find_section(text, str(section))
            if found is None:
                names = ", ".join(h.title for h in headings(text)[:40]) or "none"
                return Answer(
                    f"{path} has no section {str(section)[:200]!r}. Headings: {names}", False, "no_such_section"
                )
            text = lines_of(text, found.start, found.end)
        shown = text[:PAGE]
        if len(text) > PAGE:
            shown += f"\n[cut: {len(text) - PAGE} more characters; ask for a section]"
        return Answer(
            shown,
            log={
                "path": path,
                "section": found.slug if found else None,
                "whole_file": found is None and len(text) <= PAGE,
                "lines": [found.start, found.end] if found else [1, len(shown.splitlines())],
            },
        )


BUILT_IN: dict[str, type[Any]] = {"list_files": ListFiles, "read_file": ReadFile}


def build_tools(names: list[str]) -> dict[str, SkillTool]:
    """Tools by short name or dotted path ``package.module:Tool``, in order.

    Raises:
        ConfigError: an unknown name, or something that is no tool.
    """
    out: dict[str, SkillTool] = {}
    for name in names:
        if is_dotted(name):
            tool = resolve_dotted(name, "tool")()
        elif name in BUILT_IN:
            tool = BUILT_IN[name]()
        else:
            raise ConfigError(
                f"tool {name!r} is not known{did_you_mean(name, list(BUILT_IN))}; known: {', '.join(BUILT_IN)}"
            )
        if not all(hasattr(tool, part) for part in ("name", "description", "parameters", "run")):
            raise ConfigError(f"tool {name!r} lacks name, description, parameters or run")
        out[tool.name] = tool
    return out
