"""``holdfast repair``: what is printed and refused. What it mends: tests/maintenance."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli import main
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


def test_a_repair_loads_no_torch(roots: tuple[Path, Path]) -> None:
    assert run_alone("repair", roots[0], "--from", roots[1]).returncode == 0
