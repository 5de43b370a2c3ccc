"""What ``resume_from_checkpoint`` may name, however it is written; no framework is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.integrations.trainer_resume import Resume, read_resume


def test_the_root_is_known_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs@home" / "x"
    root.mkdir(parents=True)
    (root / "holdfast.json").touch()
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(root.parent)
    ways: list[str | Path] = [
        root,
        str(root),
        f"{root}/",
        "x",
        "./x",
        f"file://{root}",
        tmp_path / "link",
    ]
    for own in (str(root), "x", f"{root}/"):
        for way in ways:
            assert read_resume(way, own) == Resume(must=True), way
            found = read_resume(f"{os.fspath(way)}@1-39", own)
            assert found == Resume(generation="1-39", must=True), way
    assert read_resume("s3://bucket/x@1-39", "s3://bucket/x/") == Resume("1-39", must=True)


def test_nothing_and_true_and_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    root = str(tmp_path / "x")
    assert read_resume(None, root) == read_resume(False, root) == read_resume("", root) == Resume()
    assert read_resume(True, root) == Resume(must=True)
    theirs = tmp_path / "checkpoint-8"
    assert read_resume(theirs, root) == Resume(gone=str(theirs))
    theirs.mkdir()
    (theirs / "optimizer.pt").touch()
    with pytest.raises(UsageError, match="has no scheduler, as save_only_model=True"):
        read_resume(theirs, root)
    (theirs / "scheduler.pt").touch()
    assert read_resume(theirs, root) == Resume(foreign=str(theirs))


@pytest.mark.parametrize("generation", ["", "@1-39"])
def test_another_root_is_refused_and_not_taken_for_a_checkpoint_of_the_trainer(
    generation: str, tmp_path: Path
) -> None:
    other = tmp_path / "y"
    other.mkdir()
    (other / "holdfast.json").touch()
    with pytest.raises(UsageError, match=f"{other}, another root of Holdfast .* give holdfast="):
        read_resume(f"{other}{generation}", str(tmp_path / "x"))
    with pytest.raises(
        UsageError, match="s3://other/y, another root of Holdfast than the s3://bucket/x"
    ):
        read_resume(f"s3://other/y{generation}", "s3://bucket/x")
