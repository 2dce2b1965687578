"""``rayrl pipeline``: the loop from rollouts to skills that are really better, as a durable state machine.

rollouts -> diagnosis -> candidates -> gate -> bank -> selector -> evaluation on unseen tasks -> report

Each stage leaves files of its own and is entered in ``state.json`` when it is through; the same command resumes at the
stage that was hit, and inside it where that stage's own records allow (finished episodes are never played again). A
stage that does not finish stops the pipeline, and nothing behind it runs. Where the analyst finds nothing that can be
used, there is nothing to gate: the pipeline goes straight to the report, which says so.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from filelock import FileLock, Timeout
from pydantic import Field

from jobs.build_skills import SNAPSHOT, BuildSettings, analyst_model, build
from jobs.confirm_selector import Confirmation, SelectorCheck
from jobs.evaluate import evaluate
from jobs.gate_plan import GateConfig
from jobs.output import console, facts_table, print_json
from jobs.pipeline_report import compare_arms, write_empty_report, write_report
from jobs.skill_runs import SkillRuns
from jobs.train_selector import selector_data, train_from_pairs
from jobs.validate_skills import SELECTED, Gate
from learners.selector import SelectorConfig
from rayrl.config import Section, find_config, load_raw, operational, parse_config, resolve_resource
from rayrl.errors import ConfigError, RunConflictError
from rayrl.experiment import load_run_config
from rayrl.schemas import EpisodeJob, JsonDict, episode_seed
from rayrl.settings import RunConfig
from rayrl.skills.bank import load_snapshot, save_bank
from rayrl.skills.pruning import tasks_needed
from rayrl.skills.rule import GateRule
from rayrl.skills.stages import Stages
from rayrl.tasks import load_split_manifest, sample_task_ids
from rayrl.traces.manifest import read_manifest, write_json_atomic

STAGES = ("rollouts", "diagnosis", "candidates", "gate", "bank", "selector", "evaluation", "report")
GATE = "gate"
NEEDS_CANDIDATES = ("gate", "bank", "selector", "evaluation")
"""Stages that are left out when there is no candidate."""


class GatePart(Section):
    """The gate stage."""

    split: str = "gate"
    """Tasks skills are judged on."""
    tasks: int | None = Field(400, ge=2)
    """How many of them."""
    confirm_split: str | None = "confirm"
    """Tasks that took no part in selection."""
    confirm_tasks: int | None = Field(None, ge=2)
    """How many of them."""
    mask_seed: int = 1
    """Seed of the random subsets."""
    rule: GateRule = GateRule()
    """How rollouts are spent and what is selected."""
    assumed_sd: float = 0.45
    """Deviation of a reward difference inside a pair, for the power figure before the run."""
    min_effect: float | None = None
    """Refuse to start when smaller effects than this could not be seen."""


class PipelineConfig(Section):
    """The whole loop."""

    name: str = Field("skills", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,60}$")
    """Name; also the prefix of all runs."""
    output: str = operational("runs/pipeline")
    """Directory of the pipeline."""
    run: str = "skills/shopper.yaml"
    """Rollout config: checkpoint, environment, prompt, limits."""
    overrides: list[str] = []
    """``section.key=value`` on the rollout config."""
    train_split: str = "train"
    """Tasks whose traces skills are built from."""
    train_tasks: int | None = Field(200, ge=1)
    """How many of them."""
    train_repeats: int = Field(1, ge=1)
    """Samples of each."""
    analyst: Literal["rules", "llm"] = "rules"
    """Who writes the cards."""
    analyst_config: str | None = None
    """``llm``: config whose model section is the analyst."""
    max_episodes: int | None = Field(None, ge=1)
    """Episodes shown to the analyst."""
    max_chunks: int = Field(16, ge=1, le=16)
    """Candidates at most."""
    engine: Literal["local", "ray"] = operational("local")
    """How cards are made."""
    bank: str | None = None
    """Bank to add to or rewrite in; null starts from nothing."""
    gate: GatePart = GatePart()
    """The gate stage."""
    selector: SelectorConfig | None = SelectorConfig()
    """The selector stage; null = none."""
    selector_check: SelectorCheck | None = SelectorCheck()
    """How what the selector drops is confirmed by rollouts; null = not at all, and the report says so."""
    unseen_split: str = "unseen"
    """Tasks for the evaluation at the end; nothing before has seen them."""
    unseen_tasks: int | None = Field(None, ge=2)
    """How many of them."""
    unseen_repeats: int = Field(1, ge=1)
    """Samples of each."""
    top_k: int = Field(4, ge=1)
    """The similarity competitor takes this many."""


@dataclass(frozen=True)
class _Arm:
    name: str
    skills: JsonDict


class Pipeline:
    """One pipeline in its directory; methods in the order they happen."""

    def __init__(self, config: PipelineConfig, run: RunConfig, base: Path, *, quiet: bool = True) -> None:
        if config.analyst == "llm" and config.analyst_config is None:
            raise ConfigError("analyst: llm needs analyst_config, a config whose model section is the analyst")
        names = [config.train_split, config.gate.split, config.gate.confirm_split, config.unseen_split]
        self.check_split = self._check_split(config)
        if self.check_split != config.gate.confirm_split:
            names.append(self.check_split)
        used = [n for n in names if n is not None]
        if len(set(used)) != len(used):
            raise ConfigError(
                f"train, gate, confirm, selector_check and unseen need splits of their own, got {', '.join(used)}"
            )
        self.config = config
        self.run_config = run
        self.base = base
        self.out = Path(config.output).expanduser()
        self.stages = Stages(self.out)
        self._quiet = quiet
        self._manifest = load_split_manifest(resolve_resource(run.tasks.manifest, base))
        if self.check_split is not None and config.selector_check is not None:
            self._enough_to_confirm(self.check_split, config.selector_check)
        locked = [n for n in used if self._manifest.split(n).role == "test"]
        if locked:
            # several arms look at the last split: a test split may be opened once, by one finished configuration
            raise ConfigError(
                f"split {locked[0]!r} has role test, which a pipeline must not open; name one with role train or val"
            )

    @staticmethod
    def _check_split(config: PipelineConfig) -> str | None:
        """Where the selector is confirmed; None when nothing is."""
        if config.selector is None or config.selector_check is None:
            return None
        split = config.selector_check.split or config.gate.confirm_split
        if split is None:
            raise ConfigError(
                "selector_check needs a split: set selector_check.split, or selector_check: null for none"
            )
        return split

    def _enough_to_confirm(self, split: str, check: SelectorCheck) -> None:
        have, need = len(self._manifest.split(split).task_ids), tasks_needed(check.hidden_loss)
        have = min(have, check.tasks or have)
        if have < need:
            raise ConfigError(
                f"selector_check: {have} tasks of {split!r} can hide a loss of more than {check.hidden_loss:g}, "
                f"{need} are needed; give more tasks, a larger selector_check.hidden_loss, or selector_check: null"
            )

    def run(self, until: str | None = None) -> JsonDict:
        """All stages, or up to and including ``until``; returns the facts of the last one.

        Raises:
            RayrlError: a stage stopped; the message says why, the same command goes on.
        """
        facts: JsonDict = {}
        lock = FileLock(str(self.out / ".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise RunConflictError(f"{self.out} is in use by another process") from None
        try:
            for name in STAGES:
                if name == "selector" and self.config.selector is None:
                    continue
                if name in NEEDS_CANDIDATES and self._nothing_to_gate():
                    if name == until:
                        break
                    continue
                files, work = self._stage(name)
                facts = self.stages.run(name, self._inputs(name), files, work)
                if name == until:
                    break
        finally:
            lock.release()
        return facts

    def _stage(self, name: str) -> tuple[list[str], Any]:
        return {
            "rollouts": ([f"runs/{self.config.name}-train/traces.jsonl"], self._rollouts),
            "diagnosis": (["diagnosis/episode_labels.jsonl"], self._diagnosis),
            "candidates": ([f"build/{SNAPSHOT}"], self._candidates),
            "gate": (["gate/contributions.json", f"gate/{SELECTED}"], self._gate),
            "bank": (["skillbank.snapshot.json"], self._bank),
            "selector": (["selector/selector.json"], self._selector),
            "evaluation": (["evaluation.json"], self._evaluation),
            "report": (["report.json", "report.md"], self._report),
        }[name]

    def _inputs(self, name: str) -> JsonDict:
        """What a stage depends on besides the stages before it."""
        c = self.config
        mine: JsonDict = {
            "rollouts": {"run": self.run_config.semantic(), "tasks": [c.train_split, c.train_tasks, c.train_repeats]},
            "candidates": {
                "analyst": [c.analyst, c.analyst_config, c.max_episodes, c.max_chunks],
                "bank": load_snapshot(resolve_resource(c.bank, self.base)).sha256 if c.bank else None,
            },
            "gate": c.gate.semantic(),
            "selector": self._selector_inputs(),
            "evaluation": {"unseen": [c.unseen_split, c.unseen_tasks, c.unseen_repeats], "top_k": c.top_k},
        }
        return {"name": c.name, **mine.get(name, {})}

    def _selector_inputs(self) -> JsonDict:
        c = self.config
        check = None if c.selector_check is None else {**c.selector_check.semantic(), "split": self.check_split}
        return {"training": c.selector.semantic(), "check": check} if c.selector is not None else {}

    def _rollouts(self) -> JsonDict:
        c = self.config
        tasks = {"split": c.train_split, "sample_size": c.train_tasks, "repeats": c.train_repeats}
        with SkillRuns(self.run_config, self.base, self.out / "runs", quiet=self._quiet) as runs:
            runs.own_servers = True  # private goals for the analyst come from servers of the run's own
            experiment = runs.experiment(f"{c.name}-train", {"tasks": tasks, "skills": {"kind": "none", "path": None}})
            folder = runs.run(experiment)
        return {"episodes": len(experiment.jobs), "fingerprint": (read_manifest(folder) or {}).get("fingerprint")}

    def _diagnosis(self) -> JsonDict:
        found = evaluate([str(self._train_run())], engine=self.config.engine, out=self.out / "diagnosis", labels=True)
        labels = (found["diagnosis"] or {}).get("labels") or {}
        return {"records": found["read"]["records"], "labels": len(labels)}

    def _train_run(self) -> Path:
        return self.out / "runs" / f"{self.config.name}-train"

    def _candidates(self) -> JsonDict:
        c = self.config
        settings = BuildSettings(
            analyst=c.analyst,
            engine=c.engine,
            model=analyst_model(str(resolve_resource(c.analyst_config, self.base))) if c.analyst_config else None,
            max_episodes=c.max_episodes,
            limit=c.max_chunks,
            parent=resolve_resource(c.bank, self.base) if c.bank else None,
        )
        facts = build([str(self._train_run())], self.out / "build", settings)
        active = len(load_snapshot(self.out / "build" / SNAPSHOT).active())
        return {**{k: v for k, v in facts.items() if k not in ("ran", "snapshot")}, "active": active}

    def _nothing_to_gate(self) -> bool:
        """Whether the analysis ended without a single skill, new or of the bank it was to add to."""
        return (self.stages.facts("candidates") or {}).get("active") == 0

    def gate_config(self) -> GateConfig:
        """The gate stage as a gate config."""
        return GateConfig(
            name=GATE,
            run=self.config.run,
            bank=str((self.out / "build" / SNAPSHOT).resolve()),
            **self.config.gate.model_dump(),
        )

    def _gate(self) -> JsonDict:
        gate = Gate(self.gate_config(), self.run_config, self.base, self.out / "gate", quiet=self._quiet)
        found = gate.run()
        return {k: found[k] for k in ("selected", "selected_bank_sha256", "rollouts", "minimum_detectable_effect")}

    def _bank(self) -> JsonDict:
        """The gated bank becomes the pipeline's result: an immutable snapshot of its own."""
        bank = load_snapshot(self.out / "gate" / SELECTED)
        path = self.out / "skillbank.snapshot.json"
        path.unlink(missing_ok=True)
        return {"bank_sha256": save_bank(bank, path), "skills": [s.skill_id for s in bank.active()]}

    def _selector(self) -> JsonDict:
        if self.config.selector is None:
            return {}
        made = selector_data(
            self.out / "gate", GATE, load_snapshot(self.out / "build" / SNAPSHOT), self.config.selector
        )
        trained = train_from_pairs(made)
        out, check = self.out / "selector", self.config.selector_check
        if check is None or self.check_split is None:
            facts = {**trained.facts, "confirmation": None}
            return {**facts, "policy_checksum": made.save(out, trained.policy, facts)}
        candidate = self.out / "selector-trained"
        made.save(candidate, trained.policy, trained.facts)
        jobs = self._jobs(self.check_split, check.tasks)
        with SkillRuns(self.run_config, self.base, self.out / "runs", quiet=self._quiet) as runs:
            confirmation = Confirmation(made, jobs, self.config.name, self.out / "selector-check", runs)
            return confirmation.run(trained, candidate, out, check)

    def _jobs(self, split: str, tasks: int | None, repeats: int = 1) -> list[EpisodeJob]:
        seed = self.run_config.experiment.seed
        ids = sample_task_ids(self._manifest.split(split).task_ids, tasks, experiment_seed=seed)
        return [
            EpisodeJob(task_id=t, sample_id=s, seed=episode_seed(seed, t, s), split=split)
            for t in ids
            for s in range(repeats)
        ]

    def _arms(self) -> list[_Arm]:
        candidates = str((self.out / "build" / SNAPSHOT).resolve())
        selected = str((self.out / "skillbank.snapshot.json").resolve())
        arms = [
            _Arm("none", {"kind": "none", "path": None}),
            _Arm("all", {"kind": "bank", "path": candidates}),
            _Arm("selected", {"kind": "bank", "path": selected}),
        ]
        facts = self.stages.facts("selector")
        if facts is not None and self.config.selector is not None:
            near = {"bank": candidates, "encoder": self.config.selector.encoder}
            kind = "rayrl.skills.selector:SimilaritySkills"
            arms += [
                _Arm("top_k", {"kind": kind, "path": None, "options": {**near, "top_k": self.config.top_k}}),
                _Arm(
                    "threshold",
                    {"kind": kind, "path": None, "options": {**near, "threshold": facts["tuned_threshold"]}},
                ),
                _Arm(
                    "learned",
                    {
                        "kind": "rayrl.skills.selector:LearnedSkills",
                        "path": None,
                        "options": {"folder": str((self.out / "selector").resolve())},
                    },
                ),
            ]
        return arms

    def _evaluation(self) -> JsonDict:
        c = self.config
        jobs = self._jobs(c.unseen_split, c.unseen_tasks, c.unseen_repeats)
        tasks = {"split": c.unseen_split, "sample_size": None, "repeats": 1}
        folders: dict[str, Path] = {}
        with SkillRuns(self.run_config, self.base, self.out / "runs", quiet=self._quiet) as runs:
            for arm in self._arms():
                changes = {"tasks": tasks, "skills": arm.skills}
                name = f"{c.name}-unseen-{arm.name.replace('_', '-')}"
                folders[arm.name] = runs.run(runs.marked(name, changes, jobs))
        good = set(load_snapshot(self.out / "skillbank.snapshot.json").model_dump()["records"])
        found = compare_arms(folders, jobs, good)
        write_json_atomic(self.out / "evaluation.json", found)
        return {"tasks": len({j.task_id for j in jobs}), "arms": list(folders)}

    def _report(self) -> JsonDict:
        stages = {name: self.stages.facts(name) for name in STAGES if self.stages.facts(name) is not None}
        if self._nothing_to_gate():
            (self.out / "evaluation.json").unlink(missing_ok=True)  # of an earlier analysis
            return write_empty_report(self.out, self.config.model_dump(mode="json"), stages)
        evaluation = orjson.loads((self.out / "evaluation.json").read_bytes())
        gate = orjson.loads((self.out / "gate" / "gate.json").read_bytes())
        return write_report(self.out, self.config.model_dump(mode="json"), stages, gate, evaluation)


def load_pipeline(file: str, overrides: list[str]) -> tuple[PipelineConfig, RunConfig, Path]:
    """Pipeline config, the rollout config it names, and the folder relative paths start from."""
    path = find_config(file)
    config = parse_config(load_raw(path, overrides), PipelineConfig, source=str(path))
    beside = path.resolve().parent / config.run
    run, base = load_run_config(beside if beside.exists() else config.run, config.overrides)
    return config, run, base


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("config", nargs="?", default="pipeline", help="pipeline config (default: the shipped one)")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--until", choices=STAGES, help="stop after this stage")
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    overrides = list(args.overrides)
    file = args.config
    if "=" in file:  # only overrides were given
        file, overrides = "pipeline", [file, *overrides]
    config, run_config, base = load_pipeline(file, overrides)
    pipeline = Pipeline(config, run_config, base, quiet=args.quiet or args.json)
    facts = pipeline.run(args.until)
    if args.json:
        print_json({"output": str(pipeline.out), "ran": pipeline.stages.ran, **facts})
        return 0
    out = console()
    report = pipeline.out / "report.md"
    if args.until in (None, "report") and report.exists():
        out.print(report.read_text(encoding="utf-8"), markup=False)
    out.print(facts_table("Pipeline", [("ran now", ", ".join(pipeline.stages.ran) or "nothing"), ("in", pipeline.out)]))
    return 0


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("pipeline", add_arguments, run, None))
