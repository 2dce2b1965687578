"""The lease table with a clock of its own."""

from __future__ import annotations

import asyncio
import random

import pytest

from rayrl.shop.leases import LeaseError, LeaseTable, QueueTimeoutError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def table(clock: Clock, slots: int = 2, *, ttl_s: float = 10.0, max_queue: int = 8) -> LeaseTable[str]:
    return LeaseTable(slots, ttl_s=ttl_s, max_queue=max_queue, clock=clock)


async def test_slots_go_round_in_the_order_they_came_free(clock: Clock) -> None:
    leases = table(clock)
    first = leases.grant(await leases.acquire(1), "a")
    assert first.slot == 0
    leases.release(0, first.lease_id)
    assert await leases.acquire(1) == 1


async def test_a_lease_lives_exactly_its_ttl_after_the_last_sign_of_life(clock: Clock) -> None:
    leases = table(clock)
    lease = leases.grant(await leases.acquire(1), "a")
    clock.now += 9.9
    assert leases.lookup(lease.slot, lease.lease_id) is lease
    clock.now += 9.9
    assert leases.sweep() == 0
    clock.now += 0.1
    assert leases.sweep() == 1
    assert leases.free == 2
    with pytest.raises(LeaseError) as caught:
        leases.lookup(lease.slot, lease.lease_id)
    assert (caught.value.status, caught.value.code) == (410, "lease_expired")


async def test_an_expired_lease_is_gone_even_before_a_sweep(clock: Clock) -> None:
    leases = table(clock, slots=1)
    lease = leases.grant(await leases.acquire(1), "a")
    clock.now += 10
    with pytest.raises(LeaseError, match="expired"):
        leases.lookup(lease.slot, lease.lease_id)
    assert leases.free == 1


async def test_acquire_takes_back_what_has_expired(clock: Clock) -> None:
    leases = table(clock, slots=1)
    leases.grant(await leases.acquire(1), "a")
    clock.now += 10
    assert await leases.acquire(0) == 0


async def test_releasing(clock: Clock) -> None:
    leases = table(clock)
    lease = leases.grant(await leases.acquire(1), "a")
    assert leases.release(lease.slot, lease.lease_id) is lease
    assert leases.release(lease.slot, lease.lease_id) is None
    for slot, lease_id in ((lease.slot, "unknown"), (1, lease.lease_id), (77, lease.lease_id)):
        with pytest.raises(LeaseError) as caught:
            leases.release(slot, lease_id)
        assert caught.value.status == 409
    assert leases.free == 2


async def test_release_all_cancels_for_good(clock: Clock) -> None:
    leases = table(clock)
    held = [leases.grant(await leases.acquire(1), "x") for _ in range(2)]
    assert leases.release_all() == 2
    for lease in held:
        with pytest.raises(LeaseError) as caught:
            leases.release(lease.slot, lease.lease_id)
        assert (caught.value.status, caught.value.code) == (409, "stale_lease")
    assert [await leases.acquire(1), await leases.acquire(1)] == [0, 1]


async def test_waiters_are_served_in_order(clock: Clock) -> None:
    leases = table(clock, slots=1)
    lease = leases.grant(await leases.acquire(1), "a")
    order: list[int] = []

    async def wait(number: int) -> None:
        slot = await leases.acquire(5)
        order.append(number)
        leases.give_back(slot)

    waiting = [asyncio.create_task(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert leases.queued == 3
    leases.release(lease.slot, lease.lease_id)
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2]
    assert leases.free == 1


async def test_a_waiter_cancelled_while_being_handed_a_slot_passes_it_on(clock: Clock) -> None:
    leases = table(clock, slots=1)
    slot = await leases.acquire(1)
    gone = asyncio.create_task(leases.acquire(5))
    behind = asyncio.create_task(leases.acquire(5))
    await asyncio.sleep(0)
    leases.give_back(slot)  # handed to `gone`, which has not run yet
    gone.cancel()
    assert await asyncio.wait_for(behind, 1) == slot
    leases.give_back(slot)
    assert leases.free == 1


async def test_time_outs_and_full_queues(clock: Clock) -> None:
    leases = table(clock, slots=1, max_queue=1)
    slot = await leases.acquire(1)
    with pytest.raises(QueueTimeoutError, match="no environment slot"):
        await leases.acquire(0.01)
    waiting = asyncio.create_task(leases.acquire(5))
    await asyncio.sleep(0)
    with pytest.raises(QueueTimeoutError, match="too many"):
        await leases.acquire(5)
    leases.give_back(slot)
    assert await waiting == slot
    assert leases.queued == 0


@pytest.mark.parametrize("seed", range(5))
async def test_no_slot_is_ever_lost_or_given_twice(clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    leases = table(clock, slots=4, ttl_s=3.0, max_queue=1000)
    holding: set[int] = set()

    async def client() -> None:
        for _ in range(20):
            try:
                slot = await leases.acquire(rng.choice((0.0, 0.001, 0.05)))
            except QueueTimeoutError:
                continue
            assert slot not in holding
            holding.add(slot)
            lease = leases.grant(slot, "x")
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
            holding.discard(slot)
            leases.release(slot, lease.lease_id)

    tasks = [asyncio.create_task(client()) for _ in range(30)]
    for _ in range(40):
        await asyncio.sleep(0.001)
        rng.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [r for r in results if isinstance(r, Exception)]
    clock.now += 10  # leases of cancelled clients run out
    leases.sweep()
    assert (leases.free, leases.queued) == (4, 0)
