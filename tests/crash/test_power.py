"""The power fails between any two calls of a run's storage: what was told durable is there, whole.

Every state that the model of ``holdfast.testing.faults.power`` allows is laid out and opened.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from holdfast.catalogue import ROOT, catalogue, layout_path
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
from holdfast.storage import direct, files, local
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults.power import PowerRecorder, crash_states
from support.checkpoints.images import split_leaf
from support.checkpoints.keeper_roots import change
from support.project.sample import SEED
from support.runs.keeper_jobs import job_of

LAYOUT = Layout(2, (split_leaf("b", "I64", (3,), 2), split_leaf("w", "F32", (520, 3), 2)))
GROWN = Layout(2, (*LAYOUT.leaves, split_leaf("x", "F32", (4,), 2)))
#: Of all states, those that `make test` opens; `make test-all` opens as many as are asked for.
SAMPLE, ALL = 500, 10_000


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


def work(root: Path, recorder: PowerRecorder) -> None:
    """Save, prune, pin, change the layout, remove by hand, start again, copy in and repair, in one
    directory.
    """
    store = LocalStore(root)
    copy(source(), store, None, lambda *_: None)
    recorder.promise("durable a1x0")
    recorder.promise("damaged")  # from here on it may be
    damaged = catalogue(store).manifests[0]
    store.remove(layout_path(damaged.layout))
    change(store, damaged.images[0].path, 4100)
    repair(store, [source()], None)
    recorder.promise("mended")
    remove(store, plan(store, Keep(), abandoned=False))
    told: list[str] = []

    def tell(attempt: str, reason: str | None) -> None:
        told.append(reason or "")
        if reason is None:
            recorder.promise(f"durable {attempt}")

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
                    recorder.promise("pinned a1x1")
            persister.stop()
        remove(store, plan(store, Keep(last=1), abandoned=False))
    assert told == [""] * 9


def wrong_in(directory: Path, promises: Sequence[str]) -> str:
    """Open a root after a loss of power; return what was promised and is not so, "" for nothing."""
    store = LocalStore(directory)
    try:
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


def recorded(root: Path) -> PowerRecorder:
    root.mkdir()
    with PowerRecorder(root) as recorder:
        work(root, recorder)
    return recorder


def wrong_states(recorder: PowerRecorder, scratch: Path, most: int) -> Iterator[tuple[int, str]]:
    """Yield (operations done, what is wrong) for each of ``most`` states, by the day's seed."""
    options: Any = {"per_cut": 24, "seed": SEED}
    if most >= ALL:
        options |= {"per_cut": 400, "tears": 10}
    states = partial(crash_states, recorder.operations, recorder.directories, **options)
    total = sum(1 for _ in states())
    chosen = set(random.Random(SEED).sample(range(total), min(most, total)))
    for number, state in enumerate(states()):
        if number not in chosen:
            continue
        directory = scratch / str(number)
        state.lay_out(directory)
        wrong = wrong_in(directory, state.promises)
        shutil.rmtree(directory)
        yield state.done, wrong


@pytest.mark.promise
def test_what_was_told_durable_is_whole_after_a_loss_of_power_at_any_call(tmp_path: Path) -> None:
    recorder = recorded(tmp_path / "root")
    found = list(wrong_states(recorder, tmp_path / "states", SAMPLE))
    print(f"{len(recorder.operations)} calls, {len(found)} states")
    assert len(found) == SAMPLE
    assert [one for one in found if one[1]] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_states_after_a_loss_of_power_are_all_whole(tmp_path: Path) -> None:
    found = list(wrong_states(recorded(tmp_path / "root"), tmp_path / "states", ALL))
    print(f"{len(found)} states")
    assert len(found) == ALL
    assert [one for one in found if one[1]] == []


def _nothing(*_: object) -> None:
    """Leave an fsync out."""


def _write_without_sync(target: str, data: bytes) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.pwrite(descriptor, data, 0)
    os.close(descriptor)


def _publish_before_sync(
    self: LocalStore, path: str, data: bytes, *, replace: bool = False
) -> None:
    """Give the name first, and fsync the file behind it."""
    target = self._local(path)
    self._settle(str(Path(target).parent))
    temporary = f"{Path(target).parent}/.publish-{next(_numbers)}"
    _write_without_sync(temporary, data)
    os.replace(temporary, target)
    files.sync_directory(str(Path(target).parent))
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


_numbers = count()

#: What the harness must see: object, attribute, what stands in its place.
LEFT_OUT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "fsync of a published file": lambda p: p.setattr(local, "write_durably", _write_without_sync),
    "sync of a published name": lambda p: p.setattr(local, "sync_directory", _nothing),
    "sync of an image's name": lambda p: p.setattr(direct, "sync_directory", _nothing),
    "fsync of an image": lambda p: p.setattr(direct, "os", _Without("fsync")),
    "link before fsync": lambda p: p.setattr(LocalStore, "publish", _publish_before_sync),
}


class _Without:
    """The module ``os`` without one function."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _nothing if name == self._name else getattr(os, name)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_harness_sees_every_fsync_that_is_left_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        LEFT_OUT[name](patch)
        recorder = recorded(tmp_path / "root")
    assert any(wrong for _, wrong in wrong_states(recorder, tmp_path / "states", 4 * SAMPLE))
