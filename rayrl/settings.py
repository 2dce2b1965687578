"""The sections of a rollout config, put together.

What is operational (see :func:`rayrl.config.operational`) can change between a run and its resume; everything else is
part of what the run *is*.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rayrl.config import Section, operational
from rayrl.environments.config import EnvironmentConfig
from rayrl.models.config import ModelConfig
from rayrl.prompts import PromptConfig
from rayrl.runtime import RuntimeConfig
from rayrl.skills.providers import SkillsConfig
from rayrl.tracking import TrackingConfig


class ExperimentConfig(Section):
    """Name and place of a run."""

    name: str = operational(..., pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Directory name of the run under ``run_root``; letters, digits, dot, dash, underscore."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Experiment seed: task sampling and every episode seed follow from it."""
    run_root: str = operational("runs")
    """Where run directories lie. Must be absolute (or ``~``) inside a Ray job, whose working directory is temporary."""
    notes: str = operational("")
    """Free text, kept in the manifest."""


class TasksConfig(Section):
    """Which tasks are played, and how often."""

    manifest: str
    """Split manifest (``rayrl splits build`` makes one)."""
    split: str
    """Name of a split in the manifest."""
    sample_size: int | None = Field(default=None, ge=1)
    """Number of tasks drawn from the split with the experiment seed; ``null`` = all of them."""
    repeats: int = Field(default=1, ge=1)
    """Independent samples per task."""
    test_purpose: str | None = operational(None)
    """Why a split with role ``test`` is opened; required there. ``equipped_report`` allows skills."""
    val_fingerprint: str | None = operational(None)
    """Fingerprint of the finished val run of the same checkpoint; required for role ``test``."""


class ExecutionConfig(Section):
    """How a run is executed. None of it changes results."""

    mode: Literal["ray", "inprocess"] = operational("ray")
    """``ray`` = rollout actors; ``inprocess`` = the same worker in this process, without Ray."""
    ray_address: str | None = operational(None)
    """Ray cluster to join; ``null`` = ``RAY_ADDRESS`` or a local Ray of our own."""
    actors: int = operational(2, ge=1)
    """Rollout actors."""
    concurrency: int = operational(16, ge=1)
    """Concurrent episodes per actor (upper bound when adaptive)."""
    adaptive: bool = operational(True)
    """Shrink an actor's concurrency while leases or the model endpoint are short, and grow it back."""
    prefetch: int = operational(16, ge=0)
    """Jobs waiting inside an actor beyond its concurrency, so that it never idles for a round trip."""
    cpus_per_actor: float = operational(0.5, ge=0)
    """Ray CPU resource of an actor; rollouts mostly wait."""
    max_attempts: int = operational(3, ge=1)
    """Attempts per episode before it is set aside as failed."""
    max_deadline_attempts: int = operational(2, ge=1)
    """Attempts of an episode that ran into its deadline before it is set aside."""
    retry_backoff_s: float = operational(0.5, ge=0)
    """Wait before a failed episode's second attempt; doubles each time, at most 30 s."""
    max_consecutive_failures: int = operational(50, ge=1)
    """Stop the run when this many attempts in a row failed: the endpoint or environment is down."""
    max_tokens_total: int | None = operational(None, ge=1)
    """Spending cap in tokens over the whole run, resumes included: no new episodes beyond it."""
    max_cost: float | None = operational(None, gt=0)
    """Spending cap in the currency of ``model.prices``."""
    watchdog_s: float = operational(1200.0, gt=0)
    """End the run when nothing at all progressed for this long, naming what hangs."""
    worker_timeout_s: float = operational(60.0, gt=0)
    """An actor that does not answer for this long is taken for dead and replaced."""


class RunConfig(Section):
    """A rollout run: one checkpoint on one split."""

    experiment: ExperimentConfig
    """Name and place."""
    tasks: TasksConfig
    """Which tasks."""
    environment: EnvironmentConfig
    """Where they are played."""
    model: ModelConfig
    """Who plays."""
    prompt: PromptConfig = PromptConfig()
    """What the model is told."""
    skills: SkillsConfig = SkillsConfig()
    """Procedural knowledge put into the prompt."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Limits of an episode."""
    execution: ExecutionConfig = operational(ExecutionConfig())
    """Parallelism, retries, caps."""
    tracking: TrackingConfig = operational(TrackingConfig())
    """Metrics mirror."""

    @field_validator("prompt", "skills", "runtime", "execution", "tracking", mode="before")
    @classmethod
    def _empty_section(cls, value: Any) -> Any:
        # "skills:" with nothing below it is YAML null; people mean the defaults
        return {} if value is None else value

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.model.checkpoint_id is None and self.skills.kind == "masked":
            raise ValueError(
                "skills.kind=masked needs model.checkpoint_id: a gate must know which weights it speaks about"
            )
        return self
