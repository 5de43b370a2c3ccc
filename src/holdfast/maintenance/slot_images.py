"""Reads images of a root that this host's shared memory still has, as if they lay in its files.

A slot is matched with a file by the checksums of header and block table that the manifest seals, so
no name has to be believed. A slot may be written to meanwhile: whoever reads checks every block.
Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from holdfast.errors import ArenaError, NotFound
from holdfast.format.manifest import ImageRef, Manifest
from holdfast.protocol.arena import (
    SLOT_SUFFIX,
    SlotFile,
    SlotRecord,
    arena_home,
    parse_arena_name,
    root_key,
)
from holdfast.storage.base import Store, flat, short_read
from holdfast.storage.files import views


class SlotImages:
    """The images of ``manifests`` that slots on this host hold whole."""

    url = "this host's shared memory"

    def __init__(
        self, root: Store, manifests: Iterable[Manifest], home: Path | None = None
    ) -> None:
        keys = {root_key(view) for view in views(root.identity())}
        refs = {_key(ref): ref for m in manifests for ref in m.images}
        self._slots: dict[str, tuple[SlotFile, int]] = {}
        for file, record in _captured(keys, home or arena_home()):
            image = record.image
            ref = refs.get((image.image_bytes, image.header_xxh3, image.table_xxh3))
            if ref is None or ref.path in self._slots or ref.size_bytes > file.capacity_bytes:
                file.close()
            else:
                self._slots[ref.path] = file, ref.size_bytes

    def __len__(self) -> int:
        return len(self._slots)

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """See ``Store``."""
        slot, have = self._find(path)
        size = have - offset_bytes if size_bytes is None else size_bytes
        if offset_bytes + size > have:
            raise short_read(path, self.url, offset_bytes, size, have)
        return bytes(slot.image[offset_bytes : offset_bytes + size])

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        """See ``Store``."""
        slot, have = self._find(path)
        into = flat(buffer)
        if offset_bytes + len(into) > have:
            raise short_read(path, self.url, offset_bytes, len(into), have)
        into[:] = slot.image[offset_bytes : offset_bytes + len(into)]

    def close(self) -> None:
        """Unmaps the slots."""
        for slot, _ in self._slots.values():
            slot.close()
        self._slots.clear()

    def _find(self, path: str) -> tuple[SlotFile, int]:
        if path not in self._slots:
            raise NotFound(f"{self.url} has no {path}", path=path)
        return self._slots[path]


def _key(ref: ImageRef) -> tuple[int, str, str]:
    return ref.size_bytes, ref.header_xxh3, ref.table_xxh3


def _captured(keys: set[str], home: Path) -> Iterator[tuple[SlotFile, SlotRecord]]:
    """Yields the slots of a root that hold a whole image; who takes one closes it."""
    arenas = sorted(home.iterdir()) if home.is_dir() else []
    for arena in (one for one in arenas if parse_arena_name(one.name)[1] in keys):
        for path in sorted(arena.glob(f"*{SLOT_SUFFIX}")):
            with suppress(ArenaError):
                file = SlotFile.open(path, writable=False)
                record = file.read_record()
                if record is None or record.state != "captured" or record.ring_bytes:
                    file.close()
                    continue
                yield file, record
