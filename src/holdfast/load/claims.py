"""What of a checkpoint no rank takes: found by all ranks together, in two short messages.

One rank of a pipeline takes a part of a checkpoint, and the others the rest. Only what all of them
leave, although it belongs to a key of the state, does not fit. Ranks that take the same say it
once: thousands of them differ in a few ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash
from msgspec import Struct, msgpack

from holdfast.state.restore import Restoring
from holdfast.world import World, agree


class Claims(Struct, array_like=True, frozen=True):
    """One rank's. Leaves by their number in the layout, one bit each; values by what is said."""

    taken: bytes
    left: bytes
    values_taken: list[int]
    values_left: list[str]

    @property
    def leaves_something(self) -> bool:
        """Whether something below this state's keys is not taken by it."""
        return any(self.left) or bool(self.values_left)


def unclaimed(
    world: World, phase: str, leaves: Sequence[str], compare: Callable[[], Restoring],
    *, timeout_s: float,
) -> list[str] | None:  # fmt: skip
    """What no rank takes, in words, the same on all ranks; None when all fits everywhere.

    All ranks call it. ``leaves`` are the names in the layout. ``compare`` finds what this rank
    takes; where that finds something amiss itself, the list may be empty. Raises on all ranks what
    it raises on one.
    """
    message = b""

    def ask() -> bytes:
        nonlocal message
        restoring = compare()
        mine = claims_of(leaves, restoring)
        message = msgpack.encode(mine)
        flag = b"\1" if restoring.amiss or mine.leaves_something else b"\0"
        return flag + xxhash.xxh3_128_digest(message)

    heard = agree(world, f"{phase}: compared", ask, timeout_s=timeout_s)
    if all(one[:1] == b"\0" for one in heard):
        return None
    is_first = heard.index(heard[world.rank]) == world.rank
    told = message if is_first else b""
    said = agree(world, f"{phase}: claimed", lambda: told, timeout_s=timeout_s)
    return left_by_all(leaves, [msgpack.decode(one, type=Claims) for one in said if one])


def claims_of(leaves: Sequence[str], restoring: Restoring) -> Claims:
    """What one rank takes and leaves."""
    claimed, found = restoring.claimed(), restoring.found
    return Claims(
        _bits([leaf in claimed for leaf in leaves]),
        _bits([leaf not in claimed and restoring.in_scope(leaf) for leaf in leaves]),
        sorted(map(_hash, found.taken)),
        sorted(found.left),
    )


def left_by_all(leaves: Sequence[str], said: Sequence[Claims]) -> list[str]:
    """What no rank takes, in words."""
    taken = left = 0
    for one in said:
        taken |= int.from_bytes(one.taken, "little")
        left |= int.from_bytes(one.left, "little")
    nobodys = left & ~taken
    values_taken = {number for one in said for number in one.values_taken}
    values_left = sorted({text for one in said for text in one.values_left})
    return [
        *(text for text in values_left if _hash(text) not in values_taken),
        *(
            f"{leaf}: in the checkpoint, but nothing in the state takes it"
            for number, leaf in enumerate(leaves)
            if nobodys >> number & 1
        ),
    ]


def _bits(claims: Sequence[bool]) -> bytes:
    """One bit for each, in whole bytes, the first one lowest."""
    digits = "".join("1" if claim else "0" for claim in reversed(claims))
    return int(digits or "0", 2).to_bytes(-(-len(claims) // 8), "little")


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))
