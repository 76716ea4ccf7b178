"""The command line: `edgeyolo detect | info | bench | doctor | selfcheck | demo | finetune | export | publish`.

Exit codes: 0 fine; 1 something failed (a file, a check, the model) or the run was interrupted; 2 wrong usage.
An error is one line on stderr, `edgeyolo: error: ...`; `--debug` adds the traceback.
This package imports nothing heavy: each command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from ..errors import EdgeYoloError, InvalidInput
from . import bench, demo, detect, doctor, export, finetune, info, publish, selfcheck
from .options import UsageError
from .output import complain, naming_stream, say

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["main"]

OK, FAILED, WRONG_USAGE = 0, 1, 2

EPILOG = """\
exit codes: 0 fine; 1 something failed (a file, a check) or the run was
interrupted; 2 wrong usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; prints errors itself and never raises for them."""
    replace_closed_streams()
    debug = False
    try:
        with terminate_as_interrupt():
            parser = build_parser()
            try:
                args = parser.parse_args(argv)
                debug = args.debug
                code = args.run(args) if hasattr(args, "run") else show_help(parser)
            except SystemExit as stop:  # argparse has printed the help, the version, or the error
                code = stop.code if isinstance(stop.code, int) else WRONG_USAGE
            with naming_stream(sys.stdout):
                sys.stdout.flush()
        return int(code)
    except (UsageError, InvalidInput) as error:
        return report(error, WRONG_USAGE, debug)
    except BrokenPipeError:
        return FAILED  # the reader (`| head`) has what it wanted
    except (EdgeYoloError, OSError) as error:
        return report(error, FAILED, debug)
    except KeyboardInterrupt as error:
        return report(error, FAILED, debug, "interrupted; what was finished until then is kept")
    except Exception as error:
        hint = "" if debug else " (unexpected: run again with --debug and report the traceback)"
        return report(error, FAILED, debug, f"{type(error).__name__}: {error}{hint}")
    finally:
        settle(sys.stdout)
        settle(sys.stderr)


class Parser(argparse.ArgumentParser):
    """argparse with the error in one line, instead of after a page of usage."""

    hint = ""  # what to try where an argument is missing
    of_command = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """What a command does not know is its own error, and names its own help."""
        known, rest = super().parse_known_args(args, namespace)
        if rest and self.of_command:
            near = difflib.get_close_matches(rest[0].partition("=")[0], self._option_string_actions, 1)
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f"; did you mean {near[0]}?" if near else ""))
        return known, rest

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        with naming_stream(sys.stdout):  # argparse would keep quiet about a full disk
            (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        hint = f"; {self.hint}" if self.hint and "required" in message else ""
        complain(f"{message}{hint} (see `{self.prog} --help`)")
        raise SystemExit(WRONG_USAGE)


class ShowVersion(argparse.Action):
    """Reads the version only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from .. import __version__

        say(f"edgeyolo {__version__}")
        parser.exit(OK)


def build_parser() -> Parser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="edgeyolo",
        description="YOLO models in camera applications: detect, look into models, time them.",
        epilog=EPILOG,
        formatter_class=formatter,
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in (detect, info, bench, doctor, selfcheck, demo, finetune, export, publish):
        name = module.__name__.rpartition(".")[2]
        summary, _, details = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(name, help=summary.rstrip("."), description=summary, formatter_class=formatter)
        command.epilog = details.strip() or None
        command.hint, command.of_command = getattr(module, "HINT", ""), True
        # SUPPRESS: the copy after the command must not undo `edgeyolo --debug COMMAND`.
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def show_help(parser: Parser) -> int:
    """A bare `edgeyolo`."""
    parser.print_help(sys.stderr)
    return WRONG_USAGE


def report(error: BaseException, code: int, debug: bool, message: str | None = None) -> int:
    if debug:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exception(error)
    complain(message or describe(error))
    return code


def describe(error: BaseException) -> str:
    """The error's own words in one line; the file's name first where the operating system raised it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM (`kill`, `systemctl stop`, `timeout`) ends a run as Ctrl-C does: files are finished first."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def replace_closed_streams() -> None:
    """Python has None for a stream that was closed by the caller (`>&-`); what is written there is lost, no error."""
    # In the order of their numbers, so that each takes its own and no file of ours becomes the new stdout of a library.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def settle(stream: TextIO) -> None:
    """Python flushes a stream once more at exit; where that cannot work (closed pipe, full disk), let it go nowhere."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # no file descriptor: nothing will be flushed
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
