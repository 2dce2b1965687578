"""``run_script``: a Skill's own scripts as a tool, in a restricted child process.

Off unless an experiment names it (``rayrl.environments.skill_scripts:RunScript``), and never over HTTP: a Skill's
scripts are somebody's code. What the child gets:

* a private copy of the Skill that is thrown away afterwards, so the snapshot stays what it is;
* an empty environment (no keys, no proxies), no standard input beyond the given text;
* limits of processor time, wall time, memory, file size and output; the whole process group ends with it;
* no network where the kernel lets an ordinary user have a network of its own; the log says whether that worked.

It is no sandbox against a determined attacker: files the user may read, the script may read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rayrl.environments.skill_case_tools import Answer
from rayrl.errors import did_you_mean
from rayrl.schemas import JsonDict
from rayrl.skills.snapshot import LINK, RUN, Taken

CPU_S, WALL_S = 10, 30.0
MEMORY = 512 * 1024 * 1024
FILE_SIZE = 16 * 1024 * 1024
OUTPUT = 16_000
"""Characters of output the model sees."""
LAUNCHER = """
import ctypes, os, resource, sys
cpu, memory, size, note, *command = sys.argv[1:]
apart = ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x40000000) == 0 if sys.platform == "linux" else False
os.write(int(note), b"1" if apart else b"0")
os.close(int(note))
for limit, value in ((resource.RLIMIT_CPU, int(cpu)), (resource.RLIMIT_AS, int(memory)),
                     (resource.RLIMIT_FSIZE, int(size)), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (value, value))
os.execv(command[0], command)
"""
"""Runs in the child: a network of its own (CLONE_NEWUSER, CLONE_NEWNET), the limits, then the script."""


class RunScript:
    """See the module docstring."""

    name = "run_script"
    description = "Run a script of the Skill; answers with its exit code and output."
    parameters: JsonDict = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Path as list_files gives it."},
            "arguments": {"type": "array", "items": {"type": "string"}, "maxItems": 20},
            "input": {"type": "string", "description": "Text for its standard input."},
        },
        "required": ["path"],
        "additionalProperties": False,
    }

    async def run(self, skill: Taken, arguments: JsonDict) -> Answer:
        """See :class:`rayrl.environments.skill_case_tools.SkillTool`."""
        path = str(arguments.get("path", ""))
        entry = next((e for e in skill.manifest.files if e.path == path), None)
        scripts = [e.path for e in skill.manifest.files if _command(e.path, e.mode) is not None]
        if entry is None or path not in scripts:
            known = f" Scripts: {', '.join(scripts[:40]) or 'none'}." if entry is not None or not scripts else ""
            return Answer(f"There is no script {path!r}{did_you_mean(path, scripts)}.{known}", False, "no_such_script")
        given = arguments.get("arguments")
        words = [str(word)[:4000] for word in given[:20]] if isinstance(given, list) else []
        if any("\0" in word for word in words):
            return Answer("An argument holds a NUL character.", False, "bad_argument")
        text = str(arguments.get("input") or "")[:1_000_000]
        return await asyncio.to_thread(_run, skill, path, entry.mode, words, text)


def _command(path: str, mode: str) -> list[str] | None:
    """How a file is run, ``None`` for one that is no script."""
    if mode == LINK:
        return None
    if path.endswith(".py"):
        return [sys.executable, "-I"]
    if path.endswith(".sh"):
        return ["/bin/sh"]
    return [] if mode == RUN else None


def _run(skill: Taken, path: str, mode: str, words: list[str], text: str) -> Answer:
    with tempfile.TemporaryDirectory(prefix="rayrl-script-") as name:
        folder, out = Path(name) / "skill", Path(name) / "out"
        _copy(skill, folder)
        target = folder / path
        command = [*(_command(path, mode) or []), str(target), *words]
        read, note = os.pipe()
        limits = [str(CPU_S), str(MEMORY), str(FILE_SIZE), str(note)]
        try:
            with out.open("wb") as sink:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", LAUNCHER, *limits, *command],
                    stdin=subprocess.PIPE,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": name, "TMPDIR": name},
                    pass_fds=[note],
                    start_new_session=True,
                )
            os.close(note)
            late = _wait(process, text)
            apart = os.read(read, 1) == b"1"
        finally:
            os.close(read)
        with out.open("rb") as written:
            shown = written.read(OUTPUT * 4).decode("utf-8", "replace")[:OUTPUT]
    code = process.returncode
    end = f"ended by the limit of {WALL_S:g} s" if late else f"exit code {code}" if code >= 0 else f"signal {-code}"
    log = {"script": path, "exit_code": code, "network": "none" if apart else "open", "timed_out": late}
    return Answer(f"[{end}]\n{shown}", code == 0, "executed" if code == 0 else "script_failed", log)


def _wait(process: subprocess.Popen[bytes], text: str) -> bool:
    """Feed and wait; whether time ran out. Nothing of its group is left."""
    late = False
    try:
        process.communicate(text.encode("utf-8", "replace"), timeout=WALL_S)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return late


def _copy(skill: Taken, folder: Path) -> None:
    for entry in skill.manifest.files:
        place = folder / entry.path
        place.parent.mkdir(parents=True, exist_ok=True)
        data = skill.files[entry.path]
        if entry.mode == LINK:
            place.symlink_to(os.fsdecode(data))
            continue
        place.write_bytes(data)
        place.chmod(0o755 if entry.mode == RUN else 0o644)
