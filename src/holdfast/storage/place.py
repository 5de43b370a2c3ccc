"""What lies where a root was expected, in words, for errors that say what to do instead."""

from __future__ import annotations

import os
from pathlib import Path

#: The file by which a root is known; what makes a directory one is ``holdfast.catalogue``'s to say.
_ROOT_FILE = "holdfast.json"
_SHOWN = 3


def what_is_at(url: str) -> str:
    """One sentence on a directory that is no root, and where to go from there."""
    path = Path(url.removeprefix("file://"))
    if near := _near(path):
        return f"{near} is one: give that path."
    if not os.path.lexists(path):
        return "Nothing is there: look for a misspelt or relative path."
    if not path.is_dir():
        return f"It is {_file(path)}."
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return f"It cannot be listed: {error.strerror}."
    return _directory(names)


def _near(path: Path) -> Path | None:
    """A root around ``path``, for those who gave a part of one, or right below it."""
    try:
        around = [parent for parent in list(path.parents)[:2] if (parent / _ROOT_FILE).is_file()]
        below = sorted(found.parent for found in path.glob(f"*/{_ROOT_FILE}"))
    except OSError:  # a name too long, say: then nothing near it was meant
        return None
    return next(iter([*around, *below]), None)


def _file(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return f"a link to {os.readlink(path)}, where nothing is"
    if path.suffix == ".safetensors":
        return "a single safetensors file: read it with safetensors.torch.load_file"
    return "a file: give the directory that was handed to Checkpointer or holdfast.save"


def _directory(names: list[str]) -> str:
    if not names:
        return "It is empty: nothing was saved there yet, or its file system is not mounted."
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return (
            "It holds a checkpoint of torch.distributed.checkpoint: read it with "
            "torch.distributed.checkpoint.load."
        )
    if any(name.endswith(".safetensors") for name in names):
        return (
            "It holds plain safetensors files, as model hubs give them: read them with "
            "safetensors.torch.load_file or the library they belong to."
        )
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"It holds other things: {shown}."
