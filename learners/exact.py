"""Exact policy gradient for 2 actions: the tree has K + 1 leaves, so the expected return needs no sampling.

For a row with returns ``R[n]`` of stopping after n retrievals, the expected return is
``sum_n R[n] * prod_{t<n} p_t * (1 - p_n)``, ``p_t`` being the probability of retrieving at place t. Gradient ascent on
its class-balanced mean (same KL anchor) is what every sampled estimator approximates; the report shows it beside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learners.divergence import forward_kl
from learners.learner import Learner, clip_by_member
from rayrl.retrieval.baselines import plan_table
from rayrl.retrieval.mdp import RetrievalEnv
from rayrl.retrieval.world import class_weight_per_row


def stop_probabilities(log_probs: Tensor) -> Tensor:
    """``[..., K, 2]`` action log-probabilities along the always-retrieve path to ``[..., K + 1]`` stopping ones."""
    go, stop = log_probs[..., 0], log_probs[..., 1]
    reach = torch.cat([torch.zeros_like(go[..., :1]), go.cumsum(-1)], dim=-1)
    last = torch.cat([stop, torch.zeros_like(stop[..., :1])], dim=-1)
    return (reach + last).exp()


def fit_exact(learner: Learner, *, steps: int, batch: int = 1024) -> dict[str, float]:
    """Gradient ascent on the exact expected return from the learner's current weights (its reference is refrozen)."""
    world, policy, k = learner.world, learner.policy, learner.world.k
    learner.freeze_reference()
    reference = learner.verified_reference()
    env = RetrievalEnv(world, learner.mdp)
    observations = [env.reset(torch.arange(world.rows))]
    for _ in range(k - 1):
        env.step(torch.zeros(world.rows, dtype=torch.int64))
        observations.append(env.observe())
    dynamic = torch.stack(observations)
    returns = plan_table(world, learner.mdp)
    scale = returns.std()
    weight = class_weight_per_row(world, learner.rl.class_weights)
    e = policy.members
    value = 0.0
    for step in range(steps):
        generator = torch.Generator().manual_seed(learner.seed * 7_919 + step)
        rows = torch.multinomial(weight, e * batch, replacement=True, generator=generator)
        static, seen = world.static[rows], dynamic[:, rows]
        logs = torch.log_softmax(policy(static, seen), -1)
        with torch.no_grad():
            anchor = torch.log_softmax(reference(static, seen), -1)
        stop = stop_probabilities(logs.transpose(0, 1))
        gain = (stop * returns[rows]).sum(1).mean()
        # states count as often as the policy visits them
        visits = torch.cat([torch.ones_like(stop[:, :1]), 1 - stop.cumsum(1)[:, : k - 1]], dim=1).T.detach()
        divergence = (forward_kl(anchor, logs) * visits).sum() / visits.sum()
        loss = -gain / scale + learner.rl.kl * divergence
        learner.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss * e)
        clip_by_member(policy, learner.rl.max_grad_norm)
        learner.step_optimizer(step)
        value = float(gain.detach())
    return {"exact/expected_return": value}
