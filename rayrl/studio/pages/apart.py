"""Long computing in a process of its own, so that no page waits for the interpreter's lock.

The process has a low priority: pages come first where cores are few. It ends with the studio.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import BoundedSemaphore
from typing import TypeVar

from rayrl.errors import DataError

T = TypeVar("T")
NICE = 10
_PLACES = BoundedSemaphore(max(2, os.cpu_count() or 2))


def apart(work: Callable[..., T], *arguments: object) -> T:
    """``work(*arguments)`` in a fresh process; both must pickle. At most one process per core works at a time.

    Raises:
        DataError: the process ended without an answer (killed, out of memory).
        Exception: what ``work`` raised.
    """
    context = get_context("spawn")
    with _PLACES:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sending, work, arguments), daemon=True)
        process.start()
        if process.pid is not None:
            with suppress(OSError):  # from the first moment on: its imports alone would keep a core busy
                os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        sending.close()  # else the end of the process would not be seen here
        try:
            done, value = receiving.recv()
        except EOFError:
            process.join()
            raise DataError(
                f"the computation ended early (exit code {process.exitcode}); load the page again"
            ) from None
        finally:
            receiving.close()
        process.join()
    if not done:
        raise value
    found: T = value
    return found


def _child(sending: Connection, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches everybody: this one ends without a word
    try:
        answer: tuple[bool, object] = (True, work(*arguments))
    except Exception as error:  # whatever it is, the page says it
        answer = (False, error)
    with suppress(BrokenPipeError):  # the studio is gone
        sending.send(answer)
    sending.close()
