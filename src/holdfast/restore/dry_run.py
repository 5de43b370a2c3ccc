"""Plans a restore before there are any ranks, devices or memory for it, and reports its problems.

A state may be on the meta device: no memory is allocated for its tensors, and it is not changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.parallelism import NamedLayout, asked
from holdfast.policy.arguments import wanted_step
from holdfast.restore.match import LeafClaims, claims_of, gather_values, left_by_all
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.restore.reading.layout_check import (
    RankPart,
    RestorePlan,
    dry_run,
    dry_run_asked,
    wants_of,
)
from holdfast.restore.reading.read import read_values
from holdfast.restore.reading.reader import LeafInfo, box_in
from holdfast.restore.reading.stored import choose_stored
from holdfast.state.mapped.checkpoint_view import make_offer
from holdfast.state.mapped.mapper import RuleMapper, StateView
from holdfast.state.objects import sort_objects
from holdfast.state.restore import StateRestore
from holdfast.state.selection import LeafSelection
from holdfast.state.tensors import held_boxes
from holdfast.state.values import stored_lists
from holdfast.storage.open import open_store

#: Boxes of leaves by name; None: the whole leaf.
Table = Mapping[str, "Box | Sequence[slice] | None"]
State = Mapping[str, Any]


def plan_restore(
    path: str | os.PathLike[str],
    state_or_table: str | State | Table | Sequence[State | Table],
    *,
    world: int = 1,
    step: int | str | None = None,
) -> RestorePlan:
    """Check whether a checkpoint below ``path`` can be restored, and what every rank would read.

    ``path``: the root. ``world``: for how many ranks. ``step``: the step, as for ``load``.

    ``state_or_table``: one of these: a parallelism by name, as ``"dp=4,tp=2"`` (see ``holdfast show
    --for``); a state as for ``load``, which all ``world`` ranks have alike; a table of leaf names
    to boxes (a ``Box``, slices, or None for the whole leaf); or a list of states or tables, one for
    each rank. Tensors may be on the meta device. A DTensor needs its mesh, and then the plan is of
    this rank alone.

    Needs no process group, reads no leaf and changes nothing. Mismatches are listed in ``problems``
    of the plan; its sizes then cover the matching leaves. Raises NotFound when there is no
    checkpoint, UsageError for an invalid request, FormatError, ChecksumMismatch or StorageError for
    files that cannot be read.
    """
    store = open_store(path)
    found, fit = choose_stored(store, wanted_step(step))
    manifest = found.read[fit[0].generation]
    checkpoint = from_manifest(store, manifest)
    if isinstance(state_or_table, str):
        wish = asked(state_or_table)
        if world not in (1, wish.world):
            raise UsageError(f"{state_or_table!r} is {wish.world} ranks, and world says {world}")
        return dry_run_asked(checkpoint, manifest.step, NamedLayout(checkpoint.layout, wish))
    if isinstance(state_or_table, Mapping):
        if type(world) is not int or world < 1:
            raise UsageError(f"world is {world!r}: give a number of ranks, 1 or more")
        return _plan_all(checkpoint, manifest.step, [state_or_table], world)
    if not (isinstance(state_or_table, (list, tuple)) and state_or_table):
        raise UsageError(
            f"a {type(state_or_table).__name__} is nothing to plan a restore for: give a text as "
            "dp=4,tp=2, a state, a table, or a list with one of these for each rank"
        )
    if world not in (1, len(state_or_table)):
        raise UsageError(f"{len(state_or_table)} ranks are listed, and world says {world}")
    return _plan_all(checkpoint, manifest.step, state_or_table, 1)


def _plan_all(
    checkpoint: Checkpoint, step: int, items: Sequence[State | Table], alike: int
) -> RestorePlan:
    """Plan one item for each rank; ``alike`` ranks have each item."""
    parts, problems, assumptions = [], list[str](), set[str]()
    claims: list[LeafClaims] = []
    for rank, item in enumerate(items):
        if _is_table(item):
            wants, faults = _of_table(checkpoint, item)
        else:
            restoring = _restoring(checkpoint, item)
            faults = restoring.amiss
            assumptions.update(
                f"{one.leaf} and {one.copy}, one tensor here, have the same bytes"
                for one in restoring.view.tied
            )
            names = [leaf.name for leaf in checkpoint.layout.leaves]
            claims.append(claims_of(names, restoring.claimed(), restoring))
            wants, is_cut = _of_state(restoring)
            if is_cut:
                assumptions.add("of tensors that are cut over ranks, only this rank's part counts")
        problems += [f"rank {rank}: {text}" if len(items) > 1 else text for text in faults]
        parts.append(RankPart(rank, alike, wants))
    problems += left_by_all([leaf.name for leaf in checkpoint.layout.leaves], claims)
    return dry_run(
        checkpoint,
        step,
        parts,
        world=len(items) * alike,
        problems=problems,
        assumptions=sorted(assumptions),
    )


def _is_table(item: State | Table) -> bool:
    return all(
        box is None
        or isinstance(box, Box)
        or (isinstance(box, (list, tuple)) and all(isinstance(one, slice) for one in box))
        for box in item.values()
    )


def _of_table(checkpoint: Checkpoint, table: Table) -> tuple[list[Want], list[str]]:
    leaves = {leaf.name: leaf for leaf in checkpoint.layout.leaves}
    faults = [f"{name}: not in the checkpoint" for name in table if name not in leaves]
    boxes = (
        (name, box_in(box, LeafInfo(name, leaves[name].dtype, leaves[name].shape)))
        for name, box in table.items()
        if name in leaves
    )
    return wants_of(boxes), faults


def _restoring(checkpoint: Checkpoint, state: State) -> StateRestore:
    stored = {leaf.name: (leaf.dtype, leaf.shape) for leaf in checkpoint.layout.leaves}
    state = dict(state)
    objects = sort_objects(state)
    objects.follow(stored)
    document = read_values(checkpoint, 0)
    state_view = StateView(objects, RuleMapper(None, 0, 1), stored, LeafSelection(), is_plain=True)
    values = gather_values(checkpoint, state_view, 0, document)
    view = make_offer(state_view, values.aliases)
    own = document.get("own", {})
    lists = stored_lists(own, "the values of rank 0")
    return StateRestore(state, objects, view, values, own, lists=lists.keys())


def _of_state(restoring: StateRestore) -> tuple[list[Want], bool]:
    """Return what this rank would fill from leaves of the same shape; and whether some of it is
    cut.

    A leaf of another shape is reported as a problem by name.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    boxes: list[tuple[object, Box]] = []
    is_cut = False
    for leaf, like in restoring.wanted():
        shape = restoring.stored[leaf][1]
        if like is not None and tuple(like.shape) == shape:
            is_cut |= isinstance(like, DTensor)
            boxes += [(leaf, box) for box in held_boxes(leaf, like, rank)]
        elif like is None:
            boxes.append((leaf, Box.whole(shape)))
    return wants_of(boxes), is_cut
