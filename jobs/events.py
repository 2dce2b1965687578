"""``events.jsonl``: what happened around the episodes (retries, lost workers, failed releases, throttling)."""

from __future__ import annotations

import time
from pathlib import Path

import orjson

from rayrl.schemas import JsonDict


class EventLog:
    """Appends events; flushed, not fsynced: they explain a run, they are not its result."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self.counts: dict[str, int] = {}

    def write(self, event: JsonDict) -> None:
        """Append one event."""
        kind = str(event.get("event", "event"))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._file.write(orjson.dumps({"time": time.time(), **event}, default=str) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
