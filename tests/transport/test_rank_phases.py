"""The phases of ranks in a tree: one verdict for all, in any order of frames, whoever dies."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.geometry.rank_ranges import ranks_in
from holdfast.transport.wire.rank_tree import ANSWER_S, GRACE_S, RankPhases, Word, places_of

TIMEOUT_S = 10.0
LATE_S = TIMEOUT_S + 10 * GRACE_S + ANSWER_S


def join(one: bytes, other: bytes) -> bytes:
    """Each rank says its own byte: a word that is lost or counted twice shows."""
    return bytes(sorted(one + other))


@dataclass
class Network:
    """Ranks with open lines between parents and children; frames arrive late and in any order of
    the lines, in order on each line, and some twice.
    """

    hosts: list[str]
    random: Random
    now_s: float = 0.0
    alive: set[int] = field(default_factory=set)
    lines: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    """Ranks whose processes stand still."""

    def __post_init__(self) -> None:
        self.places = places_of(self.hosts, fan_out=2)
        self.ranks = [RankPhases(rank, place) for rank, place in enumerate(self.places)]
        self.alive = set(range(len(self.ranks)))
        for rank, place in enumerate(self.places):
            if place.above:
                self.connect(rank, place.above[0])

    def connect(self, rank: int, above: int) -> None:
        self.lines[rank, above], self.lines[above, rank] = [], []
        self.ranks[above].attach(rank)
        self.ranks[rank].attach(above)
        self.collect(rank, above)

    def collect(self, *ranks: int) -> None:
        for rank in ranks:
            for to, frame in self.ranks[rank].sent:
                if (rank, to) in self.lines:
                    self.lines[rank, to] += [frame] * self.random.choice([1, 1, 1, 2])
            self.ranks[rank].sent.clear()

    def speak(self, rank: int, count: int, phase: str = "", *, is_held: bool = False) -> None:
        word = Word(rank, phase or f"phase {count}", bytes([rank]))
        self.ranks[rank].speak(count, word, join, TIMEOUT_S, self.now_s, is_held=is_held)
        self.collect(rank)

    def deliver_one(self) -> bool:
        waiting = [
            line for line, frames in self.lines.items() if frames and line[1] not in self.stopped
        ]
        if not waiting:
            return False
        line = self.random.choice(waiting)
        self.ranks[line[1]].hear(line[0], self.lines[line].pop(0), self.now_s)
        self.collect(line[1])
        return True

    def deliver(self) -> None:
        while self.deliver_one():
            pass

    def kill(self, dead: int) -> None:
        """End a rank: what it had sent arrives, lines break, and orphans turn to the next above."""
        self.alive.discard(dead)
        for line in [line for line in self.lines if dead in line]:
            frames = self.lines.pop(line)
            other = line[0] if line[1] == dead else line[1]
            if line[0] == dead and other in self.alive:
                for frame in frames[: self.random.randint(0, len(frames))]:
                    self.ranks[other].hear(dead, frame, self.now_s)
                self.ranks[other].detach(dead)
                self.collect(other)

    def notice_deaths(self) -> None:
        """Time enough has passed for ranks to come back; those that live have found a line."""
        for rank in sorted(self.alive):
            above = [one for one in self.places[rank].above if one in self.alive]
            if above and not any((rank, one) in self.lines for one in self.places[rank].above):
                self.connect(rank, above[0])
        for rank in sorted(self.alive):
            if self.places[rank].above and not self.alive & set(self.places[rank].above):
                self.ranks[rank].end_above()
            for child in self.places[rank].children:
                if child not in self.alive:
                    self.ranks[rank].end(child)
            self.collect(rank)

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        self.deliver()
        while True:
            awake = sorted(self.alive - self.stopped)
            next_s = min((self.ranks[rank].next_s() for rank in awake), default=float("inf"))
            if next_s > end_s:
                break
            self.now_s = max(self.now_s, next_s)
            for rank in awake:
                self.ranks[rank].tick(self.now_s)
                self.collect(rank)
            self.deliver()
        self.now_s = end_s

    def verdicts(self, count: int) -> list[Word | None]:
        return [self.ranks[rank].verdict_of(count) for rank in sorted(self.alive)]


@st.composite
def networks(draw: st.DrawFn) -> Network:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    hosts = [f"h{n}" for n, size in enumerate(sizes) for _ in range(size)]
    return Network(hosts, Random(draw(st.integers(0, 1 << 20))))


@pytest.mark.promise
@given(networks())
def test_every_rank_hears_every_word_once(network: Network) -> None:
    everybody = bytes(range(len(network.ranks)))
    for count in range(1, 8):
        order = list(network.alive)
        network.random.shuffle(order)
        for rank in order[:-1]:
            network.speak(rank, count)
            for _ in range(network.random.randint(0, 4)):
                network.deliver_one()
        network.deliver()
        assert not any(network.verdicts(count)), "nobody goes on before all have spoken"
        network.speak(order[-1], count)
        network.deliver()
        assert [word and word.payload for word in network.verdicts(count)] == [everybody] * len(
            order
        )
        assert all(word and word.is_well for word in network.verdicts(count))


@pytest.mark.promise
@given(networks(), st.data())
def test_a_rank_that_dies_at_any_moment_is_named_to_all_others(
    network: Network, data: st.DataObject
) -> None:
    """All that live get a verdict without a deadline, all the same one, of all words or no."""
    dead = data.draw(st.sampled_from(sorted(network.alive)))
    order = list(network.alive)
    network.random.shuffle(order)
    before = network.random.randint(0, len(order))
    for rank in order[:before]:
        network.speak(rank, 1)
        for _ in range(network.random.randint(0, 3)):
            network.deliver_one()
    if network.random.random() < 0.5:
        network.deliver()
    network.kill(dead)
    network.notice_deaths()
    for rank in order[before:]:
        if rank != dead:
            network.speak(rank, 1)
    network.deliver()
    network.notice_deaths()
    network.deliver()
    everybody = bytes(range(len(network.ranks)))
    for rank in sorted(network.alive):
        word = network.ranks[rank].verdict_of(1)
        assert word is not None, (rank, network.hosts)
        assert ranks_in(word.missing) == [dead] or (word.is_well and word.payload == everybody), (
            word
        )
    if dead:
        assert len({word and word.payload for word in network.verdicts(1)}) == 1
        for rank in sorted(network.alive):  # and from then on nobody waits for it
            network.speak(rank, 2)
        network.deliver()
        assert [word and ranks_in(word.missing) for word in network.verdicts(2)] == [[dead]] * len(
            network.alive
        )


@pytest.mark.promise
def test_what_a_rank_says_again_above_a_dead_parent_counts_once() -> None:
    network = Network(["a", "b", "b"], Random(1))
    for rank in (1, 2):
        network.speak(rank, 1)
    network.deliver()
    network.kill(1)
    network.notice_deaths()
    network.deliver()
    network.speak(0, 1)
    network.deliver()
    for word in network.verdicts(1):
        assert word is not None
        assert word.payload == bytes([0, 1, 2])


@pytest.mark.promise
@given(networks(), st.data())
def test_a_rank_that_is_late_is_named_and_hears_it_when_it_comes(
    network: Network, data: st.DataObject
) -> None:
    late = data.draw(st.sampled_from(sorted(network.alive)))
    others = [rank for rank in network.alive if rank != late]
    network.random.shuffle(others)
    for rank in others:
        network.speak(rank, 1)
        network.pass_time(network.random.choice([0.0, 0.1]))
    network.pass_time(LATE_S)
    network.speak(late, 1)
    network.deliver()
    if others:
        assert [word and ranks_in(word.missing) for word in network.verdicts(1)] == [[late]] * len(
            network.ranks
        )
    for rank in sorted(network.alive):  # all are at the same phase again
        network.speak(rank, 2)
    network.deliver()
    assert all(word and word.is_well for word in network.verdicts(2))


@given(networks(), st.data())
def test_a_healthy_parent_that_came_late_is_not_blamed_for_the_one_it_waits_for(
    network: Network, data: st.DataObject
) -> None:
    """One that never comes, and all above it come just before the others give up."""
    below = [rank for rank in network.alive if network.places[rank].above]
    if not below:
        return
    missing = data.draw(st.sampled_from(below))
    tardy = set(network.places[missing].above)
    for rank in sorted(network.alive - tardy - {missing}):
        network.speak(rank, 1)
    network.pass_time(TIMEOUT_S - 0.5)
    for rank in sorted(tardy):
        network.speak(rank, 1)
    network.pass_time(2 * LATE_S)
    for rank in sorted(network.alive - {missing}):
        word = network.ranks[rank].verdict_of(1)
        assert word is not None
        assert ranks_in(word.missing) == [missing], (rank, word)


@given(networks(), st.data())
def test_ranks_that_never_come_keep_nobody_for_ever(network: Network, data: st.DataObject) -> None:
    stuck = data.draw(st.sets(st.sampled_from(sorted(network.alive)), min_size=1))
    if data.draw(st.booleans()):  # one of them was interrupted, and its process lives
        leaver = min(stuck)
        network.ranks[leaver].leave(1, Word(leaver, "phase 1", b""))
        network.collect(leaver)
    for rank in sorted(network.alive - stuck):
        network.speak(rank, 1)
    network.pass_time(3 * LATE_S)
    for rank in sorted(network.alive - stuck):
        assert network.ranks[rank].verdict_of(1) is not None, (rank, stuck, network.hosts)


@given(networks(), st.data())
def test_a_process_that_stands_still_is_named_by_its_children(
    network: Network, data: st.DataObject
) -> None:
    inner = [rank for rank in network.alive if network.places[rank].children]
    if not inner:
        return
    stopped = data.draw(st.sampled_from(inner))
    for rank in sorted(network.alive):
        network.speak(rank, 1)
    network.stopped = {stopped}
    network.pass_time(2 * LATE_S)
    for rank in sorted(network.alive - {stopped}):
        word = network.ranks[rank].verdict_of(1)
        assert word is not None
        if not word.is_well:
            assert stopped in ranks_in(word.missing) or not network.places[rank].above
    told = [network.ranks[rank].verdict_of(1) for rank in sorted(network.alive - {stopped})]
    network.stopped = set()
    network.deliver()
    after = [network.ranks[rank].verdict_of(1) for rank in sorted(network.alive - {stopped})]
    assert after == told, "no verdict changes"


@pytest.mark.promise
@given(networks(), st.data())
def test_the_last_word_of_a_rank_that_leaves_reaches_all(
    network: Network, data: st.DataObject
) -> None:
    leaver = data.draw(st.sampled_from(sorted(network.alive)))
    for rank in sorted(network.alive - {leaver}):
        network.speak(rank, 1)
    if data.draw(st.booleans()):
        network.speak(leaver, 1)
        has_passed = not network.places[leaver].children
    else:
        has_passed = False
    network.ranks[leaver].leave(1, Word(leaver, "phase 1", b"\xff"))
    network.collect(leaver)
    network.deliver()
    for word in network.verdicts(1):
        assert word is not None
        assert word.is_well
        assert (0xFF in word.payload) != has_passed


@pytest.mark.promise
@given(networks(), st.sampled_from(["settled", "late", "left"]))
def test_what_the_root_holds_is_no_verdict_before_it_settles_or_is_late(
    network: Network, end: str
) -> None:
    root, everybody = network.ranks[0], bytes(range(len(network.ranks)))
    for count in (1, 2):
        order = list(network.alive)
        network.random.shuffle(order)
        for rank in order:
            assert root.held_of(count) is None
            network.speak(rank, count, is_held=True)
            network.deliver()
        network.pass_time(TIMEOUT_S - 1)  # the others ask meanwhile whether the root is there
        assert not any(network.verdicts(count))
        held = root.held_of(count)
        assert held is not None and held.payload == everybody
        if end == "left":
            root.leave(count, Word(0, f"phase {count}", b"\xff"))
        elif end == "late":
            network.pass_time(LATE_S)
        root.settle(count, Word(0, f"phase {count}", b"settled"))
        network.collect(0)
        network.deliver()
        assert root.held_of(count) is None
        for word in network.verdicts(count):
            assert word is not None
            assert word.is_well == (end != "late")
            assert word.payload == {"settled": b"settled", "left": b"\xff", "late": b""}[end]
            assert ranks_in(word.missing) == ([0] if end == "late" else [])


@given(networks())
def test_ranks_at_different_phases_hear_of_it(network: Network) -> None:
    last = len(network.ranks) - 1
    for rank in sorted(network.alive):
        network.speak(rank, 1, "save" if rank == last else "restore")
    network.deliver()
    if last:
        for word in network.verdicts(1):
            assert word is not None
            assert word.apart is not None
            assert {word.apart[1], word.apart[3]} == {"save", "restore"}


def test_a_rank_that_came_back_has_not_ended() -> None:
    network = Network(["a", "b"], Random(1))
    network.ranks[0].end(1)
    network.speak(0, 1)
    assert network.ranks[0].verdict_of(1) is None, "it is waited for"
    network.speak(1, 1)
    network.deliver()
    assert all(word and word.is_well for word in network.verdicts(1))


def test_a_rank_knows_that_what_it_passed_on_has_no_verdict() -> None:
    network = Network(["a", "b"], Random(1))
    assert not any(one.has_unheard for one in network.ranks)
    network.speak(1, 1)
    assert [one.has_unheard for one in network.ranks] == [False, True]
    network.deliver()
    network.speak(0, 1)
    network.deliver()
    assert not any(one.has_unheard for one in network.ranks)


def test_a_join_that_fails_is_an_error_of_all() -> None:
    network = Network(["a", "a", "b"], Random(1))

    def refuse(one: bytes, other: bytes) -> bytes:
        raise ValueError("no such word")

    for rank in range(3):
        network.ranks[rank].speak(1, Word(rank, "p", b""), refuse, TIMEOUT_S, 0.0)
        network.collect(rank)
    network.deliver()
    for word in network.verdicts(1):
        assert word is not None
        assert "no such word" in word.why


def test_a_verdict_of_long_ago_is_passed_over() -> None:
    network = Network(["a", "b"], Random(1))
    old: list[bytes] = []
    for count in range(1, 12):
        network.speak(1, count)
        network.deliver()
        network.speak(0, count)
        old += network.lines[0, 1]
        network.deliver()
    network.ranks[1].hear(0, old[0], network.now_s)
    assert not network.ranks[1].sent and network.ranks[1].verdict_of(1) is None
    assert all(word and word.is_well for word in network.verdicts(11))


def test_a_word_of_long_ago_is_answered() -> None:
    """A rank that missed many phases hears that the others went on."""
    network = Network(["a", "b"], Random(1))
    network.stopped = {1}
    for count in range(1, 12):
        network.speak(0, count)
        network.pass_time(LATE_S)
    network.stopped = set()
    network.lines[0, 1].clear()
    for count in range(1, 12):
        network.speak(1, count)
        network.deliver()
        word = network.ranks[1].verdict_of(count)
        assert word is not None
        assert ranks_in(word.missing) == [1]
