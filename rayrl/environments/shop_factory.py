"""What the environments of one process share: servers, heartbeats, the count of open leases, clean-up.

Invariants: one heartbeat loop, not one per lease; ``leases_open`` counts leases that are not known to be given back,
so it is 0 at the end of a run that lost nothing; whatever runs in the background is awaited by
:meth:`FactoryCore.aclose`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from rayrl.environments.shop_client import Answer, NoAnswerError, OnEvent, Server, ShopClient
from rayrl.environments.shop_config import ShopEnvironmentConfig
from rayrl.errors import EnvironmentFaultError
from rayrl.schemas import JsonDict, canonical_json
from rayrl.shop.process import ShopProcess
from rayrl.shop.versions import OBSERVATION_VERSION

_BEATS_PER_TTL = 3


@dataclass(eq=False)
class HeldLease:
    """A lease this process holds."""

    server: Server
    slot: int
    lease_id: str = field(repr=False)
    touched: float = 0.0
    """Monotonic time of its last answered call."""
    lost: str | None = None
    """Why it is gone, once it is."""
    returned: bool = False

    def key(self) -> JsonDict:
        """The lease as a request names it."""
        return {"env_idx": self.slot, "lease_id": self.lease_id}


class FactoryCore:
    """Shared state of a shop environment factory.

    Args:
        config: the shop.
        on_event: gets a dict per noteworthy happening: ``release_failed``, ``lease_lost``, ``lease_may_leak``,
            ``lease_queue_full``, ``retry``, ``server_down``, ``server_up``, ``private_goal_unavailable``,
            ``catalogue_unverified``. Must not raise.
        admin_token: to read private goals; default: what ``config.admin_token_env`` names.

    Without ``base_urls`` in the config, :meth:`start` starts the embedded servers as child processes and
    :meth:`aclose` stops them. To share servers between processes, start them once (``rayrl.shop.process``) and give
    every factory their addresses.
    """

    def __init__(
        self, config: ShopEnvironmentConfig, *, on_event: OnEvent | None = None, admin_token: str | None = None
    ) -> None:
        self.config = config
        self.release_failures = 0
        self._on_event = on_event
        self._token = admin_token or (os.environ.get(config.admin_token_env) if config.admin_token_env else None)
        self._client: ShopClient | None = None
        self._processes: list[ShopProcess] = []
        self._leases: set[HeldLease] = set()
        self._failed: set[HeldLease] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._heartbeat: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._starts: dict[int, bytes] = {}
        self._goals: dict[int, JsonDict] = {}
        self._identity: JsonDict | None = None

    def identity(self) -> dict[str, Any]:
        """See :meth:`ShopEnvironmentConfig.identity`."""
        if self._identity is None:
            self._identity = self.config.identity()
        return dict(self._identity)

    @property
    def client(self) -> ShopClient:
        """The HTTP client.

        Raises:
            EnvironmentFaultError: the factory is not started.
        """
        if self._client is None:
            raise EnvironmentFaultError("the environment factory is not started", code="not_started", stage="reset")
        return self._client

    @property
    def leases_open(self) -> int:
        """Leases taken and not known to be given back."""
        return len(self._leases) + len(self._failed)

    @property
    def base_urls(self) -> list[str]:
        """The servers in use (none before :meth:`start`)."""
        return [s.base_url for s in self._client.servers] if self._client is not None else []

    def event(self, name: str, **facts: Any) -> None:
        """Report a happening."""
        self._emit({"event": name, **facts})

    def _emit(self, event: JsonDict) -> None:
        if self._on_event is not None:
            self._on_event(event)

    async def start(self) -> None:
        """Start the embedded servers where no address is given; check that every server is the shop of the identity.
        Idempotent.

        A server that cannot be reached is passed over as long as another one answers.

        Raises:
            EnvironmentFaultError: none answers, or one is another shop.
        """
        if self._client is not None:
            return
        async with self._starting:
            if self._client is not None:
                return
            urls = list(self.config.base_urls) or await self._start_processes()
            client = ShopClient(
                self.config,
                urls,
                on_event=self._emit,
                check_health=self._check_health,
                admin_token=self._token,
            )
            try:
                await self._check_all(client)
            except BaseException:
                await client.aclose()
                await self._stop_processes()
                raise
            self._client = client
            self._heartbeat = asyncio.create_task(self._beat())

    async def _start_processes(self) -> list[str]:
        if self.config.embedded is None:
            raise EnvironmentFaultError("no server address is configured", code="not_configured", stage="reset")
        self._token = self._token or secrets.token_hex(16)
        server_config = self.config.server_config()
        try:
            for _ in range(self.config.embedded.servers):
                starting = asyncio.to_thread(ShopProcess, server_config, admin_token=self._token)
                self._processes.append(await starting)
        except BaseException:
            await self._stop_processes()
            raise
        return [process.base_url for process in self._processes]

    async def _stop_processes(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            await asyncio.to_thread(process.stop)

    async def _check_all(self, client: ShopClient) -> None:
        up = 0
        problem: NoAnswerError | None = None
        for server in client.servers:
            try:
                await client.health(server)
                up += 1
            except NoAnswerError as error:
                client.mark_down(server, error)
                problem = error
        if not up:
            raise EnvironmentFaultError(
                f"no shop server answers: {problem}",
                code="unreachable",
                stage="reset",
                detail={"servers": len(client.servers)},
            )

    def _check_health(self, base_url: str, health: JsonDict) -> None:
        identity = self.identity()
        expected = {
            "environment_version": identity["environment_version"],
            "observation_version": OBSERVATION_VERSION,
            "catalogue_sha256": identity["catalogue_sha256"],
            "page_size": identity["page_size"],
            "max_query_length": identity["max_query_length"],
        }
        must_be_named = {"environment_version", "observation_version"}
        for name, want in expected.items():
            got = health.get(name)
            if name not in health and name not in must_be_named:
                # the public server does not say what it sells
                if name == "catalogue_sha256" and want is not None:
                    self.event("catalogue_unverified", server=base_url)
                continue
            if want is None and name in ("catalogue_sha256", "page_size"):
                continue
            if got != want:
                raise EnvironmentFaultError(
                    f"{base_url} is another shop: {name} is {got!r}, expected {want!r}",
                    code="wrong_server",
                    stage="reset",
                )

    def hold(self, server: Server, answer: Answer) -> HeldLease:
        """Register the lease that a reset answer grants.

        Raises:
            EnvironmentFaultError: the answer names none.
        """
        slot, lease_id = answer.result.get("env_idx"), answer.result.get("lease_id")
        if not isinstance(slot, int) or not isinstance(lease_id, str):
            raise EnvironmentFaultError("the reset answer names no lease", code="protocol", stage="reset")
        lease = HeldLease(server, slot, lease_id, touched=time.monotonic())
        self._leases.add(lease)
        server.leases += 1
        return lease

    def lost(self, lease: HeldLease, code: str) -> None:
        """Note that the server no longer knows the lease."""
        if lease.lost is None:
            lease.lost = code
            self.event("lease_lost", server=lease.server.base_url, code=code)
        self._drop(lease)

    def _drop(self, lease: HeldLease) -> None:
        if lease in self._leases:
            self._leases.remove(lease)
            lease.server.leases -= 1
        self._failed.discard(lease)
        lease.returned = True

    async def release(self, lease: HeldLease) -> None:
        """Give a lease back; a failure is reported and counted, not raised."""
        if lease.returned:
            return
        timeout_s = self.config.release_timeout_s
        body: JsonDict = {"action": "release_one", **lease.key()}
        try:
            # releasing twice is harmless on both kinds of server, so an unanswered release may be repeated
            answer = await self.client.repeated(
                lease.server, body, timeout_s=timeout_s, until=time.monotonic() + timeout_s, safe=True
            )
        except NoAnswerError as error:
            self._release_failed(lease, error.code)
            return
        if answer.status == 200:
            self._drop(lease)
        elif answer.status == 409 and not lease.server.has("idempotent_release"):
            # the public server says this for a lease that is already released, as after a repeated release
            self._drop(lease)
        elif answer.status in (409, 410):
            self.lost(lease, "lease_expired" if answer.status == 410 else "lease_lost")
        else:
            self._release_failed(lease, answer.code or f"http_{answer.status}")

    def _release_failed(self, lease: HeldLease, code: str) -> None:
        self.release_failures += 1
        if lease in self._leases:
            self._leases.remove(lease)
            lease.server.leases -= 1
        self._failed.add(lease)
        self.event("release_failed", server=lease.server.base_url, code=code)

    def reap(self, taking: asyncio.Task[tuple[HeldLease, Answer]]) -> None:
        """Take over a reset whose caller is gone: wait for its lease a while and give it back."""
        self.adopt(asyncio.create_task(self._reap(taking)))

    async def _reap(self, taking: asyncio.Task[tuple[HeldLease, Answer]]) -> None:
        # a server that drops abandoned resets needs no patience; the public one would leak the slot
        leaky = any(not s.has("queue_timeout") for s in self.client.servers)
        patience = self.config.reset_timeout_s if leaky else min(1.0, self.config.release_timeout_s)
        await asyncio.wait({taking}, timeout=patience)
        if not taking.done():
            taking.cancel()
            await asyncio.wait({taking}, timeout=self.config.release_timeout_s)
            if leaky:
                self.event("lease_may_leak", code="reset_abandoned")
        if taking.done() and not taking.cancelled() and taking.exception() is None:
            await self.release(taking.result()[0])

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Keep a background task until it is done."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def check_same_start(self, task_id: int, start: list[Any]) -> None:
        """Compare a task's first observation with the one seen before in this process.

        Raises:
            EnvironmentFaultError: they differ.
        """
        digest = hashlib.sha256(canonical_json(start)).digest()
        if self._starts.setdefault(task_id, digest) != digest:
            raise EnvironmentFaultError(
                f"task {task_id} started with another first observation than before; results would not be reproducible",
                code="not_deterministic",
                stage="reset",
            )

    async def private_goal(self, server: Server, task_id: int) -> JsonDict | None:
        """A task's goal from the server's private route; ``None``, and an event, where it cannot be had."""
        if task_id not in self._goals:
            try:
                goal = await self.client.goal(server, task_id)
            except NoAnswerError as error:
                self.event("private_goal_unavailable", server=server.base_url, code=error.code)
                return None
            if goal is None:
                return None
            self._goals[task_id] = goal
        return self._goals[task_id]

    async def _beat(self) -> None:
        """Renew every lease that has been idle, one call per server and period."""
        while True:
            ttls = [s.lease_ttl_s for s in self.client.servers if s.lease_ttl_s and s.has("heartbeat")]
            period = min(ttls, default=30.0) / _BEATS_PER_TTL
            await asyncio.sleep(period)
            idle_since = time.monotonic() - period / 2
            for server in self.client.servers:
                idle = [held for held in self._leases if held.server is server and held.touched < idle_since]
                if idle and server.has("heartbeat"):
                    self.adopt(asyncio.create_task(self._renew(server, idle)))

    async def _renew(self, server: Server, leases: list[HeldLease]) -> None:
        calls: list[tuple[list[HeldLease], JsonDict]]
        if server.has("heartbeat_many"):
            calls = [(leases, {"action": "heartbeat", "leases": [[held.slot, held.lease_id] for held in leases]})]
        else:
            calls = [([held], {"action": "heartbeat", **held.key()}) for held in leases]
        for held, body in calls:
            try:
                answer = await self.client.once(server, body, timeout_s=self.config.step_timeout_s)
            except NoAnswerError as error:
                self.event("heartbeat_failed", server=server.base_url, code=error.code)
                continue
            lost = set(answer.result.get("lost") or [])
            for lease in held:
                if lease.returned:
                    continue
                if lease.lease_id in lost or answer.status in (409, 410):
                    self.lost(lease, "lease_expired")
                elif answer.status == 200:
                    lease.touched = time.monotonic()

    async def aclose(self) -> None:
        """Give back what is still held, stop heartbeats and own servers, close connections. Idempotent."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heartbeat
            self._heartbeat = None
        if self._client is not None:
            if self._background:
                await asyncio.wait(self._background, timeout=self.config.release_timeout_s)
            left = [*self._leases, *self._failed]
            results = await asyncio.gather(*(self.release(lease) for lease in left), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    self.event("release_failed", code=type(result).__name__)
            for task in list(self._background):
                task.cancel()
            await self._client.aclose()
            self._client = None
        await self._stop_processes()
