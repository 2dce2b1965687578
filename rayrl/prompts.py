"""Versioned prompt assembly: persona, skills, observation, feedback.

A prompt is a YAML file with ``name``, ``version`` and the texts below; its hash enters the fingerprint. The
conversation
the runtime keeps is always complete; what the model sees of it is :func:`visible`, a pure function of the conversation
and the history policy.

The model is never asked for visible "Thought:" or "Action:" text: reasoning and tool calls travel in their own fields.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from rayrl.config import Section
from rayrl.errors import ConfigError
from rayrl.schemas import JsonDict, Observation, ProtocolError, Skill, canonical_json, sha256_hex

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class PromptTemplate(Section):
    """The texts of one prompt version. Placeholders are ``{word}``; an unknown one is an error."""

    name: str
    """Short name, shown in manifests."""
    version: str
    """Bumped on every change of the texts."""
    system: str
    """System message; placeholders ``{skills}``, ``{max_actions}``."""
    user: str
    """First user message; placeholders ``{instruction}``, ``{persona}``, ``{observation}``."""
    persona: str = "Persona:\n{persona_json}\n"
    """Block put at ``{persona}`` when there is one."""
    skills: str = "Skills:\n{skill_list}\n"
    """Block put at ``{skills}`` when there are any."""
    skill: str = "- [{skill_id}] {content}"
    """One line per skill inside ``skills``."""
    protocol_feedback: str = "Your reply could not be used ({code}): {message} Call exactly one of the tools: {tools}."
    """What the model is told after a reply that broke the one-call rule."""
    stub: str = "[earlier observation omitted: {first_line}]"
    """What an old observation becomes under ``history: last_n``."""

    def sha256(self) -> str:
        """Hash of all texts."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))


class PromptConfig(Section):
    """Which prompt, and how much of the past the model sees."""

    file: str = "prompts/shop_v1.yaml"
    """Prompt file: beside the config, in the working directory, or one of the shipped ones."""
    history: Literal["full", "last_n"] = "full"
    """``full`` keeps every observation; ``last_n`` turns all but the newest ``last_n`` into one-line stubs."""
    last_n: int = 2
    """Observations kept whole under ``history: last_n``; at least 1."""


def load_prompt(path: Path) -> PromptTemplate:
    """Read a prompt file and check its placeholders.

    Raises:
        ConfigError: unreadable, unknown keys, unknown or missing placeholders; names the file and the key.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        template = PromptTemplate.model_validate(raw)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"prompt {path}: cannot be read: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        raise ConfigError(f"prompt {path} is not valid:\n" + "\n".join(lines)) from None
    allowed = {
        "system": {"skills", "max_actions"},
        "user": {"instruction", "persona", "observation"},
        "persona": {"persona_json"},
        "skills": {"skill_list"},
        "skill": {"skill_id", "version", "content"},
        "protocol_feedback": {"code", "message", "tools"},
        "stub": {"first_line"},
    }
    for key, names in allowed.items():
        unknown = set(_PLACEHOLDER.findall(getattr(template, key))) - names
        if unknown:
            raise ConfigError(
                f"prompt {path}: {key}: unknown placeholder {{{sorted(unknown)[0]}}}; known: "
                + ", ".join(f"{{{n}}}" for n in sorted(names))
            )
    for key, needed in (("user", "instruction"), ("user", "observation"), ("system", "skills")):
        if f"{{{needed}}}" not in getattr(template, key):
            raise ConfigError(f"prompt {path}: {key}: the placeholder {{{needed}}} is missing")
    return template


class PromptBuilder:
    """Turns an episode's public start into messages, and completions into conversation turns."""

    def __init__(self, template: PromptTemplate, config: PromptConfig) -> None:
        if config.last_n < 1:
            raise ConfigError(f"prompt.last_n: {config.last_n} would hide the current page; use at least 1")
        self.template = template
        self.config = config

    def identity(self) -> JsonDict:
        """What enters the fingerprint."""
        history: Any = "full" if self.config.history == "full" else {"last_n": self.config.last_n}
        return {
            "name": self.template.name,
            "version": self.template.version,
            "sha256": self.template.sha256(),
            "history": history,
        }

    def start(
        self, *, instruction: str, persona: JsonDict, observation: Observation, skills: list[Skill], max_actions: int
    ) -> list[JsonDict]:
        """The system and the first user message."""
        t = self.template
        skill_list = "\n".join(
            _fill(t.skill, skill_id=s.skill_id, version=s.version, content=s.content) for s in skills
        )
        system = _fill(
            t.system,
            skills=_fill(t.skills, skill_list=skill_list) if skills else "",
            max_actions=str(max_actions),
        )
        persona_json = json.dumps(persona, ensure_ascii=False, sort_keys=True)
        user = _fill(
            t.user,
            instruction=instruction,
            persona=_fill(t.persona, persona_json=persona_json) if persona else "",
            observation=observation.text,
        )
        return [{"role": "system", "content": system.strip()}, {"role": "user", "content": user.strip()}]

    def protocol_feedback(self, error: ProtocolError, tools: list[JsonDict]) -> str:
        """Structured feedback for a completion that broke the protocol."""
        names = ", ".join(tool["function"]["name"] for tool in tools)
        return _fill(self.template.protocol_feedback, code=error.code, message=error.message, tools=names)

    def visible(self, conversation: list[JsonDict]) -> list[JsonDict]:
        """What the model sees of the conversation under the history policy."""
        if self.config.history == "full":
            return conversation
        observations = [i for i, m in enumerate(conversation) if m["role"] == "tool"]
        hidden = set(observations[: -self.config.last_n])
        return [self._stub(m) if i in hidden else m for i, m in enumerate(conversation)]

    def _stub(self, message: JsonDict) -> JsonDict:
        first = str(message["content"]).strip().split("\n", 1)[0][:80]
        return {**message, "content": _fill(self.template.stub, first_line=first)}


def _fill(template: str, **values: str) -> str:
    # one pass, so that braces inside an instruction or a skill are never taken for placeholders
    return _PLACEHOLDER.sub(lambda m: values.get(m.group(1), m.group(0)), template)
