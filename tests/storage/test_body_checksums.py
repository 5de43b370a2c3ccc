"""Checksums that travel with what is sent: the same by every code that a processor may have."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from holdfast.storage import checksums

LENGTHS = [*range(0, 600, 7), 1023, 1024, 1025, 4096, 70_001, 1 << 20]


@pytest.fixture
def fresh() -> Iterator[None]:
    """What was found of libraries and the processor is looked for anew, before and after."""
    kept = checksums._crc64nvme, checksums._crc32c, checksums._has_wide_vectors
    for one in kept:
        one.cache_clear()
    yield
    for one in kept:
        one.cache_clear()


def all_sums() -> list[tuple[int | None, int | None]]:
    draw = random.Random(7)
    data = memoryview(draw.randbytes(max(LENGTHS) + 64))
    found = [(data[at : at + size],) for size in LENGTHS for at in (0, draw.randrange(1, 64))]
    pieces = [(data[:100], data[100:3000], data[3000:3001])]
    return [(checksums.crc64nvme(one), checksums.crc32c(one)) for one in [*found, *pieces]]


@pytest.mark.usefixtures("fresh")
def test_vectors_of_512_bits_give_the_checksums_that_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if checksums.crc64nvme([]) is None or not checksums._has_wide_vectors():
        pytest.skip("without ISA-L, or vectors of 512 bits")
    wide = all_sums()
    for one in (checksums._crc64nvme, checksums._crc32c):
        one.cache_clear()
    monkeypatch.setattr(checksums, "_has_wide_vectors", lambda: False)
    assert all_sums() == wide


@pytest.mark.usefixtures("fresh")
def test_a_library_that_is_wrong_of_long_texts_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if checksums.crc64nvme([]) is None:
        pytest.skip("without ISA-L")
    checksums._crc64nvme.cache_clear()
    plain = checksums._Crc64.__call__

    def wrong(self: checksums._Crc64, before: int, piece: memoryview | bytes) -> int:
        return plain(self, before, piece) ^ (len(piece) > 256)

    monkeypatch.setattr(checksums._Crc64, "__call__", wrong)
    assert checksums.crc64nvme([b"x"]) is None


@pytest.mark.usefixtures("fresh")
def test_a_processor_that_does_not_say_what_it_has_has_no_wide_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(checksums, "open", refuses, raising=False)
    assert not checksums._has_wide_vectors()
