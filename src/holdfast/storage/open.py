"""From the text a user writes for a root to the store it names."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import UsageError
from holdfast.storage.base import Store
from holdfast.storage.local import LocalStore


def normal_root(root: object) -> str:
    """``root`` in the one form every process of a run agrees on."""
    text = str(root)
    scheme = text.partition("://")[0]
    if "://" in text and scheme != "file":
        raise UsageError(
            f"{text!r}: this version stores in directories only; give a path every rank can reach"
        )
    return str(Path(text.removeprefix("file://")).expanduser().absolute())


def open_store(root: object) -> Store:
    """The store at ``root``, a directory; it is made when something is first written."""
    return LocalStore(normal_root(root))
