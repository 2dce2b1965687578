"""Small worlds for tests: no text, no model."""

import torch

from rayrl.retrieval.pools import Kind
from rayrl.retrieval.world import World


def tiny_world(patterns, kinds, *, n_right=None, static=None, seed=0, reveal=0, items=None):
    """One row per pattern of right candidates."""
    generator = torch.Generator().manual_seed(seed)
    right = torch.tensor(patterns, dtype=torch.bool)
    r, k = right.shape
    cosine = torch.rand(r, k, 1, generator=generator).sort(1, descending=True).values
    return World(
        static=torch.randn(r, 4, generator=generator) if static is None else static,
        candidate=cosine,
        reveal=torch.rand(r, k, reveal, generator=generator),
        agreement=torch.eye(k).repeat(r, 1, 1),
        right=right,
        item=torch.arange(k).repeat(r, 1) if items is None else torch.tensor(items),
        n_right=right.sum(1) if n_right is None else torch.tensor(n_right),
        kind=torch.tensor([int(x) for x in kinds]),
        question=torch.arange(r),
        part=torch.arange(r) % 4,
        static_names=("s0", "s1", "s2", "s3"),
        candidate_names=("cosine",),
        reveal_names=tuple(f"r{i}" for i in range(reveal)),
    )


def one_hot_world(k=5):
    """Class A with the right candidate at 1..k-1, plus a class B row."""
    patterns = [[j == i for j in range(k)] for i in range(1, k)] + [[False] * k]
    return tiny_world(patterns, [Kind.A] * (k - 1) + [Kind.NEAR_B])
