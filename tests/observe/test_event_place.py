"""Events of a bucket: written to a spool on the host, uploaded as objects that never change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.observe import event_place as places
from holdfast.observe.event_files import open_parts, set_aside, trails
from holdfast.observe.event_place import event_place, upload
from holdfast.observe.live_run import FileTails
from holdfast.observe.report_builder import read_report
from holdfast.observe.run_report import to_json
from holdfast.storage.base import Store
from support.runs.told import RANKS, Told, tell_save, tell_start
from support.servers.bucket_model import World, model_store

ROOT = "s3://model/root"


def lines_of(root: str) -> list[str]:
    """Returns all events that a reader of the root finds."""
    found = (line for path in trails(root) for part in open_parts(path) for line in part)
    return sorted(json.loads(line)["n"] for line in found)


def append(path: Path, *names: str, end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(f'{{"n": "{name}"}}\n' for name in names[:-1]))
        file.write(f'{{"n": "{names[-1]}"}}{end}')


def test_a_directory_is_its_own_place(tmp_path: Path) -> None:
    place = event_place(tmp_path)
    assert place.file("rank-00000") == tmp_path / "events" / "rank-00000.jsonl"
    assert place.only_beside == tmp_path / "holdfast.json"
    assert place.read_from() == tmp_path / "events"


def test_every_event_of_a_bucket_is_found_once_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    store = model_store(world, monkeypatch, tries_s=1.0)
    monkeypatch.setattr(places, "open_store", lambda root: store)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "one"))
    place = event_place(ROOT)
    assert place.only_beside is None
    rank, keeper = place.file("rank-00000"), place.file("keeper-h")
    append(rank, "a", "b")
    assert upload(place, store) == 0  # there is no root yet
    store.publish("holdfast.json", b"{}")
    append(keeper, "c", "torn", end="")
    assert upload(place, store) == 2 and upload(place, store) == 0
    assert lines_of(ROOT) == ["a", "b", "c", "torn"]
    append(keeper, "", "d")  # ends the torn line
    keeper.write_text(keeper.read_text().replace('{"n": "torn"}{"n": ""}', '{"n": "torn"}'))
    set_aside(rank)  # it was full: what of it is uploaded stays so
    append(rank, "e")
    assert lines_of(ROOT) == ["a", "b", "c", "d", "e", "torn"]
    before = dict(world.objects)
    assert upload(place, store) == 2
    assert {key: world.objects[key] for key in before} == before  # none is ever changed
    assert lines_of(ROOT) == ["a", "b", "c", "d", "e", "torn"]
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "another host"))
    assert lines_of(ROOT) == ["a", "b", "c", "d", "e", "torn"]


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[places.EventPlace, Store]:
    store = model_store(World(), monkeypatch, tries_s=1.0)
    store.publish("holdfast.json", b"{}")
    monkeypatch.setattr(places, "open_store", lambda root: store)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return event_place(ROOT), store


@pytest.mark.promise
def test_a_file_with_the_inode_of_one_that_was_given_up_is_uploaded_whole(
    spool: tuple[places.EventPlace, Store], tmp_path: Path
) -> None:
    place, store = spool
    host = place.file("host-h")
    append(host, "a", "b", "c")
    assert upload(place, store) == 1
    host.write_text('{"n": "d"}\n')  # as where a file system gives an inode again at once
    assert lines_of(ROOT) == ["a", "b", "c", "d"]
    assert upload(place, store) == 1
    assert lines_of(ROOT) == ["a", "b", "c", "d"]


def test_events_that_are_gone_from_a_bucket_are_gone_from_its_report(
    spool: tuple[places.EventPlace, Store],
) -> None:
    """By a rule of the bucket, or as another run is there by now."""
    place, store = spool
    append(place.file("host-h"), "a")
    upload(place, store)
    assert lines_of(ROOT) == ["a"]
    place.file("host-h").unlink()
    (name,) = store.list("events")
    store.remove(f"events/{name}")
    assert lines_of(ROOT) == []


def test_what_is_gone_from_a_bucket_is_followed_no_longer(
    spool: tuple[places.EventPlace, Store],
) -> None:
    place, store = spool
    append(place.file("host-a"), "a")
    append(place.file("host-b"), "b")
    upload(place, store)
    tails = FileTails(ROOT)
    list(tails.read())
    followed = tails.files
    store.remove(f"{places.EVENTS}/{store.list(places.EVENTS)[0]}")
    list(tails.read())
    assert tails.files < followed
    tails.close()


@pytest.mark.parametrize("fate", ["given up", "removed", "read"])
def test_of_what_is_no_longer_in_the_spool_no_line_is_kept(
    fate: str, spool: tuple[places.EventPlace, Store]
) -> None:
    """Whether its upload was read, a rule of the bucket was faster, or there was no room for it."""
    place, store = spool
    host, other = place.file("host-h"), place.file("host-a")
    tails = FileTails(ROOT)
    for names in ("abc", "def"):
        append(host, *names)
        append(other, *names.upper())
        assert list(tails.read()) == []
    assert len(tails._of_spool) == 12  # not the lines themselves
    if fate == "given up":
        host.unlink()
        other.unlink()
    else:
        upload(place, store)
    if fate == "removed":
        for name in store.list(places.EVENTS):
            store.remove(f"{places.EVENTS}/{name}")
    list(tails.read())
    assert not tails._of_spool
    tails.close()


@pytest.mark.promise
def test_what_is_uploaded_again_after_a_kill_or_while_it_is_read_counts_once(
    spool: tuple[places.EventPlace, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, store = spool
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, RANKS)
    for step in range(6):
        tell_save(told, 1, step, 20.0 + 10 * step, RANKS)
    told.write()
    lines = []
    for file in sorted((tmp_path / "events").glob("*.jsonl")):
        for number, line in enumerate(file.read_bytes().splitlines()):
            lines.append(json.loads(line) | {"writer": file.stem, "number": number})
    expected = to_json(read_report(tmp_path))
    host = place.file("host-h")

    def write(some: list[dict[str, Any]]) -> None:
        with host.open("a") as opened:
            opened.writelines(json.dumps(line) + "\n" for line in some)

    host.parent.mkdir()
    write(lines[:40])
    with monkeypatch.context() as patch:
        patch.setattr(places, "_write_marks", lambda *_: 1 // 0)  # the keeper is killed there
        with pytest.raises(ZeroDivisionError):
            upload(place, store)
    write(lines[40:])
    names = store.list

    def list_and_upload(prefix: str) -> list[str]:
        monkeypatch.setattr(store, "list", names)
        upload(place, store)
        return names(prefix)

    monkeypatch.setattr(store, "list", list_and_upload)
    found = to_json(read_report(ROOT))
    for document in (found, expected):
        for key in ("root", "files"):
            del document[key]
    assert found == expected


def test_a_spool_is_private_and_that_of_another_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    spool = event_place(ROOT).directory.parent
    assert spool.stat().st_mode & 0o777 == 0o700
    spool.chmod(0o777)
    event_place(ROOT)
    assert spool.stat().st_mode & 0o777 == 0o700
    spool.rmdir()
    (tmp_path / "theirs").mkdir()
    spool.symlink_to(tmp_path / "theirs")
    with pytest.raises(UsageError, match="not a directory of this user"):
        event_place(ROOT)
