"""Rollouts that a gate or pipeline needs: one shop for many runs, the same jobs under different skills.

A run is an ordinary run directory, made (or resumed, or found finished) by the ordinary rollout job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from jobs.rollout import RunResult, run_rollout
from jobs.shop_servers import embedded_shops
from rayrl.config import parse_config
from rayrl.environments.config import resolve_paths
from rayrl.errors import RunIncompleteError
from rayrl.experiment import Experiment, prepare
from rayrl.schemas import EpisodeJob
from rayrl.settings import RunConfig
from rayrl.traces.manifest import fingerprint

Changes = dict[str, Any]


class SkillRuns:
    """Runs variations of one rollout config under ``root``, on servers started once (on first need)."""

    def __init__(self, config: RunConfig, base: Path, root: Path, *, quiet: bool = True) -> None:
        self._config = config
        self._base = base
        self.root = root
        self._quiet = quiet
        self._shops: AbstractContextManager[Any] | None = None
        self._environment: Any = None
        self.own_servers = False
        """Let each run start servers of its own, so that the private goals reach its private.jsonl."""
        self.rollouts = 0
        """Episodes played now (not those found finished)."""

    def __enter__(self) -> SkillRuns:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._shops is not None:
            self._shops.__exit__(kind, error, tb)

    def experiment(self, name: str, changes: Changes, jobs: list[EpisodeJob] | None = None) -> Experiment:
        """The config with ``{"section": {key: value}}`` changes; ``jobs`` replace the planned ones. Starts nothing."""
        raw = self._config.model_dump(mode="json")
        for section, values in changes.items():
            raw[section] = {**raw[section], **values}
        raw["experiment"] = {**raw["experiment"], "name": name, "run_root": str(self.root)}
        made = prepare(parse_config(raw, RunConfig, source=f"run {name}"), self._base)
        return made if jobs is None else with_jobs(made, jobs)

    def marked(self, name: str, changes: Changes, jobs: list[EpisodeJob]) -> Experiment:
        """The same with its fingerprint in the name: another bank or selector is another run beside the old one."""
        mark = self.experiment(name, changes, jobs).fingerprint[:8]
        return self.experiment(f"{name}-{mark}", changes, jobs)

    def run(self, experiment: Experiment) -> Path:
        """Play (or resume) it to its end.

        Raises:
            RunIncompleteError: some episodes have no result; the same command goes on.
        """
        result: RunResult = run_rollout(self._with_servers(experiment), quiet=self._quiet)
        self.rollouts += result.ran_now
        if result.status != "complete":
            raise RunIncompleteError(f"{result.run_dir}: {result.reason}")
        return result.run_dir

    def _with_servers(self, experiment: Experiment) -> Experiment:
        if self._config.execution.mode != "inprocess" or self.own_servers:
            return experiment  # workers may be elsewhere; each run starts servers where they can reach them
        if self._environment is None:
            environment = resolve_paths(self._config.environment, self._base)
            self._shops = embedded_shops(environment, host="127.0.0.1", on_event=_ignore)
            self._environment = self._shops.__enter__().environment
        return dataclasses.replace(
            experiment, config=experiment.config.model_copy(update={"environment": self._environment})
        )


def with_jobs(experiment: Experiment, jobs: list[EpisodeJob]) -> Experiment:
    """The same experiment on exactly these jobs, fingerprint included."""
    semantic = {**experiment.semantic, "jobs": [[j.task_id, j.sample_id, j.seed, j.split] for j in jobs]}
    return dataclasses.replace(experiment, jobs=jobs, semantic=semantic, fingerprint=fingerprint(semantic))


_ignore: Callable[[Any], None] = lambda _: None  # noqa: E731
