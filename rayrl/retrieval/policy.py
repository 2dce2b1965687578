"""The policy network: a small MLP over (static features of the question, dynamic state of the episode).

The first layer is split. Its product with the static part does not change during an episode and is shared by all
members of a group, so it is computed once per question (:meth:`RetrievalPolicy.project`); a step then costs only the
dynamic part and the small layers above. The sum is the ordinary linear layer over both parts concatenated.

A policy may be an ensemble: E networks side by side, trained in one pass. Every batch axis is then made of E equal
blocks, block e belonging to member e, and a single network is the case E = 1. Members share the input statistics and
nothing else. :class:`MeanPolicy` lets all members judge the same rows and averages their probabilities.
"""

from __future__ import annotations

import hashlib
import math

import torch
from pydantic import Field
from torch import Tensor, nn

from rayrl.config import Section
from rayrl.schemas import Frozen


class PolicyConfig(Section):
    """Shape of the network."""

    width: int = Field(32, ge=1)
    """Hidden units per layer; the original "about 2k parameters" is 5 with the 386-dimensional state."""
    layers: int = Field(3, ge=2)
    """Linear layers, the head included (at least 2)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """On the hidden layers, in supervised fine-tuning; in the policy gradient only with ``rl.dropout``."""
    members: int = Field(1, ge=1)
    """Networks in the ensemble; their probabilities are averaged in evaluation and service."""
    skip: bool = False
    """Add a linear map from the inputs straight to the logits, so that what is linear need not be learned by the hidden
    layers."""
    plan_weight: float = Field(0.0, ge=0)
    """When an action is chosen, add this times what planned regressions expect retrieving to gain to the log-odds of
    retrieving (feature group R; 2 actions, observable). 0 leaves the decision to the network."""


class PolicySpec(Frozen):
    """Everything needed to rebuild the network around stored weights."""

    static_dim: int
    dynamic_dim: int
    actions: int
    width: int
    layers: int
    dropout: float = 0.0
    members: int = 1
    skip: bool = False
    plan_weight: float = 0.0
    plan_column: int | None = None
    """Where the expected gain stands in the dynamic part of an observation; the layers do not see it."""


class Blocks(nn.Module):
    """E linear maps; input ``[..., E * n, a]`` in member blocks, output ``[..., E * n, b]``."""

    def __init__(self, members: int, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(members, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        members = self.weight.shape[0]
        if members == 1:
            y = x @ self.weight[0]
            return y if self.bias is None else y + self.bias[0, 0]
        y = x.reshape(*x.shape[:-2], members, -1, x.shape[-1]) @ self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.flatten(-3, -2)


class RetrievalPolicy(nn.Module):
    """Logits over actions; inputs are standardised with statistics stored beside the weights."""

    static_mean: Tensor
    static_scale: Tensor
    dynamic_mean: Tensor
    dynamic_scale: Tensor

    def __init__(self, spec: PolicySpec, seed: int = 0) -> None:
        """Weights from ``seed`` alone (uniform, as nn.Linear draws them), independent of the global generator."""
        super().__init__()
        self.spec = spec
        e = spec.members
        self.static_layer = Blocks(e, spec.static_dim, spec.width)
        self.dynamic_layer = Blocks(e, spec.dynamic_dim, spec.width, bias=False)
        self.hidden = nn.ModuleList(Blocks(e, spec.width, spec.width) for _ in range(spec.layers - 2))
        self.head = Blocks(e, spec.width, spec.actions)
        # starts at zero: the network is the same with and without until it is trained
        self.static_skip = Blocks(e, spec.static_dim, spec.actions, bias=False) if spec.skip else None
        self.dynamic_skip = Blocks(e, spec.dynamic_dim, spec.actions, bias=False) if spec.skip else None
        self.dropout = nn.Dropout(spec.dropout)
        for name, size in (("static", spec.static_dim), ("dynamic", spec.dynamic_dim)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))
        self._initialise(seed)

    @property
    def members(self) -> int:
        """E."""
        return self.spec.members

    def _initialise(self, seed: int) -> None:
        first = 1.0 / math.sqrt(self.spec.static_dim + self.spec.dynamic_dim)
        for member in range(self.members):
            generator = torch.Generator().manual_seed(seed * 1_000 + member)
            for name, parameter in sorted(self.named_parameters()):
                if "_skip" in name:
                    continue
                bound = first if name.startswith(("static", "dynamic")) else 1.0 / math.sqrt(self.spec.width)
                with torch.no_grad():
                    parameter[member].uniform_(-bound, bound, generator=generator)

    def standardise_with(self, static: Tensor, dynamic: Tensor) -> None:
        """Set the input statistics from training data ``[n, Fs]`` and ``[m, D]``; constant columns pass as 0."""
        for name, data in (("static", static), ("dynamic", dynamic)):
            mean, std = data.mean(0), data.std(0, correction=0)
            getattr(self, f"{name}_mean").copy_(mean)
            getattr(self, f"{name}_scale").copy_(torch.where(std > 1e-5, 1.0 / std.clamp(min=1e-5), 0.0))
        if self.spec.plan_column is not None:
            self.dynamic_scale[self.spec.plan_column] = 0.0

    def project(self, static: Tensor) -> Tensor:
        """First layer's share of the static features (and the skip's, behind), ``[E * n, width (+ actions)]``."""
        x = (static - self.static_mean) * self.static_scale
        out: Tensor = self.static_layer(x)
        return out if self.static_skip is None else torch.cat([out, self.static_skip(x)], dim=-1)

    def act_logits(self, projected: Tensor, dynamic: Tensor) -> Tensor:
        """Logits ``[..., E * n, actions]`` from a projection and the dynamic part (leading axes broadcast)."""
        x = (dynamic - self.dynamic_mean) * self.dynamic_scale
        h = projected[..., : self.spec.width] + self.dynamic_layer(x)
        h = self.dropout(torch.relu(h))
        for layer in self.hidden:
            h = self.dropout(torch.relu(layer(h)))
        out: Tensor = self.head(h)
        if self.dynamic_skip is not None:
            out = out + projected[..., self.spec.width :] + self.dynamic_skip(x)
        return out

    def forward(self, static: Tensor, dynamic: Tensor) -> Tensor:
        """Logits for ``static [..., E * n, Fs]`` and ``dynamic [..., E * n, D]``."""
        return self.act_logits(self.project(static), dynamic)


class MeanPolicy:
    """All members on the same rows; their probabilities are averaged, and the planned regressions have their say.

    ``shifts`` move the start and later cut-offs; ``plan_weight`` replaces the spec's.
    """

    def __init__(
        self, policy: RetrievalPolicy, shifts: tuple[float, float] = (0.0, 0.0), plan_weight: float | None = None
    ) -> None:
        self.policy = policy
        self.shifts = shifts
        self.plan_weight = policy.spec.plan_weight if plan_weight is None else plan_weight

    def project(self, static: Tensor) -> Tensor:
        """``[n, E, width (+ actions)]``."""
        e = self.policy.members
        projected = self.policy.project(static.repeat(e, 1))
        return projected.view(e, -1, projected.shape[-1]).transpose(0, 1)

    def act_logits(self, projected: Tensor, dynamic: Tensor) -> Tensor:
        """Log-probabilities ``[n, actions]`` of the mixture; shifts and plan move them without normalising again."""
        e = self.policy.members
        blocks = self.policy.act_logits(projected.transpose(0, 1).flatten(0, 1), dynamic.repeat(e, 1))
        logs = torch.log_softmax(blocks, -1).view(e, -1, blocks.shape[-1])
        mixed = torch.logsumexp(logs, 0) - math.log(e)
        if self.shifts != (0.0, 0.0):
            # the first entry of the dynamic part says "nothing retrieved yet"
            shift = torch.where(dynamic[:, 0] > 0.5, self.shifts[0], self.shifts[1])
            mixed = torch.cat([(mixed[:, 0] - shift)[:, None], mixed[:, 1:]], dim=1)
        if self.plan_weight:
            gain = self.plan_weight * dynamic[:, self.policy.spec.plan_column, None]
            mixed = torch.cat([mixed[:, :1] + gain, mixed[:, 1:]], dim=1)
        return mixed


def checksum(module: nn.Module) -> str:
    """SHA-256 over names, shapes and bytes of all weights and buffers, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def parameter_count(module: nn.Module) -> int:
    """Trainable parameters."""
    return sum(p.numel() for p in module.parameters())
