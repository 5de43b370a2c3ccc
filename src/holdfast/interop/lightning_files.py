"""Reads checkpoints of Lightning: a ``.ckpt`` file, or the directory of a sharded one."""

from __future__ import annotations

from typing import Any

from holdfast.errors import ForeignFormatError
from holdfast.interop.arrange import MODEL, Orders
from holdfast.interop.dcp import read_dcp_tree
from holdfast.interop.foreign import ForeignCheckpoint
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.state_files import Gathered, checkpoint_of, state_in, step_of

#: Beside the shards of a directory, all that is not sharded.
META = "meta.pt"
_VERSION = "pytorch-lightning_version"


def read_lightning_file(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    """Read one ``.ckpt`` file; one without Lightning's keys is a state as any other."""
    state = state_in(files, files.name)
    if "state_dict" not in state or _VERSION not in state:
        gathered = Gathered(state)
        return checkpoint_of("torch", files, step_of(files), gathered, orders)
    tree: dict[str, Any] = {MODEL: state.pop("state_dict")}
    optimizers = state.pop("optimizer_states", [])
    if isinstance(optimizers, list):
        tree |= {_numbered("optimizer", at): one for at, one in enumerate(optimizers)}
    return _of(files, state, Gathered(tree), orders)


def read_lightning_directory(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    """Read the directory that a strategy wrote with one file for each rank."""
    state, sharded = state_in(files, META), read_dcp_tree(files, "")
    if _VERSION not in state:
        where = files.where(META)
        raise ForeignFormatError(
            f"{where} has no {_VERSION}: it is not of Lightning", path=where, offset=0
        )
    tree: dict[str, Any] = {}
    for key, value in sharded.entries.items():
        outer, _, number = key.partition("_")
        if key == "state_dict":
            tree[MODEL] = value
        elif outer == "optimizer" and number.isdecimal():
            tree[_numbered(outer, int(number))] = value
        else:
            tree[key] = value
    return _of(files, state, Gathered(tree, sharded.notes, world=sharded.world), orders)


def lightning_state(files: SourceFiles) -> dict[str, Any]:
    """All that is not sharded; nothing of a file that is not of Lightning."""
    state = state_in(files, META if not files.is_file else files.name)
    return state if _VERSION in state else {}


def _numbered(key: str, number: int) -> str:
    return f"{key}{number or ''}"


def _of(
    files: SourceFiles, state: dict[str, Any], gathered: Gathered, orders: Orders
) -> ForeignCheckpoint:
    """The checkpoint of what is sharded, or large, and of the rest."""
    tree = gathered.tree
    schedulers = state.pop("lr_schedulers", [])
    if isinstance(schedulers, list):
        tree |= {_numbered("lr_scheduler", at): one for at, one in enumerate(schedulers)}
    number = step_of(files, state.get("global_step"))
    twice = sorted(tree.keys() & state.keys())
    gathered.notes += [
        f"{key} of the file is left out: what Lightning keeps is called so" for key in twice
    ]
    gathered.tree = state | tree
    return checkpoint_of("lightning", files, number, gathered, orders)
