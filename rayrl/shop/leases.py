"""Who holds which slot, until when, and who waits.

Invariants:

* a slot is free, leased, or on its way to exactly one waiter; ``free + leased == slots`` whenever no coroutine is
  mid-step;
* a lease lives until released, cancelled by ``release_all``, or ``ttl_s`` after its last call or heartbeat;
* a waiter that goes away (cancelled, timed out) takes no slot, even if one was just handed to it;
* slots are handed out in the order they became free, waiters served in the order they came;
* releasing a lease one has released before is no error; an expired one is told apart from one that never was.

The clock is passed in, so expiry is tested without waiting.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

_REMEMBERED = 100_000
"""Ended leases that are still recognised; older ones count as unknown."""


class LeaseError(Exception):
    """The lease gives no right to this call. ``status`` and ``code`` are what HTTP answers."""

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class QueueTimeoutError(Exception):
    """No slot came free in time, or the queue is full."""


@dataclass(slots=True)
class Lease(Generic[T]):
    """One held slot. ``answers`` keeps what was answered to each request id (body bytes, or ``None`` once
    forgotten)."""

    slot: int
    lease_id: str
    holder: T
    created: float
    expires: float
    answers: OrderedDict[str, tuple[int, bytes] | None] = field(default_factory=OrderedDict)
    reset_id: str | None = None


class LeaseTable(Generic[T]):
    """Slots of one server.

    Args:
        slots: how many leases may live at once.
        ttl_s: seconds a lease lives after its last sign of life.
        max_queue: waiters beyond this are turned away at once.
        clock: monotonic seconds.
    """

    def __init__(self, slots: int, *, ttl_s: float, max_queue: int, clock: Callable[[], float]) -> None:
        self.slots = slots
        self.ttl_s = ttl_s
        self._max_queue = max_queue
        self._clock = clock
        self._free: deque[int] = deque(range(slots))
        self._leases: dict[int, Lease[T]] = {}
        self._ended: OrderedDict[str, tuple[int, str]] = OrderedDict()
        self._waiters: deque[asyncio.Future[int]] = deque()
        self.expired_total = 0

    @property
    def free(self) -> int:
        """Slots nobody holds or is being handed."""
        return len(self._free)

    @property
    def queued(self) -> int:
        """Waiters."""
        return sum(not waiter.done() for waiter in self._waiters)

    def ages(self) -> list[float]:
        """Age in seconds of each live lease."""
        now = self._clock()
        return [now - lease.created for lease in self._leases.values()]

    async def acquire(self, timeout_s: float) -> int:
        """Wait for a slot; the caller must :meth:`grant` it or :meth:`give_back`.

        Raises:
            QueueTimeoutError: none came free within ``timeout_s``, or too many wait already.
        """
        self.sweep()
        if self._free:
            return self._free.popleft()
        if self.queued >= self._max_queue:
            raise QueueTimeoutError("too many resets are waiting for a slot")
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            self._withdraw(waiter)
            raise QueueTimeoutError(f"no environment slot came free within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def _withdraw(self, waiter: asyncio.Future[int]) -> None:
        if waiter.done() and not waiter.cancelled():
            self.give_back(waiter.result())
        elif waiter in self._waiters:
            self._waiters.remove(waiter)

    def grant(self, slot: int, holder: T) -> Lease[T]:
        """Turn an acquired slot into a lease."""
        now = self._clock()
        lease = Lease(slot, secrets.token_hex(16), holder, now, now + self.ttl_s)
        self._leases[slot] = lease
        return lease

    def give_back(self, slot: int) -> None:
        """Free a slot that is not leased: to the longest waiter, else to the free list."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self._free.append(slot)

    def lookup(self, slot: int, lease_id: str) -> Lease[T]:
        """The live lease, renewed.

        Raises:
            LeaseError: 410 ``lease_expired``; 409 ``stale_lease`` for anything else.
        """
        lease = self._leases.get(slot)
        now = self._clock()
        if lease is not None and lease.lease_id == lease_id:
            if now < lease.expires:
                lease.expires = now + self.ttl_s
                return lease
            self._end(lease, "expired")
        if self._ended.get(lease_id) == (slot, "expired"):
            raise LeaseError(f"the lease for environment {slot} has expired", status=410, code="lease_expired")
        raise LeaseError(f"stale or invalid lease for environment {slot}", status=409, code="stale_lease")

    def release(self, slot: int, lease_id: str) -> Lease[T] | None:
        """Free the slot; ``None`` if this very lease was released before.

        Raises:
            LeaseError: as :meth:`lookup`.
        """
        if self._ended.get(lease_id) == (slot, "released"):
            return None
        lease = self.lookup(slot, lease_id)
        self._end(lease, "released")
        return lease

    def release_all(self) -> int:
        """Cancel every lease; returns how many there were."""
        leases = [self._leases[slot] for slot in sorted(self._leases)]
        for lease in leases:
            self._end(lease, "cancelled")
        if not self._waiters:
            self._free = deque(sorted(self._free))
        return len(leases)

    def sweep(self) -> int:
        """End leases whose time is over; returns how many."""
        now = self._clock()
        over = [lease for lease in self._leases.values() if now >= lease.expires]
        for lease in over:
            self._end(lease, "expired")
        return len(over)

    def live(self, lease_id: str) -> Lease[T] | None:
        """A live lease by id alone (not renewed)."""
        return next((lease for lease in self._leases.values() if lease.lease_id == lease_id), None)

    def _end(self, lease: Lease[T], how: str) -> None:
        del self._leases[lease.slot]
        self._ended[lease.lease_id] = (lease.slot, how)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self.expired_total += how == "expired"
        self.give_back(lease.slot)
