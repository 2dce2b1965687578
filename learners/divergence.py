"""Exact divergences between categorical policies.

With two or three actions the sum over actions is cheaper than any estimate of it, so nothing here looks at the sampled
action. ``forward_kl`` is the anchor of the loss, KL(reference || policy); its gradient with respect to the policy's
logits is ``pi - pi_ref``. A sampled "k3" estimate targets the other direction, and the mean of ``ref_lp - lp`` under
the policy has no useful gradient in expectation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(p || q) = sum_a p (log p - log q)`` over the last axis; log-probabilities in, non-negative out.

    An action with ``p = 0`` (log p = -inf, a masked action) adds 0.
    """
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p))
    return terms.sum(-1).clamp(min=0.0)


def forward_kl(reference_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """KL(pi_ref || pi_theta): the anchor in the loss."""
    return kl(reference_log_probs, log_probs)


def reverse_kl(reference_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """KL(pi_theta || pi_ref): reported beside the anchor, and an ablation."""
    return kl(log_probs, reference_log_probs)


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats over the last axis; a masked action adds 0."""
    p = log_probs.exp()
    return -torch.where(p > 0, p * log_probs, torch.zeros_like(p)).sum(-1)
