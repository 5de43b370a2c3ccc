"""One image in memory, two files in storage: what is frozen apart from what is live.

In an image with a gap the frozen tensors fill whole blocks in front of all others, so both files
have the blocks of the one image, and their checksums, as they are; only headers are made anew.
The live file is the image that a state without these leaves would have; the frozen one says
nothing of the generation, so that the same content is always the same file, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.errors import FormatError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.features import PARTS
from holdfast.format.image import Entry, Header, Image, fill_in, plan_entries

#: What the metadata of a frozen part say of it, beside ``rank``.
PART_METADATA = {"part": "frozen"}


@dataclass(frozen=True, slots=True)
class Split:
    """The two files that an image makes; ``frozen_blocks`` of its blocks are in ``part``."""

    live: Image
    part: Image
    frozen_blocks: int

    def tables(self, sums: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The block checksums of (live, part), from those of the image."""
        return sums[self.frozen_blocks :], sums[: self.frozen_blocks]


def split(image: Header) -> Split | None:
    """How ``image`` is stored in two files; None when it has nothing to be stored apart."""
    if image.gap is None:
        return None
    frozen_bytes = image.frozen_bytes
    in_order = sorted(image.entries.values(), key=lambda entry: (entry.offset, entry.size_bytes))
    frozen = [entry for entry in in_order if entry.offset < frozen_bytes]
    live = [_moved(entry, -frozen_bytes) for entry in in_order if entry.offset >= frozen_bytes]
    about = {key: value for key, value in image.metadata.items() if key != "requires"}
    gap = (image.gap.offset, image.gap.stop)
    part_about = {**PART_METADATA, "rank": about.get("rank", "0")}
    return Split(
        fill_in(plan_entries(live, None), about, image.values.size_bytes),
        fill_in(plan_entries(frozen, gap), part_about, 0),
        frozen_bytes // BLOCK_BYTES,
    )


def join(live: Header, part: Header, where: str) -> Header:
    """The header of the one image that these two files are the parts of.

    FormatError when they are not.
    """
    frozen_bytes = part.frozen_bytes
    if live.gap is not None or part.gap is None or part.table.offset != frozen_bytes:
        raise FormatError(f"{where} is not an image and the frozen part that belongs to it")
    twice = sorted(live.entries.keys() & part.entries.keys())
    if twice:
        raise FormatError(f"{where}: {twice[0]!r} is in the image and in its frozen part")
    moved = {name: _moved(entry, frozen_bytes) for name, entry in live.entries.items()}
    return Header(
        live.metadata | {"requires": PARTS}, part.entries | moved, live.data_start,
        _moved(live.values, frozen_bytes), _moved(live.table, frozen_bytes),
        live.size_bytes + frozen_bytes, part.gap,
    )  # fmt: skip


def _moved(entry: Entry, by: int) -> Entry:
    return replace(entry, offset=entry.offset + by)
