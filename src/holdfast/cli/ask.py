"""Ask before something is removed for good."""

from __future__ import annotations

import sys

from holdfast.errors import UsageError


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
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
