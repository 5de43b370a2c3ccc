"""Reads files of a root out of the shared memory of hosts: what slots hold, or parity replaces.

A file is known by the checksums of header and block table that its manifest seals, so no name has
to be believed. It is an image, or a half of one that is stored as two files. Slots and parity may
be written to meanwhile: whoever reads checks every block. Nothing is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import HoldfastError, NotFound, UsageError
from holdfast.format.checksum import blocks, checksum, pack_table, text
from holdfast.format.image import split
from holdfast.format.manifest import ImageId, ImageRef, Manifest
from holdfast.protocol.arena import SLOT_SUFFIX, SlotFile, arena_home, parse_arena_name, root_key
from holdfast.restore.cluster.arena_shards import RECORD_SUFFIX, ArenaShard, shards_in
from holdfast.restore.cluster.decode import GroupAccess, ParityRow, decode_image, sums_of
from holdfast.restore.planning.holdings import GroupMember, shard_of
from holdfast.restore.reading.images import ImageFile, SlotImage, StoredImage
from holdfast.storage.base import Store, flat, short_read
from holdfast.storage.files import views

#: Size, and the checksums of header and block table.
_Key = tuple[int, str, str]
_MemberImage = Callable[[GroupMember, ImageId], ImageFile | None]
_SHOWN = 5


class MemoryFiles:
    """The files that ``manifests`` name, as far as arenas have them or parity in these replaces
    them: the arenas of this host that are of this root, and all in ``others``.

    ``others``: directories with arenas of other hosts, brought here or mounted. ``stores``: roots
    whose images parity is decoded with, too.
    """

    url = "the shared memory of hosts"

    def __init__(
        self,
        root: Store,
        manifests: Iterable[Manifest],
        home: Path | None = None,
        *,
        others: Sequence[Path] = (),
        stores: Sequence[Store] = (),
    ) -> None:
        keys = {root_key(view) for view in views(root.identity())}
        manifests = list(manifests)
        refs = [ref for one in manifests for ref in (*one.images, *one.parts)]
        self._wanted: dict[_Key, set[str]] = {}
        self._named = {_key(ref): ref for ref in refs}
        self._refs = {ref.path: ref for ref in refs}
        split_up = (one for one in manifests if one.parts)
        self._halves = {ref.path for one in split_up for ref in (*one.images, *one.parts)}
        for ref in refs:
            self._wanted.setdefault(_key(ref), set()).add(ref.path)
        self._stores = (root, *stores)
        self._files: dict[str, _HeldFile] = {}
        own = _arenas(home or arena_home())
        arenas = [one for one in own if parse_arena_name(one.name)[1] in keys]
        for other in others:
            arenas += _required_arenas(other)
        self._slots: dict[_Key, SlotImage] = {}
        self._sound: dict[_Key, bool] = {}
        for image in (image for arena in arenas for image in _captured(arena)):
            if self._slots.setdefault(_key(image), image) is image:
                self._take(image)
            else:
                image.slot.close()
        groups: dict[tuple[object, ...], list[ArenaShard]] = {}
        for shard in (shard for arena in arenas for shard in shards_in(arena)):
            groups.setdefault((shard.record.attempt_id, shard.record.members), []).append(shard)
        self._groups = [_ArenaGroup(rows) for rows in groups.values()]
        self._decoding = threading.Lock()

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """See ``Store``."""
        have = self._find(path).size_bytes
        data = bytearray(max(0, have - offset_bytes if size_bytes is None else size_bytes))
        self.read_into(path, offset_bytes, memoryview(data))
        return bytes(data)

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        """See ``Store``. NotFound where the bytes cannot be decoded any more."""
        file, into = self._find(path), flat(buffer)
        if offset_bytes + len(into) > file.size_bytes:
            raise short_read(path, self.url, offset_bytes, len(into), file.size_bytes)
        try:
            file.fill(offset_bytes, into)
        except HoldfastError as error:
            raise NotFound(f"{path} is not whole in {self.url}: {error}", path=path) from error

    def close(self) -> None:
        """Unmaps the slots."""
        self._files.clear()
        for image in self._slots.values():
            image.slot.close()
        self._slots.clear()

    def _find(self, path: str) -> _HeldFile:
        if path not in self._files and path in self._refs:
            with self._decoding:
                self._decode(self._refs[path])
        if path not in self._files:
            raise NotFound(f"{self.url} has no {path}", path=path)
        return self._files[path]

    def _take(self, image: ImageFile) -> None:
        """Notes which wanted files an image is, or has in it."""
        self._note(_key(image), _HeldFile(image, b"", 0, image.size_bytes, b""))
        with suppress(HoldfastError):  # a slot that is written to: its checksums do not match
            header, sums = image.open({})
            halves = split(header)
            if halves is None:
                return
            ends = header.frozen_bytes, 0
            for half, at, own in zip(
                (halves.live, halves.part), ends, halves.tables(sums), strict=True
            ):
                table, start = pack_table(own, half.table_entries), header.data_start + at
                key = half.size_bytes, text(checksum(half.header)), text(checksum(table))
                stop = start + half.table_offset
                self._note(key, _HeldFile(image, half.header, start, stop, table))

    def _note(self, key: _Key, file: _HeldFile) -> None:
        for path in self._wanted.get(key, ()):
            self._files.setdefault(path, file)

    def _decode(self, ref: ImageRef) -> None:
        """Takes the image that no slot holds, which is this file or has it in it, where a group's
        parity replaces it. Nothing is opened for a file that nobody asks for.
        """
        for group in self._groups:
            if ref.path in self._files:
                return
            for image in group.lost(ref.rank):
                key = _key_of(image)
                is_half = ref.path in self._halves and key not in self._named
                if (is_half or key == _key(ref)) and key not in self._slots:
                    group.tried.add(image.rank)
                    with suppress(HoldfastError):  # too many are lost
                        self._take(group.decode(image.rank, self._member_image))

    def _member_image(self, _: GroupMember, image: ImageId) -> ImageFile | None:
        """Opens an image of a group: out of a slot, or as a root has it whole."""
        key = _key_of(image)
        slot, ref = self._slots.get(key), self._named.get(key)
        if slot is not None and key not in self._sound:
            self._sound[key] = _is_sound(slot)
        if ref is None or self._sound.get(key):
            return slot
        for store in self._stores:
            with suppress(HoldfastError):
                if store.size_bytes(ref.path) == ref.size_bytes:
                    return StoredImage(store, ref)
        return slot


class _HeldFile(NamedTuple):
    """A file as it lies in memory: ``head``, the image's bytes from ``start`` to ``stop``, and
    ``tail``.
    """

    image: ImageFile
    head: bytes
    start: int
    stop: int
    tail: bytes

    @property
    def size_bytes(self) -> int:
        """The length of the file."""
        return len(self.head) + self.stop - self.start + len(self.tail)

    def fill(self, offset_bytes: int, into: memoryview) -> None:
        """Fills ``into`` with the file's bytes from ``offset_bytes`` on."""
        data, tail = len(self.head), self.size_bytes - len(self.tail)
        for begin, known in ((0, self.head), (tail, self.tail)):
            first = max(offset_bytes, begin)
            last = min(offset_bytes + len(into), begin + len(known))
            if first < last:
                into[first - offset_bytes : last - offset_bytes] = known[
                    first - begin : last - begin
                ]
        first, last = max(offset_bytes, data), min(offset_bytes + len(into), tail)
        if first < last:
            target, shift = into[first - offset_bytes : last - offset_bytes], self.start - data
            found = self.image.view(first + shift, last + shift, target)
            if self.image.is_mapped:
                target[:] = found


class _ArenaGroup:
    """A parity group, of which some shards are in arenas. ``tried``: ranks that were decoded."""

    def __init__(self, rows: Sequence[ArenaShard]) -> None:
        self._rows, self._record = rows, rows[0].record
        self._access: GroupAccess | None = None
        self.tried: set[int] = set()

    def lost(self, rank: int) -> list[ImageId]:
        """Returns the image of a rank, if it is in this group and was not decoded yet."""
        images = (image for member in self._record.members for image in member.images)
        return [one.image for one in images if one.rank == rank and rank not in self.tried]

    def decode(self, rank: int, member_image: _MemberImage) -> ImageFile:
        """Opens the image of a rank by all that is left of the group; HoldfastError where that is
        too little.
        """
        if self._access is None:
            self._access = GroupAccess(
                shard_of(self._record).coding,
                self._record.attempt_id.metadata,
                member_image,
                _Rows(self._rows).open,
            )
        return decode_image(self._access, self._record, rank)


class _Rows:
    """The parity shards of one group that are in arenas."""

    def __init__(self, shards: Iterable[ArenaShard]) -> None:
        self._shards = {(one.record.stripe, one.record.row): one for one in shards}

    def open(self, _: GroupMember, stripe: int, row: int) -> ParityRow | None:
        """Maps a shard; None where no arena has it whole."""
        with suppress(HoldfastError, KeyError):
            shard = self._shards[stripe, row]
            return ParityRow(shard.map(), partial(sums_of, shard.record))
        return None


def _key(one: ImageRef | ImageFile) -> _Key:
    return one.size_bytes, one.header_xxh3, one.table_xxh3


def _key_of(image: ImageId) -> _Key:
    return image.image_bytes, image.header_xxh3, image.table_xxh3


def _is_sound(image: SlotImage) -> bool:
    """True if every block is as it was captured."""
    try:
        header, sums = image.open({})
    except HoldfastError:
        return False
    begin = header.data_start
    return all(
        checksum(image.view(begin + start, begin + stop, bytearray())) == sums[number]
        for number, start, stop in blocks(0, header.blocks, header.table.offset)
    )


def _arenas(home: Path) -> list[Path]:
    """Returns the arenas in a directory, or the one that it is; those being removed are none."""
    if next(home.glob(f"*{SLOT_SUFFIX}"), None):
        return [home]
    try:
        found = sorted(home.iterdir())
    except OSError:
        return []
    return [one for one in found if one.is_dir() and not one.name.startswith(".")]


def _required_arenas(home: Path) -> list[Path]:
    """Returns the arenas in a directory that a user named, or the one that it is. UsageError where
    there is none, or nothing of it can be read.
    """
    advice = (
        f"Give an arena of another host, or the directory with its arenas, which is {arena_home()} "
        "there unless HOLDFAST_ARENA_DIR says another"
    )
    try:
        names = sorted(path.name for path in home.iterdir())
    except OSError as error:
        what = {FileNotFoundError: "does not exist", NotADirectoryError: "is not a directory"}
        why = what.get(type(error), f"cannot be read ({error.strerror})")
        raise UsageError(f"{home} has no arenas in it: it {why}. {advice}.") from None
    arenas = _arenas(home)
    slots = [path for one in arenas for path in sorted(one.glob(f"*{SLOT_SUFFIX}"))]
    shards = [shard for one in arenas for shard in shards_in(one)]
    if not slots and not shards:
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise UsageError(
            f"{home} has no arenas in it, only {shown or 'nothing'}: an arena is a directory with "
            f"files *{SLOT_SUFFIX}, or parity/*{RECORD_SUFFIX}. {advice}."
        )
    faults = [fault for path in slots if (fault := _fault_of(path))]
    if faults and len(faults) == len(slots) and not shards:
        raise UsageError(
            f"no slot in {home} can be read: {faults[0]}. Copy them so that they are yours and "
            "nobody else's (mode 0600), as `cp -p` by the user of the run does."
        )
    return arenas


def _fault_of(path: Path) -> str:
    """Says why a slot cannot be read; "" if it can."""
    try:
        SlotFile.open(path, writable=False).close()
    except HoldfastError as error:
        return str(error)
    return ""


def _captured(arena: Path) -> Iterator[SlotImage]:
    """Yields the images that the slots of an arena hold whole; who takes one closes it."""
    for path in sorted(arena.glob(f"*{SLOT_SUFFIX}")):
        with suppress(HoldfastError):
            slot = SlotFile.open(path, writable=False)
            record = slot.read_record()
            slot.close()
            if record is not None and record.state == "captured" and not record.ring_bytes:
                yield SlotImage(str(path), record.image)
