"""How a job module becomes a command: arguments, ``--json``, and one place that turns failures into exit codes.

Every command prints for people; with ``--json`` it prints exactly one JSON object, errors included. Exit codes: 0 done;
1 a fault of rayrl itself; 2 bad input; 3 run directory conflict; 4 test-split guard; 5 conformance; 6 incomplete, can
be resumed; 7 the ledger did not close; 8 stalled; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable

from jobs.output import print_json
from rayrl.errors import RayrlError, UserError


def command_main(
    name: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    argv: list[str] | None,
    *,
    description: str | None = None,
) -> int:
    """Parse, run, and turn every failure into a message and an exit code."""
    parser = argparse.ArgumentParser(prog=f"rayrl {name}", description=description)
    add_arguments(parser)
    _add_json(parser)
    args = _parse(parser, sys.argv[1:] if argv is None else argv)
    try:
        return run(args)
    except UserError as error:
        return _fail(args, error, error.exit_code)
    except RayrlError as error:
        return _fail(args, error, getattr(error, "exit_code", 1))
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away (| head); nothing to say
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if getattr(args, "json", False):
            return _fail(args, error, 1)
        traceback.print_exc()
        print(f"\nrayrl {name}: this is a fault of rayrl; the lines above say where", file=sys.stderr)
        return 1


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


def _fail(args: argparse.Namespace, error: BaseException, code: int) -> int:
    if getattr(args, "json", False):
        print_json({"error": {"type": type(error).__name__, "message": str(error), "exit_code": code}})
    else:
        print(f"error: {error}", file=sys.stderr)
    return code
