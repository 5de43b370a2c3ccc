"""PURE. The phases of saves and restores that records give the length of, with their names.

Traces, metrics and the pages about them take names and meanings from this one table.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast import events
from holdfast.events import Event


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: a record of ``event`` ends it, and its ``field`` is its length in seconds.

    ``within``: the phase of the same record in which it lies, behind the others that lie there.
    ``side``: who goes through it, a "rank" or the "keeper". ``text``: what it is.
    """

    name: str
    event: type[Event]
    field: str
    side: str
    text: str
    within: str = ""


PHASES = (
    Phase("held", events.SaveReturned, "held_s", "rank", "`save` held the training thread"),
    Phase(
        "wait_previous",
        events.SaveReturned,
        "wait_previous_s",
        "rank",
        "of `held`, waiting for the save before",
        "held",
    ),
    Phase(
        "describe",
        events.SaveReturned,
        "describe_s",
        "rank",
        "of `held`, describing the state",
        "held",
    ),
    Phase(
        "volatile",
        events.SaveReturned,
        "volatile_s",
        "rank",
        "of `held`, copying leaves that cannot wait",
        "held",
    ),
    Phase(
        "fence",
        events.FenceWaited,
        "held_s",
        "rank",
        "an update was held until the copies it would overwrite were made",
    ),
    Phase(
        "copy",
        events.ImageCaptured,
        "copy_s",
        "rank",
        "the image of a rank was copied to shared memory",
    ),
    Phase(
        "pass",
        events.ImagePassed,
        "copy_s",
        "rank",
        "the image of a rank was copied through a ring",
    ),
    Phase(
        "capture",
        events.SnapshotCaptured,
        "elapsed_s",
        "keeper",
        "from the first request of a step until all ranks captured it",
    ),
    Phase(
        "protect",
        events.SnapshotProtected,
        "elapsed_s",
        "keeper",
        "parity of a generation was made",
    ),
    Phase(
        "write",
        events.ImageDurable,
        "elapsed_s",
        "keeper",
        "an image was written to storage",
    ),
    Phase(
        "finish",
        events.ImageDurable,
        "finish_s",
        "keeper",
        "of `write`, its end, when storage makes it durable (the fsync of a file)",
        "write",
    ),
    Phase(
        "persist",
        events.CheckpointPublished,
        "elapsed_s",
        "keeper",
        "from the beginning of writing until the manifest was published",
    ),
    Phase("restore", events.Restored, "elapsed_s", "rank", "a rank restored a generation"),
)
BY_EVENT: dict[str, tuple[Phase, ...]] = {}
for _phase in PHASES:
    _name = _phase.event.__name__
    BY_EVENT[_name] = (*BY_EVENT.get(_name, ()), _phase)
