"""``holdfast repair``: what is printed and refused. What it mends: tests/maintenance."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.errors import StorageError
from holdfast.storage.base import ImageSink
from holdfast.storage.local import LocalStore
from support.checkpoints.commands import (
    Out,
    damage,
    error_of,
    image_of,
    json_of,
    run_alone,
    text_of,
)
from support.checkpoints.roots import fill, whole


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """A root with checkpoints 1-10 and 1-20, whose first is damaged, and a copy from before."""
    root, backup = tmp_path / "run", tmp_path / "backup"
    fill(LocalStore(root), ((1, 10), (1, 20)))
    assert main(["sync", str(root), str(backup)]) == 0
    damage(image_of(root, 10), 4100)
    return root, backup


def test_damage_is_shown_then_mended_and_then_there_is_none(
    roots: tuple[Path, Path], capsys: Out
) -> None:
    root, backup = roots
    name = str(image_of(root, 10).relative_to(root))
    shown = json_of(capsys, "repair", root, "--from", backup, "--dry-run", code=4)
    assert [(one["path"], one["mendable"]) for one in shown["files"]] == [(name, True)]
    assert "can be mended" in text_of(capsys, "repair", root, "--from", backup, "--dry-run", code=4)
    said = text_of(capsys, "repair", root, "--from", backup)
    assert f"mended  (what was there: damaged/{name})" in said
    assert "blocks: 0" in said
    assert whole(LocalStore(root)) == ["1-10", "1-20"]
    assert "nothing is damaged" in text_of(capsys, "repair", root)
    assert f"damaged/{name}" in text_of(capsys, "prune", root, "--dry-run")
    assert json_of(capsys, "prune", root, "--yes")["others"][0]["path"] == f"damaged/{name}"


def test_what_is_lost_is_named_by_leaf_and_box(roots: tuple[Path, Path], capsys: Out) -> None:
    said = text_of(capsys, "repair", roots[0], code=4)
    assert "LOST" in said
    assert "lost: w@0:3,0:2, the plain values" in said
    assert "give another copy of the root by --from" in said
    assert "nothing is damaged" in text_of(capsys, "repair", roots[0], "--step", "20")


def test_bad_input_is_refused_with_what_to_do(
    roots: tuple[Path, Path], tmp_path: Path, capsys: Out
) -> None:
    root, _ = roots
    said = error_of(capsys, "repair", root, "--from", root, code=2)
    assert "is the root that is to be repaired: give a copy" in said
    assert "is not a directory" in error_of(
        capsys, "repair", root, "--from", tmp_path / "no", code=3
    )


def test_a_directory_without_the_memory_of_a_host_is_refused(
    roots: tuple[Path, Path], tmp_path: Path, capsys: Out
) -> None:
    def refused(name: str) -> str:
        return error_of(capsys, "repair", roots[0], "--arenas", tmp_path / name, code=2)

    said = refused("no")
    assert "no has no arenas in it: it does not exist. Give an arena of another host" in said
    (tmp_path / "file").write_bytes(b"x")
    assert "it is not a directory" in refused("file")
    assert "it cannot be read (File name too long)" in refused("n" * 300)
    (tmp_path / "empty").mkdir()
    assert "only nothing: an arena is a directory with files *.slot" in refused("empty")
    for number in range(7):
        (tmp_path / "host" / f"r{number}@host").mkdir(parents=True)
    assert "only r0@host, r1@host, r2@host, r3@host, r4@host, ...: an arena is" in refused("host")
    slot = tmp_path / "host" / "r1@host" / "0.slot"
    slot.write_bytes(bytes(100_000))
    slot.chmod(0o644)
    said = refused("host")
    assert "no slot in" in said and "0.slot is not a slot of ours" in said
    assert "mode -rw-r--r--" in said and "`cp -p`" in said
    slot.chmod(0o600)
    assert "LOST" in text_of(capsys, "repair", roots[0], "--arenas", tmp_path / "host", code=4)


def test_a_repair_loads_no_torch(roots: tuple[Path, Path]) -> None:
    assert run_alone("repair", roots[0], "--from", roots[1]).returncode == 0


def test_a_file_that_was_missing_has_nothing_aside(roots: tuple[Path, Path], capsys: Out) -> None:
    root, backup = roots
    image_of(root, 10).unlink()
    said = json_of(capsys, "repair", root, "--from", backup)
    assert [one["aside"] for one in said["files"]] == [None]
    assert said["failed"] == []
    image_of(root, 10).unlink()
    assert "what was there" not in text_of(capsys, "repair", root, "--from", backup)


def test_a_step_is_named_though_its_manifest_is_broken(
    roots: tuple[Path, Path], capsys: Out
) -> None:
    root, backup = roots
    for step in (10, 20):
        damage(root / "manifests" / f"1-{step}.json", 60)
    for name in ("20", "1-10"):
        said = json_of(capsys, "repair", root, "--from", backup, "--step", name)
        path = f"manifests/1-{name.rpartition('-')[2]}.json"
        assert [one["path"] for one in said["documents"]] == [path]
    assert "no checkpoint" in error_of(capsys, "repair", root, "--step", "30", code=3)
    assert whole(LocalStore(root)) == ["1-10", "1-20"]


def test_a_manifest_that_names_what_is_lost_is_said_to_stay(
    roots: tuple[Path, Path], capsys: Out
) -> None:
    root, backup = roots
    for one in (root, backup):
        image_of(one, 10).unlink()
    damage(root / "manifests" / "1-10.json", 60)
    said = text_of(capsys, "repair", root, "--from", backup, code=4)
    assert "manifests/1-10.json  not mended" in said
    assert "it names what is not whole: steps/" in said


def test_what_failed_is_printed_beside_what_was_mended(
    roots: tuple[Path, Path], capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, backup = roots
    image_of(root, 20).unlink()
    path = str(image_of(backup, 10).relative_to(backup))
    create = LocalStore.create

    def full(store: LocalStore, name: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        if name == path:
            raise StorageError("no room")
        return create(store, name, size_bytes, aside=aside)

    monkeypatch.setattr(LocalStore, "create", full)
    said = text_of(capsys, "repair", root, "--from", backup, code=5)
    assert f"{path}  failed: no room" in said
    assert "mended" in said
    monkeypatch.undo()
    assert main(["repair", str(root), "--from", str(backup)]) == 0
