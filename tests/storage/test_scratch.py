"""A file without a name: what is written is read, and nothing of it is left over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.storage.direct import Scratch, aligned_memory


@pytest.mark.parametrize("offset", [0, 4096, 1000])
@pytest.mark.parametrize("size", [4096, 9000, 5])
def test_what_is_written_is_read_wherever_it_is(tmp_path: Path, offset: int, size: int) -> None:
    scratch = Scratch(str(tmp_path / "made"), 1 << 16, "some state")
    memory = memoryview(aligned_memory(1 << 14))[:size]
    memory[:] = os.urandom(size)
    for _ in range(2):  # again and again at the same place
        scratch.write(offset, memory)
    found = memoryview(aligned_memory(1 << 14))[:size]
    scratch.read(offset, found)
    assert found == memory
    scratch.read(offset + size + 4096, found)
    assert found == bytes(size)
    assert not list((tmp_path / "made").iterdir())
    scratch.close()


def test_reading_past_its_end_says_where_it_ends(tmp_path: Path) -> None:
    scratch = Scratch(str(tmp_path), 8192, "some state")
    with pytest.raises(StorageError, match=r"some state in .* ends at byte 8192; 8192 bytes from"):
        scratch.read(4096, memoryview(aligned_memory(8192)))
    scratch.close()
