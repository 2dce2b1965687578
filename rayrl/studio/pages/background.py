"""Costly figures: computed once per state of what they are about, in the background where that takes long.

A page asks with a stamp that changes when the figures would. It gets the value; or, where a computation takes longer
than the page may, the last one there was; or ``None``, and then shows that figures are being computed and asks again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import Any


@dataclass
class _Entry:
    stamp: Hashable
    future: Future[Any]
    before: Any = None


class Background:
    """See the module docstring. Thread-safe."""

    def __init__(self, workers: int = 2, kept: int = 200) -> None:
        self._kept = kept
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="figures")
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, stamp: Hashable, make: Callable[[], Any], *, wait_s: float) -> Any:
        """The value for this stamp if it is there within ``wait_s``, else an older one, else ``None``.

        Raises:
            Exception: what ``make`` raised; the next call tries again.
        """
        with self._lock:
            entry = self._entries.get(key)
            # one computation at a time per key: while figures are in the making, a newer stamp has to wait
            if entry is None or (entry.stamp != stamp and entry.future.done()):
                before = entry.future.result() if entry is not None and entry.future.exception() is None else None
                entry = self._entries[key] = _Entry(stamp, self._pool.submit(make), before)
            self._entries.move_to_end(key)
            while len(self._entries) > self._kept:
                self._entries.popitem(last=False)
        try:
            return entry.future.result(wait_s)
        except NotYet:
            return entry.before
        except BaseException:
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            raise


BACKGROUND = Background()
AWAY = Background(workers=4)
"""For what processes of their own compute: these threads only wait for them, and nothing quick waits behind them."""
