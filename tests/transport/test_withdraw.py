"""What is withdrawn is not served, and what was overwritten on its way never passes for whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.errors import PeerError
from holdfast.transport.client import WantedRange
from holdfast.transport.client_connection import ClientConnection
from support.peers.peering import GENERATION, Caller, Served, puller, random_file

MIB = 1 << 20


def wanted(served: Served, size: int) -> WantedRange:
    return WantedRange(served.peer, "/a", GENERATION, 0, memoryview(bytearray(size)))


def test_what_was_withdrawn_is_gone_and_what_never_was_is_unknown(
    served: Served, data: bytes
) -> None:
    with Caller(served) as caller:
        assert caller.learn().status(method="HEAD") == 200
        assert served.do(served.server.withdraw, "/a")
        assert caller.status(method="HEAD") == 410
        assert caller.status(method="HEAD", path="/b") == 404
        assert not served.do(served.server.withdraw, "/a")


def test_what_is_offered_again_has_another_tag(
    served: Served, data: bytes, arena_dir: Path
) -> None:
    with Caller(served) as caller:
        tag = caller.learn().ask(method="HEAD")[0].tag
        assert caller.status(method="HEAD", tag=tag) == 200
        served.offer("/a", arena_dir / "a")
        assert caller.status(method="HEAD", tag=tag) == 410
        assert caller.ask(method="HEAD")[0].tag != tag


def test_a_withdrawal_breaks_what_is_being_sent(arena_dir: Path) -> None:
    with Served() as served, Caller(served) as caller, Caller(served) as other:
        size = 64 * MIB
        random_file(arena_dir / "a", size)
        random_file(arena_dir / "b", 1000)
        served.offer("/a", arena_dir / "a")
        served.offer("/b", arena_dir / "b")
        caller.learn().ask(span=f"bytes=0-{size - 1}")
        served.do(served.server.withdraw, "/a")
        served.until("interrupted")  # at once, though this peer takes nothing
        assert len(caller.body(size)) < size
        assert other.learn().status(path="/b", span="bytes=0-9") == 206, "and nothing else"


def test_a_file_that_becomes_shorter_breaks_what_is_being_sent(arena_dir: Path) -> None:
    with Served() as served, Caller(served) as caller:
        random_file(arena_dir / "a", 64 * MIB)
        served.offer("/a", arena_dir / "a")
        os.truncate(arena_dir / "a", 32 * MIB)
        caller.learn().ask(span=f"bytes=0-{64 * MIB - 1}")
        assert len(caller.body(64 * MIB)) < 64 * MIB
        served.until("interrupted")


def test_descriptors_of_what_was_withdrawn_are_closed(served: Served, arena_dir: Path) -> None:
    random_file(arena_dir / "a", 1000)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        served.offer("/a", arena_dir / "a")
    served.do(served.server.withdraw, "/a")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("is_read_first", [True, False])
def test_bytes_that_were_overwritten_on_their_way_do_not_pass_for_whole(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch, is_read_first: bool
) -> None:
    """Once with the bytes in the receiver's queue, where they still are the pages of the file."""
    fill = ClientConnection.fill
    with Served() as served:
        data = random_file(arena_dir / "a", MIB)
        served.offer("/a", arena_dir / "a")

        def overwrite() -> None:
            served.until("ranges")
            served.do(served.server.withdraw, "/a")
            with (arena_dir / "a").open("r+b") as file:
                file.write(bytes(MIB))

        def late(self: ClientConnection, into: memoryview, until_s: float) -> None:
            if is_read_first:
                fill(self, into, until_s)
                overwrite()
            else:
                overwrite()
                fill(self, into, until_s)

        one = wanted(served, 16384)  # all of it fits into the queue
        monkeypatch.setattr(ClientConnection, "fill", late)
        with pytest.raises(PeerError, match="has withdrawn that"):
            puller().pull([one])
        assert one.into == data[:16384] or not is_read_first


def test_what_is_offered_anew_while_it_is_pulled_is_no_mixture(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, calls = ClientConnection.fill, threading.Semaphore(3)
    with Served() as served:
        random_file(arena_dir / "a", 8 * MIB)
        served.offer("/a", arena_dir / "a")

        def late(self: ClientConnection, into: memoryview, until_s: float) -> None:
            fill(self, into, until_s)
            if not calls.acquire(blocking=False):
                served.offer("/a", arena_dir / "a")

        monkeypatch.setattr(ClientConnection, "fill", late)
        with pytest.raises(PeerError):
            puller().pull([wanted(served, 8 * MIB)])
