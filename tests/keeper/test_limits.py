"""Trainers of another version, or with a fault: told so, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError, KeeperError, UsageError
from holdfast.geometry.layout import deflate, table_hash
from holdfast.keeper import message_limits as limits
from holdfast.keeper.connections import peer_of
from holdfast.protocol import messages as m
from holdfast.protocol.arena import arena_dir as arena_path
from holdfast.protocol.arena import process_start
from support.runs.keepers import HOST, NONCE, RUN, TABLE, ask, begin, connect, end, wait_for

X = "0" * 16


def part(*, incarnation: int = 1, nonce: str = "n", within_s: float = 1.0) -> m.AssignRole:
    return m.AssignRole(
        incarnation=incarnation, nonce=nonce, hosts=(), host=0, secret=b"", within_s=within_s
    )


GOOD: list[m.Message] = [
    m.Begin(nonce="n", world=1),
    m.Begin(nonce="n", world=1, after=7, hosts=(m.HostEntry(id="a", ranks=(0,), port=65535),)),
    part(),
    m.Join(incarnation=1, nonce="n", rank=3),
    m.Join(incarnation=1, nonce="n", rank=3, compare_replicas=0),
    m.Adopt(parent=None),
    m.Adopt(parent=(1, 0)),
    ask(0, values_bytes=0),
    m.Progress(attempt="a", size_bytes=0),
    m.Captured(attempt="a", image_bytes=1, header_xxh3=X, table_xxh3=X),
    m.Captured(attempt="a", image_bytes=1, header_xxh3=X, table_xxh3=X, sums=(b"", b"1234")),
    m.Explain(step=0),
    m.Hello(run_id="r", root="/"),
]
NONSENSE: list[m.Message] = [
    m.Begin(nonce="n", world=0),
    m.Begin(nonce="n", world=-1),
    m.Begin(nonce="n", world=1 << 40),
    m.Begin(nonce="", world=1),
    m.Begin(nonce="../../up", world=1),
    m.Begin(nonce="n" * 65, world=1),
    m.Begin(nonce="n", world=1, after=-1),
    m.Begin(nonce="n", world=1, after=1 << 63),
    m.Begin(nonce="n", world=1, hosts=(m.HostEntry(id="a", ranks=(0,), port=1 << 16),)),
    m.Begin(nonce="n", world=1, hosts=(m.HostEntry(id="a", ranks=(0,), control_port=-1),)),
    m.Begin(nonce="n", world=1, hosts=(m.HostEntry(id="a", ranks=(0,), parity_rate=-1),)),
    part(incarnation=0),
    part(incarnation=1 << 63),
    part(nonce=""),
    part(within_s=-1.0),
    part(within_s=math.inf),
    part(within_s=math.nan),
    m.Join(incarnation=-1, nonce="n", rank=3),
    m.Join(incarnation=1 << 63, nonce="n", rank=3),
    m.Join(incarnation=1, nonce="n", rank=3, keep=m.KeepTerms(last=1 << 63)),
    m.Join(incarnation=1, nonce="n", rank=3, keep=m.KeepTerms(every=-1)),
    m.Join(incarnation=1, nonce="n", rank=3, keep=m.KeepTerms(best=-1)),
    m.Join(incarnation=1, nonce="n", rank=3, keep=m.KeepTerms(by="x" * 5000)),
    m.Join(incarnation=1, nonce="n", rank=-1),
    m.Join(incarnation=1, nonce="n", rank=4),
    m.Join(incarnation=1, nonce="n", rank=3, compare_replicas=-1),
    m.Adopt(parent=(0, 5)),
    m.Adopt(parent=(1, -5)),
    ask(-1),
    ask(1 << 63),
    ask(1, values_bytes=-1),
    ask(1, values_bytes=1 << 60),
    ask(1, turn=-1),
    m.Progress(attempt="a", size_bytes=-1),
    m.Captured(attempt="a", image_bytes=-4096, header_xxh3=X, table_xxh3=X),
    m.Captured(attempt="a", image_bytes=1 << 60, header_xxh3=X, table_xxh3=X),
    m.Captured(attempt="a", image_bytes=1, header_xxh3="", table_xxh3=X),
    m.Captured(attempt="a", image_bytes=1, header_xxh3=X, table_xxh3=X + "0"),
    m.CancelRequest(step=-1),
    m.DeclineStep(step=-1, reason=""),
    m.MakeDurable(step=-1),
    m.Announce(step=-1, which="memory"),
    m.Announce(step=1, which="x" * 65),
    m.Explain(step=-1),
]


@pytest.mark.parametrize("message", GOOD, ids=lambda message: type(message).__name__)
def test_what_can_be_meant_is_let_through(message: m.Message) -> None:
    limits.validate_message(message, world=4)


@pytest.mark.parametrize("message", NONSENSE, ids=repr)
def test_a_number_that_means_nothing_is_refused(message: m.Message) -> None:
    with pytest.raises(UsageError):
        limits.validate_message(message, world=4)


def test_more_sums_than_any_layout_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SUMS_BYTES", 4)
    told = m.Captured(attempt="a", image_bytes=1, header_xxh3=X, table_xxh3=X, sums=(b"12", b"34"))
    limits.validate_message(told, world=4)
    told = m.Captured(attempt="a", image_bytes=1, header_xxh3=X, table_xxh3=X, sums=(b"12", b"345"))
    with pytest.raises(UsageError, match="the size of the sums is 5"):
        limits.validate_message(told, world=4)


# ── a real keeper ────────────────────────────────────────────────────────────────────────────


def test_a_keeper_refuses_nonsense_and_goes_on(tmp_path: Path) -> None:
    heard: list[m.Message] = []
    line = connect(tmp_path, listener=heard.append)
    n = begin(line)
    refused: list[tuple[m.Message, str]] = [
        (m.Join(incarnation=n, nonce=NONCE, rank=-1), "rank is -1, but must be 0 to 0"),
        (m.Join(incarnation=n, nonce=NONCE, rank=1), "rank is 1, but must be 0 to 0"),
        (m.Join(incarnation=n, nonce=NONCE, rank=0, keep=m.KeepTerms(last=0)), "last=0"),
        (m.Begin(nonce="n", world=0), "world is 0"),
        (m.Adopt(parent=(1, -1)), "parent's step"),
    ]
    for message, reason in refused:
        with pytest.raises(UsageError, match=reason):
            line.request(message, m.Done, timeout_s=10)
    line.send(m.LeafTable(hash="0" * 32, deflated=b"[]"))
    for message in NONSENSE:  # nobody waits for an answer to these
        line.send(message)
    assert "step is -1" in wait_for(line, heard, m.Skip).reason
    # None of it cost the rank its place.
    line.send(ask(7))
    grant = wait_for(line, heard, m.Grant)
    line.send(m.AbortCapture(attempt=grant.attempt, reason="enough"))
    end(line)


@pytest.mark.promise
@pytest.mark.parametrize("deflated", [b"[]", deflate(b"[]"), deflate(TABLE + b" ")])
def test_a_table_that_is_not_the_one_asked_for_ends_the_save_with_its_reason(
    tmp_path: Path, deflated: bytes
) -> None:
    heard: list[m.Message] = []

    def answer(message: m.Message) -> None:
        heard.append(message)
        if isinstance(message, m.RequestTable):
            line.send(m.LeafTable(hash=message.hash, deflated=tables[0]))

    tables = [deflated]
    line = connect(tmp_path, listener=heard.append)
    begin(line)
    line._listener = answer
    line.send(ask(7))
    assert f"{table_hash(TABLE)}" in wait_for(line, heard, m.Skip).reason
    tables[0] = deflate(TABLE)
    line.send(ask(8))
    grant = wait_for(line, heard, m.Grant)
    line.send(m.AbortCapture(attempt=grant.attempt, reason="enough"))
    end(line)


def test_a_slot_larger_than_memory_is_an_error_of_that_save_alone(tmp_path: Path) -> None:
    heard: list[m.Message] = []
    line = connect(tmp_path, listener=heard.append)
    begin(line)
    line.send(ask(1, values_bytes=limits.MAX_BYTES))
    assert "shared memory too small" in wait_for(line, heard, m.Aborted).reason
    end(line)


JOIN_AS_RANK_0 = """
import sys
from pathlib import Path
from support.runs.keepers import NONCE, connect
from holdfast.protocol import messages as m
line = connect(Path(sys.argv[1]))
try:
    line.request(m.Join(incarnation=int(sys.argv[2]), nonce=NONCE, rank=0), m.Done, timeout_s=10)
except Exception as error:
    print(type(error).__name__, error)
line.close()
"""


def test_two_processes_cannot_both_be_one_rank(tmp_path: Path) -> None:
    line = connect(tmp_path)
    incarnation = begin(line)
    other = subprocess.run(
        [sys.executable, "-c", JOIN_AS_RANK_0, str(tmp_path), str(incarnation)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"UsageError rank 0 of this incarnation is process {os.getpid()}" in other.stdout
    line.request(m.Explain(step=1), m.Explanation, timeout_s=10)  # it still has its place
    end(line)


def test_a_rank_whose_line_broke_unnoticed_takes_its_place_again(tmp_path: Path) -> None:
    lines = [connect(tmp_path)]
    incarnation = begin(lines[0])
    lines.append(connect(tmp_path))
    join = m.Join(incarnation=incarnation, nonce=NONCE, rank=0, persist_at_end=False)
    lines[1].request(join, m.Done, timeout_s=10)
    with pytest.raises(KeeperError):
        lines[0].request(m.Explain(step=1), m.Explanation, timeout_s=10)
    end(lines[1])


@pytest.mark.parametrize(
    "raw", [b"\xff\xff\xff\xff", b"\x05\x00\x00\x00hello", b"\x01\x00\x00\x00\xc1", b"\x00" * 8]
)
def test_bytes_that_are_no_message_end_that_line_and_no_other(tmp_path: Path, raw: bytes) -> None:
    line, other = connect(tmp_path), connect(tmp_path)
    begin(line)
    raw_line: socket.socket = vars(other)["_socket"]
    raw_line.sendall(raw)
    with pytest.raises(HoldfastError):
        other.request(m.ListInventory(), m.Inventory, timeout_s=10)
    line.request(m.ListInventory(), m.Inventory, timeout_s=10)
    end(line)


# ── whose it is ──────────────────────────────────────────────────────────────────────────────


def test_only_processes_of_our_user_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def peer() -> object:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        found = peer_of(writer)
        writer.close()
        theirs.close()
        return found

    assert asyncio.run(peer()) == (os.getpid(), process_start(os.getpid()))
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert asyncio.run(peer()) is None


@pytest.mark.parametrize("fault", ["others can enter", "a link"])
def test_a_keeper_does_not_serve_an_arena_that_is_not_ours_alone(
    fault: str, tmp_path: Path, arena_dir: Path
) -> None:
    arena = arena_path(RUN, HOST)
    arena.parent.mkdir(mode=0o700)
    if fault == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        arena.symlink_to(tmp_path / "elsewhere")
    else:
        arena.mkdir()
        arena.chmod(0o750)
    command = [sys.executable, "-m", "holdfast.keeper", "--arena", str(arena), "--run-id", RUN]
    ended = subprocess.run(
        [*command, "--root", str(tmp_path), "--host-id", HOST],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 8
    assert "only this user" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list((tmp_path / "elsewhere").glob("*"))


def test_what_a_keeper_makes_is_for_our_user_alone(tmp_path: Path) -> None:
    heard: list[m.Message] = []
    line = connect(tmp_path, listener=heard.append)
    begin(line)
    line.send(ask(1))
    grant = wait_for(line, heard, m.Grant)
    arena = arena_path(RUN, HOST)
    for path in [arena.parent, arena, *arena.rglob("*")]:
        assert path.lstat().st_mode & 0o077 == 0, path
        assert path.lstat().st_uid == os.getuid()
    line.send(m.AbortCapture(attempt=grant.attempt, reason="enough"))
    end(line)
