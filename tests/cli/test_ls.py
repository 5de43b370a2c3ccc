"""``holdfast ls``: every checkpoint, and what each is good for."""

from __future__ import annotations

from pathlib import Path

from holdfast.persist import commit
from holdfast.storage.local import LocalStore
from support.checkpoints.commands import Out, json_of, text_of


def test_ls_lists_every_checkpoint_and_which_is_newest(root: Path, capsys: Out) -> None:
    rows = json_of(capsys, "ls", root)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(10, "kept"), (20, "newest")]
    assert all(row["world"] == row["images"] == 1 and row["size_bytes"] > 2_400_000 for row in rows)
    text = text_of(capsys, "ls", root)
    assert len(text.splitlines()) == 3
    assert "newest" in text.splitlines()[2]


def test_ls_shows_what_a_fall_back_abandoned(fallen_back: Path, capsys: Out) -> None:
    rows = json_of(capsys, "ls", fallen_back)["checkpoints"]
    assert {row["checkpoint"]: row["state"] for row in rows} == {
        "1-10": "kept",
        "1-20": "abandoned",
        "1-30": "abandoned",
        "2-20": "newest",
    }


def test_ls_shows_a_broken_manifest_with_the_reason(fallen_back: Path, capsys: Out) -> None:
    path = fallen_back / "manifests" / "1-10.json"
    path.write_bytes(path.read_bytes().replace(b'"run_id":"r"', b'"run_id":"s"'))
    broken = json_of(capsys, "ls", fallen_back)["checkpoints"][-1]
    assert (broken["checkpoint"], broken["state"]) == ("manifests/1-10.json", "broken")
    assert "checksum" in broken["reason"]
    assert "broken" in text_of(capsys, "ls", fallen_back)


def test_ls_of_a_root_without_checkpoints_says_so(tmp_path: Path, capsys: Out) -> None:
    commit.open_root(LocalStore(tmp_path), "r")
    assert "no checkpoints" in text_of(capsys, "ls", tmp_path)
    assert json_of(capsys, "ls", tmp_path)["checkpoints"] == []
