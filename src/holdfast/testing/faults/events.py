"""Observes from outside what a host is doing, so that a fault can be injected at that moment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.catalogue import INCARNATIONS, MANIFESTS, STEPS, catalogue, generation_of
from holdfast.errors import ArenaError, FormatError, HoldfastError, UsageError
from holdfast.format.image import header_size
from holdfast.format.manifest import Generation
from holdfast.observe.event_place import event_place
from holdfast.parity.planning.record import ParityRecord, unseal
from holdfast.protocol.arena import IMAGE_START, PAGE_BYTES, SLOT_SUFFIX, SlotFile, SlotRecord
from holdfast.storage.open import open_store
from holdfast.testing.runs.processes import wait_until

_ATTEMPT = re.compile("([0-9]+)-([0-9]+)-.+")


def is_capturing(arena: Path) -> bool:
    """True if an image is being copied into a slot of this arena."""
    for path in arena.glob(f"*{SLOT_SUFFIX}"):
        with suppress(ArenaError), closing(SlotFile.open(path, writable=False)) as slot:
            record = slot.read_record()
            if record is not None and record.state == "writing":
                return True
    return False


class Encoding:
    """Detects that a keeper makes parity, called repeatedly: ``wait_until(Encoding(arena), ...)``.

    One buffer of its rows loses all records when it is to be written again, and has others when
    that is done. That change must be seen, because an idle keeper may have an empty buffer too. So
    it is False for the first two generations of a run, and for one under way at the first call.
    Rows that are given up because their images were protected once more, after a recovery, look the
    same.
    """

    def __init__(self, arena: Path) -> None:
        self._rows = arena / "parity"
        self._filled: set[str] = set()
        self._is_so = False

    def __call__(self) -> bool:
        """Check now."""
        before = self._filled
        self._filled = {path.name.partition("-")[0] for path in self._rows.glob("*.record")}
        if len(self._filled) != 1:
            self._is_so = False
        elif before - self._filled:
            self._is_so = True
        return self._is_so


def is_persisting(root: Path | str) -> bool:
    """True if the newest start has images in storage of a step that it has not published (yet).

    Images that an earlier start left unfinished do not count, nor those older than a newer
    checkpoint.
    """
    starts = [name.removesuffix(".json") for name in _names(root, INCARNATIONS)]
    newest = max((int(name) for name in starts if name.isdecimal()), default=0)
    # In this order, so that a publication in between is noticed.
    written = [one for name in _names(root, STEPS) if (one := _ATTEMPT.fullmatch(name))]
    published = [found for name in _names(root, MANIFESTS) if (found := generation_of(name))]
    done = max((one.step for one in published if one.incarnation == newest), default=-1)
    return any(int(one[1]) == newest and int(one[2]) > done for one in written)


def _names(root: Path | str, directory: str) -> list[str]:
    with suppress(HoldfastError):  # there is none yet
        return open_store(root).list(directory)
    return []


# Reads the events in a run's root: which generations were protected, which are durable.


def events_of(root: Path | str, name: str) -> Iterator[dict[str, Any]]:
    """Yield all events of this name that any process of the run wrote, in no order."""
    for path in event_place(root).directory.glob("*.jsonl"):
        for line in path.read_text(errors="replace").splitlines():
            if f'"{name}"' not in line:
                continue
            try:
                event = json.loads(line)
            except ValueError:  # cut off by a kill
                continue
            if event["event"] == name:
                yield event


def newest_protected(root: Path | str, *, incarnation: int | None = None) -> Generation | None:
    """Return the newest generation, of one start or of all, that was reported to survive lost
    hosts.
    """
    told = (
        Generation(int(event["incarnation"]), int(event["step"]))
        for event in events_of(root, "SnapshotProtected")
    )
    return max((one for one in told if incarnation in (None, one.incarnation)), default=None)


def newest_durable(root: Path | str) -> Generation | None:
    """Return the newest checkpoint in storage that a start would take."""
    try:
        return catalogue(open_store(root)).latest
    except HoldfastError:  # there is none yet, or storage does not answer now
        return None


def wait_protected(
    root: Path | str,
    incarnation: int,
    *,
    more: int = 3,
    after: int = -1,
    timeout_s: float = 60.0,
    check: Callable[[], object] = lambda: None,
) -> int:
    """Wait until this start has protected ``more`` steps after ``after``; return the newest of
    them.

    ``check`` is called meanwhile and may raise. TimeoutError names the protected steps, and the
    reason why there are not more.
    """
    steps: set[int] = set()

    def is_enough() -> bool:
        check()
        steps.update(
            int(event["step"])
            for event in events_of(root, "SnapshotProtected")
            if event["incarnation"] == incarnation and event["step"] > after
        )
        return len(steps) >= more

    def what() -> str:
        why = [event["reason"] for event in events_of(root, "SnapshotNotProtected")]
        return f"{more} protected steps after {after} ({sorted(steps)} are; not: {why[-3:]})"

    wait_until(is_enough, timeout_s=timeout_s, what=what, pause_s=0.05)
    return max(steps)


# Changes bytes in an arena, as bad memory or a torn write would.
#
# Everything is written through the files, which are the same memory that keeper and trainers have
# mapped: they see it at once, without any notification.


Region = Literal["header", "data", "table"]
_SEQUENCE = slice(8, 16)


@dataclass(frozen=True, slots=True)
class Held:
    """A slot that holds a whole image."""

    path: Path
    record: SlotRecord
    data_start: int
    """The offset of the image's data, where its header ends."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of parity with its record: its file, and its place there."""

    path: Path
    offset_bytes: int
    record: ParityRecord
    record_path: Path


# ── what is there ────────────────────────────────────────────────────────────────────────────


def held(arena: Path) -> list[Held]:
    """Return every whole image in the slots of an arena, the newest generation last."""
    found = []
    for path in sorted(arena.glob(f"*{SLOT_SUFFIX}")):
        with (
            suppress(ArenaError, FormatError),
            closing(SlotFile.open(path, writable=False)) as slot,
        ):
            record = slot.read_record()
            if record is not None and record.state == "captured":
                start = header_size(bytes(slot.image[:8]), str(path), record.image_bytes)
                found.append(Held(path, record, start))
    return sorted(found, key=lambda one: (one.record.incarnation, one.record.step))


def rows(arena: Path) -> list[Row]:
    """Return every row of parity that is kept in an arena, the newest generation last."""
    found = []
    for path in sorted((arena / "parity").glob("*.record")):
        with suppress(FormatError, OSError):  # it may go while we look
            record = unseal(path.read_bytes(), str(path))
            half, _, offset = path.stem.partition("-")
            file = path.with_name(f"{half}.rows")
            found.append(Row(file, IMAGE_START + int(offset), record, path))
    return sorted(found, key=lambda one: (one.record.generation, one.record.stripe, one.record.row))


# ── what happens to it ───────────────────────────────────────────────────────────────────────


def flip(path: Path, at: int, *, bit: int = 0) -> None:
    """Change one bit of the byte ``at`` of a file; from its end when negative."""
    with path.open("r+b", buffering=0) as file:
        place = at if at >= 0 else path.stat().st_size + at
        file.seek(place)
        byte = file.read(1)
        if not byte:
            raise UsageError(f"{path} has no byte {at}")
        file.seek(place)
        file.write(bytes([byte[0] ^ (1 << bit)]))


def flip_image(one: Held, region: Region = "data", *, at: int = 0, bit: int = 0) -> None:
    """Change one bit of an image: of its header, its data, or its table of checksums.

    ``at``: which byte of that region; beyond its length it begins again.
    """
    size, start = one.record.image_bytes, one.data_start
    table = size - PAGE_BYTES  # its last page at least is table
    begin, end = {"header": (0, start), "data": (start, table), "table": (table, size)}[region]
    flip(one.path, IMAGE_START + begin + at % (end - begin), bit=bit)


def flip_row(row: Row, *, at: int = 0, bit: int = 0) -> None:
    """Change one bit of a row of parity; ``at`` begins again beyond its length."""
    if not row.record.size_bytes:
        raise UsageError(f"row {row.record.row} of stripe {row.record.stripe} has no bytes")
    flip(row.path, row.offset_bytes + at % row.record.size_bytes, bit=bit)


def tear_image(one: Held) -> None:
    """Clear the second half of the image's data, as if its copy had stopped in the middle."""
    middle = (one.data_start + one.record.image_bytes) // 2
    with one.path.open("r+b", buffering=0) as file:
        file.seek(IMAGE_START + middle)
        file.write(bytes(one.record.image_bytes - PAGE_BYTES - middle))


def tear_record(slot: Path) -> None:
    """Clear the second half of a slot's newest record, as if its writer was killed."""
    with slot.open("r+b", buffering=0) as file:
        pages = [file.read(PAGE_BYTES) for _ in range(2)]
        sequences = [int.from_bytes(page[_SEQUENCE], "little") for page in pages]
        newest = sequences.index(max(sequences))
        used = len(pages[newest].rstrip(b"\0"))
        file.seek(newest * PAGE_BYTES + used // 2)
        file.write(bytes(used - used // 2))


def tear_row_record(row: Row) -> None:
    """Clear the second half of the record of a row."""
    data = row.record_path.read_bytes()
    row.record_path.write_bytes(data[: len(data) // 2])
