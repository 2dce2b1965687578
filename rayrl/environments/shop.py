"""The shop as an :class:`~rayrl.environments.base.Environment`: one leased episode on a public or an embedded server.

Invariants:

* the lease is given back on every exit path, cancellation included; a release that fails is an event and a count, and
  is tried once more when the factory closes;
* done and reward are the server's; nothing is added, no action is invented, an illegal click is sent and answered;
* nothing private reaches an observation or a public field: the goal leaves as ``StepResult.private`` only;
* the same task gives the same first observation, whatever the seed (the shop has no randomness of its own); a server
  that breaks this is a fault, not noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any

from rayrl.environments.shop_client import Answer, NoAnswerError
from rayrl.environments.shop_config import EmbeddedShopConfig, ShopEnvironmentConfig
from rayrl.environments.shop_factory import FactoryCore, HeldLease
from rayrl.environments.shop_reset import fault, take_lease
from rayrl.environments.shop_tools import action_text, page_tools
from rayrl.errors import EnvironmentFaultError, LeaseLostError
from rayrl.schemas import EpisodeJob, JsonDict, Observation, ResetResult, StepResult, ToolCall
from rayrl.shop.versions import OBSERVATION_VERSION

__all__ = ["EmbeddedShopConfig", "ShopEnvironment", "ShopEnvironmentConfig", "ShopEnvironmentFactory"]

_LOST_CODES = {409: "lease_lost", 410: "lease_expired"}


class ShopEnvironmentFactory(FactoryCore):
    """Opens shop environments that share connections, heartbeats and server choice. See :class:`FactoryCore`."""

    def open(self) -> ShopEnvironment:
        """A fresh environment; no I/O until ``reset``."""
        return ShopEnvironment(self)


class ShopEnvironment:
    """One episode. Made by :meth:`ShopEnvironmentFactory.open`."""

    def __init__(self, factory: FactoryCore) -> None:
        self._factory = factory
        self._config = factory.config
        self._lease: HeldLease | None = None
        self._job: EpisodeJob | None = None
        self._closed = False

    async def reset(self, job: EpisodeJob) -> ResetResult:
        """Take a lease, waiting for a slot if need be, and start ``job.task_id``. ``job.seed`` changes nothing here.

        Raises:
            EnvironmentFaultError: no slot in time, no server, unknown task, or an answer against the protocol.
        """
        if self._closed or self._lease is not None:
            raise EnvironmentFaultError("an environment plays one episode", code="already_used", stage="reset")
        await self._factory.start()
        self._job = job
        taking = asyncio.create_task(take_lease(self._factory, job.task_id))
        try:
            lease, answer = await asyncio.shield(taking)
        except asyncio.CancelledError:
            # the server may grant the slot at this very moment: see it through, give it back
            self._factory.reap(taking)
            raise
        self._lease = lease
        if self._closed:
            await self._factory.release(lease)
            raise EnvironmentFaultError("the environment was closed during reset", code="closed", stage="reset")
        try:
            return self._reset_result(job, answer.result)
        except EnvironmentFaultError:
            await self.close()
            raise

    def _reset_result(self, job: EpisodeJob, result: JsonDict) -> ResetResult:
        version = result.get("environment_version")
        if version != self._config.environment_version:
            raise EnvironmentFaultError(
                f"the server plays {version!r}, the config says {self._config.environment_version!r}",
                code="environment_version",
                stage="reset",
            )
        observation = self._observation(result, "reset", done=False)
        instruction = result.get("task_instruction")
        if not isinstance(instruction, str) or not instruction:
            raise EnvironmentFaultError("the reset answer has no task_instruction", code="protocol", stage="reset")
        persona = result.get("user_persona") if self._config.persona else None
        self._factory.check_same_start(job.task_id, [instruction, persona, observation.text, observation.state])
        return ResetResult(
            instruction=instruction,
            observation=observation,
            # the public server sends the persona in standard mode too, where it is no part of the task
            persona=persona if isinstance(persona, dict) else {},
            environment_version=str(version),
            public={k: result[k] for k in ("task_mode", "interaction_mode", "message") if k in result},
        )

    async def step(self, call: ToolCall, *, seed: int) -> StepResult:
        """Act once. ``seed`` changes nothing: the shop is deterministic.

        Raises:
            LeaseLostError: the lease expired or was taken away.
            EnvironmentFaultError: no answer, or one against the protocol.
        """
        text = action_text(call)
        answer = await self._call("step", {"action": "interact", "response": text})
        return await self._step_result("step", text, answer.result)

    async def terminate(self, reason: str) -> StepResult:
        """End the episode with zero reward; ``reason`` is ``generation_length`` or ``action_limit``.

        Raises:
            LeaseLostError: the lease expired or was taken away.
            EnvironmentFaultError: no answer, or one against the protocol.
        """
        answer = await self._call("terminate", {"action": "terminate", "termination_reason": reason})
        return await self._step_result("terminate", reason, answer.result)

    async def _call(self, stage: str, body: JsonDict) -> Answer:
        lease = self._lease
        if lease is None or self._closed:
            raise EnvironmentFaultError("no episode is running", code="not_reset", stage=stage)
        if lease.lost is not None:
            raise LeaseLostError(f"the lease is gone ({lease.lost})", code=lease.lost, stage=stage)
        safe = lease.server.has("request_id")
        body |= {"env_idx": lease.slot, "lease_id": lease.lease_id}
        if safe:
            body["request_id"] = secrets.token_hex(8)
        timeout_s = self._config.step_timeout_s
        until = time.monotonic() + timeout_s * self._config.max_attempts
        try:
            answer = await self._factory.client.repeated(
                lease.server, body, timeout_s=timeout_s, until=until, safe=safe
            )
        except NoAnswerError as error:
            raise EnvironmentFaultError(str(error), code=error.code, stage=stage) from error
        lease.touched = time.monotonic()
        if answer.status == 200:
            return answer
        if answer.status == 410 or (answer.status == 409 and answer.code in (None, "stale_lease")):
            self._factory.lost(lease, _LOST_CODES[answer.status])
            raise LeaseLostError(answer.error, code=_LOST_CODES[answer.status], stage=stage)
        raise fault(answer, stage)

    async def _step_result(self, stage: str, text: str, result: JsonDict) -> StepResult:
        done, reward = result.get("done"), result.get("reward")
        if not isinstance(done, bool) or isinstance(reward, bool) or not isinstance(reward, int | float):
            raise EnvironmentFaultError("the answer has no done or no reward", code="protocol", stage=stage)
        private = await self._private(result) if done else None
        message = result.get("message")
        return StepResult(
            action=text,
            observation=self._observation(result, stage, done=done),
            done=done,
            reward=float(reward),
            reward_detail=result.get("reward_detail") or {},
            purchase=result.get("purchase") or {},
            feedback=result.get("action_feedback") or {},
            termination_reason=result.get("termination_reason"),
            public={"message": message} if message is not None else {},
            private=private,
        )

    def _observation(self, result: JsonDict, stage: str, *, done: bool) -> Observation:
        state = result.get("observation_state")
        text = result.get("observation")
        if not isinstance(state, dict) or not isinstance(text, str):
            raise EnvironmentFaultError("the answer has no observation_state", code="protocol", stage=stage)
        if state.get("observation_version") != OBSERVATION_VERSION:
            raise EnvironmentFaultError(
                f"observation version {state.get('observation_version')!r}, expected {OBSERVATION_VERSION!r}",
                code="observation_version",
                stage=stage,
            )
        # after the end a page may still look playable (the protocol leaves it as it was): done decides, not the page
        tools = [] if done else page_tools(state, max_query_length=self._config.max_query_length)
        return Observation(text=text, state=state, version=OBSERVATION_VERSION, tools=tools)

    async def _private(self, result: JsonDict) -> JsonDict | None:
        """The private goal: from the answer where the server sends it, else asked for with the admin token."""
        goal: Any = result.get("goal")
        if isinstance(goal, dict) and goal:
            return {"goal": goal}
        lease, job = self._lease, self._job
        if lease is None or job is None:
            return None
        found = await self._factory.private_goal(lease.server, job.task_id)
        return {"goal": found} if found else None

    async def close(self) -> None:
        """Give the lease back. Idempotent; finishes even if the caller is cancelled, within the release time-out."""
        self._closed = True
        lease, self._lease = self._lease, None
        if lease is None:
            return
        releasing = asyncio.create_task(self._factory.release(lease))
        try:
            await asyncio.shield(releasing)
        except asyncio.CancelledError:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({releasing}, timeout=self._config.release_timeout_s)
            if not releasing.done():
                self._factory.adopt(releasing)
            raise
