"""How fast do keepers pull each other's memory, beside plain sockets? Over loopback.

``python benchmarks/peers.py``, or ``--quick`` with 64 MB. Both ways send the same file in shared
memory by ``sendfile`` from a process of its own, and receive it with ``recv_into`` into the same
memory, all of it touched before. The plain one says nothing but bytes: one range for each
connection, no heads, no signatures. Each pull is checked, outside the time.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import xxhash

from holdfast.peers.calling import Peer
from holdfast.peers.client import Puller, Wanted
from holdfast.peers.server import SEND_THREADS, PeerServer

SECRET, NAME, GENERATION = b"a secret of this benchmark alone", "host-1", "1-1"
CONNECTIONS = (1, 2, 4)
TARGET = 0.6
_ASKED = struct.Struct("<QQ")  # from, how many
WAYS = ("holdfast", "plain")
PLACE, TITLE = "## The keeper\n", "## Between keepers\n"
LEAD = (
    "`python benchmarks/peers.py`: a file in shared memory is pulled from another process, over\n"
    "loopback, beside plain sockets with `sendfile` and `recv_into`.\n"
)


# ── servers, each in a process of its own ────────────────────────────────────────────────────


async def serve_holdfast(path: Path, send_threads: int) -> None:
    """Offer the file as a keeper does."""
    server = PeerServer(SECRET, name=NAME, incarnation=1, send_threads=send_threads)
    server.offer_file(
        "/a", path, offset_bytes=0, length_bytes=path.stat().st_size, generation=GENERATION
    )
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.Event().wait()


def serve_plain(path: Path) -> None:
    """Send what is asked for by 16 bytes, each connection on a thread."""
    descriptor = os.open(path, os.O_RDONLY)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        connected, _ = listener.accept()
        threading.Thread(target=send_asked, args=(connected, descriptor), daemon=True).start()


def send_asked(connected: socket.socket, descriptor: int) -> None:
    """Until the other end hangs up."""
    while asked := connected.recv(_ASKED.size, socket.MSG_WAITALL):
        at, left = _ASKED.unpack(asked)
        while left:
            sent = os.sendfile(connected.fileno(), descriptor, at, left)
            at, left = at + sent, left - sent


@contextmanager
def server(way: str, path: Path, send_threads: int) -> Iterator[int]:
    """Run one of them; its port."""
    command = [sys.executable, __file__, "--serve", way, str(path), str(send_threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


# ── clients ──────────────────────────────────────────────────────────────────────────────────


class Plain:
    """One range for each connection, which stay open."""

    def __init__(self, port: int, connections: int) -> None:
        self.open = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]

    def pull(self, into: memoryview) -> None:
        """Fill it, each connection a part."""
        bounds = [len(into) * n // len(self.open) for n in range(len(self.open) + 1)]
        threads = [
            threading.Thread(target=receive, args=(one, start, into[start:stop]))
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


def receive(connected: socket.socket, start: int, into: memoryview) -> None:
    """One range."""
    connected.sendall(_ASKED.pack(start, len(into)))
    at = 0
    while at < len(into):
        at += connected.recv_into(into[at:])


class Ours:
    """As keepers do."""

    def __init__(self, port: int, connections: int) -> None:
        self.puller = Puller(SECRET, incarnation=1, connections=connections)
        self.peer = Peer(NAME, "127.0.0.1", port)

    def pull(self, into: memoryview) -> None:
        """Fill it."""
        self.puller.pull([Wanted(self.peer, "/a", GENERATION, 0, into)])

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
    rates: dict[str, list[float]] = {}
    with server("holdfast", path, send_threads) as ours, server("plain", path, 0) as plain:
        for n in CONNECTIONS:
            clients: dict[str, Ours | Plain] = {"holdfast": Ours(ours, n), "plain": Plain(plain, n)}
            for turn, way in harness.alternate(WAYS, rounds + 1):
                with harness.machine_alone():
                    began = time.perf_counter()
                    clients[way].pull(into)
                    took = time.perf_counter() - began
                if xxhash.xxh3_64_hexdigest(into) != expected:
                    raise SystemExit(f"{way} with {n} connections brought other bytes")
                if turn:  # the first one connects, and finds nothing warm
                    rates.setdefault(f"{way} {n}", []).append(size / took / 1e9)
            for client in clients.values():
                client.close()
    return {name: harness.summary(values) for name, values in rates.items()}


def shown(found: dict[str, Any]) -> str:
    """The table."""
    head = ["connections", "Holdfast, GB/s", "plain sockets, GB/s", "ratio"]
    rows = []
    for n in CONNECTIONS:
        ours, plain = found[f"holdfast {n}"], found[f"plain {n}"]
        rows.append([str(n), spread(ours), spread(plain), f"{ratio(found, n):.2f}"])
    return harness.table(head, rows)


def spread(found: dict[str, Any]) -> str:
    """Median, lowest and highest."""
    return f"{found['median']:.2f} ({found['min']:.2f}–{found['max']:.2f})"


def ratio(found: dict[str, Any], connections: int) -> float:
    """Of medians."""
    ours, plain = (found[f"{way} {connections}"]["median"] for way in WAYS)
    return float(ours / plain)


def put_into(document: Path, text: str) -> None:
    """Into its section, which is made the first time there are figures for it."""
    page = document.read_text()
    if TITLE not in page:
        section = f"{TITLE}\n{LEAD}\n<!-- peers -->\n<!-- /peers -->\n\n"
        before, place, after = page.partition(PLACE)
        document.write_text(before + section + place + after)
    harness.replace_block(document, "peers", text)


def main() -> int:
    """Exit 1 where the target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="64 MB, 3 rounds, no results kept")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="how much is pulled")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--send-threads", type=int, default=SEND_THREADS)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    harness.add_document_option(parser)
    options = parser.parse_args()
    if options.serve:
        way, path, threads = options.serve
        if way == "plain":
            serve_plain(Path(path))
        asyncio.run(serve_holdfast(Path(path), int(threads)))
    size, rounds = (64 << 20, 3) if options.quick else (options.bytes, options.rounds)
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
        facts = harness.machine_facts(Path(__file__).parent, ["xxhash"])
        result = {"bytes": size, "send_threads": options.send_threads, "rates": found}
        print(f"results/{harness.write_results('peers', facts, result, text).name}")
        if options.document:
            put_into(harness.DOCUMENT, text)
    return 0 if all(ratio(found, n) >= TARGET for n in CONNECTIONS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
