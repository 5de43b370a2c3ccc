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


#: What a rank does in a restore, each moment once: in this order they are shown.
_RESTORE = (
    ("inventory", "rank 0 asked what hosts and storage hold"),
    ("choose", "rank 0 chose the generation, and the source of each image"),
    ("plan", "opening images, and comparing the state with them"),
    ("allocate", "making room in the state"),
    ("dropped", "all that was done with a source that failed or did not verify"),
    ("read", "reading bytes"),
    ("decode", "decoding images of lost hosts, with reading what that takes"),
    ("verify", "comparing checksums, by which what lies in memory is read"),
    ("copy", "copying into the state"),
    ("exchange", "passing on what one rank read for others"),
    ("device", "waiting for copies to devices"),
    ("set", "setting what is no tensor, and telling the keeper"),
    ("meet", "waiting for other ranks"),
)
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
    *(
        Phase(
            f"restore_{name}",
            events.Restored,
            f"{name}_s",
            "rank",
            f"of `restore`, {text}",
            "restore",
        )
        for name, text in _RESTORE
    ),
)
BY_EVENT: dict[str, tuple[Phase, ...]] = {}
for _phase in PHASES:
    _name = _phase.event.__name__
    BY_EVENT[_name] = (*BY_EVENT.get(_name, ()), _phase)
