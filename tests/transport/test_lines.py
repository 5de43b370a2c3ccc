"""Many who read one peer at once all get what they ask for, over few connections each."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from holdfast.errors import PeerError
from holdfast.transport.client import Puller, WantedRange
from holdfast.transport.client_connection import Peer, RetryPauses
from holdfast.transport.server_connection import Limits
from support.peers.peering import (
    GENERATION,
    IMPATIENT,
    Caller,
    Served,
    puller,
    random_file,
    wait_for,
)

MIB = 1 << 20
RANKS, READERS = 16, 4


def wanted(peer: Peer, start: int, size: int) -> WantedRange:
    return WantedRange(peer, "/a", GENERATION, start, memoryview(bytearray(size)))


def all_at_once(work: Sequence[Callable[[], None]]) -> list[BaseException]:
    """Each on a thread of its own; what they raised."""
    failures: list[BaseException] = []

    def one(do: Callable[[], None]) -> None:
        try:
            do()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(do,)) for do in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return failures


@contextmanager
def offered(directory: Path, size: int, **limits: float) -> Iterator[tuple[Served, bytes]]:
    """A server with these limits, and what it offers as /a."""
    with Served(limits=Limits(**limits)) as served:  # type: ignore[arg-type]
        data = random_file(directory / "a", size)
        served.offer("/a", directory / "a")
        yield served, data


def reader(client: Puller, served: Served, data: bytes, turns: int = 2) -> Callable[[], None]:
    """What one of a rank's reading threads does."""

    def read() -> None:
        for _ in range(turns):
            one = wanted(served.peer, 0, len(data))
            client.pull([one])
            assert one.into == data

    return read


def test_all_ranks_of_a_large_host_read_one_peer_at_once_and_nobody_is_turned_away(
    arena_dir: Path,
) -> None:
    with offered(arena_dir, MIB) as (served, data):
        ranks = [puller() for _ in range(RANKS)]
        work = [reader(rank, served, data) for rank in ranks for _ in range(READERS)]
        assert not all_at_once(work)
        counts = served.counts()
        assert counts["crowded"] == 0 and counts["open_connections"] <= 4 * RANKS


def test_threads_of_one_client_share_its_connections(arena_dir: Path) -> None:
    with offered(arena_dir, MIB, connections=2) as (served, data):
        client = puller(connections=2, chunk_bytes=MIB // 8)
        assert not all_at_once([reader(client, served, data)] * 8)
        assert (served.counts()["crowded"], served.counts()["connections"]) == (0, 2)


def test_whoever_is_turned_away_comes_again_until_there_is_a_place(arena_dir: Path) -> None:
    with offered(arena_dir, MIB, connections_of_one=2, idle_s=0.3) as (served, data):
        served.do(served.server.offer_document, "/d", b"hello")

        def streamed(client: Puller) -> None:
            stream, got = client.stream(served.peer, "/a", GENERATION, start=0), bytearray(MIB)
            for _ in range(4):
                stream.ask(MIB // 4)
            stream.read(memoryview(got))
            stream.confirm()
            assert got == data

        def document(client: Puller) -> None:
            assert client.document(served.peer, "/d") == b"hello"

        work: list[Callable[[], None]] = []
        for _ in range(3):
            work.append(reader(puller(chunk_bytes=MIB // 8), served, data))
            work += [partial(streamed, puller()), partial(document, puller())]
        assert not all_at_once(work)
        assert served.counts()["crowded"] > 0


def test_a_peer_that_never_has_a_place_is_given_up_at_the_requests_end(arena_dir: Path) -> None:
    with (
        offered(arena_dir, MIB, connections=1, spared_s=60) as (served, _),
        Caller(served) as other,
    ):
        other.learn()
        client = puller(patience=replace(IMPATIENT, request_s=0.5))
        stream = client.stream(served.peer, "/a", GENERATION, start=0)
        stream.ask(100)
        asked = [
            lambda: client.pull([wanted(served.peer, 0, MIB)]),
            lambda: client.document(served.peer, "/a", generation=GENERATION),
            lambda: stream.read(memoryview(bytearray(100))),
        ]
        for ask in asked:
            with pytest.raises(PeerError, match=r"no place for another .* for 0\.[5-9]") as raised:
                ask()  # type: ignore[no-untyped-call]
            assert raised.value.fields["status"] == 503
            assert raised.value.fields["phase"] == "answer"
        stream.close()
        served.until("crowded", 12)  # four connections, and not one of them only once


@pytest.mark.parametrize("is_crowded", [True, False], ids=["a pause", "a line of its own"])
def test_who_waits_for_a_connection_can_be_cancelled(arena_dir: Path, is_crowded: bool) -> None:
    with (
        offered(arena_dir, MIB, connections=1, spared_s=60) as (served, _),
        Caller(served) as other,
    ):
        if is_crowded:
            other.learn()
        else:
            other.socket.close()
            wait_for(lambda: not served.counts()["open_connections"], "an end of the other one")
            served.do(served.server.set_rate, 100_000)
        client = puller(connections=1)
        pulls = [client.begin([wanted(served.peer, 0, MIB)]) for _ in range(2)]
        served.until("crowded" if is_crowded else "challenged")
        for pull in pulls:
            pull.cancel()
        for pull in pulls:
            (error,) = pull.wait().values()
            assert error.fields["phase"] == "cancelled"


def test_a_pull_is_over_when_its_bytes_came_whoever_has_the_connections(arena_dir: Path) -> None:
    with offered(arena_dir, 8 * MIB) as (served, data):
        client = puller(connections=2, chunk_bytes=MIB // 2)
        slow = client.stream(served.peer, "/a", GENERATION, start=0)  # it has a line of its own
        slow.ask(8 * MIB)
        slow.read(memoryview(bytearray(MIB)))
        lines = [client._pool.acquire(served.peer, fresh=False, until_s=1e9, is_over=lambda: False)]
        one = wanted(served.peer, 0, len(data))
        client.pull([one], within_s=20)  # over the other one: a thread waits for this one in vain
        assert one.into == data
        assert lines[0] is not None
        client._pool.drop(served.peer, lines[0])
        slow.close()


def test_a_wait_for_a_connection_ends_with_the_pull(arena_dir: Path) -> None:
    with offered(arena_dir, MIB) as (served, _):
        served.do(served.server.set_rate, 100_000)
        client = puller(connections=1)
        first = client.begin([wanted(served.peer, 0, MIB)])
        wait_for(lambda: served.counts()["challenged"] > 0, "the first one's connection")
        with pytest.raises(PeerError, match="all connections to it were in use") as raised:
            client.pull([wanted(served.peer, 0, MIB)], within_s=0.2)
        assert raised.value.fields["phase"] == "connect"
        first.cancel()
        first.wait()


def test_pauses_grow_are_never_equal_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("holdfast.transport.client_connection.time", clock)
    pauses = [RetryPauses(replace(IMPATIENT, request_s=10), 1e9) for _ in range(2)]
    peer, found = Peer("host-1", "127.0.0.1", 1), list[tuple[float, float]]()
    before = random.getstate()

    def turned_away() -> None:
        while True:
            found.append((pauses[0].next_s(peer, None), pauses[1].next_s(peer, None)))
            now[0] += found[-1][0]

    with pytest.raises(PeerError, match=r"for 10\.0 s"):
        turned_away()
    assert all(0 < one <= 1 and one != other for one, other in found[:-1])
    assert sum(one for one, _ in found) == pytest.approx(10)
    assert found[0][0] <= 0.05 and max(max(found)) > 0.5
    assert random.getstate() == before, "what training draws hangs on no peer"


def test_lines_that_are_idle_make_place_for_whoever_has_none(arena_dir: Path) -> None:
    with offered(arena_dir, MIB, connections_of_one=2) as (served, data):
        clients = [puller(connections=1) for _ in range(6)]
        streams = [client.stream(served.peer, "/a", GENERATION, start=0) for client in clients[:2]]
        for stream in streams:
            stream.ask(1000)
            stream.read(memoryview(bytearray(1000)))
        assert not all_at_once([reader(client, served, data) for client in clients])
        for stream in streams:  # their lines were idle, and are no more
            got = bytearray(1000)
            stream.ask(1000)
            stream.read(memoryview(got))
            assert got == data[1000:2000]
            stream.confirm()
        assert served.counts()["crowded"] > 0
