"""Measure what a run of very many hosts costs its coordinator, over real sockets.

A few hosts have real keepers, the others are played: each is a sealed line to the coordinator's
keeper that says what a keeper says. A whole life of a run: all attach, join, save, the coordinator
is killed, a rack is lost and its images are made anew. Where all keepers are real (``--real`` as
many as ``--hosts``), hosts and a rack are lost in truth, and what was captured is compared.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import resource
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.fleet.losses import Losses, racks
from benchmarks.fleet.meter import (
    Hold,
    Meter,
    Tick,
    holds_in,
    most_memory,
    percentile,
    report_all_holds,
    ticks_in,
)
from benchmarks.fleet.players import PlayedHost
from benchmarks.fleet.relay import Relay
from benchmarks.fleet.run import Fleet
from benchmarks.fleet.trainers import Host
from benchmarks.kit import machine, markdown, processes, results
from benchmarks.kit.options import Parser
from holdfast.keeper.loop_watch import MOST_S

RACK = 16
SHARES = (0.5, 0.99, 0.999, 1.0)
MANY = results.Section(
    "Many hosts",
    "`python -m benchmarks fleet`: what a run of very many hosts costs its coordinator, over real\n"
    "sockets. A few hosts have real keepers, the others are played.",
)
REAL = results.Section(
    "Hosts and racks are lost",
    "`python -m benchmarks fleet --hosts 64 --real 64`: real keepers, of which some are killed;\n"
    "hosts and a rack are lost. After each, everything captured is compared bit for bit.",
)


def make(root: Path, options: Namespace) -> Fleet:
    """The hosts of the run: those that are real are one group of parity, if some are played."""
    fleet = Fleet(root, leaves=options.leaves, ranks=options.ranks)
    if options.delay:
        fleet.delay = Relay(options.delay, options.loss)
    if options.real >= options.hosts:
        fleet.parity = options.parity
        for number, rack in enumerate(racks(options.hosts)):
            address = f"127.0.{number // 200 + 1}.{number % 200 + 1}"
            fleet.hosts.append(Host(fleet, f"n{number:05}", address, rack))
        return fleet
    stride = options.hosts // options.real
    for number in range(options.hosts):
        name, rack = f"n{number:05}", f"rack{number // RACK:04}"
        if number % stride == 0 and len(fleet.hosts) < options.real:
            fleet.hosts.append(Host(fleet, name, "127.0.0.1", rack))
        else:
            fleet.played.append(PlayedHost(fleet, name, options.ranks, rack))
    return fleet


class Story:
    """One life of a run, and what its coordinator used in each phase."""

    def __init__(self, fleet: Fleet, saves: int, settled_s: float) -> None:
        self.fleet, self.saves, self.settled_s = fleet, saves, settled_s
        self.meter = Meter()
        self.traffic: dict[str, Counter[str]] = {}
        self.last_ask: list[tuple[float, float]] = []
        """Wall and processor time from the last host's request to the last grant."""

    async def tell(self) -> None:
        """The whole life."""
        fleet = self.fleet
        await self.start("the first start")
        await self.saving()
        await self.killed()
        fleet.parity = 1
        await self.start("a start with parity")
        await self.protecting()
        await self.rack_lost()

    async def start(self, what: str, parent: tuple[int, int] | None = None, pin: str = "") -> None:
        """All attach and join."""
        fleet, meter = self.fleet, self.meter
        await fleet.announce()
        meter.pid = fleet.hosts[0].pid
        with meter.phase(f"{what}: all hosts call"):
            await fleet.follow()
        with meter.phase(f"{what}: all ranks join"):
            await fleet.join()
            await fleet.adopt(parent, pin)
        await self.first_saves(what)

    async def first_saves(self, what: str) -> None:
        """Slots are made ahead of need after the first saves."""
        fleet, meter = self.fleet, self.meter
        fleet.traffic.clear()
        with meter.phase(f"{what}: first save"):
            await fleet.save()
            await self.protected()
        self.traffic[f"{what}: first save"] = Counter(fleet.traffic)
        for _ in range(3):
            await fleet.save()
            await self.protected()
            await asyncio.sleep(self.settled_s)  # slots are made ahead of need

    async def saving(self) -> None:
        """Steady saves, one whose last host is late, one that is stored, and none."""
        fleet, meter = self.fleet, self.meter
        for _ in range(self.saves):
            gc.collect()
            fleet.traffic.clear()
            with meter.phase("steady save"):
                await fleet.save()
                await asyncio.sleep(self.settled_s)
        self.traffic["steady save"] = Counter(fleet.traffic)
        for _ in range(self.saves):
            await self.last_host_late()
        idle_s = 5 * self.settled_s
        with meter.phase(f"nothing, for {idle_s:g} s"):
            await asyncio.sleep(idle_s)
        with meter.phase("durable save"):
            save = await fleet.save(durable=True)
            await save.stored.wait()
        assert save.is_durable, save.reasons

    async def last_host_late(self) -> None:
        """A save whose last host asks when all others have, and nobody else says anything."""
        fleet, meter = self.fleet, self.meter
        request = fleet.request()
        for asks in fleet.asks()[:-1]:
            asks(request)
        await asyncio.sleep(self.settled_s)
        began_s, used_s = time.monotonic(), meter.loop_s()
        fleet.asks()[-1](request)
        save = fleet.save_now
        while save.granted < fleet.world:
            await asyncio.sleep(0.002)
        self.last_ask.append((save.granted_s - began_s, meter.loop_s() - used_s))
        await fleet.ended()

    async def protected(self) -> None:
        """Wait until hosts keep parity of the last save, if they do."""
        if self.fleet.parity:
            await self.fleet.save_now.shielded.wait()
            assert self.fleet.save_now.is_protected, self.fleet.save_now.unprotected

    async def protecting(self) -> None:
        """Saves with parity."""
        for _ in range(self.saves):
            self.fleet.traffic.clear()
            with self.meter.phase("save, and parity of it"):
                await self.fleet.save()
                await self.protected()
        self.traffic["save, and parity of it"] = Counter(self.fleet.traffic)

    async def killed(self) -> None:
        """The coordinator is killed, and started by its ranks; all hosts call it."""
        fleet = self.fleet
        coordinator = fleet.hosts[0]
        await coordinator.kill()
        await asyncio.gather(*(_until_not(played.attached) for played in fleet.played))
        others = range(1, len(fleet.hosts))
        what = "coordinator killed"
        await coordinator.connect(range(fleet.per_host))
        self.meter.pid = coordinator.pid
        with self.meter.phase(f"{what}: all hosts call"):
            await coordinator.assign(0)
            await coordinator.join()
            await asyncio.gather(*(played.attached.wait() for played in fleet.played))
            await asyncio.gather(*map(fleet.call_again, others))
        with self.meter.phase(f"{what}: all ranks join"):
            await asyncio.gather(*(host.join() for host in fleet.hosts[1:]))
            await asyncio.gather(*(played.join() for played in fleet.played))
        await self.first_saves(what)

    async def rack_lost(self) -> None:
        """A rack is lost at once; a start without it makes its images anew."""
        fleet, meter = self.fleet, self.meter
        last = fleet.played[-1].domain
        lost = [played for played in fleet.played if played.domain == last]
        with meter.phase("a rack is lost"):
            for played in lost:
                played.stop()
            await asyncio.sleep(self.settled_s)
        fleet.played = [played for played in fleet.played if played not in lost]
        parent, pin = (fleet.incarnation, fleet.save_now.step), fleet.save_now.attempt
        await fleet.announce()
        with meter.phase("after the loss: all hosts call"):
            await fleet.follow()
        with meter.phase("after the loss: all ranks join"):
            await fleet.join()
        fleet.traffic.clear()
        with meter.phase("after the loss: regrouped, images made anew"):
            await fleet.adopt(parent, pin)
            while fleet.traffic["RebuildComplete"] < len(lost) * fleet.per_host:
                await asyncio.sleep(0.02)
            await asyncio.sleep(self.settled_s)
        with meter.phase("after the loss: first save"):
            await fleet.save()


async def _until_not(event: asyncio.Event) -> None:
    while event.is_set():
        await asyncio.sleep(0.05)


def shown_use(meter: Meter, holds: Sequence[Hold]) -> str:
    """The table of what the coordinator's keeper used, and how long the loop of any was held."""
    rows, since_s = [], 0.0
    for usage in meter.found:
        there = [hold.held_s for hold in holds if since_s < hold.ended_s <= usage.ended_s]
        since_s = usage.ended_s
        rows.append(
            [
                usage.phase,
                f"{usage.loop_s:.3f}",
                f"{usage.all_s:.2f}",
                f"{usage.wall_s:.2f}",
                f"{usage.memory_bytes / 1e6:.0f}",
                f"{len(there)}, {max(there):.2f}" if there else "",
            ]
        )
    head = ["what happens", "loop, CPU s", "all threads, CPU s", "wall s", "memory, MB"]
    return markdown.table([*head, "loops held, s"], rows)


def shown_ticks(meter: Meter, ticks: Sequence[Tick]) -> str:
    """The table of how long loops were held, by phase: as the clock says, and by what their own
    keepers worked meanwhile.
    """
    rows = []
    spans = [(one.phase, one.ended_s - one.wall_s, one.ended_s) for one in meter.found]
    for phase, since_s, until_s in [*spans, ("all", 0.0, math.inf)]:
        there = [tick for tick in ticks if since_s < tick.ended_s <= until_s]
        held = [max(0.0, tick.held_s) for tick in there]
        own = [max(0.0, min(tick.held_s, tick.used_s)) for tick in there]
        row = [phase, f"{len(there)}"]
        for values in (held, own):
            row += [f"{1e3 * percentile(values, share):.1f}" for share in SHARES]
            row.append(f"{sum(value > MOST_S for value in values)}")
        rows.append(row)
    shares = [f"{100 * share:g} %" for share in SHARES]
    head = ["what happens", "ticks", *shares, "over 50", *(f"own {one}" for one in shares)]
    return "Loops held, ms, percentiles of the ticks of all real keepers:\n\n" + markdown.table(
        [*head, "own over 50"], rows
    )


def shown_traffic(story: Story, hosts: int) -> str:
    """What was said in saves, and how long the last host's request took to become a grant."""
    parts = [
        "From the last host's request to the last grant, wall s and CPU s of the loop: "
        + ", ".join(f"{wall:.3f} {used:.3f}" for wall, used in story.last_ask)
    ]
    for what, traffic in story.traffic.items():
        kinds = [kind for kind in traffic if not kind.endswith(" bytes")]
        rows = []
        for kind in kinds:
            count, size = traffic[kind], traffic[f"{kind} bytes"]
            rows.append([kind, f"{count / hosts:.3f}", f"{size / count:.0f}"])
        head = ["message", "a host", "bytes"]
        parts.append(f"Messages of a host, and bytes of one ({what}):\n\n")
        parts[-1] += markdown.table(head, rows)
    return "\n\n".join(parts)


def shown_memory(meter: Meter, hosts: int) -> str:
    """The memory of keepers beside what a coordinator may have."""
    coordinator, *others = [f"{size / 1e6:.0f}" for size in meter.keepers] or ["?"]
    most = max((one.memory_bytes for one in meter.found), default=0)
    text = (
        f"Memory without the arena, MB: the coordinator at most {most / 1e6:.0f}, at the end "
        f"{coordinator} (allowed: {most_memory(hosts) / 1e6:.0f})"
    )
    if others:
        middle, last = sorted(meter.keepers[1:])[len(others) // 2], max(meter.keepers[1:])
        text += f"; of {len(others)} others the median {middle / 1e6:.0f}, at most {last / 1e6:.0f}"
    return text + "."


def shown(story: Story | Losses, options: Namespace, ticks: Sequence[Tick]) -> str:
    """All tables."""
    holds = holds_in(story.fleet.root)
    parts = [f"{options.hosts} hosts, {options.ranks} ranks each, {options.leaves} leaves:"]
    parts.append(shown_use(story.meter, holds))
    parts.append(shown_memory(story.meter, options.hosts))
    if isinstance(story, Story):
        parts.append(shown_traffic(story, options.hosts))
    parts.append(shown_ticks(story.meter, ticks))
    return "\n\n".join(parts)


def options_of(arguments: Sequence[str]) -> Namespace:
    """What is asked for."""
    parser = Parser("fleet", __doc__, quick="128 hosts", quick_settings={"hosts": 128, "saves": 2})
    parser.add_argument("--hosts", type=int, default=2048, help="how many (2048)")
    parser.add_argument("--real", type=int, default=8, help="how many have real keepers (8)")
    parser.add_argument("--ranks", type=int, default=8, help="of a host (8)")
    parser.add_argument("--leaves", type=int, default=16, help="of the state (16)")
    parser.add_argument("--saves", type=int, default=5, help="of each kind (5)")
    parser.add_argument("--parity", type=int, default=2, help="where all keepers are real (2)")
    parser.add_argument("--settled", type=float, default=1, help="seconds between phases (1)")
    parser.add_argument("--delay", type=float, default=0, help="of the network, in s, each way (0)")
    parser.add_argument("--loss", type=float, default=0, help="of all packets, with --delay (0)")
    parser.add_document()
    return parser.parse(arguments)


def main(arguments: Sequence[str]) -> int:
    """1 where a save came to nothing that should not, or the coordinator has too much memory."""
    options = options_of(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-bench-") as directory:
        os.environ["HOLDFAST_ARENA_DIR"] = f"{directory}/arena"
        os.environ["PYTHONPATH"] = report_all_holds(Path(directory, "changes"))
        fleet = make(Path(directory, "root"), options)
        story = story_of(fleet, options)
        try:
            asyncio.run(told(story))
        finally:
            processes.end_descendants(0)
            text = shown(story, options, ticks_in(Path(directory, "changes")))
            print(text)
        if options.document:
            facts = machine.facts(Path(directory), ("msgspec",))
            found = {"phases": [asdict(usage) for usage in story.meter.found]}
            name, section = ("fleet", MANY) if fleet.played else ("fleet-losses", REAL)
            text = f"{markdown.heading(facts, is_short=True)}\n\n{text}"
            kind = f"{name}-{options.hosts}"
            results.keep(kind, facts, found, text, document=True, block=name, section=section)
    for reason in fleet.aborted:
        print(f"came to nothing: {reason}", file=sys.stderr)
    over = story.meter.over_memory(options.hosts)
    print(*over, sep="\n", file=sys.stderr)
    return int(bool(fleet.aborted or over))


def story_of(fleet: Fleet, options: Namespace) -> Story | Losses:
    """What this run lives through."""
    if fleet.played:
        return Story(fleet, options.saves, options.settled)
    return Losses(fleet, options.saves)


async def told(story: Story | Losses) -> None:
    """The story, to its end or its failure."""
    try:
        await story.tell()
        pids = (host.pid for host in story.fleet.hosts)
        story.meter.keepers = [processes.own_memory(pid) for pid in pids]
    finally:
        story.fleet.end()
