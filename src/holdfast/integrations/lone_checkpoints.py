"""Writes a dict of one process as a checkpoint of its own, and reads it back: without pickle.

For places in which a framework writes a file of its own: the other ranks do not take part. Each is
a root, durable when it is written, and every byte is checked when it is read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.oneshot import save_described
from holdfast.restore.from_storage import restore_stored
from holdfast.restore.match import RestoreRequest
from holdfast.state.describe import Describer
from holdfast.storage.open import open_store
from holdfast.world import World

_KEY = "checkpoint"
_TIMEOUT_S = 600.0
#: Ends the name of a checkpoint that is being written.
_NEW = ".new"


def write_alone(path: str | os.PathLike[str], found: Mapping[str, Any], step: int) -> None:
    """Writes ``found`` as a checkpoint of ``step`` at ``path``, in place of what is there.

    What is there stays until the new one is durable. Raises UnsupportedState for what is neither a
    tensor nor a value.
    """
    where = Path(path)
    new = where.with_name(f"{where.name}{_NEW}")
    remove_alone(new)
    describer = Describer({_KEY: found}, 0, 1)
    save_described(
        open_store(new),
        World(),
        lambda: (describer.describe(), describer.usage()),
        step,
        timeout_s=_TIMEOUT_S,
    )
    remove_alone(where)
    new.rename(where)


def remove_alone(path: str | os.PathLike[str]) -> None:
    """Removes what is at ``path``, if anything is."""
    where = Path(path)
    if where.is_dir():
        shutil.rmtree(where)
    else:
        where.unlink(missing_ok=True)


def read_alone(path: str | os.PathLike[str]) -> Any:
    """Returns what was written at ``path``, its tensors on the CPU; raises NotFound without it."""
    found: dict[str, Any] = {_KEY: None}
    restore_stored(World(), found, open_store(path), RestoreRequest(), None, timeout_s=_TIMEOUT_S)
    return found[_KEY]


def is_whole(path: Path) -> bool:
    """True for the place of a checkpoint that was written to its end."""
    return (path / "manifests").is_dir() and not path.name.endswith(_NEW)
