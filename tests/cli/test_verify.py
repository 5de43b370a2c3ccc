"""``holdfast verify``: what is whole passes, and what is not is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.restore.reading import verify as reading
from holdfast.restore.reading.read import verify_blocks
from support.checkpoints.commands import Out, damage, error_of, image_of, json_of, text_of


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_verify_finds_nothing_wrong_with_what_save_made(
    root: Path, deep: list[str], capsys: Out
) -> None:
    document = json_of(capsys, "verify", root, *deep)
    assert document["ok"]
    assert [row["faults"] for row in document["checkpoints"]] == [[], []]
    assert "ok" in text_of(capsys, "verify", root, *deep)


def test_verify_deep_finds_one_flipped_bit(root: Path, capsys: Out) -> None:
    damage(image_of(root, 10), 100_000)
    assert json_of(capsys, "verify", root)["ok"], "the bit is in a block, which only --deep reads"
    document = json_of(capsys, "verify", root, "--deep", code=4)
    assert [bool(row["faults"]) for row in document["checkpoints"]] == [True, False]
    assert "FAULTY" in text_of(capsys, "verify", root, "--deep", "--step", "10", code=4)
    assert "ok" in text_of(capsys, "verify", root, "--deep", "--step", "20")


@pytest.mark.parametrize("offset_bytes", [20, -8], ids=["header", "block table"])
def test_verify_finds_a_bit_in_what_describes_the_blocks(
    root: Path, offset_bytes: int, capsys: Out
) -> None:
    damage(image_of(root, 20), offset_bytes)
    assert not json_of(capsys, "verify", root, "--step", "20", code=4)["ok"]


def test_verify_finds_a_missing_image(root: Path, capsys: Out) -> None:
    image_of(root, 20).unlink()
    assert not json_of(capsys, "verify", root, code=4)["ok"]


def test_verify_counts_a_broken_manifest_as_a_fault(root: Path, capsys: Out) -> None:
    damage(sorted((root / "manifests").iterdir())[0], -20)
    document = json_of(capsys, "verify", root, code=4)
    assert [bool(row["faults"]) for row in document["checkpoints"]] == [False, True]


def test_the_parts_are_all_blocks_each_in_one(root: Path, capsys: Out) -> None:
    whole = json_of(capsys, "verify", root, "--deep")["checkpoints"]
    parts = [
        json_of(capsys, "verify", root, "--deep", "--part", f"{k}/3")["checkpoints"]
        for k in (1, 2, 3)
    ]
    for number, row in enumerate(whole):
        assert sum(part[number]["blocks"] for part in parts) == row["blocks"] > 0
        assert sum(part[number]["size_bytes"] for part in parts) == row["size_bytes"]


@pytest.mark.promise
def test_a_flipped_bit_is_found_by_one_of_the_parts(root: Path, capsys: Out) -> None:
    damage(image_of(root, 10), 100_000)
    found = []
    for k in range(1, 8):
        capsys.readouterr()
        found.append(main(["verify", str(root), "--deep", "--part", f"{k}/7"]))
    assert sorted(found) == [0] * 6 + [4]


@pytest.mark.promise
@pytest.mark.parametrize("stop", range(1, 5))
def test_a_check_that_was_broken_off_reads_the_rest_and_forgets_no_fault(
    stop: int, root: Path, tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(image_of(root, 20), 100_000)
    monkeypatch.setattr(reading, "_BLOCKS_AT_ONCE", 1)
    read: list[tuple[int, int]] = []
    real = verify_blocks
    whole = json_of(capsys, "verify", root, "--deep", code=4)["checkpoints"]

    def interrupted(checkpoint: Any, rank: int, first: int, last: int) -> int:
        read.append((rank, first))
        if len(read) == stop:
            raise KeyboardInterrupt
        return real(checkpoint, rank, first, last)

    note, argv = tmp_path / "note", ["verify", str(root), "--deep"]
    with monkeypatch.context() as patch:
        patch.setattr(reading, "verify_blocks", interrupted)
        patch.setattr(reading, "READERS", 1)
        assert main([*argv, "--resume", str(note)]) == 130
    assert note.exists()
    rest = json_of(capsys, *argv, "--resume", note, code=4)["checkpoints"]
    assert [row["faults"] for row in rest] == [row["faults"] for row in whole]
    assert sum(row["blocks"] for row in rest) <= sum(row["blocks"] for row in whole) - (stop - 1)
    assert not note.exists()


def test_what_cannot_be_a_part_or_a_note_is_refused(
    root: Path, tmp_path: Path, capsys: Out
) -> None:
    for text in ("0/7", "8/7", "7", "a/b", "1/0", "-1/7"):
        assert "give" in error_of(capsys, "verify", root, "--deep", f"--part={text}", code=2)
    assert "add --deep" in error_of(capsys, "verify", root, "--part", "1/7", code=2)
    note = tmp_path / "note"
    note.write_text('{"read": "another", "checkpoints": {}}')
    said = error_of(capsys, "verify", root, "--deep", "--resume", note, code=2)
    assert "the note of another check" in said
    note.write_text("not ours")
    assert "is no note" in error_of(capsys, "verify", root, "--deep", "--resume", note, code=2)
    assert note.read_text() == "not ours"
