"""What the routes share: services, settings, the supervisor, and idempotent creation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from sqlalchemy import RowMapping, insert, select, update

from rayrl.errors import RunConflictError
from rayrl.schemas import JsonDict, canonical_json, sha256_hex
from rayrl.studio.config import StudioConfig
from rayrl.workbench import tables
from rayrl.workbench.launcher import Supervisor
from rayrl.workbench.sessions import Sessions
from rayrl.workbench.store import now
from rayrl.workbench.workbench import Workbench

_K = tables.idempotency


@dataclass
class Context:
    """One per application."""

    bench: Workbench
    config: StudioConfig
    supervisor: Supervisor | None = None
    sessions: Sessions = field(default_factory=Sessions)
    gate: Any = None

    def wake(self) -> None:
        """Have the supervisor look for experiments to drive."""
        if self.supervisor is not None:
            self.supervisor.wake()

    def once(
        self, key: str | None, what: str, body: Any, make: Callable[[], JsonDict], *, wait_s: float = 0.0
    ) -> JsonDict:
        """``make()``, at most once per idempotency key: the same request again gets the first answer.

        ``wait_s``: how long it waits for a first request that has not ended.

        Raises:
            RunConflictError: the key came with another request, or its first request has not ended.
        """
        if key is None:
            return make()
        digest = sha256_hex(canonical_json([what, body]))
        until = time.monotonic() + wait_s
        while (row := self._claim(key, digest)) is not None and row["response"] is None and time.monotonic() < until:
            time.sleep(0.05)
        if row is not None:
            if row["request_sha256"] != digest:
                raise RunConflictError("this Idempotency-Key was used for another request")
            if row["response"] is None:
                raise RunConflictError("the first request with this Idempotency-Key has not ended")
            return dict(row["response"])
        try:
            response = make()
        except BaseException:
            with self.bench.store.write() as connection:
                connection.execute(_K.delete().where(_K.c.key == key))
            raise
        with self.bench.store.write() as connection:
            connection.execute(update(_K).where(_K.c.key == key).values(response=response))
        return response

    def _claim(self, key: str, digest: str) -> RowMapping | None:
        """Take a key; or the row of who has it."""
        with self.bench.store.write() as connection:
            row = connection.execute(select(_K).where(_K.c.key == key)).mappings().first()
            if row is None:
                values = {"key": key, "request_sha256": digest, "response": None, "created_at": now()}
                connection.execute(insert(_K).values(values))
            return row


def context_of(request: Request) -> Context:
    """The application's context."""
    found: Context = request.app.state.context
    return found


Ctx = Annotated[Context, Depends(context_of)]
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200)]
