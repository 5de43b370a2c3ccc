"""Reads why a trainer failed from the file that torchrun keeps of it, if it left one.

``torchrun`` names a file to each process (``TORCHELASTIC_ERROR_FILE``); a program whose main
function is decorated with ``record`` writes its exception there.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from typing import Any

SETTING = "TORCHELASTIC_ERROR_FILE"
#: The most that is read, and the most that is told.
_MOST_BYTES, MOST_TEXT = 1 << 20, 300


def error_in(path: str) -> str:
    """Returns the error in a file, in one line; "" where there is none to be read."""
    if not path:
        return ""
    with suppress(OSError, ValueError, RecursionError):
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                return ""
            data = os.read(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)
        return error_text(json.loads(data))
    return ""


def error_text(document: Any) -> str:
    """Returns the message of an error file's content; "" where it has none."""
    message = document.get("message") if isinstance(document, dict) else None
    if isinstance(message, dict):
        message = message.get("message")
    return one_line(message) if isinstance(message, str) else ""


def error_line(error: BaseException) -> str:
    """Returns an error on one line; one that cannot be shown is named by its class alone."""
    name = type(error).__name__
    try:
        return one_line(f"{name}: {error}")
    except Exception:  # of its __str__, which is the user's
        return name


def one_line(text: str) -> str:
    """Returns a text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_TEXT else line[: MOST_TEXT - 4] + " ..."
