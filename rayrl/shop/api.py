"""Actions of ``POST /api/shop_agent`` on leases and episodes; knows JSON values, not HTTP.

Invariants: a mistake of the client is a 4xx with a code, never a 500; between reading a lease and answering there is
no await, so two calls on one lease cannot interleave; a repeated ``request_id`` on a lease gets the stored answer and
does nothing.

Codes stand in the answer's body beside ``error`` wherever the protocol's own answer is not fixed, and always in the
header :data:`CODE_HEADER`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from rayrl.shop.leases import Lease, LeaseError, LeaseTable, QueueTimeoutError
from rayrl.shop.pages import Shop
from rayrl.shop.session import EpisodeOverError, ShopEpisode
from rayrl.shop.versions import ACTION_LIMITS, TERMINATION_REASONS

CODE_HEADER = "X-Shop-Error"
_KEPT_ANSWERS = 8
_MAX_REQUEST_ID = 128

Body = dict[str, Any]


class ApiError(Exception):
    """An answer that is an error. ``in_body`` says whether the code stands in the body too."""

    def __init__(
        self, status: int, code: str, message: str, *, in_body: bool = True, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.in_body = in_body
        self.retry_after_s = retry_after_s

    def payload(self) -> bytes:
        """The JSON answer."""
        result: Body = {"error": str(self)}
        if self.in_body:
            result["code"] = self.code
        return orjson.dumps({"result": result})


class ShopApi:
    """All environment actions of one server.

    Args:
        shop: catalogue and page rules.
        leases: the slot table.
        queue_timeout_s: how long a reset waits for a slot.
    """

    def __init__(self, shop: Shop, leases: LeaseTable[ShopEpisode], *, queue_timeout_s: float) -> None:
        self.shop = shop
        self.leases = leases
        self.queue_timeout_s = queue_timeout_s
        self._reset_ids: dict[str, Lease[ShopEpisode] | None] = {}
        self._handlers: dict[str, Callable[[Body], tuple[int, bytes]]] = {
            "interact": self._interact,
            "terminate": self._terminate,
            "release_one": self._release,
            "heartbeat": self._heartbeat,
        }

    def call(self, action: str, body: Body) -> tuple[int, bytes] | None:
        """Answer a synchronous action with (status, JSON bytes); ``None`` if the action is none of those.

        Raises:
            ApiError: the answer is an error.
        """
        handler = self._handlers.get(action)
        return None if handler is None else handler(body)

    async def reset(self, body: Body, *, private_allowed: bool, alive: Callable[[], bool]) -> tuple[int, bytes]:
        """Wait for a slot and start an episode in it.

        Args:
            body: the request.
            private_allowed: whether ``include_private_goal`` is granted to this caller.
            alive: whether the caller is still there; a slot that comes free for one who has left goes to the next.

        Raises:
            ApiError: a bad request (no slot is touched), or 503 when no slot came free in time.
        """
        if "env_idx" in body:
            message = "reset must not include env_idx; the server assigns a slot"
            raise ApiError(400, "reset_with_env_idx", message, in_body=False)
        if body.get("idx") is None:
            raise ApiError(400, "reset_no_task", "reset action requires idx parameter")
        task_id = body["idx"]
        if isinstance(task_id, bool) or not isinstance(task_id, int):
            raise ApiError(400, "reset_string_task", "task idx must be an integer")
        mode = body.get("interaction_mode", "single_turn")
        if not isinstance(mode, str) or mode not in ACTION_LIMITS:
            message = f"unsupported interaction_mode {mode!r}; choose one of {sorted(ACTION_LIMITS)}"
            raise ApiError(400, "reset_bad_mode", message)
        task = self.shop.catalogue.tasks.get(task_id)
        if task is None:
            raise ApiError(404, "reset_bad_task", f"unknown or inactive task_id {task_id}")
        private = body.get("include_private_goal") is True
        if private and not private_allowed:
            raise ApiError(403, "admin_token_required", "the private goal needs the header X-Admin-Token")

        request_id = _request_id(body)
        if request_id is not None and request_id in self._reset_ids:
            return self._repeated_reset(request_id)
        if request_id is not None:
            self._reset_ids[request_id] = None
        try:
            slot = await self._slot(alive)
        except BaseException:
            if request_id is not None:
                del self._reset_ids[request_id]
            raise
        episode = ShopEpisode(self.shop, task, interaction_mode=mode, persona=body.get("if_persona") is True)
        lease = self.leases.grant(slot, episode)
        result = episode.start()
        result["env_idx"] = slot
        result["lease_id"] = lease.lease_id
        if private:
            result["private_task_instruction"] = task.instruction
            result["goal_options"] = list(task.options)
            result["reason_key"] = task.goal["reason_key"]
        payload = orjson.dumps({"result": result})
        if request_id is not None:
            lease.reset_id = request_id
            lease.answers[request_id] = (200, payload)
            self._reset_ids[request_id] = lease
        return 200, payload

    async def _slot(self, alive: Callable[[], bool]) -> int:
        try:
            slot = await self.leases.acquire(self.queue_timeout_s)
        except QueueTimeoutError as error:
            raise ApiError(503, "queue_timeout", str(error), retry_after_s=1.0) from None
        if not alive():
            self.leases.give_back(slot)
            raise ApiError(503, "client_gone", "the caller went away while waiting")
        return slot

    def _repeated_reset(self, request_id: str) -> tuple[int, bytes]:
        lease = self._reset_ids[request_id]
        if lease is None:
            raise ApiError(409, "request_in_flight", "a reset with this request_id is still waiting for a slot")
        answer = lease.answers.get(request_id)
        if self.leases.live(lease.lease_id) is None or answer is None:
            raise ApiError(409, "stale_request_id", "the lease of this request_id is over")
        return answer

    def forget_resets(self) -> None:
        """Drop reset ids whose lease is over; called now and then."""
        over = [
            key for key, lease in self._reset_ids.items() if lease and self.leases.live(lease.lease_id) is not lease
        ]
        for key in over:
            del self._reset_ids[key]

    def _interact(self, body: Body) -> tuple[int, bytes]:
        lease = self._lease(body, "interact")

        def act() -> bytes:
            text = body.get("response")
            if not isinstance(text, str):
                raise ApiError(400, "interact_missing_response", "interact action requires response parameter")
            try:
                return _answer(lease, lease.holder.interact(text))
            except EpisodeOverError as error:
                raise ApiError(409, "step_after_done", str(error)) from None

        return self._once(lease, body, act)

    def _terminate(self, body: Body) -> tuple[int, bytes]:
        lease = self._lease(body, "terminate")

        def act() -> bytes:
            reason = body.get("termination_reason", "action_limit")
            if reason not in TERMINATION_REASONS:
                raise ApiError(400, "terminate_bad_reason", f"unsupported termination reason: {reason}")
            try:
                return _answer(lease, lease.holder.terminate(reason))
            except EpisodeOverError as error:
                raise ApiError(409, "terminate_after_done", str(error)) from None

        return self._once(lease, body, act)

    def _release(self, body: Body) -> tuple[int, bytes]:
        slot, lease_id = _slot_and_lease(body, "release_one")
        try:
            lease = self.leases.release(slot, lease_id)
        except LeaseError as error:
            raise _lease_error(error) from None
        if lease is not None and lease.reset_id is not None:
            self._reset_ids.pop(lease.reset_id, None)
        return 200, orjson.dumps({"result": {"message": f"Environment {slot} has been released"}})

    def _heartbeat(self, body: Body) -> tuple[int, bytes]:
        """One lease (env_idx, lease_id), or many at once (``leases``: [[env_idx, lease_id], ...])."""
        many = body.get("leases")
        if many is None:
            self._lease(body, "heartbeat")
            result: Body = {"message": "Lease renewed", "lease_ttl_s": self.leases.ttl_s}
            return 200, orjson.dumps({"result": result})
        if not isinstance(many, list):
            raise ApiError(400, "heartbeat_bad_leases", "leases must be a list of [env_idx, lease_id]")
        lost: list[str] = []
        for item in many:
            if not isinstance(item, list) or len(item) != 2:
                raise ApiError(400, "heartbeat_bad_leases", "leases must be a list of [env_idx, lease_id]")
            slot, lease_id = _slot_and_lease({"env_idx": item[0], "lease_id": item[1]}, "heartbeat")
            try:
                self.leases.lookup(slot, lease_id)
            except LeaseError:
                lost.append(lease_id)
        result = {"message": "Leases renewed", "lease_ttl_s": self.leases.ttl_s, "lost": lost}
        return 200, orjson.dumps({"result": result})

    def release_all(self) -> tuple[int, bytes]:
        """Cancel everybody's episodes. Who may call this is the HTTP layer's business."""
        self.leases.release_all()
        self.forget_resets()
        return 200, orjson.dumps({"result": {"message": "All environments have been initialized"}})

    def private_goal(self, task_id: int | None, lease_id: str | None) -> tuple[int, bytes]:
        """The goal of a task, or of the task a live lease plays."""
        if task_id is None and lease_id is not None:
            lease = self.leases.live(lease_id)
            task_id = lease.holder.task.task_id if lease is not None else None
        task = self.shop.catalogue.tasks.get(task_id) if task_id is not None else None
        if task is None:
            raise ApiError(404, "unknown_task", "no such task or live lease; give idx or lease_id")
        return 200, orjson.dumps({"result": {"idx": task.task_id, "goal": task.goal}})

    def _lease(self, body: Body, action: str) -> Lease[ShopEpisode]:
        slot, lease_id = _slot_and_lease(body, action)
        try:
            return self.leases.lookup(slot, lease_id)
        except LeaseError as error:
            raise _lease_error(error) from None

    def _once(self, lease: Lease[ShopEpisode], body: Body, act: Callable[[], bytes]) -> tuple[int, bytes]:
        """Run ``act`` unless its request id was answered before on this lease."""
        request_id = _request_id(body)
        if request_id is None:
            return 200, act()
        if request_id in lease.answers:
            stored = lease.answers[request_id]
            if stored is None:
                raise ApiError(409, "stale_request_id", "this request_id was answered too long ago to be repeated")
            return stored
        try:
            answer = (200, act())
        except ApiError as error:
            answer = (error.status, error.payload())
        lease.answers[request_id] = answer
        if len(lease.answers) > _KEPT_ANSWERS:
            old = list(lease.answers)[-_KEPT_ANSWERS - 1]
            lease.answers[old] = None
        return answer


AsyncCall = Callable[[Body], Awaitable[tuple[int, bytes]]]


def _answer(lease: Lease[ShopEpisode], result: Body) -> bytes:
    result["env_idx"] = lease.slot
    result["idx"] = f"slot-{lease.slot}-{lease.holder.task.task_id}"
    result["lease_id"] = lease.lease_id
    return orjson.dumps({"result": result})


def _slot_and_lease(body: Body, action: str) -> tuple[int, str]:
    slot, lease_id = body.get("env_idx"), body.get("lease_id")
    if isinstance(slot, bool) or not isinstance(slot, int) or not isinstance(lease_id, str) or not lease_id:
        message = f"{action} requires a valid env_idx and lease_id"
        raise ApiError(400, "missing_lease", message, in_body=False)
    return slot, lease_id


def _request_id(body: Body) -> str | None:
    value = body.get("request_id")
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_REQUEST_ID:
        raise ApiError(400, "bad_request_id", f"request_id must be a text of 1 to {_MAX_REQUEST_ID} characters")
    return value


def _lease_error(error: LeaseError) -> ApiError:
    return ApiError(error.status, error.code, str(error), in_body=error.status != 409)
