from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrl.models.limiter import Aimd, Limiter, LimiterTimeoutError, limiter_for

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["start", "ok", "fail", "throttle", "throttle_later"]), st.floats(0, 3), st.floats(0.01, 5)
    ),
    max_size=200,
)


@given(EVENTS, st.integers(1, 40))
def test_the_limit_stays_in_bounds_and_admission_keeps_it(events, most):
    state, now = Aimd(max_limit=most), 0.0
    last_cut = -1e9
    for kind, step, retry_after in events:
        now += step
        if kind == "start":
            if state.can_admit(now):
                assert state.in_flight < int(state.limit) and now >= state.blocked_until
                state.admit()
        elif kind.startswith("throttle"):
            before = state.limit
            cut = state.on_throttle(now, retry_after if kind == "throttle_later" else None)
            assert cut == (now - last_cut >= state.window_s)  # once per window, no more
            assert state.limit == (max(1.0, before / 2) if cut else before)
            last_cut = now if cut else last_cut
            if kind == "throttle_later":
                assert state.blocked_until >= now + retry_after and not state.can_admit(now)
        elif state.in_flight:
            before = state.limit
            if kind == "ok":
                state.on_success()
            state.release()
            assert before <= state.limit <= before + 1.0  # slow growth, never a drop
        assert 1 <= state.limit <= most and state.in_flight >= 0


@given(st.integers(2, 64))
def test_it_recovers_to_the_maximum_and_only_when_used(most):
    state = Aimd(max_limit=most)
    state.on_throttle(0.0)
    halved = state.limit
    state.admit()
    if halved >= 2:
        state.on_success()
        assert state.limit == halved  # one call does not use a limit of two: no reason to grow
    rounds = 0
    while state.limit < most:
        state.in_flight = int(state.limit)
        state.on_success()
        rounds += 1
    assert state.limit == most and rounds >= (most - halved) * halved


def test_releasing_too_often_is_loud():
    with pytest.raises(RuntimeError):
        Aimd(max_limit=2).release()
    with pytest.raises(ValueError):
        Aimd(max_limit=0)


async def test_waiters_are_served_in_order_and_none_is_lost():
    limiter = Limiter(2)
    loop = asyncio.get_running_loop()
    order: list[int] = []

    async def call(number: int) -> None:
        await limiter.acquire(loop.time() + 5)
        order.append(number)
        await asyncio.sleep(0.001)
        limiter.release(success=True)

    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(call(number))
    assert order == list(range(50))
    assert limiter.gauge()["in_flight"] == 0 and limiter.gauge()["waiting"] == 0


async def test_cancelled_waiters_give_their_turn_back():
    limiter = Limiter(1)
    loop = asyncio.get_running_loop()
    await limiter.acquire(loop.time() + 1)
    waiters = [asyncio.create_task(limiter.acquire(loop.time() + 5)) for _ in range(4)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    await asyncio.sleep(0)
    limiter.release()  # admits waiters[1] ...
    waiters[1].cancel()  # ... which is cancelled in the same turn of the loop
    await asyncio.gather(*waiters[:2], return_exceptions=True)
    await asyncio.wait_for(waiters[2], 1)
    limiter.release()
    await asyncio.wait_for(waiters[3], 1)
    limiter.release()
    assert limiter.state.in_flight == 0


async def test_retry_after_holds_everybody_back_and_then_lets_go():
    limiter = Limiter(4)
    loop = asyncio.get_running_loop()
    started = loop.time()
    assert limiter.throttle(0.15)
    assert not limiter.throttle(0.05)  # same window: no second cut, and the longer wait stands
    await limiter.acquire(started + 5)
    assert loop.time() - started >= 0.15
    assert limiter.state.limit == 2


async def test_waiting_ends_at_the_deadline():
    limiter = Limiter(1)
    loop = asyncio.get_running_loop()
    await limiter.acquire(loop.time() + 1)
    with pytest.raises(LimiterTimeoutError):
        await limiter.acquire(loop.time() + 0.05)
    limiter.throttle(100)
    started = loop.time()
    with pytest.raises(LimiterTimeoutError):
        await limiter.acquire(loop.time() + 50)
    assert loop.time() - started < 10  # no use in waiting for what cannot come
    limiter.release()
    assert limiter.state.in_flight == 0


async def test_one_limiter_per_endpoint_and_the_smaller_bound_holds():
    one, other = limiter_for("http://a/v1", 8), limiter_for("http://b/v1", 8)
    assert one is not other and limiter_for("http://a/v1", 4) is one
    assert one.state.max_limit == 4 and one.state.limit == 4
    assert limiter_for("http://a/v1", 16).state.max_limit == 4
