"""PURE. The phases of saves and restores that records give the length of, with their names.

Report, page, traces, metrics and the pages about them take names, places and meanings from this one
table: a phase that is added here is in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast import events
from holdfast.events import Event


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: ``field`` of a record of ``event`` is its length in seconds.

    ``side``: who goes through it: a "rank", the "keeper" of an image, or the "coordinator" for all.
    ``text``: what it is. ``label``: its name in tables. ``track``: its track in a trace. ``sign``,
    ``style``: of its bar in a page. ``place``: where it lies before the moment of the record:
    "end" (it ends there, or with the phase that it is within), "start" (behind the others within
    the same phase), or "before" (it ends where the first phase of the record begins). ``within``:
    the phase of the same record in which it lies. ``column``: its name in a report: two phases with
    one are one there.
    """

    name: str
    event: type[Event]
    field: str
    side: str
    text: str
    label: str = ""
    track: str = ""
    sign: str = ""
    style: str = ""
    within: str = ""
    place: str = "end"
    column: str = ""

    @property
    def report_name(self) -> str:
        """Returns its name in a report."""
        return self.column or f"{self.name}_s"

    @property
    def is_whole(self) -> bool:
        """Returns True if it is the first of its record: it is there however short it was."""
        return not self.within and self.place == "end"


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
    Phase(
        "held",
        events.SaveReturned,
        "held_s",
        "rank",
        "`save` held the training thread",
        "in save, altogether",
        "training",
        "s",
        "blocking",
    ),
    Phase(
        "wait_previous",
        events.SaveReturned,
        "wait_previous_s",
        "rank",
        "of `held`, waiting for the save before",
        "of it, for the save before",
        within="held",
        place="start",
    ),
    Phase(
        "describe",
        events.SaveReturned,
        "describe_s",
        "rank",
        "of `held`, describing the state",
        "of it, describing",
        within="held",
        place="start",
    ),
    Phase(
        "volatile",
        events.SaveReturned,
        "volatile_s",
        "rank",
        "of `held`, copying leaves that cannot wait",
        "of it, volatile leaves",
        within="held",
        place="start",
    ),
    Phase(
        "fence",
        events.FenceWaited,
        "held_s",
        "rank",
        "an update was held until the copies it would overwrite were made",
        "at the fence",
        "training",
        "f",
        "stall",
    ),
    Phase(
        "copy",
        events.ImageCaptured,
        "copy_s",
        "rank",
        "the image of a rank was copied to shared memory",
        "copying",
        "copies",
        "c",
        "restore",
    ),
    Phase(
        "pass",
        events.ImagePassed,
        "copy_s",
        "rank",
        "the image of a rank was copied through a ring",
        "copying",
        "copies",
        "c",
        "restore",
        column="copy_s",
    ),
    *(
        Phase(
            name,
            kind,
            "grant_s",
            "rank",
            f"before `{after}`, until the keeper had given the image its place",
            "waiting for all, and a slot",
            "copies",
            "g",
            "waiting",
            place="before",
            column="grant_s",
        )
        for name, kind, after in (
            ("grant", events.ImageCaptured, "copy"),
            ("ring_grant", events.ImagePassed, "pass"),
        )
    ),
    Phase(
        "capture",
        events.SnapshotCaptured,
        "elapsed_s",
        "coordinator",
        "from the first request of a step until all ranks captured it",
        "captured on all ranks",
        "captures",
        "C",
        "waiting",
    ),
    Phase(
        "wait_ranks",
        events.SnapshotCaptured,
        "wait_s",
        "coordinator",
        "of `capture`, what the first rank to be done waited for the last",
        "of it, for the last rank",
        within="capture",
    ),
    Phase(
        "protect",
        events.SnapshotProtected,
        "elapsed_s",
        "coordinator",
        "parity of a generation was made",
        "protecting",
        "parity",
        "P",
        "declared",
    ),
    Phase(
        "encode",
        events.SnapshotProtected,
        "encode_s",
        "coordinator",
        "of `protect`, hosts read from each other and encoded, until the last was done",
        "of it, encoding",
        within="protect",
    ),
    Phase(
        "write",
        events.ImageDurable,
        "elapsed_s",
        "keeper",
        "an image was written to storage",
        "writing",
        "storage",
        "w",
        "start_up",
    ),
    Phase(
        "finish",
        events.ImageDurable,
        "finish_s",
        "keeper",
        "of `write`, its end, when storage makes it durable (the fsync of a file)",
        "of it, fsync",
        within="write",
    ),
    Phase(
        "queue",
        events.ImageDurable,
        "queue_s",
        "keeper",
        "before `write`, an image waited for its turn to be written",
        "waiting to be written",
        "queue",
        "q",
        "waiting",
        place="before",
    ),
    Phase(
        "persist",
        events.CheckpointPublished,
        "elapsed_s",
        "coordinator",
        "from the beginning of writing until the manifest was published",
        "storing",
        "publications",
        "D",
        "productive",
    ),
    Phase(
        "receipt",
        events.CheckpointPublished,
        "receipt_s",
        "coordinator",
        "of `persist`, until every host had told that its images are durable",
        "of it, until all receipts",
        within="persist",
        place="start",
    ),
    Phase(
        "publish",
        events.CheckpointPublished,
        "publish_s",
        "coordinator",
        "of `persist`, its end, when the manifest was written",
        "of it, the manifest",
        within="persist",
    ),
    Phase(
        "prune",
        events.CheckpointPruned,
        "elapsed_s",
        "coordinator",
        "a checkpoint that retention dropped was removed",
        "removing old ones",
        "removals",
        "x",
        "restart",
    ),
    Phase(
        "restore",
        events.Restored,
        "elapsed_s",
        "rank",
        "a rank restored a generation",
        "restoring",
        "training",
        "r",
        "restart",
    ),
    *(
        Phase(
            f"restore_{name}",
            events.Restored,
            f"{name}_s",
            "rank",
            f"of `restore`, {text}",
            within="restore",
            place="start",
        )
        for name, text in _RESTORE
    ),
)
BY_EVENT: dict[str, tuple[Phase, ...]] = {}
for _phase in PHASES:
    _name = _phase.event.__name__
    BY_EVENT[_name] = (*BY_EVENT.get(_name, ()), _phase)
#: The phases of a save by their names in a report.
OF_SAVES: dict[str, Phase] = {}
for _phase in PHASES:
    if _phase.event is not events.Restored:
        OF_SAVES.setdefault(_phase.report_name, _phase)
