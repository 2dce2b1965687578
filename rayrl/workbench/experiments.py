"""Experiments: data set version x mapping version x Skill snapshot x model version x parameters, and their cases.

State machine: ``created`` -> ``running`` <-> ``paused`` -> ``completed``; ``cancelled`` from all but completed, and
``invalid`` when a harness check failed. A finished experiment runs again only for cases that were chosen for a retry.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field
from sqlalchemy import Connection, func, insert, select, update

from rayrl.config import parse_config
from rayrl.errors import DataError, RunConflictError
from rayrl.models.config import ModelConfig
from rayrl.models.registry import model_identity
from rayrl.prompts import PromptTemplate
from rayrl.schemas import Frozen, JsonDict, canonical_json, sha256_hex
from rayrl.workbench import tables
from rayrl.workbench.canaries import Canary
from rayrl.workbench.datasets import get_dataset
from rayrl.workbench.models import ModelProfiles
from rayrl.workbench.snapshots import get_snapshot
from rayrl.workbench.store import MissingError, Store, new_id, now

_E, _R, _C = tables.experiments, tables.results, tables.cases
STATES = ("created", "running", "paused", "completed", "cancelled", "invalid")
ENDED = STATES[3:]
CASE_STATES = ("pending", "running", "completed", "failed", "cancelled")
MAX_CONCURRENCY = 256
MOVES = {
    "start": ({"created"}, "running"),
    "pause": ({"running"}, "paused"),
    "resume": ({"paused"}, "running"),
    "cancel": ({"created", "running", "paused"}, "cancelled"),
}


NOT_IDENTITY = ("mode", "low_confidence", "canaries")
"""Parameters no result depends on."""


class Params(Frozen):
    """Parameters of an experiment."""

    repeats: int = Field(1, ge=1, le=20)
    """Independent runs of every case; more than one shows how steady the verdicts are."""
    max_actions: int = Field(12, ge=2, le=100)
    """Completions per case, protocol errors included."""
    deadline_s: float = Field(600.0, gt=0, le=7200)
    """Wall-clock limit of one attempt."""
    max_attempts: int = Field(3, ge=1, le=10)
    """Attempts per case before an infrastructure failure stands."""
    seed: int = Field(0, ge=0, le=2**31)
    """Seeds of all cases follow from it."""
    tools: list[str] = Field(["list_files", "read_file"], max_length=20)
    """Tools beside ``submit``."""
    low_confidence: float = Field(0.6, ge=0, le=1)
    """Verdicts below it are listed among the disagreements."""
    mode: Literal["inprocess", "ray"] = "inprocess"
    """Where the batch pool's workers live."""
    canaries: list[Canary] = Field([], max_length=50)
    """Checks before the first case; where one breaks, the experiment is invalid."""


def prompt_template() -> PromptTemplate:
    """The shipped prompt of Skill cases."""
    path = Path(__file__).parent / "prompt.yaml"
    return PromptTemplate.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


class Experiments:
    """See the module docstring."""

    def __init__(self, store: Store, models: ModelProfiles) -> None:
        self.store = store
        self.models = models

    def create(
        self,
        *,
        name: str,
        dataset_id: str,
        snapshot_id: str,
        model: str,
        model_version: int | None = None,
        params: Params | None = None,
        concurrency: int = 8,
        cloned_from: str | None = None,
    ) -> JsonDict:
        """Freeze an experiment and lay out its cases as pending.

        Raises:
            DataError: a part is not there, or the concurrency is out of bounds.
        """
        _check_concurrency(concurrency)
        profile = self.models.get(model, model_version)
        params = params or Params()
        with self.store.write() as connection:
            dataset = get_dataset(connection, dataset_id)
            snapshot = get_snapshot(connection, snapshot_id)
            for canary in params.canaries:
                if canary.expect is not None and canary.expect not in dataset["classes"]:
                    raise DataError(f"canary {canary.query[:60]!r} expects {canary.expect!r}, which is no class")
            row = {
                "id": new_id("ex"),
                "name": name,
                "dataset_id": dataset_id,
                "snapshot_id": snapshot_id,
                "model_name": profile["name"],
                "model_version": profile["version"],
                "model": profile["body"],
                "params": params.model_dump(),
                "fingerprint": fingerprint(dataset, snapshot, profile["body"], params),
                "state": "created",
                "reason": "",
                "concurrency": concurrency,
                "n_cases": dataset["n_cases"],
                "cloned_from": cloned_from,
                "created_at": now(),
            }
            connection.execute(insert(_E).values(row))
            connection.exec_driver_sql(
                "WITH RECURSIVE r(n) AS (SELECT 0 UNION ALL SELECT n+1 FROM r WHERE n+1<?)"
                " INSERT INTO evaluation_results (experiment_id, ordinal, repeat, case_id, domain, gold, state, token,"
                " attempts) SELECT ?, ordinal, r.n, case_id, domain, gold, 'pending', 0, 0 FROM evaluation_cases, r"
                " WHERE dataset_id=? ORDER BY ordinal, r.n",
                (params.repeats, row["id"], dataset_id),
            )
            self.store.note(connection, row["id"], "created", {"cases": dataset["n_cases"]})
        return self.get(row["id"])

    def clone(self, experiment_id: str, changes: JsonDict) -> JsonDict:
        """A new experiment like another, with some parts exchanged (``snapshot_id``, ``model``, ``params``, ...)."""
        base = self.get(experiment_id)
        facts: dict[str, Any] = {
            "name": f"{base['name']} (copy)",
            "dataset_id": base["dataset_id"],
            "snapshot_id": base["snapshot_id"],
            "model": base["model_name"],
            "model_version": None if "model" in changes else base["model_version"],
            "concurrency": base["concurrency"],
        }
        params = changed_params(base["params"], changes.get("params") or {})
        facts |= {key: value for key, value in changes.items() if key != "params" and value is not None}
        return self.create(**facts, params=params, cloned_from=experiment_id)

    def get(self, experiment_id: str) -> JsonDict:
        """One experiment with the counts of its cases.

        Raises:
            DataError: there is none of this id.
        """
        with self.store.read() as connection:
            row = get_experiment(connection, experiment_id)
            row["counts"] = counts(connection, experiment_id)
        return row

    def page(
        self, *, limit: int = 50, before: str | None = None, search: str = "", state: str | None = None
    ) -> list[JsonDict]:
        """Experiments, newest first; ``before`` is the last id of the page before."""
        query = select(_E).order_by(_E.c.created_at.desc(), _E.c.id.desc()).limit(limit)
        if search:
            escaped = search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
            query = query.where(_E.c.name.like(f"%{escaped}%", escape="\\"))
        if state:
            query = query.where(_E.c.state == state)
        with self.store.read() as connection:
            if before:
                last = get_experiment(connection, before)
                older = (_E.c.created_at < last["created_at"]) | (
                    (_E.c.created_at == last["created_at"]) & (_E.c.id < last["id"])
                )
                query = query.where(older)
            rows = [dict(r) for r in connection.execute(query).mappings()]
            for row in rows:
                row["counts"] = counts(connection, row["id"])
        return rows

    def move(self, experiment_id: str, action: str) -> JsonDict:
        """``start``, ``pause``, ``resume`` or ``cancel``. Asking for the state it is in already changes nothing.

        Raises:
            RunConflictError: not possible from its state.
        """
        allowed, target = MOVES[action]
        with self.store.write() as connection:
            row = get_experiment(connection, experiment_id)
            if row["state"] == target:
                pass
            elif row["state"] not in allowed:
                raise RunConflictError(
                    f"experiment {experiment_id} is {row['state']}; {action} is possible from {sorted(allowed)}"
                )
            else:
                values: dict[str, Any] = {"state": target, "reason": ""}
                if action == "start":
                    values["started_at"] = now()
                if action == "cancel":
                    values["ended_at"] = now()
                    pending = (_R.c.experiment_id == experiment_id) & (_R.c.state == "pending")
                    connection.execute(update(_R).where(pending).values(state="cancelled", updated_at=now()))
                connection.execute(update(_E).where(_E.c.id == experiment_id).values(values))
                self.store.note(connection, experiment_id, target, {})
        return self.get(experiment_id)

    def set_concurrency(self, experiment_id: str, concurrency: int) -> JsonDict:
        """Change how many cases run at once, also while running; noted in the events.

        Raises:
            DataError: not 1 to 256, or no such experiment.
            RunConflictError: it has ended.
        """
        _check_concurrency(concurrency)
        with self.store.write() as connection:
            row = get_experiment(connection, experiment_id)
            if row["state"] in ENDED:
                raise RunConflictError(f"the experiment is {row['state']}; its concurrency can no longer be changed")
            connection.execute(update(_E).where(_E.c.id == experiment_id).values(concurrency=concurrency))
            self.store.note(connection, experiment_id, "concurrency", {"from": row["concurrency"], "to": concurrency})
        return self.get(experiment_id)

    def retry(self, experiment_id: str, which: str, cases: list[str] | None = None) -> int:
        """Put ``failed``, ``disagreements``, ``cancelled`` or chosen ``cases`` back to pending; returns how many.

        Earlier attempts stay in the history of the case.

        Raises:
            DataError: unknown choice or case.
        """
        chosen = {
            "failed": _R.c.state == "failed",
            "disagreements": (_R.c.state == "completed") & (_R.c.agrees == 0),
            "cancelled": _R.c.state == "cancelled",
            "cases": _R.c.case_id.in_(cases or []) & _R.c.state.in_(["completed", "failed", "cancelled"]),
        }.get(which)
        if chosen is None:
            raise DataError(f"retry {which!r} is not known; use failed, disagreements, cancelled or cases")
        if which == "cases" and len(cases or []) > 10_000:
            raise DataError("at most 10000 cases can be named; use failed or disagreements")
        with self.store.write() as connection:
            row = get_experiment(connection, experiment_id)
            if which == "cases":
                known = connection.execute(
                    select(_C.c.case_id).where(_C.c.dataset_id == row["dataset_id"], _C.c.case_id.in_(cases or []))
                ).scalars()
                missing = sorted(set(cases or []) - set(known))
                if missing:
                    raise DataError(f"experiment {experiment_id} has no case {missing[0]!r}")
            blank = {"state": "pending", "failure": None, "prediction": None, "reason": None, "confidence": None}
            blank |= {"evidence": None, "agrees": None, "detail": None, "updated_at": now()}
            where = (_R.c.experiment_id == experiment_id) & chosen
            n = connection.execute(update(_R).where(where).values(blank)).rowcount
            if n:
                values = {"state": "running", "reason": "", "ended_at": None}
                if row["state"] != "created":
                    connection.execute(update(_E).where(_E.c.id == experiment_id).values(values))
                self.store.note(connection, experiment_id, "retry", {"which": which, "cases": n})
        return n


def _check_concurrency(concurrency: int) -> None:
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise DataError(f"concurrency must be 1 to {MAX_CONCURRENCY}, not {concurrency}")


def changed_params(base: JsonDict, changes: JsonDict) -> Params:
    """Parameters with some of them exchanged.

    Raises:
        ConfigError: an unknown one, or a value that is not allowed; names the key.
    """
    return parse_config({**base, **changes}, Params, source="params")


def fingerprint(dataset: JsonDict, snapshot: JsonDict, model: JsonDict, params: Params) -> str:
    """Hash of all that determines results; two experiments with the same one differ only by chance and place."""
    facts = {
        "dataset": dataset["content_sha256"],
        "mapping": [dataset["profile_name"], dataset["profile_version"]],
        "skill": snapshot["content_sha256"],
        "model": model_identity(ModelConfig.model_validate(model)),
        "params": {key: value for key, value in params.model_dump().items() if key not in NOT_IDENTITY},
        "prompt": prompt_template().sha256(),
    }
    return sha256_hex(canonical_json(facts))


def get_experiment(connection: Connection, experiment_id: str) -> JsonDict:
    """One experiment of an open connection.

    Raises:
        DataError: there is none of this id.
    """
    row = connection.execute(select(_E).where(_E.c.id == experiment_id)).mappings().first()
    if row is None:
        raise MissingError(f"there is no experiment {experiment_id!r}")
    return dict(row)


def counts(connection: Connection, experiment_id: str) -> dict[str, int]:
    """Cases (times repeats) by state."""
    query = select(_R.c.state, func.count()).where(_R.c.experiment_id == experiment_id).group_by(_R.c.state)
    found = {state: int(n) for state, n in connection.execute(query).all()}
    return {state: found.get(state, 0) for state in CASE_STATES}
