"""Takes root and step from the ids that callers of ``torch.distributed.checkpoint`` give.

The steps of a root have one prefix in their ids: two of one number would be one checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

from holdfast.catalogue import is_root, read_manifests
from holdfast.dcp.stored_dict import form_in
from holdfast.errors import HoldfastError, UsageError
from holdfast.events import warn
from holdfast.restore.reading.images import from_manifest
from holdfast.restore.reading.read import read_values
from holdfast.restore.reading.stored import overview_of
from holdfast.storage.base import Store
from holdfast.storage.open import normal_root, open_store

#: The names of steps, as ``step-500``; whatever else an id ends with is a part of its root.
_STEP = re.compile(
    r"(?P<root>.+)/(?P<prefix>(?:step|epoch|checkpoint|iter|global_step)[-_]?|)"
    r"(?P<step>[0-9]{1,15})/*",
    re.DOTALL,
)


class CheckpointPlace(NamedTuple):
    """What an id means. ``prefix``: what stands before the number of the step; None without one."""

    root: str
    step: int | None
    prefix: str | None


def place_of(checkpoint_id: str | os.PathLike[str]) -> CheckpointPlace:
    """The root and the step that an id such as ``runs/gpt/step-500`` means; or a root alone."""
    text = os.fsdecode(os.fspath(checkpoint_id))
    matched = _STEP.fullmatch(text if "/" in text else f"./{text}")
    if matched is None:
        return CheckpointPlace(normal_root(text), None, None)
    return CheckpointPlace(normal_root(matched["root"]), int(matched["step"]), matched["prefix"])


def place_below(checkpoint_id: str | os.PathLike[str], root: str) -> CheckpointPlace:
    """The step of ``root`` that an id means, wherever it lies; none for the root itself.

    UsageError for an id that names neither, or a step of another root that is there.
    """
    found = place_of(checkpoint_id)
    if found.root != root and _is_another(found.root, root):
        raise UsageError(
            f"{os.fsdecode(os.fspath(checkpoint_id))!r} names a step of the root {found.root}, and "
            f"{root} was given too: leave out one of them"
        )
    if found.step is None and found.root != root:
        raise UsageError(
            f"{os.fsdecode(os.fspath(checkpoint_id))!r} names no step of {root}: give an id that "
            "ends with one, such as step-500, or set the step"
        )
    return found._replace(root=root)


def _is_another(one: str, root: str) -> bool:
    """True if ``one`` is a root of ours, and another one by more than its name."""
    store, mine = open_store(one), open_store(root)
    return is_root(store) and not (is_root(mine) and mine.identity() == store.identity())


def refuse_prefix(stored: str | None, place: CheckpointPlace) -> None:
    """UsageError when a checkpoint was saved by ids with another prefix."""
    if None not in (stored, place.prefix) and stored != place.prefix:
        raise UsageError(
            f"{place.root} has steps called {stored}N, and {place.prefix}{place.step} was asked "
            "for: these would be one checkpoint. Give each kind of checkpoint a root of its own, "
            "or the id that it was saved by"
        )


def refuse_other_prefix(store: Store, place: CheckpointPlace) -> None:
    """UsageError when the newest checkpoint of a root, or that of this step, has another prefix."""
    if place.prefix is None or not is_root(store):
        return
    lineage = overview_of(store).lineage
    newest = max((one.step for one in lineage), default=None)
    manifests, _ = read_manifests(
        store, [one for one in lineage if one.step in (newest, place.step)]
    )
    for manifest, _ in manifests:
        stored = None
        with contextlib.suppress(HoldfastError):  # it is damaged, and none can load it
            stored = form_in(read_values(from_manifest(store, manifest), 0)).prefix
        refuse_prefix(stored, place)


def newest_step(root: str) -> int:
    """The step of the newest checkpoint of a root; -1 where there is none."""
    store = open_store(root)
    if not is_root(store):
        return -1
    return max((one.step for one in overview_of(store).lineage), default=-1)


#: The roots that this process has loaded from or saved to.
_known: set[str] = set()


def note_known(root: str) -> None:
    """Note that this process has loaded from a root: its next save there goes on."""
    _known.add(root)


def warn_if_begun_anew(root: str, step: int) -> None:
    """Emit Warned at the first save of this process if the root has later steps, none of which was
    loaded: a program that looks for the files of DCP finds none here, and trains from the start.
    """
    if root in _known:
        return
    _known.add(root)
    newest = newest_step(root)
    if newest >= step:
        warn(
            f"step {step} is saved in {root}, which has step {newest}, and this "
            "process has loaded nothing from there through DCP: the run began anew. If it "
            "was to go on, stop it and load the newest step first. torchtitan looks for the "
            "folders of DCP "
            f"and needs initial_load_path={root!r} with initial_load_model_only=False"
        )
