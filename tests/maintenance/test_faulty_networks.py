"""Repair, copy and sync of buckets while the network or their server fails in the middle of them.

What was whole stays whole at every moment, a file is the damaged one or the mended one, and the
next try brings all to its end.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from holdfast.catalogue import DAMAGED, catalogue, layout_path, manifest_path
from holdfast.errors import HoldfastError
from holdfast.format.manifest import Generation
from holdfast.geometry.layout import Layout
from holdfast.maintenance.copies import copy
from holdfast.maintenance.repairs import repair
from holdfast.persist import commit
from holdfast.storage import probe
from holdfast.storage.base import Store
from holdfast.storage.lease_lock import LeaseTimes
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.storage.wrap import Patience
from holdfast.testing.faults.faulty_proxy import FaultyProxy, RequestFault, RequestRule
from support.checkpoints.images import images_of, publish_checkpoint, random_leaf, split_leaf
from support.checkpoints.keeper_roots import all_contents, change, paths_in
from support.checkpoints.roots import whole
from support.project.sample import DAY, points_of_the_day
from support.servers.object_servers import TIMES, ObjectServer, object_store, use

#: An image is two parts of an upload, and what is frozen a small object.
PART = 5 << 20
LAYOUT = Layout(
    2,
    (
        split_leaf("base", "F32", (2, 280_000), 2, is_frozen=True),
        split_leaf("w", "F32", (2, 1_400_000), 2),
    ),
)
OLD, NEW = Generation(1, 10), Generation(1, 20)
#: Fails for good, so that the operation ends with an error in the middle.
SHORT = Patience(0.5, 0.05, 0.2)
#: Outlives a server that is killed and comes back.
LONG = Patience(120.0, 0.1, 1.0)
#: Of each operation, in `make test-all`: so many places at which its server is killed.
KILLS = 3


@cache
def sound() -> MemoryStore:
    """Two checkpoints, as they must be in the end."""
    store = MemoryStore("sound")
    commit.open_root(store, "r")
    for generation in (OLD, NEW):
        shapes = {leaf.name: leaf.shape for leaf in LAYOUT.leaves}
        leaves = {n: random_leaf("F32", s, generation.step) for n, s in shapes.items()}
        attempt = f"a{generation.step}"
        images = images_of(LAYOUT, leaves, generation=generation, attempt=attempt)
        publish_checkpoint(store, LAYOUT, images, generation, attempt=attempt)
    return store


def fill(store: Store) -> None:
    copy(sound(), store, None, lambda *_: None)


def spoil(store: Store) -> None:
    """A bad block, a lost image, a lost part, a changed layout and a changed manifest."""
    found = catalogue(store)
    old, new = found.find(OLD), found.find(NEW)
    assert old is not None and new is not None
    change(store, new.images[0].path, 3 << 20)
    store.remove(new.images[1].path)
    store.remove(old.parts[0].path)
    change(store, layout_path(LAYOUT.hash))
    change(store, manifest_path(OLD))


@dataclass(frozen=True, slots=True)
class Work:
    """What is done to ``target`` from ``source``; which of them is a bucket."""

    is_repair: bool
    is_from_bucket: bool
    is_to_bucket: bool
    requests: int
    """About so many it takes."""

    def act(self, source: Store, target: Store) -> bool:
        """Returns True if all was done: what failed is reported or raised."""
        if self.is_repair:
            plan, report = repair(target, [source], None)
            is_done = all(one.path in report.mended for one in plan.damages)
            return is_done and not report.failed and not plan.unread
        _, copied = copy(source, target, None, lambda *_: None)
        return not copied.failed and not copied.pruned


WORKS = {
    "repair a bucket from a directory": Work(True, False, True, 169),
    "repair a directory from a bucket": Work(True, True, False, 44),
    "repair a bucket from a bucket": Work(True, True, True, 213),
    "copy to a bucket": Work(False, False, True, 111),
    "copy from a bucket": Work(False, True, False, 57),
    "copy between buckets": Work(False, True, True, 168),
}

#: What a request and all after it meet, or two of them.
FAULTS = {
    "busy": RequestRule(RequestFault.ANSWER, 503),
    "cut request": RequestRule(RequestFault.CUT_REQUEST, 100),
    "lost answer": RequestRule(RequestFault.CUT_ANSWER, 0),
    "cut answer": RequestRule(RequestFault.CUT_ANSWER, 3000),
}


class Try:
    """An operation on two roots of their own, and what must be true of them at every moment."""

    def __init__(self, work: Work, port: int, base: Path) -> None:
        self.work, self._id = work, uuid.uuid4().hex
        self._port, self._base = port, base
        self._source = self._open("source", work.is_from_bucket)
        self._target = self._open("target", work.is_to_bucket)
        fill(self._source)
        if work.is_repair:
            fill(self._target)
        self._good = {path: self._target.read(path) for path in paths_in(self._target)}
        if work.is_repair:
            spoil(self._target)
        self._before = {path: self._target.read(path) for path in paths_in(self._target)}

    def _open(self, name: str, is_bucket: bool, **options: object) -> Store:
        place = f"{self._id}/{name}"
        if not is_bucket:
            return LocalStore(self._base / place)
        return object_store(f"maintenance/{place}", least_part_bytes=PART, **options)

    def act(self, patience: Patience, lease: LeaseTimes = TIMES) -> bool:
        """Returns True if all was done."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{self._port}")
            options = {"patience": patience, "lease": lease}
            source = self._open("source", self.work.is_from_bucket, **options)
            target = self._open("target", self.work.is_to_bucket, **options)
        try:
            return self.work.act(source, target)
        except HoldfastError as error:
            print(f"    {type(error).__name__}: {str(error)[:150]}")
            return False

    def check(self) -> None:
        """Between two tries: nothing that was whole is damaged, and what is told is true."""
        for path, data in self._before.items():
            assert self._target.read(path) in (data, self._good[path]), path
        if not self.work.is_repair:
            whole(self._target)

    def check_end(self) -> None:
        """All is done: everything is as it must be, and what was damaged is kept aside."""
        assert whole(self._target) == whole(self._source) == ["1-10", "1-20"]
        assert all_contents(self._target) == all_contents(self._source) == all_contents(sound())
        kept = {self._target.read(one) for one in paths_in(self._target, DAMAGED)}
        assert {path: self._target.read(path) for path in self._good} == self._good
        assert {data for path, data in self._before.items() if data != self._good[path]} <= kept

    def end(self, patience: Patience, lease: LeaseTimes = TIMES, *, is_done: bool) -> int:
        """Tries again until all is done; returns how many tries there were with the first."""
        tries = 1
        while not is_done:
            tries += 1
            assert tries < 6, "it comes to no end"
            is_done = self.act(patience, lease)
        self.check_end()
        return tries


def meet(trial: Try, proxy: FaultyProxy, fault: str, k: int, *, lasts: bool) -> int:
    """Spoils the ``k``-th request, and all behind it or one more; returns the number of tries."""
    rule = FAULTS[fault]
    number = proxy.add(RequestRule(rule.fault, rule.value, first=k, last=2**63 if lasts else k + 1))
    is_done = trial.act(SHORT if lasts else LONG)
    proxy.remove(number)
    if not lasts:
        assert is_done
    trial.check()
    return trial.end(LONG, is_done=is_done)


def count(trial: Try, proxy: FaultyProxy) -> int:
    """How many requests it takes."""
    number = proxy.add(RequestRule(RequestFault.DELAY, 0))
    assert trial.act(LONG)
    proxy.remove(number)
    trial.check_end()
    return proxy.seen(number)


@pytest.fixture
def proxy(seaweedfs_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    use(seaweedfs_server, monkeypatch)
    monkeypatch.setattr(probe, "_known", {})
    with FaultyProxy("127.0.0.1", seaweedfs_server.port) as made:
        yield made


@pytest.mark.promise
def test_what_a_broken_network_stops_is_brought_to_its_end_by_the_next_try(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    chance = random.Random(DAY)
    points = [(name, fault, lasts) for name in WORKS for fault in FAULTS for lasts in (True, False)]
    for name, fault, lasts in points_of_the_day(points, least=2, for_s=6.0):
        trial = Try(WORKS[name], proxy.port, tmp_path)
        meet(trial, proxy, fault, chance.randrange(1, trial.work.requests), lasts=lasts)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", WORKS)
def test_a_broken_network_at_many_requests_of_every_operation(
    name: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    total = count(Try(WORKS[name], proxy.port, tmp_path), proxy)
    chance, met, tries = random.Random(DAY), 0, 0
    for fault in FAULTS:
        for lasts in (True, False):
            for start in range(1, total, max(1, total // 8)):
                trial = Try(WORKS[name], proxy.port, tmp_path)
                k = start + chance.randrange(max(1, total // 8))
                tries += meet(trial, proxy, fault, k, lasts=lasts)
                met += 1
    print(f"{total} requests, {met} faults, {tries} tries")


@contextmanager
def killed_at(server: ObjectServer, proxy: FaultyProxy, k: int, down_s: float) -> Iterator[None]:
    """Kills the server at the ``k``-th request, and has it back."""
    number, is_over = proxy.add(RequestRule(RequestFault.DELAY, 0)), threading.Event()

    def kill() -> None:
        while proxy.seen(number) < k and not is_over.wait(0.001):
            pass
        server.kill()
        time.sleep(down_s)
        server.start()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        is_over.set()
        killer.join()
        proxy.remove(number)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", WORKS)
def test_a_server_that_is_killed_amid_it_and_comes_back_damages_nothing(
    name: str, proxy: FaultyProxy, seaweedfs_server: ObjectServer, tmp_path: Path
) -> None:
    total = count(Try(WORKS[name], proxy.port, tmp_path), proxy)
    chance = random.Random(name)
    for _ in range(KILLS):
        trial = Try(WORKS[name], proxy.port, tmp_path)
        k = chance.randrange(1, total)
        with killed_at(seaweedfs_server, proxy, k, chance.random()):
            is_done = trial.act(LONG, LeaseTimes())
        trial.check()
        tries = trial.end(LONG, LeaseTimes(), is_done=is_done)
        print(f"killed at request {k} of {total}, done at try {tries}")
