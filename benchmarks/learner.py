"""Rollout and learning speed: rayrl, a seed-style loop, Stable-Baselines3 PPO, RLlib PPO, and the bare matrix products.

One process, one MLP shape, one MDP (scripted queue, 2 actions, the original 386-dimensional state). Each figure is env
steps per second, the median of several rounds; rounds of the contestants alternate, so that a busy machine is busy for
all of them. On a shared machine ``--clock cpu`` counts the process's own CPU seconds (unfair to nobody but Ray, as it
does not see the workers; leave Ray out then). Contestants that are not installed are left out and named.

    python -m benchmarks.learner [--rounds 5] [--threads 1] [--batches 64 512 4096] [--skip sb3 rllib ray]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learners.collect import CollectConfig, LocalCollector
from learners.learner import Learner, RlConfig, SftConfig
from learners.training import TrainConfig, make_learner, train
from rayrl.retrieval.mdp import MdpConfig, RetrievalEnv
from rayrl.retrieval.oracle import oracle_returns
from rayrl.retrieval.policy import MeanPolicy, PolicyConfig
from rayrl.retrieval.pools import Kind
from rayrl.retrieval.rollout import random_orders, rollout
from rayrl.retrieval.world import World

K, DIM, WIDTH = 5, 384, 32


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


def seed_style_loop(world: World) -> Callable[[], int]:
    """One trajectory at a time, one update per trajectory, as the original design works (64 of them per call)."""
    policy = torch.nn.Sequential(
        torch.nn.Linear(DIM + 2, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 2),
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)

    def episode() -> int:
        row = int(torch.randint(world.rows, (1,), generator=generator))
        is_a = bool(world.is_a[row])
        target = int(torch.randint(1, K, (1,), generator=generator))
        held = hit = steps = 0
        log_probs, rewards = [], []
        while True:
            quality = world.candidate[row, min(held, K - 1), 0]
            state = torch.cat([world.static[row], torch.stack([quality, torch.tensor(float(hit))])])
            distribution = torch.distributions.Categorical(logits=policy(state))
            action = distribution.sample()
            log_probs.append(distribution.log_prob(action))
            steps += 1
            if int(action) == 0:
                hit = hit or int(is_a and held == target)
                held += 1
                reward = -0.5
                if held < K:
                    rewards.append(reward)
                    continue
            else:
                reward = 0.0
            rewards.append(reward + ((10.0 if hit else -3.5) if is_a else (-8.5 if held else 10.0)))
            break
        returns, running = [], 0.0
        for r in reversed(rewards):
            running = r + 0.99 * running
            returns.insert(0, running)
        g = torch.tensor(returns)
        advantage = (g - g.mean()) / (g.std(correction=0) + 1e-8)
        loss = -(torch.stack(log_probs) * advantage).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        return steps

    return lambda: sum(episode() for _ in range(64))


def gym_env(world: World) -> Any:
    """The same MDP as a Gymnasium environment, for the peers."""
    import gymnasium
    import numpy as np

    class RetrievalGym(gymnasium.Env):  # type: ignore[misc,unused-ignore]
        observation_space = gymnasium.spaces.Box(-5, 5, (DIM + 2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, _config: Any = None) -> None:
            self.static, self.quality = world.static.numpy(), world.candidate[:, :, 0].numpy()
            self.is_a = world.is_a.numpy()

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self.row = int(self.np_random.integers(world.rows))
            self.target = int(self.np_random.integers(1, K))
            self.held = self.hit = 0
            return self._see(), {}

        def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            reward, done = 0.0, action == 1
            if action == 0:
                reward = -0.5
                self.hit = self.hit or int(self.is_a[self.row] and self.held == self.target)
                self.held += 1
                done = self.held == K
            if done:
                a = self.is_a[self.row]
                reward += (10.0 if self.hit else -3.5) if a else (-8.5 if self.held else 10.0)
            return self._see(), reward, done, False, {}

        def _see(self) -> Any:
            tail = [self.quality[self.row, min(self.held, K - 1)], float(self.hit)]
            return np.concatenate([self.static[self.row], tail]).astype(np.float32)

    return RetrievalGym


def sb3_ppo(world: World) -> Callable[[], int]:
    """Stable-Baselines3 PPO, 8 environments, its own defaults otherwise."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env(gym_env(world), n_envs=8)
    model = PPO("MlpPolicy", env, n_steps=256, policy_kwargs={"net_arch": [WIDTH, WIDTH]}, device="cpu", verbose=0)

    def once() -> int:
        before = model.num_timesteps
        model.learn(8 * 256, reset_num_timesteps=False)
        return int(model.num_timesteps - before)

    return once


def rllib_ppo(world: World) -> tuple[Callable[[], int], Callable[[], None]]:
    """RLlib PPO in the driver, 8 environments."""
    from ray.rllib.algorithms.ppo import PPOConfig

    config = (
        PPOConfig()
        .environment(gym_env(world))
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .training(train_batch_size_per_learner=2048, minibatch_size=128, num_epochs=10)
    )
    algorithm = config.build_algo()

    def once() -> int:
        return int(algorithm.train()["env_runners"]["num_env_steps_sampled"])

    return once, algorithm.stop


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


def time_to_oracle(world: World, batch: int, clock: Callable[[], float], limit_s: float = 60.0) -> dict[str, float]:
    """Seconds and env steps until greedy episodes reach 95 % of the oracle, from scratch."""
    config = bench_config(batch)
    config = config.model_copy(update={"rl": config.rl.model_copy(update={"updates": 400})})
    learner, player = make_learner(config, world)
    learner.freeze_reference()
    order = random_orders(world.rows, K, world.right, 9)
    oracle = float(oracle_returns(world, config.mdp, order).mean())
    began = clock()
    done: dict[str, float] = {}

    class Reached(Exception):  # noqa: N818
        pass

    def check(update: int, _metrics: Any, _history: Any) -> None:
        if update % 10 == 0:
            value = greedy(learner, world, order)
            if value >= 0.95 * oracle:
                done.update(seconds=clock() - began, env_steps=learner.state.env_steps, updates=update)
                raise Reached
        if clock() - began > limit_s:
            raise Reached

    with contextlib.suppress(Reached):
        train(learner, LocalCollector(player, 0), on_update=check)
    return done or {"seconds": float("inf"), "best": greedy(learner, world, order) / oracle}


def greedy(learner: Learner, world: World, order: Tensor) -> float:
    """Mean greedy return."""
    env = RetrievalEnv(world, learner.mdp)
    batch = rollout(MeanPolicy(learner.policy), env, torch.arange(world.rows), order=order)
    return float(batch.outcome.returns.mean())


def measure(
    contestants: dict[str, Callable[[], int]], rounds: int, seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
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


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--skip", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    world = bench_world()
    contestants: dict[str, Callable[[], int]] = {"seed-style loop": seed_style_loop(world)}
    closers: list[Callable[[], None]] = []
    for batch in args.batches:
        contestants[f"rayrl rollout B={batch}"] = rayrl_rollout(world, batch)
        contestants[f"rayrl rollout+update B={batch}"] = rayrl_update(world, batch)
        contestants[f"bound rollout B={batch}"] = matrix_bound(batch, backward=False)
        contestants[f"bound rollout+update B={batch}"] = matrix_bound(batch, backward=True)
    left_out = []
    if "sb3" not in args.skip:
        if importlib.util.find_spec("stable_baselines3"):
            contestants["SB3 PPO"] = sb3_ppo(world)
        else:
            left_out.append("SB3 PPO (pip install stable-baselines3)")
    if "rllib" not in args.skip:
        if importlib.util.find_spec("gymnasium"):
            contestants["RLlib PPO"], close = rllib_ppo(world)
            closers.append(close)
        else:
            left_out.append("RLlib PPO (pip install gymnasium)")
    if "ray" not in args.skip:
        contestants["rayrl over Ray rollout+update B=4096"], close = rayrl_over_ray(world, 4096)
        closers.append(close)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    rates = measure(contestants, args.rounds, args.seconds, clock)
    for close in closers:
        close()
    oracle = {f"B={b}": time_to_oracle(world, b, clock) for b in args.batches}
    print(
        json.dumps(
            {"threads": args.threads, "env_steps_per_s": rates, "left_out": left_out, "time_to_oracle": oracle},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
