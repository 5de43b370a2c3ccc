"""How many manifests commands read in a bucket that has an index: those that they show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.catalogue import manifest_path
from holdfast.cli import completion, main
from holdfast.format.manifest import Generation
from holdfast.geometry.layout import Layout
from holdfast.overview import INDEX, leave_index, overview
from holdfast.persist import commit
from holdfast.storage.objects import ObjectStore
from support.checkpoints.commands import Out
from support.checkpoints.images import images_of, publish_checkpoint, random_leaf, split_leaf
from support.servers.bucket_model import World, model_store

ROOT, COUNT = "s3://model/root", 40
LAYOUT = Layout(2, (split_leaf("w", "F32", (6, 2), 2),))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def store(world: World, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    found = model_store(world, monkeypatch, tries_s=0.1)
    commit.open_root(found, "r")
    for step in range(COUNT):
        leaves = {"w": random_leaf("F32", (6, 2), step)}
        generation, attempt = Generation(1, step), f"attempt{step:02d}"
        images = images_of(LAYOUT, leaves, generation=generation, attempt=attempt)
        publish_checkpoint(found, LAYOUT, images, generation, attempt=attempt)
    leave_index(found, overview(found))
    return found


def read_by(world: World, argv: Sequence[str]) -> set[str]:
    """Returns the manifests whose content a command asks for."""
    world.log.clear()
    assert main(argv) == (argv[0] == "diff")  # which tells a difference
    return {key for kind, key in world.log if kind == "GET" and "/manifests/" in key}


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (["show"], 1),
        (["show", "w", "--step", "5"], 1),
        (["verify", "--step", "5"], 1),
        (["verify", "--step", "5", "--deep"], 1),
        (["dump", "w", "--step", "5"], 1),
        (["diff", "--step", "5", "--other-step", "6"], 2),
        (["pin", "5", "--note", "why"], 1),
        (["pin", "--list"], 0),
        (["ls"], 0),
        (["copy", "s3://model/other", "--step", "5"], 1),
        (["prune", "--last", "30", "--dry-run"], 0),
        (["prune", "--last", "30", "--yes"], 10),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else str(one),
)
def test_a_command_reads_the_manifests_that_it_shows_and_says_the_same_without_an_index(
    words: list[str], most: int, world: World, store: ObjectStore, capsys: Out
) -> None:
    command, *rest = words
    before = dict(world.objects)
    read = read_by(world, [command, ROOT, *rest, "--json"])
    assert len(read) <= most
    requests, said = len(world.log), capsys.readouterr().out
    after, world.objects = dict(world.objects), before
    del world.objects[f"root/.{INDEX}"]
    read_by(world, [command, ROOT, *rest, "--json"])
    assert _without_times(capsys.readouterr().out) == _without_times(said)
    assert len(world.log) >= requests + 30 or (command == "pin" and "--list" in rest)
    kept = {key for key in after if "/manifests/" in key or "/steps/" in key}
    assert kept == {key for key in world.objects if "/manifests/" in key or "/steps/" in key}


def _without_times(text: str) -> list[str]:
    return [line for line in text.splitlines() if '_s"' not in line]


def test_completion_reads_the_manifest_whose_leaves_it_lists(
    world: World, store: ObjectStore
) -> None:
    world.log.clear()
    assert completion.steps(ROOT) == [str(step) for step in range(COUNT)]
    assert completion.names(ROOT, "5") == ["w"]
    read = {key for kind, key in world.log if kind == "GET" and "/manifests/" in key}
    assert read == {f"root/{manifest_path(Generation(1, 5))}"}


@pytest.mark.promise
def test_by_the_index_of_an_earlier_version_no_layout_is_taken_for_unnamed(
    world: World, store: ObjectStore
) -> None:
    found = overview(store)
    leave_index(
        store, replace(found, manifests=tuple(replace(one, layout="") for one in found.manifests))
    )
    layouts = store.list("layouts")
    assert layouts and len(read_by(world, ["prune", ROOT, "--last", "30", "--yes"])) == COUNT
    assert store.list("layouts") == layouts and len(store.list("manifests")) == 30


def test_what_an_index_tells_of_and_nobody_has_any_more_is_not_shown(
    world: World, store: ObjectStore, tmp_path: Path, capsys: Out
) -> None:
    newest = f"root/{manifest_path(Generation(1, COUNT - 1))}"
    listed = sorted(world.objects)
    del world.objects[newest]
    world.listed = listed  # the list lags
    assert main(["show", ROOT, "--json"]) == 0
    assert f'"checkpoint": "1-{COUNT - 2}"' in capsys.readouterr().out
    assert main(["show", ROOT, "--step", str(COUNT - 1)]) == 3
    assert f"no checkpoint of step {COUNT - 1}" in capsys.readouterr().err
