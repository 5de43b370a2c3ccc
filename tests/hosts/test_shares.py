"""What a keeper of another host writes of an attempt: only what is meant, and not for ever."""

from __future__ import annotations

import threading
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.slots import Slot, slot_id_of
from holdfast.errors import PersistFailed
from holdfast.format.manifest import AttemptId, ImageId, Incarnation
from holdfast.geometry.layout import table_hash
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.executor import Executor
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.agent import WriteService
from holdfast.keeper.hosts.followers import FollowerRegistry
from holdfast.keeper.image_writer import PersistJob
from holdfast.keeper.jobs import Background, RemoteImages, write_all
from holdfast.keeper.persister import Persister
from holdfast.persist import commit
from holdfast.policy.when import Keep
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotFile, SlotRecord
from holdfast.protocol.facts import Fact
from holdfast.storage.local import LocalStore
from support.runs.keepers import RUN


class Mind:
    """A coordinator with one attempt, whose only image is in slot 0 of ``host``."""

    def __init__(self, host: int) -> None:
        slot = slot_id_of(host, 0)
        self.attempt = Attempt("x", 1, 1, 1, "L")
        self.attempt.slots = {0: slot}
        coordinator = SimpleNamespace(
            attempts={"x": self.attempt}, slots={slot: Slot(slot, 1 << 20, "captured")}
        )
        background = SimpleNamespace(from_thread=lambda call: call())
        self.hands = FollowerRegistry(
            cast(Any, coordinator),
            cast(Any, background),
            lambda _: None,
            lambda *_: None,
            lambda _: None,
        )
        self.said: list[Fact] = []
        by_host = vars(self.hands)["_by_host"]
        for n in (1, 2):
            by_host[n] = SimpleNamespace(host=n, shares={}, send=self.said.append)
        nothing_here = SimpleNamespace(images=lambda *_: {}, begin=lambda _: None)
        self.executor: Any = Executor.__new__(Executor)
        vars(self.executor).update(
            memory=SimpleNamespace(layout=lambda _: b""),
            _jobs={},
            followers=self.hands,
            agent=SimpleNamespace(writes=nothing_here, report=None),
        )

    def start(self) -> PersistJob:
        incarnation = Incarnation(run_id=RUN, n=1, nonce="n", parent=None, world=1, created_s=0.0)
        job: PersistJob = self.executor._job_of(self.attempt, incarnation)
        return job


def test_what_waits_for_storage_is_let_go_when_the_hosts_are_numbered_anew() -> None:
    job = Mind(1).start()
    assert not job.aborted
    mind = Mind(1)
    job = mind.start()
    mind.executor.abort_jobs("a newer one began", shared_only=True)
    assert job.aborted == "a newer one began"
    mind.said.clear()
    with pytest.raises(PersistFailed, match="a newer one began"):
        write_all(job.shares)
    assert mind.said == []


def test_no_host_is_told_to_write_what_lies_on_another() -> None:
    mind = Mind(1)
    job = mind.start()
    mind.attempt.slots = {0: slot_id_of(2, 0)}
    with pytest.raises(PersistFailed, match="out of reach"):
        write_all(job.shares)
    assert mind.said == []


def test_a_slot_that_holds_another_image_is_not_written(tmp_path: Path) -> None:
    memory = ArenaFiles(tmp_path, RUN, None)
    memory.files[0] = SlotFile.create(tmp_path / "00000.slot", 1 << 20)
    memory.stamp(0, SlotRecord(state="captured", attempt="x", rank=1))
    writings = WriteService(memory, LocalStore(tmp_path / "root"), Background.__new__(Background))
    said: list[Fact] = []
    for attempt, rank in (("y", 1), ("x", 0)):
        image_id = ImageId(rank, 100, "", "")
        image = host_messages.ImageOrder(slot=0, image=image_id, ring_bytes=0, is_sealed=False)
        writings.start(
            host_messages.WriteImage(
                directory="d", attempt_id=AttemptId(1, 1, attempt, 2, "L"), images=(image,)
            ),
            said.append,
        )
        told = said.pop()
        assert isinstance(told, host_messages.WriteEnded)
        assert told.reason == f"slot 0 holds no image of rank {rank} in attempt {attempt}"
    memory.files[0].close()


def share(**limits: float) -> tuple[RemoteImages, list[str]]:
    stopped: list[str] = []
    return RemoteImages("b", frozenset({0}), lambda: None, stopped.append, **limits), stopped


def test_a_host_that_writes_nothing_for_long_is_named() -> None:
    one, stopped = share(stall_s=0.2)
    with pytest.raises(PersistFailed, match="host b has written nothing"):
        write_all([one])
    assert stopped


def test_a_host_that_does_not_stop_is_not_waited_for() -> None:
    one, stopped = share(end_s=0.2)
    threading.Timer(0.1, one.abort, ["not wanted"]).start()
    with pytest.raises(PersistFailed, match="host b has written nothing"):
        write_all([one])
    assert stopped[0] == "not wanted"


def test_one_thread_waits_for_all_hosts_and_the_first_failure_stops_the_others() -> None:
    shares = [RemoteImages(f"h{n}", frozenset({n}), lambda: None, lambda _: None) for n in range(9)]
    told: list[str] = []

    def failed(reason: str) -> None:
        told.append(reason)
        for other in shares:
            other.abort(reason)
        for other in shares[:7]:
            other.end("it was stopped")

    threads = threading.active_count()
    threading.Timer(0.1, shares[7].end, ["no room"]).start()
    threading.Timer(0.3, shares[8].end).start()
    with pytest.raises(PersistFailed, match="host h7: no room"):
        write_all(shares, failed)
    assert told == ["host h7: no room"]
    assert threading.active_count() <= threads + 1


def test_other_hosts_are_told_to_write_before_the_own_images_are_written(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit.open_root(store, RUN)
    persister, job, told = Persister(store, Keep(), lambda *_: None), Mind(1).start(), Event()

    def write(*_: object) -> list[Any]:
        assert told.wait(20), "a host waits until own images are written"
        return []

    vars(persister)["_images"] = SimpleNamespace(write=write, parts=SimpleNamespace(base=None))
    arrival = SimpleNamespace(abort=lambda _: None)
    job.images = dict.fromkeys(range(8), cast(Any, SimpleNamespace(ring=None, arrival=arrival)))
    job.layout = table_hash(job.layout_data)

    def begin() -> None:
        told.set()
        other.end("its disk is full")

    other = RemoteImages("b", {9}, begin, lambda _: None)
    job.shares, job.broke = [other], lambda _: None
    with pytest.raises(PersistFailed, match="its disk is full"):
        persister._persist(job)
    assert told.is_set()


def test_a_host_that_was_given_up_is_not_told_to_write_any_more() -> None:
    told = list[str]()
    share = RemoteImages("b", {9}, lambda: told.append("begin"), lambda _: None)
    share.abort("another image failed")
    with pytest.raises(PersistFailed, match="another image failed"):
        write_all([share])
    assert told == []


def test_a_host_that_ends_without_a_receipt_has_not_written() -> None:
    one, _ = share()
    threading.Timer(0.1, one.end).start()
    with pytest.raises(PersistFailed, match="no receipt for ranks"):
        write_all([one])


def test_a_host_that_serves_its_images_on_another_port_says_so_when_it_attaches() -> None:
    durability = SimpleNamespace(add=lambda _: None, order=m.NO_ORDER)
    coordinator = SimpleNamespace(attach=lambda *_: None, durability=durability)
    nothing: Any = lambda *_: None  # noqa: E731
    hands = FollowerRegistry(cast(Any, coordinator), nothing, nothing, nothing, nothing)
    handover = SimpleNamespace(
        attach_reply=lambda *_: host_messages.HostAttached(), current=lambda: None
    )
    hands.handover = cast(Any, handover)
    line = SimpleNamespace(peer="b", send=lambda _: None)
    inventory = host_messages.HostInventory(arena="", slots=(), next_number=0, port=77)
    hands._attach(2, cast(Any, line), inventory)
    assert (hands.port_of(1), hands.port_of(2)) == (0, 77)


@pytest.mark.promise
def test_a_write_that_is_aborted_while_it_begins_is_stopped_after_its_order() -> None:
    told: list[str] = []

    def begin() -> None:
        other.abort("closed")
        told.append("order")

    other = RemoteImages("b", {9}, begin, told.append)
    other.write(lambda _: None)
    assert told == ["closed", "order", "closed"]
