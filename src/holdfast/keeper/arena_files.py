"""The keeper's files in the arena: slots, layouts and incarnation records."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.layouts import Tables, agreement_id
from holdfast.coordinator.slots import Slot, SlotWriter, slot_id_of
from holdfast.errors import ArenaError, HoldfastError, NewerFormat
from holdfast.events import warn
from holdfast.format.checksum import Buffer, checksum, text
from holdfast.format.manifest import Incarnation, seal, unseal
from holdfast.protocol import messages as m
from holdfast.protocol.arena import (
    IMAGE_START,
    ROOT_NAME,
    SLOT_SUFFIX,
    SlotFile,
    SlotRecord,
    StoredSlot,
    boot_id,
    is_running,
    is_temporary,
    layout_file,
    read_layout,
    room_left,
)
from holdfast.protocol.image_plan import LEAST_RING_BYTES, RingNeed, share

INCARNATIONS_REMEMBERED = 256
BEGUN = "begun"
ORDER = "order"
_ORDER_BYTES = 256
AGREED = ".agreed"
_FILLING_S = 5.0
"""How long a copy into a slot may still run, where this keeper is not notified of its end."""


class ArenaFiles:
    """Files of one arena directory. A later keeper can discover everything in it."""

    def __init__(
        self, directory: Path, run_id: str, limit_bytes: int | None = None, *, root_id: str = ""
    ) -> None:
        self._limit_bytes = limit_bytes
        self._being_made: dict[int, int] = {}
        """Sizes of slots whose creation has begun and that are not in ``_files`` yet."""
        self._mutex = threading.Lock()
        self.directory = directory
        self.run_id, self.root_id = run_id, root_id
        self.boot_id = boot_id()
        self.files: dict[int, SlotFile] = {}
        self._given: dict[int, float] = {}
        """When slots were granted to ranks that may still copy into them."""
        self._order_file = -1
        self._homeless: dict[int, Incarnation] = {}
        """Incarnation records that the arena had no room for."""
        self._record_changes = 0
        self._records: tuple[int, list[Incarnation]] = -1, []
        """All incarnation records as they were read, and after how many changes."""
        self._intact: dict[str, tuple[int, int]] = {}
        """Layouts that were found intact, and of which file (inode and time)."""
        self._damaged: set[Path] = set()
        self.parity_bytes = sum(path.stat().st_size for path in self._rows())
        """Bytes of parity in the arena, beside the slots."""
        self.next_number = 0
        """Next slot number, higher than any since this process began."""
        for name in ("layouts", "incarnations"):
            (directory / name).mkdir(mode=0o700, exist_ok=True)

    def slot_path(self, slot_id: int) -> Path:
        """Return the path of a slot."""
        return self.directory / f"{slot_id:05d}{SLOT_SUFFIX}"

    def create(self, slot_id: int, capacity_bytes: int, leave_bytes: int = 0) -> SlotFile:
        """Create a slot; ArenaError if there is not enough memory. Slow: it touches every page.

        ``leave_bytes``: memory that must remain free.
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
        """Create a ring for each need from the available memory; return (file, ring bytes) by slot.

        Raises ArenaError if the smallest rings do not fit. Nothing else may be created meanwhile.
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
            except ArenaError:  # taken by another process, or another limit applies
                for file, _ in made.values():
                    file.path.unlink(missing_ok=True)
                    file.close()
                room //= 2
            else:
                return made

    def room_bytes(self) -> int:
        """Return how much memory new slots may use: what is free, within the configured limit."""
        free = room_left(self.directory)
        if self._limit_bytes is None:
            return free
        files = {n: IMAGE_START + file.capacity_bytes for n, file in [*self.files.items()]}
        there = sum({**self._being_made, **files}.values()) + self.parity_bytes
        return max(0, min(free, self._limit_bytes - there))

    def drop_parity(self) -> None:
        """Delete the parity of an earlier start on several hosts, which is unused now."""
        if self.parity_bytes:
            for path in self._rows():
                path.unlink(missing_ok=True)
            self.parity_bytes = 0

    def _rows(self) -> list[Path]:
        return list((self.directory / "parity").glob("*.rows"))

    def unlink(self, slot_id: int) -> SlotFile | None:
        """Forget a slot and unlink its file; closing the returned object frees the memory.

        Closing is slow, because the kernel clears every page: do it on another thread.
        """
        file = self.files.pop(slot_id, None)
        self._being_made.pop(slot_id, None)
        if file is not None:
            file.path.unlink(missing_ok=True)
        return file

    def stamp(self, slot_id: int, record: SlotRecord) -> None:
        """Write the slot's record. A truncated slot ends this keeper (SIGBUS).

        The next keeper then discovers what is left of all slots, and never grants a truncated one.
        """
        file = self.files[slot_id]
        file.touch_end()
        # Boot and root as this host sees them: with those of the host that coordinates, the next
        # keeper here would take the slot for a stranger's, and a living writer's memory for free.
        ours = msgspec.structs.replace(
            record, boot_id=self.boot_id, run_id=self.run_id, root_id=self.root_id
        )
        file.write_record(ours)
        self._given[slot_id] = time.monotonic()

    def is_being_filled(self) -> bool:
        """Return True if slots were granted recently and are not sealed; some may never be."""
        recent_s = time.monotonic() - _FILLING_S
        self._given = {
            slot: given_s
            for slot, given_s in self._given.items()
            if given_s > recent_s and not self._is_captured(slot)
        }
        return bool(self._given)

    def _is_captured(self, slot_id: int) -> bool:
        file = self.files.get(slot_id)
        record = None if file is None else file.read_record()
        return record is None or record.state == "captured"

    def scan(self) -> tuple[list[Slot], list[Attempt]]:
        """Discover what an earlier keeper left: slots, and attempts with the images they have."""
        for path in sorted(self.directory.glob(f"*{SLOT_SUFFIX}")):
            try:
                slot_id = int(path.stem)
                file = SlotFile.open(path, writable=True)
            except (ArenaError, ValueError) as error:
                if isinstance(error, ArenaError) and is_temporary(error):
                    raise  # it may hold the newest snapshot
                path.unlink(missing_ok=True)  # incomplete: its creator died before a grant
                continue
            self.files[slot_id] = file
            self.next_number = max(self.next_number, slot_id + 1)
        return self.discovered()

    def discovered(self) -> tuple[list[Slot], list[Attempt]]:
        """Return the slots and attempts as their records describe them now, for another
        coordinator.
        """
        return discover(self.stored(), 0)

    def stored(self) -> list[StoredSlot]:
        """Return all slots with their records. A slot whose writer is dead is free."""
        return [self._stored(slot_id, file) for slot_id, file in sorted(self.files.items())]

    def _stored(self, slot_id: int, file: SlotFile) -> StoredSlot:
        record = file.read_record()
        if record is None or not self.is_ours(record):
            return StoredSlot(slot_id, file.capacity_bytes)
        if record.state == "writing" and not is_running(record.writer_pid, record.writer_start):
            record = msgspec.structs.replace(record, state="free")
        return StoredSlot(slot_id, file.capacity_bytes, record)

    def holds_images(self) -> bool:
        """Return True if the record of any slot says that it holds a whole image."""
        return any(slot.state == "captured" for slot in self.discovered()[0])

    def is_ours(self, record: SlotRecord) -> bool:
        """Return True if the slot was written for this run and root since the machine booted."""
        ours = (self.boot_id, self.run_id, self.root_id)
        return (record.boot_id, record.run_id, record.root_id) == ours

    def is_sealed(self, slot_id: int, attempt: str) -> bool:
        """Return True if the slot's record says that its image is sealed: nobody writes to it
        then.
        """
        file = self.files.get(slot_id)
        record = None if file is None else file.read_record()
        return record is not None and (record.state, record.attempt) == ("captured", attempt)

    def store_layout(
        self, hash_: str, data: bytes, used: Collection[str] = (), tables: str = ""
    ) -> None:
        """Store a layout, for the ranks and for a later restore from this memory; delete layouts
        that are not ``used``.

        ``tables``: the tables that it was agreed from, see ``layouts.agreement_id``.
        """
        path = layout_file(self.directory, hash_)
        if not _holds(path, data):  # a full arena still keeps what it has
            write_whole(path, data)
        agreed = path.with_suffix(AGREED)
        if tables and not _holds(agreed, tables.encode()):
            with contextlib.suppress(OSError):  # a full arena: the tables are asked for next time
                write_whole(agreed, tables.encode())
        for other in path.parent.iterdir():
            if other.stem != hash_ and other.stem not in used:
                other.unlink(missing_ok=True)

    def has_layout(self, hash_: str) -> bool:
        """Return True if the layout is stored."""
        return layout_file(self.directory, hash_).exists()

    def layout(self, hash_: str) -> bytes:
        """Return the bytes of a stored layout. ArenaError if it is missing or damaged.

        Verified here because it goes into storage, where many checkpoints share it.
        """
        return read_layout(self.directory, hash_)

    def remembered_layout(self, tables: Tables) -> bytes | None:
        """Return the stored layout that was agreed from these tables; None if there is none.

        On any thread.
        """
        for path in (self.directory / "layouts").glob(f"*{AGREED}"):
            with contextlib.suppress(OSError, ArenaError):
                if path.read_bytes() == agreement_id(tables, path.stem).encode():
                    return self.layout(path.stem)
        return None

    def is_layout_intact(self, hash_: str) -> bool:
        """Return True if a layout is stored and intact. Its file is read once: every host that
        attaches asks this.
        """
        try:
            found = (self.directory / "layouts" / f"{hash_}.json").stat()
            file = found.st_ino, found.st_mtime_ns
            if self._intact.get(hash_) != file:
                self.layout(hash_)
                self._intact[hash_] = file
        except (OSError, ArenaError):
            return False
        return True

    def store_incarnation(self, incarnation: Incarnation) -> None:
        """Store an incarnation and its parent.

        Raises OSError if the arena is full: the record is then kept for the life of this process.
        """
        self._homeless[incarnation.n] = incarnation
        path, data = self.directory / "incarnations" / f"{incarnation.n}.json", seal(incarnation)
        try:
            if not _holds(path, data):  # a full arena has room for what is there
                write_whole(path, data)
        except OSError:
            path.unlink(missing_ok=True)  # what it said before is not so any more
            raise
        else:
            self._homeless.pop(incarnation.n, None)
        finally:
            self._record_changes += 1

    def forget_incarnation(self, n: int) -> None:
        """Forget a start that came to nothing."""
        self._homeless.pop(n, None)
        (self.directory / "incarnations" / f"{n}.json").unlink(missing_ok=True)
        self._record_changes += 1

    def forget_incarnations(self, held: Collection[int]) -> None:
        """Delete the records of the oldest incarnations of a run with many restarts.

        Records of ``held`` images are kept. Call this only when storage has the records of the
        newest incarnation and of all its ancestors: a record that storage lacks must not be
        deleted.
        """
        directory = self.directory / "incarnations"
        numbers = sorted(int(path.stem) for path in directory.glob("[0-9]*.json"))
        for n in numbers[:-INCARNATIONS_REMEMBERED]:
            if n not in held:
                (directory / f"{n}.json").unlink(missing_ok=True)
        self._record_changes += 1

    def store_root(self, path: str) -> None:
        """Record the root's path for human readers, who find the arena later (`holdfast
        doctor`).
        """
        with contextlib.suppress(OSError):  # possibly full: no reason to discard what is there
            write_whole(self.directory / ROOT_NAME, os.fsencode(path))

    def store_begun(self, n: int) -> None:
        """Record that incarnation ``n`` began; its parent is not known yet."""
        write_whole(self.directory / BEGUN, str(n).encode())

    def begun(self) -> int:
        """Return the newest recorded incarnation that began; 0 for none.

        Raises ArenaError if the record cannot be read now.
        """
        path = self.directory / BEGUN
        try:
            return int(path.read_bytes())
        except (FileNotFoundError, ValueError):
            return 0
        except OSError as error:  # an older incarnation must not be taken for the newest
            raise ArenaError(f"cannot read {path}: {error.strerror}") from error

    def store_order(self, incarnation: int, nonce: str, order: m.StandingOrder) -> None:
        """Record what this incarnation has still to make durable, for a keeper started later.

        Each durable save does so twice: it is one write in place, which its checksum makes whole.
        """
        data = msgspec.json.encode((incarnation, nonce, order.first, order.last))
        record = f"{text(checksum(data))} ".encode() + data
        with contextlib.suppress(OSError):  # a full arena: the ranks repeat it when they join
            if self._order_file < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._order_file = os.open(self.directory / ORDER, flags, 0o600)
                weakref.finalize(self, os.close, self._order_file)
            os.pwrite(self._order_file, record.ljust(_ORDER_BYTES), 0)

    def order(self, incarnation: int, nonce: str) -> m.StandingOrder:
        """Return the recorded order of this incarnation; none if it is damaged or of another."""
        try:
            known, _, data = (self.directory / ORDER).read_bytes().rstrip().partition(b" ")
            if known != text(checksum(data)).encode():
                return m.NO_ORDER
            *owner, first, last = msgspec.json.decode(data, type=tuple[int, str, int, int])
        except (OSError, ValueError):
            return m.NO_ORDER
        is_mine = owner == [incarnation, nonce] and 0 <= first <= last
        return m.StandingOrder(first, last) if is_mine else m.NO_ORDER

    def incarnations(self) -> list[Incarnation]:
        """Return all stored incarnations; damaged records are reported once.

        They are read again when a record was stored or deleted, not for every host that attaches.
        Raises ArenaError if a record cannot be read now: it must not be taken for absent.
        """
        changes = self._record_changes  # on another thread one may be stored meanwhile
        if self._records[0] == changes:
            return list(self._records[1])
        found = dict(self._homeless)
        for path in (self.directory / "incarnations").glob("*.json"):
            try:
                one = unseal(Incarnation, path.read_bytes(), str(path))
                found[one.n] = one
            except FileNotFoundError:
                continue  # deleted just now
            except OSError as error:  # too many open files, for example
                raise ArenaError(f"cannot read the record {path}: {error.strerror}") from error
            except NewerFormat:
                raise
            except HoldfastError as error:
                if path not in self._damaged:
                    self._damaged.add(path)
                    warn(f"{error}. What storage says of it counts.")
        self._records = changes, list(found.values())
        return list(found.values())


def discover(found: Iterable[StoredSlot], host: int) -> tuple[list[Slot], list[Attempt]]:
    """Return the slots and attempts that the records of a host describe, with the ids of this
    incarnation.

    An incomplete attempt is dropped if its ranks were all on this host.
    """
    slots: list[Slot] = []
    attempts: dict[str, Attempt] = {}
    for one in found:
        slots.append(_take(slot_id_of(host, one.number), one, attempts))
    lost = {a.id for a in attempts.values() if a.hosts == 1 and not a.is_whole}
    for slot in slots:
        if slot.state == "captured" and slot.attempt in lost:
            slot.state = "free"
    return slots, [attempt for attempt in attempts.values() if attempt.id not in lost]


def _take(slot_id: int, found: StoredSlot, attempts: dict[str, Attempt]) -> Slot:
    slot, record = Slot(slot_id, found.capacity_bytes, "free"), found.record
    if record is None:
        return slot
    if 0 < record.ring_bytes < slot.capacity_bytes:
        slot.is_ring, slot.ring_bytes = True, record.ring_bytes
    if record.state == "writing":
        slot.state, slot.attempt, slot.rank = "quarantined", record.attempt, record.rank
        slot.incarnation = record.incarnation
        slot.writer = SlotWriter(record.writer_pid, record.writer_start)
        return slot
    fits = 0 < record.image_bytes <= slot.capacity_bytes and 0 <= record.rank < record.world
    if record.state != "captured" or not fits or slot.is_ring:
        return slot
    slot.state, slot.attempt, slot.image = "captured", record.attempt, record.image
    said = Attempt(record.attempt, record.incarnation, record.step, record.world, record.layout)
    said.hosts, said.nonce = record.hosts, record.nonce
    attempt = attempts.setdefault(record.attempt, said)
    same = (attempt.attempt_id, attempt.hosts) == (record.attempt_id, record.hosts)
    if not same or record.rank in attempt.slots:
        # Records of one attempt id that disagree are not one attempt: images are never mixed.
        return Slot(slot_id, slot.capacity_bytes, "free")
    attempt.slots[record.rank] = slot_id
    attempt.nonce = attempt.nonce or said.nonce  # what was decoded does not tell
    return slot


def write_whole(path: Path, data: Buffer) -> None:
    """Write a file that other processes see whole, or as it was before. OSError."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except OSError:  # a full arena: leave no partial file in it
        temporary.unlink(missing_ok=True)
        raise


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False
