"""The caches of two hosts are drained together: what is true wherever either of them is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, cast

import pytest

from holdfast.catalogue import attempt_dir, catalogue, manifest_path, part_dir
from holdfast.errors import HoldfastError, StorageError
from holdfast.events import Warned
from holdfast.format.manifest import Generation, ImageRef, Manifest
from holdfast.keeper import cache_tier
from holdfast.keeper.cache_tier import CacheTier
from holdfast.keeper.drain_queue import Drained
from holdfast.keeper.image_writer import HostWrite, PersistJob
from holdfast.keeper.jobs import RemoteImages
from holdfast.keeper.persister import Persister
from holdfast.persist import commit
from holdfast.persist.drain_order import waiting
from holdfast.persist.frozen_parts import StoredPart
from holdfast.persist.removal import plan, remove
from holdfast.policy.when import Keep
from holdfast.storage.base import ImageSink, Store
from holdfast.storage.memory import MemoryStore
from holdfast.storage.tiered import TieredStore
from holdfast.testing.faults import FaultyStore, Mode, PassingStore, Stopped
from support.checkpoints.keeper_roots import all_contents, job_at, paths_in
from support.checkpoints.roots import whole
from support.project.sample import points_of_the_day
from support.runs.mishaps import listening

MODES: tuple[Mode, ...] = ("stop", "torn", "error", "lost")
#: Seconds for the points that `make test` takes from all of them.
SAMPLE_S = 6.0
#: Rank 0 is on host a, which coordinates, and rank 1 on host b.
FAR_RANK = 1
CLOSED = "its cache is not open"


class OtherHost:
    """Host b as its coordinator sees it: see keeper.hosts.follower_caches."""

    def __init__(self, far: CacheTier) -> None:
        self.far = far
        self.is_away = False

    def share(self, act: Callable[[RemoteImages], None], ranks: Collection[int]) -> RemoteImages:
        def begin() -> None:
            try:
                act(share)
            except Stopped:
                share.end("its keeper is out of reach")
            except HoldfastError as error:
                share.end(str(error), is_lost=bool(self.far.drain_lost))
            else:
                share.end()

        share = RemoteImages("b", frozenset(ranks), begin, share_stops)
        share.must_have_all = False
        return share

    def drain(self, manifest: Manifest) -> Sequence[RemoteImages]:
        images = {ref.rank: ref for ref in manifest.images}

        def act(share: RemoteImages) -> None:
            done = partial(self._receipt, share, images)
            self.far.drain_own(manifest, done)

        return [] if self.is_away else [self.share(act, images)]

    def _receipt(self, share: RemoteImages, images: dict[int, ImageRef], rank: int) -> None:
        share.receive(StoredPart(images[rank]), b"")

    def publish(self, job: PersistJob, manifest: Manifest) -> Sequence[RemoteImages]:
        def act(_: RemoteImages) -> None:
            self.far.publish(manifest, job.incarnation, job.layout_data)

        return [self.share(act, ())]

    def explain(self, manifest: Manifest, ranks: Sequence[int]) -> tuple[str, bool]:
        return f"the images of ranks {ranks} are on host b", self.is_away

    def drained(self, manifest: Manifest) -> None:
        with suppress(Stopped, HoldfastError):
            self.far.drained(manifest.generation, manifest.attempt)

    def write(self, job: PersistJob) -> RemoteImages:
        """Host b's share of a job: its images go to its own cache."""
        images = {FAR_RANK: job.images.pop(FAR_RANK)}

        def act(share: RemoteImages) -> None:
            places = [place(job.generation, job.directory) for place in (attempt_dir, part_dir)]
            self.far.expect(places)
            own = HostWrite(job.attempt, job.generation, job.layout_data, images, job.directory)
            self.far.writer.parts.forget()
            for stored in self.far.writer.write(own, images[FAR_RANK]):
                share.receive(stored, b"")

        return self.share(act, [FAR_RANK])


def share_stops(_: str) -> None:
    """Nothing goes on beside the calls of this file."""


class Pair:
    """Both hosts' caches and the root, as two keepers have them open."""

    def __init__(self, root: Persister, tiers: Sequence[CacheTier]) -> None:
        self.root, (self.near, self.far) = root, tiers
        self.other = OtherHost(self.far)
        self.cached: list[Generation] = []
        self.outcomes: list[str | None] = []
        self.near.share(cast(Any, self.other), is_shared=True)
        self.far.share(None, is_shared=True)

    def cache(self, step: int) -> None:
        """Both hosts take one more step; it is noted if it was told cached."""
        job = job_at(step)
        job.shares = [self.other.write(job)]
        job.to_cache = True
        before = len(self.outcomes)
        self.near.persister.work_one(job)
        if self.outcomes[before:] == [None]:
            self.cached.append(job.generation)

    def meet(self) -> None:
        """What a coordinator does when the other host's cache tells what waits there."""
        mine = set(self.near.waiting())
        for generation, attempt in self.far.waiting():
            if (generation, attempt) in mine:
                continue
            if self.near.is_drained(generation, attempt):
                self.far.drained(generation, attempt)
            else:
                self.near.publish(*self.far.documents(generation))

    def drain_all(self) -> list[Drained]:
        found: list[Drained] = []
        while (drained := self.near.drain_one(self.root, {})) is not None:
            found.append(drained)
            if drained.reason and not drained.is_lost:
                break
        return found


@contextmanager
def open_pair(
    root: Store,
    near: Store,
    far: Store,
    keep: Keep = Keep(last=1),  # noqa: B008
) -> Iterator[Pair]:
    outcomes: list[str | None] = []
    with ExitStack() as stack:
        commit.open_root(root, "r")
        tiers = []
        for store in (near, far):
            tier = CacheTier(
                store,
                root,
                "r",
                "test",
                Keep(last=1),
                lambda _, reason: outcomes.append(reason),
                lambda _: None,
                tuple,
            )
            stack.callback(tier.close)
            tier.persister.submit = lambda job: job() if callable(job) else None  # type: ignore[method-assign]
            tiers.append(tier)
        persister = Persister(root, keep, lambda *_: None)
        stack.callback(persister.stop)
        pair = Pair(persister, tiers)
        pair.outcomes = outcomes
        yield pair


def images_in(store: Store) -> set[int]:
    found = catalogue(store).manifests
    return {ref.rank for m in found for ref in m.images if store.exists(ref.path)}


def three_stores() -> tuple[MemoryStore, MemoryStore, MemoryStore]:
    """The root has the first of two; the caches have both."""
    root, near, far = (MemoryStore(name) for name in ("root", "near", "far"))
    with open_pair(root, near, far) as pair:
        pair.cache(0)
        pair.drain_all()
        pair.cache(1)
    return root, near, far


@pytest.mark.promise
def test_each_host_drains_its_own_images_and_the_root_is_published_once_all_are_there() -> None:
    root, near, far = (MemoryStore(name) for name in ("root", "near", "far"))
    with open_pair(root, near, far) as pair:
        pair.cache(0)
        assert pair.cached == [Generation(1, 0)]
        assert images_in(near) == {0} and images_in(far) == {1} and not whole_of(root)
        assert [one.reason for one in pair.drain_all()] == [""]
    assert whole(root) == ["1-0"]
    assert not waiting(near) and not waiting(far)


def whole_of(root: Store) -> list[str]:
    return whole(root) if catalogue(root).manifests else []


@pytest.mark.promise
def test_a_host_that_is_away_leaves_the_save_cached_and_its_return_makes_it_durable() -> None:
    root, near, far = three_stores()
    with open_pair(root, near, far) as pair:
        pair.other.is_away = True
        (refused,) = pair.drain_all()
        assert not refused.is_lost and "ranks [1] are on host b" in refused.reason
        assert whole(root) == ["1-0"]
        pair.other.is_away = False
        assert [one.reason for one in pair.drain_all()] == [""]
    assert whole(root) == ["1-1"]


@pytest.mark.promise
def test_what_a_lost_host_alone_had_is_not_durable_and_the_rest_stays() -> None:
    root, near, _ = three_stores()
    with open_pair(root, near, MemoryStore("another")) as pair:
        (lost,) = pair.drain_all()
        assert lost.is_lost and "ranks [1]" in lost.reason
    assert whole(root) == ["1-0"] and images_in(near) == {0}
    assert len(waiting(near)) == 1


@pytest.mark.promise
def test_what_only_the_other_hosts_cache_knows_of_is_learned_and_drained() -> None:
    root, near, far = three_stores()
    near.remove(manifest_path(Generation(1, 1)))  # as if it had died before the last manifest
    with open_pair(root, near, far) as pair:
        images = set(paths_in(near, "steps"))
        pair.near.persister.prune(Generation(1, 0))
        assert set(paths_in(near, "steps")) == images  # newer than all that was drained
        assert pair.drain_all() == []
        pair.meet()
        assert [one.reason for one in pair.drain_all()] == [""]
    assert whole(root) == ["1-1"]


@pytest.mark.promise
def test_what_a_host_has_written_and_no_manifest_names_yet_is_not_swept() -> None:
    root, near, far = three_stores()
    with open_pair(root, near, far) as pair:
        job = job_at(0, 2, (1, 1))
        share = pair.other.write(job)
        pair.far.persister.unsettled.newest_drained = Generation(9, 9)  # whatever is drained
        ended: list[RemoteImages] = []
        share.write(ended.append)
        written = set(paths_in(far, attempt_dir(job.generation, job.directory)))
        assert ended and written
        pair.far.persister.prune(Generation(1, 1))
        assert written <= set(paths_in(far))
        pair.far.give_up([attempt_dir(job.generation, job.directory)])
        assert not written & set(paths_in(far))


def test_a_mark_that_a_host_did_not_hear_of_is_made_when_the_hosts_meet() -> None:
    root, near, far = three_stores()
    with open_pair(root, near, far) as pair:
        pair.other.__dict__["drained"] = lambda _: None
        pair.drain_all()
        assert len(waiting(far)) == 1
        pair.meet()
        assert not waiting(far)


@pytest.mark.promise
def test_a_host_that_cannot_take_part_holds_up_only_what_it_alone_has() -> None:
    root, near, far = three_stores()
    with open_pair(root, near, far) as pair:
        ask = pair.other.drain

        def drain(manifest: Manifest) -> Sequence[RemoteImages]:
            closed = RemoteImages("c", frozenset({0, 1}), lambda: closed.end(CLOSED), share_stops)
            closed.must_have_all = False
            return [closed, *ask(manifest)]

        pair.other.__dict__["drain"] = drain
        pair.other.is_away = True
        (refused,) = pair.drain_all()
        assert CLOSED in refused.reason and not refused.is_lost
        pair.other.is_away = False
        assert [one.reason for one in pair.drain_all()] == [""]
    assert whole(root) == ["1-1"]


@pytest.mark.promise
def test_a_host_that_hangs_may_write_yet_and_nothing_is_published_beside_it() -> None:
    root, near, far = three_stores()
    with open_pair(root, near, far) as pair:
        ask = pair.other.drain
        hangs = RemoteImages("c", frozenset({1}), lambda: None, share_stops, stall_s=0.0)
        pair.other.__dict__["drain"] = lambda manifest: [*ask(manifest), hangs]
        (refused,) = pair.drain_all()
        assert "written nothing" in refused.reason and not refused.is_lost
    assert whole(root) == ["1-0"]


@pytest.mark.promise
@pytest.mark.parametrize("has_copied", [False, True])
def test_a_drain_of_a_cache_that_is_closed_ends_at_once_on_all_hosts_and_is_not_published(
    has_copied: bool,
) -> None:
    root, near, far = three_stores()
    with open_pair(root, near, far) as pair:
        begun, copied = threading.Event(), threading.Event()
        copy = pair.near._drain.copy_files

        def copy_files(*given: Any) -> None:
            copy(*given)
            copied.set()

        pair.near._drain.__dict__["copy_files"] = copy_files

        def end(_: str) -> None:
            for ref in manifest.images if has_copied else ():
                share.receive(StoredPart(ref), b"")
            share.end()

        share = RemoteImages("b", frozenset({0, FAR_RANK}), begun.set, end)
        share.must_have_all = False
        (manifest,) = waiting(near).values()
        pair.other.__dict__["drain"] = lambda _: [share]
        with listening() as told, ThreadPoolExecutor(1) as pool:
            drained = pool.submit(pair.drain_all)
            try:
                assert begun.wait(10) and copied.wait(10)
                pair.near.end_drains()
                assert drained.result(10) == []
            finally:
                share.end()
            assert pair.drain_all() == []  # a later one ends before it begins
    assert whole(root) == ["1-0"] and len(waiting(near)) == 1
    assert not told  # nothing broke: who opens the cache next goes on with it


def test_a_host_that_did_not_take_part_is_told_of_once_where_all_was_there_without_it() -> None:
    root, near, far = three_stores()
    with open_pair(root, near, far) as pair, listening() as told:
        ask = pair.other.drain

        def drain(manifest: Manifest) -> Sequence[RemoteImages]:
            closed = RemoteImages("c", frozenset({0, 1}), lambda: closed.end(CLOSED), share_stops)
            closed.must_have_all = False
            return [closed, *ask(manifest)]

        pair.other.__dict__["drain"] = drain
        assert [one.reason for one in pair.drain_all()] == [""]
        pair.cache(2)
        assert [one.reason for one in pair.drain_all()] == [""]
    (warned,) = [one for one in told if isinstance(one, Warned)]
    assert CLOSED in warned.message and "host c" in warned.message


class Bucket(PassingStore):
    """A root whose objects are there whole or not at all."""

    settle_s = 0.001
    refuses_parts_of = -1

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        if path.endswith(f"frozen-{self.refuses_parts_of:05d}.safetensors"):
            raise StorageError("the line is cut", path=path)
        return super().create(path, size_bytes, aside=aside)


@pytest.mark.promise
def test_a_rank_is_in_a_bucket_once_its_image_and_its_frozen_part_are() -> None:
    inner = MemoryStore("root")
    root = Bucket(inner)
    with open_pair(root, MemoryStore("near"), MemoryStore("far")) as pair:
        pair.cache(0)
        root.refuses_parts_of = FAR_RANK
        (broken,) = pair.drain_all()
        assert not broken.is_lost
        assert any(path.endswith("live-00001.safetensors") for path in paths_in(inner))
        pair.other.is_away = True
        (refused,) = pair.drain_all()
        assert "ranks [1]" in refused.reason and not catalogue(root).manifests
        pair.other.is_away, root.refuses_parts_of = False, -1
        assert [one.reason for one in pair.drain_all()] == [""]
    assert whole(inner) == ["1-0"]


# ── stopped anywhere ─────────────────────────────────────────────────────────────────────────


def work(root: Store, near: Store, far: Store, cached: list[Generation]) -> None:
    """What waits is drained; one more is cached by both hosts, and drained."""
    with open_pair(root, near, far) as pair:
        pair.cached = cached
        pair.meet()
        pair.drain_all()
        pair.cache(2)
        pair.drain_all()


def points() -> Iterator[tuple[int, int]]:
    """Every change of every store: its place among root, near and far, and its number."""
    root, near, far = map(FaultyStore, three_stores())
    work(root, near, far, [])
    for n, store in enumerate((root, near, far)):
        yield from ((n, k) for k in range(1, len(store.changes) + 1))


def check(mode: Mode, n: int, k: int) -> None:
    stores = three_stores()
    told = [Generation(1, 1)]
    root, near, far = (
        FaultyStore(store, fail_at=k, mode=mode) if number == n else store
        for number, store in enumerate(stores)
    )
    with suppress(Stopped, HoldfastError):
        work(root, near, far, told)
    inner_root, inner_near, inner_far = stores
    in_root = {one.generation for one in catalogue(inner_root).manifests}
    assert whole(inner_root), "what was durable is there, or something newer"
    # What was told cached is whole in both caches and the root together, unless something newer
    # is durable.
    together = TieredStore(inner_near, inner_root)
    together.read_also(MemoryStore("none"), inner_far)
    there = set(whole_ones(together))
    for generation in told:
        assert generation in there or max(in_root) > generation, f"{generation} was told cached"
    with open_pair(*stores) as pair:  # both come back
        pair.meet()
        lost = [one.generation for one in pair.drain_all() if one.reason]
        assert all(max(in_root) > generation for generation in lost)
    newest = catalogue(inner_root).latest
    assert newest is not None and newest >= max(told)
    assert whole(inner_root)
    work(*stores, [])
    assert catalogue(inner_root).latest == Generation(1, 2)
    for store in stores:
        remove(store, plan(store, Keep(), abandoned=False))
        named = {path for m in catalogue(store).manifests for path in m.directories}
        left = {path.rpartition("/")[0] for path in paths_in(store)}
        assert {path for path in left if path.startswith(("steps/", "parts/"))} <= named


def whole_ones(store: TieredStore) -> list[Generation]:
    """The checkpoints of which every file is there, wherever it is."""
    found = []
    for manifest in catalogue(store).manifests:
        refs = (*manifest.images, *manifest.parts)
        if all(store.exists(ref.path) for ref in refs):
            found.append(manifest.generation)
    return found


@pytest.mark.promise
def test_nothing_told_cached_or_durable_is_lost_whichever_host_is_stopped_wherever() -> None:
    all_points = [(mode, *point) for mode in MODES for point in points()]
    for point in points_of_the_day(all_points, least=6, for_s=SAMPLE_S):
        check(*point)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_point_of_a_shared_drain(mode: Mode) -> None:
    all_points = list(points())
    print(f"{len(all_points)} points")
    for point in all_points:
        check(mode, *point)
    assert all_contents(three_stores()[0])


@pytest.mark.promise
def test_an_error_before_a_drain_begins_is_no_loss_because_the_one_before_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> set[int]:
        raise StorageError("the disk is away", operation="list", path="", url="")

    root, near, far = three_stores()
    with open_pair(root, near, far) as pair:
        (manifest,) = waiting(far).values()
        pair.far._drain.lost = "another checkpoint was damaged"
        monkeypatch.setattr(cache_tier, "ranks_held", refuse)
        with pytest.raises(StorageError, match="the disk is away"):
            pair.far.drain_own(manifest, lambda _: None)
        assert not pair.far.drain_lost
