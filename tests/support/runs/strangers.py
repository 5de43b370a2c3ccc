"""Who has no business with a keeper, and knocks at its doors: seeded, and never twice the same.

Each way of knocking is what is said, piece by piece, before the stranger goes, or stays.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from holdfast.protocol import messages as m
from holdfast.protocol.arena import arena_dir
from holdfast.protocol.client import connect_socket
from holdfast.transport.wire import frame_seals as sealing
from holdfast.transport.wire.frame_seals import ChannelHello, Keys
from support.peers.peering import Caller
from support.runs.host_pairs import SECRET, Run
from support.runs.keepers import RUN, X

OTHER_SECRET = b"thirty-two bytes that are others"
Pieces = Sequence[bytes]


@dataclass(frozen=True)
class Doors:
    """Where the keeper of one host is reached, and what one has to know to be let in."""

    host: str
    incarnation: int
    generation: str
    image: str
    port: int
    control_port: int

    @classmethod
    def of(cls, run: Run, number: int, generation: str, image: str) -> Doors:
        place = run.table[number]
        return cls(place.id, run.n, generation, image, place.port, place.control_port)

    def here(self) -> socket.socket:
        return connect_socket(arena_dir(RUN, self.host))

    def peers(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def control(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.control_port), timeout=10)

    def caller(self, **fields: Any) -> Caller:
        """Asks as a peer does: with the secret, if no other is given."""
        there = SimpleNamespace(host="127.0.0.1", port=self.port, options={"name": self.host})
        usual: dict[str, Any] = {
            "secret": SECRET,
            "path": self.image,
            "generation": self.generation,
            "incarnation": self.incarnation,
        }
        return Caller(there, **usual | fields)  # type: ignore[arg-type]


def knock(
    line: socket.socket, pieces: Pieces, *, hang_up: bool = True, within_s: float = 0.05
) -> bytes:
    """Say it all; what is answered until nothing more comes for a while, or the line ends."""
    found = b""
    with line, contextlib.suppress(OSError):  # TimeoutError is one
        for piece in pieces:
            line.sendall(piece)
        if hang_up:
            line.shutdown(socket.SHUT_WR)
        line.settimeout(within_s)
        while data := line.recv(1 << 16):
            found += data
    return found


def damaged(draw: random.Random, data: bytes) -> bytes:
    """With a few bytes changed, left out, or said twice."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(out)) if out else 0
        match draw.randrange(4):
            case 0 if out:
                out[at] ^= 1 << draw.randrange(8)
            case 1:
                out[at:at] = draw.randbytes(draw.randint(1, 9))
            case 2:
                del out[at : at + draw.randint(1, 9)]
            case 3:
                out[at:at] = out[at : at + draw.randint(1, 40)]
    return bytes(out)


def torn(draw: random.Random, data: bytes) -> list[bytes]:
    """In pieces, as a network may hand it over; or without its end."""
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(4)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return pieces if draw.random() < 0.6 else pieces[:-1]


# ── the socket ───────────────────────────────────────────────────────────────────────────────


def _messages(doors: Doors) -> list[m.Message]:
    """Of one of our processes that has no place in the run. None of them begins anything."""
    n, nobody = doors.incarnation, m.HostEntry(id="nobody", ranks=(0,))
    return [
        m.Hello(run_id=RUN, root="/elsewhere"),
        m.Hello(run_id="another", root="", protocol=1),
        m.ProbeHost(secret=b"short", address="127.0.0.1", is_coordinator=True),
        m.ProbeHost(secret=OTHER_SECRET, address="203.0.113.7", is_coordinator=False),
        m.ProbeHost(secret=OTHER_SECRET, address="no such address", is_coordinator=True),
        m.AssignRole(incarnation=n, nonce="x", hosts=(nobody,), host=0, secret=b"s" * 32),
        m.AssignRole(incarnation=1 << 62, nonce="x", hosts=(), host=5, secret=b""),
        m.Begin(nonce="", world=1),
        m.Begin(nonce="x", world=0, hosts=(nobody,)),
        m.Join(incarnation=n, nonce="not the nonce", rank=0),
        m.Join(incarnation=n - 1, nonce="", rank=-1, parity=1 << 40),
        m.RequestCapture(step=-5, table="", values_bytes=-1, durable=True),
        m.Captured(attempt="a", image_bytes=1 << 60, header_xxh3=X, table_xxh3=X),
        m.PinAttempt(attempt="../../etc"),
        m.Adopt(parent=(1, 1)),
        m.AbortCapture(attempt="a", reason="b"),
        m.LeafTable(hash="x" * 32, deflated=b"[" * 5000),
        m.CancelRequest(step=1),
        m.Explain(step=0),
        m.TakeSample(),
        m.Progress(attempt="a", size_bytes=-1),
        m.MakeDurable(step=1),
        m.Goodbye(),
        m.Announce(step=1, which="storage"),
        m.DeclineStep(step=1, reason="r" * 9000),
        m.Welcome(pid=1),
        m.Done(),
        m.FencedOff(incarnation=n + 1),
        m.ListInventory(),
    ]


#: What begins something when a bit of it changes: said as it is.
_WHOLE = (m.Begin, m.ProbeHost, m.AssignRole)


def at_socket(draw: random.Random, doors: Doors) -> Pieces:
    """What our own user's process says when it has a fault."""
    message = draw.choice(_messages(doors))
    frame = m.pack(message, draw.randrange(3))
    match draw.randrange(7):
        case 0:
            return torn(draw, draw.randbytes(draw.randint(1, 3000)))
        case 1:  # a size that is a lie
            size = draw.choice([0xFFFFFFFF, 300 << 20, 2 << 20, len(frame) + 1])
            return [size.to_bytes(4, "little") + frame]
        case 2:
            deep = draw.choice([b"\x91", b"\x81", b"\xdd\xff\xff\xff\xff", b"\xc7\xff\x01"])
            body = deep * draw.choice([1, 50, 100_000])
            return [len(body).to_bytes(4, "little") + body]
        case 3 if not isinstance(message, _WHOLE):
            body = damaged(draw, frame[4:])
            return torn(draw, len(body).to_bytes(4, "little") + body)
        case 4:
            return [m.pack(m.Hello(run_id=RUN, root="/"), 1), frame * draw.randint(1, 50)]
        case _:
            return torn(draw, frame)


# ── the port of the hands ────────────────────────────────────────────────────────────────────


def recorded_hello(doors: Doors) -> bytes:
    """All that somebody said who knows the secret, and was let in; it is no host of the run."""
    with doors.control() as line:
        greeting = _read(line, len(sealing.MAGIC) + sealing.NONCE_BYTES)
        said = _hello(doors, SECRET, greeting, name="z")
        line.sendall(said)
        assert sealing.is_accepted(_read(line, 1))
    return said


def _read(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = line.recv(size - len(found))
        assert data, "the line ended"
        found += data
    return found


def _hello(
    doors: Doors, secret: bytes, greeting: bytes, *, name: str, incarnation: int = -1
) -> bytes:
    n = doors.incarnation if incarnation < 0 else incarnation
    hello = ChannelHello(secrets.token_bytes(32), name, doors.host, n)
    return hello.pack() + Keys(secret, greeting[len(sealing.MAGIC) :], hello).caller_proof()


def at_control(draw: random.Random, doors: Doors, recorded: bytes) -> bytes:
    """Knock there, and hear the server's nonce first where that is needed; all it answers."""
    line = doors.control()
    greeting = _read(line, len(sealing.MAGIC) + sealing.NONCE_BYTES)
    forged = _hello(doors, OTHER_SECRET, greeting, name="b")
    match draw.randrange(7):
        case 0:
            pieces: Pieces = torn(draw, draw.randbytes(draw.randint(1, 3000)))
        case 1:
            pieces = [forged + draw.randbytes(200)]
        case 2:
            pieces = torn(draw, recorded)
        case 3:
            pieces = [damaged(draw, _hello(doors, SECRET, greeting, name="z"))]
        case 4:  # of an incarnation that is over, or has not begun
            n = draw.choice([0, doors.incarnation + 1, (1 << 64) - 1])
            pieces = [_hello(doors, SECRET, greeting, name="b", incarnation=n)]
        case 5:  # one of us that is no host of the run, and then talks nonsense
            right = _hello(doors, SECRET, greeting, name="z")
            pieces = [right, draw.randbytes(draw.randint(1, 3000))]
        case _:
            pieces = [sealing.MAGIC + draw.randbytes(32 + 10) + b"\xff" * 300]
    return knock(line, pieces, hang_up=draw.random() < 0.8)


# ── the port of the peers ────────────────────────────────────────────────────────────────────

_HEADERS = (
    b"Host: a",
    b"Range: bytes=0-9",
    b"Range: bytes=9-0",
    b"Holdfast-Peer: a",
    b"If-Match: *",
    b"Holdfast-Generation: 1-1",
    b"Holdfast-Incarnation: 1",
    b"Content-Length: 3",
    b"",
    b" ",
    b"Holdfast-Counter: 1",
    b"Holdfast-Nonce: " + b"a" * 32,
    b"Transfer-Encoding: chunked",
    b"Holdfast-Signature: " + b"a" * 64,
    b"X: " + b"y" * 5000,
    b"Connection: upgrade",
    b"\xff",
)
_STARTS = (
    b"GET /inventory HTTP/1.1",
    b"HEAD / HTTP/1.1",
    b"GET /../../etc/passwd HTTP/1.1",
    b"",
    b"POST /inventory HTTP/1.1",
    b"PRI * HTTP/2.0",
    b"\x16\x03\x01\x02",
    b"GET / HTTP/1.0",
)


def at_peers(draw: random.Random, doors: Doors) -> bytes:
    """Knock there; all that is answered."""
    hang_up = draw.random() < 0.8
    match draw.randrange(6):
        case 0:
            pieces: Pieces = torn(draw, draw.randbytes(draw.randint(1, 20_000)))
        case 1:
            headers = draw.choices(_HEADERS, k=draw.randrange(12))
            end = draw.choice([b"\r\n\r\n", b"\n\n", b"\r\n"])
            pieces = [b"\r\n".join([draw.choice(_STARTS), *headers]) + end]
        case 2:  # another secret
            with doors.caller(secret=OTHER_SECRET, challenge="a" * 32) as caller:
                pieces = torn(draw, caller.render(caller.request(span="bytes=0-99")))
        case 3:  # what a peer said, changed
            with doors.caller() as caller:
                raw = caller.learn().render(caller.request(span="bytes=0-99"))
            changed = damaged(draw, raw.replace(b"Host: there\r\n", b"Host: x\r\n"))
            pieces = [b""] if _means_the_same(raw, changed) else [changed]
        case 4:  # what a peer said, once more
            with doors.caller() as caller:
                raw = caller.learn().render(caller.request(path="/nothing"))
                caller.say(raw)
            pieces = [raw * draw.randint(1, 5)]
        case _:  # one of us of another incarnation, or that means another
            other: dict[str, Any] = draw.choice(
                [{"incarnation": 0}, {"incarnation": 1 << 40}, {"peer": "c"}]
            )
            with doors.caller(**other) as caller:
                pieces = [caller.render(caller.request(span="bytes=0-99"))]
    return knock(doors.peers(), pieces, hang_up=hang_up)


def _means_the_same(raw: bytes, changed: bytes) -> bool:
    """Whether all that is signed is as it was: how names are written, and the host, are nothing.

    Nor is a header that nobody knows, such as the host's with a bit of its name changed.
    """

    def lines(text: bytes) -> set[bytes]:
        return set(text.split(b"\r\n\r\n")[0].lower().split(b"\r\n"))

    return {line for line in lines(raw) if not line.startswith(b"host:")} <= lines(changed)


Opened = Callable[[], socket.socket]


def crowd(opened: Opened, count: int, begin_with: Pieces = ()) -> list[socket.socket]:
    """So many that connect, say something or nothing, and stay."""
    lines = []
    for n in range(count):
        line = opened()
        line.settimeout(0.01)
        if begin_with:
            with contextlib.suppress(OSError):
                line.sendall(begin_with[n % len(begin_with)])
        lines.append(line)
    return lines
