"""The power fails between any two calls of a run's storage: what was told durable is there, whole.

Every state that the model of ``holdfast.testing.faults.power`` allows is laid out and opened.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from holdfast.storage import direct, files, local
from holdfast.storage.local import LocalStore
from holdfast.testing.faults.logged_disk import (
    DISK_BYTES,
    LoggedDisk,
    cut_disks,
    missing_for,
    mounted,
)
from holdfast.testing.faults.power import PowerRecorder, crash_states
from support.checkpoints.power_work import work, wrong_in
from support.project.sample import SEED

#: The seed of the day; each test clears the settings of its environment.
DAY = os.environ.get(SEED, "0")
#: Of all states, those that `make test` opens; `make test-all` opens as many as are asked for.
SAMPLE, ALL = 500, 10_000
#: Disks of each real file system, and of each cut at most so many beside the prefix itself.
DISKS, PER_CUT = 1_000, {"btrfs": 6, "ext4": 6, "xfs": 40}
#: Directories one after the other: xfs gathers what it writes, and has few writes to cut between.
ROOTS = {"btrfs": ["a"], "ext4": ["a"], "xfs": ["a", "b", "c"]}


def recorded(root: Path) -> PowerRecorder:
    root.mkdir()
    with PowerRecorder(root) as recorder:
        work(root, recorder.promise)
    return recorder


def wrong_states(recorder: PowerRecorder, scratch: Path, most: int) -> Iterator[tuple[int, str]]:
    """Yield (operations done, what is wrong) for each of ``most`` states, by the day's seed."""
    options: Any = {"per_cut": 24, "seed": DAY}
    if most >= ALL:
        options |= {"per_cut": 400, "tears": 10}
    states = partial(crash_states, recorder.operations, recorder.directories, **options)
    total = sum(1 for _ in states())
    chosen = set(random.Random(DAY).sample(range(total), min(most, total)))
    for number, state in enumerate(states()):
        if number not in chosen:
            continue
        directory = scratch / str(number)
        state.lay_out(directory)
        wrong = wrong_in(directory, state.promises)
        shutil.rmtree(directory)
        yield state.done, wrong


@pytest.mark.promise
def test_what_was_told_durable_is_whole_after_a_loss_of_power_at_any_call(tmp_path: Path) -> None:
    recorder = recorded(tmp_path / "root")
    found = list(wrong_states(recorder, tmp_path / "states", SAMPLE))
    print(f"{len(recorder.operations)} calls, {len(found)} states")
    assert len(found) == SAMPLE
    assert [one for one in found if one[1]] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_states_after_a_loss_of_power_are_all_whole(tmp_path: Path) -> None:
    found = list(wrong_states(recorded(tmp_path / "root"), tmp_path / "states", ALL))
    print(f"{len(found)} states")
    assert len(found) == ALL
    assert [one for one in found if one[1]] == []


def _nothing(*_: object) -> None:
    """Leave an fsync out."""


def _write_without_sync(target: str, data: bytes) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.pwrite(descriptor, data, 0)
    os.close(descriptor)


def _publish_before_sync(
    self: LocalStore, path: str, data: bytes, *, replace: bool = False
) -> None:
    """Give the name first, and fsync the file behind it."""
    target = self._local(path)
    self._settle(str(Path(target).parent))
    temporary = f"{Path(target).parent}/.publish-{next(_numbers)}"
    _write_without_sync(temporary, data)
    os.replace(temporary, target)
    files.sync_directory(str(Path(target).parent))
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


_numbers = count()


#: What the harness must see: object, attribute, what stands in its place.
LEFT_OUT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "fsync of a published file": lambda p: p.setattr(local, "write_durably", _write_without_sync),
    "sync of a published name": lambda p: p.setattr(local, "sync_directory", _nothing),
    "sync of an image's name": lambda p: p.setattr(direct, "sync_directory", _nothing),
    "fsync of an image": lambda p: p.setattr(direct, "os", _Without("fsync")),
    "link before fsync": lambda p: p.setattr(LocalStore, "publish", _publish_before_sync),
}


class _Without:
    """The module ``os`` without one function."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _nothing if name == self._name else getattr(os, name)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_harness_sees_every_fsync_that_is_left_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        LEFT_OUT[name](patch)
        recorder = recorded(tmp_path / "root")
    assert any(wrong for _, wrong in wrong_states(recorder, tmp_path / "states", 4 * SAMPLE))


def cut_and_open(kind: str, work_dir: Path, most: int) -> list[tuple[int, str]]:
    """Return (writes before the cut, what is wrong) for each disk that was opened."""
    promises: list[tuple[int, str]] = []

    def tell(root: str, said: str) -> None:
        promises.append((len(disk.writes), f"{root} {said}"))

    with LoggedDisk(kind, work_dir) as disk:
        first = len(disk.writes)
        for name in ROOTS[kind]:
            (disk.at / name).mkdir()
            work(disk.at / name, partial(tell, name))
        writes = disk.writes
    image, at = Path("/dev/shm") / f"hf-disk-{os.getpid()}.img", work_dir / "cut"
    at.mkdir()
    found = []
    try:
        for done in cut_disks(kind, writes, first, image, per_cut=PER_CUT[kind], seed=DAY):
            with mounted(kind, image, at):
                wrongs: list[str] = []
                for name in ROOTS[kind]:
                    told = [one.split(" ", 1) for number, one in promises if number <= done]
                    said = [one for root, one in told if root == name]
                    is_there = (at / name).exists()
                    wrong = wrong_in(at / name, said) if is_there or said else ""
                    wrongs += [wrong] if wrong else []
                found.append((done, "; ".join(wrongs)))
            if len(found) == most:
                break
    finally:
        image.unlink(missing_ok=True)
    print(f"{kind}: {len(writes) - first} writes and flushes, {len(found)} disks")
    return found


def skip_without(kind: str) -> None:
    missing = missing_for(kind)
    if missing:
        pytest.skip(f"logged disks of {kind} need {missing}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", sorted(DISK_BYTES))
def test_a_thousand_disks_of_a_real_file_system_are_whole(kind: str, tmp_path: Path) -> None:
    skip_without(kind)
    found = cut_and_open(kind, tmp_path, 10 * DISKS)
    assert [one for one in found if one[1]] == []
    assert len(found) >= DISKS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["fsync of a published file", "sync of a published name"])
def test_an_fsync_that_is_left_out_is_seen_on_a_real_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("ext4")
    LEFT_OUT[name](monkeypatch)
    assert any(wrong for _, wrong in cut_and_open("ext4", tmp_path, DISKS))
