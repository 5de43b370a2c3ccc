"""Reads what Megatron-Core writes as ``torch_dist``: sharded tensors in a directory of DCP, common
state beside them or in it, and objects of which each rank has one.

Layers of a kind are stacked in one tensor, and weights that are fused in a model are whole: so the
file has them, and so they are read. The moments of an optimizer that is fully reshardable are those
of parameters; the buckets of a ``dp_reshardable`` one are runs of numbers in the order of a buffer,
which only the program that made it knows.
"""

from __future__ import annotations

import re
from typing import Any

from holdfast.errors import ForeignFormatError, UsageError
from holdfast.interop.arrange import MODEL, Orders
from holdfast.interop.dcp import METADATA, read_dcp_tree
from holdfast.interop.foreign import ForeignCheckpoint, ForeignLeaf
from holdfast.interop.pickle_records import Opaque
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.state_files import (
    Gathered,
    checkpoint_of,
    document_in,
    step_of,
    value_in,
)

CONFIG = "metadata.json"
COMMON = "common.pt"
#: The key of the common state where it is one of the objects.
_COMMON_OBJECT = "common_state"
_BACKEND = "torch_dist"
_MOMENT = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.state\.([A-Za-z0-9_]+)\.(.+)", re.DOTALL)
_BUCKET = re.compile(
    r"(?:chained_[0-9]+\.)?optimizer\.distributed\.dp_group_idx_[0-9]+\..+", re.DOTALL
)
_OBJECT = re.compile(r"(.+)/shard_([0-9.]+)_([0-9.]+)", re.DOTALL)


def is_torch_dist(names: set[str]) -> bool:
    """True for the files of a directory that Megatron-Core wrote."""
    return CONFIG in names and METADATA in names


def read_torch_dist(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    """Read a directory of ``torch_dist``, as ``iter_0000020``."""
    config = document_in(files, CONFIG, "description of a checkpoint of Megatron-Core")
    backend = config.get("sharded_backend")
    if backend != _BACKEND:
        raise UsageError(
            f"{files.where(CONFIG)} says that it was written as {backend!r:.60}; {_BACKEND} is read"
        )
    sharded = read_dcp_tree(files, "", is_nested=False)
    gathered = Gathered(notes=sharded.notes, world=sharded.world)
    objects: dict[str, Any] = {}
    model: dict[str, Any] = {}
    buckets: dict[str, Any] = {}
    moments: dict[str, dict[str, Any]] = {}
    for name, value in sharded.entries.items():
        if not isinstance(value, ForeignLeaf):
            objects[name] = value
        elif found := _MOMENT.fullmatch(name):
            if found[1] in moments.setdefault(found[2], {}):
                where = files.where(METADATA)
                raise ForeignFormatError(
                    f"{where} has the {found[1]} of {found[2]!r:.200} twice: several optimizers of "
                    "a chain have this parameter, and only one of them can",
                    path=where,
                    offset=0,
                )
            moments[found[2]][found[1]] = value
        elif _BUCKET.fullmatch(name):
            buckets[name] = value
        else:
            model[name] = value
    common = _common(files, objects, gathered.notes)
    tree = gathered.tree
    tree[MODEL] = model
    _take_optimizer(common, moments, gathered)
    if buckets:
        tree["optimizer_buckets"] = buckets
        gathered.notes.append(
            f"{len(buckets)} tensors of the optimizer are buckets (dp_reshardable), shown as "
            "optimizer_buckets: which parameter lies where in them is not stored; save with "
            "--dist-ckpt-optim-fully-reshardable for moments by name"
        )
    objects = {name: _single(one) for name, one in objects.items()}
    if objects:
        tree["objects"] = _by_place(objects, files)
    gathered.notes += [
        f"{key} of the common state is left out: what else is read is called so"
        for key in sorted(common.keys() & tree.keys())
    ]
    tree |= {key: value for key, value in common.items() if key not in tree}
    number = step_of(files, common.get("iteration"))
    return checkpoint_of("megatron", files, number, gathered, orders)


def _single(value: Any) -> Any:
    """The object of a list of one, as each is stored; a module without extra state has None."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _common(files: SourceFiles, objects: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The state that all ranks share: of a file of its own, or of newer writers one of the objects,
    which is taken out of them.
    """
    inside = [name for name in objects if name.partition("/")[0] == _COMMON_OBJECT]
    if len(inside) > 1:
        where = files.where(METADATA)
        raise ForeignFormatError(
            f"{where} has the common state twice: {inside[0]!r:.100}, {inside[1]!r:.100}",
            path=where,
            offset=0,
        )
    if inside and COMMON in files.names():
        notes.append(f"{files.where(COMMON)} is not read: {METADATA} has a common state, too")
    if inside:
        found = _single(objects.pop(inside[0]))
    elif COMMON in files.names():
        found = value_in(files, COMMON)
    else:
        where = files.where(COMMON)
        raise ForeignFormatError(
            f"{where} is not there, and {METADATA} has no {_COMMON_OBJECT} either: the common "
            "state is missing, the save was not finished",
            path=where,
            offset=0,
        )
    if isinstance(found, Opaque) or not isinstance(found, dict):
        where = files.where(COMMON)
        raise ForeignFormatError(f"{where} holds no dictionary", path=where, offset=0)
    return {str(key): value for key, value in found.items()}


def _take_optimizer(
    common: dict[str, Any], moments: dict[str, dict[str, Any]], gathered: Gathered
) -> None:
    """Take the moments by the names of parameters, and the options of their group.

    With several groups it is not stored which parameter is in which: their options are shown as
    they are, and are no part of an optimizer.
    """
    said = common.pop("optimizer", None)
    inner = said.get("optimizer", said) if isinstance(said, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not moments:
        if said is not None:
            gathered.tree["optimizer_common"] = said
        return
    known = [one for one in groups if isinstance(one, dict)] if isinstance(groups, list) else []
    if len(known) == 1 and known[0].keys():
        options = {key: value for key, value in known[0].items() if key != "params"}
        gathered.tree["optimizer"] = {
            "state": moments,
            "param_groups": [{**options, "params": sorted(moments)}],
        }
        if inner is not said and (rest := {k: v for k, v in said.items() if k != "optimizer"}):
            gathered.tree["optimizer_common"] = rest  # a scaler, and how it was sharded
        return
    gathered.tree["optimizer_state"] = moments
    if said is not None:
        gathered.tree["optimizer_common"] = said
    gathered.notes.append(
        f"which of {len(moments)} parameters are in which of {len(known)} groups of the optimizer "
        "is not stored: moments are shown as optimizer_state, options as optimizer_common"
    )


def _by_place(objects: dict[str, Any], files: SourceFiles) -> dict[str, Any]:
    """Objects by their name, and by the place of each where ranks have some of their own."""
    found: dict[str, Any] = {}
    places: dict[str, dict[str, Any]] = {}
    for name, value in objects.items():
        matched = _OBJECT.fullmatch(name)
        if matched is None:
            found[name] = value
        else:
            places.setdefault(matched[1], {})[matched[2]] = value
    if twice := sorted(found.keys() & places.keys()):
        where = files.where(METADATA)
        raise ForeignFormatError(
            f"{where} has an object {twice[0]!r:.200}, and parts of another of this name",
            path=where,
            offset=0,
        )
    return found | places
