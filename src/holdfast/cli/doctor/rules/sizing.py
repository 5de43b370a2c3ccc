"""PURE. Computes the memory, network and storage that a run needs, before it is started.

The numbers come from the functions that the coordinator, the keepers and the image format use
themselves. docs/sizing.md explains each of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.coordinator.slots import SLOTS_PER_IMAGE, SLOTS_WITH_PARITY, slot_capacity
from holdfast.errors import UsageError
from holdfast.format.image import image_bytes, plan_image
from holdfast.observe.text import count_text, size_text
from holdfast.parity.planning.budget import capacity
from holdfast.parity.planning.groups import GroupHost, divide, preferred_group_size
from holdfast.policy.arguments import MAX_PARITY

#: A snapshot stays in memory while the next one is captured: with fewer slots, none stays.
LEAST_SLOTS = 2
MAX_HOSTS = 1 << 16
MAX_RANKS = 1 << 10
MAX_STATE_BYTES = 10**18
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?(?:([KMGTP]?)(I?)B?)")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


@dataclass(frozen=True, slots=True)
class Sizing:
    """The needs of one run, in bytes; those of a host are those of the host with the most."""

    state_bytes: int
    hosts: int
    ranks_per_host: int
    image_bytes: int
    """The image of one rank: its share of the state, the header and the block table."""
    slots_per_image: int
    slot_bytes: int
    """One slot, a file in shared memory."""
    slots_bytes: int
    """All slots of a host."""
    parity: int
    """Losses of hosts in each group that memory survives, as far as there are hosts for it."""
    parity_bytes: int
    """Shared memory of a host for parity."""
    shared_bytes: int
    """Shared memory of a host: slots and parity."""
    least_bytes: int
    """Shared memory of a host below which no snapshot stays in memory."""
    keeper_bytes: int
    """Private memory of a keeper for the data that it receives to make parity."""
    network_bytes: int
    """Bytes that a host receives, and sends, for each protected snapshot."""
    written_bytes: int
    """Bytes that a host writes to storage for each checkpoint."""
    checkpoint_bytes: int
    """Storage of one checkpoint."""
    checkpoints: int | None
    """The most that storage holds at one time; None: every checkpoint is kept."""
    storage_bytes: int | None
    survives: str
    missing: tuple[str, ...]
    """Sentences on what was asked for and is not reached."""


def parse_size(option: str, text: str) -> int:
    """Bytes of a size such as ``40GB``, ``1.5 TB`` or ``64GiB``. UsageError for anything else."""
    found = _SIZE.fullmatch(text.strip().upper())
    size = 0
    if found is not None and not (found[3] and not found[2]):
        unit = (1024 if found[3] else 1000) ** _POWERS[found[2]]
        whole, _, part = found[1].partition(".")
        size = int(whole) * unit + int(part or 0) * unit // 10 ** len(part)
    if not 1 <= size <= MAX_STATE_BYTES:
        raise UsageError(
            f"{option}={text!r:.100}: say how large the state is, such as 40GB, 1.5TB or 64GiB, "
            f"and at most {MAX_STATE_BYTES // 10**15} PB"
        )
    return size


def compute_sizing(
    state_bytes: int,
    *,
    hosts: int = 1,
    parity: int = 0,
    ranks_per_host: int = 1,
    keep_last: int = 0,
    slot_head_bytes: int = 0,
    swept_after: int = 0,
) -> Sizing:
    """The needs of a run whose state of ``state_bytes`` is stored in equal shares by all ranks.

    ``keep_last``: 0 keeps every checkpoint. ``slot_head_bytes``: those before the image in the file
    of a slot. ``swept_after``: publications until the files of a removed checkpoint are deleted.
    UsageError for numbers that no run can have.
    """
    _within("--hosts", hosts, 1, MAX_HOSTS)
    _within("--parity", parity, 0, MAX_PARITY - 1)
    _within("--ranks", ranks_per_host, 1, MAX_RANKS)
    if keep_last < 0:
        raise UsageError(f"--keep={keep_last}: a whole number from 0 on is needed")
    share = -(-state_bytes // (hosts * ranks_per_host))
    plan = plan_image([("state", "U8", (share,))])
    image = image_bytes(plan, 0)
    coded = (image - plan.data_start,) * ranks_per_host
    reached, shared, private, moved = 0, 0, 0, 0
    survives, missing = "no loss of a host", tuple[str, ...]()
    if parity:
        places = [GroupHost(f"{number:05}", image_bytes=coded) for number in range(hosts)]
        division = divide(places, parity=parity, group_size=preferred_group_size(parity))
        reached, needs, level = division.groups[0].parity, capacity(division), division.level
        shared, private, survives, missing = needs.shared, needs.private, level.text, level.missing
        if reached:  # each row is a segment long, as are what is received and what is handed on
            members = min(len(group.hosts) for group in division.groups)
            moved = (members - 1) * (needs.rows // reached)
    slots = SLOTS_WITH_PARITY if reached else SLOTS_PER_IMAGE
    slot = slot_head_bytes + slot_capacity(image)
    checkpoint = hosts * ranks_per_host * image
    most = keep_last + swept_after + 1 if keep_last else None
    return Sizing(
        state_bytes=state_bytes,
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        image_bytes=image,
        slots_per_image=slots,
        slot_bytes=slot,
        slots_bytes=slots * ranks_per_host * slot,
        parity=reached,
        parity_bytes=shared,
        shared_bytes=slots * ranks_per_host * slot + shared,
        least_bytes=LEAST_SLOTS * ranks_per_host * slot + shared,
        keeper_bytes=private,
        network_bytes=moved,
        written_bytes=ranks_per_host * image,
        checkpoint_bytes=checkpoint,
        checkpoints=most,
        storage_bytes=None if most is None else most * checkpoint,
        survives=survives,
        missing=missing,
    )


def sizing_rows(needs: Sizing) -> list[tuple[str, str, str]]:
    """The lines of the table: the resource, its size as text, what it is made of."""
    per_rank = f"{needs.slots_per_image} slots of {size_text(needs.slot_bytes)} for each rank"
    if needs.parity_bytes:
        per_rank += f", and {size_text(needs.parity_bytes)} for parity"
    least = f"{LEAST_SLOTS} slots for each rank{' and parity' if needs.parity_bytes else ''}"
    rows = [
        (
            "state",
            size_text(needs.state_bytes),
            f"{count_text(needs.hosts, 'host')}, {count_text(needs.ranks_per_host, 'rank')} on "
            f"each, images of {size_text(needs.image_bytes)}",
        ),
        ("shared memory of each host", size_text(needs.shared_bytes), per_rank),
        (
            "  the least for snapshots",
            size_text(needs.least_bytes),
            f"{least}; with less, only durable saves are made, through a ring",
        ),
    ]
    if needs.network_bytes:
        rows += [
            (
                "memory of each keeper",
                size_text(needs.keeper_bytes),
                "for what it receives to make parity",
            ),
            (
                "network of each host",
                size_text(needs.network_bytes),
                "received, and as much sent, for each protected snapshot",
            ),
        ]
    rows.append(
        (
            "storage of a checkpoint",
            size_text(needs.checkpoint_bytes),
            f"{size_text(needs.written_bytes)} written by each host",
        )
    )
    if needs.checkpoints is None:
        rows.append(("storage of the run", "grows", "Keep() keeps every checkpoint"))
    else:
        rows.append(
            (
                "storage of the run",
                size_text(needs.storage_bytes),
                f"at most {needs.checkpoints} checkpoints: an old one is deleted some saves later",
            )
        )
    rows.append(("memory survives", "", needs.survives))
    return rows


def _within(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UsageError(f"{option}={value}: a whole number from {least} to {most} is needed")
