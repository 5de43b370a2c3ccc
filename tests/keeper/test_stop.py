"""A keeper that is told to stop: what can be made durable in time is, and the arena stays whole."""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import holdfast
from holdfast.catalogue import catalogue
from holdfast.protocol import client as client_module
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotFile
from holdfast.storage.local import LocalStore
from support.runs.gates import Gate, capture_at_last
from support.runs.keepers import (
    IMAGE_BYTES,
    arena_of,
    ask,
    begin,
    connect,
    end,
    hear,
    kill_keeper,
    start,
)
from support.runs.leftovers import keeper_pids


def state() -> dict[str, Any]:
    return {"model": nn.Linear(50, 50)}


def stop_keeper(arena_home: Path) -> int:
    """SIGTERM the one keeper there is, which this process started; its exit code."""
    child = keeper_child(arena_home)
    child.send_signal(signal.SIGTERM)
    return child.wait(60)


def keeper_child(arena_home: Path) -> subprocess.Popen[bytes]:
    """The one keeper there is, which this process started."""
    (pid,) = keeper_pids(arena_home)
    children: list[subprocess.Popen[bytes]] = vars(client_module)["_started"]
    (child,) = (one for one in children if one.pid == pid)
    return child


def durable_steps(root: Path) -> list[int]:
    return [manifest.step for manifest in catalogue(LocalStore(root)).manifests]


def test_a_keeper_told_to_stop_makes_the_newest_snapshot_durable_and_training_goes_on(
    tmp_path: Path, arena_dir: Path
) -> None:
    with holdfast.Checkpointer(tmp_path, state()) as checkpointer:
        checkpointer.save(3).wait_captured(60)
        assert stop_keeper(arena_dir) == 0
        assert durable_steps(tmp_path) == [3]
        assert list(arena_of(arena_dir).glob("*.slot"))  # for the next keeper
        assert "Traceback" not in (arena_of(arena_dir) / "keeper.log").read_text()
        capture_at_last(checkpointer, 4)
    assert durable_steps(tmp_path) == [3, 4]


def test_a_durable_save_under_way_is_finished_first(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with holdfast.Checkpointer(tmp_path, state()) as checkpointer:
        gate.shut()
        handle = checkpointer.save(3, durable=True)
        assert gate.reached.wait(60)
        child = keeper_child(arena_dir)
        child.send_signal(signal.SIGTERM)
        wait_until_told(child.pid)
        gate.is_open.set()
        handle.wait_durable(60)
        assert child.wait(60) == 0
        capture_at_last(checkpointer, 4)


def test_without_a_storage_policy_the_snapshot_stays_in_memory_for_the_next_keeper(
    tmp_path: Path, arena_dir: Path
) -> None:
    first = state()
    checkpointer = holdfast.Checkpointer(tmp_path, first, storage=None)
    checkpointer.save(3).wait_captured(60)
    assert stop_keeper(arena_dir) == 0
    checkpointer.__exit__(RuntimeError, RuntimeError(), None)
    assert durable_steps(tmp_path) == []
    again = state()
    with holdfast.Checkpointer(tmp_path, again, storage=None) as other:
        restored = other.restore()
        assert restored is not None and (restored.step, restored.source) == (3, "memory")
    assert torch.equal(first["model"].weight, again["model"].weight)


def test_a_keeper_that_holds_nothing_leaves_nothing(tmp_path: Path, arena_dir: Path) -> None:
    child, line = start(tmp_path)
    line.close()
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    assert not list(arena_dir.glob("*/*@*"))


def wait_for_storage(root: Path) -> None:
    """Until an image is being written."""
    deadline = time.monotonic() + 30
    while not list(root.glob("steps/*/*")):
        assert time.monotonic() < deadline, "nothing is written"
        time.sleep(0.01)


def half_durable(root: Path, *options: str) -> Any:
    """A keeper with a durable save under way that never ends: its rank does not copy."""
    child, line = start(root, *options)
    begin(line)
    line.send(ask(1, durable=True))
    wait_for_storage(root)
    return child, line


def test_what_does_not_end_is_not_waited_for_longer_than_was_said(
    tmp_path: Path, arena_dir: Path
) -> None:
    child, line = half_durable(tmp_path, "--stop-s", "0.5")
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    line.close()
    assert durable_steps(tmp_path) == []
    # Neither root nor arena is left in a way that hinders the next one.
    other = connect(tmp_path)
    begin(other)
    end(other)


#: A file system that does not answer, as soon as the root is locked or let go.
_HANG = """
import fcntl, os, pathlib, time
real = fcntl.flock
def flock(descriptor, operation):
    if operation & {operation} and {root!r} in os.readlink(f"/proc/self/fd/{{descriptor}}"):
        pathlib.Path({reached!r}).touch()
        time.sleep(3600)
    return real(descriptor, operation)
fcntl.flock = flock
"""


@pytest.mark.parametrize("operation", [fcntl.LOCK_EX, fcntl.LOCK_UN], ids=["opening", "letting go"])
def test_a_root_that_hangs_does_not_keep_the_keeper_from_stopping_in_time(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch, operation: int
) -> None:
    root, reached = tmp_path / "root", tmp_path / "reached"
    snapshot_of_a_killed_keeper(root, arena_dir)
    hang = _HANG.format(operation=operation, root=str(root), reached=str(reached))
    (tmp_path / "sitecustomize.py").write_text(hang)
    monkeypatch.syspath_prepend(tmp_path)
    child, line = start(root, "--stop-s", "0.5")
    if operation == fcntl.LOCK_UN:  # its run ends in order, and it gives up the root
        begin(line)
        line.send(m.Goodbye())
        wait_until_reached(reached)
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    assert reached.exists()
    line.close()
    assert list(arena_of(arena_dir).glob("*.slot"))  # nothing of it is lost


def snapshot_of_a_killed_keeper(root: Path, arena_home: Path) -> None:
    """An arena with one generation in it, and nobody there."""
    heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    line = connect(root, listener=heard.put)
    begin(line)
    line.send(ask(1))
    slot = SlotFile.open(Path(hear(heard, m.Grant).slot), writable=True)
    record = slot.read_record()
    assert record is not None
    slot.write_record(msgspec.structs.replace(record, state="captured", image_bytes=IMAGE_BYTES))
    kill_keeper(arena_home)
    line.close()


def wait_until_reached(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, "the root is not asked"
        time.sleep(0.01)


def test_a_second_order_to_stop_is_obeyed_at_once(tmp_path: Path, arena_dir: Path) -> None:
    child, line = half_durable(tmp_path, "--stop-s", "600")
    child.send_signal(signal.SIGTERM)
    wait_until_told(child.pid)
    line.request(m.Explain(step=1), m.Explanation, timeout_s=30)  # it is not at its end yet
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM
    line.close()


def wait_until_told(pid: int) -> None:
    """Until SIGTERM is no longer caught: the first one was heard."""
    deadline = time.monotonic() + 30
    while _catches(pid, signal.SIGTERM):
        assert time.monotonic() < deadline, "the keeper does not hear"
        time.sleep(0.01)


def _catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_terminal_sends_to_the_trainers_does_not_end_the_keeper(
    number: signal.Signals, tmp_path: Path, arena_dir: Path
) -> None:
    line = connect(tmp_path)
    (pid,) = keeper_pids(arena_dir)
    assert os.getsid(pid) == os.getpgid(pid) == pid  # a session and a group of its own
    os.kill(pid, number)
    begin(line)
    end(line)
