"""What a server offers is said from any thread, and who offers learns when it was taken."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from holdfast.errors import ArenaError, DeadlineExceeded, PeerError, UsageError
from holdfast.transport.client import WantedRange
from holdfast.transport.server import ThreadSafeServer
from support.peers.peering import GENERATION, Caller, Served, puller, random_file, wait_for

SIZE = 300_000


@pytest.fixture
def offering(served: Served) -> ThreadSafeServer:
    return ThreadSafeServer(served.server, served.loop)


def wanted(served: Served, into: bytearray, start: int = 0) -> WantedRange:
    return WantedRange(served.peer, "/a", GENERATION, start, memoryview(into))


def test_what_a_thread_offers_is_there_when_the_call_returns(
    served: Served, offering: ThreadSafeServer, arena_dir: Path
) -> None:
    data = random_file(arena_dir / "a", SIZE)
    offering.offer_file(
        "/a", arena_dir / "a", offset_bytes=5, length_bytes=SIZE - 5, generation=GENERATION
    )
    offering.offer_document("/b", b"said", generation=GENERATION)
    into, client = bytearray(SIZE - 5), puller()
    client.pull([wanted(served, into)])
    assert into == data[5:]
    assert client.document(served.peer, "/b", generation=GENERATION) == b"said"
    assert offering.withdraw("/a") and not offering.withdraw("/a")
    with pytest.raises(PeerError) as raised:
        client.pull([wanted(served, into)])
    assert raised.value.fields["status"] == 410
    with pytest.raises(PeerError) as raised:
        client.document(served.peer, "/c")
    assert raised.value.fields["status"] == 404
    assert served.counts()["offered"] == 1


def test_what_cannot_be_offered_is_an_error_where_it_was_said(
    offering: ThreadSafeServer, arena_dir: Path
) -> None:
    with pytest.raises(ArenaError, match="cannot offer"):
        offering.offer_file(
            "/a", arena_dir / "a", offset_bytes=0, length_bytes=1, generation=GENERATION
        )
    with pytest.raises(UsageError, match="cannot be asked for"):
        offering.offer_document("a", b"")


def test_a_loop_that_waits_is_an_error_and_the_offer_never_comes(served: Served) -> None:
    offering = ThreadSafeServer(served.server, served.loop, patience_s=0.05)
    goes_on = threading.Event()
    served.loop.call_soon_threadsafe(goes_on.wait, 10)
    with pytest.raises(DeadlineExceeded, match=r"did not take an offer in 0\.05 s"):
        offering.offer_document("/a", b"late")
    goes_on.set()
    assert served.counts()["offered"] == 0


def test_a_loop_that_is_closed_is_an_error(served: Served) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(DeadlineExceeded, match="event loop is closed"):
        ThreadSafeServer(served.server, loop).withdraw("/a")


def test_who_offers_learns_when_a_peer_has_all_that_it_wanted(
    served: Served, offering: ThreadSafeServer, arena_dir: Path
) -> None:
    data, taken = random_file(arena_dir / "a", SIZE), []
    offering.offer_file(
        "/a",
        arena_dir / "a",
        offset_bytes=0,
        length_bytes=SIZE,
        generation=GENERATION,
        on_confirmed=lambda: taken.append(bytes(into)),
    )
    into = bytearray(SIZE)
    with Caller(served) as caller:
        caller.learn()
        assert caller.status(method="HEAD") == 200
        assert caller.status(span="bytes=0-9") == 206
        assert caller.body(10) == data[:10]
        tag = caller.ask(method="HEAD")[0].tag
        assert caller.status(span="bytes=0-9", tag=tag) == 206
        caller.body(10)
        assert not taken, "who only looks, or only pulls, has not said that it is done"
    puller(connections=3, chunk_bytes=50_000).pull([wanted(served, into)])
    wait_for(lambda: bool(taken), "a word")
    assert taken == [data], "once, and only when all of it was copied"


def test_what_is_withdrawn_when_it_was_taken_breaks_nothing(
    served: Served, offering: ThreadSafeServer, arena_dir: Path
) -> None:
    """As whoever hands windows on does it: the answer to the last question still arrives."""
    random_file(arena_dir / "a", SIZE)
    into, client = bytearray(SIZE), puller()

    def withdraw() -> None:
        served.server.withdraw("/a")

    for _ in range(50):
        offering.offer_file(
            "/a",
            arena_dir / "a",
            offset_bytes=0,
            length_bytes=SIZE,
            generation=GENERATION,
            on_confirmed=withdraw,
        )
        client.pull([wanted(served, into)])
    assert served.counts()["interrupted"] == 0
