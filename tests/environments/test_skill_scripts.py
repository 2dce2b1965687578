"""A Skill's scripts run in a child with limits, an empty environment and a copy of the Skill."""

import os
import time

import psutil
import pytest

from rayrl.environments import skill_scripts
from rayrl.environments.skill_case_tools import build_tools
from rayrl.skills.snapshot import take_folder
from tests.workbench.skills import md, write

FILES = {
    "SKILL.md": md("s"),
    "data.txt": "daten\n",
    "scripts/show.py": "import sys, os\nprint(sys.argv[1:], sys.stdin.read(), open('data.txt').read(), sorted(os.environ))\n",
    "scripts/fail.sh": "echo no; exit 3\n",
    "scripts/write.py": "open('data.txt', 'w').write('other'); open('new', 'w').write('x')\n",
    "scripts/big.py": "x = bytearray(2_000_000_000)\n",
    "scripts/fill.py": "open('f', 'wb').write(b'x' * 50_000_000)\n",
    "scripts/sleep.sh": "sleep 312.75 & sleep 312.75\n",
    "scripts/talk.py": "print('x' * 100_000)\n",
    "scripts/net.py": "import socket\nprint([i[1] for i in socket.if_nameindex()])\ns = socket.socket()\ns.settimeout(2)\n"
    "s.connect(('127.0.0.1', int(__import__('sys').argv[1])))\nprint('connected')\n",
    "tool": ("run", "#!/bin/sh\necho ran\n"),
}


@pytest.fixture(scope="module")
def skill(tmp_path_factory):
    return take_folder(write(tmp_path_factory.mktemp("place") / "s", FILES))


async def run(skill, path, **more):
    (tool,) = build_tools(["rayrl.environments.skill_scripts:RunScript"]).values()
    return await tool.run(skill, {"path": path, **more})


async def test_scripts_get_arguments_input_and_the_skill_but_no_environment(skill, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    answer = await run(skill, "scripts/show.py", arguments=["a b", "$HOME"], input="words")
    assert answer.valid and answer.log["exit_code"] == 0
    assert answer.text == ("[exit code 0]\n['a b', '$HOME'] words daten\n ['HOME', 'LANG', 'PATH', 'TMPDIR']\n")
    assert (await run(skill, "tool")).text == "[exit code 0]\nran\n"


async def test_failure_is_an_answer(skill):
    answer = await run(skill, "scripts/fail.sh")
    assert not answer.valid and answer.reason == "script_failed" and answer.text == "[exit code 3]\nno\n"


@pytest.mark.parametrize("path", ["data.txt", "SKILL.md", "../x.sh", "/bin/sh", "", "scripts"])
async def test_only_scripts_of_the_skill_run(skill, path):
    answer = await run(skill, path)
    assert not answer.valid and answer.reason == "no_such_script"


async def test_what_a_script_writes_is_gone(skill):
    assert (await run(skill, "scripts/write.py")).valid
    assert "daten" in (await run(skill, "scripts/show.py")).text


@pytest.mark.parametrize(("path", "text"), [("scripts/big.py", "MemoryError"), ("scripts/fill.py", "File too large")])
async def test_memory_and_files_are_bounded(skill, path, text):
    answer = await run(skill, path)
    assert not answer.valid and (text in answer.text or "signal" in answer.text)


async def test_output_is_cut(skill):
    assert len((await run(skill, "scripts/talk.py")).text) < skill_scripts.OUTPUT + 100


async def test_time_is_bounded_and_no_child_is_left(skill, monkeypatch):
    monkeypatch.setattr(skill_scripts, "WALL_S", 0.5)
    before = time.monotonic()
    answer = await run(skill, "scripts/sleep.sh")
    assert answer.log["timed_out"] and "limit of 0.5 s" in answer.text and time.monotonic() - before < 10
    left = [p for p in psutil.Process().children(recursive=True) if "312.75" in p.cmdline()]
    assert not left and not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "312.75"]]


async def test_network_is_apart_where_the_kernel_allows_it(skill):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = await run(skill, "scripts/net.py", arguments=[str(server.getsockname()[1])])
    if answer.log["network"] == "none":
        assert "connected" not in answer.text and "['lo']" in answer.text
    else:
        assert "connected" in answer.text and os.name == "posix"
