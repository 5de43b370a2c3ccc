"""Four clients use one root at once; what each was told is held against a model of all of it.

One publishes and prunes, one pins and unpins, one lists, one restores. Whatever their order: what
was told durable is in every later list until it is pruned, what was pinned before a pruning is not
taken by it, and what is restored is bit for bit what was saved.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pytest

from holdfast.catalogue import LOCK, catalogue
from holdfast.errors import NotFound
from holdfast.events import CheckpointPruned, Event, subscribe
from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper.persister import Persister
from holdfast.leases import ReadLease
from holdfast.persist import commit
from holdfast.persist.pins import pin, pinned, unpin
from holdfast.policy.when import Keep
from holdfast.restore.reading.verify import verify
from holdfast.storage.base import Store
from holdfast.storage.lease_lock import LeaseTimes
from holdfast.storage.memory import MemoryStore
from support.project.sample import DAY
from support.runs.keeper_jobs import job_of
from support.servers.bucket_model import World, model_store
from support.servers.object_servers import object_store, use

SAVES = 30
RECORD = Incarnation(run_id="r", n=1, nonce="n", parent=None, world=2, created_s=1.0)


@dataclass(frozen=True)
class Call:
    """What one client did, from when to when, and what it was told of."""

    kind: str
    begun_s: float
    ended_s: float
    told: frozenset[Generation]


@dataclass
class History:
    """All calls; ``durable``: when each generation was told so; ``images``: what was saved."""

    store: Store
    calls: list[Call] = field(default_factory=list)
    begun: dict[Generation, float] = field(default_factory=dict)
    durable: dict[Generation, float] = field(default_factory=dict)
    images: dict[Generation, dict[int, bytes]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def note(self, kind: str, act: Callable[[], set[Generation]]) -> None:
        begun_s = time.monotonic()
        told = act()
        self.calls.append(Call(kind, begun_s, time.monotonic(), frozenset(told)))

    def of(self, kind: str) -> list[Call]:
        return [call for call in self.calls if call.kind == kind]


def publish(history: History) -> None:
    """Saves, keeping the last three; each publication prunes."""
    gone = set[Generation]()

    def hear(event: Event, _: float) -> None:
        if isinstance(event, CheckpointPruned):
            gone.add(Generation(event.pruned_incarnation, event.pruned_step))

    def done(attempt: str, reason: str | None) -> None:
        assert reason is None, reason
        history.durable[Generation(1, int(attempt.rpartition("x")[2]))] = time.monotonic()

    persister = Persister(history.store, Keep(last=3), done)

    def save(step: int) -> set[Generation]:
        gone.clear()
        job = job_of(Generation(1, step), RECORD)
        history.images[job.generation] = {n: bytes(one.memory) for n, one in job.images.items()}
        history.begun[job.generation] = time.monotonic()
        persister.work_one(job)
        return set(gone)

    lock, end = history.store.lock(LOCK, "the run"), subscribe(hear)
    try:
        for step in range(SAVES):
            history.note("publish", partial(save, step))
    finally:
        end()
        persister.stop()
        lock.release()


def change_pin(
    store: Store, act: Callable[[Store, Generation], object], one: Generation
) -> set[Generation]:
    with suppress(NotFound):
        act(store, one)
        return {one}
    return set()


def set_pins(history: History, store: Store, chance: random.Random) -> None:
    while not history.is_over.is_set():
        known = sorted(list(history.durable))[-5:]  # noqa: C414  (another thread adds to it)
        if known:
            kind, act = ("unpin", unpin) if chance.random() < 0.4 else ("pin", pin)
            one, begun_s = chance.choice(known), time.monotonic()
            history.note(kind, partial(change_pin, store, act, one))
            asked = Call(f"asked to {kind}", begun_s, time.monotonic(), frozenset({one}))
            history.calls.append(asked)
        time.sleep(chance.random() * 0.004)


def list_all(history: History, store: Store, chance: random.Random) -> None:
    def look() -> set[Generation]:
        return {m.generation for m in catalogue(store).manifests}

    while not history.is_over.is_set():
        history.note("list", look)
        time.sleep(chance.random() * 0.002)


def restore(history: History, store: Store, chance: random.Random) -> None:
    while not history.is_over.is_set():
        manifests = catalogue(store).manifests
        if manifests:
            manifest, lease = chance.choice(manifests), ReadLease(store)
            if lease.take(manifest):
                faults = verify(store, manifest, deep=True).faults
                saved = history.images[manifest.generation]
                same = [
                    not manifest.parts and store.read(ref.path) == saved[ref.rank]
                    for ref in manifest.images
                ]
                if faults or not all(same):
                    history.faults.append(f"{manifest.generation}: {faults} {same}")
                history.note("restore", lambda: {manifest.generation})  # noqa: B023
            lease.end()


def wrong_in(history: History) -> list[str]:
    """What no order of these calls explains."""
    found = list(history.faults)
    publications, pins = history.of("publish"), history.of("pin")
    for one in history.of("list"):
        early = [g for g in one.told if history.begun[g] > one.ended_s]
        found += [f"{g} listed before it was saved" for g in early]
        for g, told_s in history.durable.items():
            if told_s > one.begun_s or g in one.told:
                continue
            before = [p for p in publications if p.begun_s < one.ended_s]
            # A pruner that meets a pin takes the manifest away and brings it back, also where the
            # pin then fails because it saw the manifest gone.
            beside = [p for p in before if p.ended_s > one.begun_s]
            is_met = any(
                pin.begun_s < p.ended_s and pin.ended_s > p.begun_s
                for p in beside
                for pin in history.of("asked to pin")
                if g in pin.told
            )
            if not (any(g in p.told for p in before) or is_met):
                found.append(f"{g} was durable at {told_s}, and is missing at {one.begun_s}")
    for pin_ in pins:
        for g in pin_.told:
            unpinned_s = min(
                (
                    u.begun_s
                    for u in history.of("unpin")
                    if g in u.told and u.ended_s > pin_.begun_s
                ),
                default=float("inf"),
            )
            found += [
                f"{g} was pinned at {pin_.ended_s}, and pruned at {p.begun_s}"
                for p in publications
                if g in p.told and pin_.ended_s < p.begun_s and p.ended_s < unpinned_s
            ]
    there = {m.generation for m in catalogue(history.store).manifests}
    pruned = {g for p in publications for g in p.told}
    found += [f"{g} is gone" for g in history.durable if g not in there and g not in pruned]
    return found + [f"{g} is pinned and gone" for g in pinned(history.store) - there]


@pytest.mark.parametrize("kind", ["memory", "bucket"])
def test_four_clients_are_told_what_one_order_of_their_calls_explains(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Store = MemoryStore()
    if kind == "bucket":
        store = model_store(World(), monkeypatch, tries_s=5.0)
    require_one_order(store, [store] * 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "server", ["moto_server", "seaweedfs_server", "azurite_server", "google_server"]
)
def test_four_clients_of_a_server_are_told_what_one_order_of_their_calls_explains(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client opens the root for itself, as a process of its own would."""
    use(request.getfixturevalue(server), monkeypatch)
    prefix = f"histories/{uuid.uuid4().hex}"
    opened = [object_store(prefix, lease=LeaseTimes()) for _ in range(4)]  # nobody takes over here
    require_one_order(opened[0], opened[1:])


def require_one_order(store: Store, others: Sequence[Store]) -> None:
    """Lets the four work on one root until all is saved, and holds what they were told against
    the model. ``others``: how the three that do not save see it.
    """
    commit.open_root(store, "r")
    history, errors = History(store), list[BaseException]()

    def run(client: Callable[..., None], number: int) -> None:
        try:
            client(history, others[number], random.Random(f"{DAY} {number}"))
        except BaseException as error:
            errors.append(error)

    clients = [
        threading.Thread(target=run, args=(client, number))
        for number, client in enumerate((set_pins, list_all, restore))
    ]
    for client in clients:
        client.start()
    try:
        publish(history)
    finally:
        history.is_over.set()
        for client in clients:
            client.join(30)
    assert not errors, errors
    assert len(history.durable) == SAVES
    counted = {kind: len(history.of(kind)) for kind in ("pin", "unpin", "list", "restore")}
    print(counted, len([g for p in history.of("publish") for g in p.told]), "pruned")
    assert min(counted.values()) > 0 and any(p.told for p in history.of("publish"))
    assert wrong_in(history) == []


def test_the_model_finds_what_is_lost_or_pruned_though_it_was_pinned() -> None:
    one, two = Generation(1, 1), Generation(1, 2)
    history = History(MemoryStore())
    commit.open_root(history.store, "r")
    history.durable = history.begun = {one: 1.0}
    history.calls = [Call("list", 2.0, 3.0, frozenset())]
    assert wrong_in(history) == [
        f"{one} was durable at 1.0, and is missing at 2.0",
        f"{one} is gone",
    ]
    history.durable = history.begun = {one: 1.0, two: 5.0}
    history.calls = [
        Call("pin", 2.0, 3.0, frozenset({one})),
        Call("publish", 4.0, 6.0, frozenset({one, two})),
        Call("list", 4.0, 4.5, frozenset({two})),
    ]
    assert wrong_in(history) == [
        f"{two} listed before it was saved",
        f"{one} was pinned at 3.0, and pruned at 4.0",
    ]
