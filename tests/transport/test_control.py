"""A line between keepers brings what was said, in order and from the run itself, or it breaks."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.errors import Fenced, FormatError, HoldfastError, PeerError, UsageError
from holdfast.transport import channel
from holdfast.transport.channel import ChannelBounds, ChannelServer, SealedChannel, call
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire import frame_seals as sealing
from holdfast.transport.wire.frame_seals import ChannelHello, Keys

SECRET = b"a secret of thirty-two bytes ...."
QUICK = ChannelBounds(frame_bytes=1 << 20, greeting_s=0.5, alive_s=0.05, silence_s=0.3)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


class Heard:
    """A server that writes down all that is said to it."""

    def __init__(self, bounds: ChannelBounds = QUICK) -> None:
        self.bodies: list[bytes] = []
        self.lines: list[SealedChannel] = []
        self.errors: list[PeerError] = []
        self.ended = asyncio.Event()
        self.server = ChannelServer(
            SECRET, name="a", incarnation=4, welcome=self.welcome, bounds=bounds
        )

    async def welcome(self, line: SealedChannel) -> None:
        self.lines.append(line)
        try:
            while True:
                self.bodies.append(await line.receive())
                line.send(b"heard " + self.bodies[-1])
        except PeerError as error:
            self.errors.append(error)
            self.ended.set()


@asynccontextmanager
async def listening(bounds: ChannelBounds = QUICK) -> AsyncIterator[tuple[Heard, Peer]]:
    heard = Heard(bounds)
    port = await heard.server.start("127.0.0.1")
    try:
        yield heard, Peer("a", "127.0.0.1", port)
    finally:
        await heard.server.close()
        await asyncio.sleep(0.01)  # for the loop to close what was aborted


async def line_to(peer: Peer, **other: Any) -> SealedChannel:
    options = {"name": "b", "incarnation": 4, "bounds": QUICK, **other}
    secret = options.pop("secret", SECRET)
    return await call(secret, peer, **options)


class Raw:
    """A caller that can say anything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def greeted(cls, peer: Peer) -> Raw:
        return await cls(*await asyncio.open_connection(peer.host, peer.port)).answer(peer)

    async def answer(self, peer: Peer) -> Raw:
        """Answer the greeting with the proof."""
        greeting = await self.reader.readexactly(len(sealing.MAGIC) + sealing.NONCE_BYTES)
        hello = ChannelHello(secrets.token_bytes(32), "b", peer.name, 4)
        self.keys = Keys(SECRET, greeting[len(sealing.MAGIC) :], hello)
        self.said = hello.pack() + self.keys.caller_proof()
        self.writer.write(self.said)
        self.seals = self.keys.to_server()
        return self

    keys: Keys
    said: bytes
    seals: sealing.FrameMac

    async def accepted(self) -> Raw:
        assert sealing.is_accepted(await self.reader.readexactly(1))
        await self.reader.readexactly(sealing.PROOF_BYTES)
        return self

    async def is_ended(self) -> bool:
        """Whether the server ends it without a word."""
        try:
            while data := await self.reader.read(1 << 16):
                assert data[:4] == bytes(4), "it was answered"  # only that it is alive
        except ConnectionError:
            return True
        return True

    def close(self) -> None:
        self.writer.transport.abort()


def test_what_is_said_arrives_in_order_and_both_sides_know_who_speaks() -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            line = await line_to(peer)
            said = [bytes([n]) * size for n, size in enumerate((1, 70_000, 1 << 19, 3))]
            for body in said:
                line.send(body)
                assert await line.receive() == b"heard " + body
            assert heard.bodies == said
            assert (line.peer, heard.lines[0].peer) == ("a", "b")
            line.close()

    run(test)


def test_an_answer_is_told_from_another() -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            line = await line_to(peer)
            for body in (b"1", b"22", b"333"):
                line.send(body)
            assert [await line.receive() for _ in range(3)] == [
                b"heard 1",
                b"heard 22",
                b"heard 333",
            ]
            assert heard.bodies == [b"1", b"22", b"333"]
            line.close()

    run(test)


def test_a_line_with_nothing_to_say_stands() -> None:
    async def test() -> None:
        async with listening() as (_, peer):
            line = await line_to(peer)
            await asyncio.sleep(3 * QUICK.silence_s)
            line.send(b"still")
            assert await line.receive() == b"heard still"
            line.close()

    run(test)


def test_what_is_queued_arrives_before_a_line_ends_in_order() -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            line = await line_to(peer)
            line.send(b"x" * (1 << 19))
            line.send(b"last")
            await line.finish()
            await heard.ended.wait()
            assert heard.bodies[-1] == b"last"

    run(test)


# ── refused at the door ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("other", "kind", "match"),
    [
        ({"secret": b"another secret, as long"}, PeerError, "answer|ended|0 bytes"),
        ({"incarnation": 3}, Fenced, "newer incarnation"),
        ({"incarnation": 5}, PeerError, "older incarnation"),
        ({"secret": b"short"}, UsageError, "it needs 16"),
    ],
)
def test_who_does_not_belong_to_the_incarnation_has_no_line(
    other: dict[str, Any], kind: type[Exception], match: str
) -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            with pytest.raises(kind, match=match):
                await line_to(peer, **other)
            assert not heard.lines

    run(test)


def test_a_caller_that_means_another_host_is_refused() -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            with pytest.raises(PeerError, match="another name"):
                await line_to(Peer("c", peer.host, peer.port))
            assert not heard.lines

    run(test)


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    async def test() -> None:
        other = ChannelServer(
            b"not the secret of this run", name="a", incarnation=4, welcome=Heard().welcome
        )
        port = await other.start("127.0.0.1")
        with pytest.raises(PeerError):
            await line_to(Peer("a", "127.0.0.1", port))
        await other.close()
        assert other.refusals.total() == 1

    run(test)


def test_a_forged_verdict_is_not_believed() -> None:
    async def test() -> None:
        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(sealing.MAGIC + bytes(32))
            await reader.readexactly(sealing.FIXED_HELLO_BYTES)
            writer.write(b"o" + bytes(sealing.PROOF_BYTES))  # "your incarnation is over"
            await reader.read(1 << 16)
            writer.close()

        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PeerError, match="not signed with this run's secret"):
            await line_to(Peer("a", "127.0.0.1", port))
        server.close()
        await asyncio.sleep(0.01)

    run(test)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 200 OK\r\n" + b" " * 60, b"holdfast"])
def test_what_is_no_keeper_is_given_up(greeting: bytes) -> None:
    async def test() -> None:
        async def pretend(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(greeting)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PeerError):
            await line_to(Peer("a", "127.0.0.1", port))
        server.close()
        await asyncio.sleep(0.01)

    run(test)


def test_nobody_there_is_an_error_that_names_the_host() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=f"keeper a at 127.0.0.1 port {port}"):
            await line_to(Peer("a", "127.0.0.1", port))

    run(test)


@pytest.mark.parametrize(
    "said",
    [
        b"x" * sealing.FIXED_HELLO_BYTES,
        sealing.MAGIC + bytes(32) + b"\x04" + bytes(7) + b"\xff\x00",
        sealing.MAGIC + bytes(32) + b"\x04" + bytes(7) + b"\x01\x00" + b"\xff" + bytes(32),
        b"",
    ],
)
def test_nonsense_at_the_door_costs_a_connection_and_no_more(said: bytes) -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            reader, writer = await asyncio.open_connection(peer.host, peer.port)
            writer.write(said)
            assert (await reader.readexactly(len(sealing.MAGIC) + 32)).startswith(sealing.MAGIC)
            assert await Raw(reader, writer).is_ended()
            writer.close()
            line = await line_to(peer)
            line.send(b"and others are heard")
            assert await line.receive()
            assert heard.server.refusals.total() == 1
            line.close()

    run(test)


def test_strangers_who_say_nothing_are_sent_away_in_time() -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            crowd = [await asyncio.open_connection(peer.host, peer.port) for _ in range(32)]
            async with asyncio.timeout(10):
                while heard.server.refusals.total() < 32:
                    await asyncio.sleep(0.01)
            (await line_to(peer)).close()
            for _, writer in crowd:
                writer.transport.abort()

    run(test)


@pytest.fixture
def few_strangers(monkeypatch: pytest.MonkeyPatch) -> int:
    """So many may be at the door at once, and each is spared for a short time."""
    monkeypatch.setattr(channel, "SPARED_S", 0.2)
    return PATIENT.strangers


PATIENT = replace(QUICK, greeting_s=20.0, strangers=64)


def test_who_knows_the_secret_comes_in_however_many_do_not(few_strangers: int) -> None:
    async def test() -> None:
        async with listening(PATIENT) as (heard, peer):
            crowd = []
            for _ in range(3):
                crowd += [await asyncio.open_connection(peer.host, peer.port) for _ in range(150)]
                line = await line_to(peer, bounds=PATIENT)
                line.send(b"here")
                assert await line.receive() == b"heard here"
                line.close()
            assert heard.server.refusals["crowded"] >= 450 - few_strangers
            assert (await crowd[0][0].read())[:8] == b"holdfast", "ended, after its greeting"
            for _, writer in crowd:
                writer.transport.abort()

    run(test)


def test_strangers_that_say_a_little_now_and_then_keep_nobody_out(few_strangers: int) -> None:
    async def test() -> None:
        async with listening(PATIENT) as (heard, peer):
            crowd = [
                await asyncio.open_connection(peer.host, peer.port)
                for _ in range(2 * few_strangers)
            ]

            async def drip() -> None:
                while True:
                    for _, writer in crowd:
                        writer.write(b"h")
                    await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
            (await line_to(peer, bounds=PATIENT)).close()
            # Most for being too many; a few may have said enough meanwhile to be refused for that.
            assert heard.server.refusals.total() > few_strangers
            dripping.cancel()
            for _, writer in crowd:
                writer.transport.abort()

    run(test)


async def at_the_door(peer: Peer, count: int) -> list[Raw]:
    """So many keepers whose answer to the greeting is not there yet."""
    return [Raw(*await asyncio.open_connection(peer.host, peer.port)) for _ in range(count)]


def test_who_is_about_to_prove_the_secret_is_not_pushed_out_by_later_callers(
    few_strangers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with listening(PATIENT) as (heard, peer):
            monkeypatch.setattr(channel, "SPARED_S", 20.0)
            first = await at_the_door(peer, few_strangers)
            later = [asyncio.create_task(line_to(peer, bounds=PATIENT)) for _ in range(64)]
            for raw in first:
                await (await raw.answer(peer)).accepted()
            for line in await asyncio.gather(*later):
                line.close()
            for raw in first:
                raw.close()
            assert not heard.server.refusals.total()
            assert len(heard.lines) == few_strangers + 64

    run(test)


def test_who_has_answered_a_busy_server_is_not_silent(few_strangers: int) -> None:
    async def test() -> None:
        async with listening(PATIENT) as (heard, peer):
            first = await at_the_door(peer, few_strangers)
            later = asyncio.create_task(line_to(peer, bounds=PATIENT))
            await asyncio.sleep(0.1)  # it is there, and waits
            for raw in first:
                await raw.answer(peer)
            time.sleep(0.3)  # the server's loop is busy, and reads nothing
            for raw in first:
                await raw.accepted()
                raw.close()
            (await later).close()
            assert not heard.server.refusals.total()

    run(test)


def test_what_is_refused_is_counted_by_its_kind() -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            for bad in (
                {"secret": b"another secret, as long"},
                {"incarnation": 3},
                {"incarnation": 5},
            ):
                with pytest.raises(HoldfastError):
                    await line_to(peer, **bad)
            with pytest.raises(PeerError):
                await line_to(Peer("c", peer.host, peer.port))
            reader, writer = await asyncio.open_connection(peer.host, peer.port)
            writer.write(b"x" * sealing.FIXED_HELLO_BYTES)
            await reader.read(1 << 16)
            await reader.read(1)
            writer.close()
            assert heard.server.refusals == {
                "forged": 1,
                "fenced": 1,
                "behind": 1,
                "misdirected": 1,
                "malformed": 1,
            }

    run(test)


def test_a_hello_of_another_line_is_worth_nothing() -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            first = await (await Raw.greeted(peer)).accepted()
            reader, writer = await asyncio.open_connection(peer.host, peer.port)
            writer.write(first.said)  # recorded: the server's nonce is another now
            data = await reader.read(1 << 16)
            assert len(data) == len(sealing.MAGIC) + 32 and await reader.read(1) == b""
            assert heard.server.refusals.total() == 1
            first.close()
            writer.transport.abort()

    run(test)


# ── on a line that stands ────────────────────────────────────────────────────────────────────


def flip(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


@pytest.mark.parametrize(
    ("tamper", "heard_before"),
    [
        (lambda a, b: [flip(a, 5), b], []),  # changed
        (lambda a, b: [flip(a, len(a) - 1), b], []),  # its seal too
        (lambda a, b: [b, a], []),  # in another order
        (lambda a, b: [a, a], [b"one"]),  # repeated
        (lambda a, b: [b], []),  # left out
        (lambda a, b: [a, bytes(4) + bytes(16)], [b"one"]),  # made up
        (lambda a, b: [a, (1 << 21).to_bytes(4, "little")], [b"one"]),  # too long
        (lambda a, b: [a, flip(b, 0)], [b"one"]),  # its length
    ],
)
def test_a_frame_that_is_not_the_next_one_that_was_sealed_breaks_the_line(
    tamper: Callable[[bytes, bytes], list[bytes]], heard_before: list[bytes]
) -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            raw = await (await Raw.greeted(peer)).accepted()
            for frame in tamper(raw.seals.frame(b"one"), raw.seals.frame(b"two")):
                raw.writer.write(frame)
            await heard.ended.wait()
            assert heard.bodies == heard_before
            raw.close()

    run(test)


def test_what_a_server_said_cannot_be_said_to_it() -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            raw = await (await Raw.greeted(peer)).accepted()
            raw.writer.write(raw.keys.to_caller().frame(b"to the caller"))
            await heard.ended.wait()
            assert not heard.bodies
            raw.close()

    run(test)


def test_a_frame_of_another_line_breaks_the_line() -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            one = await (await Raw.greeted(peer)).accepted()
            two = await (await Raw.greeted(peer)).accepted()
            two.writer.write(one.seals.frame(b"recorded"))
            await heard.ended.wait()
            assert not heard.bodies
            one.close()
            two.close()

    run(test)


def test_a_line_that_is_cut_in_the_middle_of_a_frame_breaks() -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            raw = await (await Raw.greeted(peer)).accepted()
            raw.writer.write(raw.seals.frame(b"whole") + raw.seals.frame(b"cut off")[:-3])
            await raw.writer.drain()
            raw.writer.close()
            await heard.ended.wait()
            assert heard.bodies == [b"whole"]
            assert "the keeper of b" in str(heard.errors[0])

    run(test)


def test_a_peer_that_falls_silent_is_gone_within_the_deadline() -> None:
    async def test() -> None:
        async with listening() as (heard, peer):
            raw = await (await Raw.greeted(peer)).accepted()
            began = asyncio.get_running_loop().time()
            await heard.ended.wait()  # it never says that it lives
            assert asyncio.get_running_loop().time() - began < 20 * QUICK.silence_s
            assert "said nothing" in heard.errors[0].args[0]
            raw.close()

    run(test)


def test_a_peer_that_reads_nothing_takes_no_memory_without_end() -> None:
    async def test() -> None:
        bounds = ChannelBounds(frame_bytes=1 << 20, unsent_bytes=4 << 20, silence_s=60)
        async with listening(bounds) as (heard, peer):
            raw = await (await Raw.greeted(peer)).accepted()
            while not heard.lines:
                await asyncio.sleep(0.01)
            (line,) = heard.lines
            for _ in range(100):
                line.send(bytes(1 << 20))
            assert "reads nothing" in line.why_broken
            raw.close()

    run(test)


def test_names_that_are_too_long_are_no_hello() -> None:
    hello = ChannelHello(bytes(32), "b", "a", 4).pack()
    fixed = hello[: sealing.FIXED_HELLO_BYTES]
    assert sealing.parse_hello(fixed, b"ba") == ChannelHello(bytes(32), "b", "a", 4)
    with pytest.raises(FormatError, match="too long"):
        sealing.rest_of_hello(fixed[:-1] + b"\x81")
