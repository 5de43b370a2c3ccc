"""PURE. Divides the time of a run among what it went into; ``docs/goodput.md`` defines each part.

Each moment lies in exactly one part. All is counted in whole microseconds, so that the parts sum to
the elapsed time exactly: once for the clock on the wall, as rank 0 saw it, and once for every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.geometry.rank_ranges import union

#: The parts, in the order in which they are shown.
CATEGORIES = (
    "productive",
    "blocking",
    "first_step",
    "stall",
    "declared",
    "lost_work",
    "detection",
    "restart",
    "start_up",
    "waiting",
    "restore",
    "absent",
    "away",
    "unknown",
)
#: Start and end in microseconds.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The moments of one rank in one start, in microseconds of one clock for all hosts."""

    began_us: int
    """It had joined the run."""
    last_us: int
    """The last sign of life."""
    process_us: int = 0
    """How long its process was there before."""
    joined_us: int = 0
    """How long joining took, the last part of it."""
    restored: Span | None = None
    died_us: int | None = None
    """It was seen to be gone."""
    ended_us: int | None = None
    """It let go of the run."""


@dataclass(frozen=True, slots=True)
class LifeTimes:
    """One start of the training processes: its ranks, and the training as rank 0 saw it.

    ``ranks``: of which a start was recorded. ``over_us``: the last sign of any of them, or of their
    end. ``saved_us``: when ``save`` had returned, or the step had ended, by step. ``blocked``: in
    ``save``, at the fence, in ``close``. ``blocked_us``: the same summed over all ranks, by step.
    ``declared``: phases of the program by name. ``short_us``: those that were only summed.
    ``slow``: the part of steps that is a stall. ``first_us``: what the first step took beyond the
    median.
    """

    world: int
    ranks: Mapping[int, RankTimes]
    over_us: int
    is_closed: bool = False
    parent: tuple[int, int] | None = None
    source: str = ""
    saved_us: Mapping[int, int] = field(default_factory=dict)
    blocked: Sequence[Span] = ()
    blocked_us: Mapping[int, int] = field(default_factory=dict)
    declared: Sequence[tuple[str, int, int]] = ()
    short_us: Mapping[str, int] = field(default_factory=dict)
    slow: Sequence[Span] = ()
    first_us: int = 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the time of a run went, in seconds by category; they sum to ``elapsed_s``.

    ``rank_seconds``: the same over all ranks, as many as the largest start had; they sum to
    ``elapsed_s`` times ``ranks``. ``restore_s``: ``restore`` by source. ``declared_s``:
    ``declared`` by the name of the phase.
    """

    elapsed_s: float
    seconds: dict[str, float]
    ranks: int
    rank_seconds: dict[str, float]
    restore_s: dict[str, float] = field(default_factory=dict)
    declared_s: dict[str, float] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """Returns the productive part of the elapsed time, from 0 to 1."""
        return self.seconds["productive"] / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def available_s(self) -> float:
        """Returns the time in which the run was to train: without that after an orderly end."""
        return max(0.0, self.elapsed_s - self.seconds["away"])

    @property
    def ettr(self) -> float:
        """Returns the productive part of the available time, from 0 to 1."""
        return self.seconds["productive"] / self.available_s if self.available_s > 0 else 0.0


def account(lives: Mapping[int, LifeTimes]) -> Ledger:
    """Divides the time from the first process's start to the last sign of life.

    ``lives``: the starts of a run by their number, in any order; at least one, of each of which
    some rank's start is known.
    """
    ordered = sorted(lives.items())
    kept_until = keep_until(lives)
    most = max(max(life.world, 1 + max(life.ranks)) for life in lives.values())
    wall, ranks = _Sums(), _Sums()
    first_us = now_us = min(
        rank.began_us - rank.process_us for rank in ordered[0][1].ranks.values()
    )
    before: LifeTimes | None = None
    for number, life in ordered:
        window = now_us, max(now_us, life.over_us)
        gap = "away" if before is not None and before.is_closed else "restart"
        kept_us = kept_until.get(number, -1)
        _LedgerWindow(life, window, gap, kept_us, most).divide(wall, ranks)
        now_us, before = window[1], life
    elapsed_us = now_us - first_us
    return Ledger(
        elapsed_s=elapsed_us / 1e6,
        seconds=wall.seconds(),
        ranks=most,
        rank_seconds=ranks.seconds(),
        restore_s={name: us / 1e6 for name, us in sorted(wall.restore_us.items())},
        declared_s={name: us / 1e6 for name, us in sorted(wall.declared_us.items())},
    )


def keep_until(lives: Mapping[int, LifeTimes]) -> dict[int, int | None]:
    """Returns the starts in the ancestry of the newest state, and until when each is in it.

    None: the moment is not known, because nothing of the step was recorded.
    """
    newest = max(lives)
    found: dict[int, int | None] = {newest: lives[newest].over_us}
    parent = lives[newest].parent
    while parent is not None and parent[0] in lives and parent[0] not in found:
        number, step = parent
        life = lives[number]
        is_all = life.is_closed and step >= max(life.saved_us, default=step)
        found[number] = life.over_us if is_all else life.saved_us.get(step)
        parent = life.parent
    return found


def _first_process(life: LifeTimes) -> int:
    return min(rank.began_us - rank.process_us for rank in life.ranks.values())


class _Sums:
    """Microseconds by category."""

    def __init__(self) -> None:
        self.us = dict.fromkeys(CATEGORIES, 0)
        self.restore_us: dict[str, int] = {}
        self.declared_us: dict[str, int] = {}

    def move(self, category: str, us: int) -> int:
        """Moves productive time to a category; returns how much there was to move."""
        moved = max(0, min(us, self.us["productive"]))
        self.us["productive"] -= moved
        self.us[category] += moved
        return moved

    def add(self, other: _Sums, times: int = 1) -> None:
        """Adds the sums of a window, as often as there are ranks that are like it."""
        for name, us in other.us.items():
            self.us[name] += us * times
        for mine, theirs in (
            (self.restore_us, other.restore_us),
            (self.declared_us, other.declared_us),
        ):
            for name, us in theirs.items():
                mine[name] = mine.get(name, 0) + us * times

    def seconds(self) -> dict[str, float]:
        return {name: us / 1e6 for name, us in self.us.items()}


class _LedgerWindow:
    """The time from the end of one start to the end of the next, which is divided."""

    def __init__(
        self, life: LifeTimes, window: Span, gap: str, kept_us: int | None, most: int
    ) -> None:
        self.life, self.window, self.gap, self.kept_us = life, window, gap, kept_us
        self.absent = most - max(life.world, len(life.ranks))
        self.missing = most - self.absent - len(life.ranks)
        self.last_to_join_us = min(rank.joined_us for rank in life.ranks.values())
        deaths = [rank.died_us for rank in life.ranks.values() if rank.died_us is not None]
        self.death_us = min(deaths, default=None)

    def divide(self, wall: _Sums, ranks: _Sums) -> None:
        """Adds what this window went into."""
        leader = self.life.ranks.get(0)
        seen = self._of_leader(leader) if leader is not None else self._of_missing("unknown")
        wall.add(seen)
        ranks.add(self._of_ranks(leader, seen))
        ranks.add(self._of_missing("absent"), self.absent)
        ranks.add(self._of_missing("unknown"), self.missing)

    def _of_missing(self, category: str) -> _Sums:
        """Divides the time of a rank of which nothing is known."""
        start_us, end_us = self.window
        began_us = min(max(_first_process(self.life), start_us), end_us)
        sums = _Sums()
        sums.us[self.gap] = began_us - start_us
        sums.us[category] += end_us - began_us
        return sums

    def _marks(self, rank: RankTimes) -> list[tuple[str, int]]:
        """Returns until when each part of a rank's time lasts, in their order."""
        began_us = rank.began_us
        restored = rank.restored or (began_us, began_us)
        stopped_us = self._stopped_us(rank)
        work = "unknown" if self.kept_us is None else "productive"
        kept_us = stopped_us if self.kept_us is None else self.kept_us
        return [
            (self.gap, began_us - rank.process_us),
            ("start_up", began_us - rank.joined_us),
            ("waiting", began_us - self.last_to_join_us),
            ("start_up", restored[0]),
            ("restore", restored[1]),
            (work, min(kept_us, stopped_us)),
            ("lost_work", stopped_us),
            ("waiting" if self.life.is_closed else "detection", self.window[1]),
        ]

    def _stopped_us(self, rank: RankTimes) -> int:
        """Returns when a rank did no more work: it ended, died, or the first of the others did."""
        if rank.ended_us is not None:
            return rank.ended_us
        moments = [us for us in (rank.died_us, self.death_us) if us is not None]
        return min(moments) if moments else rank.last_us

    def _base(self, rank: RankTimes) -> tuple[_Sums, Span]:
        """Divides a rank's time by its marks; returns it with the span of kept work."""
        sums, now_us = _Sums(), self.window[0]
        work = 0, 0
        for name, until_us in self._marks(rank):
            end_us = max(now_us, min(until_us, self.window[1]))
            sums.us[name] += end_us - now_us
            if name == "productive":
                work = now_us, end_us
            now_us = end_us
        source = self.life.source or "unknown"
        if sums.us["restore"]:
            sums.restore_us[source] = sums.us["restore"]
        return sums, work

    def _of_leader(self, leader: RankTimes) -> _Sums:
        life = self.life
        sums, work = self._base(leader)
        free = [work] if work[1] > work[0] else []
        free, blocked_us = claim(free, life.blocked)
        sums.move("blocking", blocked_us)
        for name in dict.fromkeys(name for name, *_ in life.declared):
            free, us = claim(free, [(a, b) for each, a, b in life.declared if each == name])
            self._declare(sums, name, us)
        free, slow_us = claim(free, life.slow)
        sums.move("stall", slow_us)
        if free and life.first_us > 0:
            free, first_us = claim(free, [(work[0], work[0] + life.first_us)])
            sums.move("first_step", first_us)
        for name, us in life.short_us.items():
            self._declare(sums, name, us)
        return sums

    @staticmethod
    def _declare(sums: _Sums, name: str, us: int) -> None:
        moved = sums.move("declared", us)
        if moved:
            sums.declared_us[name] = sums.declared_us.get(name, 0) + moved

    def _of_ranks(self, leader: RankTimes | None, seen: _Sums) -> _Sums:
        """Divides the time of all ranks that were recorded, each by its own moments.

        What only rank 0 records of its training is taken to be the same on all of them.
        """
        total = _Sums()
        if leader is None:
            for rank in self.life.ranks.values():
                sums, _ = self._base(rank)
                total.add(sums)
            return total
        kept_us = self.window[1] if self.kept_us is None else self.kept_us
        for rank in self.life.ranks.values():
            total.add(self._base(rank)[0])
        saved_us = self.life.saved_us
        blocked = sum(
            us for step, us in self.life.blocked_us.items() if saved_us.get(step, 0) <= kept_us
        )
        total.move("blocking", blocked)
        count = len(self.life.ranks)
        for name, us in seen.declared_us.items():
            self._declare(total, name, us * count)
        for name in ("stall", "first_step"):
            total.move(name, seen.us[name] * count)
        return total


def claim(free: Sequence[Span], wanted: Iterable[Span]) -> tuple[list[Span], int]:
    """Takes what of ``wanted`` is free; returns what is left, and how much was taken.

    ``free``: in order, without overlaps. ``wanted``: in any order; what overlaps counts once.
    """
    left: list[Span] = []
    taken = 0
    spans = union(span for span in wanted if span[0] < span[1])
    at = 0
    for start, end in free:
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        here = at
        while here < len(spans) and spans[here][0] < end:
            a, b = max(start, spans[here][0]), min(end, spans[here][1])
            if a > start:
                left.append((start, a))
            taken += b - a
            start = b
            here += 1
        if end > start:
            left.append((start, end))
    return left, taken
