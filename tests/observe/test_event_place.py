"""Events of a bucket: written to a spool on the host, uploaded as objects that never change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.observe import event_place as places
from holdfast.observe.event_files import open_parts, set_aside, trails
from holdfast.observe.event_place import event_place, upload
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
