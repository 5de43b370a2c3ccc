"""From the text a user writes for a root to the store it names."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.storage.base import Store
from holdfast.storage.local import LocalStore


def normal_root(root: object) -> str:
    """``root`` in the one form every process of a run agrees on, whatever its directory is later.

    UsageError for what is no path, a scheme other than ``file://``, and a home nobody has.
    """
    if not isinstance(root, (str, os.PathLike)):
        raise UsageError(f"{root!r} is no root: give the path of a directory as str or Path")
    text = os.fsdecode(os.fspath(root))
    scheme = text.partition("://")[0]
    if "://" in text and scheme != "file":
        raise UsageError(
            f"{text!r}: this version stores in directories only; give a path every rank can reach"
        )
    if not text.removeprefix("file://") or "\0" in text:
        raise UsageError(f"{text!r} is no root: give the path of a directory")
    try:
        return str(Path(text.removeprefix("file://")).expanduser().absolute())
    except RuntimeError as error:
        raise UsageError(f"{text!r}: {error} Write the path out.") from error


def open_store(root: object) -> Store:
    """The store at ``root``, a directory; it is made when something is first written."""
    return LocalStore(normal_root(root))
