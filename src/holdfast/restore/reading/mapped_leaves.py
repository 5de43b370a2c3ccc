"""Gives whole leaves as memory that maps the files of images: verified, and never copied.

An image is not changed once it is published. So its bytes in the page cache are as good as a copy
of them, as long as the file system is this host's own (``storage.base.mapped``).
"""

from __future__ import annotations

from holdfast.format.checksum import BLOCK_BYTES
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.restore.planning.plan import BATCH_BYTES
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import copiers, in_parallel, verify_blocks

#: Each keeps a file open as long as one of its leaves is used.
MAX_IMAGES = 64
_BATCH_BLOCKS = BATCH_BYTES // BLOCK_BYTES


class MappedLeaves:
    """The leaves of a checkpoint that one image has whole, each given out once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._numbers = {leaf.name: n for n, leaf in enumerate(checkpoint.layout.leaves)}
        self._images: dict[int, memoryview | None] = {}
        self._blocks: dict[int, set[int]] = {}

    def take(self, name: str) -> memoryview | None:
        """The bytes of a leaf, row by row; None where they must be read, or were given out.

        They may not be used before ``verify`` has returned. What is written to them does not reach
        the file.
        """
        number = self._numbers.pop(name, None)
        if number is None or not self._checkpoint.has_sums:
            return None
        leaf = self._checkpoint.layout.leaves[number]
        whole = Box.whole(leaf.shape)
        stored = self._checkpoint.layout.owners_meeting(number, whole)
        if len(stored) != 1 or stored[0][1] != whole or whole.is_empty:
            return None
        rank, _ = stored[0]
        header = self._checkpoint.header(rank)
        entry = header.piece(name, leaf.dtype, leaf.shape)
        memory = self._image(rank)
        if entry is None or memory is None or entry.offset % ITEMSIZE[leaf.dtype]:
            return None
        blocks = range(entry.offset // BLOCK_BYTES, (entry.stop - 1) // BLOCK_BYTES + 1)
        self._blocks.setdefault(rank, set()).update(blocks)
        return memory[header.data_start + entry.offset :][: entry.size_bytes]

    def _image(self, rank: int) -> memoryview | None:
        if rank not in self._images:
            is_room = sum(one is not None for one in self._images.values()) < MAX_IMAGES
            self._images[rank] = self._checkpoint.map(rank) if is_room else None
        return self._images[rank]

    def verify(self) -> int:
        """Compare all that was given out with its checksums, each block once; return the bytes.

        ChecksumMismatch: then nothing of it may be used.
        """
        runs: list[tuple[int, int, int]] = []
        for rank, blocks in sorted(self._blocks.items()):
            for block in sorted(blocks):
                last = runs[-1] if runs else (-1, 0, 0)
                if last[0] == rank and last[2] == block and block - last[1] < _BATCH_BLOCKS:
                    runs[-1] = rank, last[1], block + 1
                else:
                    runs.append((rank, block, block + 1))
        self._blocks = {}
        return in_parallel(
            lambda run: verify_blocks(self._checkpoint, *run),
            runs,
            threads=min(copiers(), len(runs)),
            name="holdfast-verify",
        )
