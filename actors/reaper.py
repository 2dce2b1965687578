"""Ends what a local Ray leaves behind when its driver is killed by force. Runs in a process of its own.

Ray's own servers die with their driver, and workers follow within seconds; but the agents that Ray starts beside them
first try for a minute to report the death to a control store that is dead as well. This process notices the end of the
driver (its standard input closes, however the driver ends), gives Ray's processes a moment to go, and kills the rest.

Invariants: only children of the driver that run programs out of the Ray package, their descendants, and programs out
of that package that carry the driver's mark are touched, each known by process id *and* start time; the reaper outlives
the driver by seconds only. It does not import Ray.
"""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

POLL_S = (0.5, 2.0)
"""Between two looks at the family: while Ray starts, and later."""
STARTING_S = 30.0
GRACE_S = 1.5

GIVE_UP_S = 10.0

MARK_ENV = "RAYRL_RAY_OF"
"""In the environment of everything that a local Ray of ours starts: whose it is."""
_MARK = f"{os.getpid()}-{secrets.token_hex(8)}"
_running: list[subprocess.Popen[bytes]] = []
"""Keeps the pipes open as long as this process lives."""


@contextmanager
def watched_by_reaper(package: Path) -> Iterator[None]:
    """Start Ray inside this block: a process that outlives this one briefly then watches over what it starts.

    Args:
        package: folder of the installed Ray package; children that run something in it are Ray's.
    """
    if not any(reaper.poll() is None for reaper in _running):  # else it sees the next Ray of this process too
        # as a file, not a module: that needs no import path; in a session of its own: Ctrl-C is for the driver
        command = [sys.executable, str(Path(__file__).resolve()), str(package), _MARK]
        _running.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
    os.environ[MARK_ENV] = _MARK
    try:
        yield
    finally:
        del os.environ[MARK_ENV]


def main(package: Path, mark: str) -> None:
    """Wait for the end of the parent, then kill what is left of its Ray processes."""
    parent = os.getppid()
    family: dict[int, psutil.Process] = {}
    born = time.monotonic()
    while os.getppid() == parent:
        for child in ray_children(parent, package):
            family.setdefault(child.pid, child)
        _grow(family)
        readable, _, _ = select.select([0], [], [], POLL_S[time.monotonic() - born > STARTING_S])
        if readable and not os.read(0, 4096):
            break
    patient_until = time.monotonic() + GRACE_S
    give_up_at = patient_until + GIVE_UP_S
    while time.monotonic() < give_up_at:
        for orphan in _marked(package, mark):
            family.setdefault(orphan.pid, orphan)
        _grow(family)
        if time.monotonic() >= patient_until:
            if not family:
                return
            end(list(family.values()))
        time.sleep(POLL_S[0])


def _marked(package: Path, mark: str) -> list[psutil.Process]:
    """Processes out of the package that carry the mark: agents that were started in the driver's last moment.

    (A process that has set its title may have overwritten its environment; by then it is known by descent.)
    """
    found = []
    for process in psutil.process_iter():
        try:
            inside = any(f"{package}{os.sep}" in word for word in process.cmdline())
            if inside and process.environ().get(MARK_ENV) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def ray_children(parent: int, package: Path) -> list[psutil.Process]:
    """Children of a process that run programs out of the Ray package."""
    found = []
    try:
        for child in psutil.Process(parent).children():
            # something inside the package: the reaper itself has the package as an argument
            if child.pid != os.getpid() and any(f"{package}{os.sep}" in word for word in child.cmdline()):
                found.append(child)
    except psutil.Error:
        return found
    return found


def end(processes: list[psutil.Process]) -> None:
    """Kill those that are still the processes they were."""
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            continue


def _grow(family: dict[int, psutil.Process]) -> None:
    """Add new descendants, drop the dead; one pass over the machine's processes, whatever the family's size."""
    children: dict[int, list[psutil.Process]] = {}
    alive: set[int] = set()
    for process in psutil.process_iter(["ppid", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            alive.add(process.pid)
            children.setdefault(process.info["ppid"], []).append(process)
    for pid in [pid for pid, process in family.items() if pid not in alive or not process.is_running()]:
        del family[pid]
    waiting = list(family)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child.pid not in family:
                family[child.pid] = child
                waiting.append(child.pid)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
