"""A checkpoint that one process replaces is never gone: a kill leaves the old one or the new."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import NotFound
from holdfast.integrations.lone_checkpoints import is_whole, read_alone, remove_alone, write_alone
from holdfast.storage.files import sync_directory


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program's own comes after it."""


def values(step: int) -> dict[str, Any]:
    return {"w": torch.full((64,), float(step)), "step": step}


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Ends the process before its ``number``-th operation on a directory, counted from 0."""
    calls: list[str] = []

    def stop_before(what: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if len(calls) == number:
                raise Killed
            calls.append(what)
            return real(*args, **options)

        return call

    monkeypatch.setattr(Path, "rename", stop_before("rename", Path.rename))
    monkeypatch.setattr(shutil, "rmtree", stop_before("rmtree", shutil.rmtree))
    place = "holdfast.integrations.lone_checkpoints.sync_directory"
    monkeypatch.setattr(place, stop_before("sync", sync_directory))
    return calls


@pytest.mark.promise
@pytest.mark.parametrize("number", range(6))
def test_a_kill_between_any_two_operations_leaves_the_old_or_the_new(
    tmp_path: Path, number: int
) -> None:
    where = tmp_path / "last.ckpt"
    write_alone(where, values(1), 1)
    with pytest.MonkeyPatch.context() as patch:
        calls = kill_at(patch, number)
        try:
            write_alone(where, values(2), 2)
        except Killed:
            assert len(calls) == number
        else:
            assert calls == ["rename", "rename", "sync", "rmtree"][: len(calls)]
            assert number >= len(calls) == 4
    newest = [one for one in tmp_path.glob("*") if is_whole(one)]
    assert len(newest) == 1
    for one in (where, *newest):
        found = read_alone(one)
        assert found["step"] == (1 if number < 2 else 2)
        assert torch.equal(found["w"], values(found["step"])["w"])
    write_alone(where, values(3), 3)
    assert read_alone(where)["step"] == 3
    assert os.listdir(tmp_path) == [where.name]


def test_what_was_removed_does_not_come_back(tmp_path: Path) -> None:
    where = tmp_path / "last.ckpt"
    write_alone(where, values(1), 1)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 1)
        with pytest.raises(Killed):
            write_alone(where, values(2), 2)
    remove_alone(where)
    with pytest.raises(NotFound):
        read_alone(where)
    assert os.listdir(tmp_path) == []


def test_a_removal_that_is_killed_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    where = tmp_path / "last.ckpt"
    write_alone(where, values(1), 1)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 1)
        with pytest.raises(Killed):
            remove_alone(where)
    assert not [one for one in tmp_path.glob("*") if is_whole(one)]
    remove_alone(where)
    assert os.listdir(tmp_path) == []


def test_a_link_to_a_checkpoint_is_replaced_and_removed_itself(tmp_path: Path) -> None:
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    write_alone(best, values(1), 1)
    last.symlink_to(best)
    for step in (2, 3):
        write_alone(last, values(step), step)
        assert read_alone(last)["step"] == step and read_alone(best)["step"] == 1
    remove_alone(last)
    last.symlink_to(best)
    remove_alone(last)
    assert read_alone(best)["step"] == 1 and os.listdir(tmp_path) == [best.name]
    remove_alone(best)
    last.symlink_to(best)  # to nothing, now
    write_alone(last, values(4), 4)
    assert read_alone(last)["step"] == 4 and os.listdir(tmp_path) == [last.name]
