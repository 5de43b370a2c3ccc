"""What is being read is not swept, and what retention took first is listed again, by all ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import checkpointer as checkpointer_module
from holdfast import oneshot
from holdfast.catalogue import LEASES, NEW_LISTS, catalogue, manifest_path
from holdfast.cli.checkpoints import hold_checkpoint, open_root
from holdfast.errors import NotFound, RestoreError, StorageError
from holdfast.format.manifest import AttemptId, ImageId
from holdfast.leases import LEASE_S
from holdfast.protocol.messages import HoldingPart, Inventory
from holdfast.restore import storage_hold
from holdfast.restore.cluster.collect import InventoryCollector
from holdfast.restore.planning.candidates import Candidate
from holdfast.restore.planning.selection import Inventories
from holdfast.restore.reading.verify import verify
from holdfast.restore.sources import ClusterRestore, KnownRecoveries, RestoreSources
from holdfast.storage.base import Store
from holdfast.storage.local import LocalStore
from holdfast.storage.open import open_store
from holdfast.testing.faults import PassingStore
from holdfast.world import World
from support.checkpoints.roots import Clock, Retention, whole
from support.runs.launch import run_ranks

READS = ("read", "read_into", "size_bytes", "exists", "list")


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((300, 50), float(step)), "v": torch.full((7,), -float(step)), "n": step}


def check(state: dict[str, Any], step: int) -> None:
    assert bool((state["w"] == step).all()) and bool((state["v"] == -step).all())
    assert state["n"] == step


class Beside(PassingStore):
    """A reader's store; ``act`` is done beside it before the k-th read, or each one of an image."""

    def __init__(
        self, inner: Store, act: Callable[[], None], k: int | None, *, is_read_only: bool
    ) -> None:
        super().__init__(inner)
        self._act, self._k, self._is_read_only = act, k, is_read_only
        self._is_acting, self._turn, self.reads = False, threading.Lock(), 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in READS or self._is_acting:
            return found

        def read(path: str, *arguments: Any, **options: Any) -> Any:
            self.reads += 1
            is_due = path.startswith("steps/") if self._k is None else self._k == self.reads
            if is_due and self._turn.acquire(blocking=False):  # images are read by several threads
                self._is_acting = True
                self._act()
                self._is_acting = False
                self._turn.release()
            return found(path, *arguments, **options)

        return read

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        if self._is_read_only:
            raise StorageError(f"publish of {path} failed: read-only file system")
        super().publish(path, data, replace=replace)


class Run:
    """A run that goes on beside the reader: each publication takes what was there before."""

    def __init__(self, root: Path) -> None:
        self.root, self.step = root, 10
        self.retention = Retention(LocalStore(root))

    def publish(self) -> None:
        self.step += 1
        holdfast.save(self.root, state_of(self.step), step=self.step)
        self.retention.publication()

    def publish_thrice(self) -> None:
        """Until the images are gone that nobody holds."""
        for _ in range(3):
            self.publish()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template") / "run"
    holdfast.save(root, state_of(10), step=10)
    return root


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Run:
    return Run(Path(shutil.copytree(template, tmp_path / "run")))


def beside(
    patch: pytest.MonkeyPatch,
    root: Path,
    act: Callable[[], None],
    k: int | None = None,
    *,
    is_read_only: bool = False,
) -> Beside:
    """From now on the reader's store is such a one; the run's own is not."""
    store = Beside(LocalStore(root), act, k, is_read_only=is_read_only)

    def store_at(path: Any, *_: Any) -> Store:
        return open_store(path) if store._is_acting else store

    patch.setattr(oneshot, "open_source", store_at)
    return store


def leases(root: Path) -> list[str]:
    return LocalStore(root).list(LEASES)


@pytest.mark.parametrize("is_read_only", [False, True])
@pytest.mark.timeout(300)
def test_a_load_gives_the_newest_that_stands_whenever_retention_comes_in_its_way(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read_only: bool
) -> None:
    found = []
    for k in range(1, 200):
        run = Run(Path(shutil.copytree(template, tmp_path / f"run-{k}")))
        with monkeypatch.context() as patch:
            store = beside(patch, run.root, run.publish_thrice, k, is_read_only=is_read_only)
            state = state_of(0)
            restored = holdfast.load(run.root, state)
        if store.reads < k:
            break
        check(state, restored.step)
        found.append(restored.step)
        assert leases(run.root) == []
        shutil.rmtree(run.root)
    # Listed before it came: the old one, if a lease could be had, and else the new one.
    assert set(found) == ({13} if is_read_only else {10, 13}) and len(found) > 15


def test_a_slow_load_beside_a_run_that_keeps_only_its_last_checkpoint_reads_what_it_began(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = beside(monkeypatch, run.root, run.publish)
    state = state_of(0)
    restored = holdfast.load(run.root, state)
    check(state, restored.step)
    assert restored.step == 10 and run.step > 10 + 5 and store.reads > 10, "it was slow"
    monkeypatch.undo()  # the reader has done
    run.publish_thrice()
    assert len(whole(LocalStore(run.root))) == 1, "it holds nothing any more"
    assert len(LocalStore(run.root).list("steps")) <= 3


def test_without_a_lease_lists_are_made_anew_a_bounded_number_of_times(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside(monkeypatch, run.root, run.publish_thrice, is_read_only=True)
    dropped: list[holdfast.Event] = []
    stop = holdfast.subscribe(lambda event, _: dropped.append(event))
    with pytest.raises(RestoreError, match="no generation could be restored"):
        holdfast.load(run.root, state_of(0))
    stop()
    assert 0 < len([1 for one in dropped if type(one).__name__ == "SourceDropped"]) <= NEW_LISTS + 1


@pytest.mark.parametrize("wanted", [10, "1-10"])
def test_a_step_that_was_asked_for_and_is_gone_meanwhile_is_not_found(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int | str
) -> None:
    said = set()
    for k in range(1, 200):
        run = Run(Path(shutil.copytree(template, tmp_path / f"run-{k}")))
        state = state_of(0)
        with monkeypatch.context() as patch:
            store = beside(patch, run.root, run.publish_thrice, k, is_read_only=True)
            try:
                holdfast.load(run.root, state, wanted)
            except NotFound as error:
                said.add("was removed while it was read" in str(error))
            else:
                check(state, 10)
        shutil.rmtree(run.root)
        if store.reads < k:
            break
    assert said == {False, True}


def test_a_checkpoint_that_is_open_stays_readable_until_it_is_closed(run: Run) -> None:
    with holdfast.open(run.root) as reader:
        for _ in range(5):
            run.publish()
        assert bool((torch.as_tensor(reader.read("w")) == 10).all())
        assert len(leases(run.root)) == 1
    assert leases(run.root) == []
    run.publish_thrice()
    with pytest.raises(NotFound):
        holdfast.open(run.root, "1-10")
    assert leases(run.root) == []
    assert not any(name.startswith("1-10-") for name in LocalStore(run.root).list("steps"))


def test_a_reader_that_nobody_closed_lets_go_when_it_is_collected(run: Run) -> None:
    reader = holdfast.open(run.root)
    assert len(leases(run.root)) == 1
    del reader
    assert leases(run.root) == []


def test_what_a_command_reads_stays_and_what_went_before_it_is_listed_again(run: Run) -> None:
    before = open_root(str(run.root))
    run.publish_thrice()
    chosen = hold_checkpoint(before, None)
    assert str(chosen.manifest.generation) == "4-13"
    run.publish_thrice()
    assert not verify(chosen_store := LocalStore(run.root), chosen.manifest, deep=True).faults
    del chosen
    assert chosen_store.list(LEASES) == []
    with pytest.raises(NotFound, match="1-10"):
        hold_checkpoint(before, "1-10")
    assert chosen_store.list(LEASES) == []


def test_storage_that_fails_in_the_middle_leaves_what_is_in_memory(run: Run) -> None:
    class Broken(PassingStore):
        is_broken = False

        def exists(self, path: str) -> bool:
            if self.is_broken:
                raise StorageError("the disk fails")
            return super().exists(path)

    store = Broken(LocalStore(run.root))
    stored = Candidate(1, 10, "storage", "a", "s")
    part = HoldingPart(AttemptId(1, 9, "b", 1, "l"), (ImageId(0, 1, "h", "t"),))
    inventory = Inventory("", (part,), {1: None})
    known = Inventories((inventory,), (stored,))

    class Sources(RestoreSources):
        def gather(self) -> KnownRecoveries:
            return KnownRecoveries(known, InventoryCollector([inventory]))

        def list_stored(self, known: Inventories) -> Inventories:
            return pytest.fail("storage is not listed again")

    sources = Sources(store, 0, run.root, lambda *_: pytest.fail("no keeper is asked"))
    restore = ClusterRestore(sources, World(), wanted=None, timeout_s=10)
    assert restore.first() == [stored]
    store.is_broken = True
    (held,) = restore.plan_again(stored, StorageError("the disk fails"))
    assert (held.step, held.where) == (9, "memory")


READER = """
import os, signal, sys
import holdfast
reader = holdfast.open(sys.argv[1])
print("open", flush=True)
signal.pause()
"""


def test_a_reader_that_was_killed_holds_nothing_for_long(run: Run) -> None:
    clock = Clock()
    retention = Retention(LocalStore(run.root), clock)
    run.retention = retention
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(run.root)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "open\n"
        run.publish_thrice()
        assert whole(LocalStore(run.root)) == ["1-10", "4-13"]
        os.kill(process.pid, signal.SIGKILL)
    clock.now_s += LEASE_S - 1
    run.publish()
    assert len(leases(run.root)) == 1
    clock.now_s += LEASE_S
    run.publish_thrice()
    assert leases(run.root) == []
    assert whole(LocalStore(run.root)) == ["8-17"]


# ── all ranks ──────────────────────────────────────────────────────────────────────────────────


def take(root: Path) -> None:
    """As a remover that knows no leases: the newest checkpoint goes at once."""
    store = LocalStore(root)
    found = catalogue(store)
    assert found.latest is not None
    manifest = found.find(found.latest)
    assert manifest is not None
    store.remove(manifest_path(manifest.generation))
    for directory in manifest.directories:
        store.remove_tree(directory)


def load_beside(rank: int, _: int, root: str, k: int, where: int) -> tuple[int, int]:
    state = state_of(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_hold, "_MOST_VALUES_BYTES", 0)  # long ones are read by each rank
        act = (lambda: take(Path(root))) if rank == where else (lambda: None)
        beside(patch, Path(root), act, k)
        restored = holdfast.load(root, state)
    check(state, restored.step)
    return restored.step, len(leases(Path(root)))


@pytest.mark.parametrize(("where", "k"), [(0, 6), (0, 8), (1, 1), (1, 2), (1, 5)])
def test_what_one_rank_finds_gone_all_ranks_list_again(run: Run, where: int, k: int) -> None:
    run.retention.publication = lambda: None  # type: ignore[method-assign]
    run.publish()
    found = run_ranks(2, load_beside, str(run.root), k, where)
    assert [step for step, _ in found] == [10, 10]
    assert leases(run.root) == []


@pytest.mark.parametrize("wanted", [None, 11])
def test_a_restore_goes_on_with_what_stands_and_a_named_step_that_is_gone_is_not_found(
    run: Run, monkeypatch: pytest.MonkeyPatch, wanted: int | None
) -> None:
    run.retention.publication = lambda: None  # type: ignore[method-assign]
    run.publish()
    store = Beside(LocalStore(run.root), lambda: take(run.root), -1, is_read_only=False)
    monkeypatch.setattr(checkpointer_module, "open_store", lambda _: store)
    state = state_of(0)
    with holdfast.Checkpointer(run.root, state, storage=None) as checkpointer:
        store._k = store.reads + 9  # in the middle of it
        if wanted is None:
            restored = checkpointer.restore()
            assert restored is not None and restored.step == 10
            check(state, 10)
        else:
            with pytest.raises(NotFound, match="step 11"):
                checkpointer.restore(step=wanted)
        assert store.reads > store._k
        assert leases(run.root) == []
