"""Measure how fast keepers pull each other's memory over loopback, beside plain sockets.

Both ways send the same file in shared memory by ``sendfile`` from a process of its own, and
receive it with ``recv_into`` into the same memory, all of it touched before. The plain one says
nothing but bytes: one range for each connection, no heads, no signatures. Each pull is checked,
outside the time.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.kit import machine, markdown, results, series, sockets
from benchmarks.kit.hosting import Tell, hosted
from benchmarks.kit.options import Parser
from holdfast.transport.client import Puller, WantedRange
from holdfast.transport.client_connection import Peer
from holdfast.transport.server import SEND_THREADS, PeerServer

SECRET, NAME, GENERATION = b"a secret of this benchmark alone", "host-1", "1-1"
CONNECTIONS = (1, 2, 4)
TARGET = 0.6
WAYS = ("holdfast", "plain")
SECTION = results.Section(
    "Between keepers",
    "`python -m benchmarks peers`: a file in shared memory is pulled from another process, over\n"
    "loopback, beside plain sockets with `sendfile` and `recv_into`.",
)


# ── servers, each in a process of its own ────────────────────────────────────────────────────


async def offer(tell: Tell, path: Path, send_threads: int) -> None:
    """Offer the file as a keeper does."""
    server = PeerServer(SECRET, name=NAME, incarnation=1, send_threads=send_threads)
    server.offer_file(
        "/a", path, offset_bytes=0, length_bytes=path.stat().st_size, generation=GENERATION
    )
    tell(await server.start("127.0.0.1"))
    await asyncio.Event().wait()


def serve_holdfast(tell: Tell, path: Path, send_threads: int) -> None:
    """A process: offer the file, and tell the port."""
    asyncio.run(offer(tell, path, send_threads))


def serve_plain(tell: Tell, path: Path) -> None:
    """A process: send what is asked for, and tell the port."""
    tell(sockets.serve(path))
    threading.Event().wait()


# ── clients ──────────────────────────────────────────────────────────────────────────────────


class Plain:
    """One range for each connection, which stay open."""

    def __init__(self, port: int, connections: int) -> None:
        self.open = [sockets.connect(port) for _ in range(connections)]

    def pull(self, into: memoryview) -> None:
        """Fill it, each connection a part."""
        bounds = [len(into) * n // len(self.open) for n in range(len(self.open) + 1)]
        threads = [
            threading.Thread(target=sockets.receive, args=(one, start, into[start:stop]))
            for one, start, stop in zip(self.open, bounds, bounds[1:], strict=False)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Hang up."""
        for one in self.open:
            one.close()


class Ours:
    """As keepers do."""

    def __init__(self, port: int, connections: int) -> None:
        self.puller = Puller(SECRET, incarnation=1, connections=connections)
        self.peer = Peer(NAME, "127.0.0.1", port)

    def pull(self, into: memoryview) -> None:
        """Fill it."""
        self.puller.pull([WantedRange(self.peer, "/a", GENERATION, 0, into)])

    def close(self) -> None:
        """Hang up."""
        self.puller.close()


# ── the series ───────────────────────────────────────────────────────────────────────────────


def measure(path: Path, rounds: int, send_threads: int) -> dict[str, Any]:
    """Bytes per second of both ways, alternating, by the number of connections."""
    size = path.stat().st_size
    expected = xxhash.xxh3_64_hexdigest(path.read_bytes())
    into = memoryview(mmap.mmap(-1, size))
    into[:] = bytes(size)  # touched
    rates: dict[str, Any] = {}

    def check(way: str) -> None:
        if xxhash.xxh3_64_hexdigest(into) != expected:
            raise SystemExit(f"{way} with {n} connections brought other bytes")

    with hosted(serve_holdfast, path, send_threads) as ours, hosted(serve_plain, path) as plain:
        for n in CONNECTIONS:
            clients: dict[str, Ours | Plain] = {"holdfast": Ours(ours, n), "plain": Plain(plain, n)}
            pulls = {way: partial(client.pull, into) for way, client in clients.items()}
            for way, took in series.timed(pulls, rounds, after=check).items():
                rates[f"{way} {n}"] = series.summary([size / one / 1e9 for one in took])
            for client in clients.values():
                client.close()
    return rates


def shown(found: dict[str, Any]) -> str:
    """The table."""
    head = ["connections", "Holdfast, GB/s", "plain sockets, GB/s", "ratio"]
    rows = []
    for n in CONNECTIONS:
        ours, plain = found[f"holdfast {n}"], found[f"plain {n}"]
        rows.append(
            [str(n), markdown.spread(ours, 2), markdown.spread(plain, 2), f"{ratio(found, n):.2f}"]
        )
    return markdown.table(head, rows)


def ratio(found: dict[str, Any], connections: int) -> float:
    """Of medians."""
    ours, plain = (found[f"{way} {connections}"]["median"] for way in WAYS)
    return float(ours / plain)


def main(arguments: Sequence[str]) -> int:
    """Exit 1 where the target is missed."""
    parser = Parser(
        "peers",
        __doc__,
        quick="64 MB, 3 rounds, no results kept",
        quick_settings={"bytes": 64 << 20, "rounds": 3},
    )
    parser.add_bytes(1 << 30, "how much is pulled")
    parser.add_rounds(11)
    parser.add_argument("--send-threads", type=int, default=SEND_THREADS)
    parser.add_document()
    options = parser.parse(arguments)
    size, rounds = options.bytes, options.rounds
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-bench-") as directory:
        path = Path(directory) / "a"
        noise = os.urandom(1 << 20)
        with path.open("wb") as file:
            for start in range(0, size, len(noise)):  # no two megabytes are alike
                file.write((start.to_bytes(8, "little") + noise[8:])[: size - start])
        found = measure(path, rounds, options.send_threads)
    text = shown(found)
    print(f"\n{text}\n")
    if not options.quick:
        facts = machine.facts(Path(__file__).parent, ["xxhash"])
        result = {"bytes": size, "send_threads": options.send_threads, "rates": found}
        results.keep("peers", facts, result, text, document=options.document, section=SECTION)
    return 0 if all(ratio(found, n) >= TARGET for n in CONNECTIONS) else 1
