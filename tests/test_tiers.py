"""A cache before the root: cached, drained, durable, and restored from whichever tier has it."""

from __future__ import annotations

import json
import random
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.catalogue import catalogue
from holdfast.cli import main
from holdfast.events import KeeperLost, Warned
from holdfast.observe.report_builder import read_report
from holdfast.storage.local import LocalStore
from holdfast.testing.faults import wait_until
from support.checkpoints.roots import whole
from support.runs.keepers import kill_keeper
from support.runs.mishaps import listening, remount, small_disk

State = dict[str, Any]


def build(seed: int = 0) -> State:
    torch.manual_seed(seed)
    model = nn.Linear(300, 1000)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def train(state: State, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    state["model"](torch.randn(9, 300, generator=generator)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def content(state: State) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def cache_of(directory: Path) -> LocalStore:
    (place,) = directory.iterdir()
    return LocalStore(place)


def steps_in(store: LocalStore) -> list[int]:
    return [manifest.step for manifest in catalogue(store).manifests]


def run(root: Path, cache: Path, steps: range, seed: int = 0, **options: Any) -> State:
    state = build(seed)
    with holdfast.Checkpointer(
        root, state, storage=holdfast.Every(steps=1), cache=cache, **options
    ) as checkpointer:
        checkpointer.restore()
        for step in steps:
            train(state, step)
            handle = checkpointer.save(step, durable=True)
            handle.wait_cached(30)
            assert handle.state in ("cached", "durable")
            handle.wait_durable(30)
            assert handle.state == "durable"
    return state


@pytest.mark.promise
def test_what_is_durable_is_in_the_root_and_both_tiers_have_the_same_bytes(tmp_path: Path) -> None:
    run(tmp_path / "root", tmp_path / "cache", range(4), cache_keep=holdfast.Keep(last=2))
    root, cache = LocalStore(tmp_path / "root"), cache_of(tmp_path / "cache")
    assert steps_in(root) == [0, 1, 2, 3]
    assert steps_in(cache) == [2, 3]
    for manifest in catalogue(cache).manifests:
        assert manifest in catalogue(root).manifests
        for ref in manifest.images:
            assert cache.read(ref.path) == root.read(ref.path)
    loaded = holdfast.load(tmp_path / "root", build(1))
    assert loaded is not None and loaded.step == 3


def refuse(root: Path) -> None:
    """Let the root take no image."""
    if (root / "steps").exists():
        (root / "steps").rename(root / "steps-away")
    (root / "steps").touch()


def accept(root: Path) -> None:
    (root / "steps").unlink()
    if (root / "steps-away").exists():
        (root / "steps-away").rename(root / "steps")


def lose_memory(arena_dir: Path) -> None:
    """Kill the keeper, and take all that is in shared memory: as a restart of the host does."""
    kill_keeper(arena_dir)
    for entry in arena_dir.iterdir():
        shutil.rmtree(entry)


def open_run(tmp_path: Path, state: State, **options: Any) -> holdfast.Checkpointer:
    given: dict[str, Any] = {"storage": holdfast.Every(steps=1), "cache": tmp_path / "cache"}
    return holdfast.Checkpointer(tmp_path / "root", state, **given | options)


def save_refused(tmp_path: Path, arena_dir: Path, steps: range) -> State:
    """Train and save while the root refuses, then lose all memory."""
    state = build()
    checkpointer = open_run(tmp_path, state)
    checkpointer.restore()
    refuse(tmp_path / "root")
    for step in steps:
        train(state, step)
        handle = checkpointer.save(step, durable=True)
        handle.wait_cached(30)
        assert handle.state == "cached"
    with pytest.raises(holdfast.DeadlineExceeded, match="the cache has it"):
        handle.wait_durable(0.5)
    lose_memory(arena_dir)
    checkpointer._hang_up()
    return state


@pytest.mark.promise
@pytest.mark.parametrize("lost", ["cache", "root's images", "nothing"])
def test_a_run_goes_on_from_whichever_tier_has_it(tmp_path: Path, lost: str) -> None:
    state = run(tmp_path / "root", tmp_path / "cache", range(3))
    if lost == "cache":
        shutil.rmtree(tmp_path / "cache")
    elif lost == "root's images":
        shutil.rmtree(tmp_path / "root" / "steps")
    again = build(1)
    with open_run(tmp_path, again, storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 2
    assert same(content(again), content(state))


@pytest.mark.promise
def test_what_only_the_cache_has_is_restored_and_drained_after_a_restart_of_the_host(
    tmp_path: Path, arena_dir: Path
) -> None:
    state = save_refused(tmp_path, arena_dir, range(4))
    root, cache = LocalStore(tmp_path / "root"), cache_of(tmp_path / "cache")
    assert steps_in(root) == []
    assert steps_in(cache) == [0, 1, 2, 3]  # nothing left it, whatever its retention says
    accept(tmp_path / "root")
    again = build(1)
    with open_run(tmp_path, again, storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.generation == (1, 3)
    assert same(content(again), content(state))
    assert steps_in(root) == [0, 1, 2, 3]
    for manifest in catalogue(root).manifests:
        for ref in manifest.images:
            assert root.read(ref.path) == cache_of_ref(tmp_path, root, ref.path)
    loaded = build(2)
    assert holdfast.load(tmp_path / "root", loaded).step == 3
    assert same(content(loaded), content(state))
    assert steps_in(cache) == [2, 3]


def cache_of_ref(tmp_path: Path, root: LocalStore, path: str) -> bytes:
    cache = cache_of(tmp_path / "cache")
    return cache.read(path) if cache.exists(path) else root.read(path)


@pytest.mark.promise
def test_a_keeper_that_is_killed_in_the_middle_leaves_what_the_next_one_drains(
    tmp_path: Path, arena_dir: Path
) -> None:
    state = build()
    with open_run(tmp_path, state) as checkpointer, listening() as heard:
        checkpointer.restore()
        refuse(tmp_path / "root")
        train(state, 0)
        checkpointer.save(0, durable=True).wait_cached(30)
        kill_keeper(arena_dir)
        accept(tmp_path / "root")
        # A save that is asked of the keeper that was lost is skipped by name.
        wait_until(
            lambda: any(isinstance(one, KeeperLost) for one in heard), timeout_s=30, what="a loss"
        )
        train(state, 1)
        checkpointer.save(1, durable=True).wait_durable(60)
    assert steps_in(LocalStore(tmp_path / "root")) == [0, 1]


@pytest.mark.promise
def test_a_checkpoint_of_which_each_tier_has_half_is_restored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(1000, 1000) for _ in range(2)] + [nn.Linear(1000, 300)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    model = nn.Sequential(*layers)
    with open_run(tmp_path, {"model": model}) as checkpointer:
        checkpointer.restore()
        checkpointer.save(0, durable=True).wait_durable(30)
    root, cache = LocalStore(tmp_path / "root"), cache_of(tmp_path / "cache")
    (manifest,) = catalogue(root).manifests
    assert manifest.parts, "the model has a frozen part"
    cache.remove(manifest.parts[0].path)
    root.remove(manifest.images[0].path)
    before = [parameter.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.zero_()
    with open_run(tmp_path, {"model": model}, storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 0
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.promise
@pytest.mark.parametrize("what", ["changed", "cut short"])
def test_a_damaged_file_of_the_cache_is_read_from_the_root(tmp_path: Path, what: str) -> None:
    state = run(tmp_path / "root", tmp_path / "cache", range(2))
    cache = cache_of(tmp_path / "cache")
    (path,) = (m.images[0].path for m in catalogue(cache).manifests if m.step == 1)
    file = Path(cache.url.removeprefix("file://")) / path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data if what == "changed" else data[: len(data) // 2])
    again = build(1)
    with open_run(tmp_path, again, storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 1
    assert same(content(again), content(state))


@pytest.mark.promise
def test_what_is_damaged_in_the_cache_is_never_published_and_the_newest_is_saved_instead(
    tmp_path: Path,
) -> None:
    state = build()
    with open_run(tmp_path, state) as checkpointer:
        checkpointer.restore()
        refuse(tmp_path / "root")
        train(state, 0)
        lost = checkpointer.save(0, durable=True)
        lost.wait_cached(30)
        cache = cache_of(tmp_path / "cache")
        (manifest,) = catalogue(cache).manifests
        file = Path(cache.url.removeprefix("file://")) / manifest.images[0].path
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        train(state, 1)
        kept = checkpointer.save(1, durable=True)
        kept.wait_cached(30)
        accept(tmp_path / "root")
        kept.wait_durable(60)
        with pytest.raises(holdfast.PersistFailed, match="cannot be drained"):
            lost.wait_durable(60)
    assert steps_in(LocalStore(tmp_path / "root")) == [1]
    assert steps_in(cache) == [0, 1]


@pytest.mark.promise
def test_the_newest_that_is_damaged_in_the_cache_is_written_from_memory(tmp_path: Path) -> None:
    state = build()
    with open_run(tmp_path, state) as checkpointer:
        checkpointer.restore()
        refuse(tmp_path / "root")
        train(state, 0)
        checkpointer.save(0, durable=True).wait_cached(30)
        cache = cache_of(tmp_path / "cache")
        (manifest,) = catalogue(cache).manifests
        file = Path(cache.url.removeprefix("file://")) / manifest.images[0].path
        file.write_bytes(file.read_bytes()[:-5000])
        accept(tmp_path / "root")
        deadline = time.monotonic() + 30
        while not steps_in(LocalStore(tmp_path / "root")) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert whole(LocalStore(tmp_path / "root")) == ["1-0"]
    again = build(1)
    with open_run(tmp_path, again, storage=None) as checkpointer:
        assert checkpointer.restore() is not None
    assert same(content(again), content(state))


@pytest.mark.promise
def test_a_cache_that_is_gone_costs_no_checkpoint(tmp_path: Path) -> None:
    state = build()
    with open_run(tmp_path, state) as checkpointer:
        checkpointer.restore()
        refuse(tmp_path / "root")
        train(state, 0)
        lost = checkpointer.save(0, durable=True)
        lost.wait_cached(30)
        shutil.rmtree(tmp_path / "cache")
        accept(tmp_path / "root")
        train(state, 1)
        kept = checkpointer.save(1, durable=True)
        kept.wait_cached(60)
        kept.wait_durable(60)
    assert 1 in steps_in(LocalStore(tmp_path / "root"))


def test_a_cache_is_a_directory_of_its_own_and_a_handle_without_one_says_so(tmp_path: Path) -> None:
    for cache in ("s3://bucket/prefix", tmp_path / "root" / "cache", tmp_path / "root"):
        with pytest.raises(holdfast.UsageError, match="cache="):
            holdfast.Checkpointer(tmp_path / "root", build(), cache=cache)
    with pytest.raises(holdfast.UsageError, match="cache_keep="):
        holdfast.Checkpointer(tmp_path / "root", build(), cache_keep=3)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(holdfast.StorageError, match="file"):
        holdfast.Checkpointer(tmp_path / "root", build(), cache=tmp_path / "file")
    with holdfast.Checkpointer(tmp_path / "root", build()) as checkpointer:
        handle = checkpointer.save(0, durable=True)
        with pytest.raises(holdfast.UsageError, match="has no cache"):
            handle.wait_cached()


@pytest.mark.promise
def test_ls_shows_what_only_the_cache_has(
    tmp_path: Path, arena_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_refused(tmp_path, arena_dir, range(2))
    assert main(["ls", str(tmp_path / "root"), "--cache", str(tmp_path / "cache"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(0, "cached"), (1, "cached")]
    accept(tmp_path / "root")
    with open_run(tmp_path, build(), storage=None) as checkpointer:
        checkpointer.restore()
    assert main(["ls", str(tmp_path / "root"), "--cache", str(tmp_path / "cache"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(0, "kept"), (1, "newest")]
    report = read_report(tmp_path / "root")
    assert {save.state for save in report.saves if save.step < 2} == {"durable"}


@pytest.mark.promise
def test_what_was_restored_from_the_root_is_in_the_cache_afterwards(tmp_path: Path) -> None:
    state = run(tmp_path / "root", tmp_path / "cache", range(3))
    shutil.rmtree(tmp_path / "cache")
    with open_run(tmp_path, build(1), storage=None) as checkpointer:
        checkpointer.restore()  # the cache is filled behind it
        cache = cache_of(tmp_path / "cache")
        wait_until(lambda: steps_in(cache) == [2], timeout_s=60, what="a copy")
    root = LocalStore(tmp_path / "root")
    shutil.rmtree(tmp_path / "root" / "steps")
    again = build(1)
    with open_run(tmp_path, again, storage=None) as checkpointer:
        assert checkpointer.restore() is not None
    assert same(content(again), content(state))
    assert steps_in(root) == [0, 1, 2]


def test_a_run_that_goes_on_without_its_cache_uses_it_no_more(tmp_path: Path) -> None:
    state = run(tmp_path / "root", tmp_path / "cache", range(2))
    with open_run(tmp_path, state, cache=None) as checkpointer:
        checkpointer.restore()
        train(state, 2)
        checkpointer.save(2, durable=True).wait_durable(30)
    assert steps_in(LocalStore(tmp_path / "root")) == [0, 1, 2]
    assert steps_in(cache_of(tmp_path / "cache")) == [0, 1]


@pytest.mark.promise
def test_a_cache_that_is_full_costs_no_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "cache", "6m"):
        state = build()
        with open_run(tmp_path, state, keep=holdfast.Keep(last=5)) as checkpointer:
            checkpointer.restore()
            for step in range(3):
                train(state, step)
                checkpointer.save(step, durable=True).wait_durable(60)
        cache = cache_of(tmp_path / "cache")
        assert steps_in(cache) == [0]
        for manifest in catalogue(cache).manifests:
            assert cache.size_bytes(manifest.images[0].path) == manifest.images[0].size_bytes
    assert whole(LocalStore(tmp_path / "root")) == ["1-0", "1-1", "1-2"]
    again = build(1)
    assert holdfast.load(tmp_path / "root", again) is not None
    assert same(content(again), content(state))


@pytest.mark.promise
@pytest.mark.parametrize(
    "kills", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_of_keepers_killed_while_they_drain_none_loses_what_was_cached(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    monkeypatch.setenv("HOLDFAST_DRAIN_BYTES_S", "20e6")
    random_ = random.Random(kills)
    state, promised = build(), set[int]()
    with open_run(tmp_path, state, keep=holdfast.Keep()) as checkpointer:
        checkpointer.restore()
        step = 0
        for _ in range(kills):
            for _ in range(2):
                train(state, step)
                handle = checkpointer.save(step, durable=True)
                with suppress(holdfast.SaveError):  # of the keeper that was just killed
                    handle.wait_cached(60)
                    promised.add(handle.step)
                step += 1
            time.sleep(random_.uniform(0, 0.4))
            kill_keeper(arena_dir)
        train(state, step)
        checkpointer.save(step, durable=True)
    root = LocalStore(tmp_path / "root")
    assert len(promised) > kills
    assert {f"1-{one}" for one in (*promised, step)} <= set(whole(root))
    again = build(1)
    assert holdfast.load(tmp_path / "root", again) is not None
    assert same(content(again), content(state))


@pytest.mark.promise
def test_a_cache_on_a_disk_that_is_read_only_costs_a_warning_and_no_start(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "40m") as disk, listening() as heard:
        remount(disk, "ro")
        state = build()
        with open_run(tmp_path, state, cache=disk / "cache") as checkpointer:
            checkpointer.restore()
            train(state, 0)
            handle = checkpointer.save(0, durable=True)
            handle.wait_cached(60)  # where nothing is cached, until it is durable
            handle.wait_durable(60)
        warned = [e.message for e in heard if isinstance(e, Warned) and str(disk) in e.message]
        assert len(warned) == 1 and "Read-only" in warned[0]
        assert whole(LocalStore(tmp_path / "root")) == ["1-0"]
        remount(disk, "rw")
        again = build(1)
        with open_run(tmp_path, again, cache=disk / "cache") as checkpointer:
            assert checkpointer.restore() is not None
            train(again, 1)
            checkpointer.save(1, durable=True).wait_durable(60)
        assert 1 in steps_in(cache_of(disk / "cache"))
