"""Objects of others below the prefix of a root: no name is misread, and none of them is removed."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from holdfast.catalogue import catalogue, incarnations_in
from holdfast.cli import main
from holdfast.format.manifest import MAX_NUMBER
from holdfast.maintenance.copies import copy
from holdfast.maintenance.repairs import plan_repair
from holdfast.overview import leave_index, overview
from holdfast.persist.removal import plan, remove
from holdfast.policy.when import Keep
from holdfast.restore.reading.verify import verify
from holdfast.storage.base import settle_s
from holdfast.storage.local import LocalStore
from holdfast.storage.objects import ObjectStore
from support.checkpoints.keeper_roots import all_contents, save_steps
from support.servers.bucket_model import World, model_store
from support.servers.object_servers import ObjectServer, object_store, use

#: Markers of directories, as consoles and file managers leave them.
MARKERS = (
    *("", "manifests/", "steps/", "steps//", "pins/", "readers/", "layouts/", "copies/"),
    *("manifests/1-20.json/", "FIRST/", "SECOND/"),
)
#: What some servers take for a path, and lead elsewhere.
PATHS = (
    *("manifests/../holdfast.json", "manifests/../manifests/1-40.json", "pins/..", "steps/.."),
    *("steps/../../elsewhere", "damaged/../x", "copies/../x", "./manifests/1-40.json"),
    *("FIRST/../../holdfast.json", "SECOND/../../holdfast.json"),
)
#: Names that look like ours, and are not.
ALIKE = (
    *("manifests/1-40.JSON", "Manifests/1-40.json", "manifests/01-40.json", "manifests/1-40.json "),
    *("manifests/1-40", "manifests/+1-40.json", "manifests/1-\u0664.json", "pins/1-10.Json"),
    f"manifests/1-{'9' * 900}.json",
    *("incarnations/2.json.bak", "incarnations/\u0663.json", f"incarnations/{'9' * 60}.json"),
    *("holdfast.JSON", "Holdfast.json", "layouts/notes.json", "readers/x.json"),
)
#: Control characters, and names as long as a key may be.
ODD = (
    *("manifests/1-4\x010.json", "manifests/\x7f", "steps/a\x01b/x", "parts/\x1b[31m/x"),
    *("steps/a\r\nb/x", "pins/\t", "incarnations/\x0b"),
    *(f"{above}/{'x' * (1024 - len(f'root/{above}/'))}" for above in ("steps", "manifests")),
)
#: What a user keeps where images are.
OTHERS = ("steps/notes.txt", "steps/mine/weights.bin", "parts/README", "parts/7/frozen-00000", "x")
ALL = (*MARKERS, *PATHS, *ALIKE, *ODD, *OTHERS)


def directory_of(images: dict[str, bytes], step: int) -> str:
    """The directory of the images of a checkpoint."""
    return next(one for one in images if one.startswith(f"steps/1-{step}-")).rpartition("/")[0]


def require_same_root(
    store: ObjectStore, steps: list[int], images: dict[str, bytes], *, is_deep: bool = False
) -> None:
    """What is read is what was saved, bit for bit; nothing is broken."""
    found = catalogue(store)
    assert [one.step for one in found.manifests] == steps and not found.broken
    assert [one.n for one in found.incarnations] == [1]
    short = overview(store)
    assert [one.step for one in short.manifests] == steps and not (short.broken or short.unread)
    assert {path: data for path, data in all_contents(store).items() if path in images} == images
    for manifest in found.manifests if is_deep else ():
        assert not verify(store, manifest, deep=True).faults
    assert not is_deep or not plan_repair(store, [], None).files


@pytest.mark.promise
def test_foreign_objects_are_neither_read_nor_removed_and_stop_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World()
    store = model_store(world, monkeypatch, tries_s=0.1)
    save_steps(store, (10, 20, 30))
    images = all_contents(store)
    first, second = (directory_of(images, step) for step in (10, 20))
    named = (one.replace("FIRST", first).replace("SECOND", second) for one in ALL)
    foreign = {f"root/{path}": path.encode() for path in named}
    inside = {f"root/{first}/a\x01b": b"control", f"root/{first}/mine": b"mine"}
    for key, data in {**foreign, **inside}.items():
        world.keep(key, data)
    require_same_root(store, [10, 20, 30], images)
    leave_index(store, overview(store))
    require_same_root(store, [10, 20, 30], images, is_deep=True)

    target = LocalStore(tmp_path / "copy")
    copy(store, target, None, lambda *_: None)
    assert all_contents(target) == images

    removal = plan(store, Keep(last=2), abandoned=True)
    assert [one.step for one in removal.checkpoints] == [10]
    assert not (removal.directories or removal.layouts or removal.others)
    with store.lock("writer", "pruner"):
        done = remove(store, removal)
    assert [one.step for one in done.checkpoints] == [10]
    # What lies in the directory of a checkpoint goes with it, but for what leads out of it.
    gone = f"root/{first}/"
    own = {key for key in world.objects if key.startswith(gone)}
    assert own == {f"{gone}../../holdfast.json"}, own
    left = {key: data for key, data in foreign.items() if not key.startswith(gone) or key in own}
    assert {key: world.objects.get(key) for key in left} == left
    kept = {path: data for path, data in images.items() if not path.startswith(first)}
    require_same_root(store, [20, 30], kept)

    save_steps(store, (50, 60), keep=Keep(last=2))  # a keeper goes on there
    assert [one.step for one in catalogue(store).manifests] == [50, 60]
    assert {key: world.objects.get(key) for key in left} == left
    listed = [*store.list("incarnations"), *store.heads("manifests", "-")]
    assert incarnations_in(listed) == {1}


def test_two_names_that_differ_by_case_alone_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    store = model_store(world, monkeypatch, tries_s=0.1)
    save_steps(store, (10, 20))
    images = all_contents(store)
    own = directory_of(images, 10)
    another = own.upper().replace("STEPS", "steps")
    for key in [key for key in world.objects if own in key]:
        world.keep(key.replace(own, another), b"another's")
    require_same_root(store, [10, 20], images)
    removal = plan(store, Keep(), abandoned=False)
    assert [one.path for one in removal.directories] == [another]
    with store.lock("writer", "pruner"):
        remove(store, removal)
    require_same_root(store, [10, 20], images)
    assert not [key for key in world.objects if another in key]


def test_a_number_that_is_none_of_ours_is_not_counted_on_from() -> None:
    names = ["3.json", "7", "8-10.json", f"{MAX_NUMBER}.json", f"{10**16}.json", "\u0663.json"]
    assert incarnations_in([*names, "09.json", "x", "4x.json", "5.jsonl", ""]) == {3, 7, 8}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", ["seaweedfs_server", "moto_server", "google_server"])
def test_servers_keep_foreign_objects_and_checkpoints_apart(
    server: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    running: ObjectServer = request.getfixturevalue(server)
    use(running, monkeypatch)
    prefix = f"foreign/{uuid.uuid4().hex}"
    store = object_store(prefix)
    save_steps(store, (10, 20, 30))
    images = all_contents(store)
    directory, second = (directory_of(images, step) for step in (10, 20))
    planted, refused = {}, []
    for one in (*MARKERS, *ALIKE, *ODD, *OTHERS, "FIRST/a\x01b"):
        path = one.replace("FIRST", directory).replace("SECOND", second)
        key = f"{prefix}/{path}"[:1024]
        outcome = store.bucket.put(key, [path.encode()])
        if outcome.is_done:
            planted[key] = path.encode()
        else:
            refused.append((path, outcome.status, outcome.code))
    store.bucket.put(f"{prefix}/precious", [b"precious"])
    store.bucket.put(f"{prefix}/{directory}/../../precious", [b"precious"])
    print(f"{running.name}: {len(planted)} planted, refused {refused}")
    there = {key: data for key, data in planted.items() if store.bucket.get(key).body == data}
    require_same_root(store, [10, 20, 30], images)
    with store.lock("writer", "pruner"):
        removal = plan(store, Keep(last=2), abandoned=True)
        assert {one.path for one in removal.directories} <= {directory}
        remove(store, removal)
    for key, data in there.items():
        if not key.startswith(f"{prefix}/{directory}/"):
            assert store.bucket.get(key).body == data, key
    assert store.read("precious") == b"precious"
    assert not store.exists(f"{directory}/live-00000.safetensors")
    kept = {path: data for path, data in images.items() if not path.startswith(directory)}
    require_same_root(store, [20, 30], kept)
    assert main(["ls", store.url]) == 0
    shown = capsys.readouterr().out
    assert "1-30" in shown and "\x1b[31m" not in shown and settle_s(store) > 0
