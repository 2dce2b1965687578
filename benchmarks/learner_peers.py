"""What rayrl's learner is measured against: a loop in the style of the original design, and two PPO implementations.

Every contestant is a :class:`Peer`: one call plays and learns a bit, and its policy can be asked for greedy actions, so that
all of them are judged by the same episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayrl.retrieval.world import World

K, DIM, WIDTH = 5, 384, 32


@dataclass(frozen=True)
class Peer:
    """A contestant."""

    once: Callable[[], int]
    """Plays and learns a bit; env steps taken."""
    act: Callable[[Tensor], Tensor]
    """Greedy actions ``[B]`` for observations ``[B, DIM + 2]``."""
    close: Callable[[], None] = lambda: None


def seed_style_loop(world: World) -> Peer:
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
            action = distribution.sample()  # type: ignore[no-untyped-call,unused-ignore]
            log_probs.append(distribution.log_prob(action))  # type: ignore[no-untyped-call,unused-ignore]
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
        returns: list[float] = []
        running = 0.0
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

    def act(observations: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = policy(observations)
            return logits.argmax(1)

    return Peer(lambda: sum(episode() for _ in range(64)), act)


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


def sb3_ppo(world: World) -> Peer:
    """Stable-Baselines3 PPO, 8 environments, its own defaults otherwise."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env(gym_env(world), n_envs=8)
    model = PPO("MlpPolicy", env, n_steps=256, policy_kwargs={"net_arch": [WIDTH, WIDTH]}, device="cpu", verbose=0)

    def once() -> int:
        before = model.num_timesteps
        model.learn(8 * 256, reset_num_timesteps=False)
        return int(model.num_timesteps - before)

    def act(observations: Tensor) -> Tensor:
        return torch.from_numpy(model.predict(observations.numpy(), deterministic=True)[0])

    return Peer(once, act)


def rllib_ppo(world: World) -> Peer:
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

    def act(observations: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = algorithm.get_module().forward_inference({"obs": observations})["action_dist_inputs"]
            return logits.argmax(1)

    return Peer(once, act, algorithm.stop)
