"""What slime's ``--custom-generate-function-path rayrl.export.slime_rollout.generate`` calls.

The episode is played by the same AgentRuntime, prompt builder, environment and reward as ``rayrl run`` of the same
config: same model and seeds, same trace. slime hands in a pending sample made by
:func:`rayrl.export.slime.request_from_job`; the model endpoint is slime's SGLang router unless the config names one.

Settings, from slime's arguments or the environment: ``rayrl_config`` / ``RAYRL_CONFIG`` (a rollout config whose
environment names running servers) and ``rayrl_overrides`` / ``RAYRL_OVERRIDES`` (space-separated ``key=value``).
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from rayrl.environments.base import EnvironmentFactory
from rayrl.environments.config import build_environments
from rayrl.errors import ConfigError
from rayrl.experiment import Experiment, load_run_config, prepare
from rayrl.export.conversation import ConversationOptions
from rayrl.export.slime import job_from_request, sample_from_record
from rayrl.models.base import ChatModel
from rayrl.models.registry import build_model
from rayrl.runtime import AgentRuntime
from rayrl.schemas import JsonDict

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_new_tokens": "max_tokens"}
_NEUTRAL: dict[str, Any] = {"top_p": 1.0, "top_k": -1}
"""What slime passes when it means "off"; equal to leaving the field out."""


@dataclass
class SlimeRollout:
    """A runtime built once per process from a rollout config."""

    experiment: Experiment
    model: ChatModel
    environments: EnvironmentFactory
    runtime: AgentRuntime
    options: ConversationOptions

    @classmethod
    async def build(
        cls, config_path: str, overrides: list[str], *, options: ConversationOptions | None = None
    ) -> SlimeRollout:
        """Plan the config, build its model and environment, and check that the environment answers."""
        config, base = load_run_config(config_path, overrides)
        experiment = prepare(config, base)
        spec = experiment.worker_spec(experiment.config.environment)
        environments = build_environments(spec.environment)
        await environments.start()
        model = build_model(spec.model)
        runtime = AgentRuntime(
            model=model,
            environments=environments,
            skills=experiment.skills,
            prompts=experiment.prompts,
            config=spec.runtime,
            provenance=spec.provenance,
        )
        return cls(experiment, model, environments, runtime, options or ConversationOptions())

    def check_sampling(self, sampling: JsonDict) -> None:
        """Refuse slime sampling parameters that contradict the config: the fingerprint must stay true.

        Raises:
            ConfigError: names the parameter and both values.
        """
        for theirs, ours in _SAMPLING.items():
            wanted, have = sampling.get(theirs), getattr(self.experiment.config.model, ours)
            if wanted is None or wanted == have or (have is None and wanted == _NEUTRAL.get(theirs)):
                continue
            raise ConfigError(
                f"slime samples with {theirs}={wanted}, the rayrl config with model.{ours}={have}; make them equal "
                "(slime's --rollout-* options, or RAYRL_OVERRIDES)"
            )

    async def play(self, request: JsonDict) -> JsonDict:
        """Play the episode of a request; returns the finished sample in dict form."""
        job = job_from_request(request)
        outcome = await self.runtime.run(job)
        return sample_from_record(
            outcome.record,
            self.options,
            training=outcome.training,
            group_index=request.get("group_index"),
            index=request.get("index"),
        )

    async def aclose(self) -> None:
        """Release connections."""
        await self.model.aclose()
        await self.environments.aclose()


_built: dict[tuple[int, str, tuple[str, ...]], asyncio.Task[SlimeRollout]] = {}


def _settings(args: Any) -> tuple[str, tuple[str, ...]]:
    path = getattr(args, "rayrl_config", None) or os.environ.get("RAYRL_CONFIG")
    if not path:
        raise ConfigError("no rollout config: set RAYRL_CONFIG (or args.rayrl_config) to its path")
    extra = getattr(args, "rayrl_overrides", None) or os.environ.get("RAYRL_OVERRIDES") or ""
    overrides = extra.split() if isinstance(extra, str) else list(extra)
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if host and port and not any(item.startswith("model.base_url=") for item in overrides):
        overrides.append(f"model.base_url=http://{host}:{port}/v1")
    return str(path), tuple(overrides)


async def generate(args: Any, sample: Any, sampling_params: JsonDict) -> Any:
    """slime's entry point: fills the given sample and returns it.

    The sample is slime's own object; only its documented attributes are set. One runtime per event loop and config is
    shared by all calls.
    """
    path, overrides = _settings(args)
    key = (id(asyncio.get_running_loop()), path, overrides)
    task = _built.get(key)
    if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
        task = _built[key] = asyncio.ensure_future(SlimeRollout.build(path, list(overrides)))
    rollout = await asyncio.shield(task)
    rollout.check_sampling(sampling_params or {})
    request = {"group_index": sample.group_index, "index": sample.index, "metadata": sample.metadata}
    finished = await rollout.play(request)
    status = type(sample.status)
    for name, value in finished.items():
        if name == "status":
            sample.status = status(value)
        elif name == "metadata":
            sample.metadata = {**sample.metadata, **value}
        else:
            setattr(sample, name, value)
    return sample
