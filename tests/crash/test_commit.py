"""Storage stops, tears or fails at every operation of a commit; old or new is left, whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.catalogue import catalogue
from holdfast.errors import StorageError
from holdfast.format.manifest import Generation, Incarnation
from holdfast.geometry.layout import Layout
from holdfast.keeper.image_writer import ImageJob, PersistJob
from holdfast.keeper.persister import Persister
from holdfast.persist.pins import pin
from holdfast.policy.when import Keep
from holdfast.restore.reading.verify import verify
from holdfast.storage.base import Store
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import FaultyStore, Mode, PassingStore, Stopped
from support.checkpoints.images import images_of, random_leaf, seals, split_leaf

LAYOUT = Layout(2, (split_leaf("b", "I64", (3,), 2), split_leaf("w", "F32", (5, 3), 2)))
#: The same state after it got a leaf, and what it is at every step of a run that grows and shrinks.
GROWN = Layout(2, (*LAYOUT.leaves, split_leaf("x", "F32", (4,), 2)))
MORE = Layout(2, (*GROWN.leaves, split_leaf("y", "F32", (4,), 2)))
CHANGING = (LAYOUT, GROWN, MORE, LAYOUT, LAYOUT, LAYOUT, GROWN, LAYOUT, MORE)


def job_at(
    step: int,
    incarnation: int = 1,
    parent: tuple[int, int] | None = None,
    layout: Layout = LAYOUT,
) -> PersistJob:
    """A captured generation, as the keeper would hand it to its persister."""
    generation, attempt = Generation(incarnation, step), f"attempt{incarnation}-{step}"
    leaves = {leaf.name: random_leaf(leaf.dtype, leaf.shape, step) for leaf in layout.leaves}
    images = images_of(layout, leaves, generation=generation, attempt=attempt)
    jobs = {rank: ImageJob(rank, memoryview(image)) for rank, image in images.items()}
    for rank, image in images.items():
        jobs[rank].seal(*seals(image))
    record = Incarnation(run_id="r", n=incarnation, nonce=f"n{incarnation}", parent=parent)
    job = PersistJob(attempt, generation, layout.to_json(), jobs, record, 2, layout.hash)
    job.is_complete.set()
    return job


def persist(store: Store, job: PersistJob, keep: Keep) -> str | None:
    """Run one job to its end: None when it was published, else the reason. Stopped may rise."""
    outcome: list[str | None] = []
    stopped: list[BaseException] = []
    persister = Persister(store, keep, lambda _, reason: outcome.append(reason))

    def work() -> None:
        try:
            persister.work_one(job)
        except Stopped as error:
            stopped.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    persister.stop()
    if stopped:
        raise stopped[0]
    return outcome[0]


def check(store: Store, expected: set[tuple[int, int]]) -> tuple[int, int]:
    """Every manifest there is names a whole checkpoint; the newest is one of ``expected``."""
    found = catalogue(store)
    assert not found.broken
    for manifest in found.manifests:
        report = verify(store, manifest, deep=True)
        assert not report.faults, (manifest.generation, report.faults)
    assert found.latest is not None
    newest = (found.latest.incarnation, found.latest.step)
    assert newest in expected
    return newest


def stores(tmp_path: Path) -> list[Callable[[], Store]]:
    made = iter(range(10_000))
    return [MemoryStore, lambda: LocalStore(tmp_path / str(next(made)))]


@pytest.mark.parametrize("mode", ["stop", "torn", "error"])
@pytest.mark.parametrize("kind", [0, 1])
def test_old_or_new_checkpoint_survives_a_fault_at_any_operation(
    kind: int, mode: Mode, tmp_path: Path
) -> None:
    make = stores(tmp_path)[kind]
    keep = Keep(last=1)
    counted = FaultyStore(make())
    assert persist(counted.inner, job_at(0), keep) is None
    assert persist(counted, job_at(1), keep) is None
    operations = len(counted.changes)
    assert operations > 8
    for k in range(1, operations + 1):
        inner = make()
        assert persist(inner, job_at(0), keep) is None
        faulty = FaultyStore(inner, fail_at=k, mode=mode)
        try:
            reason = persist(faulty, job_at(1), keep)
        except Stopped:
            reason = "stopped"
        newest = check(inner, {(1, 0), (1, 1)})
        if mode == "error" and reason is None:
            assert newest == (1, 1)
        # The next start of the run, in either case, publishes and prunes as if nothing had been.
        for step in range(2, 6):
            assert persist(inner, job_at(step, 2, newest), keep) is None
            check(inner, {(2, step)})
        assert [m.generation for m in catalogue(inner).manifests] == [(2, 5)]


def test_an_attempt_that_was_published_before_its_keeper_died_is_not_written_again() -> None:
    store = MemoryStore()
    assert persist(store, job_at(0), Keep()) is None
    counted = FaultyStore(store)
    assert persist(counted, job_at(0), Keep()) is None
    # Only the manifest, unchanged: it may have been cut off before its name was durable.
    assert counted.changes == [("publish", "manifests/1-0.json")]
    check(store, {(1, 0)})


@pytest.mark.promise
def test_a_generation_is_never_published_from_two_attempts() -> None:
    store = MemoryStore()
    assert persist(store, job_at(0), Keep()) is None
    other = job_at(0)
    other.attempt = "another"
    reason = persist(store, other, Keep())
    assert reason is not None
    assert "published already" in reason
    check(store, {(1, 0)})


@pytest.mark.promise
def test_the_manifest_is_published_last_when_all_it_names_is_durable() -> None:
    counted = FaultyStore(MemoryStore())
    job = job_at(0)
    assert persist(counted, job, Keep()) is None
    images = [f"steps/1-0-{job.directory}/live-{rank:05d}.safetensors" for rank in range(2)]
    expected = {("publish", "incarnations/1.json"), ("publish", f"layouts/{LAYOUT.hash}.json")}
    expected |= {("finish", path) for path in images}
    manifest = ("publish", "manifests/1-0.json")
    assert counted.changes[-1] == manifest
    assert expected <= set(counted.changes)


@pytest.mark.promise
@pytest.mark.parametrize("part", ["header", "table"])
def test_an_image_that_is_not_the_sealed_one_is_not_published(part: str) -> None:
    store, job = MemoryStore(), job_at(0)
    if part == "header":
        job.images[1].header_xxh3 = "0" * 16
    else:
        job.images[1].table_xxh3 = "0" * 16
    reason = persist(store, job, Keep())
    assert reason is not None
    assert "changed after the image was sealed" in reason
    assert store.list("manifests") == store.list("steps") == []


class Awaited(threading.Event):
    """Tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        return super().wait(timeout)


@pytest.mark.promise
@pytest.mark.parametrize("ends", ["complete", "aborted", "never"])
def test_nothing_is_published_before_all_ranks_have_captured(ends: str) -> None:
    store, job, outcome = MemoryStore(), job_at(0), list[str | None]()
    job.is_complete = written = Awaited()
    stall_s = 0.2 if ends == "never" else 60.0
    persister = Persister(store, Keep(), lambda _, reason: outcome.append(reason), stall_s=stall_s)
    persister.submit(job)
    assert written.is_awaited.wait(20) and store.list("steps")  # every image is written
    assert store.list("manifests") == []
    if ends == "complete":
        job.is_complete.set()
    if ends == "aborted":
        job.abort("a rank was lost")
    persister.stop()
    assert store.list("manifests") == (["1-0.json"] if ends == "complete" else [])
    reason = {"complete": None, "aborted": "a rank was lost"}
    never = "the generation was never complete on all ranks"
    assert outcome == [reason.get(ends, never)]


def test_a_capture_that_came_to_nothing_leaves_no_trace() -> None:
    store = MemoryStore()
    assert persist(store, job_at(0), Keep()) is None
    job = job_at(1)
    job.abort("a rank was lost")
    reason = persist(store, job, Keep())
    assert reason == "a rank was lost"
    assert store.list("steps") == [n for n in store.list("steps") if n.startswith("1-0-")]
    check(store, {(1, 0)})


def test_an_unreadable_manifest_protects_what_it_may_name() -> None:
    store = MemoryStore()
    for step in range(2):
        assert persist(store, job_at(step), Keep()) is None
    good = store.read("manifests/1-0.json")
    store.publish("manifests/1-0.json", good[:-20], replace=True)
    for step in range(2, 7):
        assert persist(store, job_at(step), Keep()) is None
    store.publish("manifests/1-0.json", good, replace=True)
    check(store, {(1, 6)})


@pytest.mark.promise
def test_storage_errors_name_what_was_refused() -> None:
    store = FaultyStore(MemoryStore(), fail_at=3, mode="error")
    reason = persist(store, job_at(0), Keep())
    assert reason is not None
    assert issubclass(StorageError, Exception)
    assert "space" in reason.lower()


class _FailsAfterNaming(PassingStore):
    """A publication that succeeds, and then reports an error: the directory's fsync failed."""

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        super().publish(path, data, replace=replace)
        if path.startswith("manifests/"):
            raise StorageError(f"{path}: the directory could not be synced")


def test_a_manifest_that_may_stand_keeps_its_images_whatever_was_reported() -> None:
    inner = MemoryStore()
    assert persist(_FailsAfterNaming(inner), job_at(0), Keep()) is not None
    check(inner, {(1, 0)})


def run(store: Store, steps: int) -> list[str | None]:
    """One keeper persists one step after the other and keeps the last; how each ended."""
    outcomes: list[str | None] = []
    persister = Persister(store, Keep(last=1), lambda _, reason: outcomes.append(reason))
    try:
        for step in range(steps):
            persister.work_one(job_at(step))
    except Stopped:
        outcomes.append("stopped")
    persister.stop()
    return outcomes


@pytest.mark.parametrize("mode", ["stop", "torn", "error"])
def test_no_fault_at_any_operation_of_a_whole_run_takes_what_a_manifest_names(mode: Mode) -> None:
    counted = FaultyStore(MemoryStore())
    assert run(counted, 5) == [None] * 5
    assert [name for name, _ in counted.changes].count("remove_tree") == 2
    for k in range(1, len(counted.changes) + 1):
        inner = MemoryStore()
        faulty = FaultyStore(inner, fail_at=k, mode=mode)
        outcomes = run(faulty, 5)
        last = max((step for step, reason in enumerate(outcomes) if reason is None), default=-1)
        # The step behind the last one told of may have been published just before the fault.
        if catalogue(inner).manifests:
            check(inner, {(1, last), (1, last + 1)})
        else:
            assert last == -1


def change(store: Store, incarnation: int = 1) -> list[str | None]:
    """One keeper persists a run whose layout changes from step to step, and keeps the last one."""
    outcomes: list[str | None] = []
    persister = Persister(store, Keep(last=1), lambda _, reason: outcomes.append(reason))
    try:
        for step, layout in enumerate(CHANGING):
            persister.work_one(job_at(step + 10 * incarnation, incarnation, layout=layout))
    except Stopped:
        outcomes.append("stopped")
    persister.stop()
    return outcomes


def layouts(store: Store) -> list[str]:
    return [name.removesuffix(".json") for name in store.list("layouts")]


def test_a_layout_that_no_checkpoint_is_in_goes_at_the_second_publication_after() -> None:
    store, lives = MemoryStore(), list[bool]()
    persister = Persister(store, Keep(last=1), lambda *_: None)
    persister.work_one(job_at(0, layout=GROWN))
    store.publish("layouts/notes.txt", b"a person's own")
    for step in range(1, 4):
        persister.work_one(job_at(step))
        lives.append(GROWN.hash in layouts(store))
    persister.stop()
    assert lives == [True, True, False]
    assert layouts(store) == [LAYOUT.hash, "notes.txt"]


def test_layouts_that_checkpoints_or_pins_need_stay_whatever_retention_takes() -> None:
    store = MemoryStore()
    persister = Persister(store, Keep(last=1), lambda *_: None)
    persister.work_one(job_at(0, layout=GROWN))
    pin(store, Generation(1, 0))
    for step in range(1, 8):
        persister.work_one(job_at(step, layout=MORE if step % 2 else LAYOUT))
    persister.stop()
    assert {LAYOUT.hash, GROWN.hash, MORE.hash} == set(layouts(store))
    check(store, {(1, 7)})


@pytest.mark.promise
def test_while_a_manifest_cannot_be_read_no_layout_goes() -> None:
    store = MemoryStore()
    persister = Persister(store, Keep(last=1), lambda *_: None)
    persister.work_one(job_at(0, layout=GROWN))
    good = store.read("manifests/1-0.json")
    store.publish("manifests/1-0.json", good[:-20], replace=True)
    for step in range(1, 8):
        persister.work_one(job_at(step))
    persister.stop()
    store.publish("manifests/1-0.json", good, replace=True)
    check(store, {(1, 7)})


@pytest.mark.parametrize("mode", ["stop", "torn", "error"])
def test_no_fault_at_any_operation_takes_a_layout_that_a_checkpoint_is_in(mode: Mode) -> None:
    counted = FaultyStore(MemoryStore())
    assert change(counted) == [None] * len(CHANGING)
    swept = [path for name, path in counted.changes if name == "remove" and "layouts/" in path]
    assert len(swept) >= 2
    assert set(layouts(counted.inner)) >= {MORE.hash}
    for k in range(1, len(counted.changes) + 1):
        inner = MemoryStore()
        outcomes = change(FaultyStore(inner, fail_at=k, mode=mode))
        if catalogue(inner).manifests:
            last = max((step for step, why in enumerate(outcomes) if why is None), default=-1)
            check(inner, {(1, 10 + last), (1, 11 + last)})
        assert change(inner, 2) == [None] * len(CHANGING)  # the next start, as if nothing had been
        check(inner, {(2, 20 + len(CHANGING) - 1)})


class _Broken(PassingStore):
    """Every listing meets a fault nobody thought of."""

    def list(self, prefix: str) -> list[str]:
        raise ZeroDivisionError


def test_a_fault_in_pruning_that_nobody_thought_of_does_not_end_the_persister() -> None:
    inner, outcomes = MemoryStore(), list[str | None]()
    persister = Persister(_Broken(inner), Keep(last=1), lambda _, reason: outcomes.append(reason))
    for step in range(3):
        persister.submit(job_at(step))
    persister.stop()
    assert outcomes == [None, None, None]
    check(inner, {(1, 2)})


@pytest.mark.promise
def test_the_files_of_a_pruned_checkpoint_go_at_the_second_publication_after() -> None:
    store = MemoryStore()
    lives: list[bool] = []
    persister = Persister(store, Keep(last=1), lambda *_: None)
    for step in range(4):
        persister.work_one(job_at(step))
        lives.append(any(name.startswith("1-0-") for name in store.list("steps")))
    persister.stop()
    # Published; pruned by the next, its readers warned; still there; gone.
    assert lives == [True, True, True, False]
