"""A run whose keepers are all real loses keepers, hosts and a rack, and nothing of its state."""

from __future__ import annotations

import asyncio
import random
import shutil
import time

from benchmarks.fleet.meter import Meter
from benchmarks.fleet.run import Fleet, Save
from benchmarks.fleet.trainers import Host, image_of
from holdfast.errors import ArenaError
from holdfast.format.manifest import AttemptId
from holdfast.protocol.arena import SlotFile

#: How long the images of lost hosts may take to be made anew.
ANEW_S = 120.0


class Losses:
    """One life of such a run. AssertionError where something is lost, or came to nothing."""

    def __init__(self, fleet: Fleet, saves: int) -> None:
        self.fleet, self.saves = fleet, saves
        self.meter = Meter()

    async def tell(self) -> None:
        """The whole life."""
        fleet = self.fleet
        await self.start("the start")
        with self.meter.phase("the coordinator is killed: all are back"):
            await fleet.coordinator_killed()
            self.meter.pid = fleet.hosts[0].pid
        await self.save("save after the coordinator was killed")
        killed = random.Random(1).sample(range(1, len(fleet.hosts)), 2)
        with self.meter.phase("two keepers are killed: they are back"):
            await asyncio.gather(*(fleet.hosts[n].kill() for n in killed))
            await asyncio.gather(*(fleet.back(n) for n in killed))
        await self.save("save after two keepers were killed")
        if fleet.parity:
            await self.lose("two hosts are lost", self.two_hosts())
        if fleet.parity and len({host.domain for host in fleet.hosts}) > 2:
            rack = fleet.hosts[0].domain
            lost = [host for host in fleet.hosts if host.domain == rack]
            await self.lose("a rack is lost, with the coordinator", lost)
        with self.meter.phase("durable save"):
            save = await fleet.save(durable=True)
            await save.stored.wait()
        assert save.is_durable, save.reasons

    def two_hosts(self) -> list[Host]:
        """Two that are not of one group of parity: of one rack, where there are racks."""
        first, *others = self.fleet.hosts[1:]
        parity = self.fleet.parity
        return [first, *(each for each in others if each.domain == first.domain)][: min(2, parity)]

    async def start(self, what: str, parent: Save | None = None) -> None:
        """A new incarnation, and its first saves."""
        fleet, meter = self.fleet, self.meter
        generation = (fleet.incarnation, parent.step) if parent else None
        before = fleet.world
        await fleet.announce()
        meter.pid = fleet.hosts[0].pid
        with meter.phase(f"{what}: all attach and join"):
            await fleet.follow()
            await fleet.join()
            await fleet.adopt(generation, parent.attempt if parent else "")
        if parent is not None:
            with meter.phase(f"{what}: lost images are made anew"):
                await self.found(parent, before)
        await self.save(f"{what}: first save", is_first=True)
        for _ in range(self.saves):
            await self.save("save")

    async def save(self, what: str, *, is_first: bool = False) -> None:
        """A save that all complete, and that is protected."""
        fleet = self.fleet
        with self.meter.phase(what):
            save = await fleet.save()
        assert save.is_complete, f"{what}: {save.reasons}"
        if fleet.parity:
            with self.meter.phase(f"{what}: parity of it"):
                await save.shielded.wait()
            assert save.is_protected, f"{what}: {save.unprotected}"
        self.check(save, fleet.world)

    async def lose(self, what: str, lost: list[Host]) -> None:
        """These hosts are lost with their memory; the others start without them."""
        fleet, save = self.fleet, self.fleet.save_now
        with self.meter.phase(what):
            await asyncio.gather(*(host.kill() for host in lost))
            for host in lost:
                shutil.rmtree(host.arena)
            self.meter.pid = 0 if fleet.hosts[0] in lost else self.meter.pid
        fleet.hosts = [host for host in fleet.hosts if host not in lost]
        await self.start(what, save)

    async def found(self, save: Save, world: int) -> None:
        """Wait until all images of the save are in memory again."""
        deadline = time.monotonic() + ANEW_S
        while missing := self.missing(save, world):
            assert time.monotonic() < deadline, f"ranks {sorted(missing)} are lost of {save.step}"
            await asyncio.sleep(0.5)

    def check(self, save: Save, world: int) -> None:
        """Everything of this save is in memory, bit for bit."""
        missing = self.missing(save, world)
        assert not missing, f"ranks {sorted(missing)} are lost of {save.step}"

    def missing(self, save: Save, world: int) -> set[int]:
        """The ranks of whose state no living host has what was captured."""
        missing = set(range(world))
        for host in self.fleet.hosts:
            for path in host.arena.glob("*.slot"):
                try:
                    slot = SlotFile.open(path, writable=False)
                except ArenaError:
                    continue  # it is being made
                record = slot.read_record()
                if record is not None and (record.state, record.attempt) == (
                    "captured",
                    save.attempt,
                ):
                    self._compare(host, record.attempt_id, record.rank, slot)
                    missing.discard(record.rank)
                slot.close()
        return missing

    def _compare(self, host: Host, id_: AttemptId, rank: int, slot: SlotFile) -> None:
        expected, _ = image_of(host, id_, rank)
        assert bytes(slot.image[: len(expected)]) == expected, f"rank {rank} of step {id_.step}"


def racks(count: int) -> list[str]:
    """The rack of each host: four racks where there are enough hosts."""
    size = max(1, count // 4)
    return [f"rack{number // size}" for number in range(count)]
