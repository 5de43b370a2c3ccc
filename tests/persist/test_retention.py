"""What a keeper prunes after each publication: what its policy lets go, never what is pinned."""

from __future__ import annotations

import pytest

from holdfast import events
from holdfast.catalogue import catalogue, manifest_path
from holdfast.format.manifest import Generation, Incarnation, seal
from holdfast.keeper.image_writer import PersistJob
from holdfast.keeper.persister import Persister
from holdfast.persist import commit
from holdfast.persist.pins import pin, unpin
from holdfast.persist.removal import plan
from holdfast.policy.when import Keep
from holdfast.storage.base import Store
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import PassingStore
from support.checkpoints import keeper_roots
from support.checkpoints.roots import whole
from support.runs.keeper_jobs import job_of

FIRST = Generation(1, 0)


def job_at(step: int, incarnation: int = 1, parent: tuple[int, int] | None = None) -> PersistJob:
    """A captured generation, as the keeper hands it to its persister."""
    record = Incarnation(run_id="r", n=incarnation, nonce=f"n{incarnation}", parent=parent)
    return job_of(Generation(incarnation, step), record)


def persist(store: Store, *jobs: PersistJob, keep: Keep = Keep(last=1)) -> None:  # noqa: B008
    """One keeper makes these durable, one after the other."""
    outcomes: list[str | None] = []
    persister = Persister(store, keep, lambda _, reason: outcomes.append(reason))
    for job in jobs:
        persister.work_one(job)
    persister.stop()
    assert outcomes == [None] * len(jobs)


def test_a_pinned_checkpoint_outlives_every_pruning_and_goes_when_it_is_let_go() -> None:
    store = MemoryStore()
    persist(store, job_at(0))
    pin(store, FIRST)
    persist(store, *(job_at(step) for step in range(1, 6)))
    assert whole(store) == ["1-0", "1-5"]
    unpin(store, FIRST)
    persist(store, *(job_at(step) for step in range(6, 9)))
    assert whole(store) == ["1-8"]
    assert not any(name.startswith("1-0-") for name in store.list("steps"))


def test_it_is_told_that_a_checkpoint_is_durable_before_old_ones_are_deleted() -> None:
    said: list[str] = []

    class Telling(PassingStore):
        def remove(self, path: str) -> None:
            said.append("deleted")
            super().remove(path)

    persister = Persister(
        Telling(MemoryStore()),
        Keep(last=1),
        lambda attempt, _: said.append(f"durable {attempt}"),
        lambda attempt: said.append(f"pruned {attempt}"),
    )
    for step, is_ring in enumerate((False, True, False)):
        job = job_at(step)
        job.is_ring = is_ring
        persister.work_one(job)
    persister.stop()
    assert said == [
        "durable a1x0",
        "durable a1x1",
        "deleted",
        "pruned a1x1",
        "durable a1x2",
        "deleted",
    ]


def test_an_abandoned_checkpoint_that_is_pinned_stays() -> None:
    store = MemoryStore()
    persist(store, job_at(0), job_at(1), job_at(2), keep=Keep())
    pin(store, Generation(1, 1))
    persist(store, *(job_at(step, 2, (1, 0)) for step in range(1, 5)))
    assert whole(store) == ["1-1", "2-4"]


def test_a_checkpoint_pinned_in_the_moment_it_is_pruned_comes_back() -> None:
    store = MemoryStore()
    persist(store, job_at(0))

    class Pinning(PassingStore):
        """Somebody pins just before the manifest goes."""

        def remove(self, path: str) -> None:
            if path == manifest_path(FIRST):
                pin(store, FIRST)
            super().remove(path)

    told: list[events.Event] = []
    stop = events.subscribe(lambda event, _: told.append(event))
    persist(Pinning(store), job_at(1))
    stop()
    assert whole(store) == ["1-0", "1-1"]
    assert not [event for event in told if isinstance(event, events.CheckpointPruned)]


def test_what_a_keeper_took_that_was_killed_before_it_saw_the_pin_comes_back() -> None:
    store = MemoryStore()
    persist(store, job_at(0))
    pin(store, FIRST)
    store.remove(manifest_path(FIRST))  # and there it was killed
    persist(store, *(job_at(step) for step in range(1, 6)))
    assert whole(store) == ["1-0", "1-5"]


def test_while_a_record_is_unreadable_nothing_is_taken_for_abandoned() -> None:
    store, keep = MemoryStore(), Keep(last=2, every=1)
    persist(store, job_at(0), job_at(1), keep=keep)
    # Incarnation 2 went on from 1-1; 3 went on from 2's snapshot of step 5, which was in memory.
    record = Incarnation(run_id="r", n=2, nonce="n2", parent=(1, 1))
    commit.record_incarnation(store, record)
    store.publish("incarnations/2.json", b"damaged", replace=True)
    persist(store, *(job_at(step, 3, (2, 5)) for step in range(6, 10)), keep=keep)
    store.publish("incarnations/2.json", seal(record), replace=True)
    assert catalogue(store).abandoned == ()
    assert whole(store) == ["1-0", "1-1", "3-6", "3-7", "3-8", "3-9"]


class AnsweredLate(PassingStore):
    """As a bucket is: what nobody answered may still take effect, here for an instant."""

    settle_s = 1e-9


def test_a_keeper_reads_each_manifest_of_a_bucket_once_however_many_it_publishes() -> None:
    read: list[str] = []

    class Reading(AnsweredLate):
        def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
            if path.startswith("manifests/"):
                read.append(path)
            return super().read(path, offset_bytes, size_bytes)

    store = MemoryStore()
    persist(store, *(job_at(step) for step in range(3)), keep=Keep())
    persist(Reading(store), *(job_at(step) for step in range(3, 9)), keep=Keep())
    assert sorted(read) == [manifest_path(Generation(1, step)) for step in range(3)]


@pytest.mark.parametrize("kind", [PassingStore, AnsweredLate])
def test_a_step_published_again_after_it_was_removed_keeps_the_images_that_it_names_now(
    kind: type[PassingStore],
) -> None:
    store = kind(MemoryStore())
    persister = Persister(store, Keep(), lambda _, reason: None)
    persister.work_one(job_at(0))
    persister.work_one(job_at(1))
    assert commit.withdraw(store, Generation(1, 1))
    record = Incarnation(run_id="r", n=1, nonce="n1")
    persister.work_one(job_of(Generation(1, 1), record, "other"))
    for step in (2, 3, 4):  # at each the sweeper looks for what no manifest names
        persister.work_one(job_at(step))
    persister.stop()
    assert whole(store) == ["1-0", "1-1", "1-2", "1-3", "1-4"]
    assert any(name.startswith("1-1-other") for name in store.list("steps"))


def valued(step: int, values: str) -> PersistJob:
    return keeper_roots.job_at(step, values=f'{{"shared":{values},"own":{{}}}}'.encode())


def test_the_best_by_a_plain_value_stay() -> None:
    store = MemoryStore()
    losses = ("3.0", '{"$float":"nan"}', "1.0", "2.0", "true", "1.0")
    jobs = [valued(step, f'{{"val":{{"loss":{loss}}}}}') for step, loss in enumerate(losses)]
    persist(store, *jobs, valued(6, "{}"), keep=Keep(best=2, by="val.loss"))
    assert whole(store) == ["1-2", "1-5", "1-6"]
    assert catalogue(store).values_of("val.loss") == {(1, 2): 1.0, (1, 5): 1.0}
    removal = plan(store, Keep(best=1, by="val.loss"), abandoned=False)
    assert [str(m.generation) for m in removal.checkpoints] == ["1-2"]


def test_a_misspelt_value_removes_nothing() -> None:
    store = MemoryStore()
    jobs = [valued(step, '{"loss":1.0}') for step in range(3)]
    persist(store, *jobs, keep=Keep(last=1, best=1, by="los"))
    assert whole(store) == ["1-0", "1-1", "1-2"]
