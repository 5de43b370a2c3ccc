"""Runs the ``holdfast`` command: one file per command, none of which loads torch until it must.

A HoldfastError becomes one line on stderr and its exit code, never a traceback; with
``--json`` it is also an object on stdout. Everything else that escapes is a bug: it shows where,
and has an exit code of its own.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from holdfast.cli.command import Parser, print_json, say
from holdfast.errors import HoldfastError, StorageError

#: In the order of the help. Each is a module with ``add_to``; only the module of the called command
#: is loaded.
COMMANDS = (
    "ls",
    "show",
    "diff",
    "dump",
    "verify",
    "pin",
    "prune",
    "unlock",
    "copy",
    "sync",
    "repair",
    "export",
    "import",
    "doctor",
    "report",
    "top",
    "trace",
    "events",
    "demo",
    "completion",
)

#: Where the module of a command cannot be called as the command is.
MODULES = {"import": "import_command"}

#: The exit code of a program error (sysexits.h); a 1 would read as "they differ".
BUG = 70

#: Why a file or a terminal takes no more output; what storage meets is a StorageError before.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

EXIT_CODES = """\
exit codes:
   0  done, and nothing is wrong; diff: identical
   1  diff: they differ; demo: a promise was not kept; else an error of no other kind
   2  the call cannot mean anything (UsageError, StateMismatch)
   3  the checkpoint, step or leaf is not there (NotFound)
   4  bytes are not what they must be (FormatError, ChecksumMismatch; verify: faults)
   5  storage refused or failed (StorageError, RootBusy)
   6  a save failed (SaveError)
   7  a restore failed (RestoreError)
   8  shared memory is missing or not ours (ArenaError)
   9  the keeper cannot be started or reached (KeeperError)
  10  a wait ended (DeadlineExceeded)
  11  doctor: something is bad
  12  another host's keeper did not give what it was asked for (PeerError)
  70  a fault in holdfast itself; the trace says where
 130  interrupted
 141  whoever read the output went away
Take any other code for a failure too.
"""


def parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Builds the command line, with the commands ``names``."""
    root = Parser(
        prog="holdfast",
        description="Look at, check and try out checkpoints of training runs.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="store_true", help="print the version and stop")
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    for name in names:
        importlib.import_module(f"holdfast.cli.{MODULES.get(name, name)}").add_to(commands)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    _never_fail_to_print()
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        return _say_unknown(name)
    whole = parser(COMMANDS if name is None else (name,))
    try:
        args, unknown = whole.parse_known_args(words)
        if unknown:
            command = getattr(args, "parser", whole)
            command.error(_unknown_text(command, unknown))
    except SystemExit as stop:  # argparse has said what it has to say
        return int(stop.code or 0)
    if args.version:
        return _print_version()
    if args.command is None:
        whole.print_help(sys.stderr)
        return 2
    return _run(args)


def _never_fail_to_print() -> None:
    """Makes printing never fail on a character that the terminal's encoding lacks, nor where a
    stream was closed before.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a caller may have put another there
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _say_unknown(name: str) -> int:
    hint = _near(name, COMMANDS) or "`holdfast --help` lists the commands"
    print("usage: holdfast COMMAND ...", file=sys.stderr)
    say(f"holdfast: no command {name!r}: {hint}")
    return 2


def _unknown_text(command: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Returns the error text for arguments that ``command`` does not know."""
    options = [text for action in command._actions for text in action.option_strings]
    hints = [_near(word.partition("=")[0], options) for word in words if word.startswith("--")]
    said = f"{' '.join(words)}: not an option or argument of this command"
    return "; ".join([said, *filter(None, hints)])


def _near(word: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {found[0]}?" if found else ""


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = args.run(args)
        sys.stdout.flush()  # a reader that has gone shows here, not at exit
        return code
    except HoldfastError as error:
        return _say(error, as_json=args.json)
    except KeyboardInterrupt:
        say("holdfast: interrupted")
        return 130
    except BrokenPipeError:
        _give_up_output()
        return 141
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM and error.filename is None:
            _give_up_output()
            say(f"holdfast: the output could not be written: {error.strerror}")
            return StorageError.exit_code
        say(traceback.format_exc().rstrip())
        say("holdfast: this is a fault in holdfast; please report it")
        return BUG


def _give_up_output() -> None:
    """Python would report the error again when it flushes stdout at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(error: HoldfastError, *, as_json: bool) -> int:
    name = type(error).__name__
    say(f"holdfast: {name}: {error}")
    if as_json:
        print_json({"error": {"class": name, "message": str(error), "fields": error.fields}})
    return error.exit_code


def _print_version() -> int:
    import holdfast

    print(f"holdfast {holdfast.__version__}")
    return 0
