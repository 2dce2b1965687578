"""Claims: which process works on which case, with a lease and a fencing token per attempt.

Invariants:

* a case has at most one live token; every claim takes the next one, so a token never comes back;
* a result is taken only with the live token. A late one is kept in the attempts as ``fenced`` and changes nothing else;
* an attempt whose lease ran out, or whose owner is gone from this machine, is noted as ``lost`` before the case is
  given out again: nothing runs twice unnoticed.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import orjson
import psutil

from rayrl.schemas import JsonDict
from rayrl.workbench.evidence import Outcome
from rayrl.workbench.store import Store, now

LEASE_S = 30.0
_FINISH_RESULT = """
UPDATE evaluation_results SET state=?, failure=?, owner=NULL, lease_until=NULL, prediction=?, reason=?, confidence=?,
    evidence=?, agrees=CASE WHEN gold IS NULL THEN NULL WHEN ? IS NULL THEN NULL ELSE gold=? END, detail=?,
    session_id=?, model_calls=?, prompt_tokens=?, completion_tokens=?, duration_s=?, updated_at=?
WHERE experiment_id=? AND ordinal=? AND repeat=? AND token=? AND state='running'
"""
_FINISH_RUN = """
UPDATE evaluation_case_runs SET state=?, failure=?, prediction=?, code=?, message=?, model_calls=?, trace=?,
    trace_sha256=?, ended_at=?
WHERE experiment_id=? AND ordinal=? AND repeat=? AND token=?
"""


def owner_name() -> str:
    """Host, process and its start time: a reused process number is another owner."""
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def owner_alive(owner: str) -> bool | None:
    """Whether an owner lives; ``None`` for one on another machine, of which only its lease speaks."""
    host, _, rest = owner.partition(":")
    pid, _, born = rest.partition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return None
    try:
        process = psutil.Process(int(pid))
        return bool(
            abs(process.create_time() - float(born.partition("/")[0])) < 0.02
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.NoSuchProcess, ValueError):
        return False


@dataclass(frozen=True)
class Claim:
    """One attempt this process may make."""

    ordinal: int
    repeat: int
    token: int
    attempt: int


class Claims:
    """Claims of one owner on one experiment. Plain SQL: this is the busiest road of the store."""

    def __init__(self, store: Store, experiment_id: str, owner: str, *, lease_s: float = LEASE_S) -> None:
        self.store = store
        self.experiment_id = experiment_id
        self.owner = owner
        self.lease_s = lease_s

    def take(self, n: int) -> list[Claim]:
        """At most ``n`` pending cases, in order."""
        if n <= 0:
            return []
        at, stamp = time.time(), now()
        with self.store.write() as connection:
            rows = connection.exec_driver_sql(
                "UPDATE evaluation_results SET state='running', token=token+1, attempts=attempts+1, owner=?,"
                " lease_until=?, updated_at=? WHERE (experiment_id, ordinal, repeat) IN (SELECT experiment_id, ordinal,"
                " repeat FROM evaluation_results WHERE experiment_id=? AND state='pending' ORDER BY ordinal, repeat"
                " LIMIT ?) RETURNING ordinal, repeat, token, attempts",
                (self.owner, at + self.lease_s, stamp, self.experiment_id, n),
            ).all()
            self._begin(connection, [tuple(row) for row in rows], stamp)
        return sorted((Claim(*row) for row in rows), key=lambda c: (c.ordinal, c.repeat))

    def again(self, claim: Claim) -> Claim | None:
        """The next attempt at a claimed case whose last one failed here; ``None`` when the case is no longer ours."""
        stamp = now()
        with self.store.write() as connection:
            row = connection.exec_driver_sql(
                "UPDATE evaluation_results SET state='running', failure=NULL, token=token+1, attempts=attempts+1,"
                " owner=?, lease_until=?, updated_at=? WHERE experiment_id=? AND ordinal=? AND repeat=? AND token=?"
                " RETURNING ordinal, repeat, token, attempts",
                (
                    self.owner,
                    time.time() + self.lease_s,
                    stamp,
                    self.experiment_id,
                    claim.ordinal,
                    claim.repeat,
                    claim.token,
                ),
            ).first()
            if row is None:
                return None
            self._begin(connection, [tuple(row)], stamp)
        return Claim(*row)

    def _begin(self, connection: Any, rows: list[tuple[Any, ...]], stamp: str) -> None:
        if rows:
            connection.exec_driver_sql(
                "INSERT INTO evaluation_case_runs (experiment_id, ordinal, repeat, token, attempt, owner, state,"
                " started_at) VALUES (?, ?, ?, ?, ?, ?, 'running', ?)",
                [(self.experiment_id, *row, self.owner, stamp) for row in rows],
            )

    def renew(self) -> int:
        """Extend every lease of this owner; returns how many it holds."""
        with self.store.write() as connection:
            return connection.exec_driver_sql(
                "UPDATE evaluation_results SET lease_until=? WHERE experiment_id=? AND state='running' AND owner=?",
                (time.time() + self.lease_s, self.experiment_id, self.owner),
            ).rowcount

    def give_back(self) -> int:
        """Put what this owner still holds back among the pending: it was never started, or was cancelled."""
        return self._lose("owner=?", (self.owner,), "given back")

    def give_back_one(self, claim: Claim) -> None:
        """Put one claimed case back: it was not started."""
        self._lose("owner=? AND ordinal=? AND repeat=?", (self.owner, claim.ordinal, claim.repeat), "given back")

    def reopen(self, claims: list[Claim]) -> None:
        """Cases whose attempt was cancelled though the experiment was not: pending again."""
        with self.store.write() as connection:
            connection.exec_driver_sql(
                "UPDATE evaluation_results SET state='pending', failure=NULL, updated_at=? WHERE experiment_id=? AND"
                " ordinal=? AND repeat=? AND token=? AND state='cancelled'",
                [(now(), self.experiment_id, c.ordinal, c.repeat, c.token) for c in claims],
            )

    def recover(self) -> int:
        """Take back cases whose attempt is lost; returns how many."""
        with self.store.read() as connection:
            owners = (
                connection.exec_driver_sql(
                    "SELECT DISTINCT owner FROM evaluation_results WHERE experiment_id=? AND state='running'",
                    (self.experiment_id,),
                )
                .scalars()
                .all()
            )
        lost = 0
        for owner in owners:
            if owner != self.owner and owner_alive(owner) is False:
                lost += self._lose("owner=?", (owner,), "its process is gone")
        return lost + self._lose("lease_until<? AND owner<>?", (time.time(), self.owner), "its lease ran out")

    def _lose(self, condition: str, values: tuple[Any, ...], why: str) -> int:
        stamp = now()
        with self.store.write() as connection:
            rows = connection.exec_driver_sql(
                "UPDATE evaluation_results SET state='pending', owner=NULL, lease_until=NULL, updated_at=?"
                f" WHERE experiment_id=? AND state='running' AND {condition} RETURNING ordinal, repeat, token",
                (stamp, self.experiment_id, *values),
            ).all()
            if rows:
                connection.exec_driver_sql(
                    "UPDATE evaluation_case_runs SET state='lost', ended_at=?, message=? WHERE experiment_id=? AND"
                    " ordinal=? AND repeat=? AND token=? AND state='running'",
                    [(stamp, why, self.experiment_id, *row) for row in rows],
                )
                data = {"cases": len(rows), "why": why}
                self.store.note(connection, self.experiment_id, "attempts_lost", data)
        return len(rows)

    def finish(self, items: list[tuple[Claim, Outcome, str | None, str | None]]) -> list[bool]:
        """Record the ends of attempts (with trace and its digest) in one transaction.

        ``False`` stands for an attempt whose token is no longer live: its result is fenced off.
        """
        stamp = now()
        taken: list[bool] = []
        with self.store.write() as connection:
            for claim, outcome, trace, digest in items:
                key = (self.experiment_id, claim.ordinal, claim.repeat, claim.token)
                row = connection.exec_driver_sql(
                    _FINISH_RESULT,
                    (*_columns(outcome, claim, self.experiment_id), stamp, *key),
                )
                live = row.rowcount == 1
                taken.append(live)
                error = outcome.detail.get("error") or {}
                connection.exec_driver_sql(
                    _FINISH_RUN,
                    (
                        outcome.state if live else "fenced",
                        outcome.failure,
                        outcome.prediction,
                        error.get("code"),
                        (error.get("message") or "")[:2000] or None,
                        outcome.model_calls,
                        trace,
                        digest,
                        stamp,
                        *key,
                    ),
                )
                if not live:
                    self.store.note(
                        connection, self.experiment_id, "fenced", {"ordinal": claim.ordinal, "token": claim.token}
                    )
        return taken


def _columns(outcome: Outcome, claim: Claim, experiment_id: str) -> tuple[Any, ...]:
    detail: JsonDict = outcome.detail
    session = f"eval/{experiment_id}/{claim.ordinal}-{claim.repeat}-{claim.attempt}"
    return (
        outcome.state,
        outcome.failure,
        outcome.prediction,
        outcome.reason,
        outcome.confidence,
        outcome.evidence,
        outcome.prediction,
        outcome.prediction,
        orjson.dumps(detail).decode(),
        session,
        outcome.model_calls,
        outcome.prompt_tokens,
        outcome.completion_tokens,
        outcome.duration_s,
    )
