"""How a command is declared, and how it prints JSON: all that needs no tables.

Kept apart from ``output`` so that completion, which runs at every press of a key, loads nothing
else.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

Commands = argparse._SubParsersAction  # argparse has no public name for what add_subparsers gives


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
    """One JSON document that every reader of JSON takes."""
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
