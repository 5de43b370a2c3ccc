"""Paths that are no root of checkpoints: what is there instead, and where to go from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.storage.open import what_is_at
from support.runs.mishaps import build, content, files


def _nothing(path: Path) -> None:
    assert not path.exists()


def _a_file(path: Path) -> None:
    path.write_text("hello")


def _a_safetensors_file(path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(3)}, path)


def _a_link_to_nothing(path: Path) -> None:
    path.symlink_to("gone")


def _other_things(path: Path) -> None:
    path.mkdir()
    (path / "train.log").write_text("hello")


def _a_model_of_a_hub(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    safetensors.torch.save_file({"a": torch.ones(3)}, path / "model.safetensors")


def _a_dcp_checkpoint(path: Path) -> None:
    path.mkdir()
    dcp.save({"a": torch.ones(3)}, checkpoint_id=path, no_dist=True)


def _a_directory_of_roots(path: Path) -> None:
    holdfast.save(path / "run1", build())


PLACES: list[tuple[Callable[[Path], object], str]] = [
    (_nothing, "Nothing is there: look for a misspelt or relative path"),
    (Path.mkdir, "It is empty: nothing was saved there yet"),
    (_a_file, "It is a file: give the directory"),
    (_a_link_to_nothing, "a link to gone, where nothing is"),
    (_other_things, "It holds other things: train.log"),
    (_a_directory_of_roots, "run1 is one: give that path"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # DCP says that it saves without ranks
@pytest.mark.parametrize(("make", "said"), PLACES, ids=[make.__name__ for make, _ in PLACES])
def test_what_is_there_instead_of_checkpoints_is_said_and_left_alone(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    place = tmp_path / ("a.safetensors" if make is _a_safetensors_file else "place")
    make(place)
    state = build()
    there, before = files(tmp_path), content(state)
    for look in (lambda: holdfast.load(place, state), lambda: holdfast.open(place)):
        with pytest.raises(holdfast.NotFound, match="not a directory of Holdfast checkpoints") as e:
            look()
        assert said in str(e.value)
        assert str(place) in str(e.value)
    assert files(tmp_path) == there
    assert content(state) == before


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_a_safetensors_file, "a single safetensors file"),
        (_a_model_of_a_hub, "plain safetensors files, as model hubs give them"),
        (_a_dcp_checkpoint, "a checkpoint of torch.distributed.checkpoint"),
    ],
)
def test_checkpoints_of_others_are_read_and_never_written_to(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    place = tmp_path / ("a.safetensors" if make is _a_safetensors_file else "place")
    make(place)
    there = files(tmp_path)
    assert said in what_is_at(str(place)) and "`holdfast show`" in what_is_at(str(place))
    with holdfast.open(place) as opened:
        assert torch.equal(opened.read("model.a"), torch.ones(3))
    with pytest.raises(holdfast.StateMismatch, match=r"model\.a"):
        holdfast.load(place, build())
    assert files(tmp_path) == there


def test_whoever_names_a_part_of_a_root_is_given_the_root(tmp_path: Path) -> None:
    holdfast.save(tmp_path, build())
    with pytest.raises(holdfast.NotFound, match=f"{tmp_path} is one: give that path"):
        holdfast.load(tmp_path / "steps", build())


@pytest.mark.parametrize("make", [_a_file, _a_safetensors_file, _a_link_to_nothing])
def test_a_root_that_cannot_be_a_directory_is_refused_and_left_alone(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    place = tmp_path / "place"
    make(place)
    there = files(tmp_path)
    for start in (
        lambda: holdfast.Checkpointer(place, build()),
        lambda: holdfast.save(place, build()),
    ):
        with pytest.raises(holdfast.StorageError, match=r"must be a directory|leads to nothing"):
            start()
    assert files(tmp_path) == there


@pytest.mark.parametrize("url", ["abfs://bucket", "hf://box/run", "http://host/run", "S3://b"])
def test_a_scheme_that_is_not_served_is_refused_by_every_door(url: str) -> None:
    doors: list[Callable[[], Any]] = [
        lambda: holdfast.Checkpointer(url, build()),
        lambda: holdfast.save(url, build()),
        lambda: holdfast.load(url, build()),
        lambda: holdfast.open(url),
    ]
    for door in doors:
        with pytest.raises(holdfast.UsageError, match="stores in directories and in buckets"):
            door()


@pytest.mark.parametrize("root", [None, 5, b"bytes", "", "file://", "nul\0", "~nobody-here/run"])
def test_what_is_no_path_is_refused_and_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for door in (
        lambda: holdfast.save(root, build()),
        lambda: holdfast.Checkpointer(root, build()),
    ):
        with pytest.raises(holdfast.UsageError, match=r"no root|home directory"):
            door()
    assert not list(tmp_path.iterdir())


ODD = ["with space", "ünïcode 日本", "new\nline", "-dash", "percent%20", "a'b\"c", "x" * 250]


@pytest.mark.parametrize("name", ODD, ids=[name[:12] for name in ODD])
def test_a_root_may_have_any_name_a_directory_may_have(tmp_path: Path, name: str) -> None:
    root, state = tmp_path / name, build()
    with holdfast.Checkpointer(root, state, storage=None) as checkpointer:
        checkpointer.save(0, durable=True).wait_durable(30)
    assert holdfast.load(root, build(1)).step == 0


def test_a_root_is_the_same_through_a_link_from_elsewhere_and_from_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    state = build()
    checkpointer = holdfast.Checkpointer("link", state, storage=None)
    monkeypatch.chdir("/")
    checkpointer.save(3, durable=True).wait_durable(30)
    checkpointer.close()
    for root in (tmp_path / "real", "~/link", f"file://{tmp_path}/link"):
        assert holdfast.load(root, build(1)).step == 3
    assert os.readlink(tmp_path / "link") == "real"
