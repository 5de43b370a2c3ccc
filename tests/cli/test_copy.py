"""``holdfast copy`` and ``sync``: what is printed and refused. The rest: tests/maintenance."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.checkpoints import open_root
from holdfast.leases import ReadLease
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
def root(tmp_path: Path) -> Path:
    """Checkpoints 1-10 and 1-20."""
    fill(LocalStore(tmp_path / "run"), ((1, 10), (1, 20)))
    return tmp_path / "run"


def test_copy_brings_the_newest_or_the_named_and_sync_all(
    root: Path, tmp_path: Path, capsys: Out
) -> None:
    target = tmp_path / "archive"
    assert json_of(capsys, "copy", root, target, "--dry-run")["to_copy"] == ["1-20"]
    assert not target.exists(), "a dry run makes nothing"
    assert "1-20  copied" in text_of(capsys, "copy", root, target)
    assert json_of(capsys, "sync", root, target)["copied"] == ["1-10"]
    assert whole(LocalStore(target)) == ["1-10", "1-20"]
    document = json_of(capsys, "copy", root, target, "--step", "10", "--step", "20")
    assert (document["copied"], document["there"]) == ([], ["1-10", "1-20"])
    assert "2 checkpoints there already" in text_of(capsys, "sync", root, target)


def test_what_is_damaged_is_named_and_the_exit_code_says_so(
    root: Path, tmp_path: Path, capsys: Out
) -> None:
    damage(image_of(root, 10), 4100)
    said = text_of(capsys, "sync", root, tmp_path / "archive", code=4)
    assert "1-10  not copied" in said
    assert "block 0 of steps/1-10-" in said
    assert "1-20  copied" in said


def test_a_named_checkpoint_that_is_not_copied_is_an_error(
    root: Path, tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("--step", "10", "--step", "20")
    monkeypatch.setattr(ReadLease, "take", lambda _, manifest: manifest.step != 10)
    document = json_of(capsys, "copy", root, tmp_path / "a", *steps, code=3)
    assert (document["copied"], document["pruned"]) == (["1-20"], ["1-10"])
    assert "1-10  pruned meanwhile" in text_of(capsys, "copy", root, tmp_path / "b", *steps, code=3)
    assert json_of(capsys, "sync", root, tmp_path / "c")["pruned"] == ["1-10"]
    known = open_root(str(root))
    (root / "manifests" / "1-10.json").unlink()
    monkeypatch.setattr("holdfast.cli.copy.open_root", lambda _: known)
    document = json_of(capsys, "copy", root, tmp_path / "d", *steps, code=3)
    assert (document["copied"], document["missing"]) == (["1-20"], ["1-10"])


def test_a_broken_manifest_that_may_be_the_newest_is_named(
    root: Path, tmp_path: Path, capsys: Out
) -> None:
    damage(root / "manifests" / "1-20.json", 40)
    document = json_of(capsys, "copy", root, tmp_path / "archive", code=4)
    assert document["copied"] == ["1-10"]
    assert [one["path"] for one in document["broken"]] == ["manifests/1-20.json"]


def test_an_older_broken_manifest_does_not_matter_to_a_copy_of_the_newest(
    root: Path, tmp_path: Path, capsys: Out
) -> None:
    damage(root / "manifests" / "1-10.json", 40)
    assert json_of(capsys, "copy", root, tmp_path / "archive")["copied"] == ["1-20"]


def test_checkpoints_that_a_copied_record_gives_up_are_named(
    root: Path, tmp_path: Path, capsys: Out
) -> None:
    target = tmp_path / "archive"
    text_of(capsys, "sync", root, target)
    fill(LocalStore(root), ((2, 15),))
    assert json_of(capsys, "sync", root, target, "--dry-run")["abandons"] == ["1-20"]
    assert f"1-20 of {target}: given up by a start" in text_of(capsys, "sync", root, target)


def test_bad_input_is_refused_with_what_to_do(root: Path, tmp_path: Path, capsys: Out) -> None:
    assert "are one root: give another" in error_of(capsys, "sync", root, root, code=2)
    assert "there are: 1-10, 1-20" in error_of(
        capsys, "copy", root, tmp_path / "t", "--step", "15", code=3
    )
    assert "is not a directory" in error_of(capsys, "sync", tmp_path / "no", root, code=3)
    assert not (tmp_path / "t").exists()


def test_a_copy_loads_no_torch(root: Path, tmp_path: Path) -> None:
    assert run_alone("sync", root, tmp_path / "archive").returncode == 0
