"""Reading uploads in a child process with limits of memory, CPU and time, so that no file can take the server down.

The parent writes nothing but the path of the stored bytes and the options; the child answers with one JSON head and one
JSON line per row in a temporary file. A child that is killed, runs out of memory or time becomes a clear error.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rayrl.errors import DataError
from rayrl.workbench.readers.rows import Limits, Options, ReadError, Table

FORMATS = ("csv", "xlsx", "jsonl")
_GENTLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def guess_format(name: str, data: bytes) -> str:
    """Format by the bytes first, then by the name's ending."""
    if data[:4] == b"PK\x03\x04" or data[:4] == b"\xd0\xcf\x11\xe0":
        return "xlsx"
    ending = name.lower().rsplit(".", 1)[-1]
    if ending in ("jsonl", "ndjson", "json"):
        return "jsonl"
    if ending in FORMATS:
        return ending
    return "jsonl" if data.lstrip()[:1] == b"{" else "csv"


def read_file(path: Path, options: Options, limits: Limits, *, keep: int | None = None) -> Table:
    """Rows of a stored upload, read in a limited child process.

    Args:
        keep: rows to bring into this process; the rest is only checked and counted. ``None`` brings all.

    Raises:
        DataError: the file cannot be read, or not within the limits; the message says where and why.
    """
    size = path.stat().st_size
    if size > limits.max_bytes:
        raise DataError(f"the file has {size / 1e6:.1f} MB; at most {limits.max_bytes / 1e6:.0f} MB are accepted")
    if size == 0:
        raise DataError("the file is empty")
    order = json.dumps({"path": str(path), "options": asdict(options), "limits": asdict(limits)})
    with tempfile.TemporaryDirectory(prefix="rayrl-read-") as folder:
        out = Path(folder) / "rows"
        command = [sys.executable, "-m", "rayrl.workbench.readers.child", str(out)]
        environment = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "PYTHONPATH")}
        environment |= {**_GENTLE, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        try:
            done = subprocess.run(
                command, input=order.encode(), capture_output=True, timeout=limits.wall_s, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            raise DataError(f"the file could not be read within {limits.wall_s:g} s") from None
        if done.returncode == 3:
            raise DataError(done.stderr.decode("utf-8", "replace").strip())
        if done.returncode != 0:
            last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            what = f"signal {-done.returncode}" if done.returncode < 0 else last[0][:200]
            raise DataError(
                f"the file could not be read within {limits.memory / 1e6:.0f} MB of memory and {limits.cpu_s} s of "
                f"processor time ({what})"
            )
        return _load(out, keep)


def _load(path: Path, keep: int | None) -> Table:
    with path.open(encoding="utf-8") as lines:
        head: dict[str, Any] = json.loads(next(lines))
        total = head.pop("n_rows")
        table = Table(**head, rows=[], places=[], total=total)
        for line in itertools.islice(lines, keep):
            place, row = json.loads(line)
            table.places.append(place)
            table.rows.append(row)
    return table


def read_bytes(data: bytes, options: Options, limits: Limits) -> Table:
    """Read in this process; the child's own work, and what unit tests call.

    Raises:
        ReadError: see the readers.
    """
    from rayrl.workbench.readers.text import read_csv, read_jsonl

    if options.format == "xlsx":
        from rayrl.workbench.readers.xlsx import read_xlsx

        table = read_xlsx(data, options, limits)
    else:
        table = (read_jsonl if options.format == "jsonl" else read_csv)(data, options, limits)
    if not table.rows:
        first = [f"{row['place']}: {row['message']}" for row in table.bad[:1]]
        raise ReadError(first[0] if first else "the file has no data rows")
    return table


def main(target: str) -> int:
    """Entry point of the child."""
    order = json.loads(sys.stdin.buffer.read())
    limits = Limits(**order["limits"])
    options = Options(**order["options"])
    data = Path(order["path"]).read_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        table = read_bytes(data, options, limits)
        with Path(target).open("w", encoding="utf-8") as out:
            out.write(json.dumps(table.head(), ensure_ascii=False) + "\n")
            for place, row in zip(table.places, table.rows, strict=True):
                out.write(json.dumps([place, row], ensure_ascii=False) + "\n")
    except ReadError as error:
        print(error, file=sys.stderr)
        return 3
    except MemoryError:
        print("out of memory", file=sys.stderr)
        return 4
    except Exception as error:  # whatever else a file of strangers provokes: it is the file, not the limits
        print(f"the file is damaged ({type(error).__name__}: {str(error)[:200]})", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
