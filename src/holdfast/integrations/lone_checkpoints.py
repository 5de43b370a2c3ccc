"""Writes a dict of one process as a checkpoint of its own, and reads it back: without pickle.

For places in which a framework writes a file of its own: the other ranks do not take part. Each is
a root, durable when it is written, and every byte is checked when it is read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.oneshot import save_described
from holdfast.restore.from_storage import restore_stored
from holdfast.restore.match import RestoreRequest
from holdfast.state.describe import Describer
from holdfast.storage.files import sync_directory
from holdfast.storage.open import open_store
from holdfast.world import World

_KEY = "checkpoint"
_TIMEOUT_S = 600.0
#: Ends the name of a checkpoint that is being written.
_NEW = ".new"
#: Ends the name of one that is replaced: it counts while nothing has its own name.
_OLD = ".old"


def write_alone(path: str | os.PathLike[str], found: Mapping[str, Any], step: int) -> None:
    """Writes ``found`` as a checkpoint of ``step`` at ``path``, in place of what is there.

    What is there is found until the new one is, wherever the process is killed. Raises
    UnsupportedState for what is neither a tensor nor a value.
    """
    where = Path(path)
    new, old = _beside(where, _NEW), _beside(where, _OLD)
    if os.path.lexists(old) and not os.path.lexists(where):  # killed between the two renames
        old.rename(where)
    _remove(old)
    _remove(new)
    describer = Describer({_KEY: found}, 0, 1)
    save_described(
        open_store(new),
        World(),
        lambda: (describer.describe(), describer.usage()),
        step,
        timeout_s=_TIMEOUT_S,
    )
    if os.path.lexists(where):  # also a link to nothing
        where.rename(old)
    new.rename(where)
    sync_directory(str(where.parent))
    with suppress(OSError):  # what a reader has open goes with the next
        _remove(old)


def remove_alone(path: str | os.PathLike[str]) -> None:
    """Removes the checkpoint at ``path``, if there is one, with what a kill left beside it."""
    where = Path(path)
    new = _beside(where, _NEW)
    _remove(_beside(where, _OLD))
    _remove(new)
    with suppress(FileNotFoundError):
        where.rename(new)  # half of it is nowhere taken for a checkpoint
    _remove(new)


def read_alone(path: str | os.PathLike[str]) -> Any:
    """Returns what was written at ``path``, its tensors on the CPU; raises NotFound without it."""
    where, old = Path(path), _beside(Path(path), _OLD)
    store = open_store(where if where.exists() or not old.exists() else old)
    found: dict[str, Any] = {_KEY: None}
    restore_stored(World(), found, store, RestoreRequest(), None, timeout_s=_TIMEOUT_S)
    return found[_KEY]


def is_whole(path: Path) -> bool:
    """True for the place of a checkpoint that was written to its end, and not replaced."""
    is_old = path.name.endswith(_OLD) and path.with_name(path.name.removesuffix(_OLD)).exists()
    return (path / "manifests").is_dir() and not path.name.endswith(_NEW) and not is_old


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}{suffix}")


def _remove(where: Path) -> None:
    """Removes a directory or a file; of a link, the link."""
    if where.is_dir() and not where.is_symlink():
        shutil.rmtree(where)
    else:
        where.unlink(missing_ok=True)
