"""What is removed by hand: only what was named, and at no moment anything that is still needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.catalogue import Catalogue, catalogue, pin_path
from holdfast.errors import FormatError, StorageError
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Manifest
from holdfast.persist.commit import unnamed_directories, unnamed_layouts
from holdfast.persist.pins import pin
from holdfast.persist.removal import plan, removable, remove
from holdfast.policy.when import Keep
from holdfast.storage.base import Store
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import FaultyStore, Mode, PassingStore, Stopped
from support.checkpoints.roots import LAYOUT, OTHER, fill, leave_behind, whole

LEFT = "steps/2-50-deadbeef"


def filled() -> MemoryStore:
    store = MemoryStore()
    fill(store)
    leave_behind(store)
    return store


@pytest.mark.promise
def test_what_a_pin_that_cannot_be_read_may_name_stays() -> None:
    store = filled()
    manifests = catalogue(store).manifests
    assert LEFT in unnamed_directories(store, manifests)
    unnamed = "layouts/0123456789abcdef.json"
    store.publish(unnamed, b"{}")
    assert unnamed_layouts(store, manifests) == [unnamed]
    store.publish(pin_path(Generation(2, 50)), b"of a version that is not there yet")
    assert unnamed_directories(store, manifests) == unnamed_layouts(store, manifests) == []


# ── which ──────────────────────────────────────────────────────────────────────────────────────


def found_of(*generations: tuple[int, int], parent: tuple[int, int] | None = (1, 10)) -> Catalogue:
    """A catalogue of manifests that name nothing; incarnation 2 went on from ``parent``."""
    image = ImageRef(path="p", rank=0, size_bytes=1, header_xxh3="0", table_xxh3="0")
    manifests = tuple(
        Manifest(
            run_id="r", incarnation=i, step=s, attempt="a", world=1, layout="x", images=(image,)
        )
        for i, s in generations
    )
    records = [Incarnation(run_id="r", n=1, nonce="x", world=1)]
    records.append(Incarnation(run_id="r", n=2, nonce="y", parent=parent))
    return Catalogue(manifests, tuple(records))


FALL_BACK = ((1, 10), (1, 20), (1, 30), (2, 20), (2, 30), (2, 40))


@pytest.mark.parametrize(
    ("rule", "abandoned", "going"),
    [
        ({}, False, ""),
        ({}, True, "1-20 1-30"),
        ({"last": 1}, False, "1-10 2-20 2-30"),
        ({"last": 2}, True, "1-10 1-20 1-30 2-20"),
        ({"last": 9}, False, ""),
        ({"every": 20}, False, "1-10 2-30"),
        ({"last": 2, "every": 20}, False, "1-10"),
    ],
)
def test_only_what_the_options_name_goes(rule: dict[str, Any], abandoned: bool, going: str) -> None:
    gone = removable(found_of(*FALL_BACK), (), Keep(**rule), abandoned=abandoned)
    assert " ".join(str(m.generation) for m in gone) == going


def test_pinned_checkpoints_stay_abandoned_or_not() -> None:
    pins = {Generation(1, 10), Generation(1, 20)}
    gone = removable(found_of(*FALL_BACK), pins, Keep(last=1), abandoned=True)
    assert [str(m.generation) for m in gone] == ["1-30", "2-20", "2-30"]


def test_while_the_newest_start_has_saved_nothing_the_newest_abandoned_checkpoint_stays() -> None:
    found = found_of((1, 10), (1, 20), parent=None)
    assert found.lineage == ()
    (gone,) = removable(found, (), Keep(last=1), abandoned=True)
    assert gone.generation == (1, 10)


# ── how ────────────────────────────────────────────────────────────────────────────────────────


def test_images_leftovers_and_layouts_go_with_what_named_them() -> None:
    store = filled()
    removal = plan(store, Keep(last=1), abandoned=True)
    assert {one.path for one in removal.directories} == {LEFT}
    before = {path: len(data) for path, data in store._files.items()}
    gone = remove(store, removal)
    assert gone == removal
    assert whole(store) == ["2-40"]
    assert store.list("steps") == ["2-40-a2x40"]
    assert store.list("layouts") == [f"{OTHER.hash}.json"]
    freed = sum(before.values()) - sum(len(data) for data in store._files.values())
    manifests = sum(size for path, size in before.items() if path.startswith("manifests/"))
    manifests -= len(store.read("manifests/2-40.json"))
    assert gone.size_bytes == freed - manifests


def test_a_plan_changes_nothing() -> None:
    counted = FaultyStore(filled())
    assert plan(counted, Keep(last=1), abandoned=True)
    assert counted.changes == []


def test_without_options_only_what_belongs_to_no_checkpoint_goes() -> None:
    store = filled()
    store.publish("layouts/0123456789abcdef.json", b"{}")
    removal = plan(store, Keep(), abandoned=False)
    assert removal.checkpoints == ()
    assert removal.size_bytes == 5002
    remove(store, removal)
    assert len(whole(store)) == 6
    assert sorted(store.list("layouts")) == sorted([f"{LAYOUT.hash}.json", f"{OTHER.hash}.json"])
    assert not plan(store, Keep(), abandoned=False)


@pytest.mark.parametrize("path", ["manifests/1-20.json", "incarnations/2.json"])
def test_nothing_goes_while_something_is_unreadable(path: str) -> None:
    counted = FaultyStore(filled())
    counted.inner.publish(path, b"damaged", replace=True)
    with pytest.raises(FormatError, match=path):
        plan(counted, Keep(last=1), abandoned=True)
    assert counted.changes == []


def test_a_manifest_that_becomes_unreadable_meanwhile_stops_the_sweep() -> None:
    store = filled()
    removal = plan(store, Keep(last=1), abandoned=False)
    good = store.read("manifests/2-40.json")
    store.publish("manifests/2-40.json", good[:-30], replace=True)
    with pytest.raises(FormatError):
        remove(store, removal)
    store.publish("manifests/2-40.json", good, replace=True)
    assert "2-40" in whole(store)


def test_a_pin_set_after_the_plan_keeps_its_checkpoint_images_and_layout() -> None:
    store = filled()
    removal = plan(store, Keep(last=1), abandoned=True)
    pin(store, Generation(1, 10))
    gone = remove(store, removal)
    assert whole(store) == ["1-10", "2-40"]
    assert Generation(1, 10) not in [m.generation for m in gone.checkpoints]
    assert LAYOUT.hash not in str(gone.layouts)


def test_only_what_was_planned_goes() -> None:
    store = filled()
    removal = plan(store, Keep(last=1), abandoned=True)
    leave_behind(store, "steps/2-60-aaaa/live-00000.safetensors")
    remove(store, removal)
    assert store.list("steps") == ["2-40-a2x40", "2-60-aaaa"]


def test_a_pinned_checkpoint_that_a_killed_pruner_took_comes_back() -> None:
    store = filled()
    pin(store, Generation(1, 20))
    store.remove("manifests/1-20.json")  # and there it was killed
    removal = plan(store, Keep(last=1), abandoned=True)
    assert "1-20" not in " ".join(one.path for one in removal.directories)
    remove(store, removal)
    assert whole(store) == ["1-20", "2-40"]


# ── beside checkpoints ─────────────────────────────────────────────────────────────────────────

IMAGE = "steps/1-10-a1x10/live-00000.safetensors"
MADE = (
    "copies/1-10-a1x10.json",
    f"damaged/{IMAGE}",
    f"damaged/{IMAGE}-1",
    f"damaged/{IMAGE}-12.new",
    "damaged/incarnations/1.json",
    "damaged/layouts/0123456789abcdef.json.new",
    "damaged/manifests/1-10.json",
    "damaged/parts/1-10-a1x10/frozen-00001.safetensors",
)
FOREIGN = (
    "copies/best-model/weights.bin",
    "copies/notes.json",
    "copies/1-10.json",
    "damaged/notes.txt",
    f"damaged/{IMAGE}.bak",
    "damaged/pictures/1.json",
    "damaged/steps/1-10-a1x10/loss.png",
    "steps/notes.txt",
    "steps/best-model/weights.bin",
    "steps/01-50-deadbeef/live-00000.safetensors",
    "parts/1-x-deadbeef/frozen-00000.safetensors",
)


@pytest.mark.promise
@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_of_what_lies_beside_only_names_of_ours_go(kind: str, tmp_path: Path) -> None:
    store = empty(kind, tmp_path, 0)
    fill(store)
    for path in (*MADE, *FOREIGN):
        store.publish(path, b"some")
    removal = plan(store, Keep(), abandoned=False)
    assert sorted(one.path for one in removal.others) == sorted(MADE)
    assert remove(store, removal) == removal
    assert [path for path in (*MADE, *FOREIGN) if store.exists(path)] == list(FOREIGN)


@pytest.mark.promise
@pytest.mark.parametrize("link", ["copies", "damaged", "damaged/steps", f"damaged/{IMAGE}"])
def test_what_links_lead_to_stays(link: str, tmp_path: Path) -> None:
    store, outside = LocalStore(tmp_path / "run"), LocalStore(tmp_path / "outside")
    fill(store)
    for path in MADE:
        outside.publish(path, b"of another root")
    (tmp_path / "run" / link).parent.mkdir(parents=True, exist_ok=True)
    os.symlink(tmp_path / "outside" / link, tmp_path / "run" / link)
    removal = plan(store, Keep(), abandoned=False)
    assert removal.others == ()
    remove(store, removal)
    assert all(outside.exists(path) for path in MADE)
    assert (tmp_path / "run" / link).is_symlink()


def test_a_directory_that_became_a_link_since_the_plan_is_not_entered(tmp_path: Path) -> None:
    store, outside = LocalStore(tmp_path / "run"), LocalStore(tmp_path / "outside")
    fill(store)
    for one in (store, outside):
        one.publish(f"damaged/{IMAGE}", b"some")
    removal = plan(store, Keep(), abandoned=False)
    assert removal.others
    os.rename(tmp_path / "run" / "damaged", tmp_path / "moved")
    os.symlink(tmp_path / "outside" / "damaged", tmp_path / "run" / "damaged")
    remove(store, removal)
    assert outside.exists(f"damaged/{IMAGE}")


# ── stopped anywhere ───────────────────────────────────────────────────────────────────────────


def empty(kind: str, tmp_path: Any, k: int) -> Store:
    return MemoryStore() if kind == "memory" else LocalStore(tmp_path / str(k))


@pytest.mark.parametrize("mode", ["stop", "torn", "error"])
@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_stopped_at_any_change_every_checkpoint_left_is_whole_and_the_next_call_ends_it(
    kind: str, mode: Mode, tmp_path: Any
) -> None:
    k, last = 0, False
    while not last:
        k += 1
        store = empty(kind, tmp_path, k)
        fill(store)
        leave_behind(store)
        pin(store, Generation(1, 20))
        faulty = FaultyStore(store, fail_at=k, mode=mode)
        try:
            remove(faulty, plan(faulty, Keep(last=1), abandoned=True))
        except (Stopped, StorageError):
            pass
        else:
            last = True
        left = whole(store)
        assert {"1-20", "2-40"} <= set(left)
        remove(store, plan(store, Keep(last=1), abandoned=True))
        assert whole(store) == ["1-20", "2-40"]
        assert len(store.list("steps")) == 2
    assert k > 9


class Ordered(PassingStore):
    """Notes what is removed."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.removed: list[str] = []

    def remove(self, path: str) -> None:
        self.removed.append(path.partition("/")[0])
        super().remove(path)

    def remove_tree(self, prefix: str) -> None:
        self.removed.append(prefix.partition("/")[0])
        super().remove_tree(prefix)


def test_manifests_go_first_then_images_then_layouts() -> None:
    store = Ordered(filled())
    remove(store, plan(store, Keep(last=1), abandoned=True))
    assert store.removed == ["manifests"] * 5 + ["steps"] * 6 + ["layouts"]
