"""Reports of a host's ranks: joined by its keeper, taken apart by the coordinator's."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordinator.actions import Action, ReportOutcome, SendMessage
from holdfast.coordinator.attempt_lifecycle import AttemptLifecycle
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.requests import REQUESTS_HELD_S, RankReport
from holdfast.coordinator.slots import SlotWriter
from holdfast.errors import Fenced, FormatError
from holdfast.format.manifest import AttemptId, ImageId
from holdfast.geometry.layout import table_hash
from holdfast.keeper.connections import ForwardedConnection, Ranks, TrainerConnection, send_to_all
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.follower import Follower
from holdfast.keeper.hosts.followers import MOST_SAID, FollowerRegistry, FollowerSession, _Trainer
from holdfast.keeper.hosts.host_reports import decode_reports, encode_reports, to_column
from holdfast.keeper.rank_relay import MOST_BYTES, ReportJoiner, grant_slots
from holdfast.keeper.trainer_api import TrainerApi
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotRecord
from support.coordinator.coordinators import Keeper, granted, table

small, digits = st.integers(0, 3), st.text("0123456789abcdef", min_size=16, max_size=16)
asks = st.builds(
    m.RequestCapture,
    step=st.just(7),
    table=st.sampled_from(["t", "u"]),
    values_bytes=small,
    durable=st.booleans(),
    exact=st.booleans(),
    request_number=small,
    updates=st.sampled_from([(), (("a", 1),), (("a", 1), ("b", 2))]),
    is_copying=st.booleans(),
    spare_ms=small,
)
seals = st.builds(
    m.Captured,
    attempt=st.just("a"),
    image_bytes=st.integers(1, 3),
    header_xxh3=digits,
    table_xxh3=digits,
    sums=st.sampled_from([(), (b"x", b"y")]),
    same_since=st.integers(-2, 2),
)


@pytest.mark.promise
@given(
    st.dictionaries(st.integers(0, 99), asks, min_size=1)
    | st.dictionaries(st.integers(0, 99), seals, min_size=1)
)
def test_whatever_is_joined_is_taken_apart_again(reports: dict[int, RankReport]) -> None:
    fact = host_messages.from_follower(host_messages.pack(encode_reports(reports)))
    assert isinstance(fact, host_messages.HostRequests | host_messages.HostCaptured)
    assert list(decode_reports(fact).items()) == list(reports.items())


ASK = m.RequestCapture(step=7, table="t", values_bytes=1, durable=False)
SEAL = m.Captured(attempt="a", image_bytes=1, header_xxh3="0" * 16, table_xxh3="f" * 16)


@pytest.mark.parametrize(
    "change",
    [
        {"lines": (1, 1)},
        {"table": ((), ())},
        {"table": (("t", "u"), (0,))},
        {"table": (("t",), (0, 1))},
        {"table": (("t",), (0, -1))},
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    fact: Any = msgspec.structs.replace(encode_reports({1: ASK, 2: ASK}), **change)
    with pytest.raises(FormatError):
        decode_reports(fact)
    sealed: Any = msgspec.structs.replace(encode_reports({1: SEAL, 2: SEAL}), seals=b"x" * 31)
    with pytest.raises(FormatError):
        decode_reports(sealed)


# ── on the host of the ranks ─────────────────────────────────────────────────────────────────


def connection(number: int) -> Any:
    return SimpleNamespace(number=number, rank=number)


def joined_by(count: int) -> tuple[ReportJoiner, list[list[int]]]:
    heard: list[list[int]] = []
    return ReportJoiner(count, lambda got: heard.append([c.number for c, _ in got])), heard


@pytest.mark.promise
def test_what_is_held_goes_before_any_other_message_of_the_host() -> None:
    async def play() -> None:
        joiner, heard = joined_by(3)
        assert joiner.take(connection(0), 0, ASK, 100)
        assert not heard
        assert not joiner.take(connection(1), 0, m.CancelRequest(step=7), 100)
        assert heard == [[0]]
        unclear = m.RequestCapture(step=-1, table="t", values_bytes=1, durable=False)
        assert joiner.take(connection(0), 0, SEAL, 100)
        assert not joiner.take(connection(1), 0, unclear, 100)
        assert not joiner.take(SimpleNamespace(number=2, rank=None), 0, ASK, 100)  # type: ignore[arg-type]
        assert heard == [[0], [0]]
        assert not joiner.take(connection(1), 0, SEAL, MOST_BYTES + 1), "too long to be joined"

    asyncio.run(play())


@pytest.mark.promise
def test_a_host_that_is_not_complete_says_what_it_has_within_a_moment() -> None:
    async def play() -> None:
        joiner, heard = joined_by(3)
        began_s = time.monotonic()
        for number in (0, 1):
            joiner.take(connection(number), 0, ASK, 100)
        async with asyncio.timeout(30):
            while not heard:
                await asyncio.sleep(0.01)
        assert time.monotonic() - began_s >= REQUESTS_HELD_S
        assert joiner.take(connection(2), 0, ASK, 100)
        assert heard == [[0, 1], [2]], "the last one does not wait"
        joiner.take(connection(0), 0, SEAL, 100)
        joiner.drop()
        joiner.flush()
        assert len(heard) == 2

    asyncio.run(play())


# ── where the coordinator is ─────────────────────────────────────────────────────────────────


class Line:
    why_broken = ""
    peer = "h1"

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(host_messages.from_coordinator(frame))


class Trainer(TrainerConnection):
    def __init__(self, number: int) -> None:
        super().__init__(SlotWriter(10 + number, 1), number)
        self.heard: list[m.Message] = []

    def send(self, message: m.Message, seq: int = 0) -> None:
        self.heard.append(message)


@pytest.mark.promise
def test_a_joined_report_overtakes_nothing_that_its_ranks_said_before() -> None:
    handled: list[str] = []

    class Dispatcher:
        def handle_joined(self, reports: Any) -> None:
            handled.append("joined")

        async def handle(self, connection: Any, seq: int, message: m.Message) -> None:
            handled.append(type(message).__name__)

        def connected(self, _: Any) -> None: ...
        def disconnected(self, _: Any) -> None: ...

    async def play() -> None:
        tasks = []
        spawn = SimpleNamespace(spawn=lambda task: tasks.append(asyncio.ensure_future(task)))
        coordinator: Any = SimpleNamespace()
        nothing: Any = None
        registry = FollowerRegistry(coordinator, spawn, nothing, nothing, nothing)  # type: ignore[arg-type]
        registry.dispatcher = cast(Any, Dispatcher())
        line: Any = Line()
        session = FollowerSession(1, line, "/arena")
        for number in (1, 2):
            came = host_messages.TrainerConnected(line=number, process=SlotWriter(number, 1))
            registry._handle(session, came)
        table = m.pack(m.LeafTable(hash="t", deflated=b""))[m.LENGTH_BYTES :]
        registry._handle(session, host_messages.TrainerMessage(line=1, body=table))
        registry._handle(session, encode_reports({1: ASK, 2: ASK, 9: ASK}))
        assert handled == []
        for _ in range(5):
            await asyncio.sleep(0)
        assert handled.index("LeafTable") < handled.index("RequestCapture")
        assert sorted(handled) == ["LeafTable", "RequestCapture", "RequestCapture"]
        registry._handle(session, encode_reports({1: ASK, 2: ASK}))
        assert handled[3:] == ["joined"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(play())


def test_a_trainer_that_makes_no_sense_is_hung_up_on_once_and_never_heard_again() -> None:
    handled: list[str] = []

    class Dispatcher:
        async def handle(self, connection: Any, seq: int, message: m.Message) -> None:
            await asyncio.sleep(0)
            handled.append(type(message).__name__)

        def handle_joined(self, reports: Any) -> None:
            raise NotImplementedError

        def connected(self, _: Any) -> None:
            handled.append("connected")

        def disconnected(self, _: Any) -> None:
            handled.append("disconnected")

    async def play() -> None:
        tasks = []
        spawn = SimpleNamespace(spawn=lambda task: tasks.append(asyncio.ensure_future(task)))
        coordinator: Any = SimpleNamespace()
        nothing: Any = None
        registry = FollowerRegistry(coordinator, spawn, nothing, nothing, nothing)  # type: ignore[arg-type]
        registry.dispatcher = cast(Any, Dispatcher())
        line: Any = Line()
        session = FollowerSession(1, line, "/arena")
        registry._handle(session, host_messages.TrainerConnected(line=1, process=SlotWriter(1, 1)))
        asked = m.pack(m.ListInventory())[m.LENGTH_BYTES :]
        for body in (asked, asked, b"no message", asked):
            registry._handle(session, host_messages.TrainerMessage(line=1, body=body))
        assert len(tasks) == 1, "messages of one trainer are handled one after the other"
        await tasks[0]
        registry._handle(session, host_messages.TrainerMessage(line=1, body=asked))
        registry._handle(session, host_messages.TrainerGone(line=1))
        await asyncio.sleep(0)
        assert len(tasks) == 1
        assert handled == ["connected", "ListInventory", "ListInventory", "disconnected"]
        assert [type(said) for said in line.sent] == [host_messages.HangUp]
        registry._handle(session, host_messages.TrainerConnected(line=2, process=SlotWriter(2, 1)))
        assert len(tasks) == 1, "who says nothing takes no task"
        registry._handle(session, host_messages.TrainerMessage(line=2, body=asked))
        registry._handle(session, host_messages.TrainerGone(line=2))
        await asyncio.gather(*tasks)
        assert handled[4:] == ["connected", "ListInventory", "disconnected"]

    asyncio.run(play())


def api_of(request_captures: Any) -> TrainerApi:
    api: Any = TrainerApi.__new__(TrainerApi)
    api.ranks, api._traces = Ranks(), set()
    api.coordinator = SimpleNamespace(
        request_captures=request_captures, divide_requests=lambda requests: [requests]
    )
    api.executor = SimpleNamespace(
        carry_out=lambda _: None, followers=SimpleNamespace(parity_scheduler=None)
    )
    found: TrainerApi = api
    return found


@pytest.mark.parametrize(
    "fact",
    [
        host_messages.SlotsFailed(slots=(), reason="no memory"),
        host_messages.SlotsCreated(made={}),
        host_messages.SlotsFailed(slots=(7,), reason="no memory"),
    ],
)
def test_a_host_that_tells_of_slots_that_nobody_asked_for_is_not_listened_to(fact: Any) -> None:
    coordinator: Any = SimpleNamespace(slots={})
    nothing: Any = None
    registry = FollowerRegistry(coordinator, nothing, nothing, nothing, nothing)
    line: Any = SimpleNamespace(peer="host b")
    session = FollowerSession(1, line, "/arena")
    assert registry._memory_changed(session, fact) == []


def test_a_process_without_a_place_among_the_ranks_is_answered_alone() -> None:
    heard: list[Any] = []
    api = api_of(lambda requests, _: heard.append(dict(requests)))
    here, stranger = Trainer(0), Trainer(1)
    api.ranks.take_place(here, 3)
    with pytest.raises(Fenced):
        api.ranks.require(stranger)
    api.handle_joined([(here, ASK), (stranger, ASK)])
    assert heard == [{3: ASK}]
    (skip,) = stranger.heard
    assert isinstance(skip, m.Skip) and "no place" in skip.reason and not here.heard


def test_an_error_that_nobody_expects_is_the_answer_to_all_who_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("unexpected")

    api, trainers = api_of(fail), [Trainer(0), Trainer(1)]
    for rank, trainer in enumerate(trainers):
        api.ranks.take_place(trainer, rank)
    api.handle_joined([(trainer, ASK) for trainer in trainers])
    assert [type(message) for trainer in trainers for message in trainer.heard] == [m.Skip, m.Skip]
    assert "unexpected" in capsys.readouterr().err


class Faulty(Coordinator):
    """Fails at the requests of rank 2."""

    def request_capture(self, rank: int, request: m.RequestCapture, now_s: float) -> list[Action]:
        if rank == 2:
            raise KeyError("unexpected")
        return super().request_capture(rank, request, now_s)


class FaultyLifecycle(AttemptLifecycle):
    """Fails at the image of rank 2."""

    def captured(self, rank: int, seal: m.Captured, now_s: float) -> list[Action]:
        if rank == 2:
            raise KeyError("unexpected")
        return super().captured(rank, seal, now_s)


@pytest.mark.promise
def test_an_error_about_one_rank_costs_its_host_mates_nothing_that_is_decided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keeper = Keeper(4)
    attempt = keeper.capture(1)
    keeper.c.__class__, keeper.c.lifecycle.__class__ = Faulty, FaultyLifecycle
    api, trainers = api_of(None), [Trainer(rank) for rank in range(4)]
    done: list[Action] = []
    published: list[Any] = []
    api.coordinator = keeper.c
    executor: Any = SimpleNamespace(
        carry_out=done.extend,
        captured=lambda name, ranks: published.append((name, sorted(ranks))),
        followers=SimpleNamespace(parity_scheduler=None),
    )
    api.executor = executor
    for rank, trainer in enumerate(trainers):
        api.ranks.take_place(trainer, rank)
    ask = msgspec.structs.replace(ASK, table=table_hash(table(4)), step=5)
    keeper.c.leaving(3)  # so they are told one by one that nobody captures it
    api.handle_joined([(trainer, ask) for trainer in trainers[:3]])
    told = {a.rank for a in done if isinstance(a, SendMessage) and isinstance(a.message, m.Skip)}
    assert told == {0, 1}, "what was decided about them is lost"
    (answer,) = trainers[2].heard
    assert isinstance(answer, m.Skip) and "unexpected" in answer.reason
    seal = m.Captured(attempt=attempt, image_bytes=1, header_xxh3="0" * 16, table_xxh3="f" * 16)
    api.handle_joined([(trainer, seal) for trainer in trainers])
    assert published == [(attempt, [0, 1, 2, 3])], "the images of the others are not released"
    assert "unexpected" in capsys.readouterr().err


def test_a_host_publishes_what_its_ranks_reported_and_nothing_that_they_did_not() -> None:
    follower: Any = Follower.__new__(Follower)
    follower._captured = {4: SEAL, 5: SEAL}
    told = host_messages.SlotsSealed(
        slots=(9,), ranks=(4,), is_ring=False, attempt_id=AttemptId(1, 7, "a", 8, "layout")
    )
    assert [*follower._images_of(told)] == [(9, ImageId(4, 1, "0" * 16, "f" * 16))]
    for wrong in ({"ranks": (6,)}, {"attempt_id": AttemptId(1, 8, "b", 8, "layout")}):
        with pytest.raises(FormatError, match="did not report"):
            [*follower._images_of(msgspec.structs.replace(told, **wrong))]


def test_what_all_ranks_are_told_is_sent_once_to_each_other_host() -> None:
    lines = [Line(), Line()]
    everybody: list[TrainerConnection] = [Trainer(0)]
    for number, line in enumerate(lines):
        for rank in (1, 2):
            there: Any = line
            everybody.append(ForwardedConnection(there, 10 * number + rank, SlotWriter(1, 1)))
    done = m.Complete(step=1, attempt="a", durable=False)
    send_to_all(everybody, done)
    assert everybody[0].heard == [done]  # type: ignore[attr-defined]
    assert [[said.lines for said in line.sent] for line in lines] == [[(1, 2)], [(11, 12)]]
    assert lines[0].sent[0].frame == m.pack(done)


def test_a_trainer_that_says_too_much_is_cut_off() -> None:
    hung_up: list[int] = []
    trainer: Any = _Trainer(SimpleNamespace(disconnect=lambda: hung_up.append(1)))  # type: ignore[arg-type]
    assert trainer.is_idle
    for _ in range(MOST_SAID + 1):
        trainer.queue(b"")
    assert hung_up == [1] and not trainer.is_idle


def test_a_slot_that_nobody_can_write_to_is_stamped_free() -> None:
    """Its rank is gone when the grant is made: no writer's end would ever be heard of."""
    stamped: dict[int, SlotRecord] = {}
    memory: Any = SimpleNamespace(stamp=stamped.__setitem__, slot_path=lambda slot: f"/{slot}")
    published: Any = SimpleNamespace(withdraw=lambda slot: None)
    record = SlotRecord(state="writing", incarnation=1, step=3, attempt="a", world=2, layout="l")
    sent: list[m.Message] = []
    trainer: Any = SimpleNamespace(send=sent.append)
    order = host_messages.GrantSlots(
        record=record,
        lines=(7, -1),
        ranks=(0, 1),
        slots=(4, 5),
        ring_bytes=to_column([0, 0]),
        request_number=to_column([1, 1]),
        durable=False,
        compare=None,
    )
    writers, trainers = {7: SlotWriter(11, 12)}, {7: trainer}
    grant_slots(order, memory, published, writers.get, trainers.get)
    assert (stamped[4].state, stamped[4].writer_pid) == ("writing", 11)
    assert (stamped[5].state, stamped[5].rank) == ("free", 1)
    assert [message.slot for message in sent if isinstance(message, m.Grant)] == ["/4"]


@pytest.mark.promise
def test_images_are_served_before_anybody_is_told_that_all_are_captured() -> None:
    """Parity of them is ordered then, and other hosts ask this one for what it has captured."""
    keeper = Keeper(2)
    attempt = granted(keeper.ask_all(1))
    size = keeper.c.slots[keeper.c.attempts[attempt].slots[0]].image_bytes
    seal = m.Captured(attempt=attempt, image_bytes=size, header_xxh3="0" * 16, table_xxh3="f" * 16)
    api, trainers = api_of(None), [Trainer(rank) for rank in range(2)]
    done: list[Any] = []
    api.coordinator = keeper.c
    executor: Any = SimpleNamespace(
        carry_out=done.extend, captured=lambda name, ranks: done.append((name, sorted(ranks)))
    )
    api.executor = executor
    for rank, trainer in enumerate(trainers):
        api.ranks.take_place(trainer, rank)
    api.handle_joined([(trainer, seal) for trainer in trainers])
    notes = [one for one in done if isinstance(one, tuple | ReportOutcome)]
    assert [one if isinstance(one, tuple) else one.what for one in notes] == [
        (attempt, [0, 1]),
        "complete",
    ]
