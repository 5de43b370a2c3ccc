"""Holds what a restore reads from storage: its lease, and the documents that all ranks are told.

Rank 0 holds the lease for all ranks: on the best candidate, before the others learn of it. A
candidate removed by then, or removed during the read where no lease can be written, is not damaged:
storage is listed again, a bounded number of times.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress

import msgspec

from holdfast.catalogue import NEW_LISTS, find_manifest, layout_path, manifest_path, read_bounded
from holdfast.errors import HoldfastError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.manifest import FRONT_BYTES, Manifest, checksum_in, seal, unseal
from holdfast.geometry.codec import MAX_BYTES
from holdfast.geometry.layout import Layout
from holdfast.leases import ReadLease
from holdfast.meeting import host_id
from holdfast.restore.planning.candidates import Candidate
from holdfast.restore.planning.holdings import Recovery, encode_choice
from holdfast.restore.reading.images import Checkpoint, StoredImage, decode_layout, from_manifest
from holdfast.restore.reading.read import verified_range
from holdfast.restore.reading.stored import open_stored, seal_of
from holdfast.storage.base import Store

#: Longer values, with the block in which they begin, are read by each rank that needs them.
_MOST_VALUES_BYTES = 4 << 20


class _Documents(msgspec.Struct, array_like=True, frozen=True):
    """The manifest and the layout of a checkpoint as rank 0, on ``host``, read them.

    ``first``: of the image of rank 0, what every rank needs where ranks are not as many as saved,
    by where it begins.
    """

    host: str
    manifest: bytes
    layout: bytes
    first: dict[int, bytes] = {}


class StorageHold:
    """The lease of one restore on ``store``, on rank 0; on every rank, the documents of what is
    restored, which rank 0 reads and tells all.

    ``listed``: returns the manifest of a candidate that rank 0 has listed.
    """

    def __init__(
        self, store: Store, listed: Callable[[Candidate], Manifest | None] = lambda _: None
    ) -> None:
        self._store, self._listed = store, listed
        self._lease = ReadLease(store)
        self._lists_left = NEW_LISTS
        self._read: dict[Candidate, Manifest] = {}
        self._told: dict[Candidate, bytes] = {}

    def acquire(self, candidate: Candidate) -> bool:
        """Acquire the lease on ``candidate``; False when retention removed it, or is removing
        it.
        """
        if candidate.where != "storage":
            return True
        try:
            found = self._manifest(candidate)
            return not self._has_gone(candidate) if found is None else self._lease.take(found)
        except HoldfastError:  # opening it will report this
            return True

    def tell(self, recovery: Recovery, ranks: int) -> bytes:
        """Return what all ranks are told of a choice, with the documents that they need not read.

        Without these where there are none, this is the only rank, or it cannot read them now.
        """
        documents = b""
        if ranks > 1 and recovery.candidate.where == "storage":
            with suppress(Exception):  # whatever it is, every rank can read for itself
                documents = self._documents(recovery, ranks)
        return msgspec.msgpack.encode((encode_choice(recovery), documents))

    def take(self, candidate: Candidate, documents: bytes) -> None:
        """Take the documents that rank 0 told; b"": there are none."""
        self._told = {candidate: documents} if documents else {}

    def open(self, candidate: Candidate, rank: int, layout: Layout | None = None) -> Checkpoint:
        """Open ``candidate`` on this rank; see ``open_stored``.

        What rank 0 told is used where it is sound, and this rank does not see another manifest.
        """
        manifest = self._read.pop(candidate, None)
        told = self._told_of(candidate)
        if manifest is None and told is not None:
            manifest = self._told_manifest(candidate, told)
        if manifest is not None and layout is None and told is not None and told.layout:
            with suppress(HoldfastError):
                layout = decode_layout(told.layout, manifest.layout)
        opened = open_stored(self._store, candidate, rank, manifest=manifest, layout=layout)
        file = opened.files[0]
        if manifest is not None and told is not None and isinstance(file, StoredImage):
            file.known = told.first
        return opened

    def _manifest(self, candidate: Candidate) -> Manifest | None:
        """On rank 0: return the manifest, as listed if it was; None if none can be read."""
        if candidate not in self._read:
            found = self._listed(candidate)
            if found is None and (there := find_manifest(self._store, candidate.generation)):
                is_it = candidate.seal in (there[1], seal_of(there[0]))
                is_it = is_it and there[0].attempt == candidate.attempt
                found = there[0] if is_it else None  # opening it will report another one
            self._read = {} if found is None else {candidate: found}
        return self._read.get(candidate)

    def _documents(self, recovery: Recovery, ranks: int) -> bytes:
        manifest = self._manifest(recovery.candidate)
        if manifest is None:
            return b""
        layout, first = b"", dict[int, bytes]()
        if not recovery.sources:
            with suppress(HoldfastError):  # each rank tries it then
                layout = read_bounded(self._store, layout_path(manifest.layout), MAX_BYTES)
                if ranks != manifest.world:
                    known = decode_layout(layout, manifest.layout)
                    first = _first_image(from_manifest(self._store, manifest, known))
        told = _Documents(host_id(), seal(manifest), layout, first)
        return zlib.compress(msgspec.msgpack.encode(told), 1)

    def _told_of(self, candidate: Candidate) -> _Documents | None:
        with suppress(zlib.error, msgspec.MsgspecError):
            data = zlib.decompress(self._told.get(candidate, b""))
            return msgspec.msgpack.decode(data, type=_Documents)
        return None

    def _told_manifest(self, candidate: Candidate, told: _Documents) -> Manifest | None:
        """Return the manifest that rank 0 told; None where this rank is to read it for itself."""
        path = manifest_path(candidate.generation)
        with suppress(HoldfastError):
            if told.host != host_id():
                front = self._store.read(path, 0, FRONT_BYTES)
                if checksum_in(front) != candidate.seal:  # another directory
                    return None
            manifest = unseal(Manifest, told.manifest, path)
            of = manifest.attempt, checksum_in(told.manifest)
            return manifest if of == (candidate.attempt, candidate.seal) else None
        return None

    def should_list_again(self, candidate: Candidate) -> bool:
        """Return whether storage must be listed again, after ``candidate`` failed or got no
        lease.
        """
        if not self._lists_left or not self._has_gone(candidate):
            return False
        self._lists_left -= 1
        return True

    def end(self) -> None:
        """Release the lease."""
        self._lease.end()

    def _has_gone(self, candidate: Candidate) -> bool:
        if candidate.where != "storage":
            return False
        try:
            return not self._store.exists(manifest_path(candidate.generation))
        except HoldfastError:  # storage fails: reported elsewhere
            return False


def _first_image(checkpoint: Checkpoint) -> dict[int, bytes]:
    """Return header, values and table of the image of rank 0, verified, with the blocks that the
    values are in; nothing of one with long values, or a frozen part.
    """
    header, file = checkpoint.header(0), checkpoint.files[0]
    begin = header.values.offset // BLOCK_BYTES * BLOCK_BYTES
    if header.table.offset - begin > _MOST_VALUES_BYTES or not isinstance(file, StoredImage):
        return {}
    start, end = header.data_start, header.data_start + header.table.offset
    spans = ((0, start), (start + begin, end), (end, file.size_bytes))
    file.known = {at: bytes(file.view(at, stop, bytearray())) for at, stop in spans}
    file.open(checkpoint.identity | {"rank": "0"})
    verified_range(checkpoint, 0, begin, header.table.offset)
    return file.known
