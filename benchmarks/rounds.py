"""Measure what it costs that all ranks hear of each other: one round over their tree.

Real processes on this machine tell the latency. Simulated ranks, 256 to 65,536 with 8 on a host,
tell messages, bytes and CPU of the busiest rank: the real phases and joins, without sockets.
"""

from __future__ import annotations

import gc
import os
import socket
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.kit import markdown
from benchmarks.kit.options import Parser
from benchmarks.scale import fitted
from holdfast.transport.wire.rank_tree import RankPhases, Word, join_said, places_of, said_by
from holdfast.world import TorchWorld

SIZES = (256, 1024, 4096, 16384, 65536)
RANKS_PER_HOST = 8
ROUNDS = 2


class Tree:
    """Simulated ranks with open lines; ``clock`` counts what their phases take."""

    def __init__(self, world: int, clock: Callable[[], float] = time.thread_time) -> None:
        self.world, self.clock = world, clock
        began = clock()
        places = places_of([f"host-{rank // RANKS_PER_HOST}" for rank in range(world)])
        self.placing_s = clock() - began
        self.depth = max(len(place.above) for place in places)
        self.ranks = [RankPhases(rank, place) for rank, place in enumerate(places)]
        for rank, place in enumerate(places):
            if place.above:
                self.ranks[rank].attach(place.above[0])
                self.ranks[place.above[0]].attach(rank)
        self.messages = 0
        self.through: Counter[int] = Counter()
        """Bytes that each rank sent and received."""
        self.cpu_s: Counter[int] = Counter()  # type: ignore[type-var]

    def reduce(self, count: int) -> None:
        """One round in which all say the same but one, as a layout's hash of a run."""
        frames: deque[tuple[int, int, bytes]] = deque()
        for rank in reversed(range(self.world)):
            word = Word(rank, "phase", said_by(rank, [b"x" * 64, b"lowest" if not rank else b""]))
            began = self.clock()
            self.ranks[rank].speak(count, word, join_said, 60.0, 0.0)
            self._take(rank, began, frames)
        while frames:
            sender, rank, frame = frames.popleft()
            began = self.clock()
            self.ranks[rank].hear(sender, frame, 0.0)
            self._take(rank, began, frames)
        assert all(each.verdict_of(count) is not None for each in self.ranks)

    def _take(self, rank: int, began: float, frames: deque[tuple[int, int, bytes]]) -> None:
        self.cpu_s[rank] += self.clock() - began  # type: ignore[assignment]
        for to, frame in self.ranks[rank].sent:
            frames.append((rank, to, frame))
            self.messages += 1
            self.through[rank] += len(frame)
            self.through[to] += len(frame)
        self.ranks[rank].sent.clear()


def measure(world: int, clock: Callable[[], float] = time.thread_time) -> dict[str, float]:
    """Costs of one round of so many simulated ranks."""
    gc.disable()  # its pauses are of the simulation, not of one rank
    try:
        tree = Tree(world, clock)
        for count in range(1, ROUNDS + 1):
            tree.reduce(count)
    finally:
        gc.enable()
    return {
        "messages": tree.messages / ROUNDS,
        "bytes of the busiest": max(tree.through.values()) / ROUNDS,
        "its CPU": max(tree.cpu_s.values()) / ROUNDS,
        "CPU of all": sum(tree.cpu_s.values()) / ROUNDS,
        "places": tree.placing_s,
        "depth": tree.depth,
    }


def _rank(rank: int, world: int, port: int, rounds: int, out: str) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    began = time.perf_counter()
    ours, found = TorchWorld(timeout_s=60), {}
    found["meeting"] = time.perf_counter() - began
    for name, size in (("round of 100 bytes", 100), ("round of 4 MB", 4_000_000)):
        took = []
        for _ in range(rounds):
            began = time.perf_counter()
            ours.reduce("measure", bytes(size), max, timeout_s=60)
            took.append(time.perf_counter() - began)
        found[name] = statistics.median(took)
    ours.close()
    if rank == world - 1:
        Path(out).write_bytes(msgspec.json.encode(found))


def measure_here(world: int, rounds: int) -> dict[str, float]:
    """Seconds of meeting and of a round, by the last of ``world`` processes of this machine."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as directory:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out = str(Path(directory, "found"))
        torch.multiprocessing.spawn(_rank, (world, port, rounds, out), nprocs=world)
        return msgspec.json.decode(Path(out).read_bytes(), type=dict[str, float])


def main(arguments: Sequence[str]) -> int:
    """Measure each size, and print the tables with the exponents."""
    parser = Parser("rounds", __doc__, quick="256 to 4,096 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--processes", type=int, default=4, help="real ranks of this machine (4)")
    options = parser.parse(arguments)
    here = measure_here(options.processes, 20 if options.quick else 200)
    print(f"{options.processes} processes, s:\n")
    print(markdown.table(list(here), [[f"{took:.2g}" for took in here.values()]]))
    sizes = [256, 1024, 4096] if options.quick else options.ranks
    found = {n: measure(n) for n in sizes}
    columns = list(found[sizes[0]])
    rows = [[f"{n:,}"] + [f"{found[n][c]:.3g}" for c in columns] for n in sizes]
    if len(sizes) > 1:
        fits = [fitted([(n, found[n][c]) for n in sizes]) for c in columns]
        rows.append(["b", *(f"{b:.2f}" for b in fits)])
    print("\nsimulated, a round; CPU in s:\n")
    print(markdown.table(["ranks", *columns], rows))
    return 0
