"""The arena's contents as the keeper holds them: slot files, layouts, incarnation records."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from holdfast.errors import ArenaError, HoldfastError
from holdfast.format.manifest import Incarnation, seal, unseal
from holdfast.geometry.layout import table_hash
from holdfast.snapshot.arena import (
    IMAGE_START,
    SLOT_SUFFIX,
    SlotFile,
    SlotRecord,
    boot_id,
    is_running,
    may_pass,
    room_left,
)
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.rings import LEAST_RING_BYTES, RingNeed, share
from holdfast.snapshot.slots import Slot, Writer

INCARNATIONS_REMEMBERED = 256
BEGUN = "begun"
_FILLING_S = 5.0
"""How long a copy into a slot is taken to go on, where nobody here hears of its end."""


class Memory:
    """Files of one arena directory. Everything in it can be found again by a later keeper."""

    def __init__(self, directory: Path, run_id: str, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._being_made: dict[int, int] = {}
        """Sizes of slots from when they are begun, for those not among the files yet."""
        self._mutex = threading.Lock()
        self.directory = directory
        self.run_id = run_id
        self.boot_id = boot_id()
        self.files: dict[int, SlotFile] = {}
        self._given: dict[int, float] = {}
        """When slots were given to ranks that may still copy into them."""
        self.parity_bytes = sum(path.stat().st_size for path in self._rows())
        """What parity takes besides."""
        self.next_number = 0
        """Of a slot, and higher than any there was since this process began."""
        for name in ("layouts", "incarnations"):
            (directory / name).mkdir(mode=0o700, exist_ok=True)

    def slot_path(self, slot_id: int) -> Path:
        """Where a slot lies."""
        return self.directory / f"{slot_id:05d}{SLOT_SUFFIX}"

    def create(self, slot_id: int, capacity_bytes: int, leave_bytes: int = 0) -> SlotFile:
        """Make a slot; ArenaError when there is no memory for it. Slow: it touches every page.

        ``leave_bytes``: how much room must be left besides.
        """
        with self._mutex:
            free = self.room_bytes()
            self._being_made[slot_id] = IMAGE_START + capacity_bytes
            self.next_number = max(self.next_number, slot_id + 1)
        try:
            path = self.slot_path(slot_id)
            return SlotFile.create(path, capacity_bytes, free_bytes=free, leave_bytes=leave_bytes)
        except BaseException:
            del self._being_made[slot_id]
            raise

    def create_rings(self, needs: Sequence[RingNeed]) -> dict[int, tuple[SlotFile, int]]:
        """Make a ring for each need out of what room there is: (file, of it the ring) by slot.

        ArenaError when there is not enough for the smallest. Nothing else may be made meanwhile.
        """
        room = self.room_bytes()
        self.next_number = max(self.next_number, *(need.slot + 1 for need in needs))
        while True:
            sizes = share(room, needs, IMAGE_START)
            if not sizes:
                raise ArenaError(
                    f"for saves to pass through memory there must be room for "
                    f"{LEAST_RING_BYTES >> 20} MiB per rank and some to spare, "
                    f"{room >> 20} MiB are free in {self.directory}"
                )
            made: dict[int, tuple[SlotFile, int]] = {}
            try:
                for need, size in zip(needs, sizes, strict=True):
                    file = SlotFile.create(self.slot_path(need.slot), need.head_bytes + size)
                    made[need.slot] = file, size
            except ArenaError:  # somebody else took it meanwhile, or there is another limit
                for file, _ in made.values():
                    file.path.unlink(missing_ok=True)
                    file.close()
                room //= 2
            else:
                return made

    def room_bytes(self) -> int:
        """How much memory slots could take: what is free, and what the limit allows."""
        free = room_left(self.directory)
        if self._limit_bytes is None:
            return free
        files = {n: IMAGE_START + file.capacity_bytes for n, file in [*self.files.items()]}
        there = sum({**self._being_made, **files}.values()) + self.parity_bytes
        return max(0, min(free, self._limit_bytes - there))

    def drop_parity(self) -> None:
        """Of an earlier start on several hosts; nobody uses it now."""
        if self.parity_bytes:
            for path in self._rows():
                path.unlink(missing_ok=True)
            self.parity_bytes = 0

    def _rows(self) -> list[Path]:
        return list((self.directory / "parity").glob("*.rows"))

    def unlink(self, slot_id: int) -> SlotFile | None:
        """Forget a slot and remove its name; closing what is returned gives the memory back.

        That is slow, and for another thread: the kernel clears away every page.
        """
        file = self.files.pop(slot_id, None)
        self._being_made.pop(slot_id, None)
        if file is not None:
            file.path.unlink(missing_ok=True)
        return file

    def stamp(self, slot_id: int, record: SlotRecord) -> None:
        """Say in the slot itself what it is for. Ends this keeper (SIGBUS) if it was cut short.

        The next keeper then finds out what is left of all slots; nobody is given a part of one.
        """
        file = self.files[slot_id]
        file.touch_end()
        file.write_record(record)
        self._given[slot_id] = time.monotonic()

    def is_being_filled(self) -> bool:
        """Whether slots were given to ranks just now that are not sealed; some never will be."""
        recent_s = time.monotonic() - _FILLING_S
        self._given = {
            slot: given_s for slot, given_s in self._given.items()
            if given_s > recent_s and not self._is_captured(slot)
        }  # fmt: skip
        return bool(self._given)

    def _is_captured(self, slot_id: int) -> bool:
        file = self.files.get(slot_id)
        record = None if file is None else file.read_record()
        return record is None or record.state == "captured"

    def scan(self) -> tuple[list[Slot], list[Attempt]]:
        """What an earlier keeper left: slots, and attempts with the images they have."""
        for path in sorted(self.directory.glob(f"*{SLOT_SUFFIX}")):
            try:
                slot_id = int(path.stem)
                file = SlotFile.open(path, writable=True)
            except (ArenaError, ValueError) as error:
                if isinstance(error, ArenaError) and may_pass(error):
                    raise  # it may hold the newest snapshot
                path.unlink(missing_ok=True)  # half-made: its maker died before it was granted
                continue
            self.files[slot_id] = file
            self.next_number = max(self.next_number, slot_id + 1)
        return self.found()

    def found(self) -> tuple[list[Slot], list[Attempt]]:
        """What all slots say of themselves now: nothing else is known to who comes later.

        What is not all here is nothing when its ranks were all on this host.
        """
        slots: list[Slot] = []
        attempts: dict[str, Attempt] = {}
        for slot_id, file in sorted(self.files.items()):
            slots.append(self._take(slot_id, file, attempts))
        lost = {a.id for a in attempts.values() if a.hosts == 1 and not a.is_whole}
        for slot in slots:
            if slot.state == "captured" and slot.attempt in lost:
                slot.state = "free"
        return slots, [attempt for attempt in attempts.values() if attempt.id not in lost]

    def holds_images(self) -> bool:
        """Whether any slot says that a whole image is in it."""
        return any(slot.state == "captured" for slot in self.found()[0])

    def _take(self, slot_id: int, file: SlotFile, attempts: dict[str, Attempt]) -> Slot:
        slot = Slot(slot_id, file.capacity_bytes, "free")
        record = file.read_record()
        if record is None or (record.boot_id, record.run_id) != (self.boot_id, self.run_id):
            return slot
        if 0 < record.ring_bytes < file.capacity_bytes:
            slot.is_ring, slot.ring_bytes = True, record.ring_bytes
        if record.state == "writing":
            if is_running(record.writer_pid, record.writer_start):
                slot.state, slot.attempt, slot.rank = "quarantined", record.attempt, record.rank
                slot.incarnation = record.incarnation
                slot.writer = Writer(record.writer_pid, record.writer_start)
            return slot
        fits = 0 < record.image_bytes <= file.capacity_bytes and 0 <= record.rank < record.world
        if record.state != "captured" or not fits or slot.is_ring:
            return slot
        slot.state, slot.attempt, slot.rank = "captured", record.attempt, record.rank
        slot.image_bytes = record.image_bytes
        slot.header_xxh3, slot.table_xxh3 = record.header_xxh3, record.table_xxh3
        said = Attempt(record.attempt, record.incarnation, record.step, record.world, record.layout)
        said.hosts = record.hosts
        attempt = attempts.setdefault(record.attempt, said)
        same = (attempt.generation, attempt.world, attempt.layout, attempt.hosts)
        if same != (said.generation, said.world, said.layout, said.hosts) or (
            record.rank in attempt.slots
        ):
            # Not of one attempt, whatever its name says: never a mixture.
            return Slot(slot_id, file.capacity_bytes, "free")
        attempt.slots[record.rank] = slot_id
        return slot

    def is_sealed(self, slot_id: int, attempt: str) -> bool:
        """Whether the slot itself says that its image is whole: then nobody writes to it."""
        file = self.files.get(slot_id)
        record = None if file is None else file.read_record()
        return record is not None and (record.state, record.attempt) == ("captured", attempt)

    def keep_layout(self, hash_: str, data: bytes, used: Collection[str] = ()) -> None:
        """Remember a layout for whoever restores from this memory; forget those not ``used``."""
        layouts = self.directory / "layouts"
        if not _holds(layouts / f"{hash_}.json", data):  # a full arena has room for what is there
            self._write(layouts / f"{hash_}.json", data)
        for path in layouts.iterdir():
            if path.stem != hash_ and path.stem not in used:
                path.unlink(missing_ok=True)

    def layout(self, hash_: str) -> bytes:
        """The bytes of a remembered layout. ArenaError when it is gone, or no longer itself.

        Checked here because it goes into storage, where many checkpoints share it.
        """
        path = self.directory / "layouts" / f"{hash_}.json"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArenaError(f"cannot read the layout {path}: {error.strerror}") from error
        if table_hash(data) != hash_:
            raise ArenaError(f"the bytes of layout {path} changed after they were written")
        return data

    def keep_incarnation(self, incarnation: Incarnation, held: Collection[int] = ()) -> None:
        """Remember an incarnation and its parent.

        Of a run that was started again and again the first are forgotten (storage has them),
        except those whose images are ``held``.
        """
        directory = self.directory / "incarnations"
        self._write(directory / f"{incarnation.n}.json", seal(incarnation))
        numbers = sorted(int(path.stem) for path in directory.glob("[0-9]*.json"))
        for n in numbers[:-INCARNATIONS_REMEMBERED]:
            if n not in held:
                (directory / f"{n}.json").unlink(missing_ok=True)

    def keep_begun(self, n: int) -> None:
        """Remember that incarnation ``n`` began; what it goes on from is not known yet."""
        self._write(self.directory / BEGUN, str(n).encode())

    def begun(self) -> int:
        """The newest incarnation that began, as far as it is remembered; 0 for none."""
        try:
            return int((self.directory / BEGUN).read_bytes())
        except (OSError, ValueError):
            return 0

    def incarnations(self) -> list[Incarnation]:
        """All remembered incarnations that can be read."""
        found = []
        for path in (self.directory / "incarnations").glob("*.json"):
            try:
                found.append(unseal(Incarnation, path.read_bytes(), str(path)))
            except (HoldfastError, OSError):
                continue  # half-written by a keeper that was killed: as if never begun
        return found

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            temporary.write_bytes(data)
            temporary.rename(path)
        except OSError:  # a full arena: leave nothing half-written in it
            temporary.unlink(missing_ok=True)
            raise


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False
