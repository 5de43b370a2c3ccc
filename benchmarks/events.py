"""Measures what an event costs its thread, and the time and memory of the report of a large run.

One record for each rank and save, in one file a host, as keepers write them; clocks of hosts are
apart by up to an hour, and three faults are hidden, which the report is to find. With ``--rollups``
the records of each host are rolled up and given up, and these roll-ups are joined over all hosts,
as the keeper that coordinates does; ``records_left`` of them stand there as they were. What is
measured: seconds, records a second of a processor, bytes a record on disk, and memory. The cost of
an event is that of 10,000 after 3,000, between which the thread computes as training does.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast import events
from holdfast.events import Event, emit, subscribe, to_record
from holdfast.observe.event_files import EventFile
from holdfast.observe.event_ring import RINGS, EventRing
from holdfast.observe.ring_drain import RingDrain
from holdfast.observe.rollup_files import rollup_path
from holdfast.observe.rollup_writer import RollupWriter
from holdfast.observe.run_rollup_writer import RunRollupWriter
from holdfast.observe.run_rollups import Coverage, read_run_rollups
from holdfast.observe.sinks import JsonlSink

#: No sink; a queue that a thread of the process empties; a ring in shared memory.
WAYS = ("none", "thread", "ring")


class RunSize(NamedTuple):
    """A run that is made up; its saves are spread over its starts."""

    hosts: int
    per_host: int
    saves: int
    starts: int
    seed: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host


class Hidden(NamedTuple):
    """What is wrong with a run that is made up: it is to be found in its report."""

    busy_rank: int
    """Describes its state slowly."""
    slow_host: int
    """All of its ranks copy slowly what cannot wait."""
    late_rank: int
    """Comes to ``save`` three seconds after the others."""


def hidden(hosts: int, per_host: int, seed: int) -> Hidden:
    """Returns what is hidden: on three hosts, if there are so many."""
    places = random.Random(f"{seed} hidden").sample(range(hosts), k=min(3, hosts))
    busy, slow, late = (places[n % len(places)] for n in range(3))
    return Hidden(busy * per_host + 1, slow, late * per_host + per_host - 1)


def records_of_host(host: int, size: RunSize, faults: Hidden) -> Iterator[tuple[Event, float]]:
    """Yields what the ranks of one host report, and its keeper, with the moments."""
    rng = random.Random(f"{size.seed} {host}")
    ranks = range(host * size.per_host, (host + 1) * size.per_host)
    lengths = [len(range(n, size.saves, size.starts)) for n in range(size.starts)]
    at_s, step = 0.0, 0
    for start, length in enumerate(lengths, 1):
        for rank in ranks:
            yield _started(start, rank, size, f"h{host}"), at_s
        if start > 1:
            for rank in ranks:
                yield _restored(start, rank, step - 1, size), at_s + 1.0
        for _ in range(length):  # a save comes every ten seconds; its ranks call it together
            at_s += 10.0
            for rank in ranks:
                describe_s = rng.lognormvariate(-6, 0.3)
                volatile_s = describe_s / 2
                if rank == faults.busy_rank:
                    describe_s += 0.3
                if host == faults.slow_host:
                    volatile_s += 0.5
                event = _returned(step, rank, describe_s, volatile_s, start)
                yield event, at_s + event.held_s + 3.0 * (rank == faults.late_rank)
            if host == 0:
                captured = events.SnapshotCaptured(
                    incarnation=start, step=step, world=size.ranks, elapsed_s=4.0
                )
                yield captured, at_s + 4.0
            step += 1
        at_s += 30.0


def _started(start: int, rank: int, size: RunSize, host: str) -> Event:
    return events.RunStarted(
        incarnation=start, rank=rank, run_id="r", world=size.ranks, host=host, pid=rank + 1
    )


def _restored(start: int, rank: int, step: int, size: RunSize) -> Event:
    return events.Restored(
        incarnation=start,
        rank=rank,
        step=step,
        parent_incarnation=start - 1,
        source="memory",
        elapsed_s=1.0,
        size_bytes=1 << 30,
        world=size.ranks,
        saved_world=size.ranks,
    )


def _returned(
    step: int, rank: int, describe_s: float, volatile_s: float, start: int = 1
) -> events.SaveReturned:
    return events.SaveReturned(
        incarnation=start,
        step=step,
        rank=rank,
        held_s=describe_s + volatile_s,
        describe_s=describe_s,
        volatile_s=volatile_s,
        wait_previous_s=0.0,
        leaves=300,
        size_bytes=1 << 30,
        durable=False,
    )


def write(root: Path, size: RunSize, *, is_rolled_up: bool = False) -> dict[str, float]:
    """Writes the events below ``root``; returns how many records and bytes there are.

    ``is_rolled_up``: those of each host are rolled up and given up, and these roll-ups are joined.
    """
    (root / "events").mkdir(parents=True)
    encode, made = msgspec.json.Encoder().encode, defaultdict[str, float](float)
    faults = hidden(size.hosts, size.per_host, size.seed)
    for host in range(size.hosts):
        apart_s = random.Random(f"{size.seed} clock {host}").uniform(-3600, 3600)
        trail = root / "events" / f"host-h{host}.jsonl"
        with trail.open("wb") as file:
            for number, (event, at_s) in enumerate(records_of_host(host, size, faults)):
                record = to_record(event, 1e9 + at_s + apart_s)
                said = {"mono_s": 5000 + at_s, "version": 1, "boot": f"{host:08x}"}
                named = {"by_host": f"h{host}", "writer": f"keeper-{host:08x}", "number": number}
                file.write(encode(record | said | named) + b"\n")
                made["records"] += 1
        made["bytes"] += trail.stat().st_size
        if is_rolled_up:
            cpu_s = time.process_time()
            RollupWriter(trail).finish(deadline_s=3600)
            made["rolling_up_cpu_s"] += time.process_time() - cpu_s
            made["rollup_bytes_of_hosts"] += rollup_path(trail).stat().st_size
            trail.unlink()
    if is_rolled_up:
        cpu_s, writer = time.process_time(), RunRollupWriter(lambda: root / "events", reading_s=0.0)
        while writer.join():
            pass
        made["joining_cpu_s"] = time.process_time() - cpu_s
        files = (root / "events").rglob("*.jsonl*")
        made["rollup_bytes"] = sum(path.stat().st_size for path in files)
        joined = read_run_rollups(root / "events", Coverage(), lambda *_: None)
        made["records_left"] = sum(len(one.kept) for one in joined)
    return dict(made)


def read(root: Path) -> dict[str, Any]:
    """Reads the report in this process; returns its time, the memory that it took, and findings."""
    from holdfast.observe.findings import find
    from holdfast.observe.report_builder import read_report
    from holdfast.observe.report_page import render_page

    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s, cpu_s = time.monotonic(), time.process_time()
    report = read_report(root)
    elapsed_s, read_cpu_s = time.monotonic() - started_s, time.process_time() - cpu_s
    findings = find(report)
    page = render_page(report, findings)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "elapsed_s": elapsed_s,
        "cpu_s": read_cpu_s,
        "cpu_s_of_all": usage.ru_utime + usage.ru_stime,
        "grown_bytes": (usage.ru_maxrss - before_kb) * 1024.0,
        "peak_bytes": usage.ru_maxrss * 1024,
        "saves": len(report.saves),
        "starts_found": len(report.starts),
        "restores_found": len(report.restores),
        "rank_seconds": report.ledger.rank_seconds if report.ledger is not None else {},
        "page_bytes": len(page),
        "found": [one.evidence.partition(":")[0] for one in findings if one.cause == "slow_place"],
    }


def put(directory: Path, way: str) -> dict[str, float]:
    """Returns what an event costs the thread that reports it, in microseconds."""
    import numpy as np

    stop, drain = _subscribed(directory, way)
    memory, taken = np.ones(40_000), []
    for step in range(13_000):
        began_ns = time.perf_counter_ns()
        emit(_returned(step, 0, 0.001, 0.0005))
        taken.append(time.perf_counter_ns() - began_ns)
        for _ in range(4):
            (memory * 1.5).sum()
        if step % 1000 == 999:
            drain()
    stop()
    ordered = sorted(ns / 1000 for ns in taken[3000:])
    return {"median_us": ordered[5000], "p99_us": ordered[9900], "largest_us": ordered[-1]}


def _subscribed(directory: Path, way: str) -> tuple[Callable[[], None], Callable[[], object]]:
    if way == "none":
        return lambda: None, lambda: None
    if way == "thread":
        return subscribe(JsonlSink(directory / "rank-00000.jsonl")), lambda: None
    arena = directory / "arena"
    arena.mkdir(mode=0o700)
    drain = RingDrain(arena, EventFile(directory / "host-a.jsonl"))
    return subscribe(EventRing(arena / RINGS, "rank-0", rank=0, host="a", boot="b")), drain.poll


def main(arguments: Sequence[str]) -> int:
    """Prints a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks events", description=__doc__)
    parser.add_argument(
        "--hosts", type=int, default=128, help="8 ranks each; 2048 is the full size"
    )
    parser.add_argument("--saves", type=int, default=100, help="1000 is the full size")
    parser.add_argument("--starts", type=int, default=1, help="40 is the full size")
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--put", action="store_true", help="only what an event costs its thread")
    parser.add_argument(
        "--rollups", action="store_true", help="the report is of roll-ups, and no record is left"
    )
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.read:
        print(json.dumps(read(options.read)))
        return 0
    for way in WAYS if options.put else ():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            found = {name: round(us, 2) for name, us in put(Path(directory), way).items()}
        print(json.dumps({"way": way} | found))
    if options.put:
        return 0
    size = RunSize(options.hosts, options.per_host, options.saves, options.starts, options.seed)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory, "run")
        made = write(root, size, is_rolled_up=options.rollups)
        command = [sys.executable, "-m", "benchmarks", "events", "--read", str(root)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    faults = hidden(size.hosts, size.per_host, size.seed)
    of_ranks = size.ranks * size.saves
    result = {
        **size._asdict(),
        "ranks": size.ranks,
        "records": int(made.pop("records")),
        "file_bytes_a_record": round(made["bytes"] / of_ranks, 1),
        "records_a_cpu_second": round(of_ranks / found["cpu_s"]),
        "memory_bytes_a_rank_and_save": round(found["grown_bytes"] / of_ranks, 2),
        **{name: round(value, 2) for name, value in made.items()},
        **{name: round(v, 2) if isinstance(v, float) else v for name, v in found.items()},
        "hidden": [
            f"rank {faults.busy_rank} on h{faults.busy_rank // size.per_host}",
            f"host h{faults.slow_host}",
            f"rank {faults.late_rank} on h{faults.late_rank // size.per_host}",
        ],
    }
    print(json.dumps(result))
    return 0
