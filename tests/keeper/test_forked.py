"""A child that a trainer forked has its line to the keeper too, and is not the trainer."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.coordinator.slots import SlotWriter
from holdfast.keeper import connections as connection
from holdfast.keeper import trainer_api
from holdfast.keeper.connections import pidfd_of_peer
from holdfast.keeper.trainer_api import TrainerApi
from holdfast.protocol import messages as m
from holdfast.protocol.arena import process_start
from support.runs.keepers import ask, begin, connect, end, hear

#: Rank 1 of two: joins, forks a child that has all its descriptors, and does as it is told.
RANK_1 = """
import os, signal, sys
from pathlib import Path
from support.runs.keepers import NONCE, connect
from holdfast.protocol import messages as m
line = connect(Path(sys.argv[1]))
join = m.Join(incarnation=int(sys.argv[2]), nonce=NONCE, rank=1, persist_at_end=False)
line.request(join, m.Done, timeout_s=10)
child = os.fork()
if child == 0:
    os.close(1)
    signal.pause()  # until the test ends it
    os._exit(0)
print(child, flush=True)
sys.stdin.readline() if sys.argv[3] == "speaks" else signal.pause()
line.send(m.DeclineStep(step=5, reason="its last words"))
os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def rank_1(root: Path, incarnation: int, act: str) -> Iterator[subprocess.Popen[str]]:
    """It has forked its child, which lives as long as this lasts."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK_1, str(root), str(incarnation), act],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        child = os.pidfd_open(int(process.stdout.readline()))
        try:
            yield process
        finally:
            process.kill()
            signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)


def test_a_killed_trainer_is_gone_though_a_child_it_forked_lives_on(tmp_path: Path) -> None:
    heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    line = connect(tmp_path, listener=heard.put)
    n = begin(line, world=2)
    with rank_1(tmp_path, n, "waits") as trainer:
        line.send(ask(5))
        trainer.send_signal(signal.SIGKILL)
        assert hear(heard, m.Skip).reason.startswith("ranks [1] went away")
        end(line)  # which waits for nobody who will not come


def test_what_a_killed_trainer_said_last_is_heard_before_its_end(tmp_path: Path) -> None:
    heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    line = connect(tmp_path, listener=heard.put)
    n = begin(line, world=2)
    with rank_1(tmp_path, n, "speaks") as trainer:
        line.send(ask(5))
        assert trainer.stdin is not None
        trainer.stdin.write("now\n")
        trainer.stdin.flush()
        assert hear(heard, m.Skip).reason == "rank 1 could not save it: its last words"
        line.send(ask(6))
        assert hear(heard, m.Skip).reason.startswith("ranks [1] went away")
        end(line)


# ── how it is seen ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not tell a peer's pidfd."""
    monkeypatch.setattr(connection, "SO_PEERPIDFD", 4242)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match=os.strerror(errno.ENOPROTOOPT)):
        ours.getsockopt(socket.SOL_SOCKET, 4242)


def is_process(pidfd: int | None, pid: int) -> bool:
    assert pidfd is not None
    with os.fdopen(pidfd) as file:
        lines = Path(f"/proc/self/fdinfo/{file.fileno()}").read_text().splitlines()
    return f"Pid:\t{pid}" in lines


def me() -> SlotWriter:
    return SlotWriter(os.getpid(), process_start(os.getpid()))


def test_the_kernel_says_which_process_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert is_process(pidfd_of_peer(ours, me()), os.getpid())


def test_an_older_kernel_is_asked_by_number_and_a_number_used_again_is_found_out(
    old_kernel: None,
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert is_process(pidfd_of_peer(ours, me()), os.getpid())
        with pytest.raises(ProcessLookupError):
            pidfd_of_peer(ours, SlotWriter(os.getpid(), me().start - 1))
        assert pidfd_of_peer(ours, SlotWriter(0, 0)) is None


@pytest.mark.parametrize("reason", [errno.EMFILE, errno.ENFILE, errno.EPERM])
def test_a_keeper_that_cannot_look_takes_no_living_trainer_for_dead(reason: int) -> None:
    class Blind:
        def getsockopt(self, *_: int) -> int:
            raise OSError(reason, os.strerror(reason))

    assert pidfd_of_peer(cast(socket.socket, Blind()), me()) is None


def test_who_cannot_be_looked_at_is_hung_up_on_and_not_served_without_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would count as dead, and the slots that it writes to as free."""

    def refuse(_: object) -> SlotWriter:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    closed: list[bool] = []
    caller = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(trainer_api, "peer_of", refuse)
    asyncio.run(TrainerApi.serve(cast(Any, None), cast(Any, None), cast(Any, caller)))
    assert closed == [True]


def test_where_no_kernel_shows_it_the_line_alone_does(
    old_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert pidfd_of_peer(ours, me()) is None
