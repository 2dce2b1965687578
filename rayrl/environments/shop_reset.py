"""Getting a lease: which server, how long to wait, what to do when nobody answers.

Invariants: a slot is never taken twice (after an unanswered reset the same server is asked again with the same
``request_id``, or, where it keeps none, the attempt ends); waiting for a slot is bounded by ``reset_timeout_s``,
waiting for a server by ``unreachable_timeout_s``, unanswered requests by ``max_attempts``.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from rayrl.environments.shop_client import Answer, NoAnswerError, Server
from rayrl.environments.shop_factory import FactoryCore, HeldLease
from rayrl.errors import EnvironmentFaultError
from rayrl.schemas import JsonDict


def fault(answer: Answer, stage: str) -> EnvironmentFaultError:
    """An answer with an error status, as an error."""
    code = answer.code or f"http_{answer.status}"
    return EnvironmentFaultError(answer.error, code=code, stage=stage, detail={"status": answer.status})


async def take_lease(factory: FactoryCore, task_id: int) -> tuple[HeldLease, Answer]:
    """Reset on the least busy server; waits for a slot, and for a server that is restarting.

    Raises:
        EnvironmentFaultError: ``no_free_slot``, ``unreachable``, or what the server says.
    """
    return await _LeaseHunt(factory, task_id).run()


class _LeaseHunt:
    def __init__(self, factory: FactoryCore, task_id: int) -> None:
        config = factory.config
        self._factory = factory
        self._config = config
        self._client = factory.client
        self._request_id = secrets.token_hex(8)
        self._request: JsonDict = {
            "action": "reset",
            "idx": task_id,
            "if_persona": config.persona,
            "interaction_mode": config.interaction_mode,
            "include_private_goal": False,
        }
        self._until = time.monotonic() + config.reset_timeout_s
        self._unreachable_until: float | None = None
        self._unanswered = 0
        self._tries = 0
        self._stuck: Server | None = None
        """The server that may hold our slot under this request id."""

    async def run(self) -> tuple[HeldLease, Answer]:
        while time.monotonic() < self._until:
            self._tries += 1
            wait = self._client.backoff(self._tries, {"request_id": self._request_id})
            server = self._stuck or await self._client.choose()
            try:
                if server is None:
                    raise NoAnswerError("unreachable", "no shop server can be reached", sent=False)
                answer = await self._ask(server)
            except NoAnswerError as error:
                self._no_answer(server, error)
            else:
                if answer.status == 200 and server is not None:
                    return self._factory.hold(server, answer), answer
                wait = self._refused(server, answer, wait)
            await asyncio.sleep(min(wait, max(0.0, self._until - time.monotonic())))
        raise EnvironmentFaultError(
            f"no environment slot came free within {self._config.reset_timeout_s:g} s",
            code="no_free_slot",
            stage="reset",
        )

    async def _ask(self, server: Server) -> Answer:
        body = {**self._request, "request_id": self._request_id} if server.has("request_id") else self._request
        left = self._until - time.monotonic()
        queue = server.queue_timeout_s
        patience = left if queue is None else min(left, queue + self._config.step_timeout_s)
        # count the lease before it is there, or a burst of resets would all choose the same server
        server.leases += 1
        try:
            return await self._client.once(server, body, timeout_s=patience)
        finally:
            server.leases -= 1

    def _no_answer(self, server: Server | None, error: NoAnswerError) -> None:
        """Note the failure and go on, or raise."""
        if server is None or not error.sent:
            if server is not None:
                self._client.mark_down(server, error)
            self._stuck = None  # a server that is gone has lost our slot with all others
            now = time.monotonic()
            if self._unreachable_until is None:
                self._unreachable_until = now + self._config.unreachable_timeout_s
            if now >= self._unreachable_until:
                raise EnvironmentFaultError(str(error), code=error.code, stage="reset") from error
            return
        self._unreachable_until = None
        self._unanswered += 1
        if not server.has("request_id"):
            self._factory.event("lease_may_leak", server=server.base_url, code=error.code)
            raise EnvironmentFaultError(str(error), code=error.code, stage="reset") from error
        self._stuck = server
        if self._unanswered >= self._config.max_attempts:
            detail = {"attempts": self._unanswered}
            raise EnvironmentFaultError(str(error), code=error.code, stage="reset", detail=detail) from error

    def _refused(self, server: Server | None, answer: Answer, wait: float) -> float:
        """Seconds until the next try of a reset that was turned away; raises if there is no point in one."""
        self._unreachable_until = None
        if answer.code == "request_in_flight":
            self._stuck = server
            return wait
        self._stuck = None
        if answer.status == 503 and answer.retry_after_s is not None:
            if server is not None:
                self._factory.event("lease_queue_full", server=server.base_url, code=answer.code)
            return answer.retry_after_s
        raise fault(answer, "reset")
