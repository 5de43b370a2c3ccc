"""PURE. Joins what memory and storage say of the starts of a run, of which two may have one number.

A start that storage could not record is known by its host alone. One that begins elsewhere counts
on from what storage knows, and takes its number. Its nonce tells which of them a record is of, or
an image; what memory has of a start whose number storage gives to another belongs to no line.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

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
