"""Reading the runs of a gate, and refusing those that are not what the gate thinks they are.

A gate compares runs that differ in their skills and in nothing else. So before a number is computed: the manifests must
agree (each mismatch is named), every job must have exactly one completed episode, the skills really injected must be
the assigned ones by id, version and text, and every reward component must be a finite number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayrl.errors import DataError, UserError
from rayrl.evaluation.rows import episode_row, number
from rayrl.schemas import EpisodeJob, JsonDict
from rayrl.skills.providers import BankEntry
from rayrl.traces.manifest import difference, read_manifest
from rayrl.traces.store import RunReader

COSTS = ("total_actions", "prompt_tokens", "completion_tokens", "protocol_errors", "invalid_actions")
BYTES_PER_TOKEN = 4
"""Rough size of a token, for counting what is injected without a tokenizer."""
Assign = Callable[[EpisodeJob], list[BankEntry]]


@dataclass(frozen=True)
class Arm:
    """Outcomes of one run by (task, sample): ``metrics[key][name]``; ``reward`` is always there."""

    run_dir: Path
    metrics: dict[tuple[int, int], dict[str, float]]

    def reward(self, key: tuple[int, int]) -> float:
        """Reward of one episode."""
        return self.metrics[key]["reward"]


def check_bare_manifest(run_dir: Path, planned: JsonDict, jobs: Sequence[EpisodeJob]) -> None:
    """Refuse a bare run that is not this checkpoint on these jobs without skills, everything else equal.

    Args:
        run_dir: a finished run. planned: ``semantic`` of the masked run. jobs: what the gate needs of it.

    Raises:
        UserError: each mismatch with both values.
    """
    manifest = read_manifest(run_dir)
    if manifest is None:
        raise UserError(f"bare_run_dir {run_dir}: there is no manifest, so nobody knows what was run there")
    found = manifest.get("semantic") or {}
    problems = []
    if (found.get("skills") or {}).get("kind") != "none":
        problems.append(
            f"skills: the run has skills ({(found.get('skills') or {}).get('kind')!r}); a bare run has none"
        )
    for key, theirs, ours in difference(found, planned):
        section = key.split(".")[0]
        if section not in ("jobs", "skills"):
            problems.append(f"{key}: {theirs!r} there, {ours!r} here")
    have = {(j[0], j[1]): (j[2], j[3]) for j in found.get("jobs") or []}
    missing = [j for j in jobs if (j.task_id, j.sample_id) not in have]
    if missing:
        problems.append(f"jobs: {len(missing)} of {len(jobs)} are not in it, the first is {missing[0].episode_id}")
    other = [j for j in jobs if have.get((j.task_id, j.sample_id), (j.seed, j.split)) != (j.seed, j.split)]
    if other:
        problems.append(f"jobs: {len(other)} have another seed or split, the first is {other[0].episode_id}")
    if problems:
        raise UserError(
            f"bare_run_dir {run_dir} does not fit this gate:\n"
            + "\n".join(f"  {p}" for p in problems)
            + "\nLeave bare_run_dir out, or run the bare evaluation with these settings"
        )


def read_arm(run_dir: Path, jobs: Sequence[EpisodeJob], assigned: Assign | None) -> Arm:
    """Outcomes of ``jobs`` in a run, after all checks of the module docstring. The run may hold more jobs.

    ``assigned=None`` is for selectors, which choose for themselves: what they injected is then only counted.

    Raises:
        DataError: coverage, duplicates, injected skills or rewards are not as they must be; names the episode.
    """
    wanted = {job.episode_id: job for job in jobs}
    counts: dict[str, int] = dict.fromkeys(wanted, 0)
    metrics: dict[tuple[int, int], dict[str, float]] = {}
    for record in RunReader(run_dir).iter_records():
        job = wanted.get(record["episode_id"])
        row = episode_row(record)
        if job is None or not row["complete"]:
            continue
        counts[job.episode_id] += 1
        if counts[job.episode_id] > 1:
            raise DataError(
                f"{run_dir}: episode {job.episode_id} has more than one completed record; which one counts?"
            )
        theirs = record.get("job") or {}
        if (theirs.get("seed"), theirs.get("split")) != (job.seed, job.split):
            raise DataError(f"{run_dir}: episode {job.episode_id} was played with another seed or split")
        if assigned is not None:
            _check_injected(run_dir, record, assigned(job))
        metrics[job.task_id, job.sample_id] = _metrics(run_dir, record, row)
    missing = [name for name, count in counts.items() if count == 0]
    if missing:
        raise DataError(
            f"{run_dir}: {len(missing)} of {len(jobs)} episodes have no completed record, the first is {missing[0]}; "
            "finish the run, then the gate"
        )
    return Arm(run_dir, metrics)


def _check_injected(run_dir: Path, record: JsonDict, expected: list[BankEntry]) -> None:
    want = [(e.skill_id, e.version, e.skill().content_sha256) for e in expected]
    have = [(s.get("skill_id"), s.get("version"), s.get("content_sha256")) for s in record.get("selected_skills") or []]
    if have != want:
        raise DataError(
            f"{run_dir}: episode {record['episode_id']} got the skills {[h[0] for h in have]} (or other texts), "
            f"but was assigned {[w[0] for w in want]}"
        )


def _metrics(run_dir: Path, record: JsonDict, row: JsonDict) -> dict[str, float]:
    final = record.get("final") or {}
    detail = final.get("reward_detail") or {}
    found: dict[str, float] = {}
    for name, value in {"reward": final.get("reward"), **detail}.items():
        if name != "reward" and not (name.startswith("r_") and isinstance(value, int | float)):
            continue
        checked = number(value)
        if checked is None:
            raise DataError(f"{run_dir}: episode {record['episode_id']}: {name} is {value!r}, not a finite number")
        found[name] = checked
    injected = record.get("selected_skills") or []
    found["injected_skills"] = float(len(injected))
    found["injected_tokens"] = sum(len(str(s.get("content")).encode()) for s in injected) / BYTES_PER_TOKEN
    for name in COSTS:
        value = number(row.get(name))
        if value is not None:
            found[name] = value
    return found


def shared_metrics(arms: Sequence[Arm]) -> list[str]:
    """Metrics that every episode of every arm has; reward first."""
    common: set[str] | None = None
    for arm in arms:
        for values in arm.metrics.values():
            common = set(values) if common is None else common & set(values)
    return ["reward", *sorted(m for m in (common or set()) - {"reward"} if not m.startswith("injected_"))]


def pair_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson correlation of paired rewards; ``None`` when one side is constant."""
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if x.size < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def correlation_interval(correlation: float | None, pairs: int) -> list[float] | None:
    """95 % interval by Fisher's z, which takes the pairs as independent; ``None`` below four pairs."""
    if correlation is None or pairs < 4:
        return None
    z = np.arctanh(np.clip(correlation, -1 + 1e-12, 1 - 1e-12))
    half = 1.959964 / np.sqrt(pairs - 3)
    return [float(np.tanh(z - half)), float(np.tanh(z + half))]
