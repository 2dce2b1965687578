"""The backend without Ray: one worker on an event loop in a thread of this process. Same interface as RayBackend."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rayrl.errors import RayrlError
from rayrl.worker import Attempt, DrainReport, RolloutWorker, WorkerSpec

T = TypeVar("T")
NAME = "inprocess-1"
STOP_TIMEOUT_S = 30.0


class InProcessBackend:
    """For small runs, debugging with breakpoints, and tests of the pool that need no cluster."""

    def __init__(self, spec: WorkerSpec, *, worker_timeout_s: float = 60.0) -> None:
        self._spec = spec
        self._timeout = worker_timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-worker", daemon=True)
        self._worker: RolloutWorker | None = None
        self._drain: concurrent.futures.Future[DrainReport] | None = None

    def start(self, n: int) -> list[str]:
        """Start the one worker there is (``n`` is ignored: one event loop serves all episodes)."""
        if not self._thread.is_alive():
            self._thread.start()

        async def build() -> RolloutWorker:
            worker = RolloutWorker(self._spec)
            try:
                await worker.start()
            except BaseException:
                await worker.stop()
                raise
            return worker

        self._worker = self._call(build())
        return [NAME]

    def replace(self, worker: str) -> str:
        """There is nothing to replace: a hung event loop in this process cannot be killed."""
        raise RayrlError("the in-process worker stopped answering; use execution.mode=ray, which can replace workers")

    def submit(self, worker: str, attempts: list[Attempt]) -> None:
        """See RayBackend."""
        self._call(self._ready().submit(attempts))

    def arm(self, worker: str) -> None:
        """See RayBackend."""
        if self._drain is None:
            self._drain = asyncio.run_coroutine_threadsafe(self._ready().drain(1.0), self._loop)

    def wait(self, timeout_s: float) -> list[tuple[str, DrainReport | str]]:
        """See RayBackend."""
        if self._drain is None:
            return []
        try:
            report = self._drain.result(timeout=timeout_s)
        except concurrent.futures.TimeoutError:
            return []
        self._drain = None
        return [(NAME, report)]

    def cancel(self, worker: str, episode_ids: list[str] | None = None) -> None:
        """See RayBackend. Does not wait: the loop may hang in the very code that is to be cancelled."""
        asyncio.run_coroutine_threadsafe(self._ready().cancel(episode_ids), self._loop)

    def stop(self, grace_s: float = 25.0) -> list[tuple[str, DrainReport | str]]:
        """See RayBackend. Idempotent.

        As there, trouble while closing is no trouble of the run, whose results are written already. A loop that hangs
        in blocking code is left behind: its thread ends with the process.
        """
        worker, self._worker = self._worker, None
        out: list[tuple[str, DrainReport | str]] = []
        if worker is not None:
            try:
                out.append(
                    (NAME, self._call(worker.stop(), timeout_s=min(self._timeout, STOP_TIMEOUT_S, max(grace_s, 0.1))))
                )
            except Exception as error:
                out.append((NAME, f"{type(error).__name__}: {error}"))
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=min(5.0, max(grace_s, 0.1)))
        if not self._thread.is_alive() and not self._loop.is_closed():
            self._loop.close()
        return out

    def pid(self, worker: str) -> int:
        """This process."""
        return os.getpid()

    def _ready(self) -> RolloutWorker:
        if self._worker is None:
            raise RayrlError("the worker was used before start()")
        return self._worker

    def _call(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        limit = self._timeout if timeout_s is None else timeout_s
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout=limit)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise  # the call itself ran into a time-out
            future.cancel()
            raise RayrlError(
                f"the in-process worker did not answer for {limit:g} s: an environment, model or skill provider "
                "blocks its event loop (use await, or execution.mode=ray, which can replace workers)"
            ) from None
