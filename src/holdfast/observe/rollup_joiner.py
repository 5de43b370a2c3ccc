"""PURE. Makes one roll-up of those of many hosts, by the code that makes those of a report.

What grows with the hosts and not with what a report says of them is left out: of when each host
called ``save`` the first and the last by one clock for all, of what links measured the best.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.events import Count, Seconds
from holdfast.observe.clocks import CommonClock, HostClocks, HostMoment
from holdfast.observe.link_rollups import LinkRollups, note_comparisons
from holdfast.observe.rollup_columns import ColumnJoiner
from holdfast.observe.rollup_groups import (
    ClockRollup,
    LifeRollup,
    RestoreRollup,
    Rollup,
    SampleRollup,
    SaveRollup,
    StartRollup,
    Wall,
    bound_sums,
    joined_samples,
    own_clock,
)
from holdfast.observe.rollups import NAMED
from holdfast.observe.save_records import SaveRecords

#: Records by which the coordinator tells that all ranks came somewhere.
_OF_ALL = frozenset({"SnapshotCaptured", "CheckpointPublished"})
#: Records after which a clock can be compared with those of the other hosts.
_MEETINGS = {"RunStarted": "start", "Restored": "restore"}


class _KeptHead(msgspec.Struct):
    """What is read of a record that stands in a roll-up as it was."""

    event: str
    incarnation: Count = 0
    by_host: str = ""
    boot: str = ""
    time_s: Wall = 0.0
    mono_s: Seconds | None = None


_decode_kept = msgspec.json.Decoder(_KeptHead).decode


@dataclass(slots=True)
class _JoinedLife:
    """The signs of life of one start by one clock."""

    of: LifeRollup
    ranks: dict[int, tuple[float, int]] = field(default_factory=dict)

    def merge(self, other: LifeRollup) -> None:
        self.of.first = min(self.of.first, other.first, key=own_clock)
        self.of.last = max(self.of.last, other.last, key=own_clock)
        self.of.newest_step = max(self.of.newest_step, other.newest_step)
        for rank, last_s, saved in other.ranks:
            before = self.ranks.get(rank, (last_s, saved))
            self.ranks[rank] = max(before[0], last_s), max(before[1], saved)

    def made(self) -> LifeRollup:
        self.of.ranks = [(rank, *of) for rank, of in sorted(self.ranks.items())]
        return self.of


class KnownClocks:
    """The clocks of a run, to be brought to one again where nothing new compares them."""

    def __init__(self) -> None:
        self._at_s: dict[tuple[str, str], float] = {}
        """What each stood at, at one moment for all."""

    def tell(self, clocks: HostClocks, numbers: dict[tuple[str, str], int]) -> None:
        """Adds what is known to clocks, by their numbers there."""
        for key, clock in numbers.items():
            if key in self._at_s:
                clocks.meet("known", HostMoment(clock, self._at_s[key]))

    def learn(self, common: CommonClock, ends: Sequence[ClockRollup]) -> None:
        """Remembers those that are placed; what others were is forgotten."""
        moments = [HostMoment(clock, one.last[1]) for clock, one in enumerate(ends)]
        placed = [at for at in moments if common.is_placed(at.clock)]
        now_s = common.exact(placed[0]) if placed else 0.0
        self._at_s = {
            (ends[at.clock].host, ends[at.clock].boot): at.at_s + now_s - common.exact(at)
            for at in placed
        }


class RollupJoiner:
    """Joins roll-ups, each taken once, those of a host in their order."""

    def __init__(self, known: KnownClocks | None = None) -> None:
        self._known = known or KnownClocks()
        self._clocks = HostClocks()
        self._numbers: dict[tuple[str, str], int] = {}
        self._ends: list[ClockRollup] = []
        self._saves = SaveRecords(self._clocks)
        self._columns = ColumnJoiner()
        self._blocked_s: dict[tuple[int, int], float] = defaultdict(float)
        self._lives: dict[tuple[int, int], _JoinedLife] = {}
        self._links = LinkRollups()
        self._of_all: set[tuple[str, str]] = set()
        self._hosts: dict[str, SampleRollup] = {}
        self._seen: Counter[str] = Counter()
        self._highest: dict[str, int] = {}
        self._made = Rollup("", 0, 0)

    def take(self, of: Rollup) -> None:
        """Takes a roll-up."""
        clocks = [self._clock(one) for one in of.clocks]
        for save in of.saves:
            self._saves.merge(save, clocks)
            self._blocked_s[save.incarnation, save.step] += save.blocked_s
        for columns in of.columns:
            self._columns.take(columns, clocks[columns.clock])
        for life in of.lives:
            number = life.incarnation, clocks[life.clock]
            if number not in self._lives:
                empty = LifeRollup(*number, life.first, life.last, life.newest_step, [])
                self._lives[number] = _JoinedLife(empty)
            self._lives[number].merge(life)
        self._take_starts(of, clocks)
        for link in of.links:
            self._links.merge(link, clocks[link.clock])
            note_comparisons(link, clocks[link.clock], self._clocks)
        for host, samples in of.hosts.items():
            self._hosts[host] = joined_samples(samples, self._hosts.get(host))
        for writer, (seen, highest) in of.numbers.items():
            self._seen[writer] += seen
            self._highest[writer] = max(self._highest.get(writer, -1), highest)
        for raw in of.kept:
            self._take_kept(bytes(raw))
        made = self._made
        made.torn, made.unknown = made.torn + of.torn, made.unknown + of.unknown
        made.invalid += of.invalid
        made.kept += of.kept

    def _take_starts(self, of: Rollup, clocks: Sequence[int]) -> None:
        """Takes starts and restores, which stay as they are, and what they say of clocks."""
        some: Sequence[StartRollup | RestoreRollup] = [*of.starts, *of.restores]
        for one in some:
            one.clock = clocks[one.clock]
            name = "start" if isinstance(one, StartRollup) else "restore"
            for _, (at_s, *_) in one.rows():
                if at_s >= 0:
                    self._clocks.meet((one.incarnation, name), HostMoment(one.clock, at_s))
        self._made.starts += of.starts
        self._made.restores += of.restores

    def _clock(self, of: ClockRollup) -> int:
        for time_s, at_s in (of.first, of.last):
            clock = self._clocks.take(of.host, of.boot, time_s, at_s).clock
        self._numbers[of.host, of.boot] = clock
        if clock == len(self._ends):
            self._ends.append(of)
        else:
            ends = self._ends[clock]
            ends.first = min(ends.first, of.first, key=own_clock)
            ends.last = max(ends.last, of.last, key=own_clock)
        return clock

    def _take_kept(self, raw: bytes) -> None:
        """Looks for what says something of clocks; one that is no record says nothing."""
        try:
            head = _decode_kept(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        key = head.by_host, head.boot
        if head.event in _OF_ALL:
            self._of_all.add(key)
        if head.event in _MEETINGS and head.mono_s is not None:
            ends = head.time_s, head.mono_s
            clock = self._clock(ClockRollup(*key, ends, ends))
            meeting = head.incarnation, _MEETINGS[head.event]
            self._clocks.meet(meeting, HostMoment(clock, head.mono_s))

    def made(self) -> Rollup:
        """Returns the roll-up of all that was taken."""
        self._known.tell(self._clocks, self._numbers)
        common = self._clocks.solve()
        self._known.learn(common, self._ends)
        of_all = {self._numbers[key] for key in self._of_all if key in self._numbers}
        self._columns.add_to(self._saves, self._blocked_s, common, of_all)
        made = self._made
        made.saves = [self._save(save, common, of_all) for save in self._saves.rollups()]
        made.lives = [life.made() for life in self._lives.values()]
        made.clocks, made.links, made.hosts = self._ends, self._links.made(), self._hosts
        made.numbers = {each: (n, self._highest[each]) for each, n in self._seen.items()}
        return made

    def _save(self, of: SaveRollup, common: CommonClock, always: set[int]) -> SaveRollup:
        """Completes a save, and leaves out what was neither first nor last."""
        calls, copies = of.calls, of.copies
        of.blocked_s = self._blocked_s[of.incarnation, of.step]

        def by_first(call: tuple[int, float, float, int]) -> float:
            return common.exact(HostMoment(call[0], call[1]))

        def by_last(call: tuple[int, float, float, int]) -> float:
            return common.exact(HostMoment(call[0], call[2]))

        def by_copy(copy: tuple[int, float]) -> float:
            return common.exact(HostMoment(*copy))

        placed = [call for call in calls if common.is_placed(call[0])]
        kept = {call[0] for call in sorted(placed, key=by_first)[:NAMED]}
        kept |= {call[0] for call in sorted(placed, key=by_last)[-NAMED:]} | always
        kept |= {call[0] for call in calls if not common.is_placed(call[0])}
        of.calls = [call for call in calls if call[0] in kept]
        of.left_out += len(calls) - len(of.calls)
        first = {copy[0] for copy in sorted(copies, key=by_copy)[:NAMED]}
        of.copies = [copy for copy in copies if copy[0] in first | always]
        return bound_sums(of)
