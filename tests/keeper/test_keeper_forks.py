"""Keepers that tests fork are found, told apart and ended as those that a trainer starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.protocol import client
from holdfast.testing.runs.processes import FoundProcess, find
from support.runs.keeper_forks import ForkedKeeper, KeeperForks
from support.runs.leftovers import keeper_pids


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeeperForks]:
    made = KeeperForks()
    monkeypatch.setattr(client, "subprocess", made)
    yield made
    made.close()


def wait_for_end(keeper: ForkedKeeper) -> int:
    until_s = time.monotonic() + 20
    while (code := keeper.poll()) is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return code


def start(arena: Path, root: Path) -> ForkedKeeper:
    arena.mkdir(mode=0o700, exist_ok=True)
    kept: object = client.start_keeper(arena, run_id="a run", root=str(root), host_id="a host")
    assert isinstance(kept, ForkedKeeper)
    return kept


def test_a_run_saves_and_loads_with_a_forked_keeper(
    forks: KeeperForks, tmp_path: Path, arena_dir: Path
) -> None:
    for root in (tmp_path / "a", tmp_path / "b"):
        model = torch.nn.Linear(10, 10)
        expected = model.weight.detach().clone()
        with holdfast.Checkpointer(root, {"model": model}, storage=None) as checkpointer:
            checkpointer.save(0, durable=True).wait_durable(60)
            (pid,) = keeper_pids(arena_dir)
        torch.nn.init.zeros_(model.weight)
        holdfast.load(root, {"model": model})
        assert torch.equal(model.weight, expected)
        until_s = time.monotonic() + 20
        while pid in keeper_pids(arena_dir):
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_a_forked_keeper_shows_its_own_command_line_and_is_one_for_its_arena(
    forks: KeeperForks, tmp_path: Path, arena_dir: Path
) -> None:
    first, other = (start(arena_dir / name, tmp_path) for name in ("one", "two"))
    while not all((arena_dir / name / client.SOCKET_NAME).exists() for name in ("one", "two")):
        time.sleep(0.01)
    found: list[FoundProcess] = find(lambda one: one.is_keeper(arena_dir))
    assert {one.pid: one.host(arena_dir) for one in found} == dict.fromkeys(
        (first.pid, other.pid), "a host"
    )
    assert os.getsid(first.pid) == first.pid
    assert os.readlink(f"/proc/{first.pid}/cwd") == "/"
    assert wait_for_end(start(arena_dir / "one", tmp_path)) == client.LOCK_TAKEN
    assert "another keeper holds this arena" in (arena_dir / "one/keeper.log").read_text()
    assert first.poll() is None
    for keeper in (first, other):
        os.kill(keeper.pid, signal.SIGKILL)
    assert wait_for_end(first) == wait_for_end(other) == -signal.SIGKILL
