"""Rubrics: versioned YAML files that say what a judge scores, and how.

A rubric file::

    name: shopping-process
    version: "1"
    instructions: text for the judge
    criteria:
      - {id: search_quality, description: ..., minimum: 1, maximum: 5}
    max_chars: 20000            # the transcript is cut in the middle beyond that

Its hash enters every judge output, so scores under different rubrics are never mixed.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import Field, ValidationError, model_validator

from rayrl.config import Section
from rayrl.errors import ConfigError
from rayrl.schemas import JsonDict, canonical_json, sha256_hex

TOOL_NAME = "submit_scores"


class Criterion(Section):
    """One thing to score, as a whole number."""

    id: str = Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")
    """Short name; the key of the score."""
    description: str = Field(min_length=1)
    """What the judge should look at."""
    minimum: int = 1
    """Worst score."""
    maximum: int = 5
    """Best score."""

    @model_validator(mode="after")
    def _ordered(self) -> Criterion:
        if self.minimum >= self.maximum:
            raise ValueError(f"criterion {self.id}: minimum must be below maximum")
        return self


class Rubric(Section):
    """What is judged."""

    name: str
    """Short name."""
    version: str
    """Bumped on every change."""
    instructions: str
    """What the judge is told, before the criteria."""
    criteria: list[Criterion] = Field(min_length=1)
    """What is scored."""
    max_chars: int = Field(24_000, ge=1000)
    """Longest transcript; a longer one loses its middle, and the judge is told."""

    @model_validator(mode="after")
    def _distinct(self) -> Rubric:
        ids = [c.id for c in self.criteria]
        if len(set(ids)) < len(ids):
            raise ValueError("criteria must have different ids")
        return self

    def sha256(self) -> str:
        """Hash of the whole rubric."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))

    def tool(self) -> JsonDict:
        """The function the judge calls: one integer per criterion and a short rationale."""
        properties: JsonDict = {
            c.id: {
                "type": ["integer", "null"],
                "minimum": c.minimum,
                "maximum": c.maximum,
                "description": f"{c.description} {c.minimum} (worst) to {c.maximum} (best); null: cannot be judged.",
            }
            for c in self.criteria
        }
        properties["rationale"] = {"type": "string", "maxLength": 600, "description": "Why, in one or two sentences."}
        return {
            "type": "function",
            "function": {
                "name": TOOL_NAME,
                "description": "Submit the scores of this episode.",
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": [c.id for c in self.criteria],
                    "additionalProperties": False,
                },
            },
        }


DEFAULT_RUBRIC = Rubric(
    name="shopping-process",
    version="1",
    instructions=(
        "You judge how a shopping assistant worked, from the transcript of one finished episode. Judge the process "
        "that you see, not whether it was lucky. Be strict and consistent. Submit your scores with the tool."
    ),
    criteria=[
        Criterion(id="search_quality", description="Were the search queries apt for the task?"),
        Criterion(id="verification", description="Were attributes, options and price checked before buying?"),
        Criterion(id="efficiency", description="Was the way short, without repetition or needless steps?"),
        Criterion(id="task_fit", description="Does what was bought fit the task as the user stated it?"),
    ],
)


def load_rubric(path: Path | None) -> Rubric:
    """A rubric file, or the default one.

    Raises:
        ConfigError: unreadable or not valid; names file and key.
    """
    if path is None:
        return DEFAULT_RUBRIC
    try:
        return Rubric.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"rubric {path}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or '(top)'}: {e['msg']}" for e in error.errors(include_url=False)]
        raise ConfigError(f"rubric {path} is not valid:\n" + "\n".join(lines)) from None
