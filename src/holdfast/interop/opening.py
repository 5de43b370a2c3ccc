"""Opens what a user names as a source: a root of ours, or the checkpoint of another writer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.catalogue import MANIFESTS, is_root
from holdfast.collector import paused_collector
from holdfast.errors import HoldfastError, UsageError
from holdfast.events import warn
from holdfast.interop.source_files import SourceFiles
from holdfast.storage.base import Store
from holdfast.storage.open import is_bucket, normal_root, open_store, root_around

if TYPE_CHECKING:
    from holdfast.interop.arrange import Orders
    from holdfast.interop.foreign import ForeignCheckpoint
    from holdfast.interop.foreign_store import ForeignStore

#: In place of a step: all that there are.
EVERY = "every"
_NOTES = 5


def open_source(
    root: str | os.PathLike[str],
    format_: str | None = None,
    orders: Callable[[], Orders] | None = None,
    step: int | str | None = EVERY,
) -> Store:
    """The store of a root; of anything else that is known, one that shows it as a root.

    ``format_``: the format to read, where content does not tell it. ``orders``: the names of the
    parameters of the optimizers that are to be filled, as in ``arrange``. ``step``: of checkpoints
    of several steps below one directory, the one to show alone, None for the last. Raises
    ForeignFormatError for files that can't be what they should be, UsageError for a kind that can't
    be read yet.
    """
    where = normal_root(root)
    if is_bucket(where):
        return _open_in_bucket(where, format_, orders)
    store, path = open_store(root) if not Path(where).is_file() else None, Path(where)
    if format_ is None and store is not None and (_is_ours(store) or not path.is_dir()):
        return store
    if not path.exists():
        return open_store(root)
    # Imported here, because it loads numpy: commands on roots of ours must be fast.
    from holdfast.interop.directories import recognize
    from holdfast.interop.near_places import refuse_level
    from holdfast.interop.steps import ForeignSteps, choose_step, find_steps

    files, place = SourceFiles(path), None
    if format_ is None and path.is_dir() and recognize(files) is None:
        # The images of a root lie as several steps of another writer would.
        places, notes = ([], []) if root_around(path) else find_steps(path)
        _warn(tuple(notes), where)
        if not places:
            refuse_level(path)
            return open_store(root)
        if step is EVERY:
            return ForeignSteps(path, places, notes)
        place = choose_step(path, places, step)
        files = SourceFiles(path / place.name)
    shown = _shown(files, format_, orders() if orders else None)
    if shown is None:
        refuse_level(path)
        return open_store(root)
    if place is not None and shown.found.step != place.step:
        raise UsageError(
            f"{files.path} was found as step {place.step} and says that it is of step "
            f"{shown.found.step}: give its path"
        )
    _warn(shown.found.notes, where)
    return shown


def _shown(files: SourceFiles, format_: str | None, live: Orders | None) -> ForeignStore | None:
    """What another writer left there, as a root; None when nothing that is known is."""
    from holdfast.interop.directories import read_directory
    from holdfast.interop.foreign_store import ForeignStore

    with paused_collector():  # there may be an object for each shard of each rank
        found = read_directory(files, format_, live)
        if found is None:
            return None
        if live is not None:
            found = _tied(_unwrapped(found, live), live)
        return ForeignStore(files, found)


def _open_in_bucket(where: str, format_: str | None, orders: Callable[[], Orders] | None) -> Store:
    store = open_store(where)
    if format_ is None and _is_ours(store):
        return store
    from holdfast.interop.bucket_files import BucketFiles, refuse_steps

    files = BucketFiles(where)
    shown = _shown(files, format_, orders() if orders else None)
    if shown is None:
        refuse_steps(files)
        return store
    _warn(shown.found.notes, where)
    return shown


def _unwrapped(found: ForeignCheckpoint, live: Orders) -> ForeignCheckpoint:
    """The same for live objects: tensors of a module that was wrapped when it was saved have the
    names that they have in the module itself, and those of the wrapper as further ones.

    Not so where the module that is filled has a part of the wrapper's name.
    """
    from holdfast.interop.parameter_names import wrapper_prefix

    here = {name for order in live.values() for name in order.registered}
    with_values = {key.partition(".")[0] for key in found.values}  # which name leaves
    inside: dict[str, list[str]] = {}
    for name in (*found.leaves, *found.aliases):
        key, _, rest = name.partition(".")
        if key not in with_values:
            inside.setdefault(key, []).append(rest)
    renamed: dict[str, str] = {}
    for key, names in inside.items():
        prefix = wrapper_prefix(names)
        for name in names if prefix and here.isdisjoint((*names, *_below(key, names))) else ():
            renamed[f"{key}.{name}"] = f"{key}.{name.removeprefix(prefix)}"
    leaves = {renamed.get(name, name): leaf for name, leaf in found.leaves.items()}
    if len(leaves) < len(found.leaves):
        return found
    aliases = {renamed.get(one, one): renamed.get(of, of) for one, of in found.aliases.items()}
    aliases |= {name: renamed[name] for name in found.leaves if name in renamed}
    return replace(found, leaves=leaves, aliases=aliases)


def _tied(found: ForeignCheckpoint, live: Orders) -> ForeignCheckpoint:
    """The same with one leaf for what is one tensor of the live objects: DCP has it under each of
    its names, which are compared when it is read, and safetensors have one of them.
    """
    from holdfast.state.parameter_order import LiveOrders

    leaves, aliases, ties = dict(found.leaves), dict(found.aliases), []
    for names in live.ties if isinstance(live, LiveOrders) else ():
        there = [name for name in names if name in leaves]
        if not there:
            continue
        first, leaf = there[0], leaves[there[0]]
        others = [leaves[name] for name in there[1:]]
        if any((one.dtype, one.shape) != (leaf.dtype, leaf.shape) for one in others):
            continue
        copies = [copy for one in others for copy in (*one.parts, *one.copies)]
        leaves[first] = replace(leaf, copies=(*leaf.copies, *copies))
        for name in there[1:]:
            del leaves[name]
        gone = set(there[1:])
        aliases = {name: first if of in gone else of for name, of in aliases.items()}
        aliases |= {name: first for name in names if name != first and name not in aliases}
        ties.append(tuple(names))
    return replace(found, leaves=leaves, aliases=aliases, ties=tuple(ties))


def _below(key: str, names: list[str]) -> list[str]:
    return [f"{key}.{name}" for name in names]


def _is_ours(store: Store) -> bool:
    try:
        return is_root(store) or bool(store.list(MANIFESTS))
    except HoldfastError:
        return True  # its own reader says what is the matter


def _warn(notes: tuple[str, ...], where: str) -> None:
    if notes:
        more = f"; and {len(notes) - _NOTES} more" if len(notes) > _NOTES else ""
        warn(f"{where}: {'; '.join(notes[:_NOTES])}{more}")
