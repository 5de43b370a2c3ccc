"""Measures what an event costs its thread, and the time and memory of the report of a large run.

One record for each rank and save, in one file a host, as keepers write them; clocks of hosts are
apart by up to an hour, and three faults are hidden, which the report is to find. With ``--rollups``
the records are rolled up and given up before. What is
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast import events
from holdfast.events import Event, emit, subscribe, to_record
from holdfast.observe.event_files import EventFile
from holdfast.observe.event_ring import RINGS, EventRing
from holdfast.observe.ring_drain import RingDrain
from holdfast.observe.sinks import JsonlSink

#: No sink; a queue that a thread of the process empties; a ring in shared memory.
WAYS = ("none", "thread", "ring")


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


def records_of_host(
    host: int, per_host: int, saves: int, seed: int, faults: Hidden
) -> Iterator[Event]:
    """Yields what the ranks of one host report."""
    rng = random.Random(f"{seed} {host}")
    ranks = range(host * per_host, (host + 1) * per_host)
    for rank in ranks:
        yield events.RunStarted(
            incarnation=1, rank=rank, run_id="r", world=per_host, host=f"h{host}", pid=rank + 1
        )
    for step in range(saves):
        for rank in ranks:
            describe_s = rng.lognormvariate(-6, 0.3)
            volatile_s = describe_s / 2
            if rank == faults.busy_rank:
                describe_s += 0.3
            if host == faults.slow_host:
                volatile_s += 0.5
            yield _returned(step, rank, describe_s, volatile_s)


def _returned(step: int, rank: int, describe_s: float, volatile_s: float) -> Event:
    return events.SaveReturned(
        incarnation=1,
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


def write(root: Path, hosts: int, per_host: int, saves: int, seed: int) -> int:
    """Writes the events below ``root``; returns how many records there are."""
    (root / "events").mkdir(parents=True)
    encode, count = msgspec.json.Encoder().encode, 0
    faults = hidden(hosts, per_host, seed)
    for host in range(hosts):
        apart_s = random.Random(f"{seed} clock {host}").uniform(-3600, 3600)
        with (root / "events" / f"host-h{host}.jsonl").open("wb") as file:
            records = records_of_host(host, per_host, saves, seed, faults)
            for number, event in enumerate(records):
                # A start takes a second, and a save comes every ten; its ranks call it together.
                at_s = number / 1000 if event.step < 0 else 10.0 * (event.step + 1)
                if isinstance(event, events.SaveReturned):
                    at_s += event.held_s + 3.0 * (event.rank == faults.late_rank)
                record = to_record(event, 1e9 + at_s + apart_s)
                said = {"mono_s": 5000 + at_s, "version": 1, "boot": f"{host:08x}"}
                named = {"by_host": f"h{host}", "writer": f"keeper-{host:08x}", "number": number}
                file.write(encode(record | said | named) + b"\n")
                count += 1
    return count


def roll_up(root: Path) -> dict[str, Any]:
    """Rolls up all records, as keepers do while they come, and gives the records up."""
    from holdfast.observe.rollup_files import rollup_path
    from holdfast.observe.rollup_writer import RollupWriter

    size_bytes, cpu_s = 0, time.process_time()
    for trail in sorted((root / "events").glob("*.jsonl")):
        RollupWriter(trail).finish(deadline_s=3600)
        size_bytes += rollup_path(trail).stat().st_size
        trail.unlink()
    return {"rolling_up_cpu_s": time.process_time() - cpu_s, "rollup_bytes": size_bytes}


def read(root: Path) -> dict[str, Any]:
    """Reads the report in this process; returns its time, the memory that it took, and findings."""
    from holdfast.observe.findings import find
    from holdfast.observe.report_builder import read_report
    from holdfast.observe.report_page import render_page

    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s, cpu_s = time.monotonic(), time.process_time()
    report = read_report(root)
    elapsed_s, cpu_s = time.monotonic() - started_s, time.process_time() - cpu_s
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    findings = find(report)
    return {
        "elapsed_s": elapsed_s,
        "cpu_s": cpu_s,
        "grown_bytes": grown_kb * 1024.0,
        "saves": len(report.saves),
        "page_bytes": len(render_page(report, findings)),
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
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory, "run")
        count = write(root, options.hosts, options.per_host, options.saves, options.seed)
        size_bytes = sum(path.stat().st_size for path in (root / "events").iterdir())
        rolled = roll_up(root) if options.rollups else {}
        command = [sys.executable, "-m", "benchmarks", "events", "--read", str(root)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    faults = hidden(options.hosts, options.per_host, options.seed)
    of_ranks = options.hosts * options.per_host * options.saves
    result = {
        "ranks": options.hosts * options.per_host,
        "saves": options.saves,
        "records": count,
        "file_bytes_a_record": round(size_bytes / count, 1),
        "elapsed_s": round(found["elapsed_s"], 2),
        "cpu_s": round(found["cpu_s"], 2),
        "records_a_cpu_second": round(count / found["cpu_s"]),
        "memory_bytes": int(found["grown_bytes"]),
        "memory_bytes_a_rank_and_save": round(found["grown_bytes"] / of_ranks, 2),
        "page_bytes": found["page_bytes"],
        **{name: round(value, 2) for name, value in rolled.items()},
        "hidden": [
            f"rank {faults.busy_rank} on h{faults.busy_rank // options.per_host}",
            f"host h{faults.slow_host}",
            f"rank {faults.late_rank} on h{faults.late_rank // options.per_host}",
        ],
        "found": found["found"],
    }
    print(json.dumps(result))
    return 0
