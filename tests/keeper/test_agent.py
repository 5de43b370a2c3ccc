"""An agent carries out the same orders in the same way on the coordinator's host and on others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordinator.actions import AllocateSlots, RemoveSlot
from holdfast.coordinator.slots import SlotWriter
from holdfast.format.manifest import AttemptId, ImageId
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.agent import HostAgent, WriteService
from holdfast.keeper.hosts.host_reports import to_column
from holdfast.keeper.image_writer import HostWrite
from holdfast.keeper.jobs import Background
from holdfast.protocol import messages as m
from holdfast.protocol.arena import PAGE_BYTES, SlotRecord, process_start
from holdfast.protocol.facts import Fact
from holdfast.storage.memory import MemoryStore
from support.runs.keepers import RUN

ME = SlotWriter(os.getpid(), process_start(os.getpid()))
OF = AttemptId(1, 7, "a", 1, "l")


class Trainer:
    def __init__(self) -> None:
        self.heard: list[m.Message] = []

    def send(self, message: m.Message) -> None:
        self.heard.append(message)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.002)


def agent_of(arena: Path) -> HostAgent:
    background = Background()
    memory = ArenaFiles(arena, RUN)
    agent = HostAgent(memory, background)
    agent.writes = WriteService(memory, MemoryStore(), background)
    return agent


def grant(state: str = "writing") -> host_messages.GrantSlots:
    return host_messages.GrantSlots(
        record=SlotRecord(state=state, incarnation=1, step=7, attempt="a", world=1, layout="l"),
        lines=(5,),
        ranks=(0,),
        slots=(3,),
        ring_bytes=to_column([0]),
        request_number=to_column([1]),
        durable=False,
        compare=None,
    )


@pytest.mark.parametrize("is_far", [False, True])
def test_an_agent_does_and_reports_the_same_for_a_coordinator_here_and_elsewhere(
    arena_dir: Path, is_far: bool
) -> None:
    told: list[Fact] = []
    trainer: Any = Trainer()

    def report(fact: Fact) -> None:
        told.append(host_messages.from_follower(host_messages.pack(fact)) if is_far else fact)

    async def play() -> None:
        agent = agent_of(arena_dir)
        agent.serve(report, {5: ME}.get, {5: trainer}.get)

        def order(fact: Fact) -> None:
            agent.do(host_messages.from_coordinator(host_messages.pack(fact)) if is_far else fact)

        order(AllocateSlots(3, PAGE_BYTES))
        await until(lambda: bool(told))
        assert told.pop() == host_messages.SlotsCreated(made={3: (PAGE_BYTES, 0)})
        order(grant())
        (granted,) = trainer.heard
        assert isinstance(granted, m.Grant) and granted.attempt == "a"
        file = agent._memory.files[3]
        record = file.read_record()
        assert record is not None and (record.rank, record.writer_pid) == (0, ME.pid)
        job = HostWrite("a", OF.generation, b"", agent.writes.images(write_order(), report), "d")
        agent.writes.begin(job)
        agent.writes.copied("a", 0, 100)
        image = ImageId(0, PAGE_BYTES, "1" * 16, "2" * 16)
        agent.sealed(OF, [(3, image)], is_ring=False)
        assert job.images[0].header_xxh3 == "1" * 16
        agent.writes.end(job)
        order(host_messages.WatchWriter(slot=3, attempt="a", writer=ME))
        agent.tick()
        assert told == []  # it may write still
        order(grant())
        assert not agent._watched  # nor is a slot watched for an earlier attempt
        order(
            host_messages.WatchWriter(slot=3, attempt="a", writer=ME._replace(start=ME.start + 1))
        )
        agent.tick()
        assert told.pop() == host_messages.WriterGone(slot=3, attempt="a")
        order(host_messages.SizeImages(layout="unknown", ranks=(0,)))
        planned = told.pop()
        assert (
            isinstance(planned, host_messages.ImagesPlanned) and "unknown" in planned.sizes.reason
        )
        order(RemoveSlot(3))
        assert not agent._memory.slot_path(3).exists()

    asyncio.run(play())


def write_order() -> host_messages.WriteImage:
    image = host_messages.ImageOrder(
        slot=3, image=ImageId(0, PAGE_BYTES, "", ""), ring_bytes=0, is_sealed=False
    )
    return host_messages.WriteImage(directory="d", attempt_id=OF, images=(image,))


@pytest.mark.promise
def test_memory_made_for_a_coordinator_that_decides_no_more_is_given_back(
    arena_dir: Path,
) -> None:
    """The same coordinator may decide again: what it ordered before counts for nothing."""
    told: list[Fact] = []

    async def play() -> None:
        agent = agent_of(arena_dir)
        agent.serve(told.append)
        agent.do(AllocateSlots(3, PAGE_BYTES))
        agent.serve(told.append)
        await until(lambda: not agent.allocator._being_made and not agent.allocator._unmapping)
        assert told == [] and not agent._memory.slot_path(3).exists()
        assert agent._memory.files == {}
        agent.do(AllocateSlots(4, PAGE_BYTES))
        await until(lambda: bool(told))
        assert told == [host_messages.SlotsCreated(made={4: (PAGE_BYTES, 0)})]

    asyncio.run(play())
