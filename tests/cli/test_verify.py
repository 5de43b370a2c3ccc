"""``holdfast verify``: what is whole passes, and what is not is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints.commands import Out, damage, image_of, json_of, text_of


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
