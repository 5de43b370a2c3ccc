"""A run's storage at work in one directory, and what must hold of it after the power failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from holdfast.catalogue import DAMAGED, ROOT, catalogue, layout_path
from holdfast.errors import HoldfastError
from holdfast.format.manifest import Generation, Incarnation
from holdfast.geometry.layout import Layout
from holdfast.keeper.persister import Persister
from holdfast.maintenance.copies import copy
from holdfast.maintenance.repairs import repair
from holdfast.persist import commit
from holdfast.persist.pins import mend, pin, pinned
from holdfast.persist.removal import plan, remove
from holdfast.policy.when import Keep
from holdfast.restore.reading.verify import verify
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from support.checkpoints.images import split_leaf
from support.checkpoints.keeper_roots import change
from support.runs.keeper_jobs import job_of

LAYOUT = Layout(2, (split_leaf("b", "I64", (3,), 2), split_leaf("w", "F32", (520, 3), 2)))
GROWN = Layout(2, (*LAYOUT.leaves, split_leaf("x", "F32", (4,), 2)))


@cache
def source() -> MemoryStore:
    """A root with one checkpoint, which is copied."""
    store = MemoryStore()
    commit.open_root(store, "run")
    persister = Persister(store, Keep(), lambda *_: None)
    persister.work_one(job_of(Generation(1, 0), _first(), layout=LAYOUT))
    persister.stop()
    return store


def _first() -> Incarnation:
    return Incarnation(run_id="run", n=1, nonce="n1")


def work(root: Path, promise: Callable[[str], None]) -> None:
    """Save, prune, pin, change the layout, remove by hand, start again, copy in and repair, in one
    directory.
    """
    store = LocalStore(root)
    copy(source(), store, None, lambda *_: None)
    promise("durable a1x0")
    promise("damaged")  # from here on it may be
    damaged = catalogue(store).manifests[0]
    store.remove(layout_path(damaged.layout))
    change(store, damaged.images[0].path, 4100)
    promise("changed")
    repair(store, [source()], None)
    promise("mended")
    promise("cleared")  # from here on it may be
    remove(store, plan(store, Keep(), abandoned=False))
    told: list[str] = []

    def tell(attempt: str, reason: str | None) -> None:
        told.append(reason or "")
        if reason is None:
            promise(f"durable {attempt}")

    for n, steps, keep in ((1, range(1, 6), Keep(last=2)), (2, range(10, 14), Keep(last=1))):
        commit.open_root(store, "run")
        with store.lock(ROOT, "keeper"):
            parent = (1, 5) if n == 2 else None
            record = Incarnation(run_id="run", n=n, nonce=f"n{n}", parent=parent)
            persister = Persister(store, keep, tell)
            for step in steps:
                layout = GROWN if step in (2, 12) else LAYOUT
                persister.work_one(job_of(Generation(n, step), record, layout=layout))
                if step == 1:
                    pin(store, Generation(1, 1))
                    promise("pinned a1x1")
            persister.stop()
        remove(store, plan(store, Keep(last=1), abandoned=False))
    assert told == [""] * 9


def _has_changed_bytes(store: LocalStore) -> bool:
    """True if the bytes that a repair sets aside are anywhere."""
    path = catalogue(source()).manifests[0].images[0].path
    changed = bytearray(source().read(path))
    changed[4100] ^= 0xFF
    places = (one for one in (path, f"{DAMAGED}/{path}") if store.exists(one))
    return any(store.read(one) == changed for one in places)


def wrong_in(directory: Path, promises: Sequence[str]) -> str:
    """Open a root after a loss of power; return what was promised and is not so, "" for nothing."""
    store = LocalStore(directory)
    try:
        if "changed" in promises and "cleared" not in promises and not _has_changed_bytes(store):
            return "a repair has lost what it was to set aside"
        mend(store, catalogue(store))
        found = catalogue(store)
        if found.broken:
            return f"cannot be read: {found.broken}"
        is_damaged = "damaged" in promises and "mended" not in promises
        if is_damaged:
            repair(store, [source()], None)  # what a repair that was cut off leaves, the next mends
        for manifest in found.manifests:
            faults = verify(store, manifest, deep=True).faults
            if faults:
                return f"{manifest.generation}: {faults}"
        held = {f"a{g.incarnation}x{g.step}" for g in (m.generation for m in found.manifests)}
        durable = [said.split()[1] for said in promises if said.startswith("durable")]
        if durable and durable[-1] not in held:
            newer = [one for one in held if _order(one) > _order(durable[-1])]
            if not newer:
                return f"{durable[-1]} was told durable; there are {sorted(held)}"
        if "pinned a1x1" in promises and (
            "a1x1" not in held or Generation(1, 1) not in pinned(store)
        ):
            return f"the pinned checkpoint is gone; there are {sorted(held)}"
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _order(attempt: str) -> tuple[int, ...]:
    return tuple(map(int, attempt[1:].split("x")))
