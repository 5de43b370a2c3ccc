"""Declares commands, prints JSON and errors, and asks before a removal: all without tables.

It is a file of its own so that completion, which runs at every press of a key, loads nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from holdfast.errors import UsageError
from holdfast.observe.text import printable, printable_lines

Commands = argparse._SubParsersAction  # argparse has no public name for what add_subparsers gives


class Parser(argparse.ArgumentParser):
    """A parser whose errors quote arguments, which a shell may have taken from names of files."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Say it in a form that is fit for a terminal."""
        super().exit(status, message and f"{printable_lines(message.rstrip())}\n")


def say(text: str) -> None:
    """A message on stderr; of its lines only the first begins at the margin."""
    print(printable_lines(text), file=sys.stderr)


def add_command(
    commands: Commands[argparse.ArgumentParser], name: str, summary: str, *examples: str
) -> argparse.ArgumentParser:
    """A sub-command with ``--json`` and its examples at the end of its help."""
    title = "example" if len(examples) == 1 else "examples"
    lines = "".join(f"\n  {example}" for example in examples)
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"{title}:{lines}\n\n`holdfast --help` lists the exit codes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead")
    command.set_defaults(parser=command)
    return command


def print_json(document: dict[str, Any]) -> None:
    """One JSON document that every reader of JSON takes, in ASCII: no character of it acts."""
    print(json.dumps(in_json(document), indent=2, allow_nan=False))


def in_json(value: Any) -> Any:
    """``value`` in JSON's own types: "nan", "inf" and what else it has no form for as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): in_json(x) for key, x in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [in_json(item) for item in value]
    return str(value)


def confirmed(question: str, *, yes: bool, as_json: bool) -> bool:
    """Whether to go on: ``yes``, or what the person at the terminal says.

    UsageError where nobody can be asked, so that no script hangs or removes by accident.
    """
    if yes:
        return True
    if as_json or not sys.stdin.isatty():
        raise UsageError(
            "nothing was removed, because nobody can be asked here: add --yes to remove, or look "
            "first at what would go"
        )
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
