"""PURE. The tree along which ranks exchange words: who passes what to whom, in each phase.

Ranks of a host speak to its lowest, and hosts, in the order of their lowest ranks, to a root in
steps of ``FAN_OUT``. The tree follows from rank numbers alone, so nobody is ever elected. Every
join here is associative and commutative, and as large as what differs, not as the ranks are many.

A rank passes one word up for itself and all below it; the root's word is the verdict, and goes down
again. The root may hold it, to conclude from it first. A verdict names ranks that are late or have
ended. Every frame may come twice or late: a rank says its word again to whoever is above it after a
loss, and hears a verdict again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct, field, msgpack

from holdfast.geometry.rank_ranges import Range, in_ranges, ranks_in, union

#: The most hosts that speak to one.
FAN_OUT = 32
#: For each different value, the ranks that said it.
_Column = dict[bytes, list[Range]]


class Place(NamedTuple):
    """The place of one rank. ``above``: its parent, that one's parent, and so on to rank 0.

    ``height``: the number of levels below it.
    """

    above: tuple[int, ...]
    children: tuple[int, ...]
    height: int


def places_of(hosts: Sequence[str], fan_out: int = FAN_OUT) -> list[Place]:
    """Return the place of each rank, from the names of their hosts by rank."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    leaders = list(first.values())
    parents = [first[host] for host in hosts]
    for number, leader in enumerate(leaders):
        parents[leader] = leaders[(number - 1) // fan_out] if number else -1
    children: list[list[int]] = [[] for _ in hosts]
    for rank, parent in enumerate(parents[1:], 1):
        children[parent].append(rank)
    heights = [0] * len(hosts)
    for rank in (*_non_leaders(parents, first), *reversed(leaders[1:])):
        heights[parents[rank]] = max(heights[parents[rank]], heights[rank] + 1)
    return [
        Place(tuple(_above(parents, rank)), tuple(children[rank]), heights[rank])
        for rank in range(len(hosts))
    ]


def _non_leaders(parents: Sequence[int], first: dict[str, int]) -> Iterator[int]:
    leaders = set(first.values())
    return (rank for rank in range(len(parents)) if rank not in leaders)


def _above(parents: Sequence[int], rank: int) -> Iterator[int]:
    while (rank := parents[rank]) >= 0:
        yield rank


# ── words that are alike ─────────────────────────────────────────────────────────────────────


class Said(NamedTuple):
    """A value, and the ranks that said it, as ranges."""

    value: bytes
    ranks: list[Range]

    @property
    def first(self) -> int:
        """The lowest of them."""
        return self.ranks[0][0]


def said_by(rank: int, values: Sequence[bytes]) -> bytes:
    """Return the word of one rank that says these values, each in a column of its own."""
    return _pack([{value: [(rank, rank + 1)]} for value in values])


def join_said(one: bytes, other: bytes) -> bytes:
    """Join two words: each different value once, with all ranks that said it."""
    columns = _unpack(one)
    for column, more in zip(columns, _unpack(other), strict=True):
        for value, ranks in more.items():
            column[value] = union([*column.get(value, ()), *ranks])
    return _pack(columns)


def all_said(word: bytes) -> list[list[Said]]:
    """Return the different values of each column, in the order of their lowest ranks."""
    return [
        sorted((Said(*item) for item in column.items()), key=lambda said: said.first)
        for column in _unpack(word)
    ]


def with_column(word: bytes, said: Said) -> bytes:
    """Return the word with one column more, of this value alone."""
    return _pack([*_unpack(word), {said.value: said.ranks}])


def by_rank(column: Iterable[Said]) -> list[bytes]:
    """Return the value of each rank; what several said is one object."""
    values = {rank: said.value for said in column for rank in ranks_in(said.ranks)}
    return [values[rank] for rank in range(len(values))]


def _pack(columns: Sequence[_Column]) -> bytes:
    return msgpack.encode([sorted(column.items()) for column in columns])


def _unpack(word: bytes) -> list[_Column]:
    columns = msgpack.decode(word, type=list[list[tuple[bytes, list[Range]]]])
    return [dict(column) for column in columns]


#: Joins two payloads of a phase into one. Associative and commutative: words meet in any order.
Join = Callable[[bytes, bytes], bytes]
#: Seconds for which a rank waits, after its deadline, for what those below it know of the missing.
GRACE_S = 1.0
#: Seconds in which a rank that is there says so. It answers while its own thread computes.
ANSWER_S = 10.0
#: Verdicts that are kept for ranks that lost the line on which they would have come.
_KEPT = 4
#: Of a tree of hosts with any number of ranks.
_MOST_LEVELS = 4
_UP, _DOWN, _ASK, _HERE = range(4)


class Word(msgspec.Struct, array_like=True):
    """What a rank says in a phase for itself and all below it.

    ``apart``: two ranks at different phases, and these. ``missing``: ranks that have not spoken;
    those of them in ``ended`` never will. ``why``: what prevented a verdict.
    """

    rank: int
    phase: str
    payload: bytes
    apart: tuple[int, str, int, str] | None = None
    missing: list[Range] = []
    ended: list[Range] = []
    why: str = ""

    @property
    def is_well(self) -> bool:
        """True when all ranks that it is of have spoken, in the same phase."""
        return not (self.missing or self.apart or self.why)

    def joined(self, other: Word, join: Join) -> Word:
        """Return both as the word of this rank."""
        apart = self.apart or other.apart
        if self.phase != other.phase:
            apart = self.rank, self.phase, other.rank, other.phase
        word = Word(
            self.rank,
            self.phase,
            b"",
            apart,
            union([*self.missing, *other.missing]),
            union([*self.ended, *other.ended]),
            self.why or other.why,
        )
        if word.is_well:
            try:
                word.payload = join(self.payload, other.payload)
            except Exception as error:
                word.why = f"rank {self.rank} cannot join what ranks say: {error!r}"
        return word


class _PhaseFrame(msgspec.Struct, array_like=True):
    kind: int
    count: int
    word: Word


class _PhaseState(Struct):
    own: Word | None = None
    join: Join = max
    timeout_s: float = 0.0
    heard: dict[int, Word] = field(default_factory=dict)
    """What the children of this rank said."""
    passed: Word | None = None
    """What this rank said to those above it."""
    verdict: Word | None = None
    until_s: float = float("inf")
    """When it passes on that ranks are missing; then when it asks what is above it."""
    is_answered: bool = True
    is_held: bool = False
    """At the root: the word of all waits for ``settle``."""


class RankPhases:
    """The phases of one rank, numbered from 1 in the order in which all ranks come to them.

    ``sent``: frames to be sent, with the rank that each goes to. The caller empties it.
    """

    def __init__(self, rank: int, place: Place) -> None:
        self.rank, self.place = rank, place
        self.sent: list[tuple[int, bytes]] = []
        self._phases: dict[int, _PhaseState] = {}
        self._above: set[int] = set()
        self._below: set[int] = set()
        self._ended: set[int] = set()
        self._newest = 0
        """The last phase whose verdict is known."""

    # ── what this rank does ──────────────────────────────────────────────────────────────────

    def speak(
        self,
        count: int,
        word: Word,
        join: Join,
        timeout_s: float,
        now_s: float,
        *,
        is_held: bool = False,
    ) -> None:
        """Begin the phase ``count`` on this rank, which waits for the others at most ``timeout_s``
        and then for what these know.

        ``is_held``: the root makes no verdict of what all say before ``settle``, for which it has
        ``timeout_s`` from then on.
        """
        phase = self._phase(count)
        phase.is_held = is_held
        phase.own, phase.join, phase.timeout_s = word, join, timeout_s
        phase.until_s = now_s + timeout_s + GRACE_S * (self.place.height - 1)
        self._join_all(count, phase)
        if phase.passed is not None:
            phase.until_s = now_s + self._verdict_s(phase)

    def leave(self, count: int, word: Word) -> None:
        """Say the last word of a rank that waits for nobody; without effect if it has spoken."""
        phase = self._phase(count)
        phase.is_held, was_held = False, phase.is_held
        if phase.verdict is None and phase.passed is None:
            self._pass(count, phase, word)
        elif was_held and not self.place.above:
            self._conclude(count, phase, word)

    def held_of(self, count: int) -> Word | None:
        """Return what all ranks said, where the root is to settle the phase; else None."""
        phase = self._phases.get(count)
        is_open = phase is not None and phase.is_held and phase.verdict is None
        return phase.passed if phase is not None and is_open and not self.place.above else None

    def settle(self, count: int, verdict: Word) -> None:
        """Make the verdict of a phase that the root held; without effect if it came too late."""
        self._conclude(count, self._phase(count), verdict)

    def verdict_of(self, count: int) -> Word | None:
        """Return what all ranks said in a phase; None while it is not known."""
        phase = self._phases.get(count)
        return phase.verdict if phase is not None else None

    # ── what others do ───────────────────────────────────────────────────────────────────────

    def hear(self, sender: int, frame: bytes, now_s: float) -> None:
        """Take in a frame. Raises msgspec.ValidationError or DecodeError for one that is none."""
        said = msgspec.msgpack.decode(frame, type=_PhaseFrame)
        count, word = said.count, said.word
        if count <= self._newest - _KEPT and count not in self._phases:
            if said.kind in (_UP, _ASK):  # the others went on without it
                late = Word(self.rank, word.phase, b"", missing=[(sender, sender + 1)])
                self._send(sender, _DOWN, count, late)
            return
        phase = self._phase(count)
        if said.kind == _DOWN:
            self._conclude(count, phase, word)
        elif said.kind == _HERE:
            phase.is_answered = True
        elif phase.verdict is not None:
            self._send(sender, _DOWN, count, phase.verdict)
        elif said.kind == _UP:
            if sender in self.place.children:
                phase.heard[sender], before = word, phase.passed
                self._join_all(count, phase)
                if before is None and self.held_of(count) is not None:
                    phase.until_s = now_s + self._verdict_s(phase)
        elif phase.own is not None:
            self._send(sender, _HERE, count, Word(self.rank, "", b""))
        elif phase.passed is None:  # the sender waited long enough for this rank
            here = [(self.rank, self.rank + 1)]
            self._pass(count, phase, Word(sender, word.phase, b"", missing=here))

    def attach(self, rank: int) -> None:
        """A line to this rank is open. One above it hears again what has no verdict yet."""
        if rank not in self.place.above:
            self._below.add(rank)
            self._ended.discard(rank)
            return
        self._above.add(rank)
        for count, phase in self._phases.items():
            if phase.passed is not None and phase.verdict is None:
                self._send(rank, _UP, count, phase.passed)

    def detach(self, rank: int) -> None:
        """The line to this rank broke."""
        self._above.discard(rank)
        self._below.discard(rank)

    def end(self, rank: int) -> None:
        """A rank below did not come back: it has ended, and no phase waits for it."""
        if rank not in self._below:
            self._ended.add(rank)
            for count, phase in list(self._phases.items()):
                self._join_all(count, phase)

    def end_above(self) -> None:
        """All ranks above have ended: no verdict comes any more."""
        ended = in_ranges(self.place.above)
        for count, phase in list(self._phases.items()):
            if phase.passed is not None and phase.verdict is None:
                name = phase.passed.phase
                self._conclude(count, phase, Word(self.rank, name, b"", None, ended, ended))

    def tick(self, now_s: float) -> None:
        """Act on deadlines that are over."""
        for count, phase in list(self._phases.items()):
            if phase.own is None or phase.verdict is not None or phase.until_s > now_s:
                continue
            if phase.passed is None:
                phase.until_s = now_s + self._verdict_s(phase) - phase.timeout_s
                self._join_all(count, phase, is_over=True)
            elif phase.is_answered and self._above:
                phase.is_answered, phase.until_s = False, now_s + ANSWER_S
                self._send(min(self._above, key=self._is_far), _ASK, count, phase.own)
            else:
                silent = self.place.above[0] if self.place.above else self.rank
                late = Word(self.rank, phase.own.phase, b"", missing=[(silent, silent + 1)])
                self._conclude(count, phase, late)

    def next_s(self) -> float:
        """Return when ``tick`` is to be called; infinity while nothing has a deadline."""
        waiting = (each.until_s for each in self._phases.values() if each.own and not each.verdict)
        return min(waiting, default=float("inf"))

    @property
    def ended(self) -> tuple[int, ...]:
        """The ranks below that have ended. Safe from every thread."""
        return tuple(self._ended)

    @property
    def has_unheard(self) -> bool:
        """True while something that this rank passed on has no verdict."""
        return any(each.passed and not each.verdict for each in self._phases.values())

    # ── the way up and down ──────────────────────────────────────────────────────────────────

    def _phase(self, count: int) -> _PhaseState:
        return self._phases.setdefault(count, _PhaseState())

    def _join_all(self, count: int, phase: _PhaseState, *, is_over: bool = False) -> None:
        """Pass on the word of this rank and all below it, once they have spoken or never will."""
        if phase.passed is not None or phase.verdict is not None:
            return
        silent = [child for child in self.place.children if child not in phase.heard]
        ended = [child for child in silent if child in self._ended]
        has_end = any(word.ended for word in phase.heard.values())
        if is_over or has_end or (ended and any(self._said(phase))):
            missing = in_ranges(silent if is_over else ended)
        elif phase.own is None or silent:
            return
        else:
            missing = []
        words = list(self._said(phase))
        joined = words[0]
        for word in words[1:]:
            joined = joined.joined(word, phase.join)
        joined = msgspec.structs.replace(
            joined,
            rank=self.rank,
            missing=union([*joined.missing, *missing]),
            ended=union([*joined.ended, *in_ranges(ended)]),
        )
        self._pass(count, phase, joined)

    @staticmethod
    def _said(phase: _PhaseState) -> Iterator[Word]:
        if phase.own is not None:
            yield phase.own
        yield from phase.heard.values()

    def _pass(self, count: int, phase: _PhaseState, word: Word) -> None:
        phase.passed = word
        if not self.place.above and not (phase.is_held and word.is_well):
            self._conclude(count, phase, word)
        for rank in self._above:
            self._send(rank, _UP, count, word)

    def _conclude(self, count: int, phase: _PhaseState, verdict: Word) -> None:
        if phase.verdict is not None:
            return
        phase.verdict = verdict
        phase.heard.clear()
        self._newest = max(self._newest, count)
        frame = _frame(_DOWN, count, verdict)
        self.sent += [(rank, frame) for rank in self._below]
        for old in [one for one in self._phases if one <= self._newest - _KEPT]:
            if self._phases[old].own is not None:  # otherwise this rank comes to it yet
                del self._phases[old]

    def _send(self, rank: int, kind: int, count: int, word: Word) -> None:
        self.sent.append((rank, _frame(kind, count, word)))

    def _is_far(self, rank: int) -> int:
        return self.place.above.index(rank)

    def _verdict_s(self, phase: _PhaseState) -> float:
        """Seconds in which a verdict comes from above, if all above have come to the phase; or in
        which the root settles it.
        """
        return phase.timeout_s + (2 * GRACE_S * _MOST_LEVELS if self.place.above else 0)


def _frame(kind: int, count: int, word: Word) -> bytes:
    return msgspec.msgpack.encode(_PhaseFrame(kind, count, word))
