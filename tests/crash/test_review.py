"""What a keeper, a fork, a slow copy or a second disk must not do to a run: found by review."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import holdfast
from holdfast import events
from holdfast.capture.task import Timeouts
from holdfast.catalogue import catalogue
from holdfast.protocol import messages as m
from holdfast.protocol.client import KeeperClient
from holdfast.storage.local import LocalStore
from support.runs.gates import Gate
from support.runs.keepers import kill_keeper
from support.runs.launch import run_ranks
from support.runs.leftovers import keeper_pids
from support.runs.lives import build, take_step

_HANG = """
import os, sys, time
while "holdfast.keeper" in sys.orig_argv and os.path.exists({flag!r}):
    time.sleep(0.05)
"""


def test_a_keeper_stopped_during_a_durable_copy_does_not_hang_training(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each large leaf is told as progress; a socket that nobody reads holds a few hundred of them.
    state: dict[str, Any] = {f"w{n}": torch.zeros(16384) for n in range(1000)}
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    checkpointer._saver.timeouts = Timeouts(
        first_grant_s=30, grant_s=0.5, durable_grant_s=0.5, copy_s=0.5
    )
    checkpointer.save(0).wait_captured(30)
    (keeper,) = keeper_pids(arena_dir)
    send = KeeperClient.send

    def stop_first(self: KeeperClient, message: m.Message, seq: int = 0) -> None:
        if isinstance(message, m.Progress):
            os.kill(keeper, signal.SIGSTOP)
        send(self, message, seq)

    monkeypatch.setattr(KeeperClient, "send", stop_first)
    went_on = threading.Event()

    def train() -> None:
        checkpointer.save(1, durable=True)
        for step in range(2, 5):
            checkpointer.step(step)
        went_on.set()

    training = threading.Thread(target=train)
    training.start()
    try:
        assert went_on.wait(8), "training hangs on a stopped keeper"
    finally:
        monkeypatch.undo()
        os.kill(keeper, signal.SIGCONT)
        training.join(30)
        checkpointer._hang_up()
        os.kill(keeper, signal.SIGTERM)


def test_snapshots_go_on_after_a_keeper_that_was_slow_to_start(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "hang"
    (tmp_path / "sitecustomize.py").write_text(_HANG.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model, state = build("plain")
    checkpointer = holdfast.Checkpointer(tmp_path / "root", state, storage=None, timeout_s=3.0)
    checkpointer._saver.timeouts = Timeouts(grant_s=0.2, durable_grant_s=5.0)
    take_step(model, state, 0)
    checkpointer.save(0).wait_captured(30)
    flag.touch()
    (keeper,) = keeper_pids(arena_dir)
    lost = threading.Event()
    stop = events.subscribe(
        lambda event, _: lost.set() if isinstance(event, events.KeeperLost) else None
    )
    os.kill(keeper, signal.SIGKILL)
    assert lost.wait(10)
    stop()
    take_step(model, state, 1)
    first = checkpointer.step(1)
    assert first is not None
    take_step(model, state, 2)  # is held, and then gives the keeper up
    with pytest.raises(holdfast.SnapshotSkipped):
        first.wait_captured(30)  # its keeper could not be reached within timeout_s
    checkpointer.step(2)
    flag.unlink()
    handle = None
    for step in range(3, 40):
        take_step(model, state, step)
        handle = checkpointer.step(step)
        time.sleep(0.05)
    try:
        assert handle is not None
        handle.wait_captured(10)
    finally:
        checkpointer._hang_up()
        for pid in keeper_pids(arena_dir):
            os.kill(pid, signal.SIGTERM)


def test_a_forked_child_that_lets_go_of_the_checkpointer_leaves_the_line_alone(
    tmp_path: Path, arena_dir: Path
) -> None:
    held = [holdfast.Checkpointer(tmp_path, {"w": torch.zeros(4)}, storage=None)]
    lost: list[str] = []
    stop = events.subscribe(
        lambda event, _: lost.append(event.reason) if isinstance(event, events.KeeperLost) else None
    )

    def child() -> None:
        held.clear()
        gc.collect()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    held[0].save(0).wait_captured(30)
    stop()
    held[0].close()
    assert not lost


_LEAVES_WHILE_COPYING = """
import sys, time
import torch
import holdfast
from holdfast import checkpointer as of
from holdfast.capture import copy_plan as capture

for module in (of, sys.modules.get("holdfast.startup")):
    if hasattr(module, "_HANG_UP_S"):
        module._HANG_UP_S = 0.05  # as 5 s are to an image of tens of GB

class Slow:
    memcmp = staticmethod(capture.libc.memcmp)
    copy = staticmethod(capture.libc.memcpy)

    @staticmethod
    def memcpy(*where):
        time.sleep(0.2)
        return Slow.copy(*where)

with holdfast.Checkpointer(sys.argv[1], {"w": torch.zeros(8 << 20)}, storage=None) as first:
    first.save(0).wait_captured(30)
    capture.libc = Slow
    try:
        with first:
            first.save(1)
            time.sleep(0.1)
            raise ValueError("of the training loop")
    except ValueError:
        time.sleep(1)
"""


def test_leaving_on_an_exception_while_a_large_image_is_copied_does_not_crash(
    tmp_path: Path, arena_dir: Path
) -> None:
    script = [sys.executable, "-c", _LEAVES_WHILE_COPYING, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(script, env=environment, timeout=60, check=False)
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)
    assert ended.returncode == 0


_NO_FSYNC = """
import os, sys, time
if "holdfast.keeper" in sys.orig_argv:
    def fsync(descriptor, now=os.fsync):
        while os.path.exists({flag!r}):
            time.sleep(0.02)
        now(descriptor)
    os.fsync = fsync
"""


def test_a_checkpoint_whose_keeper_died_writing_it_is_owed_to_the_next_keeper(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "hang"
    (tmp_path / "sitecustomize.py").write_text(_NO_FSYNC.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    root = tmp_path / "root"
    checkpointer = holdfast.Checkpointer(root, {"w": torch.zeros(1000)}, storage=None)
    checkpointer.save(0).wait_captured(30)
    flag.touch()
    promised = checkpointer.save(1, durable=True)
    promised.wait_captured(30)
    kill_keeper(arena_dir)
    with pytest.raises(holdfast.PersistFailed):
        promised.wait_durable(30)
    flag.unlink()
    assert not catalogue(LocalStore(root)).manifests
    checkpointer.save(2).wait_captured(30)  # in memory only, as far as the caller is concerned
    until_s = time.monotonic() + 20
    while not catalogue(LocalStore(root)).manifests:
        assert time.monotonic() < until_s, "the checkpoint is forgotten"
        threading.Event().wait(0.02)
    checkpointer.close()


def test_a_process_whose_run_went_on_without_it_learns_so_from_the_next_keeper(
    tmp_path: Path, arena_dir: Path
) -> None:
    first = holdfast.Checkpointer(tmp_path, {"w": torch.zeros(4)}, storage=None)
    first.save(0).wait_captured(30)
    kill_keeper(arena_dir)
    second = holdfast.Checkpointer(tmp_path, {"w": torch.zeros(4)}, storage=None)
    with pytest.raises(holdfast.SnapshotSkipped):
        first.save(1).wait_captured(30)
    with pytest.raises(holdfast.Fenced):
        first.step(2)
    second.restore()
    second.save(1).wait_captured(30)
    second.close()
    first.close()


def test_a_close_that_raises_leaves_neither_line_nor_worker(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    checkpointer = holdfast.Checkpointer(tmp_path, {"w": torch.zeros(4)}, storage=None)
    saver = checkpointer._saver
    saver.timeouts = Timeouts(copy_s=0.1, durable_grant_s=0.1)
    checkpointer.save(0).wait_captured(30)
    gate.shut()
    checkpointer.save(1)
    assert gate.reached.wait(30)
    with pytest.raises(holdfast.SnapshotSkipped, match="has not ended"):
        checkpointer.close(timeout_s=0.1)
    assert not saver._session.is_up
    gate.is_open.set()
    saver._worker.join(30)
    assert not saver._worker.is_alive()
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


def test_a_save_while_the_one_before_has_not_ended_comes_to_nothing_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with holdfast.Checkpointer(tmp_path, {"w": torch.zeros(4)}, storage=None) as checkpointer:
        checkpointer.save(0).wait_captured(30)
        usual = checkpointer._saver.timeouts
        checkpointer._saver.timeouts = Timeouts(copy_s=0.1, durable_grant_s=0.1)
        gate.shut()
        checkpointer.save(1)
        assert gate.reached.wait(30)
        missed = checkpointer.save(2, durable=True)
        with pytest.raises(holdfast.SnapshotSkipped, match="step 1 has not ended"):
            missed.wait_durable(30)
        gate.is_open.set()
        checkpointer._saver.timeouts = usual
        checkpointer.save(3)
    with holdfast.open(tmp_path) as found:
        assert found.step == 3, "the next save is durable in its place"


def test_a_save_while_another_thread_saves_comes_to_nothing_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Checkpointer(tmp_path, {"w": torch.zeros(4)}, storage=None) as checkpointer:
        checkpointer.save(0).wait_captured(30)

        def never(*_: Any) -> Any:
            raise holdfast.SnapshotSkipped("the save of another thread has not ended")

        with monkeypatch.context() as patch:
            patch.setattr(checkpointer._saver.turns, "_alone", never)
            missed = checkpointer.save(1, durable=True)
        with pytest.raises(holdfast.SnapshotSkipped, match="another thread"):
            missed.wait_durable(30)
        checkpointer.save(2)
    with holdfast.open(tmp_path) as found:
        assert found.step == 2


def _save_in_two_places(rank: int, world: int, base: Path) -> list[str]:
    return [_save_where_this_rank_sees_it(rank, world, base / name) for name in ("new", "copied")]


def _save_where_this_rank_sees_it(rank: int, world: int, base: Path) -> str:
    mesh = init_device_mesh("cpu", (world,))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    try:
        holdfast.save(base / f"disk-of-{rank}", state, 1)
    except holdfast.UsageError:
        return "refused"
    dist.barrier()
    with holdfast.open(base / "disk-of-0") as saved:
        try:
            saved.read("w")
        except holdfast.HoldfastError as error:
            return f"saved, and cannot be read: {error}"
    return "good"


def test_a_save_whose_ranks_write_to_different_disks_is_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "copied" / "disk-of-0", tmp_path / "copied" / "disk-of-1"
    holdfast.save(first, {"n": 1})
    shutil.copytree(first, second)  # nothing tells the one from the other, before something is new
    for told in run_ranks(2, _save_in_two_places, tmp_path):
        assert told == ["refused", "refused"]
    assert [m.step for m in catalogue(LocalStore(first)).manifests] == [0]


def _load_from_two_places(rank: int, world: int, base: Path) -> list[float]:
    state = {"w": torch.zeros(2)}
    try:
        holdfast.load(base / f"disk-of-{rank}", state)
    except holdfast.HoldfastError:
        return []
    return state["w"].tolist()


def test_ranks_never_load_different_bytes_under_one_generation(tmp_path: Path) -> None:
    for rank in range(2):
        holdfast.save(tmp_path / f"disk-of-{rank}", {"w": torch.full((2,), float(rank))})
    first, second = run_ranks(2, _load_from_two_places, tmp_path)
    assert first == second
