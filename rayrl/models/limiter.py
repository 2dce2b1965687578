"""One concurrency limit per endpoint, shared by all calls of a process: additive increase, multiplicative decrease.

:class:`Aimd` is the pure state machine (time comes in as an argument); :class:`Limiter` adds waiting. Invariants:

* ``min_limit <= limit <= max_limit``, and a call is admitted only while ``in_flight < floor(limit)``;
* the limit is halved at most once per ``window_s``: the 429s of one burst are one signal, not many;
* it grows by 1 per ``limit`` successes, and only while it is actually used, so growth is slow and bounded;
* no call is admitted before ``blocked_until``, the latest ``Retry-After`` any call was given;
* waiters are admitted in order of arrival; a permit is given back exactly once, cancelled waiters included.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary


@dataclass
class Aimd:
    """The state machine. All times are seconds of one monotonic clock."""

    max_limit: int
    min_limit: int = 1
    window_s: float = 1.0
    limit: float = 0.0
    in_flight: int = 0
    blocked_until: float = -math.inf
    last_cut: float = -math.inf
    cuts: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_limit <= self.max_limit:
            raise ValueError(f"need 1 <= min_limit <= max_limit, got {self.min_limit} and {self.max_limit}")
        # full speed until told otherwise: a ramp would cost every run, a cut costs only the throttled ones
        self.limit = self.limit or float(self.max_limit)

    def can_admit(self, now: float) -> bool:
        """Whether one more call may start now."""
        return self.in_flight < int(self.limit) and now >= self.blocked_until

    def admit(self) -> None:
        """Count a started call."""
        self.in_flight += 1

    def release(self) -> None:
        """Count an ended call, whatever its outcome."""
        if self.in_flight <= 0:
            raise RuntimeError("limiter released more often than admitted")
        self.in_flight -= 1

    def on_success(self) -> None:
        """The endpoint coped. Called before the release, so that ``in_flight`` tells whether the limit was in use."""
        if self.in_flight >= int(self.limit) and self.limit < self.max_limit:
            self.limit = min(float(self.max_limit), self.limit + 1.0 / self.limit)

    def on_throttle(self, now: float, retry_after_s: float | None = None) -> bool:
        """The endpoint answered 429 or 503. Returns whether the limit was cut (at most once per window)."""
        if retry_after_s is not None and retry_after_s > 0:
            self.blocked_until = max(self.blocked_until, now + retry_after_s)
        if now - self.last_cut < self.window_s:
            return False
        self.last_cut = now
        self.limit = max(float(self.min_limit), self.limit / 2)
        self.cuts += 1
        return True


class LimiterTimeoutError(Exception):
    """No permit within the time allowed."""


class Limiter:
    """Waiting around :class:`Aimd`. Belongs to one event loop."""

    def __init__(self, max_limit: int, *, window_s: float = 1.0) -> None:
        self.state = Aimd(max_limit=max_limit, window_s=window_s)
        self._loop = asyncio.get_running_loop()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, deadline: float) -> None:
        """Wait for a permit until ``deadline`` (loop time).

        Raises:
            LimiterTimeoutError: no permit in time, or a ``Retry-After`` already reaches beyond the deadline.
        """
        state = self.state
        now = self._loop.time()
        if not self._waiters and state.can_admit(now):
            state.admit()
            return
        if state.blocked_until > deadline:
            raise LimiterTimeoutError
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        self._pump()
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self._give_back()  # admitted and interrupted in the same turn of the loop
            else:
                waiter.cancel()
                self._pump()
            if isinstance(error, TimeoutError):
                raise LimiterTimeoutError from None
            raise

    def release(self, *, success: bool = False) -> None:
        """Give the permit back; ``success`` says that the endpoint coped with the call."""
        if success:
            self.state.on_success()
        self._give_back()

    def throttle(self, retry_after_s: float | None) -> bool:
        """Tell the limiter about a 429 or 503; returns whether the limit was cut."""
        return self.state.on_throttle(self._loop.time(), retry_after_s)

    def gauge(self) -> dict[str, float]:
        """What a dashboard shows."""
        state = self.state
        blocked = max(0.0, state.blocked_until - self._loop.time())
        return {
            "limit": state.limit,
            "max_limit": float(state.max_limit),
            "in_flight": float(state.in_flight),
            "waiting": float(sum(not waiter.done() for waiter in self._waiters)),
            "blocked_s": blocked,
            "cuts": float(state.cuts),
        }

    @asynccontextmanager
    async def permit(self, deadline: float) -> AsyncIterator[None]:
        """``acquire`` and ``release`` around a block, for callers without feedback to give."""
        await self.acquire(deadline)
        try:
            yield
        finally:
            self.release()

    def _give_back(self) -> None:
        self.state.release()
        self._pump()

    def _pump(self) -> None:
        """Admit as many waiters as the state allows; arm a timer where only ``Retry-After`` stands in the way."""
        state, waiters = self.state, self._waiters
        now = self._loop.time()
        while waiters:
            if waiters[0].done():
                waiters.popleft()
            elif state.can_admit(now):
                state.admit()
                waiters.popleft().set_result(None)
            else:
                break
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if waiters and now < state.blocked_until:
            self._timer = self._loop.call_at(state.blocked_until, self._pump)


_limiters: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Limiter]] = WeakKeyDictionary()


def limiter_for(endpoint: str, max_limit: int) -> Limiter:
    """The limiter of an endpoint on the running loop; of several callers' ``max_limit`` the smallest holds."""
    table = _limiters.setdefault(asyncio.get_running_loop(), {})
    limiter = table.get(endpoint)
    if limiter is None:
        limiter = table[endpoint] = Limiter(max_limit)
    elif max_limit < limiter.state.max_limit:
        limiter.state.max_limit = max_limit
        limiter.state.limit = min(limiter.state.limit, float(max_limit))
    return limiter
