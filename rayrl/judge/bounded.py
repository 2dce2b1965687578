"""Run many awaitable pieces of work, a bounded number at a time, results as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


async def bounded(
    items: Iterable[ItemT], work: Callable[[ItemT], Awaitable[ResultT]], *, concurrency: int
) -> AsyncIterator[ResultT]:
    """Results of ``work`` over ``items``, at most ``concurrency`` at a time; items are taken lazily.

    ``work`` must not raise for what it can record; if it does, the others are cancelled and the error goes up.
    """

    async def one(item: ItemT) -> ResultT:
        return await work(item)

    pending: set[asyncio.Task[ResultT]] = set()
    source = iter(items)
    exhausted = False
    try:
        while pending or not exhausted:
            while not exhausted and len(pending) < max(1, concurrency):
                try:
                    pending.add(asyncio.create_task(one(next(source))))
                except StopIteration:
                    exhausted = True
            if not pending:
                break
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=10)
