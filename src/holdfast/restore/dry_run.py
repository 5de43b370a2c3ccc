"""Ask how a restore would go, before there are any ranks, devices or memory for it.

A state may be on the meta device: nothing is allocated for its tensors, and nothing in it changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from holdfast.errors import UsageError
from holdfast.geometry.asked import AskedLayout, asked
from holdfast.geometry.box import Box
from holdfast.load.claims import Claims, claims_of, left_by_all
from holdfast.load.documents import gather_values
from holdfast.load.dryrun import Part, RestorePlan, dry_run, dry_run_asked, wants_of
from holdfast.load.plan import Want
from holdfast.load.read import read_values
from holdfast.load.reader import LeafInfo, box_in
from holdfast.load.source import Checkpoint, from_manifest
from holdfast.load.stored import choose_stored
from holdfast.policy.arguments import wanted_step
from holdfast.state.lists import stored_lists
from holdfast.state.objects import sort_objects
from holdfast.state.restore import Restoring
from holdfast.state.tensors import held_boxes
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
    """Whether a checkpoint below ``path`` can be restored so, and what every rank would read.

    ``state_or_table`` is one of: a parallelism by name, as ``"dp=4,tp=2"`` (see ``holdfast show
    --for``); a state as for ``load``, which all ``world`` ranks have alike; a table of leaf names
    to boxes (a ``Box``, slices, or None for the whole leaf); or a list of states or tables, one for
    each rank. Tensors may be on the meta device. A DTensor needs its mesh, and then the
    plan is of this rank alone. ``step`` as for ``load``.

    Needs no process group, reads no leaf and changes nothing. What does not fit is in ``problems``
    of the plan, and its sizes are then of what does. Raises NotFound when there is no checkpoint,
    UsageError for a wish that means nothing, FormatError, ChecksumMismatch or StorageError for
    files that cannot be read.
    """
    store = open_store(path)
    found, fit = choose_stored(store, wanted_step(step))
    manifest = found.find(fit[0].generation)
    assert manifest is not None  # it is where the candidate came from
    checkpoint = from_manifest(store, manifest)
    if isinstance(state_or_table, str):
        wish = asked(state_or_table)
        if world not in (1, wish.world):
            raise UsageError(f"{state_or_table!r} is {wish.world} ranks, and world says {world}")
        return dry_run_asked(checkpoint, manifest.step, AskedLayout(checkpoint.layout, wish))
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
    """A plan for one item of each rank, each of which ``alike`` ranks have."""
    parts, problems, assumptions = [], list[str](), set[str]()
    claims: list[Claims] = []
    for rank, item in enumerate(items):
        if _is_table(item):
            wants, faults = _of_table(checkpoint, item)
        else:
            restoring = _restoring(checkpoint, item)
            faults = restoring.amiss
            names = [leaf.name for leaf in checkpoint.layout.leaves]
            claims.append(claims_of(names, restoring.claimed(), restoring))
            wants, is_cut = _of_state(restoring)
            if is_cut:
                assumptions.add("of tensors that are cut over ranks, only this rank's part counts")
        problems += [f"rank {rank}: {text}" if len(items) > 1 else text for text in faults]
        parts.append(Part(rank, alike, wants))
    problems += left_by_all([leaf.name for leaf in checkpoint.layout.leaves], claims)
    return dry_run(
        checkpoint, step, parts, world=len(items) * alike, problems=problems,
        assumptions=sorted(assumptions),
    )  # fmt: skip


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


def _restoring(checkpoint: Checkpoint, state: State) -> Restoring:
    stored = {leaf.name: (leaf.dtype, leaf.shape) for leaf in checkpoint.layout.leaves}
    state = dict(state)
    objects = sort_objects(state)
    document = read_values(checkpoint, 0)
    found = gather_values(checkpoint, objects, 0, document, stored)
    own = document.get("own", {})
    lists = stored_lists(own, "the values of rank 0")
    return Restoring(state, objects, stored, found, own, lists=lists.keys())


def _of_state(restoring: Restoring) -> tuple[list[Want], bool]:
    """What this rank would fill, where it is stored in the same shape; whether some of it is cut.

    What has another shape is a problem that is told by name.
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
