"""Canary cases: checks of the harness itself, run before an experiment's first case.

A canary has an answer nobody doubts. If one breaks - the verdict is another, a file that must be read was not, or the
verdict comes just as well without the Skill - then the Skill, the model or the wiring is not what it is taken for, and
the experiment is marked ``invalid`` instead of being scored. An endpoint that fails is no broken canary: it pauses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field, model_validator

from rayrl.errors import DataError
from rayrl.schemas import EpisodeJob, Frozen, JsonDict, episode_seed
from rayrl.settings import ExecutionConfig
from rayrl.skills.snapshot import Taken, from_files, write_snapshot
from rayrl.workbench.evidence import Outcome, normalise
from rayrl.workbench.store import write_atomic
from rayrl.worker import WorkerSpec

BLANK = b"---\nname: blank\ndescription: An empty Skill.\n---\n"


class Canary(Frozen):
    """One check."""

    query: str = Field(min_length=1, max_length=10_000)
    history: list[Any] = Field([], max_length=100)
    context: JsonDict = {}
    expect: str | None = Field(None, max_length=100)
    """The class that must be said."""
    must_read: str | None = Field(None, max_length=500)
    """A file of the Skill that must be read."""
    fails_without_skill: bool = False
    """Run it with an empty Skill too; the expected class must not come out there."""

    @model_validator(mode="after")
    def _checks_something(self) -> Canary:
        if self.expect is None and self.must_read is None:
            raise ValueError("a canary needs expect or must_read")
        if self.fails_without_skill and self.expect is None:
            raise ValueError("fails_without_skill needs expect")
        return self


def judge(canary: Canary, outcome: Outcome, blank: Outcome | None = None) -> list[str]:
    """What is wrong, in words; empty for a canary that holds. ``blank`` is the outcome without the Skill."""
    name = f"canary {canary.query[:60]!r}"
    out = []
    if canary.expect is not None and outcome.prediction != canary.expect:
        out.append(f"{name}: expected {canary.expect}, got {outcome.prediction or outcome.failure}")
    read = {item["path"] for item in outcome.detail.get("reads", [])} | {"SKILL.md"}
    if canary.must_read is not None and canary.must_read not in read:
        out.append(f"{name}: {canary.must_read} was not read")
    if blank is not None and blank.prediction == canary.expect:
        out.append(f"{name}: {canary.expect} comes out without the Skill too")
    return out


def check(
    canaries: list[Canary],
    *,
    make_pool: Callable[[WorkerSpec, ExecutionConfig, Callable[[JsonDict], None]], Any],
    spec: WorkerSpec,
    blank_spec: Callable[[Taken], WorkerSpec],
    execution: ExecutionConfig,
    skill: Taken,
    seed: int,
    folder: Path,
    on_tick: Callable[[Any], None] = lambda pool: None,
) -> tuple[list[str], list[JsonDict]]:
    """Run all canaries; what is wrong, and what each of them said.

    Args:
        spec: the experiment's own worker.
        blank_spec: the same with another Skill in its prompt.
        folder: where their inputs and the empty Skill are written.
        on_tick: called with the pool while it works; may cancel it.

    Raises:
        DataError: one could not run at all.
    """
    lines = [orjson.dumps({"case_id": f"canary-{n}", **_input(c)}) for n, c in enumerate(canaries)]
    data = b"\n".join(lines) + b"\n"
    path = folder / "canaries.jsonl"
    write_atomic(path, data)
    cases = {"cases": str(path), "cases_sha256": hashlib.sha256(data).hexdigest()}
    said = _run(list(range(len(canaries))), _with(spec, cases), make_pool, execution, skill, seed, on_tick)
    without: dict[int, Outcome] = {}
    if again := [n for n, c in enumerate(canaries) if c.fails_without_skill]:
        empty = from_files({"SKILL.md": BLANK}, "blank")
        place = {"snapshot": str(write_snapshot(empty, folder)), "skill_sha256": empty.manifest.content_sha256}
        without = _run(again, _with(blank_spec(empty), {**cases, **place}), make_pool, execution, empty, seed, on_tick)
    problems, verdicts = [], []
    for n, canary in enumerate(canaries):
        problems += judge(canary, said[n], without.get(n))
        verdict = {"query": canary.query[:200], "prediction": said[n].prediction, "evidence": said[n].evidence}
        verdicts.append(verdict | ({"without_skill": without[n].prediction} if n in without else {}))
    return problems, verdicts


def _input(canary: Canary) -> JsonDict:
    return {"query": canary.query, "history": canary.history, "context": canary.context}


def _with(spec: WorkerSpec, options: JsonDict) -> WorkerSpec:
    environment: Any = spec.environment
    merged = {**environment.options, **options}
    return replace(spec, environment=environment.model_copy(update={"options": merged}))


def _run(
    numbers: list[int],
    spec: WorkerSpec,
    make_pool: Any,
    execution: ExecutionConfig,
    skill: Taken,
    seed: int,
    on_tick: Callable[[Any], None],
) -> dict[int, Outcome]:
    jobs = [EpisodeJob(task_id=n, sample_id=0, seed=episode_seed(seed, n, 0), split="canary") for n in numbers]
    out: dict[int, Outcome] = {}
    pool = make_pool(spec, execution, lambda event: None)
    pool.on_tick = lambda: on_tick(pool)
    with pool:
        pool.submit(jobs)
        for finished, disposition in pool.results():
            if disposition.value != "retry":
                record = orjson.loads(finished.record)
                out[int(record["job"]["task_id"])] = normalise(record, skill)
    for n in numbers:
        if n not in out or out[n].failure == "infrastructure":
            error = out[n].detail.get("error", {}) if n in out else {}
            raise DataError(f"canary {n + 1} could not run: {error.get('message') or 'it gave no result'}")
    return out
