"""Keeps a driver at work for every running experiment: the recovery after any kind of death.

The supervisor looks at the store and nothing else. A running experiment without a live driver gets one: after a start,
a resume, a retry, and when the server comes back from ``kill -9``. Drivers are processes of their own, so that a batch
takes no time from the interactive side and either may die without the other.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sqlalchemy import select

from rayrl.workbench import tables
from rayrl.workbench.claims import owner_alive
from rayrl.workbench.store import Store

LOG = logging.getLogger(__name__)
_E = tables.experiments
NICE = 10


class DriverHandle(Protocol):
    """A started driver."""

    def alive(self) -> bool: ...  # noqa: D102
    def stop(self, timeout_s: float) -> None: ...  # noqa: D102


class ProcessDriver:
    """A driver process at low priority: ``command`` followed by the experiment's id."""

    def __init__(self, command: list[str], experiment_id: str, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                ["nice", "-n", str(NICE), *command, experiment_id],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def stop(self, timeout_s: float) -> None:
        """Ask it to stop after its running cases, then end it."""
        if self.alive():
            self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)


class Supervisor:
    """See the module docstring.

    Args:
        store: the store to watch.
        launch: starts a driver for an experiment.
        poll_s: how often it looks when nobody calls :meth:`wake`.
    """

    def __init__(self, store: Store, launch: Callable[[str], DriverHandle], *, poll_s: float = 2.0) -> None:
        self.store = store
        self.launch = launch
        self.poll_s = poll_s
        self._handles: dict[str, DriverHandle] = {}
        self._deaths: dict[str, list[float]] = {}
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._loop, name="supervisor", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop watching, and let drivers of this supervisor wind down; their experiments stay running in the store."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        for handle in self._handles.values():
            handle.stop(timeout_s)

    def look(self) -> list[str]:
        """Start what is missing; returns the experiments that got a driver."""
        with self.store.read() as connection:
            query = select(_E.c.id, _E.c.driver, _E.c.driver_until).where(_E.c.state == "running")
            rows = connection.execute(query).all()
        for experiment_id in [key for key, handle in self._handles.items() if not handle.alive()]:
            del self._handles[experiment_id]  # asking has reaped its process
        started = []
        for row in rows:
            handle = self._handles.get(row.id)
            if handle is not None and handle.alive():
                continue
            if row.driver and owner_alive(row.driver) is not False and (row.driver_until or 0) > time.time():
                continue  # at work in another process, perhaps one that outlived a server
            recent = [at for at in self._deaths.get(row.id, []) if time.time() - at < 60]
            if len(recent) >= 10:
                continue  # it dies at once, again and again; its log says why
            self._deaths[row.id] = [*recent, time.time()]
            LOG.info("driver for %s", row.id)
            self._handles[row.id] = self.launch(row.id)
            started.append(row.id)
        return started

    def _loop(self) -> None:
        while not self._stop:
            try:
                self.look()
            except Exception:
                LOG.exception("the supervisor goes on after an error")
            self._wake.wait(self.poll_s)
            self._wake.clear()
