"""The keeper as a process: quick to answer, without torch, outliving its starter."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import Fenced, KeeperError, UsageError
from holdfast.persist import commit
from holdfast.protocol import client as client_module
from holdfast.protocol import messages as m
from holdfast.protocol.arena import (
    SlotFile,
    SlotRecord,
    boot_id,
    lock_dir,
    make_private_dir,
)
from holdfast.protocol.arena import arena_dir as arena_of
from holdfast.protocol.client import KeeperClient, find_or_start
from holdfast.storage.local import LocalStore


def connect(root: Path, run_id: str = "run", host: str = "host") -> KeeperClient:
    commit.open_root(LocalStore(root), run_id)
    line = find_or_start(
        arena_of(run_id, host), run_id=run_id, root=str(root), host_id=host, timeout_s=30
    )
    client = KeeperClient(line, lambda _: None, lambda _: None)
    client.request(m.Hello(run_id=run_id, root=str(root)), m.Welcome, timeout_s=10)
    return client


def end(client: KeeperClient, incarnation: int, nonce: str) -> None:
    join = m.Join(incarnation=incarnation, nonce=nonce, rank=0, persist_at_end=False)
    client.request(join, m.Done, timeout_s=10)
    client.request(m.Goodbye(), m.Done, timeout_s=10)
    client.close()


def test_a_keeper_that_serves_has_loaded_no_torch(tmp_path: Path) -> None:
    client = connect(tmp_path, "run")
    hello = m.Hello(run_id="run", root=str(tmp_path))
    maps = Path(f"/proc/{client.request(hello, m.Welcome, timeout_s=10).pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "libc" in maps
    begun = client.request(m.Begin(nonce="n", world=1), m.Begun, timeout_s=10)
    end(client, begun.incarnation, "n")


def test_importing_the_keeper_and_all_it_uses_loads_no_torch_and_no_numpy() -> None:
    check = (
        "import sys, holdfast.keeper.process, holdfast.cli;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert (
        subprocess.run([sys.executable, "-c", check], env=environment, check=False).returncode == 0
    )


def test_a_second_keeper_of_an_arena_steps_back_and_a_broken_one_says_why(
    tmp_path: Path, arena_dir: Path
) -> None:
    directory = arena_dir / "one"
    make_private_dir(directory)
    held = lock_dir(directory)
    assert held is not None
    with pytest.raises(KeeperError, match="no keeper answered"):
        find_or_start(directory, run_id="r", root=str(tmp_path), host_id="h", timeout_s=1.0)
    with pytest.raises(KeeperError, match="ended with exit code"):
        find_or_start(arena_dir / "two", run_id="r", root="hf://bucket", host_id="h", timeout_s=30)
    os.close(held)


@pytest.mark.promise
def test_an_older_incarnation_is_fenced_off_and_strangers_have_no_say(tmp_path: Path) -> None:
    old, new = connect(tmp_path), connect(tmp_path)
    first = old.request(m.Begin(nonce="a", world=1), m.Begun, timeout_s=10).incarnation
    old.request(m.Join(incarnation=first, nonce="a", rank=0), m.Done, timeout_s=10)
    with pytest.raises(Fenced):
        new.request(m.Adopt(parent=None), m.Done, timeout_s=10)
    with pytest.raises(UsageError, match="does not send"):
        new.request(m.Welcome(pid=1), m.Done, timeout_s=10)
    second = new.request(m.Begin(nonce="b", world=1), m.Begun, timeout_s=10).incarnation
    assert second > first
    with pytest.raises(Fenced):
        old.request(m.Adopt(parent=None), m.Done, timeout_s=10)
    with pytest.raises(Fenced, match="is over"):
        old.request(m.Join(incarnation=first, nonce="a", rank=0), m.Done, timeout_s=10)
    old.close()
    end(new, second, "b")


@pytest.mark.promise
def test_a_rank_of_another_start_that_has_the_same_number_gets_no_place(tmp_path: Path) -> None:
    line, other = connect(tmp_path), connect(tmp_path)
    n = line.request(m.Begin(nonce="a", world=1), m.Begun, timeout_s=10).incarnation
    with pytest.raises(Fenced, match="is over"):
        other.request(m.Join(incarnation=n, nonce="b", rank=0), m.Done, timeout_s=10)
    other.close()
    end(line, n, "a")


_APART = ["unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child"]


def can_be_apart() -> bool:
    """Whether this machine lets us start a process in a pid namespace of its own."""
    return subprocess.run([*_APART, "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_be_apart(), reason="no namespaces can be made here")
def test_a_trainer_the_keeper_cannot_see_is_refused_and_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.Popen

    def apart(command: list[str], **options: Any) -> Any:
        return real([*_APART, *command], **options)

    commit.open_root(LocalStore(tmp_path), "run")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", apart)
        arena = arena_of("run", "host")
        line = find_or_start(arena, run_id="run", root=str(tmp_path), host_id="host", timeout_s=30)
    client = KeeperClient(line, lambda _: None, lambda _: None)
    with pytest.raises(UsageError, match="share a pid namespace"):
        client.request(m.Hello(run_id="run", root=str(tmp_path)), m.Welcome, timeout_s=10)
    client.close()
    child = vars(client_module)["_started"].pop()
    child.kill()
    child.wait(30)


def test_two_keepers_cannot_write_to_one_root(tmp_path: Path) -> None:
    client = connect(tmp_path, "one")
    begun = client.request(m.Begin(nonce="n", world=1), m.Begun, timeout_s=10)
    other = connect(tmp_path, "one", host="elsewhere")
    with pytest.raises(holdfast.RootBusy, match="run one"):
        other.request(m.Begin(nonce="n", world=1), m.Begun, timeout_s=10)
    end(client, begun.incarnation, "n")
    begun = other.request(m.Begin(nonce="n", world=1), m.Begun, timeout_s=10)
    end(other, begun.incarnation, "n")
    stranger = connect(tmp_path, "two")
    with pytest.raises(holdfast.StorageError, match="is the root of run one by now"):
        stranger.request(m.Begin(nonce="n", world=1), m.Begun, timeout_s=10)
    stranger.close()


def test_a_keeper_that_nobody_needs_makes_the_newest_snapshot_durable_and_ends(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_KEEPER_IDLE_S", "1")
    train = (
        "import os, sys, torch, holdfast\n"
        "model = torch.nn.Linear(3, 3)\n"
        "checkpointer = holdfast.Checkpointer(sys.argv[1], {'model': model}, storage=None)\n"
        "checkpointer.save(7).wait_captured(30)\n"
        "os._exit(1)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", train, str(tmp_path)], env=environment, check=False)
    deadline = time.monotonic() + 30
    while list(arena_dir.glob("*/*/lock")):
        assert time.monotonic() < deadline, "the keeper did not end"
        time.sleep(0.05)
    with holdfast.open(tmp_path) as found:
        assert found.step == 7


def test_a_keeper_that_finds_only_some_ranks_images_of_one_host_ends_soon_and_leaves_nothing(
    tmp_path: Path, arena_dir: Path
) -> None:
    """All were killed in the middle of a capture, when one rank of two had sealed its image."""
    sealed = SlotRecord(
        state="captured",
        boot_id=boot_id(),
        run_id="run",
        incarnation=1,
        step=1,
        attempt="a",
        rank=0,
        world=2,
        layout="l" * 32,
        image_bytes=4096,
        header_xxh3="0" * 16,
        table_xxh3="0" * 16,
    )
    arena = arena_of("run", "host")
    make_private_dir(arena)
    slot = SlotFile.create(arena / "00000.slot", 2 << 20)
    slot.write_record(sealed)
    slot.close()
    connect(tmp_path).close()
    deadline = time.monotonic() + 20
    while arena.exists():
        assert time.monotonic() < deadline, "the keeper waits for what cannot come"
        time.sleep(0.05)
