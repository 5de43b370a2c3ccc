"""PURE. Says who is slow, and why, in one sentence with figures.

A rank is compared with the median of all, and all together with their own past. Only phases that
work are compared, as if every rank had the same bytes: a wait is the last one's to answer for. One
slow save is chance; three of the last five are not.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

from holdfast.observe.report import Save
from holdfast.observe.text import seconds_text, size_text

#: The score under which a rank is suspect: the median of the others by its own time.
SUSPECT = 0.75
WINDOW, NEEDED = 5, 3
#: What is faster than this above the others is chance.
LEAST_S = 0.05
#: What more bytes than the others have may cost, for they are no chance; and the part of it that
#: must be seen, as not all that takes time does so by the byte.
LEAST_OF_BYTES_S, SEEN_OF_BYTES = 0.01, 0.25
#: Saves that a change of all ranks is measured against.
PAST = 10
#: Saves that are looked at for who comes late, and the chance that one of ranks that are all alike
#: is the last one as often: of two or three ranks one always seems to be late.
LATE_WINDOW, CHANCE = 10, 0.01

#: phase -> (what it does, what is slow of a rank, of a host, of all, where to look)
_PHASES = {
    "describe_s": ("describing the state", "CPU", "CPU", "describing", "what else runs there"),
    "volatile_s": ("copying what cannot wait", "CPU", "memory", "copying", "what else runs there"),
    "copy_s": (
        "copying to shared memory",
        "link of its device, or CPU",
        "memory",
        "copying",
        "other work on the memory of the host, and the links of its devices",
    ),
    "write_s": (
        "writing an image",
        "its writing",
        "disk",
        "storage",
        "the disk and what else writes to it (iostat -x), or the service's own limits",
    ),
    "finish_s": (
        "making an image durable (fsync)",
        "fsync of its image",
        "disk",
        "fsync of the storage",
        "what the disk flushes (iostat -x, f_await), its write cache and the file system's options",
    ),
}
#: Phases that saves are durable later for.
_TO_STORAGE = ("write_s", "finish_s")
#: Pressure of a host that explains something, and how many times that of others it is.
_PRESSED, _PRESSED_TIMES = 0.2, 2.0


@dataclass(frozen=True, slots=True)
class Blame:
    """One slow place: a rank, a host, or all of them.

    ``place``: "rank 3 on c", "host c" or "all ranks". ``cause``: slow | bytes | late | busy (in all
    that it computes). ``phase``: the phase that is slow, "" for a late rank. ``value_s``,
    ``usual_s``: what it takes there, the median of the last five saves, and what it takes
    elsewhere, or took before. ``since``: the generation that it began with. ``saves``: in how many
    of the last ``WINDOW``.
    """

    place: str
    cause: str
    phase: str
    ranks: tuple[int, ...]
    value_s: float
    usual_s: float
    since: str
    saves: int
    sentence: str

    @property
    def score(self) -> float:
        """Returns what it should take by what it takes, from 0 to 1; under 0.75 is suspect."""
        return self.usual_s / self.value_s if self.value_s > 0 else 1.0


def find_slow(
    saves: Sequence[Save],
    ranks_by_host: Mapping[str, Sequence[int]],
    *,
    clock_error_s: float = 0.0,
) -> tuple[Blame, ...]:
    """Returns who is slow in the last saves of the newest start, the worst first.

    ``saves``: in the order of their generations. ``clock_error_s``: the bound of the error of
    moments of different hosts.
    """
    newest = [save for save in saves if save.incarnation == saves[-1].incarnation] if saves else []
    finder = _Finder(newest, ranks_by_host)
    found = _of_storage([one for phase in _PHASES for one in finder.of_phase(phase)])
    found += finder.heavy()
    found += finder.late(max(LEAST_S, 4 * clock_error_s))
    found = _of_busy(found)
    return tuple(sorted(found, key=lambda one: one.usual_s - one.value_s))


def _of_storage(found: Sequence[Blame]) -> list[Blame]:
    """Leaves of writing, and of the fsync at its end, the one that explains more of the time."""
    late_s = {(one.place, one.cause, one.phase): one.value_s - one.usual_s for one in found}

    def is_said_by_another(one: Blame) -> bool:
        writing_s = late_s.get((one.place, one.cause, "write_s"))
        finishing_s = late_s.get((one.place, one.cause, "finish_s"))
        if one.phase not in _TO_STORAGE or writing_s is None or finishing_s is None:
            return False
        return (one.phase == "write_s") == (finishing_s >= writing_s / 2)

    return [one for one in found if not is_said_by_another(one)]


#: What a CPU alone does for a save.
_DESCRIBING = frozenset({"describe_s", "volatile_s"})


def _of_busy(found: Sequence[Blame]) -> list[Blame]:
    """Makes one of what is slow of the same ranks, where these copy and write slowly, or describe
    slowly and come late: what they compute with is what they lack. What only copies slowly and
    comes late may wait for its own copies.
    """
    left = list(found)
    for ranks in dict.fromkeys(one.ranks for one in found if not one.place.startswith("all ")):
        own = [one for one in left if set(one.ranks) <= set(ranks)]
        phases = {one.phase for one in own if one.cause == "slow"}
        computes_slowly = any(one.cause == "late" for one in own) and phases & _DESCRIBING
        does_all_slowly = "write_s" in phases and phases & {"copy_s", *_DESCRIBING}
        if any(one.cause == "bytes" for one in own) or not (computes_slowly or does_all_slowly):
            continue
        slow = [one for one in own if one.cause == "slow"]
        worst = max(slow, key=lambda one: (len(one.ranks), _later_s(one)))
        does = ", ".join(_doing(one) for one in own)
        since = min((one.since for one in own), key=lambda name: int(name.partition("-")[2]))
        sentence = (
            f"{worst.place}, CPU or memory: whatever it does takes longer than elsewhere ({does}), "
            f"since {since}; look at what else runs there (top, steal of a virtual machine)"
        )
        left = [one for one in left if one not in own]
        left.append(replace(worst, cause="busy", since=since, sentence=sentence))
    return left


def _later_s(one: Blame) -> float:
    return one.value_s - one.usual_s


def _doing(one: Blame) -> str:
    if one.cause == "late":
        return f"it comes to save {seconds_text(one.value_s)} after the first"
    return f"{_PHASES[one.phase][0]} {seconds_text(one.value_s)} for {seconds_text(one.usual_s)}"


class HostPressure(NamedTuple):
    """Parts of the time in which processes of a host waited for a CPU, and for I/O; -1: unknown."""

    cpu: float
    io: float


def pressure_text(
    one: Blame, host_of: Mapping[int, str], pressure: Mapping[str, HostPressure]
) -> str:
    """Returns what explains a slow place, where its host was under more pressure than others."""
    hosts = {host_of.get(rank, "") for rank in one.ranks}
    (host, *more) = hosts or {""}
    if more or host not in pressure:
        return ""
    resource, what = ("io", "I/O") if one.phase in _TO_STORAGE else ("cpu", "a CPU")
    own = float(getattr(pressure[host], resource))
    others = [getattr(each, resource) for name, each in pressure.items() if name != host]
    elsewhere = max(0.0, statistics.median(others)) if others else 0.0
    if own < max(_PRESSED, _PRESSED_TIMES * elsewhere):
        return ""
    there = f", elsewhere {100 * elsewhere:.0f} %" if others else ""
    return f"; processes of {host} waited for {what} {100 * own:.0f} % of the time{there}"


class _Finder:
    def __init__(self, saves: Sequence[Save], ranks_by_host: Mapping[str, Sequence[int]]) -> None:
        self._saves = saves
        self._by_host = ranks_by_host
        self._host_of = {rank: host for host, ranks in ranks_by_host.items() for rank in ranks}

    def of_phase(self, phase: str) -> Iterator[Blame]:
        """Yields who is slow in a phase."""
        saves = [save for save in self._saves if phase in save.phases]
        slow = {id(save): _slow_ranks(save, phase) for save in saves}
        counts = Counter(rank for save in saves[-WINDOW:] for rank in slow[id(save)])
        suspects = {rank for rank, times in counts.items() if times >= NEEDED}
        for place, ranks in self._places(suspects):
            yield self._slow(place, ranks, phase, saves, slow)
        if not suspects:
            yield from self._all(phase, saves)

    def heavy(self) -> list[Blame]:
        """Returns who has more bytes than the others, each by the first phase that it costs."""
        found: dict[tuple[int, ...], Blame] = {}
        for phase in _PHASES:
            saves = [save for save in self._saves if phase in save.even]
            heavy = {id(save): _heavy_ranks(save, phase) for save in saves}
            counts = Counter(rank for save in saves[-WINDOW:] for rank in heavy[id(save)])
            for rank in sorted(rank for rank, n in counts.items() if n >= NEEDED):
                one, cost_s = self._heavy(rank, phase, saves, heavy)
                if cost_s > LEAST_OF_BYTES_S and _later_s(one) > SEEN_OF_BYTES * cost_s:
                    found.setdefault(one.ranks, one)
        return list(found.values())

    def _places(self, ranks: set[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields hosts all of whose ranks are slow, then the ranks that are left."""
        left = set(ranks)
        for host, own in sorted(self._by_host.items()):
            if len(self._by_host) > 1 and set(own) <= left:
                yield f"host {host}", tuple(own)
                left -= set(own)
        for rank in sorted(left):
            yield self.name(rank), (rank,)

    def name(self, rank: int) -> str:
        host = self._host_of.get(rank, "")
        return f"rank {rank}" + (f" on {host}" if host else "")

    def _slow(
        self,
        place: str,
        ranks: tuple[int, ...],
        phase: str,
        saves: Sequence[Save],
        slow: Mapping[int, Mapping[int, float]],
    ) -> Blame:
        last = [save for save in saves[-WINDOW:] if slow[id(save)].keys() & set(ranks)]
        value_s = statistics.median(
            max(slow[id(save)].get(rank, 0.0) for rank in ranks) for save in last
        )
        usual_s = statistics.median(_spread_median(save, phase) for save in last)
        does, of_rank, of_host, _, look = _PHASES[phase]
        what = of_host if place.startswith("host") else of_rank
        since = _since(saves, lambda save: bool(slow[id(save)].keys() & set(ranks)))
        later = ""
        if phase in _TO_STORAGE:
            later = f"; saves are durable {seconds_text(value_s - usual_s)} later"
        sentence = (
            f"{place}, {what}: {does} takes {seconds_text(value_s)} where others take "
            f"{seconds_text(usual_s)}, since {since}{later}; look at {look}"
        )
        return Blame(place, "slow", phase, ranks, value_s, usual_s, since, len(last), sentence)

    def _heavy(
        self, rank: int, phase: str, saves: Sequence[Save], heavy: Mapping[int, Mapping[int, float]]
    ) -> tuple[Blame, float]:
        """Returns a rank that has more bytes, and the seconds that these take by the byte."""
        # Of all saves: what little it costs is lost in a few of them.
        own = [save for save in saves if rank in heavy[id(save)]]
        value_s = statistics.median(dict(save.phases[phase].slowest)[rank] for save in own)
        usual_s = statistics.median(save.phases[phase].median_s for save in own)
        since = _since(saves, lambda save: rank in heavy[id(save)])
        place, times = self.name(rank), sum(save in own for save in saves[-WINDOW:])
        own_bytes, usual_bytes = own[-1].bytes_of(phase)[rank], heavy[id(own[-1])][rank]
        does = f"{_PHASES[phase][0]} takes {seconds_text(value_s)}"
        sentence = (
            f"{place} has more bytes than the others, {size_text(own_bytes)} where these have "
            f"{size_text(usual_bytes)}, since {since}: {does} where others take "
            f"{seconds_text(usual_s)}, and no longer for each byte; look at how the state is "
            "divided over ranks"
        )
        one = Blame(place, "bytes", phase, (rank,), value_s, usual_s, since, times, sentence)
        return one, value_s * (1 - usual_bytes / own_bytes)

    def _all(self, phase: str, saves: Sequence[Save]) -> Iterator[Blame]:
        """Yields that all ranks are slower than they were."""
        if len(saves) < WINDOW + PAST:
            return
        # The older half: what has lasted for as many saves as there were before is still slow.
        past = saves[: max(PAST, (len(saves) - WINDOW) // 2)]
        past_s = statistics.median(save.phases[phase].median_s for save in past)
        slow = [save for save in saves[-WINDOW:] if _is_slow(save.phases[phase].median_s, past_s)]
        if len(slow) < NEEDED:
            return
        value_s = statistics.median(save.phases[phase].median_s for save in slow)
        since = _since(saves, lambda save: _is_slow(save.phases[phase].median_s, past_s))
        does, _, _, of_all, look = _PHASES[phase]
        place = f"all {len(self._by_host)} hosts" if len(self._by_host) > 1 else "all ranks"
        ranks = tuple(sorted(self._host_of))
        sentence = (
            f"{place}, {of_all}: {does} takes {seconds_text(value_s)} where it took "
            f"{seconds_text(past_s)} before, since {since}, for all alike; look at {look}"
        )
        yield Blame(place, "slow", phase, ranks, value_s, past_s, since, len(slow), sentence)

    def late(self, least_s: float) -> Iterator[Blame]:
        """Yields the rank that all others wait for at a save."""
        saves = [save for save in self._saves if save.late_s is not None and save.late_rank >= 0]

        def is_late(save: Save, rank: int) -> bool:
            return save.late_rank == rank and (save.late_s or 0.0) > least_s

        last = saves[-LATE_WINDOW:]
        counts = Counter(save.late_rank for save in last if is_late(save, save.late_rank))
        needed = more_than_chance(len(last), max((save.ranks for save in last), default=0))
        for rank, times in counts.items():
            if times < needed:
                continue
            late = [save.late_s or 0.0 for save in last if is_late(save, rank)]
            value_s = statistics.median(late)
            since = _since(saves, partial(is_late, rank=rank))
            place = self.name(rank)
            sentence = (
                f"{place} comes to save {seconds_text(value_s)} after the first, since {since}: "
                "the others wait for it; look at what it does in a step that others do not"
            )
            yield Blame(place, "late", "", (rank,), value_s, 0.0, since, times, sentence)


def more_than_chance(saves: int, ranks: int) -> int:
    """Returns in how many saves one rank must be the last, for that to be more than chance."""
    part = 1 / max(2, ranks)
    tail, needed = 0.0, saves + 1
    while needed > NEEDED:
        times = needed - 1
        tail += math.comb(saves, times) * part**times * (1 - part) ** (saves - times)
        if tail > CHANCE * part:
            break
        needed = times
    return needed


def _is_slow(value_s: float, usual_s: float) -> bool:
    return value_s - usual_s > LEAST_S and usual_s < SUSPECT * value_s


def _spread_median(save: Save, phase: str) -> float:
    return save.even.get(phase, save.phases[phase]).median_s


def _slow_ranks(save: Save, phase: str) -> dict[int, float]:
    """Returns the ranks that take longer than the median of all, for the same bytes."""
    spread = save.even.get(phase, save.phases[phase])
    if spread.ranks < 2:
        return {}
    slow = {rank: s for rank, s in spread.slowest if _is_slow(s, spread.median_s)}
    if spread is save.phases[phase]:
        return slow
    raw = save.phases[phase]
    if phase == "finish_s":  # what has few bytes need not be faster
        return {rank: s for rank, s in raw.slowest if rank in slow and _is_slow(s, raw.median_s)}
    # What takes long for each of a few bytes, and is done before half of the ranks are, holds up
    # nobody: any copy and write takes a while, however little it is of.
    long = {rank for rank, s in raw.slowest if s >= raw.median_s}
    return {rank: s for rank, s in slow.items() if rank in long}


def _heavy_ranks(save: Save, phase: str) -> dict[int, float]:
    """Returns the ranks that have more bytes than the others and are no slower for each of them,
    and how many the others have on average.
    """
    ranks = save.phases[phase].ranks
    if ranks < 2:
        return {}
    slow, every_bytes = _slow_ranks(save, phase), ranks * save.even_bytes.get(phase, 0.0)
    others = {rank: (every_bytes - own) / (ranks - 1) for rank, own in save.bytes_of(phase).items()}
    return {
        rank: usual
        for rank, usual in others.items()
        if rank not in slow and usual < SUSPECT * save.bytes_of(phase)[rank]
    }


def _since(saves: Sequence[Save], is_so: Callable[[Save], bool]) -> str:
    first = began(saves, is_so)
    return f"{first.incarnation}-{first.step}"


_T = TypeVar("_T")


def began(saves: Sequence[_T], is_so: Callable[[_T], bool]) -> _T:
    """Returns the save since which it is so more often than in three of five, by most: a few that
    are well between those that are not end nothing.
    """
    first, most, excess = saves[-1], 0, 0
    for save in reversed(saves):
        excess += WINDOW - NEEDED if is_so(save) else -NEEDED
        if excess >= most:
            first, most = save, excess
    return first
