"""A late host is waited for while its copy can still end in time, once, and by name.

Hosts with their joiners around a coordinator; time passes between any two requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordinator.actions import Action, ReportOutcome
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.requests import Absence, CaptureRequests
from holdfast.protocol import messages as m
from support.coordinator.coordinators import GRANT_S, Keeper, granted, told
from support.coordinator.joined_hosts import MISHAPS, SAVE, JoinedWorld

SPARE_S = 2.0
AT_ONCE, A_LITTLE, TOO_LONG = 0.0, 0.5, SPARE_S + 1
TICK_S = 0.1


class LateWorld(JoinedWorld):
    """Ranks whose next update comes so long after a save that its copy may begin after SPARE_S."""

    spare_ms = int(1000 * SPARE_S)

    def begin_with(self, hosts: int, per_host: int) -> None:
        self.late: list[tuple[str, ...]] = []
        super().begin_with(hosts, per_host)

    def _carry_out(self, actions: object) -> None:
        super()._carry_out(actions)
        assert isinstance(actions, (list, tuple))
        outcomes = [action for action in actions if isinstance(action, ReportOutcome)]
        self.late += [outcome.late_hosts for outcome in outcomes if outcome.late_hosts]

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.pass_time(TICK_S)
            self.check()

    def ask_of(self, ranks: Iterable[int]) -> None:
        """These make their next save, or the one that they have not made yet."""
        for process in map(self.by_rank, ranks):
            self.take_messages(process)
            self.make_ask(process, SAVE)
            self.check()

    def waiting(self) -> list[int]:
        for process in self.trainers():
            self.take_messages(process)
        return [p.rank for p in self.trainers(lambda p: p.waits_for is not None)]

    def newest_step(self) -> int:
        newest = self.keeper.attempts.newest_complete()
        return -1 if newest is None else newest.step

    def hosts_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(f"h{n}" for n in sorted({self.place_of(self.by_rank(r)) for r in ranks}))


def play(world: LateWorld, asks: Sequence[int], pauses: Sequence[float]) -> None:
    """Ranks ask in this order, with a pause before each."""
    for rank, pause_s in zip(asks, pauses, strict=True):
        world.wait(pause_s)
        world.ask_of([rank])
    world.wait(2 * TICK_S)


def check_late(world: LateWorld, late: Sequence[int]) -> None:
    """The save came to nothing because of these ranks, which are named, and waited for no more."""
    on_time = sorted(set(range(world.world)) - set(late))
    assert not world.waiting()
    reason = world.told[0][1]
    assert f"ranks {sorted(late)} on {', '.join(world.hosts_of(late))} did not ask" in reason
    assert f"within {SPARE_S:g} s" in reason
    assert world.late == [world.hosts_of(late)]
    for _ in range(3):  # no time passes
        world.ask_of(on_time)
        world.pass_time(TICK_S)
        assert not world.waiting()
    assert world.late == [world.hosts_of(late)], "waited for once more"


def check_back(world: LateWorld, late: Sequence[int]) -> None:
    """When they were heard they are waited for again, as long as before."""
    for process in map(world.by_rank, late):
        process.done = len(world.saves) - 1  # all but the newest went by
    world.ask_of(late)
    world.wait(2 * TICK_S)
    assert not world.waiting()
    before = world.newest_step()
    on_time = sorted(set(range(world.world)) - set(late))
    play(world, [*on_time, *late], [AT_ONCE] * len(on_time) + [A_LITTLE] + [0.0] * (len(late) - 1))
    world.finish()
    world.pass_time(GRANT_S)
    assert world.newest_step() == len(world.saves) - 1 > before, "they were not waited for"
    world.told.clear()
    world.late.clear()
    world.ask_of(on_time)
    world.wait(TOO_LONG)
    check_late(world, late)


def late_ones(asks: Sequence[int], pauses: Sequence[float]) -> list[int]:
    """The ranks behind the first pause that is too long."""
    first = next((n for n, pause in enumerate(pauses) if pause == TOO_LONG), len(asks))
    return list(asks[first:])


def stories(world: int) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    for asks in permutations(range(world)):
        for pauses in product((AT_ONCE, A_LITTLE, TOO_LONG), repeat=world - 1):
            if pauses.count(TOO_LONG) <= 1:
                yield asks, (AT_ONCE, *pauses)


def play_all(kind: type[LateWorld], hosts: int, per_host: int) -> int:
    played = 0
    for asks, pauses in stories(hosts * per_host):
        world = kind()
        world.begin_with(hosts, per_host)
        late = late_ones(asks, pauses)
        try:
            on_time = len(asks) - len(late)
            play(world, asks[:on_time], pauses[:on_time])
            if late:
                world.wait(TOO_LONG)
                check_late(world, late)
                check_back(world, late)
            else:
                world.finish()
                world.wait(1.0)
                assert world.newest_step() == len(world.saves) - 1 and not world.told
        except Exception as error:
            error.add_note(f"{asks} {pauses}")
            raise
        played += 1
    return played


@pytest.mark.promise
def test_two_hosts_of_two_ranks_in_any_order_with_any_delays() -> None:
    assert play_all(LateWorld, 2, 2) > 400


@pytest.mark.slow
def test_the_rules_hold_for_late_hosts_with_any_mishap() -> None:
    for asks, mishap, at in product(permutations(range(4)), MISHAPS, range(1, 4)):
        for gap, pause_s in product(range(1, 4), (A_LITTLE, TOO_LONG)):
            world = LateWorld()
            world.begin_with(2, 2)
            for number, rank in enumerate(asks):
                world.wait(pause_s if number == gap else AT_ONCE)
                if number == at:
                    world.befall(world.by_rank(asks[number - 1]), mishap)
                process = world.by_rank(rank)
                if process.connected and process.waits_for is None and process.writes is None:
                    world.make_ask(process, SAVE)
                world.check()
            world.wait(TOO_LONG)
            world.finish()
            world.pass_time(GRANT_S + 1)
            assert not world.waiting(), (asks, mishap, at, gap, pause_s)
            world.check_end()


# ── how long ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise
@given(
    spares=st.lists(
        st.sampled_from([0, 1000, 2500, 29_900, 30_100, 10**9]), min_size=1, max_size=3
    ),
    late_by_s=st.floats(0.0, 2 * GRANT_S),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_who_is_late_is_waited_for_as_long_as_all_can_spare_and_the_keepers_deadline_allows(
    spares: list[int], late_by_s: float
) -> None:
    keeper = Keeper(len(spares) + 1)
    for rank, spare_ms in enumerate(spares):
        keeper.ask(rank, 1, now_s=10.0, spare_ms=spare_ms)
    wait_s = min([GRANT_S, *(spare / 1000 for spare in spares if spare)])
    skips = told(keeper.c.tick(10.0 + late_by_s), m.Skip)
    assert bool(skips) == (10.0 + late_by_s - 10.0 > wait_s)
    if skips:
        assert f"ranks [{len(spares)}] did not ask within {wait_s:g} s" in skips[0].reason
    else:
        assert granted(keeper.ask(len(spares), 1, now_s=10.0 + late_by_s))


def test_what_all_ranks_are_told_of_late_ones_does_not_grow_with_their_number() -> None:
    keeper, first = Keeper(4096), ", ".join(map(str, range(1, 17)))
    late = f"ranks [{first} and 4079 more]"
    keeper.ask(0, 1, now_s=10.0, spare_ms=1000)
    (skip,) = told(keeper.c.tick(20.0), m.Skip)
    assert skip.reason == f"{late} did not ask within 1 s"
    (again,) = told(keeper.ask(0, 2, now_s=20.0), m.Skip)
    assert late in again.reason and len(again.reason) < 200


def test_images_that_are_still_planned_are_waited_for_though_no_host_would_be() -> None:
    world = LateWorld()
    world.hosts = 2
    world.is_planned_at_once = False
    world.granted, world.told, world.late = [], [], []
    world.start(4)
    world.ask_of(range(4))
    world.wait(TOO_LONG)
    assert world.waiting() and not world.told
    while world.planning:
        world.end_planning(world.planning[0])
    world.finish()
    world.wait(1.0)
    assert world.newest_step() == 0


# ── the search finds what it is there to find ────────────────────────────────────────────────


class WaitsForTheDeadline(CaptureRequests):
    def late(self, now_s: float, deadline_s: float) -> list[tuple[int, float]]:
        return [each for each in super().late(now_s, deadline_s) if each[1] == deadline_s]


class WaitsForNobody(CaptureRequests):
    def late(self, now_s: float, deadline_s: float) -> list[tuple[int, float]]:
        return super().late(now_s, 3 * TICK_S)


class WaitsForThemEachTime(Absence):
    def miss(self, ranks: Iterable[int]) -> None:
        """Forgets them."""


class NeverWaitsForThemAgain(Absence):
    def end(self, rank: int) -> None:
        self._lost.discard(rank)


@pytest.mark.parametrize(
    ("requests", "absence"),
    [
        (WaitsForTheDeadline, Absence),
        (WaitsForNobody, Absence),
        (CaptureRequests, WaitsForThemEachTime),
        (CaptureRequests, NeverWaitsForThemAgain),
    ],
)
def test_a_keeper_with_a_known_mistake_about_late_hosts_is_found_out(
    requests: type[CaptureRequests], absence: type[Absence]
) -> None:
    class Mistaken(Coordinator):
        def begin(
            self, incarnation: int, nonce: str, world: int, hosts: Sequence[m.HostEntry] = ()
        ) -> list[Action]:
            actions = super().begin(incarnation, nonce, world, hosts)
            self._requests = requests(world)
            self.absence = absence()
            return actions

    class Broken(LateWorld):
        coordinator = Mistaken

    with pytest.raises(AssertionError):
        play_all(Broken, 2, 2)


def test_a_durable_save_is_waited_for_until_its_deadline_whatever_spare_time_others_have() -> None:
    asks = CaptureRequests(3)
    for rank, durable in ((0, True), (1, False)):
        spare_ms = 0 if durable else 1000
        asks.add(
            rank,
            m.RequestCapture(
                step=5, table="", durable=durable, values_bytes=0, exact=False, spare_ms=spare_ms
            ),
            0.0,
        )
    assert asks.late(5.0, GRANT_S) == []
    assert asks.late(GRANT_S + 1, GRANT_S) == [(5, GRANT_S)]
