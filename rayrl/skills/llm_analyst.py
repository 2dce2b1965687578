"""The analyst that asks a model: any ChatModel with structured output reads an episode and writes a card.

The model gets a digest of the public episode and one tool, ``write_card``. For a failure it also gets the private goal
and, where an environment is at hand, what a replay found; it is told to keep both out of the card, and the firewall
makes sure. Whatever is no usable card is counted under its reason and never becomes a skill.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rayrl.errors import EpisodeError
from rayrl.evaluation.diagnosis import RULES
from rayrl.evaluation.view import EpisodeView
from rayrl.models.base import ChatModel
from rayrl.schemas import JsonDict, canonical_json, sha256_hex, step_seed
from rayrl.skills.bank import Builder, EvidenceRef
from rayrl.skills.cards import Card, Deployable, make_card

PROMPT_VERSION = "1"
MAX_STEPS = 12
_SYSTEM = """You study episodes of a shopping agent and write down what they teach.
Write one procedure that helps with OTHER tasks. Say when it applies, what to do step by step, how to verify it and what
to avoid. Never mention product names, brands, ids, numbers of tasks, or option values of this episode.
Answer by calling write_card."""
_FAILURE = """The episode failed. Privileged, for your understanding only, never to be repeated in the card:
{privileged}"""
_TOOL: JsonDict = {
    "type": "function",
    "function": {
        "name": "write_card",
        "description": "Record what the episode teaches.",
        "parameters": {
            "type": "object",
            "properties": {
                "mechanism": {"type": "string", "maxLength": 40},
                "title": {"type": "string", "maxLength": 80},
                "applicable_when": {"type": "string", "maxLength": 200},
                "behaviour": {"type": "string", "maxLength": 200},
                "procedure": {
                    "type": "array",
                    "items": {"type": "string", "maxLength": 160},
                    "minItems": 1,
                    "maxItems": 5,
                },
                "verify": {"type": "string", "maxLength": 160},
                "avoid": {"type": "string", "maxLength": 160},
                "confidence": {"type": "number", "minimum": 0, "maximum": 1},
            },
            "required": [
                "mechanism",
                "title",
                "applicable_when",
                "behaviour",
                "procedure",
                "verify",
                "avoid",
                "confidence",
            ],
            "additionalProperties": False,
        },
    },
}


def prompt_sha256() -> str:
    """Hash of everything the analyst is told, apart from the episode."""
    return sha256_hex(canonical_json([PROMPT_VERSION, _SYSTEM, _FAILURE, _TOOL]))


@dataclass(frozen=True)
class Analysis:
    """A card, or the reason why there is none."""

    card: Card | None
    reason: str = ""


def digest(view: EpisodeView) -> str:
    """The public course of an episode, one line a step; what was bought and how it was rated."""
    lines = [f"Task: {view.extra.get('instruction', '')}".strip()]
    for step in view.steps[:MAX_STEPS]:
        note = f" (refused: {step.reason})" if step.valid is False else ""
        what = step.action or f"no usable call: {step.protocol_error or step.policy_failure}"
        lines.append(f"{step.index}. on {step.page or 'the page'}: {what}{note}")
    if len(view.steps) > MAX_STEPS:
        lines.append(f"... {len(view.steps) - MAX_STEPS} more steps")
    lines.append(f"End: {view.termination}; reward {view.reward}")
    labels = [name for name, rule in RULES.items() if rule(view) is not None]
    return "\n".join([*lines, f"Observed: {', '.join(labels) or 'nothing unusual'}"])


async def analyse(
    model: ChatModel, view: EpisodeView, *, run: str = "", replayed: Mapping[str, Any] | None = None, seed: int = 0
) -> Analysis:
    """Ask for one card. Never raises for what the model says; transport faults are a reason too."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": digest(view)}]
    audit: JsonDict | None = None
    if not view.success:
        audit = {"goal": view.goal, "bought": view.bought, "replay": dict(replayed) if replayed else None}
        told = json.dumps({k: v for k, v in audit.items() if v}, ensure_ascii=False, default=str)[:1500]
        messages[1]["content"] += "\n" + _FAILURE.format(privileged=told)
    try:
        output = await model.generate(messages, [_TOOL], seed=step_seed(seed, len(view.steps)))
    except EpisodeError as error:
        return Analysis(None, f"model: {error.code}")
    if output.policy_failure is not None:
        return Analysis(None, f"model: {output.policy_failure.code}")
    if output.protocol_error is not None or len(output.tool_calls) != 1:
        return Analysis(None, f"model: {output.protocol_error.code if output.protocol_error else 'no_tool_call'}")
    return card_from_call(output.tool_calls[0].name, output.tool_calls[0].arguments, view, model.identity(), run, audit)


def card_from_call(
    name: str, arguments: JsonDict, view: EpisodeView, model: JsonDict, run: str, audit: JsonDict | None
) -> Analysis:
    """Validate what was written; a card with empty or repeated steps is none."""
    if name != "write_card":
        return Analysis(None, "model: unknown_tool")
    given = dict(arguments)
    confidence = given.pop("confidence", 0.5)
    procedure = given.get("procedure")
    if isinstance(procedure, list):
        steps = [" ".join(str(s).split()) for s in procedure]
        given["procedure"] = list(dict.fromkeys(s for s in steps if len(s) >= 8))
    try:
        deployable = Deployable.model_validate(given)
        builder = Builder(kind="llm", model=model, prompt_sha256=prompt_sha256())
        card = make_card(
            "success" if view.success else "failure",
            EvidenceRef(run=run, episode_id=view.episode_id, steps=[s.index for s in view.steps]),
            deployable,
            builder,
            observed=[name for name, rule in RULES.items() if rule(view) is not None],
            confidence=float(confidence),
            privileged_audit=audit,
        )
    except (ValidationError, TypeError, ValueError) as error:
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
        return Analysis(None, f"card: {'.'.join(map(str, first['loc'])) if first else type(error).__name__}")
    return Analysis(card)
