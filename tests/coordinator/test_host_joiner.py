"""What the ranks of a host report is joined, and the coordinator hears all of it, in its order.

The joiner alone, in every order of short stories; then hosts with their joiners around a
coordinator, in every order in which their ranks ask, with every mishap at every moment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from itertools import permutations, product

import pytest

from holdfast.coordinator.actions import Action, GrantSlot
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.requests import (
    CAPTURED_HELD_S,
    REQUESTS_HELD_S,
    CaptureRequests,
    HostJoiner,
    HostReports,
    RankReport,
)
from holdfast.geometry.layout import table_hash
from holdfast.protocol import messages as m
from support.coordinator.coordinators import GRANT_S, Keeper, table
from support.coordinator.joined_hosts import MISHAPS, JoinedWorld, Story


def ask(step: int) -> m.RequestCapture:
    return m.RequestCapture(step=step, table="t", values_bytes=10, durable=False)


def seal(attempt: str) -> m.Captured:
    return m.Captured(attempt=attempt, image_bytes=1, header_xxh3="h", table_xxh3="t")


# ── the joiner alone ─────────────────────────────────────────────────────────────────────────


def test_the_last_rank_of_a_host_sends_the_reports_of_all_at_once() -> None:
    joiner = HostJoiner(3)
    assert joiner.add(0, ask(7), 1.0) == joiner.add(2, ask(7), 1.01) == []
    assert joiner.due_s == 1.0 + REQUESTS_HELD_S
    assert joiner.add(1, ask(7), 1.02) == [{0: ask(7), 2: ask(7), 1: ask(7)}]
    assert joiner.due_s == math.inf and joiner.flush() == []


def test_nobody_waits_for_a_rank_that_reported_before() -> None:
    joiner = HostJoiner(3)
    joiner.add(0, seal("a"), 1.0)
    assert joiner.due_s == 1.0 + CAPTURED_HELD_S
    assert joiner.flush() == [{0: seal("a")}]
    assert joiner.add(1, seal("a"), 2.0) == []
    assert joiner.add(2, seal("a"), 2.0) == [{1: seal("a"), 2: seal("a")}]


@pytest.mark.promise
def test_a_rank_that_asks_for_another_step_or_once_more_is_told_apart() -> None:
    joiner = HostJoiner(3)
    joiner.add(0, ask(7), 1.0)
    assert joiner.add(1, ask(8), 1.0) == [{0: ask(7)}]
    assert joiner.add(1, ask(8), 1.0) == [{1: ask(8)}]
    assert joiner.add(1, seal("a"), 1.0) == [{1: ask(8)}]
    assert joiner.flush() == [{1: seal("a")}]


REPORTS: tuple[RankReport, ...] = (ask(1), ask(2), seal("a"))


@pytest.mark.parametrize(("count", "length"), [(1, 3), (2, 4), (3, 3)])
def test_nothing_is_lost_repeated_or_reordered_whatever_is_reported(
    count: int, length: int
) -> None:
    moves = [*product(range(count), REPORTS), (-1, REPORTS[0])]
    for story in product(moves, repeat=length):
        joiner, heard = HostJoiner(count), list[tuple[int, RankReport]]()
        for now, (rank, report) in enumerate(story):
            joined = joiner.flush() if rank < 0 else joiner.add(rank, report, now)
            for reports in joined:
                assert len({type(each) for each in reports.values()}) == 1
                heard += reports.items()
            assert joiner.due_s <= now + CAPTURED_HELD_S or joiner.due_s == math.inf
        heard += [each for reports in joiner.flush() for each in reports.items()]
        assert heard == [move for move in story if move[0] >= 0]


# ── around a coordinator ─────────────────────────────────────────────────────────────────────


def stories(world: int, mishaps: tuple[str, ...], *, all_orders: bool) -> Iterator[Story]:
    orders = [(0, *rest) for rest in permutations(range(1, world))]
    for asks in permutations(range(world)) if all_orders else orders:
        yield from (Story(asks, frozenset({n})) for n in range(world))
        yield Story(asks, frozenset(range(world)))
        for mishap, at in product(mishaps, range(1, world)):
            yield Story(asks, frozenset(), mishap, at)
            yield Story(asks, frozenset({at}), mishap, at)


def play_all(kind: type[JoinedWorld], hosts: int, per_host: int, *, all_orders: bool) -> int:
    played = 0
    for story in stories(hosts * per_host, MISHAPS, all_orders=all_orders):
        world = kind()
        world.begin_with(hosts, per_host)
        try:
            world.play(story)
            end_well(world, story)
        except Exception as error:
            error.add_note(str(story))
            raise
        played += 1
    return played


def end_well(world: JoinedWorld, story: Story) -> None:
    """All that asked are answered, and as if nothing had been joined; the next save is healthy."""
    world.finish()
    world.pass_time(CAPTURED_HELD_S)
    newest = world.keeper.attempts.newest_complete()
    if not story.mishap:
        assert newest is not None and newest.step == len(world.saves) - 1, "nothing was captured"
    elif story.mishap in ("dies", "is cut off", "declines"):
        culprit = story.asks[story.at - 1]
        assert all(str(culprit) in reason for _, reason in world.told), world.told
    world.pass_time(GRANT_S + 1)
    assert story.mishap or not world.told, "somebody was waited for, though all have asked"
    for process in world.trainers():
        world.take_messages(process)
    assert not [p.rank for p in world.trainers(lambda p: p.waits_for is not None)]
    world.ranks_are_there()
    world.go_on()
    world.pass_time(CAPTURED_HELD_S)
    world.check()
    if world.keeper.absence.reason or world.told:  # who was waited for in vain is back when it asks
        world.go_on()
        world.pass_time(CAPTURED_HELD_S)
    newest = world.keeper.attempts.newest_complete()
    assert newest is not None
    assert newest.generation == (world.incarnation, len(world.saves) - 1)


@pytest.mark.promise
def test_two_hosts_of_two_ranks_in_any_order_with_any_mishap() -> None:
    assert play_all(JoinedWorld, 2, 2, all_orders=False) > 250


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (3, 2), (4, 1)])
def test_more_hosts_and_ranks_in_any_order_with_any_mishap(hosts: int, per_host: int) -> None:
    """Of six ranks the first to ask is always rank 0: another order of its host's is no other."""
    assert play_all(JoinedWorld, hosts, per_host, all_orders=hosts * per_host < 6) > 1000


# ── as one after the other ───────────────────────────────────────────────────────────────────


class OneByOne(Coordinator):
    """Takes joined requests apart."""

    def divide_requests(
        self, requests: Mapping[int, m.RequestCapture]
    ) -> list[Mapping[int, m.RequestCapture]]:
        super().divide_requests(requests)
        return [{rank: request} for rank, request in requests.items()]


def request_joined(
    keeper: Keeper, requests: Mapping[int, m.RequestCapture], now_s: float
) -> list[Action]:
    """What follows of joined requests, as the keeper hands them on."""
    actions: list[Action] = []
    for part in keeper.c.divide_requests(requests):
        actions += keeper.with_memory(keeper.c.request_captures(part, now_s))
    return actions


def test_a_rank_that_is_back_is_waited_for_by_those_of_its_host_that_asked_before_it() -> None:
    keeper = Keeper(2)
    keeper.ask(0, 1)
    keeper.c.tick(GRANT_S + 1)
    assert keeper.c.absence.reason
    request = m.RequestCapture(
        step=2, table=table_hash(table(2)), values_bytes=10, durable=False, is_copying=False
    )
    actions = request_joined(keeper, {0: request, 1: request}, 40.0)
    assert any(isinstance(action, GrantSlot) for action in actions)


WORLD, MOVES = 4, ("ask", "ask", "ask", "seal", "seal", "abort", "cancel", "tick", "lose")


def random_story(keeper: Keeper, seed: int) -> Iterator[list[Action]]:
    """What a coordinator answers to moves that the seed chooses: the same for the same answers."""
    chance, now_s, step = random.Random(seed), 0.0, 0
    for _ in range(40):
        now_s += chance.choice([0.01, 0.01, GRANT_S])
        move, rank = chance.choice(MOVES), chance.randrange(WORLD)
        open_ = [a.id for a in keeper.c.attempts.values() if a.is_open]
        match move:
            case "ask":
                step += chance.random() < 0.6
                ranks = chance.choice([range(WORLD), (0, 1), (2, 3), (3,)])
                durable, is_copying = chance.random() < 0.3, chance.random() < 0.5
                request = m.RequestCapture(
                    step=step - (chance.random() < 0.1),
                    table=table_hash(table(WORLD)),
                    values_bytes=10,
                    durable=durable,
                    exact=durable,
                    is_copying=is_copying,
                )
                asks = {r: request for r in ranks if chance.random() < 0.95}
                if asks:
                    yield request_joined(keeper, asks, now_s)
            case "seal" if open_:
                for each in range(WORLD):
                    yield keeper.seal(each, open_[-1], now_s)
            case "abort" if open_:
                gone = m.AbortCapture(attempt=open_[0], reason="r", has_stopped=rank > 1)
                yield keeper.c.lifecycle.abort_capture(rank, gone)
            case "cancel":
                yield keeper.c.cancel_request(rank, step)
            case "tick":
                yield keeper.with_memory(keeper.c.tick(now_s))
            case "lose":
                yield keeper.c.lost(rank)
                yield keeper.c.join(rank, keeper.writer(rank), is_copying=rank > 1)


def test_joined_requests_are_decided_as_if_they_came_one_after_the_other() -> None:
    granted = 0
    for seed in range(200):
        joined, apart = Keeper(WORLD), Keeper(WORLD)
        apart.c.__class__ = OneByOne
        answers = zip(random_story(joined, seed), random_story(apart, seed), strict=True)
        for move, (one, other) in enumerate(answers):
            assert one == other, (seed, move)
            granted += any(isinstance(action, GrantSlot) for action in one)
        assert joined.states() == apart.states()
    assert granted > 200


# ── the search finds what it is there to find ────────────────────────────────────────────────


class LosesAReport(HostJoiner):
    def flush(self) -> list[HostReports]:
        return [dict(list(reports.items())[:1]) for reports in super().flush()]


class WaitsForAll(HostJoiner):
    """Holds what is held until the last rank has reported, however long that takes."""

    def flush(self) -> list[HostReports]:
        return super().flush() if len(self._reported) in (0, self._count) else []


class SaysAllAgain(HostJoiner):
    """What was passed on is passed on with the next reports too."""

    def flush(self) -> list[HostReports]:
        before, now = getattr(self, "last", []), super().flush()
        self.last = now or before
        return now and before + now


@pytest.mark.parametrize("broken", [LosesAReport, WaitsForAll, SaysAllAgain])
def test_a_joiner_with_a_known_mistake_is_found_out(broken: type[HostJoiner]) -> None:
    class Broken(JoinedWorld):
        joiner = broken

    with pytest.raises((AssertionError, KeyError, ValueError)):
        play_all(Broken, 2, 2, all_orders=False)


class CountsAHostTwice(CaptureRequests):
    def add_all(self, step: int, requests: Mapping[int, m.RequestCapture], now_s: float) -> None:
        super().add_all(step, requests, now_s)
        for rank, request in requests.items():
            super().add_all(step, {(rank + 1) % self._world: request}, now_s)


class GrantsWhenAllButOneHaveAsked(CaptureRequests):
    def pop_complete(self, step: int) -> dict[int, m.RequestCapture] | None:
        requested = self._by_step.get(step)
        if requested is None or len(requested.by_rank) < self._world - 1:
            return None
        missing = set(range(self._world)) - requested.by_rank.keys()
        any_request = next(iter(requested.by_rank.values()))
        self._pop(step)
        return requested.by_rank | dict.fromkeys(missing, any_request)


@pytest.mark.parametrize("broken", [CountsAHostTwice, GrantsWhenAllButOneHaveAsked])
def test_a_coordinator_that_miscounts_joined_reports_is_found_out(
    broken: type[CaptureRequests],
) -> None:
    class Miscounts(Coordinator):
        def begin(
            self,
            incarnation: int,
            nonce: str,
            world: int,
            hosts: object = (),
        ) -> list[Action]:
            actions = super().begin(incarnation, nonce, world, hosts)  # type: ignore[arg-type]
            self._requests = broken(world)
            return actions

    class Broken(JoinedWorld):
        coordinator = Miscounts

    with pytest.raises((AssertionError, KeyError, ValueError)):
        play_all(Broken, 2, 2, all_orders=False)
