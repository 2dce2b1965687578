"""The gate, gated: many simulated gates in worlds with known effects, and what a rule got right in them.

Every gate draws its tasks, seeds and masks afresh; the fit, the looks and the decision are those of the real gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayrl.schemas import JsonDict
from rayrl.skills.design import Blocks, contrast_design
from rayrl.skills.estimators import Fit, FloatArray, fit_cluster
from rayrl.skills.rule import GateRule, Look, final_verdicts, take_look
from rayrl.skills.selection import decided_effects, rank_correlation
from rayrl.skills.simulator import World, draw_luck


@dataclass(frozen=True)
class GateOutcome:
    """One simulated gate: estimates, their errors, what was selected, and what it cost."""

    beta: FloatArray
    se: FloatArray
    selected: frozenset[int]
    rollouts: int
    correlation: float
    dropped: frozenset[int]
    decided: FloatArray
    """Estimates with 0 for what stayed undecided."""


def simulate_gate(
    world: World, rule: GateRule, rng: np.random.Generator, *, tasks: int = 400, common: bool = True
) -> GateOutcome:
    """Play one gate. Bare rollouts are counted like all others."""
    k = world.effects.size
    names = [str(i) for i in range(k)]
    difficulty = world.outcomes.mu + world.outcomes.tau * rng.standard_normal(tasks)
    total = rule.total_pairs(tasks)
    queue = np.concatenate([rng.permutation(tasks) for _ in range(-(-total // tasks))])[:total]
    parts: list[Blocks] = []
    look: Look | None = None
    fit: Fit | None = None
    done = 0
    for index, size in enumerate(rule.stage_sizes(tasks)):
        chosen = queue[done : done + size]
        done += size
        varied = np.array([look is None or not rule.narrow or name in look.open for name in names])
        active = np.array([look is None or name not in look.dropped for name in names])
        parts.append(_play_pairs(world, rule, rng, difficulty[chosen], chosen, varied, active, common=common))
        design = contrast_design(parts)
        fit = fit_cluster(design.x, design.y, design.tasks, names)
        look = take_look(rule, index, fit, look, done=done, total=total)
        if look.stop:
            break
    if fit is None or look is None:
        raise ValueError("a rule without stages decides nothing")
    verdicts = final_verdicts(rule, fit, look)
    chosen_names = {v.name for v in verdicts if v.status == "selected"}
    rewards = np.concatenate([p.rewards for p in parts])
    return GateOutcome(
        fit.beta,
        fit.se,
        frozenset(int(n) for n in chosen_names),
        2 * done,
        float(np.corrcoef(rewards[:, 0], rewards[:, 1])[0, 1]),
        frozenset(int(n) for n in look.dropped),
        decided_effects(fit.beta, [v.status for v in verdicts]),
    )


def _play_pairs(
    world: World,
    rule: GateRule,
    rng: np.random.Generator,
    difficulty: FloatArray,
    tasks: np.ndarray,
    varied: np.ndarray,
    active: np.ndarray,
    *,
    common: bool,
) -> Blocks:
    n = difficulty.size
    first = (rng.random((n, varied.size)) < rule.inclusion).astype(float)
    second = np.where(varied, 1 - first, first) if rule.design == "complement" else np.zeros_like(first)
    first, second = first * active, second * active
    luck = draw_luck(rng, n, 2, world.outcomes.rho, common=common)
    rewards = np.stack([world.play(difficulty, m, w) for m, w in zip((first, second), luck, strict=True)], axis=1)
    return Blocks(tasks, rewards, np.stack([first, second], axis=1))


@dataclass(frozen=True)
class Score:
    """What a rule did over many gates. Rates are means over gates; ``false_discovery`` is 0 where nothing was chosen.

    ``spearman`` is the rank correlation of the estimates of two gates on the same world with fresh rollouts;
    ``spearman_decided`` that of estimates whose undecided chunks share one rank.
    """

    gates: int
    precision: float
    recall: float
    false_discovery: float
    false_discovery_high: float
    """Upper end of its 95 % interval over gates."""
    spearman: float
    spearman_decided: float
    se: float
    rollouts: float
    correlation: float

    def as_dict(self) -> JsonDict:
        """Rounded, JSON-able."""
        return {name: round(value, 4) for name, value in self.__dict__.items()}


def score_rule(
    worlds: list[World],
    rule: GateRule,
    *,
    gates: int,
    seed: list[int],
    tasks: int = 400,
    common: bool = True,
) -> Score:
    """Simulate ``gates`` gates (an even number), two with fresh tasks and rollouts on every world in turn.

    Gate g of every rule and setting that is given the same seed has its own stream, so settings can be compared.
    """
    recalls, discoveries, precisions, ranks, ties, costs, errors, correlations = ([] for _ in range(8))
    for pair in range(gates // 2):
        world = worlds[pair % len(worlds)]
        helpful = set(np.flatnonzero(world.effects > 0).tolist())
        outcomes = [
            simulate_gate(world, rule, np.random.default_rng([*seed, pair, g]), tasks=tasks, common=common)
            for g in range(2)
        ]
        for o in outcomes:
            right = len(o.selected & helpful)
            recalls.append(right / max(1, len(helpful)))
            discoveries.append((len(o.selected) - right) / max(1, len(o.selected)))
            if o.selected:
                precisions.append(right / len(o.selected))
            costs.append(o.rollouts)
            errors.append(float(o.se.mean()))
            correlations.append(o.correlation)
        ranks.append(rank_correlation(outcomes[0].beta, outcomes[1].beta))
        ties.append(rank_correlation(outcomes[0].decided, outcomes[1].decided))
    fdr = float(np.mean(discoveries))
    half = 1.96 * float(np.std(discoveries, ddof=1) / np.sqrt(len(discoveries)))
    return Score(
        gates=len(recalls),
        precision=float(np.mean(precisions)) if precisions else 0.0,
        recall=float(np.mean(recalls)),
        false_discovery=fdr,
        false_discovery_high=fdr + half,
        spearman=float(np.mean(ranks)),
        spearman_decided=float(np.mean(ties)),
        se=float(np.mean(errors)),
        rollouts=float(np.mean(costs)),
        correlation=float(np.mean(correlations)),
    )
