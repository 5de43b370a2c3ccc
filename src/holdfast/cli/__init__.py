"""The ``holdfast`` command: one file per command, none of which loads torch until it must.

A HoldfastError becomes one line on stderr and its exit code, never a traceback; with
``--json`` it is also an object on stdout. Everything else that escapes is a bug and shows
where.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from holdfast.cli import demo, ls, report, show, verify
from holdfast.cli.output import print_json
from holdfast.errors import HoldfastError

COMMANDS = (ls, show, verify, report, demo)

EXIT_CODES = """\
exit codes:
   0  done, and nothing is wrong
   1  an error of no other kind
   2  the call cannot mean anything (UsageError, StateMismatch)
   3  the checkpoint, step or leaf is not there (NotFound)
   4  bytes are not what they must be (FormatError, ChecksumMismatch; verify: faults)
   5  storage refused or failed (StorageError, RootBusy)
   6  a save failed (SaveError)
   7  a restore failed (RestoreError)
   8  shared memory is missing or not ours (ArenaError)
   9  the keeper cannot be started or reached (KeeperError)
  10  a wait ended (DeadlineExceeded)
 130  interrupted
 141  whoever read the output went away
Take any other code for a failure too.
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="holdfast",
        description="Look at, check and try out checkpoints of training runs.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="store_true", help="print the version and stop")
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    whole = parser()
    try:
        args = whole.parse_args(argv)
    except SystemExit as stop:  # argparse has said what it has to say
        return int(stop.code or 0)
    if args.version:
        return _print_version()
    if args.command is None:
        whole.print_help(sys.stderr)
        return 2
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = args.run(args)
        sys.stdout.flush()  # a reader that has gone shows here, not at exit
        return code
    except HoldfastError as error:
        return _say(error, as_json=args.json)
    except KeyboardInterrupt:
        print("holdfast: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python would complain again when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _say(error: HoldfastError, *, as_json: bool) -> int:
    name = type(error).__name__
    print(f"holdfast: {name}: {error}", file=sys.stderr)
    if as_json:
        print_json({"error": {"class": name, "message": str(error), "fields": error.fields}})
    return error.exit_code


def _print_version() -> int:
    import holdfast

    print(f"holdfast {holdfast.__version__}")
    return 0
