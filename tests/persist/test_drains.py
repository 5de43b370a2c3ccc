"""A cache is drained to a root: in which order, and what is true wherever it is stopped."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.catalogue import catalogue, drained_path, manifest_path
from holdfast.errors import FormatError, HoldfastError, NotFound, StorageError
from holdfast.events import Event, Warned, subscribe
from holdfast.format.manifest import Generation, Incarnation, Manifest
from holdfast.keeper.cache_tier import CacheTier, look_for
from holdfast.keeper.drain_queue import Drained
from holdfast.keeper.persister import Persister
from holdfast.persist import commit
from holdfast.persist.drain_order import mark_drained, next_to_drain, waiting
from holdfast.persist.pins import pin, read_pins
from holdfast.persist.removal import plan, remove
from holdfast.policy.when import Keep
from holdfast.storage.base import Store, read_at_most
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.storage.tiered import TieredStore
from holdfast.storage.wrap import RateLimit
from holdfast.testing.faults import FaultyStore, Mode, PassingStore, Stopped
from support.checkpoints.keeper_roots import Unreachable, all_contents, job_at, paths_in, save_steps
from support.checkpoints.roots import whole
from support.project.sample import points_of_the_day

KEEP = Keep(last=1)
MODES: tuple[Mode, ...] = ("stop", "torn", "error", "lost")
#: Seconds for the points that `make test` takes from all of them.
SAMPLE_S = 5.0


@contextmanager
def open_tiers(
    root: Store,
    cache: Store,
    keep: Keep = Keep(),  # noqa: B008
    limit: RateLimit | None = None,
) -> Iterator[tuple[CacheTier, Persister]]:
    """Both tiers as a keeper opens them; what is queued for the cache's thread is done at once."""
    commit.open_root(root, "r")
    tier = CacheTier(
        cache, root, "r", "test", KEEP, lambda *_: None, lambda _: None, tuple, limit=limit
    )
    tier.persister.submit = lambda job: job() if callable(job) else None  # type: ignore[method-assign]
    persister = Persister(root, keep, lambda *_: None)
    try:
        yield tier, persister
    finally:
        persister.stop()
        tier.close()


def drain_all(tier: CacheTier, persister: Persister) -> list[Drained]:
    found = []
    while (drained := tier.drain_one(persister, {})) is not None:
        found.append(drained)
        if drained.reason and not drained.is_lost:
            break
    return found


def cached(*steps: int) -> MemoryStore:
    store = MemoryStore("cache")
    save_steps(store, steps)
    return store


def manifests(*generations: tuple[int, int]) -> dict[Generation, Manifest]:
    return {
        Generation(*g): Manifest(
            run_id="r", incarnation=g[0], step=g[1], attempt="a", world=1, layout="", images=()
        )
        for g in generations
    }


def test_the_oldest_that_is_pinned_goes_first_then_the_newest() -> None:
    left = manifests((1, 10), (1, 20), (2, 15), (2, 30))
    order = []
    while (one := next_to_drain(left, {Generation(1, 20), Generation(2, 15)})) is not None:
        order.append((one.incarnation, one.step))
        del left[one.generation]
    assert order == [(1, 20), (2, 15), (2, 30), (1, 10)]


def test_what_is_pinned_in_the_cache_goes_first() -> None:
    root, cache = MemoryStore("root"), cached(0, 1, 2)
    pin(cache, Generation(1, 1))
    with open_tiers(root, cache) as (tier, persister):
        assert [one.generation.step for one in drain_all(tier, persister)] == [1, 2, 0]


@pytest.mark.promise
def test_what_is_drained_is_the_same_in_both_tiers_and_goes_from_the_cache_by_its_own_policy() -> (
    None
):
    root, cache = MemoryStore("root"), cached(0, 1, 2)
    truth = all_contents(cache)
    with open_tiers(root, cache) as (tier, persister):
        assert [one.generation.step for one in drain_all(tier, persister)] == [2, 1, 0]
    assert all_contents(root) == truth
    assert whole(root) == ["1-0", "1-1", "1-2"]
    assert whole(cache) == ["1-2"]
    with open_tiers(root, cache) as (tier, persister):
        assert drain_all(tier, persister) == []


def test_what_the_root_has_removed_since_is_not_drained_again() -> None:
    root, cache = MemoryStore("root"), cached(0, 1, 2)
    with open_tiers(root, cache, Keep(last=1)) as (tier, persister):
        tier.persister.keep = Keep()
        drain_all(tier, persister)
        assert whole(root) == ["1-2"] and len(whole(cache)) == 3
        assert drain_all(tier, persister) == []


@pytest.mark.promise
def test_what_a_killed_drain_left_in_a_directory_is_written_anew(tmp_path: Path) -> None:
    root, cache = LocalStore(tmp_path / "root"), LocalStore(tmp_path / "cache")
    save_steps(cache, [0])
    truth = all_contents(cache)
    commit.open_root(root, "r")
    for path, data in truth.items():  # preallocated to its length, and not written
        target = tmp_path / "root" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bytes(len(data)))
    with open_tiers(root, cache) as (tier, persister):
        assert [one.reason for one in drain_all(tier, persister)] == [""]
    assert all_contents(root) == truth


@pytest.mark.promise
def test_what_another_start_of_that_number_left_in_the_cache_is_neither_restored_nor_drained() -> (
    None
):
    root, cache = MemoryStore("root"), cached(5)
    commit.open_root(root, "r")
    commit.record_incarnation(root, Incarnation(run_id="r", n=1, nonce="another", world=2))
    with open_tiers(root, cache) as (tier, persister):
        (drained,) = drain_all(tier, persister)
        assert drained.is_lost
    assert catalogue(root).manifests == ()
    assert catalogue(TieredStore(cache, root)).manifests == ()
    assert whole(cache) == ["1-5"]


@pytest.mark.promise
def test_what_descends_from_another_start_of_a_number_is_neither_restored_nor_drained() -> None:
    root, cache = MemoryStore("root"), cached(5)
    commit.open_root(root, "r")
    (old,) = catalogue(cache).manifests
    there = next(one for one in catalogue(cache).incarnations if one.n == 1)
    commit.record_incarnation(root, replace(there, nonce="another"))
    child = replace(there, n=2, nonce="child", parent=(1, 5))
    commit.record_incarnation(cache, child)
    images = tuple(replace(ref, path=ref.path.replace("1-5", "2-9")) for ref in old.images)
    commit.publish(cache, replace(old, incarnation=2, step=9, parent=(1, 5), images=images))
    assert catalogue(TieredStore(cache, root)).manifests == ()
    with open_tiers(root, cache) as (tier, persister):
        assert [one.is_lost for one in drain_all(tier, persister)] == [True, True]
    assert catalogue(root).manifests == ()


def test_a_start_that_is_said_to_descend_from_itself_is_not_recorded() -> None:
    store = MemoryStore("root")
    looped = Incarnation(run_id="r", n=3, nonce="a", parent=(3, 200), world=1)
    with pytest.raises(FormatError, match="no older"):
        commit.record_line(store, looped, [looped])


@pytest.mark.promise
def test_a_pin_in_the_cache_holds_in_the_root() -> None:
    root, cache = MemoryStore("root"), cached(0, 1, 2)
    pin(cache, Generation(1, 0), "the good one")
    with open_tiers(root, cache, Keep(last=1)) as (tier, persister):
        drain_all(tier, persister)
    assert whole(root) == ["1-0", "1-2"]
    assert read_pins(root)[Generation(1, 0)].note == "the good one"


@pytest.mark.promise
def test_a_prune_of_a_cache_by_hand_leaves_what_the_root_lacks() -> None:
    cache = cached(0, 1, 2)
    mark_drained(cache, next(m for m in catalogue(cache).manifests if m.step == 1))
    removed = remove(cache, plan(cache, Keep(last=1), abandoned=False))
    assert [m.step for m in removed.checkpoints] == [1]
    assert whole(cache) == ["1-0", "1-2"]


def test_a_prune_of_a_cache_by_hand_before_anything_was_drained_leaves_all_of_it() -> None:
    root, cache = MemoryStore("root"), cached(0, 1, 2)
    with open_tiers(root, cache) as (tier, _):
        tier.persister.prune_drained()
    removed = remove(cache, plan(cache, Keep(last=1), abandoned=False))
    assert (removed.checkpoints, whole(cache)) == ((), ["1-0", "1-1", "1-2"])
    with open_tiers(root, cache) as (tier, persister):
        drain_all(tier, persister)
    assert whole(root) == ["1-0", "1-1", "1-2"], "the sign is taken for no mark"
    remove(cache, plan(cache, Keep(last=1), abandoned=False))
    assert whole(cache) == ["1-2"]


class LateStore(PassingStore):
    """A root whose first publication of a manifest is told as failed, and lands before the next."""

    late: tuple[str, bytes] | None = None

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        if path.startswith("manifests/") and not self.inner.exists(path):
            if self.late is None:
                self.late = path, data
                raise StorageError("no answer", operation="publish", path=path, url=self.url)
            self.inner.publish(*self.late)  # just now
        self.inner.publish(path, data, replace=replace)


@pytest.mark.promise
def test_a_manifest_that_lands_late_is_no_loss_of_what_was_cached() -> None:
    root, cache = MemoryStore("root"), cached(0)
    with open_tiers(LateStore(root), cache) as (tier, persister):
        outcomes = [tier.drain_one(persister, {}) for _ in range(3)]
    assert [one and (one.is_lost, bool(one.reason)) for one in outcomes] == [
        (False, True),  # the answer was lost
        (False, True),  # it lands while the next try is under way
        (False, False),
    ]
    assert whole(root) == ["1-0"]


@pytest.mark.promise
def test_what_the_root_is_found_to_have_is_trusted_once_its_name_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, cache = LocalStore(tmp_path / "root"), cached(0)
    with open_tiers(root, cache) as (tier, persister):
        drain_all(tier, persister)
    for name in cache.list("drained"):
        cache.remove(f"drained/{name}")  # as if the keeper had died before it was marked
    synced: list[list[str]] = []  # what was marked when the names were made durable
    monkeypatch.setattr(
        LocalStore,
        "sync_names",
        lambda _, above: synced.append([above, *set(cache.list("drained")) - {"cache.json"}]),
    )
    with open_tiers(root, cache) as (tier, persister):
        assert synced == [["manifests"]] and waiting(cache) == {}
        data = all_contents(root)
        cache.remove(manifest_path(Generation(1, 0)))
        (attempt,) = (m.attempt for m in catalogue(root).manifests)
        found = tier.drain_one(persister, {(1, 0): attempt})
        assert found is not None and not found.reason and len(synced) == 2
        assert all_contents(root) == data  # nothing is written that a removal may have taken


def test_a_cache_that_cannot_be_read_now_is_not_gone(tmp_path: Path) -> None:
    root, cache = MemoryStore("root"), LocalStore(tmp_path / "cache")
    with open_tiers(root, cache) as (tier, _):
        read, tier.store.__dict__["read"] = cache.read, refuse_to_read
        assert not tier.is_gone()
        tier.store.__dict__["read"] = read
        (tmp_path / "cache").rename(tmp_path / "away")
        assert tier.is_gone()
        (tmp_path / "away").rename(tmp_path / "cache")


@pytest.mark.promise
@pytest.mark.parametrize("is_open", [True, False])
def test_what_has_left_the_cache_is_not_lost_for_a_root_that_does_not_answer_now(
    is_open: bool,
) -> None:
    root, cache = Unreachable(MemoryStore("root")), cached(0)
    with open_tiers(root, cache) as (tier, persister):
        drain_all(tier, persister)
        (attempt,) = (m.attempt for m in catalogue(root).manifests)
        cache.remove(manifest_path(Generation(1, 0)))
        root.is_away = True
        if is_open:
            found = tier.drain_one(persister, {(1, 0): attempt})
            assert found is not None and "503" in found.reason and not found.is_lost
        else:
            with pytest.raises(StorageError):
                look_for(root, (1, 0), attempt)
        root.is_away = False
        there = look_for(root, (1, 0), attempt)
        assert (there.generation, there.reason) == (Generation(1, 0), "")
        assert look_for(root, (1, 1), attempt).is_lost


def refuse_to_read(path: str, *_: object) -> bytes:
    raise StorageError("an I/O error", operation="read", path=path, url="")


@pytest.mark.promise
def test_a_cache_that_cannot_be_read_leaves_the_root_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, cache = cached(0), cached(1)
    truth = all_contents(root)
    for name in ("read", "list", "exists", "size_bytes", "read_into"):
        monkeypatch.setattr(cache, name, refuse_to_read)
    tiered = TieredStore(cache, root)
    assert [m.step for m in catalogue(tiered).manifests] == [0]
    for path, data in truth.items():
        assert tiered.read(path) == data and tiered.size_bytes(path) == len(data)
        assert tiered.exists(path)
    with pytest.raises(NotFound):
        tiered.read("manifests/9-9.json")


@pytest.mark.promise
def test_a_cache_with_no_room_for_marks_and_records_is_opened_and_drained() -> None:
    root, cache = two_tiers()
    (first,) = catalogue(root).manifests
    cache.remove(drained_path(first.generation, first.attempt))
    record = Incarnation(run_id="r", n=2, nonce="b", parent=(1, 0), world=1)
    commit.record_incarnation(root, record)
    publish = cache.publish

    def refuse(path: str, data: bytes, *, replace: bool = False) -> None:
        if path.startswith(("drained/", "incarnations/")):
            raise StorageError("no room", operation="publish", path=path, url="")
        publish(path, data, replace=replace)

    cache.__dict__["publish"] = refuse
    with open_tiers(root, cache) as (tier, persister):
        drain_all(tier, persister)
    assert whole(root) == ["1-0", "1-1", "1-2"] and whole(cache) == ["1-0", "1-1", "1-2"]


def test_a_drain_takes_the_bytes_a_second_that_it_is_given() -> None:
    root, cache = MemoryStore("root"), cached(0, 1)
    waited: list[float] = []
    limit = RateLimit(1e6, clock=lambda: sum(waited), sleep=waited.append)
    with open_tiers(root, cache, limit=limit) as (tier, persister):
        drain_all(tier, persister)
    sent_bytes = sum(map(len, all_contents(root).values()))
    assert sent_bytes / 1e6 > sum(waited) > 0.5 * sent_bytes / 1e6


# ── stopped anywhere ─────────────────────────────────────────────────────────────────────────


def work(root: Store, cache: Store) -> None:
    """One more is cached, and everything is drained, with retention in both tiers."""
    with open_tiers(root, cache, KEEP) as (tier, persister):
        tier.persister.work_one(job_at(3))
        drain_all(tier, persister)


def two_tiers() -> tuple[MemoryStore, MemoryStore]:
    """The root has the first of three; the cache has all."""
    root, cache = MemoryStore("root"), cached(0, 1, 2)
    save_steps(root, [0])
    mark_drained(cache, catalogue(cache).manifests[0])
    return root, cache


def points() -> Iterator[tuple[str, int]]:
    root, cache = (FaultyStore(one) for one in two_tiers())
    work(root, cache)
    for tier, store in (("root", root), ("cache", cache)):
        yield from ((tier, k) for k in range(1, len(store.changes) + 1))


def check(mode: Mode, tier: str, k: int) -> None:
    root, cache = two_tiers()
    truth = all_contents(cache)
    faulty = FaultyStore(root if tier == "root" else cache, fail_at=k, mode=mode)
    had = {Generation(1, step) for step in (1, 2)}
    with suppress(Stopped, HoldfastError):
        work(faulty, cache) if tier == "root" else work(root, faulty)
    in_root = {one.generation for one in catalogue(root).manifests}
    in_cache = {one.generation for one in catalogue(cache).manifests}
    # The root keeps one: what it has dropped, it has had, and something newer is there.
    newest = max(in_root)
    for generation in had - in_cache:
        assert generation in in_root or newest > generation, "it left before the root had it"
    left = waiting(cache)
    assert all(g in in_cache for g in left)
    assert whole(root) and whole(cache)
    for manifest in (*catalogue(root).manifests, *catalogue(cache).manifests):
        if manifest.generation in had:
            store = root if manifest.generation in in_root else cache
            assert all(store.read(ref.path) == truth[ref.path] for ref in manifest.images)
    work(root, cache)
    assert catalogue(root).latest == Generation(1, 3)
    assert all_contents(root)
    for store in (root, cache):
        remove(store, plan(store, Keep(), abandoned=False))
        named = {directory for m in catalogue(store).manifests for directory in m.directories}
        assert {
            path.rpartition("/")[0]
            for path in paths_in(store)
            if path.startswith(("steps/", "parts/"))
        } == named


@pytest.mark.promise
def test_nothing_leaves_the_cache_that_the_root_lacks_whatever_is_stopped() -> None:
    all_points = [(mode, *point) for mode in MODES for point in points()]
    for point in points_of_the_day(all_points, least=11, for_s=SAMPLE_S):
        check(*point)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_point_of_a_drain(mode: Mode) -> None:
    all_points = list(points())
    print(f"{len(all_points)} points")
    for tier, k in all_points:
        check(mode, tier, k)


@pytest.mark.promise
def test_a_root_that_refuses_leaves_the_cache_as_it_is() -> None:
    root, cache = MemoryStore("root"), cached(0, 1)
    commit.open_root(root, "r")
    faulty = FaultyStore(root, fail_at=1, mode="error")
    with open_tiers(faulty, cache) as (tier, persister):
        (refused,) = drain_all(tier, persister)
        assert refused.reason and not refused.is_lost
        assert len(waiting(cache)) == 2 and not root.exists(manifest_path(Generation(1, 1)))
        assert [one.reason for one in drain_all(tier, persister)] == ["", ""]


# ── what is drained, and what need not be ────────────────────────────────────────────────────


@pytest.mark.promise
def test_an_older_save_that_must_be_durable_itself_is_drained_by_turns_with_the_newest() -> None:
    root, cache = MemoryStore("root"), cached(0, 1, 2, 3)
    with open_tiers(root, cache) as (tier, persister):
        exact = {(1, 0), (1, 1)}
        found = [tier.drain_one(persister, {}, exact) for _ in range(4)]
    assert [one and one.generation.step for one in found] == [3, 0, 2, 1]


@pytest.mark.promise
@pytest.mark.parametrize("kept", ["nothing", "pinned", "exact"])
def test_what_the_retention_of_the_root_would_remove_at_once_is_not_sent(kept: str) -> None:
    root, cache = FaultyStore(MemoryStore("root")), cached(0, 1, 2)
    if kept == "pinned":
        pin(cache, Generation(1, 0))
    with open_tiers(root, cache, Keep(last=1)) as (tier, persister):
        exact = {(1, 0)} if kept == "exact" else set()
        found = [tier.drain_one(persister, {}, exact) for _ in range(3)]
        assert tier.drain_one(persister, {}, exact) is None
    passed = {one.generation.step for one in found if one is not None and one.is_superseded}
    assert passed == ({0, 1} if kept == "nothing" else {1})
    sent = {str(change).partition("steps/1-")[2][:1] for change in root.changes}
    assert sent - {""} == ({"2"} if kept == "nothing" else {"2", "0"})
    assert waiting(cache) == {}
    assert "1-2" in whole(root)


@pytest.mark.promise
def test_what_the_root_would_keep_is_sent_though_something_newer_is_there() -> None:
    root, cache = MemoryStore("root"), cached(0, 1, 2)
    with open_tiers(root, cache, Keep(last=2)) as (tier, persister):
        found = drain_all(tier, persister)
    assert [(one.generation.step, one.is_superseded) for one in found] == [
        (2, False),
        (1, False),
        (0, True),
    ]
    assert whole(root) == ["1-1", "1-2"]


@pytest.mark.promise
def test_what_another_start_left_in_the_cache_is_not_dropped_for_what_the_root_has() -> None:
    root, cache = MemoryStore("root"), cached(0)
    save_steps(root, [], 1)
    commit.open_root(root, "r")
    commit.record_incarnation(root, Incarnation(run_id="r", n=1, nonce="another", world=2))
    save_steps(root, [5, 6], 2)
    with open_tiers(root, cache, Keep(last=1)) as (tier, persister):
        (refused,) = drain_all(tier, persister)
        assert refused.is_lost and not refused.is_superseded
    assert len(waiting(cache)) == 1


class ListedBucket(PassingStore):
    """A store that counts its lists, and says that requests to it may land late."""

    settle_s = 0.001

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.lists: builtins.list[str] = []

    def list(self, prefix: str) -> builtins.list[str]:
        self.lists.append(prefix)
        return self.inner.list(prefix)


def test_a_bucket_is_listed_for_what_was_broken_off_once_and_not_at_each_drain() -> None:
    root, cache = ListedBucket(MemoryStore("root")), cached(0, 1, 2)
    with open_tiers(root, cache) as (tier, persister):
        drain_all(tier, persister)
    assert len([one for one in root.lists if one in ("steps", "parts")]) == 2
    assert whole(root.inner) == ["1-0", "1-1", "1-2"]


def test_both_tiers_are_asked_for_a_file_up_to_a_limit_in_as_many_reads_as_each_takes() -> None:
    root, cache = MemoryStore("root"), cached(0)
    commit.open_root(root, "r")
    root.publish("layouts/one.json", b"12345")
    cache.publish("layouts/two.json", b"12345678")
    asked: list[tuple[str, int]] = []

    def at_most(path: str, limit_bytes: int) -> bytes | int:
        asked.append((path, limit_bytes))
        return root.read(path)

    root.__dict__["read_at_most"] = at_most
    tiered = TieredStore(cache, root)
    assert read_at_most(tiered, "layouts/one.json", 5) == b"12345"
    assert read_at_most(tiered, "layouts/two.json", 5) == 8
    assert asked == [("layouts/one.json", 5)]


@pytest.mark.promise
def test_a_cache_without_room_for_it_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, cache = cached(0), LocalStore(tmp_path / "cache")
    commit.open_root(cache, "r")
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 1000)
    heard: list[Event] = []
    end = subscribe(lambda event, _: heard.append(event))
    with open_tiers(root, cache) as (tier, _):
        tier.fill(Generation(1, 0))
    end()
    (warning,) = (event for event in heard if isinstance(event, Warned))
    assert "1000 are free" in warning.message
    assert catalogue(cache).manifests == ()
    monkeypatch.undo()
    with open_tiers(root, cache) as (tier, _):
        tier.fill(Generation(1, 0))
    assert whole(cache) == ["1-0"]


class OutageStore(PassingStore):
    """A root that answers nothing about images."""

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        if path.startswith("steps/"):
            raise StorageError("no answer", operation="read", path=path, url=self.url)
        return self.inner.read(path, offset_bytes, size_bytes)

    def exists(self, path: str) -> bool:
        if path.startswith("steps/"):
            raise StorageError("no answer", operation="look-up", path=path, url=self.url)
        return self.inner.exists(path)


@pytest.mark.promise
def test_what_another_hosts_cache_has_is_read_though_the_root_does_not_answer() -> None:
    far = cached(0)
    root, own, near = MemoryStore("root"), MemoryStore("own"), MemoryStore("near")
    commit.open_root(root, "r")
    tiered = TieredStore(own, OutageStore(root))
    tiered.read_also(near, far)
    (manifest,) = catalogue(tiered).manifests
    ref = manifest.images[0]
    assert tiered.exists(ref.path) and len(tiered.read(ref.path)) == ref.size_bytes
    with pytest.raises(StorageError, match="no answer"):
        tiered.read("steps/1-0-none/live-00000.safetensors")
    with pytest.raises(StorageError, match="no answer"):
        tiered.exists("steps/1-0-none/live-00000.safetensors")


def test_a_host_asks_the_one_that_has_an_image_before_the_root_and_all_others_after_it() -> None:
    asked: list[str] = []

    class Asked(PassingStore):
        def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
            asked.append(self.inner.url)
            return self.inner.read(path, offset_bytes, size_bytes)

    own, near, root, far = (Asked(MemoryStore(name)) for name in ("own", "near", "root", "far"))
    tiered = TieredStore(own, root)
    tiered.read_also(near, far)
    for path in ("steps/1-0-a/live-00000.safetensors", "manifests/1-0.json"):
        with pytest.raises(NotFound):
            tiered.read(path)
    names = [url.rpartition("/")[2] for url in asked]
    assert names == ["own", "near", "root", "far", "root", "own", "near", "far"]
