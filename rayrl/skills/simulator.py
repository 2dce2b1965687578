"""Worlds in which the true effect of every chunk is known: what a gate is itself evaluated in.

A rollout of a task succeeds when ``difficulty + sum of chunk shifts + luck > 0``; luck is normal, a share ``rho`` of it
common to rollouts with the same seed (that is how well common random numbers work for a policy whose prompt changed).
A failure earns a partial reward drawn from the measured failures. Difficulties are normal over tasks. The four numbers
are fitted to measured rollouts by :func:`fit_outcomes`, so that marginal rate, agreement of repeats and agreement of
paired runs are the measured ones.

Effects are average effects on the reward over tasks and over random subsets of the other chunks, which is what a gate
estimates; shifts are solved so that they are exact, interactions included.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from rayrl.schemas import JsonDict
from rayrl.skills.estimators import FloatArray

_MASKS = 4096


@dataclass(frozen=True)
class Outcomes:
    """How rewards of a policy behave. ``failures`` and ``successes`` are quantiles of the reward given the outcome."""

    mu: float
    tau: float
    rho: float
    failures: tuple[float, ...]
    successes: tuple[float, ...] = (1.0,)
    measured: JsonDict = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """Standard deviation of difficulty and luck together."""
        return float(np.sqrt(1 + self.tau**2))

    @property
    def gain(self) -> float:
        """Mean reward of a success minus mean reward of a failure."""
        return float(np.mean(self.successes) - np.mean(self.failures))

    def as_dict(self) -> JsonDict:
        """JSON-able form."""
        return asdict(self)


def fit_outcomes(
    bare: npt.NDArray[np.bool_], masked: npt.NDArray[np.bool_], failures: FloatArray, successes: FloatArray
) -> Outcomes:
    """Fit to measured successes.

    Args:
        bare: (tasks, samples >= 2) success of bare runs.
        masked: same shape and seeds, with random subsets of skills.
        failures: rewards of the failed rollouts. successes: rewards of the others.

    Raises:
        ValueError: too little data, or nothing varies.
    """
    if bare.ndim != 2 or bare.shape[1] < 2 or bare.shape != masked.shape:
        raise ValueError(f"needs bare and masked successes of one shape with at least two samples, got {bare.shape}")
    p, p_masked = float(bare.mean()), float(masked.mean())
    if not (0 < p < 1 and 0 < p_masked < 1) or failures.size == 0:
        raise ValueError("needs both successes and failures, bare and masked")
    n = bare.shape[1]
    hits = bare.sum(axis=1)
    both = float((hits * (hits - 1) / (n * (n - 1))).mean())  # two different samples of a task both succeed
    share = _latent_correlation(p, p, both)  # tau^2 / (1 + tau^2)
    tau = float(np.sqrt(share / (1 - share)))
    paired = float((bare & masked).mean())
    rho = float(np.clip(_latent_correlation(p, p_masked, paired) * (1 + tau**2) - tau**2, 0.0, 1.0))
    quantiles = np.linspace(0, 1, 101)
    return Outcomes(
        mu=float(stats.norm.ppf(p) * np.sqrt(1 + tau**2)),
        tau=tau,
        rho=rho,
        failures=tuple(round(float(v), 4) for v in np.quantile(failures, quantiles, method="inverted_cdf")),
        successes=tuple(round(float(v), 4) for v in np.quantile(successes, quantiles, method="inverted_cdf")),
        measured={
            "tasks": int(bare.shape[0]),
            "samples": int(n),
            "bare_success": p,
            "masked_success": p_masked,
            "both_of_two_samples": both,
            "both_of_pair": paired,
        },
    )


def _latent_correlation(p: float, q: float, both: float) -> float:
    """Correlation of two standard normals that exceed thresholds with probabilities p, q and jointly with ``both``."""
    a, b = float(stats.norm.ppf(p)), float(stats.norm.ppf(q))

    def joint(r: float) -> float:
        return float(stats.multivariate_normal.cdf([a, b], mean=[0, 0], cov=[[1, r], [r, 1]])) - both

    if joint(0.0) >= 0:
        return 0.0
    return float(optimize.brentq(joint, 0.0, 0.999, xtol=1e-5)) if joint(0.999) > 0 else 0.999


@dataclass(frozen=True)
class World:
    """Outcomes plus chunks. ``effects`` (k,) are the true average effects, ``shifts`` (k,) latent, ``pairs`` latent
    interactions ``(i, j, shift)`` that apply when both chunks are there."""

    outcomes: Outcomes
    effects: FloatArray
    shifts: FloatArray
    pairs: tuple[tuple[int, int, float], ...] = ()

    def latent(self, masks: FloatArray) -> FloatArray:
        """Shift of a set of chunks; masks (..., k)."""
        out: FloatArray = masks @ self.shifts
        for i, j, shift in self.pairs:
            out = out + shift * masks[..., i] * masks[..., j]
        return out

    def play(self, difficulty: FloatArray, masks: FloatArray, luck: Luck) -> FloatArray:
        """Rewards, shape of ``difficulty``."""
        success = difficulty + self.latent(masks) + luck.success > 0
        place = stats.norm.cdf(luck.partial)
        failures, successes = np.asarray(self.outcomes.failures), np.asarray(self.outcomes.successes)
        low = failures[np.minimum((place * failures.size).astype(int), failures.size - 1)]
        high = successes[np.minimum((place * successes.size).astype(int), successes.size - 1)]
        rewards: FloatArray = np.where(success, high, low)
        return rewards


@dataclass(frozen=True)
class Luck:
    """Standard normal luck of rollouts: of succeeding, and of how much a failure earns."""

    success: FloatArray
    partial: FloatArray


def draw_luck(rng: np.random.Generator, n: int, arms: int, rho: float, *, common: bool) -> list[Luck]:
    """Luck of ``arms`` runs of the same n jobs; with ``common`` a share ``rho`` of its variance is shared."""
    own = rng.standard_normal((2, arms, n))
    if common:
        own = np.sqrt(rho) * rng.standard_normal((2, 1, n)) + np.sqrt(1 - rho) * own
    return [Luck(own[0, a], own[1, a]) for a in range(arms)]


def make_world(
    outcomes: Outcomes, effects: FloatArray, pairs: tuple[tuple[int, int, float], ...] = (), *, seed: int = 0
) -> World:
    """A world whose chunks have exactly these average effects on the reward.

    Raises:
        ValueError: effects that no shifts can produce (together beyond what is left to gain or lose).
    """
    k = effects.size
    masks = (np.random.default_rng(seed).random((_MASKS, k)) < 0.5).astype(float)
    shifts = effects / outcomes.gain * outcomes.spread / stats.norm.pdf(outcomes.mu / outcomes.spread)
    world = World(outcomes, effects, shifts, pairs)
    for _ in range(60):
        found, slope = _average_effects(world, masks)
        if float(np.abs(found - effects).max()) < 1e-5:
            return world
        step = np.clip((effects - found) / np.maximum(slope, 1e-3), -0.5, 0.5)  # Newton, kept from running away
        world = World(outcomes, effects, world.shifts + step, pairs)
    raise ValueError("no shifts give these effects; they ask for more than there is to gain or lose")


def _average_effects(world: World, masks: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Average effect of every chunk on the reward, and its derivative by the shift, in closed form over tasks."""
    o = world.outcomes
    found, slope = np.empty(masks.shape[1]), np.empty(masks.shape[1])
    for j in range(masks.shape[1]):
        on, off = masks.copy(), masks.copy()
        on[:, j], off[:, j] = 1.0, 0.0
        high, low = (o.mu + world.latent(m) for m in (on, off))
        found[j] = o.gain * float(np.mean(stats.norm.cdf(high / o.spread) - stats.norm.cdf(low / o.spread)))
        slope[j] = o.gain * float(np.mean(stats.norm.pdf(high / o.spread))) / o.spread
    return found, slope


STANDARD_EFFECTS = np.array([0.08] * 4 + [0.05] * 2 + [0.0] * 8 + [-0.06] * 2)
"""16 chunks: 4 clearly helpful, 2 helpful, 8 useless, 2 harmful."""


STRONG_EFFECTS = np.array([0.08] * 4 + [0.05] * 2 + [0.0] * 8 + [-0.38, -0.16])
"""The same with two chunks that do strong harm."""
HIDING_SHIFTS = (-1.94, -1.03)
"""Latent shifts of two chunks that cost .30 and .16 on average at the measured difficulty."""


def hidden_world(outcomes: Outcomes) -> World:
    """Two chunks of strong harm that hide what the others are worth.

    Without the two, the others have the effects of ``STANDARD_EFFECTS``; averaged over subsets that hold them, less
    than half of that is left, as in the measured study bank.
    """
    plain = make_world(outcomes, STANDARD_EFFECTS[:-2])
    shifts = np.concatenate([plain.shifts, HIDING_SHIFTS])
    masks = (np.random.default_rng(0).random((_MASKS, shifts.size)) < 0.5).astype(float)
    effects, _ = _average_effects(World(outcomes, np.zeros(shifts.size), shifts), masks)
    return World(outcomes, np.where(shifts == 0, 0.0, effects), shifts)


def random_world(outcomes: Outcomes, rng: np.random.Generator, *, chunks: int = 16) -> World:
    """A world drawn at random: difficulty around the measured one, a random share of helpful and harmful chunks with
    random effects, and some pairs of helpful chunks that partly replace each other (or a pair that need each other)."""
    for _ in range(50):
        moved = Outcomes(
            mu=outcomes.mu + float(rng.normal(0, 0.25)),
            tau=float(outcomes.tau * np.exp(rng.normal(0, 0.2))),
            rho=float(np.clip(outcomes.rho + rng.normal(0, 0.1), 0, 0.98)),
            failures=outcomes.failures,
            successes=outcomes.successes,
        )
        helpful, harmful = int(rng.integers(3, 8)), int(rng.integers(1, 4))
        effects = np.zeros(chunks)
        effects[:helpful] = rng.uniform(0.04, 0.10, helpful)
        effects[helpful : helpful + harmful] = -rng.uniform(0.03, 0.08, harmful)
        pairs = tuple((2 * i, 2 * i + 1, float(rng.normal(-0.1, 0.15))) for i in range(int(rng.integers(0, 3))))
        try:
            return make_world(moved, effects, pairs)
        except (ValueError, FloatingPointError):
            continue
    raise ValueError("no world could be drawn around these outcomes")


def world_facts(world: World) -> dict[str, Any]:
    """JSON-able description."""
    return {
        "effects": [round(float(e), 4) for e in world.effects],
        "pairs": [list(p) for p in world.pairs],
        "mu": world.outcomes.mu,
        "tau": world.outcomes.tau,
        "rho": world.outcomes.rho,
    }
