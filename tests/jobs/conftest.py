"""How the job tests speak to the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from jobs.cli import main


@pytest.fixture
def command(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., tuple[int, Any]]:
    """Runs ``rayrl WORDS --json``; returns the exit code and the one JSON object that must be all of stdout."""

    def run(*words: object) -> tuple[int, Any]:
        capfdbinary.readouterr()
        code = main([*map(str, words), "--json"])
        out = capfdbinary.readouterr().out
        return code, orjson.loads(out)

    return run


@pytest.fixture
def says(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., tuple[int, str, str]]:
    """Runs ``rayrl WORDS`` for people; returns exit code, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        capfdbinary.readouterr()
        code = main([*map(str, words)])
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return run
