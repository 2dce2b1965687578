"""Rule labels on frozen traces: what went wrong, and at which steps.

Each label is one small pure function ``(EpisodeView) -> Finding | None``. Where the private goal is at hand it decides
questions about the target; a finding itself never quotes the goal, so labels may be shown to anyone. Labels describe
behaviour, not blame: a successful episode may carry some.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rayrl.evaluation.view import EpisodeView, plain, view_of
from rayrl.schemas import JsonDict

LABELS_SCHEMA = "rayrl-labels-v1"
LOOP_TIMES = 3
STREAK = 2


@dataclass(frozen=True)
class Finding:
    """Evidence of a label: the steps it rests on and public facts about them."""

    steps: list[int]
    detail: JsonDict = field(default_factory=dict)


Rule = Callable[[EpisodeView], Finding | None]


def never_searched(e: EpisodeView) -> Finding | None:
    """No search was ever executed."""
    return None if any(s.query is not None for s in e.steps) else Finding([s.index for s in e.steps])


def _target(e: EpisodeView) -> str | None:
    found = (e.goal or {}).get("asin")
    return None if found is None else str(found)


def _surfaced(e: EpisodeView, target: str) -> list[int]:
    return [i for i, state in e.states() if any(str(p.get("asin")) == target for p in state.get("products") or () if p)]


def target_never_surfaced(e: EpisodeView) -> Finding | None:
    """Searched, but no results page listed the target."""
    target = _target(e)
    searches = [s.index for s in e.steps if s.query is not None]
    if target is None or not searches or _surfaced(e, target):
        return None
    return Finding(searches, {"searches": len(searches)})


def surfaced_not_opened(e: EpisodeView) -> Finding | None:
    """A results page listed the target, but its page was never opened."""
    target = _target(e)
    if target is None:
        return None
    seen = _surfaced(e, target)
    opened = any(str((state.get("product") or {}).get("asin")) == target for _, state in e.states())
    return Finding(seen, {"pages": len(seen)}) if seen and not opened else None


def wrong_product(e: EpisodeView) -> Finding | None:
    """Bought a product that is not the target, without success."""
    if e.bought is None or e.success:
        return None
    target = _target(e)
    missed = e.bought != target if target is not None else e.detail.get("target_asin_match") is False
    return Finding(_last(e), {"bought": e.bought}) if missed else None


def wrong_variant(e: EpisodeView) -> Finding | None:
    """Bought the target product with other options than asked for."""
    if e.bought is None:
        return None
    target = _target(e)
    right = e.bought == target if target is not None else e.detail.get("target_asin_match") is True
    if not right or not (e.detail.get("r_option") is not None and e.detail["r_option"] < 1):
        return None
    chosen = [s.index for s in e.steps if s.clicked and "=" in s.clicked and s.product == e.bought]
    return Finding(chosen or _last(e), {"options": e.purchase.get("options") or {}})


def option_axis_missed(e: EpisodeView) -> Finding | None:
    """Tried to buy before every option axis was chosen."""
    steps = [
        s.index
        for s in e.steps
        if s.reason == "incomplete_options"
        or (s.clicked is not None and plain(s.clicked) == "buy now" and s.state.get("missing_option_axes"))
    ]
    return Finding(steps) if steps else None


def over_budget(e: EpisodeView) -> Finding | None:
    """Bought above the price limit."""
    if e.bought is None:
        return None
    limit, price = (e.goal or {}).get("price_upper"), e.purchase.get("price")
    if isinstance(limit, int | float) and isinstance(price, int | float):
        return Finding(_last(e), {"price": price}) if price > limit else None
    return Finding(_last(e)) if e.detail.get("r_price") == 0 and e.detail.get("price_verifiable") is not False else None


def price_not_verified(e: EpisodeView) -> Finding | None:
    """Bought although the price of the chosen variant could not be decided."""
    return Finding(_last(e)) if e.bought is not None and e.detail.get("price_verifiable") is False else None


def bought_without_inspection(e: EpisodeView) -> Finding | None:
    """Bought the only product ever opened although the results listed others: nothing was compared."""
    if e.bought is None:
        return None
    opened = {s.product for s in e.steps if s.product is not None}
    listed = {asin for s in e.steps for asin in s.listed}
    if len(opened) > 1 or len(listed) < 2:
        return None
    return Finding([s.index for s in e.steps if s.clicked == e.bought] or _last(e), {"listed": len(listed)})


def loop(e: EpisodeView) -> Finding | None:
    """The same action on the same page, three times or more."""
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for s in e.steps:
        if s.action is not None:
            places[s.place(), s.action].append(s.index)
    repeated = [steps for steps in places.values() if len(steps) >= LOOP_TIMES]
    return Finding(max(repeated, key=len), {"times": max(map(len, repeated))}) if repeated else None


def repeated_query(e: EpisodeView) -> Finding | None:
    """The same search text, twice or more."""
    counts = Counter(s.query for s in e.steps if s.query is not None)
    steps = [s.index for s in e.steps if s.query is not None and counts[s.query] > 1]
    return Finding(steps, {"times": max(counts.values())}) if steps else None


def protocol_error_streak(e: EpisodeView) -> Finding | None:
    """Two or more protocol errors in a row."""
    return _streak(e, lambda s: s.protocol_error is not None, "codes", lambda s: s.protocol_error)


def invalid_action_streak(e: EpisodeView) -> Finding | None:
    """Two or more invalid actions in a row."""
    return _streak(e, lambda s: s.valid is False, "reasons", lambda s: s.reason)


def generation_length(e: EpisodeView) -> Finding | None:
    """A completion was cut by its length."""
    steps = [s.index for s in e.steps if s.policy_failure == "generation_length"]
    return Finding(steps or _last(e)) if steps or e.termination == "generation_length" else None


def context_overflow(e: EpisodeView) -> Finding | None:
    """The conversation no longer fitted the model."""
    steps = [s.index for s in e.steps if s.policy_failure == "context_overflow"]
    return Finding(steps) if steps else None


def action_limit(e: EpisodeView) -> Finding | None:
    """The episode used up its actions."""
    return Finding(_last(e)) if e.termination == "action_limit" else None


def _last(e: EpisodeView) -> list[int]:
    return [e.steps[-1].index] if e.steps else []


def _streak(e: EpisodeView, hit: Callable[[Any], bool], key: str, word: Callable[[Any], Any]) -> Finding | None:
    best: list[Any] = []
    run: list[Any] = []
    for s in e.steps:
        run = [*run, s] if hit(s) else []
        best = run if len(run) > len(best) else best
    return Finding([s.index for s in best], {key: [word(s) for s in best]}) if len(best) >= STREAK else None


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        never_searched,
        target_never_surfaced,
        surfaced_not_opened,
        wrong_product,
        wrong_variant,
        option_axis_missed,
        over_budget,
        price_not_verified,
        bought_without_inspection,
        loop,
        repeated_query,
        protocol_error_streak,
        invalid_action_streak,
        generation_length,
        context_overflow,
        action_limit,
    )
}

_CAUSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("protocol", ("generation_length", "context_overflow", "protocol_error_streak")),
    ("search", ("never_searched", "target_never_surfaced")),
    ("selection", ("surfaced_not_opened",)),
    ("budget", ("over_budget", "price_not_verified")),
    ("specification", ("wrong_variant", "option_axis_missed", "wrong_product")),
    ("persistence", ("loop", "repeated_query", "action_limit", "invalid_action_streak")),
)


def diagnose(labels: set[str], *, success: bool) -> str:
    """The main cause of an unsuccessful episode, from its labels in the order of the road to a purchase."""
    if success:
        return "success"
    for cause, members in _CAUSES:
        if labels & set(members):
            return cause
    return "other"


def label_record(record: JsonDict, goal: JsonDict | None = None, *, run: str = "") -> JsonDict:
    """One line of ``episode_labels.jsonl`` for a complete record."""
    view = view_of(record, goal)
    found = {name: finding for name, rule in RULES.items() if (finding := rule(view)) is not None}
    job = record.get("job") or {}
    return {
        "schema": LABELS_SCHEMA,
        "run": run,
        "episode_id": view.episode_id,
        "attempt": record.get("attempt") or 1,
        "split": job.get("split"),
        "task_id": job.get("task_id"),
        "sample_id": job.get("sample_id"),
        "reward": view.reward,
        "success": view.success,
        "goal_known": goal is not None,
        "diagnosis": diagnose(set(found), success=view.success),
        "labels": [{"label": name, "steps": f.steps, "detail": f.detail} for name, f in found.items()],
    }
