"""The learner: policy, frozen reference, optimiser; supervised fine-tuning, then policy gradient.

Reads top to bottom: :meth:`Learner.fit_sft` clones the expert, :meth:`Learner.freeze_reference` takes the snapshot, and
:meth:`Learner.update` makes one gradient step

    loss = -mean_over_steps(min(ratio * A, clip(ratio) * A)) + kl * KL(pi_ref || pi) - entropy * H(pi)

with advantages from :mod:`learners.advantages` and an exact KL. The mean is over live steps of the whole batch, so a
long episode weighs as much per step as a short one. The reference's checksum is verified at every update.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from learners import advantages as adv
from learners.divergence import entropy, forward_kl, reverse_kl
from rayrl.config import Section
from rayrl.errors import RayrlError
from rayrl.retrieval.mdp import MdpConfig, RetrievalEnv
from rayrl.retrieval.policy import RetrievalPolicy, checksum
from rayrl.retrieval.pools import CLASS_WEIGHTS, Kind
from rayrl.retrieval.rollout import Batch, rollout
from rayrl.retrieval.world import World, class_weight_per_row
from rayrl.schemas import step_seed

Estimator = Literal["trace", "return_to_go", "grpo", "rloo", "turn_credit", "seed"]


class SftConfig(Section):
    """Behaviour cloning of the expert."""

    epochs: int = Field(30, ge=0)
    """Passes over the expert's (state, action) pairs; 0 leaves the policy at its random start."""
    learning_rate: float = Field(1e-3, gt=0)
    """Adam."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled (AdamW)."""
    batch: int = Field(256, ge=1)
    """States per step."""
    stray_passes: int = Field(0, ge=0)
    """Further passes in which the expert strays: it retrieves half of the time although it would not, and the states it
    gets into are labelled with what it would do there. Without them a clone has never seen a distractor on a class B
    question, and cannot know that it can be dropped (3 actions)."""


class RlConfig(Section):
    """Policy gradient after cloning."""

    estimator: Estimator = "trace"
    """How credit is assigned; ``seed`` reproduces the original design's defect."""
    scale: adv.Scale = "batch"
    """What trace, return_to_go and grpo divide by: ``group`` or ``batch`` (see docs/trace.md)."""
    updates: int = Field(200, ge=0)
    """Gradient steps."""
    questions: int = Field(128, ge=1)
    """Groups per update."""
    group_size: int = Field(8, ge=1)
    """Episodes per group: same question, same candidate order."""
    learning_rate: float = Field(3e-4, gt=0)
    """Adam, at the first update."""
    learning_rate_final: float | None = Field(None, ge=0)
    """At the last update, linear in between; None keeps ``learning_rate`` throughout. Going down to 0 takes the noise
    of the last gradients out of the weights, as averaging them would, but needs no second copy of them."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled (AdamW)."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount."""
    lam: float = Field(0.95, ge=0, le=1)
    """Of the lambda-return (``trace``)."""
    kl: float = Field(0.05, ge=0)
    """Weight of KL(reference || policy)."""
    entropy: float = Field(0.0, ge=0)
    """Weight of the entropy bonus at the first update."""
    entropy_final: float | None = Field(None, ge=0)
    """Weight at the last update, linear in between; None keeps ``entropy`` throughout. From scratch, start high: an
    episode must stumble on the answer before retrieving looks better than giving up."""
    clip: float = Field(0.2, gt=0)
    """Ratio clipping against the policy that acted; matters only with stale batches."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping."""
    class_weights: tuple[float, float, float] = CLASS_WEIGHTS
    """Share of A, near-B and far-B questions among the groups."""
    cross_fit: bool = False
    """Ensembles only: member e clones the expert on all training questions but those of part e, and is rolled out on
    part e alone. The policy gradient then sees the uncertainty the policy will have in service, instead of questions it
    knows by heart."""
    dropout: bool = False
    """Keep ``policy.dropout`` on in the gradient step (never while acting). Meant against learning the training
    questions by heart; on unseen questions it brought nothing (docs/training.md)."""
    starvation: int = Field(0, ge=0)
    """Stop with the reason after this many updates in a row without any gradient; 0 never stops."""


class StarvedError(RayrlError):
    """Every group was degenerate for too long: nothing can be learned from this batch size, policy and task."""


@dataclass
class LearnerState:
    """Counters that belong to a checkpoint."""

    version: int = 0
    """Incremented by every change of the weights that workers should see."""
    sft_epochs: int = 0
    updates: int = 0
    zero_gradient_updates: int = 0
    env_steps: int = 0


class Learner:
    """One policy being trained on the rows of one world."""

    def __init__(
        self, policy: RetrievalPolicy, world: World, mdp: MdpConfig, sft: SftConfig, rl: RlConfig, seed: int
    ) -> None:
        self.policy = policy
        self.world = world
        self.mdp = mdp
        self.sft = sft
        self.rl = rl
        self.seed = seed
        self.planned_updates = rl.updates
        self.state = LearnerState()
        self.reference: RetrievalPolicy | None = None
        self.reference_checksum = ""
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=rl.learning_rate, weight_decay=rl.weight_decay, foreach=True
        )

    # --- supervised fine-tuning -------------------------------------------------------------------------------------

    def fit_sft(self, epochs: int | None = None, orders: Sequence[Tensor | None] = (None,)) -> dict[str, float]:
        """Clone the expert on every row of the world; classes weigh as ``class_weights`` says.

        Args:
            epochs: overrides the config.
            orders: candidate orders ``[R, K]`` to show the expert on (scripted queues); None as ranked.

        Returns:
            Loss and accuracy of the last epoch.
        """
        all_rows = torch.arange(self.world.rows)
        dynamic, target, rows = [], [], []
        for order, stray_pass in itertools.product(orders, range(self.sft.stray_passes + 1)):
            shown = rollout(
                None,
                RetrievalEnv(self.world, self.mdp),
                all_rows,
                order=order,
                with_expert=True,
                seed=step_seed(self.seed, stray_pass),
                stray=0.5 if stray_pass else 0.0,
            )
            live = shown.mask.reshape(-1)
            dynamic.append(shown.dynamic.reshape(-1, shown.dynamic.shape[2])[live])
            target.append(shown.expert.reshape(-1)[live])
            rows.append(shown.rows.repeat(shown.mask.shape[0], 1).reshape(-1)[live])
        return self._clone(torch.cat(rows), torch.cat(dynamic), torch.cat(target), epochs)

    def _clone(self, rows: Tensor, dynamic: Tensor, target: Tensor, epochs: int | None) -> dict[str, float]:
        if self.state.sft_epochs == 0:
            self.policy.standardise_with(self.world.static, dynamic)
        weight = class_weight_per_row(self.world, self.rl.class_weights)[rows]
        weight = weight / weight.mean()
        optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=self.sft.learning_rate, weight_decay=self.sft.weight_decay, foreach=True
        )
        metrics = {"sft/loss": 0.0, "sft/accuracy": 0.0}
        self.policy.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            for _ in range(self.sft.epochs if epochs is None else epochs):
                metrics = self._sft_epoch(optimizer, rows, dynamic, target, weight)
                self.state.sft_epochs += 1
        self.policy.eval()
        self.state.version += 1
        return metrics

    def _sft_epoch(
        self, optimizer: torch.optim.Optimizer, rows: Tensor, dynamic: Tensor, target: Tensor, weight: Tensor
    ) -> dict[str, float]:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.state.sft_epochs)
        e = self.policy.members
        allowed = [torch.arange(rows.shape[0])] * e
        if self.rl.cross_fit and e > 1:
            part = self.world.part[rows] % e
            allowed = [torch.nonzero(part != member)[:, 0] for member in range(e)]
        n = min(a.shape[0] for a in allowed)
        permutations = torch.stack([a[torch.randperm(a.shape[0], generator=generator)[:n]] for a in allowed])
        loss_sum, right = 0.0, 0.0
        for start in range(0, n, self.sft.batch):
            part = permutations[:, start : start + self.sft.batch].reshape(-1)
            logits = self.policy(self.world.static[rows[part]], dynamic[part])
            losses = torch.nn.functional.cross_entropy(logits, target[part], reduction="none")
            loss = (losses * weight[part]).mean() * e  # the sum over members of each one's mean
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            clip_by_member(self.policy, self.rl.max_grad_norm)
            optimizer.step()
            loss_sum += float(loss.detach()) * part.shape[0] / e
            right += float(((logits.argmax(-1) == target[part]) * weight[part]).sum())
        return {"sft/loss": loss_sum / (e * n), "sft/accuracy": right / (e * n)}

    # --- reference --------------------------------------------------------------------------------------------------

    def freeze_reference(self) -> str:
        """Snapshot the policy as the KL anchor; returns its checksum."""
        self.reference = copy.deepcopy(self.policy).eval()
        for parameter in self.reference.parameters():
            parameter.requires_grad_(False)
        self.reference_checksum = checksum(self.reference)
        return self.reference_checksum

    def verified_reference(self) -> RetrievalPolicy:
        """The reference, after checking that nobody changed it.

        Raises:
            RayrlError: no reference yet, or its weights moved.
        """
        if self.reference is None:
            raise RayrlError("freeze_reference() must come before update()")
        if checksum(self.reference) != self.reference_checksum:
            raise RayrlError("the frozen reference changed during training; its checksum no longer matches")
        return self.reference

    # --- policy gradient --------------------------------------------------------------------------------------------

    def update(self, batch: Batch) -> dict[str, float]:
        """One gradient step on a batch of rollouts; returns the metrics of the step.

        Raises:
            RayrlError: the reference moved.
            StarvedError: no gradient for ``starvation`` updates in a row.
            ValueError: NaN reward, or mixed groups.
        """
        reference = self.verified_reference()
        adv.check_groups(batch.group, batch.rows, batch.order)
        first = first_of_group(batch.group)
        static = self.world.static[batch.rows[first]]
        with torch.no_grad():
            reference_log_probs = torch.log_softmax(
                reference.act_logits(reference.project(static)[batch.group], batch.dynamic), -1
            )
        estimate = self._advantages(batch, reference_log_probs)
        log_probs = self._log_probs(static, batch)
        chosen = log_probs.gather(2, batch.actions[:, :, None])[:, :, 0]
        ratio = torch.exp(torch.where(batch.mask, chosen - batch.log_probs, torch.zeros_like(chosen)))
        clipped = ratio.clamp(1 - self.rl.clip, 1 + self.rl.clip)
        steps = batch.mask.sum()
        gain = torch.minimum(ratio * estimate.values, clipped * estimate.values)
        if self.rl.estimator == "seed":  # literal: the mean over episodes of each episode's mean over its steps
            gain = gain * steps / (batch.mask.sum(0) * batch.episodes)
        mean_kl = (forward_kl(reference_log_probs, log_probs) * batch.mask).sum() / steps
        mean_entropy = (entropy(log_probs) * batch.mask).sum() / steps
        loss = -(gain * batch.mask).sum() / steps + self.rl.kl * mean_kl - self._entropy_weight() * mean_entropy
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss * self.policy.members)
        norm = clip_by_member(self.policy, self.rl.max_grad_norm)
        self.step_optimizer()
        self._count(batch, float(norm), bool((estimate.values != 0).any()))
        return {
            "rl/loss": float(loss.detach()),
            "rl/kl": float(mean_kl.detach()),
            "rl/reverse_kl": float((reverse_kl(reference_log_probs, log_probs.detach()) * batch.mask).sum() / steps),
            "rl/entropy": float(mean_entropy.detach()),
            "rl/grad_norm": float(norm),
            "rl/clipped_fraction": float(((ratio != clipped) & batch.mask).sum() / steps),
            "rl/degenerate_group_fraction": estimate.degenerate_group_fraction,
            "rl/effective_groups": (1.0 - estimate.degenerate_group_fraction) * first.shape[0],
            "rl/zero_gradient_updates": float(self.state.zero_gradient_updates),
            "rl/staleness": float(self.state.version - 1 - batch.policy_version),
            **batch_metrics(batch, self.world),
        }

    def _log_probs(self, static: Tensor, batch: Batch) -> Tensor:
        """``[T, B, actions]`` of the current weights; dropout masks are a function of (seed, update)."""
        with torch.random.fork_rng(devices=[], enabled=self.rl.dropout):
            if self.rl.dropout:
                torch.manual_seed(step_seed(self.seed, self.state.updates))
            self.policy.train(self.rl.dropout)
            logits = self.policy.act_logits(self.policy.project(static)[batch.group], batch.dynamic)
            self.policy.eval()
        return torch.log_softmax(logits, -1)

    def _advantages(self, batch: Batch, reference_log_probs: Tensor) -> adv.Advantages:
        r, m, g, rl = batch.rewards, batch.mask, batch.group, self.rl
        if rl.estimator == "seed":
            return adv.seed_advantage(r, m, gamma=rl.gamma, lam=rl.lam)
        if rl.estimator == "trace":
            return adv.trace_advantage(r, m, g, gamma=rl.gamma, lam=rl.lam, scale=rl.scale)
        if rl.estimator == "turn_credit":
            ell = expert_log_likelihood(batch, reference_log_probs)
            return adv.turn_credit_advantage(r, m, g, ell, gamma=rl.gamma)
        if rl.estimator == "rloo":
            plain = adv.rloo_advantage(r, m, g, gamma=rl.gamma)
            # one number for the whole batch: keeps the learning rate comparable with the other estimators
            std = r.sum(0).std(correction=0).clamp(min=adv.STD_FLOOR)
            return adv.Advantages(plain.values / std, plain.degenerate_group_fraction)
        function = adv.grpo_advantage if rl.estimator == "grpo" else adv.return_to_go_advantage
        return function(r, m, g, gamma=rl.gamma, scale=rl.scale)

    def step_optimizer(self, update: int | None = None) -> None:
        """Adam's step with the learning rate of this update (of ``update``, if given)."""
        rate = self._scheduled(self.rl.learning_rate, self.rl.learning_rate_final, update)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def _entropy_weight(self) -> float:
        return self._scheduled(self.rl.entropy, self.rl.entropy_final)

    def _scheduled(self, first: float, last: float | None, update: int | None = None) -> float:
        """Linear from ``first`` at the first update to ``last`` behind the last one."""
        if last is None:
            return first
        at = self.state.updates if update is None else update
        return first + (last - first) * min(1.0, at / max(self.planned_updates, 1))

    def _count(self, batch: Batch, norm: float, has_signal: bool) -> None:
        state = self.state
        state.version += 1
        state.updates += 1
        state.env_steps += batch.env_steps
        state.zero_gradient_updates = 0 if has_signal and norm > 0 else state.zero_gradient_updates + 1
        if self.rl.starvation and state.zero_gradient_updates >= self.rl.starvation:
            raise StarvedError(
                f"{state.zero_gradient_updates} updates in a row had no advantage signal: all groups were flat "
                "(one return for all members). Raise rl.group_size, rl.questions or rl.entropy, if not optimal"
            )

    # --- weights ----------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """A copy of the policy's tensors."""
        return {name: tensor.detach().clone() for name, tensor in self.policy.state_dict().items()}


def clip_by_member(policy: RetrievalPolicy, limit: float) -> float:
    """Scale each member's gradient to at most ``limit``; returns the largest norm before clipping."""
    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    norms = torch.stack([g.flatten(1).pow(2).sum(1) for g in grads]).sum(0).sqrt()
    scale = (limit / (norms + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale[:, None, None])
    return float(norms.max())


def sample_rows(world: World, weights: tuple[float, float, float], n: int, seed: int) -> Tensor:
    """``[n]`` rows with replacement, classes in proportion to their weights."""
    probability = class_weight_per_row(world, weights).double()
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(n, generator=generator, dtype=torch.float64)
    return torch.searchsorted(probability.cumsum(0), draw).clamp(max=world.rows - 1)


def sample_for_members(world: World, rl: RlConfig, members: int, seed: int) -> Tensor:
    """``[members * questions]`` rows in member blocks; with ``cross_fit`` each block from its member's own part."""
    if not rl.cross_fit or members == 1:
        return sample_rows(world, rl.class_weights, members * rl.questions, seed)
    blocks = []
    for member in range(members):
        mine = torch.nonzero(world.part % members == member)[:, 0]
        if mine.numel() == 0:
            raise ValueError(f"no training question falls in part {member} of {members}; use fewer policy.members")
        inner = sample_rows(world.take(mine), rl.class_weights, rl.questions, step_seed(seed, 1_000 + member))
        blocks.append(mine[inner])
    return torch.cat(blocks)


def first_of_group(group: Tensor) -> Tensor:
    """``[n_groups]`` index of each group's first member; groups are numbered in order of appearance."""
    n = int(group.max()) + 1
    start = torch.full((n,), group.numel(), dtype=torch.int64)
    return start.scatter_reduce(0, group, torch.arange(group.numel()), reduce="amin")


def expert_log_likelihood(batch: Batch, reference_log_probs: Tensor) -> Tensor:
    """``[T + 1, B]``: log-likelihood the reference gives the expert's action, and of the outcome at the end.

    The last entry of an episode is log(.95) for a right decision and log(.05) for a wrong one: the answer is known.
    """
    t, b = batch.mask.shape
    ell = torch.zeros(t + 1, b)
    ell[:t] = reference_log_probs.gather(2, batch.expert[:, :, None])[:, :, 0]
    final = torch.where(batch.outcome.right, torch.log(torch.tensor(0.95)), torch.log(torch.tensor(0.05)))
    length = batch.mask.sum(0)
    after = torch.arange(t + 1)[:, None] >= length[None]
    return torch.where(after, final[None], ell)


def batch_metrics(batch: Batch, world: World) -> dict[str, float]:
    """Returns, retrieval rates and hit rate by class of one batch of rollouts."""
    kind = world.kind[batch.rows]
    out = batch.outcome
    metrics = {"rollout/return": float(out.returns.mean()), "rollout/steps": float(out.steps.float().mean())}
    for k, name in ((Kind.A, "a"), (Kind.NEAR_B, "near_b"), (Kind.FAR_B, "far_b")):
        members = kind == int(k)
        if bool(members.any()):
            metrics[f"rollout/return_{name}"] = float(out.returns[members].mean())
            metrics[f"rollout/retrieval_rate_{name}"] = float((out.retrievals[members] > 0).float().mean())
    members = kind == int(Kind.A)
    if bool(members.any()):
        metrics["rollout/hit_rate"] = float((out.hit[members] >= 1).float().mean())
    metrics["rollout/blocked"] = float((out.block > 0).float().mean())
    return metrics
