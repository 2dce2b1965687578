"""Rollout and learning speed: rayrl, a seed-style loop, Stable-Baselines3 PPO, RLlib PPO, and the bare matrix products.

One process, one MLP shape, one MDP (scripted queue, 2 actions, the original 386-dimensional state). Each figure is env
steps per second, the median of several rounds; rounds of the contestants alternate, so that a busy machine is busy for
all of them. On a shared machine ``--clock cpu`` counts the process's own CPU seconds (unfair to nobody but Ray, as it
does not see the workers; leave Ray out then). Contestants that are not installed are left out and named; peers run with
the first number of threads only. Time to oracle: seconds from scratch until greedy episodes reach 95 % of the oracle's
return; nobody's hyperparameters were tuned for it, the peers' are their defaults.

    python -m benchmarks.learner [--rounds 5] [--threads 1 2] [--batches 64 512 4096] [--skip sb3 rllib ray]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.learner_peers import DIM, WIDTH, K, Peer, rllib_ppo, sb3_ppo, seed_style_loop
from learners.collect import CollectConfig, LocalCollector
from learners.learner import Learner, RlConfig, SftConfig
from learners.training import TrainConfig, make_learner, train
from rayrl.retrieval.mdp import MdpConfig, RetrievalEnv
from rayrl.retrieval.oracle import oracle_returns
from rayrl.retrieval.policy import MeanPolicy, PolicyConfig
from rayrl.retrieval.pools import Kind
from rayrl.retrieval.rollout import random_orders, rollout
from rayrl.retrieval.world import World

AIMS = {"seed-style loop": 100.0, "SB3 PPO": 15.0, "bound": 0.4}
"""What rollout and update at the largest batch is to reach, as a multiple of each."""


def bench_world(n: int = 256) -> World:
    """Half class A, half class B; the class can be read from the embedding, the place of the answer cannot."""
    generator = torch.Generator().manual_seed(0)
    static = torch.nn.functional.normalize(torch.randn(2 * n, DIM, generator=generator), dim=1)
    static[:n, 0] += 1.0
    right = torch.zeros(2 * n, K, dtype=torch.bool)
    right[:n, 0] = True
    kind = torch.tensor([int(Kind.A)] * n + [int(Kind.FAR_B)] * n)
    return World(
        static=static,
        candidate=torch.rand(2 * n, K, 1, generator=generator),
        reveal=torch.zeros(2 * n, K, 0),
        agreement=torch.zeros(2 * n, K, K),
        right=right,
        item=torch.arange(K).repeat(2 * n, 1),
        n_right=right.sum(1),
        kind=kind,
        question=torch.arange(2 * n),
        part=torch.zeros(2 * n, dtype=torch.int64),
        candidate_names=("cosine",),
    )


def bench_config(batch: int, **changes: Any) -> TrainConfig:
    """Groups of 8; B episodes per update."""
    return TrainConfig(
        queue="scripted",
        mdp=MdpConfig(mode="seed"),
        policy=PolicyConfig(width=WIDTH),
        sft=SftConfig(epochs=0),
        rl=RlConfig(
            questions=max(1, batch // 8), group_size=8, learning_rate=2e-3, entropy=0.3, entropy_final=0.0, kl=0.0
        ),
        collect=CollectConfig(shards=1, **changes),
    )


def rayrl_rollout(world: World, batch: int) -> Callable[[], int]:
    """Rollouts only."""
    learner, player = make_learner(bench_config(batch), world)
    weights = learner.weights()
    counter = iter(range(10**9))
    return lambda: player.play(next(counter), 0, weights, 0).env_steps


def rayrl_update(world: World, batch: int) -> Callable[[], int]:
    """Rollout and update."""
    learner, player = make_learner(bench_config(batch), world)
    learner.freeze_reference()
    counter = iter(range(10**9))

    def once() -> int:
        played = player.play(next(counter), 0, learner.weights(), 0)
        learner.update(played)
        return played.env_steps

    return once


def rayrl_over_ray(world: World, batch: int) -> tuple[Callable[[], int], Callable[[], None]]:
    """Rollout and update with 2 Ray workers, one batch ahead."""
    from actors.retrieval import RayCollector

    config = bench_config(batch, staleness=1, execution="ray", workers=2)
    config = config.model_copy(
        update={
            "collect": config.collect.model_copy(update={"shards": 2}),
            "rl": config.rl.model_copy(update={"updates": 10**6}),
        }
    )
    learner, player = make_learner(config, world)
    learner.freeze_reference()
    collector = RayCollector(player, config)
    collector.start(0, [learner.weights()] * 2)

    def once() -> int:
        batch_ = collector.next()
        learner.update(batch_)
        collector.publish(learner.weights())
        return batch_.env_steps

    return once, collector.close


def matrix_bound(batch: int, backward: bool) -> Callable[[], int]:
    """Products of the plain (unsplit) network on full observations: acting, and with ``backward`` the update's too."""
    x = torch.randn(batch, DIM + 2)
    shapes = [(DIM + 2, WIDTH), (WIDTH, WIDTH), (WIDTH, 2)]
    weights = [torch.randn(*s) for s in shapes]

    def forward() -> list[Tensor]:
        outs = [x]
        for w in weights:
            outs.append(outs[-1] @ w)
        return outs

    def once() -> int:
        outs = forward()  # acting
        if backward:
            outs = forward()  # the update's forward pass
            gradient = torch.ones_like(outs[-1])
            for w, below in zip(reversed(weights), reversed(outs[:-1]), strict=True):
                _ = below.T @ gradient
                gradient = gradient @ w.T
        return batch

    return once


def time_to_oracle(world: World, batch: int, clock: Callable[[], float], limit_s: float) -> dict[str, float]:
    """Seconds and env steps of rayrl until greedy episodes reach 95 % of the oracle, from scratch."""
    config = bench_config(batch)
    config = config.model_copy(update={"rl": config.rl.model_copy(update={"updates": 400})})
    learner, player = make_learner(config, world)
    learner.freeze_reference()
    order, oracle = oracle_of(world, config.mdp)
    began = clock()
    done: dict[str, float] = {}
    best = -float("inf")

    class Reached(Exception):  # noqa: N818
        pass

    def check(update: int, _metrics: Any, _history: Any) -> None:
        nonlocal best
        if update % 10 == 0:
            best = max(best, greedy(learner, world, order) / oracle)
            if best >= 0.95:
                done.update(seconds=round(clock() - began, 2), env_steps=learner.state.env_steps, updates=update)
                raise Reached
        if clock() - began > limit_s:
            raise Reached

    with contextlib.suppress(Reached):
        train(learner, LocalCollector(player, 0), on_update=check)
    return done or {"limit_s": limit_s, "best_share_of_oracle": round(best, 3), "env_steps": learner.state.env_steps}


def peer_time_to_oracle(peer: Peer, world: World, clock: Callable[[], float], limit_s: float) -> dict[str, float]:
    """The same for a peer; looked at after every call of it."""
    order, oracle = oracle_of(world, MdpConfig(mode="seed"))
    began, steps, best = clock(), 0, -float("inf")
    while clock() - began < limit_s:
        steps += peer.once()
        best = max(best, played_greedily(peer.act, world, order) / oracle)
        if best >= 0.95:
            return {"seconds": round(clock() - began, 2), "env_steps": steps}
    return {"limit_s": limit_s, "best_share_of_oracle": round(best, 3), "env_steps": steps}


def oracle_of(world: World, mdp: MdpConfig) -> tuple[Tensor, float]:
    """Orders to judge by, and the oracle's mean return on them."""
    order = random_orders(world.rows, K, world.right, 9)
    return order, float(oracle_returns(world, mdp, order).mean())


def greedy(learner: Learner, world: World, order: Tensor) -> float:
    """Mean greedy return."""
    env = RetrievalEnv(world, learner.mdp)
    batch = rollout(MeanPolicy(learner.policy), env, torch.arange(world.rows), order=order)
    return float(batch.outcome.returns.mean())


def played_greedily(act: Callable[[Tensor], Tensor], world: World, order: Tensor) -> float:
    """Mean return of a peer's actions."""
    env = RetrievalEnv(world, MdpConfig(mode="seed"))
    dynamic = env.reset(torch.arange(world.rows), order)
    while bool(env.alive.any()):
        env.step(act(torch.cat([world.static, dynamic], dim=1)))
        dynamic = env.observe()
    return float(env.outcome().returns.mean())


def measure(
    contestants: dict[str, Callable[[], int]], rounds: int, seconds: float, clock: Callable[[], float]
) -> dict[str, int]:
    """Median env steps/s over alternating rounds."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for once in contestants.values():
        once()
    for _ in range(rounds):
        for name, once in contestants.items():
            began, steps = clock(), 0
            while clock() - began < seconds:
                steps += once()
            rates[name].append(steps / (clock() - began))
    return {name: round(statistics.median(r)) for name, r in rates.items()}


def own_contestants(world: World, batches: list[int]) -> dict[str, Callable[[], int]]:
    """rayrl and the bound at every batch size."""
    out: dict[str, Callable[[], int]] = {}
    for batch in batches:
        out[f"rayrl rollout B={batch}"] = rayrl_rollout(world, batch)
        out[f"rayrl rollout+update B={batch}"] = rayrl_update(world, batch)
        out[f"bound rollout B={batch}"] = matrix_bound(batch, backward=False)
        out[f"bound rollout+update B={batch}"] = matrix_bound(batch, backward=True)
    return out


def peers_there(skip: list[str]) -> tuple[dict[str, Callable[[World], Peer]], list[str]]:
    """The peers that are installed, and what is left out."""
    peers: dict[str, Callable[[World], Peer]] = {"seed-style loop": seed_style_loop}
    left_out = []
    for key, name, module, make in (
        ("sb3", "SB3 PPO", "stable_baselines3", sb3_ppo),
        ("rllib", "RLlib PPO", "gymnasium", rllib_ppo),
    ):
        if key in skip or importlib.util.find_spec(module) is None:
            left_out.append(f"{name} ({'skipped' if key in skip else f'pip install {module}'})")
        else:
            peers[name] = make
    return peers, left_out


def aims(rates: dict[str, int], batch: int) -> dict[str, Any]:
    """Rollout and update at this batch as a multiple of each rival, beside what was aimed at."""
    mine = rates[f"rayrl rollout+update B={batch}"]
    rivals = {**rates, "bound": rates[f"bound rollout+update B={batch}"]}
    return {
        name: {"reached": round(mine / rivals[name], 2), "aim": aim, "met": mine >= aim * rivals[name]}
        for name, aim in AIMS.items()
        if name in rivals
    }


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--oracle-limit", type=float, default=45.0, help="seconds for each time to oracle; 0: none")
    parser.add_argument("--skip", nargs="*", default=[], choices=("sb3", "rllib", "ray"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads[0])
    world = bench_world()
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    makers, left_out = peers_there(args.skip)
    result: dict[str, Any] = {"load": [round(x, 1) for x in os.getloadavg()], "left_out": left_out}
    contestants = own_contestants(world, args.batches)
    closers: list[Callable[[], None]] = []
    for name, make in makers.items():
        peer = make(world)
        contestants[name] = peer.once
        closers.append(peer.close)
    if "ray" not in args.skip:
        contestants[f"rayrl over Ray rollout+update B={max(args.batches)}"], close = rayrl_over_ray(
            world, max(args.batches)
        )
        closers.append(close)
    for threads in args.threads:
        torch.set_num_threads(threads)
        first = threads == args.threads[0]
        field = contestants if first else own_contestants(world, args.batches)
        rates = measure(field, args.rounds, args.seconds, clock)
        result[f"env_steps_per_s, {threads} thread{'s' if threads > 1 else ''}"] = rates
        if first:
            result["aims"] = aims(rates, max(args.batches))
            for close in closers:
                close()
    if args.oracle_limit:
        torch.set_num_threads(args.threads[0])
        oracle = {f"rayrl B={b}": time_to_oracle(world, b, clock, args.oracle_limit) for b in args.batches}
        for name, make in makers.items():
            peer = make(world)
            oracle[name] = peer_time_to_oracle(peer, world, clock, args.oracle_limit)
            peer.close()
        result["time_to_oracle"] = oracle
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
