"""The power fails between any two calls of a run's storage: what was told durable is there, whole.

Every state that the model of ``holdfast.testing.faults.power`` allows is laid out and opened.
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

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


class SyncCall(NamedTuple):
    """A call of a module of storage that makes something durable: which, and in which line."""

    module: ModuleType
    function: str
    line: int


def sync_calls() -> dict[str, SyncCall]:
    """Every one of them, by the function that it stands in and its place there."""
    found: dict[str, SyncCall] = {}
    for module in (direct, files, local):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        functions = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef))
        for function in functions:
            calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
            called = ((ast.unparse(one.func), one.lineno) for one in calls)
            syncs = sorted((line, name) for name, line in called if name in _SYNCS)
            for number, (line, name) in enumerate(syncs):
                place = f"{module.__name__.rpartition('.')[2]}.{function.name}-{number}"
                found[place] = SyncCall(module, name, line)
    return found


_SYNCS = ("os.fsync", "sync_directory")
#: Seen by tests of their own: what another process has published is relied upon only then.
_OF_OTHERS = {
    "local.sync_names-0": "tests/persist/test_drains.py",
    "local.publish-0": "tests/storage/test_durability.py",
}


class _Without:
    """The module ``os``, whose fsync does nothing in one line."""

    def __init__(self, line: int) -> None:
        self._line = line

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        return _unless_in(self._line, found) if name == "fsync" else found


def _unless_in(line: int, real: Callable[..., None]) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        if sys._getframe(1).f_lineno != line:
            real(*arguments)

    return call


def leave_out(patch: pytest.MonkeyPatch, call: SyncCall) -> None:
    if call.function == "os.fsync":
        patch.setattr(call.module, "os", _Without(call.line))
    else:
        real = getattr(call.module, call.function)
        patch.setattr(call.module, call.function, _unless_in(call.line, real))


def require_seen(recorder: PowerRecorder, scratch: Path) -> None:
    assert any(wrong for _, wrong in wrong_states(recorder, scratch, 4 * SAMPLE))


@pytest.mark.parametrize("name", sorted(sync_calls().keys() - _OF_OTHERS.keys()))
def test_the_harness_sees_every_fsync_that_is_left_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        leave_out(patch, sync_calls()[name])
        recorder = recorded(tmp_path / "root")
    require_seen(recorder, tmp_path / "states")


def test_the_harness_sees_that_a_name_is_given_before_the_bytes_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "publish", _publish_before_sync)
        recorder = recorded(tmp_path / "root")
    require_seen(recorder, tmp_path / "states")


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
@pytest.mark.parametrize("name", ["files.write_file-0", "local.publish-1"])
def test_an_fsync_that_is_left_out_is_seen_on_a_real_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("ext4")
    leave_out(monkeypatch, sync_calls()[name])
    assert any(wrong for _, wrong in cut_and_open("ext4", tmp_path, DISKS))
