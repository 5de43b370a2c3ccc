"""Validates the numbers and texts in trainers' messages; invalid ones are refused as errors.

Trainers are our user's own processes, so this does not stop an attacker. It prevents a trainer of
another version, or a faulty one, from crashing the keeper or corrupting another rank's slots.
"""

from __future__ import annotations

import re

from holdfast.errors import UsageError
from holdfast.policy.arguments import MAX_PARITY
from holdfast.protocol import messages as m

MAX_WORLD = 1 << 20
MAX_STEP = (1 << 63) - 1
MAX_BYTES = 1 << 46
"""Limit of one image's size: no host has that much memory."""
MAX_SUMS_BYTES = 64 << 20
MAX_TEXT = 64
MAX_KEEP_BY = 4096
"""Length limit of a nonce or a policy's name: the nonce becomes part of file names."""
MAX_PORT = (1 << 16) - 1
MAX_PATIENCE_S = 24 * 3600.0
MOST_STARTS_AHEAD = 1 << 16
"""Limit of unseen starts of a run: a number further ahead is invalid."""
FRAME_S = 60.0
"""Timeout for the rest of a message that has begun."""
MAX_OPTIMIZERS = 1 << 20
_CHECKSUM = re.compile("[0-9a-f]{16}")


def validate_message(message: m.Message, world: int) -> None:
    """Raise UsageError if a field of ``message`` is invalid; ``world``: ranks of the
    incarnation.
    """
    _check_beginning(message, world)
    _check_saving(message)


def _check_beginning(message: m.Message, world: int) -> None:
    match message:
        case m.Begin():
            _within("world", message.world, 1, MAX_WORLD)
            _within("after", message.after, 0, MAX_STEP)
            _check_name("nonce", message.nonce)
            _check_hosts(message.hosts)
            ranks = sorted(rank for host in message.hosts for rank in host.ranks)
            if message.hosts and ranks != list(range(message.world)):
                raise UsageError(f"each of {message.world} ranks is on one host, not {ranks[:8]}")
        case m.AssignRole():
            _within("incarnation", message.incarnation, 1, MAX_STEP)
            _check_name("nonce", message.nonce)
            _check_hosts(message.hosts)
            if not 0 <= message.within_s <= MAX_PATIENCE_S:  # also refuses NaN
                raise UsageError(f"the coordinator is not waited for {message.within_s} s")
        case m.Join():
            _within("incarnation", message.incarnation, 0, MAX_STEP)
            _within("rank", message.rank, 0, world - 1)
            for what, keep in (("keep", message.keep), ("cache_keep", message.cache_keep)):
                for name in ("last", "every", "best"):
                    _within(f"{what}.{name}", getattr(keep, name) or 0, 0, MAX_STEP)
                _within(f"the length of {what}.by", len(keep.by), 0, MAX_KEEP_BY)
            _within("parity", message.parity, 0, MAX_PARITY - 1)
            _within("compare_replicas", message.compare_replicas or 0, 0, MAX_STEP)
        case m.Adopt(parent=parent) if parent is not None:
            _within("parent's incarnation", parent[0], 1, MAX_STEP)
            _within("parent's step", parent[1], 0, MAX_STEP)


def _check_saving(message: m.Message) -> None:
    match message:
        case m.RequestCapture():
            _within("step", message.step, 0, MAX_STEP)
            _within("values_bytes", message.values_bytes, 0, MAX_BYTES)
            _within("turn", message.request_number, 0, MAX_STEP)
            _within("spare_ms", message.spare_ms, 0, MAX_STEP)
            _check_updates(message)
        case m.Progress():
            _within("size_bytes", message.size_bytes, 0, MAX_BYTES)
        case m.Captured():
            _within("image_bytes", message.image_bytes, 1, MAX_BYTES)
            for checksum in (message.header_xxh3, message.table_xxh3):
                if not _CHECKSUM.fullmatch(checksum):
                    raise UsageError(f"a checksum has 16 digits, not {checksum[:MAX_TEXT]!r}")
            _within("same_since", message.same_since, -2, MAX_STEP)
            _within("the size of the sums", sum(map(len, message.sums)), 0, MAX_SUMS_BYTES)
        case m.Announce():
            _within("step", message.step, 0, MAX_STEP)
            _check_name("the policy", message.which)
        case m.CancelRequest() | m.DeclineStep() | m.MakeDurable() | m.Explain():
            _within("step", message.step, 0, MAX_STEP)


def check_start(n: int, known: int) -> None:
    """Raise UsageError unless incarnation ``n`` is shortly after the newest ``known``."""
    _within("the incarnation", n, 1, min(known + MOST_STARTS_AHEAD, MAX_STEP))


def _check_hosts(hosts: tuple[m.HostEntry, ...]) -> None:
    for host in hosts:
        _within(f"a port of host {host.id}", host.port, 0, MAX_PORT)
        _within(f"a port of host {host.id}", host.control_port, 0, MAX_PORT)
        _within(f"the parity rate of host {host.id}", host.parity_rate, 0, MAX_STEP)


def _check_name(what: str, name: str) -> None:
    is_plain = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    if not (is_plain and len(name) <= MAX_TEXT):
        raise UsageError(f"{what} {name[:MAX_TEXT]!r} is not 1 to {MAX_TEXT} plain letters")


def _check_updates(ask: m.RequestCapture) -> None:
    _within("the number of optimizers", len(ask.updates), 0, MAX_OPTIMIZERS)
    for _, count in ask.updates:
        _within("a number of updates", count, 0, MAX_STEP)


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UsageError(
            f"{name} is {value}, but must be {least} to {most}: trainer and keeper do not "
            "understand each other (are they the same version of Holdfast?)"
        )
