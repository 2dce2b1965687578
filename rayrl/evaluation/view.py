"""What a diagnosis looks at: one attempt as a sequence of small facts about pages and actions."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from typing import Any

import orjson

from rayrl.schemas import JsonDict, sha256_hex
from rayrl.traces.schema import interned


def plain(text: Any) -> str:
    """Text for comparison: NFKC, lower case, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", str(text)).casefold().split())


@dataclass(frozen=True)
class StepView:
    """One step: the page the policy saw, what it called, what came of it."""

    index: int
    state: JsonDict
    tool: str | None
    arguments: JsonDict
    action: str | None
    valid: bool | None
    reason: str | None
    protocol_error: str | None
    policy_failure: str | None

    @property
    def page(self) -> str:
        """Page type, empty when the environment has none."""
        return str(self.state.get("page_type") or "")

    @property
    def query(self) -> str | None:
        """Normalised search text of an executed search."""
        if self.tool != "search" or self.action is None or self.valid is False:
            return None
        return plain(self.arguments.get("query", ""))

    @property
    def clicked(self) -> str | None:
        """Value of a click that reached the environment."""
        return str(self.arguments.get("value")) if self.tool == "click" and self.action is not None else None

    @property
    def product(self) -> str | None:
        """Product whose page is shown."""
        found = (self.state.get("product") or {}).get("asin") if self.page == "product_detail" else None
        return None if found is None else str(found)

    @property
    def listed(self) -> list[str]:
        """Products listed on a results page, in rank order."""
        return [str(p.get("asin")) for p in self.state.get("products") or () if isinstance(p, dict)]

    def place(self) -> str:
        """A short hash of the page without the note about the last action: equal pages are equal places."""
        kept = {k: v for k, v in self.state.items() if k != "last_action"}
        return sha256_hex(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS))[:16]


@dataclass(frozen=True)
class EpisodeView:
    """An attempt, ready for labels. ``goal`` is private and only used to decide; labels never quote it."""

    episode_id: str
    steps: list[StepView]
    last_state: JsonDict
    reward: float | None
    detail: JsonDict
    purchase: JsonDict
    termination: str | None
    goal: JsonDict | None = None
    extra: JsonDict = field(default_factory=dict)

    @property
    def success(self) -> bool:
        """Whether the environment called it a success (``r_success`` where there is one, else a full reward)."""
        value = self.detail.get("r_success")
        return value == 1 if value is not None else self.reward == 1.0

    @property
    def bought(self) -> str | None:
        """Product that was bought."""
        found = self.purchase.get("asin")
        return None if found is None else str(found)

    def states(self) -> list[tuple[int, JsonDict]]:
        """Every page seen, with the step that was taken on it (the last page: with the step that led to it)."""
        last = [(self.steps[-1].index, self.last_state)] if self.steps else []
        return [(s.index, s.state) for s in self.steps] + last


def view_of(record: JsonDict, goal: JsonDict | None = None) -> EpisodeView:
    """The view of a record of either schema."""
    states = interned(record).get("states") or []

    def state_of(observation: Any) -> JsonDict:
        if not isinstance(observation, dict):
            return {}
        state = observation.get("state", observation.get("observation_state"))
        if isinstance(state, int):
            state = states[state] if 0 <= state < len(states) else {}
        return state if isinstance(state, dict) else {}

    steps: list[StepView] = []
    last: JsonDict = {}
    for index, step in enumerate(record.get("steps") or ()):
        model = step.get("model") or step.get("model_output") or {}
        calls = model.get("tool_calls") or []
        call = calls[0] if len(calls) == 1 else {}
        feedback = step.get("action_feedback") or {}
        error, failure = step.get("protocol_error"), step.get("policy_failure")
        arguments = call.get("arguments")
        steps.append(
            StepView(
                index=step.get("index", index),
                state=state_of(step.get("observation")),
                tool=call.get("name"),
                arguments=arguments if isinstance(arguments, dict) else {},
                action=step.get("action"),
                valid=feedback.get("valid"),
                reason=feedback.get("reason"),
                protocol_error=error.get("code") if isinstance(error, dict) else error,
                policy_failure=failure.get("code") if isinstance(failure, dict) else failure,
            )
        )
        last = state_of((step.get("environment") or {}).get("observation")) or last
    final = record.get("final") or {}
    return EpisodeView(
        episode_id=str(record.get("episode_id")),
        steps=steps,
        last_state=last,
        reward=final.get("reward"),
        detail=final.get("reward_detail") or {},
        purchase=final.get("purchase") or {},
        termination=final.get("termination_reason"),
        goal=goal,
    )
