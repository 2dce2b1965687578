"""From a validated config to everything a run is: jobs, prompts, skills, identities, fingerprint. No network, no Ray.

``rayrl plan`` shows exactly this; ``rayrl run`` starts from exactly this. So a plan on a laptop and a run on a cluster
agree on what the experiment is.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from rayrl import __version__
from rayrl.config import find_config, load_raw, parse_config, resolve_resource
from rayrl.environments.config import AnyEnvironment, environment_identity, resolve_paths
from rayrl.errors import ConfigError
from rayrl.models.registry import model_identity
from rayrl.prompts import PromptBuilder, load_prompt
from rayrl.schemas import EPISODE_SCHEMA, EpisodeJob, JsonDict
from rayrl.settings import RunConfig
from rayrl.skills.base import SkillProvider
from rayrl.skills.providers import build_skills
from rayrl.tasks import Split, load_split_manifest, make_jobs, sample_task_ids
from rayrl.traces.manifest import fingerprint, make_manifest
from rayrl.worker import WorkerSpec

EPHEMERAL_MARK = "runtime_resources/working_dir_files"
"""Part of the path Ray unpacks a job's working directory to; it is deleted after the job."""


@dataclass(frozen=True)
class Experiment:
    """A planned run."""

    config: RunConfig
    base: Path
    """Folder that relative paths in the config start from."""
    split: Split
    split_manifest: Path
    jobs: list[EpisodeJob]
    prompts: PromptBuilder
    skills: SkillProvider
    semantic: JsonDict
    """What the fingerprint is the hash of."""
    fingerprint: str

    @property
    def name(self) -> str:
        """Experiment name."""
        return self.config.experiment.name

    @property
    def run_dir(self) -> Path:
        """``<run_root>/<experiment>``."""
        return run_root(self.config) / self.name

    def manifest(self) -> JsonDict:
        """What ``manifest.json`` will hold."""
        operational = {
            "notes": self.config.experiment.notes,
            "execution": self.config.execution.model_dump(mode="json"),
            "deadline_s": self.config.runtime.deadline_s,
            "model_base_url": self.config.model.base_url,
            "environment_base_urls": list(getattr(self.config.environment, "base_urls", []) or []),
            "test_purpose": self.config.tasks.test_purpose,
            "val_fingerprint": self.config.tasks.val_fingerprint,
        }
        return make_manifest(experiment=self.name, semantic=self.semantic, operational=operational, versions=versions())

    def resolved_config(self) -> JsonDict:
        """The config with every file it names as an absolute path: what a replay or a resume can start from."""
        dump: JsonDict = self.config.model_dump(mode="json")
        dump["experiment"]["run_root"] = str(run_root(self.config))
        dump["tasks"]["manifest"] = str(self.split_manifest)
        dump["prompt"]["file"] = str(resolve_resource(self.config.prompt.file, self.base))
        if self.config.skills.path is not None:
            dump["skills"]["path"] = str(resolve_resource(self.config.skills.path, self.base))
        return dump

    def worker_spec(self, environment: AnyEnvironment, *, admin_token: SecretStr | None = None) -> WorkerSpec:
        """What every worker gets; ``environment`` with the addresses really used."""
        execution = self.config.execution
        model, identity = self.semantic["model"], self.semantic["environment"]
        provenance: JsonDict = {
            "experiment": self.name,
            "fingerprint": self.fingerprint,
            "model": model.get("name", model.get("kind")),
            "checkpoint_id": self.config.model.checkpoint_id,
            "environment_version": identity.get("environment_version", identity.get("version")),
            "prompt_sha256": self.semantic["prompt"]["sha256"],
            "skills": self.semantic["skills"],
        }
        if model.get("scripted"):
            provenance["scripted"] = True
        built_in_place = ":" in self.config.skills.kind
        return WorkerSpec(
            model=self.config.model,
            environment=environment,
            admin_token=admin_token,
            prompt=self.config.prompt,
            template=self.prompts.template,
            skills=self.config.skills if built_in_place else self.skills,
            runtime=self.config.runtime,
            provenance=provenance,
            concurrency=execution.concurrency,
            adaptive=execution.adaptive,
        )


def load_run_config(path: str | Path, overrides: list[str] | None = None) -> tuple[RunConfig, Path]:
    """Load a rollout config; returns it with the folder its relative paths start from."""
    file = find_config(path)
    raw = load_raw(file, overrides)
    return parse_config(raw, RunConfig, source=str(file)), file.resolve().parent


def prepare(config: RunConfig, base: Path) -> Experiment:
    """Resolve a config into an :class:`Experiment`.

    Raises:
        ConfigError, DataError: everything that can be known to be wrong before the first request.
    """
    manifest_path = resolve_resource(config.tasks.manifest, base)
    manifest = load_split_manifest(manifest_path)
    split = manifest.split(config.tasks.split)
    environment = resolve_paths(config.environment, base)
    identity = environment_identity(environment)
    _check_split_fits(split, config, identity, manifest.source)
    config = config.model_copy(update={"environment": environment})
    task_ids = sample_task_ids(split.task_ids, config.tasks.sample_size, experiment_seed=config.experiment.seed)
    jobs = make_jobs(
        task_ids, split=config.tasks.split, repeats=config.tasks.repeats, experiment_seed=config.experiment.seed
    )
    template = load_prompt(resolve_resource(config.prompt.file, base))
    if identity.get("persona") is True and "{persona}" not in template.user and template.persona:
        raise ConfigError(
            f"prompt.file {config.prompt.file}: user: lacks the placeholder {{persona}}, but environment.persona is "
            'true, so the model would never see it; add it, or set persona: "" in the prompt to leave it out on purpose'
        )
    prompts = PromptBuilder(template, config.prompt)
    skills = build_skills(config.skills, base)
    semantic: JsonDict = {
        "trace_schema": EPISODE_SCHEMA,
        "jobs": [[job.task_id, job.sample_id, job.seed, job.split] for job in jobs],
        "split": {
            "name": config.tasks.split,
            "role": split.role,
            "task_ids_sha256": split.task_ids_sha256,
            "manifest_version": manifest.version,
        },
        "model": model_identity(config.model),
        "environment": identity,
        "prompt": prompts.identity(),
        "skills": skills.identity(),
        "limits": config.runtime.semantic(),
    }
    return Experiment(
        config=config,
        base=base,
        split=split,
        split_manifest=manifest_path,
        jobs=jobs,
        prompts=prompts,
        skills=skills,
        semantic=semantic,
        fingerprint=fingerprint(semantic),
    )


def run_root(config: RunConfig) -> Path:
    """The absolute run root.

    Raises:
        ConfigError: it is relative inside a Ray job's temporary working directory, where results would be deleted.
    """
    root = Path(config.experiment.run_root).expanduser()
    if not root.is_absolute():
        cwd = Path.cwd()
        if EPHEMERAL_MARK in str(cwd):
            raise ConfigError(
                f"experiment.run_root: {config.experiment.run_root!r} is relative, but this job runs in a temporary "
                "directory that Ray deletes; give an absolute path (or ~) on storage that stays, for example "
                "experiment.run_root=~/rayrl-runs"
            )
        root = cwd / root
    return root


def versions() -> JsonDict:
    """Versions that help to reproduce a run; not part of the fingerprint."""
    found: JsonDict = {"rayrl": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in ("ray", "torch", "httpx", "pydantic", "pyarrow"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _check_split_fits(split: Split, config: RunConfig, identity: JsonDict, source: dict[str, Any]) -> None:
    name = config.tasks.split
    persona = identity.get("persona")
    if split.persona is not None and isinstance(persona, bool) and split.persona != persona:
        raise ConfigError(
            f"environment.persona is {str(persona).lower()}, but the split {name!r} is made for "
            f"persona {str(split.persona).lower()}; change one of them"
        )
    planned, frozen = identity.get("catalogue_sha256"), source.get("sha256")
    if source.get("kind") == "shop_catalogue" and planned and frozen and planned != frozen:
        raise ConfigError(
            f"tasks.manifest was built for another catalogue ({frozen[:12]}…, the environment's is {planned[:12]}…); "
            "build splits for this one with `rayrl splits build`"
        )
