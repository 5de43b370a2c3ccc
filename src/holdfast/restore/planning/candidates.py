"""PURE. Sorts the whole generations that were found in memory and storage, and leaves some out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct

from holdfast.errors import UsageError
from holdfast.format.manifest import Generation, Lineage


class Candidate(NamedTuple):
    """One source of a generation. ``where``: "memory" or "storage"."""

    incarnation: int
    step: int
    where: str
    attempt: str
    seal: str = ""
    """The checksum of its manifest, for a candidate in storage: it covers everything to be read."""
    held: int = 0
    """The number of its images that lie whole in memory, where hosts report theirs."""
    is_spread: bool = False
    """True if some image is not in this host's memory for all ranks: on another host, or lost."""

    @property
    def generation(self) -> Generation:
        """(incarnation, step)."""
        return Generation(self.incarnation, self.step)


def choose(
    candidates: Iterable[Candidate],
    parents: Mapping[int, tuple[int, int] | None],
    wanted: int | str | None,
    unreadable: Iterable[int] = (),
) -> list[Candidate]:
    """Return the candidates worth trying, in order: newest step first, memory before storage; of
    two such, the one with more of its images in memory.

    ``wanted`` None: any descendant line of the newest incarnation; a step: that step in this line;
    "incarnation-step": that very generation, abandoned or not. ``unreadable``: as a ``Lineage``
    takes it.
    """
    line = Lineage(dict(parents), unreadable)
    every = list(candidates)
    if isinstance(wanted, str):
        exact = parse_generation(wanted)
        fit = [c for c in every if c.generation == exact]
    else:
        fit = [c for c in every if c.generation in line and wanted in (None, c.step)]
    return sorted(
        fit,
        key=lambda c: (-c.step, -c.incarnation, c.where != "memory", -c.held, c.attempt, c.seal),
    )


def undecided(
    candidates: Iterable[Candidate], line: Lineage, wanted: int | str | None
) -> set[Generation]:
    """Return further candidates that would match if the line were known beyond the missing
    record.
    """
    if isinstance(wanted, str):
        return set()
    fit = {one.generation for one in candidates if wanted in (None, one.step)}
    return {generation for generation in fit if line.is_undecided(generation)}


def parse_generation(text: str) -> Generation:
    """Parse "incarnation-step", as ``holdfast ls`` prints it."""
    incarnation, dash, step = text.partition("-")
    if not (dash and incarnation.isdecimal() and step.isdecimal()):
        raise UsageError(
            f"{text!r} names no generation: give a step, or incarnation-step as in 2-100"
        )
    return Generation(int(incarnation), int(step))


# PURE. Joins what memory and storage say of the starts of a run, of which two may have one number.
#
# A start that storage could not record is known by its host alone. One that begins elsewhere counts
# on from what storage knows, and takes its number. Its nonce tells which of them a record is of, or
# an image; what memory has of a start whose number storage gives to another belongs to no line.


Parent = tuple[int, int] | None


class StartRecords(Struct, frozen=True):
    """What one place says of starts: parents by number, and of the records of these who and when.

    ``starts``: (nonce, time it was made) of each record; there is none where only manifests are.
    """

    parents: dict[int, Parent] = {}
    starts: dict[int, tuple[str, float]] = {}


def replaced_starts(memory: StartRecords, stored: StartRecords) -> set[int]:
    """The numbers of starts in memory that are other starts' in storage, or go on from such a one.

    A parent is known by its number, so what only memory knows hangs on what memory takes it for.
    """
    found: set[int] = set()
    for n, parent in sorted(memory.parents.items()):
        mine, theirs = memory.starts.get(n), stored.starts.get(n)
        if mine is not None and theirs is not None:
            is_other = mine[0] != theirs[0]
        elif n in stored.parents:  # its record there is lost, or cannot be read
            is_other = mine is not None and stored.parents[n] != parent
        else:
            is_other = parent is not None and parent[0] in found
        if is_other:
            found.add(n)
    return found


def is_replaced(
    n: int, nonce: str, memory: StartRecords, stored: StartRecords, replaced: set[int]
) -> bool:
    """Whether an image of start ``n`` is of one that storage has another in place of.

    ``nonce``: as the image has it; where it does not tell, it is of the start that memory knows.
    """
    if nonce and n in stored.starts:
        return stored.starts[n][0] != nonce
    known = memory.starts.get(n)
    return n in replaced and (not nonce or known is None or known[0] == nonce)


def join_parents(memories: Iterable[StartRecords], stored: StartRecords) -> dict[int, Parent]:
    """The parent of each start, as it was recorded last.

    A start that restored twice has two records: storage may lack the second one. Of two starts
    with one number, storage's counts.
    """
    found: dict[int, tuple[tuple[str, float], Parent]] = {}
    for memory in memories:
        replaced = replaced_starts(memory, stored)
        for n, parent in memory.parents.items():
            if n not in replaced:
                one = memory.starts.get(n, ("", 0.0)), parent
                found[n] = _later(found[n], one) if n in found else one
    for n, parent in stored.parents.items():
        mine, theirs = found.get(n), stored.starts.get(n)
        if mine is None or theirs is None or mine[0][0] != theirs[0] or mine[0][1] <= theirs[1]:
            found[n] = theirs or ("", 0.0), parent
    return {n: parent for n, (_, parent) in found.items()}


def _later(
    one: tuple[tuple[str, float], Parent], other: tuple[tuple[str, float], Parent]
) -> tuple[tuple[str, float], Parent]:
    """Of one start, what was recorded last; where that cannot be told, what abandons most."""
    (nonce, made_s), parent = one
    (others, others_s), others_parent = other
    if nonce and nonce == others and made_s != others_s:
        return one if made_s > others_s else other
    if parent is None or others_parent is None:
        return other if parent is None else one
    return min(one, other, key=lambda each: each[1] or (0, 0))
