"""How a job module becomes a command: arguments, ``--json``, and one place that turns failures into exit codes.

Every command prints for people; with ``--json`` it prints exactly one JSON object, errors included. Exit codes: 0 done;
1 a fault of rayrl itself; 2 bad input; 3 run directory conflict; 4 test-split guard; 5 conformance; 6 incomplete, can
be resumed; 7 the ledger did not close; 8 stalled; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jobs.output import print_json
from rayrl.errors import RayrlError, UserError


class UsageError(UserError):
    """The words after the command are wrong; ``usage`` says which there are."""

    def __init__(self, message: str, usage: str = "") -> None:
        super().__init__(message)
        self.usage = usage


class _Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, so that ``--json`` holds for wrong arguments too."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", self.format_usage())


def command_main(
    name: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    argv: list[str] | None,
    *,
    description: str | None = None,
) -> int:
    """Parse, run, and turn every failure into a message and an exit code."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a dotted path in a config may name a package of the working directory
    words = sys.argv[1:] if argv is None else argv
    as_json = "--json" in words  # known before parsing, which may fail
    try:
        parser = _Parser(prog=f"rayrl {name}", description=description)
        add_arguments(parser)
        _add_json(parser)
        code = run(_parse(parser, words))
        sys.stdout.flush()  # a reader that went away shows here, not after we said all is well
        return code
    except RayrlError as error:
        return fail(error, getattr(error, "exit_code", 1), as_json=as_json)
    except BrokenPipeError:
        # the reader went away (| head): nothing to say, and nothing more to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return fail(KeyboardInterrupt("interrupted"), 130, as_json=as_json)
    except Exception as error:
        if as_json:
            return fail(error, 1, as_json=True)
        traceback.print_exc()
        print(f"\nrayrl {name}: this is a fault of rayrl; the lines above say where", file=sys.stderr)
        return 1


def confidence_level(text: str) -> float:
    """Argument type of ``--level``: strictly between 0 and 1."""
    try:
        level = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write 0.95 for 95 %") from None
    if not 0 < level < 1:
        raise argparse.ArgumentTypeError(f"{text} must lie between 0 and 1; write 0.95 for 95 %")
    return level


def _add_json(parser: argparse.ArgumentParser) -> None:
    """``--json`` everywhere, on sub-subcommands too."""
    subparsers = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not subparsers:
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    for action in subparsers:
        for child in dict.fromkeys(action.choices.values()):
            _add_json(child)


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    try:
        return parser.parse_intermixed_args(argv)
    except TypeError:  # intermixed parsing does not know sub-subcommands
        return parser.parse_args(argv)


def fail(error: BaseException, code: int, *, as_json: bool) -> int:
    """Say what went wrong, as one JSON object on stdout or a line on stderr; returns ``code``."""
    if as_json:
        print_json({"error": {"type": type(error).__name__, "message": str(error), "exit_code": code}})
    else:
        print(f"{getattr(error, 'usage', '')}error: {error}", file=sys.stderr)
    return code
