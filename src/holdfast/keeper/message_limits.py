"""What no trainer may say: numbers that mean nothing, told as an error and never acted on.

Trainers are our user's own processes, so this is no wall against an attacker. It keeps one of
another version, or one with a fault, from taking the keeper or another rank's slots with it.
"""

from __future__ import annotations

from holdfast.errors import UsageError
from holdfast.policy.arguments import MAX_PARITY
from holdfast.snapshot import messages as m

MAX_WORLD = 1 << 20
MAX_STEP = (1 << 63) - 1
MAX_BYTES = 1 << 46
"""Of one image: no host has that much memory."""
MAX_SUMS_BYTES = 64 << 20


def check(message: m.Message, world: int) -> None:
    """Raise UsageError when ``message`` cannot be meant; ``world``: ranks of the incarnation."""
    match message:
        case m.Begin():
            _within("world", message.world, 1, MAX_WORLD)
            if not message.nonce:
                raise UsageError("an incarnation needs a nonce, this one is empty")
            ranks = sorted(rank for host in message.hosts for rank in host.ranks)
            if message.hosts and ranks != list(range(message.world)):
                raise UsageError(f"each of {message.world} ranks is on one host, not {ranks[:8]}")
        case m.Join():
            _within("rank", message.rank, 0, world - 1)
            _within("parity", message.parity, 0, MAX_PARITY - 1)
            _within("compare_replicas", message.compare_replicas or 0, 0, MAX_STEP)
        case m.Adopt(parent=parent) if parent is not None:
            _within("parent's incarnation", parent[0], 1, MAX_STEP)
            _within("parent's step", parent[1], 0, MAX_STEP)
        case m.Ask():
            _within("step", message.step, 0, MAX_STEP)
            _within("values_bytes", message.values_bytes, 0, MAX_BYTES)
        case m.Progress():
            _within("size_bytes", message.size_bytes, 0, MAX_BYTES)
        case m.Captured():
            _within("image_bytes", message.image_bytes, 1, MAX_BYTES)
            for checksum in (message.header_xxh3, message.table_xxh3):
                if len(checksum) != 16:
                    raise UsageError(f"a checksum has 16 digits, not {len(checksum)}")
            _within("same_since", message.same_since, -2, MAX_STEP)
            _within("the size of the sums", sum(map(len, message.sums)), 0, MAX_SUMS_BYTES)
        case m.Withdraw() | m.Decline() | m.MakeDurable() | m.Announce() | m.Explain():
            _within("step", message.step, 0, MAX_STEP)


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UsageError(
            f"{name} is {value}, but must be {least} to {most}: trainer and keeper do not "
            "understand each other (are they the same version of Holdfast?)"
        )
