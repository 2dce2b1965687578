"""``rayrl skills gate CONFIG``: does each skill help THIS checkpoint? Paired masked validation, stage by stage.

Everything is checked before anything is played: checkpoint named, tasks there, masks of full rank, the effect that can
be seen at all. Then pairs of runs per stage (same jobs, same seeds), a look after each, an early stop when nothing is
open. Results are written only when the gate is through; an incomplete gate leaves a manifest that says so, and no bank.
The same command resumes: finished runs are found, looks are computed again from them.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock

from jobs.gate_plan import GateConfig, assignments, dropped, flipped, no_skills, plan_gate
from jobs.output import console, facts_table, print_json
from jobs.skill_runs import SkillRuns
from rayrl.config import find_config, load_raw, parse_config, resolve_resource
from rayrl.errors import RayrlError, UserError
from rayrl.evaluation.paired import paired_difference
from rayrl.experiment import Experiment, load_run_config
from rayrl.schemas import EpisodeJob, JsonDict, canonical_json, episode_seed, sha256_hex
from rayrl.settings import RunConfig
from rayrl.skills.bank import GateResult, SkillBank, SkillRecord, make_bank, save_bank
from rayrl.skills.gate import GateData, Played, contributions, fit_metric
from rayrl.skills.providers import BankEntry
from rayrl.skills.rule import Look, take_look
from rayrl.skills.validation import Arm, Assign, check_bare_manifest, read_arm
from rayrl.tasks import load_split_manifest, sample_task_ids
from rayrl.traces.manifest import write_json_atomic

MANIFEST, CONTRIBUTIONS, SELECTED, LEDGER = "gate.json", "contributions.json", "selected.snapshot.json", "ledger.jsonl"


class Gate:
    """One gate in a directory. ``run`` goes from plan to results; every step can be repeated."""

    def __init__(self, config: GateConfig, run: RunConfig, base: Path, out: Path, *, quiet: bool = True) -> None:
        self.config = config
        self.out = out
        self.base = base
        self.plan = plan_gate(config, run, base)
        self._run_config = run
        self._quiet = quiet
        self._bank_file = out / "candidates.snapshot.json"

    def run(self) -> JsonDict:
        """Play, decide, confirm, write. Returns what ``gate.json`` holds.

        Raises:
            RayrlError: something stopped it; ``gate.json`` says incomplete and why, and no bank was written.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        head = {"schema": "rayrl-gate-v1", **self.plan.as_dict(), "bank_sha256": self.plan.bank.sha256}
        self._refuse_other(head)
        with FileLock(str(self.out / ".lock"), timeout=5):
            write_json_atomic(self.out / MANIFEST, {**head, "status": "incomplete", "reason": "running"})
            try:
                save_bank(self.plan.bank, self._bank_file)
                with SkillRuns(self._run_config, self.base, self.out / "runs", quiet=self._quiet) as runs:
                    found = self._play(runs)
            except BaseException as error:
                reason = str(error) or type(error).__name__
                write_json_atomic(self.out / MANIFEST, {**head, "status": "incomplete", "reason": reason})
                raise
            return self._write(head, found)

    def _refuse_other(self, head: JsonDict) -> None:
        path = self.out / MANIFEST
        if not path.exists():
            return
        before = orjson.loads(path.read_bytes())
        for key in ("bank_sha256", "rule_sha256", "name", "tasks"):
            if before.get(key) != head[key]:
                raise UserError(
                    f"{self.out} holds another gate ({key}: {before.get(key)!r} there, {head[key]!r} now); "
                    "choose another output directory"
                )

    def _play(self, runs: SkillRuns) -> JsonDict:
        names = [e.skill_id for e in self.plan.entries]
        families = self.plan.bank.families()
        data = GateData(names)
        look: Look | None = None
        done, total = 0, sum(len(s) for s in self.plan.stages)
        looks: list[JsonDict] = []
        dropped_after: dict[str, int] = {}
        for index, jobs in enumerate(self.plan.stages):
            data.stages += self._stage(runs, index, jobs, look)
            done += len(jobs)
            look = take_look(self.plan.rule, index, fit_metric(data), look, done=done, total=total, families=families)
            sets = {key: sorted(getattr(look, key)) for key in ("accepted", "open", "harmful", "dropped")}
            looks.append({"pairs": done, **sets})
            dropped_after = {name: dropped_after.get(name, done) for name in sets["dropped"]}
            if look.stop:
                break
        if look is None:
            raise UserError("the gate has no stage to play")
        report = contributions(
            data, self.plan.rule, look, self.plan.entries, families=families, dropped_after=dropped_after
        )
        report["looks"] = looks
        report["rollouts"] = 2 * done
        report["confirmation"] = self._confirm(runs, set(report["selected"]))
        return report

    def _stage(self, runs: SkillRuns, index: int, jobs: list[EpisodeJob], look: Look | None) -> list[Played]:
        assigned = assignments(self.config, self.plan.entries, look)
        first = self._masked(runs, f"s{index}-masked", jobs, [], dropped(look))
        arms = [read_arm(runs.run(first), jobs, assigned[0])]
        if self.config.rule.design == "bare":
            return [Played(jobs, [*arms, self._bare(runs, index, jobs, first)], assigned)]
        second = self._masked(runs, f"s{index}-complement", jobs, flipped(self.config, look), dropped(look))
        arms.append(read_arm(runs.run(second), jobs, assigned[1]))
        if self.config.bare_run_dir is None:
            return [Played(jobs, arms, assigned)]
        return self._with_bare(jobs, arms, assigned, first)

    def _masked(
        self, runs: SkillRuns, name: str, jobs: list[EpisodeJob], flip: list[str], without: list[str]
    ) -> Experiment:
        skills: JsonDict = {
            "kind": "masked",
            "path": str(self._bank_file.resolve()),
            "mask_seed": self.config.mask_seed,
            "inclusion": self.config.rule.inclusion,
            "flip": flip,
            "without": without,
        }
        return runs.experiment(f"{self.config.name}-{name}", {"tasks": self._tasks(), "skills": skills}, jobs)

    def _tasks(self, split: str | None = None) -> JsonDict:
        return {"split": split or self.config.split, "sample_size": None, "repeats": 1}

    def _bare(self, runs: SkillRuns, index: int, jobs: list[EpisodeJob], masked: Experiment) -> Arm:
        if self.config.bare_run_dir is not None:
            folder = Path(self.config.bare_run_dir)
            check_bare_manifest(folder, masked.semantic, jobs)
            return read_arm(folder, jobs, no_skills)
        bare = runs.experiment(
            f"{self.config.name}-s{index}-bare",
            {"tasks": self._tasks(), "skills": {"kind": "none", "path": None}},
            jobs,
        )
        return read_arm(runs.run(bare), jobs, no_skills)

    def _with_bare(
        self, jobs: list[EpisodeJob], arms: list[Arm], assigned: list[Assign], masked: Experiment
    ) -> list[Played]:
        """Blocks that the reused bare run also played get it as a third arm."""
        folder = Path(self.config.bare_run_dir or "")
        have = {tuple(j[:2]) for j in _manifest_jobs(folder)}
        both = [j for j in jobs if (j.task_id, j.sample_id) in have]
        check_bare_manifest(folder, masked.semantic, both)
        rest = [j for j in jobs if (j.task_id, j.sample_id) not in have]
        parts = []
        if both:
            parts.append(Played(both, [*arms, read_arm(folder, both, no_skills)], [*assigned, no_skills]))
        if rest:
            parts.append(Played(rest, arms, assigned))
        return parts

    def _confirm(self, runs: SkillRuns, selected: set[str]) -> JsonDict | None:
        """Bare against the selected bank on tasks that took no part in selection."""
        if self.config.confirm_split is None:
            return None
        if not selected:
            return {"skipped": "nothing was selected"}
        manifest = load_split_manifest(resolve_resource(self._run_config.tasks.manifest, self.base))
        split = manifest.split(self.config.confirm_split)
        seed = self._run_config.experiment.seed
        ids = sample_task_ids(split.task_ids, self.config.confirm_tasks, experiment_seed=seed)
        shared = set(ids) & set(self.plan.task_ids)
        if shared:
            raise UserError(f"confirm_split: {len(shared)} of its tasks took part in selection")
        jobs = [
            EpisodeJob(task_id=t, sample_id=0, seed=episode_seed(seed, t, 0), split=self.config.confirm_split)
            for t in ids
        ]
        bank = self.out / "confirm.snapshot.json"
        bank.unlink(missing_ok=True)
        chosen = selected_bank(self.plan.bank, selected, {}, None, self.config.name)
        save_bank(chosen, bank)
        arms = []
        for name, skills, entries in (
            ("bare", {"kind": "none", "path": None}, []),
            ("selected", {"kind": "bank", "path": str(bank.resolve())}, chosen.active()),
        ):
            experiment = runs.experiment(
                f"{self.config.name}-confirm-{name}",
                {"tasks": self._tasks(self.config.confirm_split), "skills": skills},
                jobs,
            )
            arms.append(read_arm(runs.run(experiment), jobs, partial(assigned_entries, entries)))
        keys = [(j.task_id, j.sample_id) for j in jobs]
        found = paired_difference(
            [arms[0].reward(k) for k in keys], [arms[1].reward(k) for k in keys], [t for t, _ in keys]
        )
        return {"split": self.config.confirm_split, **found.as_dict()}

    def _write(self, head: JsonDict, report: JsonDict) -> JsonDict:
        results = {row["skill_id"]: row for row in report["contributions"]}
        checkpoint = self._run_config.model.checkpoint_id
        chosen = selected_bank(self.plan.bank, set(report["selected"]), results, checkpoint, self.config.name)
        path = self.out / SELECTED
        path.unlink(missing_ok=True)
        digest = save_bank(chosen, path)
        write_json_atomic(self.out / CONTRIBUTIONS, report)
        self._append_ledger(head, report)
        final: JsonDict = {
            **head,
            "status": "complete",
            "checkpoint_id": checkpoint,
            "selected": report["selected"],
            "selected_bank_sha256": digest,
            "contributions_sha256": sha256_hex(canonical_json(report)),
            "rollouts": report["rollouts"],
            "measured_minimum_detectable_effect": report["minimum_detectable_effect"],
            "confirmation": report["confirmation"],
            "stability": report["stability"],
            "arms": report["arms"],
        }
        write_json_atomic(self.out / MANIFEST, final)
        return final

    def _append_ledger(self, head: JsonDict, report: JsonDict) -> None:
        """One line per candidate; a repeated gate does not count twice."""
        path = Path(self.config.ledger) if self.config.ledger else self.out / LEDGER
        path.parent.mkdir(parents=True, exist_ok=True)
        gate_id = sha256_hex(canonical_json([head, report["pairs"], self._run_config.model.checkpoint_id]))[:16]
        with FileLock(f"{path}.lock", timeout=30):
            known = set()
            if path.exists():
                known = {orjson.loads(line)["gate_id"] for line in path.read_bytes().splitlines() if line}
            if gate_id in known:
                return
            with path.open("ab") as file:
                for row in report["contributions"]:
                    line = {
                        "gate_id": gate_id,
                        "gate": self.config.name,
                        "checkpoint_id": self._run_config.model.checkpoint_id,
                        "bank_sha256": self.plan.bank.sha256,
                        "rollouts": report["rollouts"],
                        **{
                            k: row[k]
                            for k in (
                                "skill_id",
                                "version",
                                "content_sha256",
                                "effect",
                                "interval",
                                "status",
                                "dropped_after",
                            )
                        },
                    }
                    file.write(orjson.dumps(line) + b"\n")


def assigned_entries(entries: list[BankEntry], job: EpisodeJob) -> list[BankEntry]:
    """What a run under this whole bank must have injected."""
    return [e for e in entries if e.applies(job)]


def _manifest_jobs(folder: Path) -> list[list[Any]]:
    from rayrl.traces.manifest import read_manifest

    return list(((read_manifest(folder) or {}).get("semantic") or {}).get("jobs") or [])


def selected_bank(
    bank: SkillBank, selected: set[str], results: dict[str, JsonDict], checkpoint: str | None, gate: str
) -> SkillBank:
    """The snapshot with the selected skills only, in bank order, each with what the gate measured."""
    skills = [s for s in bank.skills if s.skill_id in selected]
    records: dict[str, SkillRecord] = {}
    for skill in skills:
        record, row = bank.record(skill.skill_id), results.get(skill.skill_id)
        if row is not None:
            measured = GateResult(
                gate=gate,
                effect=row["effect"],
                low=row["interval_adjusted"][0],
                high=row["interval_adjusted"][1],
                rank=row["rank"],
                status=row["status"],
                checkpoint_id=checkpoint,
            )
            record = record.model_copy(update={"gate": measured})
        records[skill.skill_id] = record
    return make_bank(skills, records, bank_version=f"{gate}-selected", parent=bank, metadata=bank.metadata)


def load_gate(file: str, overrides: list[str]) -> tuple[GateConfig, RunConfig, Path]:
    """Gate config, the rollout config it names, and the folder relative paths start from."""
    path = find_config(file)
    config = parse_config(load_raw(path, overrides), GateConfig, source=str(path))
    base = path.resolve().parent
    beside = base / config.run
    run, run_base = load_run_config(beside if beside.exists() else config.run, config.overrides)
    return config, run, run_base if not (base / config.bank).exists() else base


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("config", help="gate config")
    parser.add_argument("overrides", nargs="*", help="key=value on the gate config")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gate directory")
    parser.add_argument(
        "--plan", action="store_true", help="say what would be played and what it could see; play nothing"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    config, run_config, base = load_gate(args.config, args.overrides)
    if args.plan:
        plan = plan_gate(config, run_config, base).as_dict()
        if args.json:
            print_json(plan)
        else:
            console().print(facts_table("Gate plan", [(k.replace("_", " "), v) for k, v in plan.items()]))
        return 0
    gate = Gate(config, run_config, base, args.out, quiet=args.quiet or args.json)
    if not args.json:
        out = console()
        out.print(
            f"up to {gate.plan.as_dict()['rollouts_at_most']} rollouts; effects from {gate.plan.detectable:.3f} on can "
            "be seen with 80 % power",
            markup=False,
        )
    try:
        found = gate.run()
    except RayrlError as error:
        if isinstance(error, UserError):
            raise
        raise type(error)(f"{error}\nThe gate is incomplete and changed no bank; the same command goes on") from error
    if args.json:
        print_json(found)
        return 0
    print_gate(args.out, found)
    return 0


def _correlation(value: float | None) -> str:
    return "undefined (rewards are all equal)" if value is None else f"{value:.2f}"


def print_gate(out: Path, found: JsonDict) -> None:
    """A finished gate, for people."""
    from rich.table import Table

    report = orjson.loads((out / CONTRIBUTIONS).read_bytes())
    table = Table("skill", "effect", "interval", "adjusted p", "rank", "status", title="Effects", title_justify="left")
    for row in sorted(report["contributions"], key=lambda r: r["rank"]):
        low, high = row["interval"]
        p = "" if row["adjusted_p"] is None else f"{row['adjusted_p']:.2g}"
        status = row["status"] + (f", dropped after {row['dropped_after']} pairs" if row["dropped_after"] else "")
        table.add_row(
            row["skill_id"], f"{row['effect']:+.3f}", f"[{low:+.3f}, {high:+.3f}]", p, str(row["rank"]), status
        )
    view = console()
    view.print(table)
    confirmation = found["confirmation"] or {}
    facts: list[tuple[str, Any]] = [
        ("selected", ", ".join(found["selected"]) or "nothing"),
        ("rollouts", found["rollouts"]),
        ("smallest effect this gate sees", f"{found['measured_minimum_detectable_effect']:.3f}"),
        ("correlation of pairs", ", ".join(_correlation(a["correlation"]) for a in found["arms"])),
        ("Spearman of a refit", f"{found['stability']['refit_spearman'] or 0:.2f}"),
    ]
    if "difference" in confirmation:
        d = confirmation["difference"]
        facts.append(("confirmation, selected - bare", f"{d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]"))
    facts.append(("bank", out / SELECTED))
    view.print(facts_table("Gate", facts))


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("skills gate", add_arguments, run, None))
