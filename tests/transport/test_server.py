"""A server serves what was offered to whoever can sign, and refuses and counts all else."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import ArenaError, UsageError
from holdfast.transport.server import PeerServer
from holdfast.transport.server_connection import Limits
from holdfast.transport.wire.signing import HttpAnswer, digest
from support.peers.peering import INCARNATION, SECRET, Caller, Served, random_file, wait_for

MIB = 1 << 20


@pytest.fixture
def caller(served: Served, data: bytes) -> Iterator[Caller]:
    with Caller(served) as one:
        yield one.learn()


# ── served ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("span", [(0, 1), (0, 300_000), (299_999, 300_000), (4095, 131_073)])
def test_a_range_is_served_byte_for_byte(
    caller: Caller, data: bytes, span: tuple[int, int]
) -> None:
    start, stop = span
    answer, signature = caller.ask(span=f"bytes={start}-{stop - 1}")
    assert (answer.status, answer.length_bytes) == (206, stop - start)
    assert answer.span == f"{start}-{stop - 1}/{len(data)}"
    assert answer.incarnation == INCARNATION and signature
    assert caller.body(stop - start) == data[start:stop]


def test_one_connection_serves_many_requests_also_when_they_come_at_once(
    caller: Caller, data: bytes
) -> None:
    asked = [caller.request(span=f"bytes={n}-{n + 9999}") for n in range(0, 100_000, 10_000)]
    caller.socket.sendall(b"".join(caller.render(one) for one in asked))
    for one in asked:
        answer, _ = caller.hear(caller.signer.of_request(one))
        start = int(one.span[6:].partition("-")[0])
        assert answer.status == 206
        assert caller.body(10_000) == data[start : start + 10_000]


def test_a_head_may_come_in_pieces(caller: Caller, data: bytes) -> None:
    raw = caller.render(caller.request(span="bytes=0-9"))
    for byte in raw[:-1]:
        caller.socket.sendall(bytes([byte]))
    assert caller.say(raw[-1:])[0].status == 206
    assert caller.body(10) == data[:10]


def test_all_of_it_is_served_without_a_range_and_none_of_it_to_head(
    caller: Caller, data: bytes
) -> None:
    answer, _ = caller.ask(method="HEAD")
    assert (answer.status, answer.length_bytes) == (200, len(data))
    answer, _ = caller.ask()
    assert (answer.status, answer.length_bytes) == (200, len(data))
    assert caller.body(len(data)) == data


def test_a_part_of_a_file_is_offered_and_nothing_around_it(
    served: Served, caller: Caller, data: bytes, arena_dir: Path
) -> None:
    served.offer("/part", arena_dir / "a", start=1000, size=500)
    caller.ask(path="/part", span="bytes=0-499")
    assert caller.body(500) == data[1000:1500]
    assert caller.status(path="/part", span="bytes=0-500") == 416


def test_a_document_is_served_with_its_digest(served: Served, caller: Caller) -> None:
    served.do(served.server.offer_document, "/inventory", b'{"slots": []}')
    answer, _ = caller.ask(path="/inventory", generation="-")
    assert answer.digest == digest(b'{"slots": []}')
    assert caller.body(answer.length_bytes) == b'{"slots": []}'
    served.do(served.server.offer_document, "/inventory", b"")
    answer, _ = caller.ask(path="/inventory", generation="-")
    assert (answer.status, answer.length_bytes) == (200, 0)


def test_it_listens_on_ipv6(arena_dir: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no ::1")
    with Served(host="::1") as served, Caller(served) as caller:
        data = random_file(arena_dir / "a", 1000)
        served.offer("/a", arena_dir / "a")
        caller.learn().ask(span="bytes=0-999")
        assert caller.body(1000) == data


# ── refused ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"path": "/b"}, 404, "unknown"),
        ({"generation": "3-1300"}, 410, "withdrawn"),
        ({"tag": "0" * 16}, 410, "withdrawn"),
        ({"span": "bytes=0-300000"}, 416, "bad_range"),
        ({"span": "bytes=9-"}, 416, "bad_range"),
        ({"span": "lines=1-2"}, 416, "bad_range"),
        ({"incarnation": INCARNATION - 1}, 403, "fenced"),
        ({"incarnation": INCARNATION + 1}, 403, "behind"),
        ({"peer": "host-2"}, 421, "misdirected"),
        ({"challenge": ""}, 401, "challenged"),
        ({"challenge": "0" * 32}, 401, "challenged"),
    ],
)
def test_a_peer_that_asks_for_the_wrong_thing_is_told_so_and_may_go_on(
    served: Served,
    caller: Caller,
    data: bytes,
    fields: dict[str, object],
    status: int,
    kind: str,
) -> None:
    before = served.counts()[kind]
    answer, signature = caller.ask(**fields)
    assert answer.status == status and signature and not answer.length_bytes
    assert served.counts()[kind] == before + 1
    assert caller.status(span="bytes=0-9") == 206
    assert caller.body(10) == data[:10]


def test_a_forged_request_gets_nothing_not_even_a_signature(served: Served, data: bytes) -> None:
    with Caller(served) as honest:
        challenge = honest.learn().fields["challenge"]
    with Caller(served, secret=b"another secret entirely", challenge=challenge) as forger:
        assert forger.ask(span="bytes=0-9") == (HttpAnswer(401), "")
        assert forger.is_ended()
    assert served.counts()["forged"] == 1
    assert served.counts()["sent_bytes"] == 0


def test_an_unsigned_request_gets_nothing(served: Served, data: bytes) -> None:
    with Caller(served) as stranger:
        answer, signature = stranger.say(b"GET /a HTTP/1.1\r\nHost: there\r\n\r\n")
        assert (answer.status, signature) == (401, "")
        assert stranger.is_ended()
    assert served.counts()["unsigned"] == 1


def test_a_request_with_another_range_than_was_signed_is_forged(
    served: Served, caller: Caller
) -> None:
    raw = caller.render(caller.request(span="bytes=0-9"))
    assert caller.say(raw.replace(b"bytes=0-9", b"bytes=0-99"))[0].status == 401
    assert served.counts()["forged"] == 1


def test_a_recorded_request_is_refused_byte_for_byte(served: Served, data: bytes) -> None:
    with Caller(served) as caller:
        raw = caller.learn().render(caller.request(span="bytes=0-9"))
        assert caller.say(raw)[0].status == 206
        caller.body(10)
        assert caller.say(raw)[0].status == 409
    with Caller(served) as thief:
        answer, _ = thief.say(raw)
        assert (answer.status, answer.length_bytes) == (409, 0)
    assert served.counts()["replayed"] == 2


def test_a_recorded_request_is_refused_by_the_next_keeper_too(arena_dir: Path) -> None:
    random_file(arena_dir / "a", 1000)
    with Served() as served, Caller(served) as caller:
        raw = caller.learn().render(caller.request(span="bytes=0-9"))
    with Served() as served, Caller(served) as thief:
        served.offer("/a", arena_dir / "a")
        assert thief.say(raw)[0].status == 401


def test_two_clients_with_equal_counters_are_both_served(served: Served, data: bytes) -> None:
    with Caller(served) as one, Caller(served) as other:
        for caller in (one.learn(), other.learn()):
            assert caller.status(span="bytes=0-9", counter=1000) == 206
            caller.body(10)


def test_counters_may_overtake_each_other_on_several_connections(
    served: Served, data: bytes
) -> None:
    with Caller(served) as one:
        one.learn()
        with Caller(served, **one.fields) as other:
            for counter in (900, 500, 899, 501):
                for caller in (one, other):
                    status = caller.status(span="bytes=0-9", counter=counter)
                    assert status == (206 if caller is one else 409)
                    caller.body(10 if status == 206 else 0)


@pytest.mark.parametrize(
    ("raw", "status", "kind"),
    [
        (b"hello\r\n\r\n", 400, "malformed"),
        (b"GET /a HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "malformed"),
        (b"PUT /a HTTP/1.1\r\nHost: a\r\n\r\n", 405, "method"),
        (b"GET /a HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n", 413, "body"),
        (b"GET /a HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 40 + b"\r\n", 431, "too_large"),
        (b"GET /a HTTP/1.1\r\nHost: " + b"a" * 9000 + b"\r\n\r\n", 431, "too_large"),
        (b"\0" * 100_000, 431, "too_large"),
    ],
)
def test_what_is_no_request_is_refused_counted_and_ends_the_connection(
    served: Served, data: bytes, raw: bytes, status: int, kind: str
) -> None:
    with Caller(served) as stranger:
        answer, signature = stranger.say(raw)
        assert (answer.status, signature) == (status, "")
        assert stranger.is_ended()
    assert served.counts()[kind] == 1


# ── bounds ───────────────────────────────────────────────────────────────────────────────────


def test_a_head_that_trickles_in_is_cut_off_and_others_are_served(arena_dir: Path) -> None:
    with Served(limits=Limits(request_s=0.3)) as served:
        data = random_file(arena_dir / "a", 1000)
        served.offer("/a", arena_dir / "a")
        with Caller(served) as slow, Caller(served) as caller:
            began_s = time.monotonic()
            raw = slow.render(slow.request())
            while not served.counts()["slow"]:
                slow.socket.sendall(raw[:1])
                assert caller.learn().status(span="bytes=0-9") == 206
                assert caller.body(10) == data[:10]
                assert time.monotonic() - began_s < 60
                time.sleep(0.02)
            assert slow.hear()[0].status == 408


def test_a_connection_that_says_nothing_ends(arena_dir: Path) -> None:
    with Served(limits=Limits(request_s=0.2, idle_s=0.2)) as served, Caller(served) as caller:
        assert caller.is_ended()


def test_a_peer_that_takes_nothing_ends_only_its_own_connection(arena_dir: Path) -> None:
    with Served(limits=Limits(progress_s=0.3), send_threads=1) as served:
        size = 64 * MIB
        with (arena_dir / "a").open("wb") as file:
            file.truncate(size)
        os.chmod(arena_dir / "a", 0o600)
        served.offer("/a", arena_dir / "a")
        with Caller(served) as greedy, Caller(served) as caller:
            greedy.learn().ask(span=f"bytes=0-{size - 1}")
            assert caller.learn().status(span="bytes=0-999") == 206, "one thread, and it is free"
            assert caller.body(1000) == bytes(1000)
            served.until("stalled")
            assert len(greedy.body(size)) < size
            assert caller.status(span="bytes=0-999") == 206


@pytest.mark.parametrize(
    "limits", [Limits(connections=2), Limits(connections_of_one=2)], ids=["all", "address"]
)
def test_connections_are_bounded_by_address_and_in_all(limits: Limits) -> None:
    with Served(limits=limits) as bounded:
        with Caller(bounded) as one, Caller(bounded) as two:
            assert one.learn().status() == two.learn().status() == 404
            with Caller(bounded) as three:
                assert three.hear()[0].status == 503
            assert one.status() == 404
        bounded.until("crowded")
        wait_for(lambda: not bounded.counts()["open_connections"], "an end of both")
        with Caller(bounded) as three:
            three.learn()


@pytest.mark.parametrize(
    "limits",
    [Limits(connections=3, spared_s=0), Limits(connections_of_one=3, spared_s=0)],
    ids=["all", "address"],
)
def test_who_knows_the_secret_comes_in_however_many_do_not(limits: Limits) -> None:
    with Served(limits=limits) as bounded, Caller(bounded) as peer:
        assert peer.learn().status() == 404
        recorded = peer.render(peer.request())
        peer.say(recorded)
        strangers = [Caller(bounded) for _ in range(2)]
        for _ in range(20):  # what was heard on the way makes nobody a peer
            strangers.append(Caller(bounded))
            assert strangers[-1].say(recorded)[0].status == 409
            with Caller(bounded) as another:
                assert another.learn().status() == 404
        assert peer.status() == 404, "who came in stays"
        assert strangers[0].is_ended()
        assert bounded.counts()["open_connections"] <= 3
        for stranger in strangers:
            stranger.socket.close()


def test_what_a_server_remembers_is_bounded(served: Served, data: bytes) -> None:
    served.do(setattr, served.server._service.admission, "_most_clients", 8)
    with Caller(served) as caller:
        for n in range(100):
            caller.fields["nonce"] = f"{n:032x}"
            if caller.learn() and caller.status(span="bytes=0-9") == 206:
                caller.body(10)
        assert served.counts()["clients"] <= 8
        assert served.counts()["ranges"] >= 80
    for n in range(1100):
        served.do(served.server.offer_document, f"/{n}", b"x")
        served.do(served.server.withdraw, f"/{n}")
    assert len(served.server._service.resources._withdrawn) <= 1024


def test_the_rate_of_all_together_is_bounded_and_can_be_changed(arena_dir: Path) -> None:
    with Served() as served, Caller(served) as caller:
        data = random_file(arena_dir / "a", 2 * MIB)
        served.offer("/a", arena_dir / "a")
        served.do(served.server.set_rate, 4 * MIB)
        caller.learn()
        began_s = time.monotonic()
        caller.ask(span=f"bytes=0-{2 * MIB - 1}")
        assert caller.body(2 * MIB) == data
        assert time.monotonic() - began_s > 0.35  # 0.5 s less what may leave at once
        served.do(served.server.set_rate, 20_000)
        caller.ask(span=f"bytes=0-{2 * MIB - 1}")
        served.do(served.server.set_rate, None)
        assert caller.body(2 * MIB) == data
        assert time.monotonic() - began_s < 60, "it would have taken 100 s"


def test_a_rate_at_which_nothing_leaves_is_refused(served: Served) -> None:
    with pytest.raises(UsageError, match="0 bytes a second"):
        served.do(served.server.set_rate, 0)


# ── what cannot be offered ───────────────────────────────────────────────────────────────────


def test_what_is_no_file_of_ours_or_too_short_cannot_be_offered(
    served: Served, arena_dir: Path
) -> None:
    random_file(arena_dir / "a", 1000)
    (arena_dir / "link").symlink_to(arena_dir / "a")
    os.mkfifo(arena_dir / "pipe", 0o600)
    for name in ("nothing", "link", "pipe"):
        with pytest.raises(ArenaError, match="cannot offer"):
            served.do(
                served.server.offer_file,
                "/b",
                arena_dir / name,
                offset_bytes=0,
                length_bytes=1,
                generation="3-1200",
            )
    for start, size in ((0, 1001), (1000, 1), (-1, 5), (0, 0)):
        with pytest.raises(ArenaError, match="it has 1000"):
            served.offer("/b", arena_dir / "a", start=start, size=size)
    assert served.counts()["offered"] == 0


def test_a_descriptor_is_offered_as_well_and_stays_the_callers(
    served: Served, caller: Caller, data: bytes, arena_dir: Path
) -> None:
    descriptor = os.open(arena_dir / "a", os.O_RDONLY)
    served.do(
        served.server.offer_file,
        "/d",
        descriptor,
        offset_bytes=0,
        length_bytes=len(data),
        generation="3-1200",
    )
    os.close(descriptor)
    caller.ask(path="/d", span="bytes=0-9")
    assert caller.body(10) == data[:10]


@pytest.mark.parametrize("name", ["", "two words", "host\r\nX: y"])
def test_a_host_that_cannot_be_named_serves_nothing(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a host"):
        PeerServer(SECRET, name=name, incarnation=1)


def test_a_server_with_a_short_secret_is_not_made() -> None:
    with pytest.raises(UsageError, match="has 5 bytes"):
        PeerServer(b"short", name="host-1", incarnation=1)
