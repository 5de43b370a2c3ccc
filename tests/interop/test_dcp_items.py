"""Directories of DCP are the same read by columns and record by record; what is wrong is named."""

from __future__ import annotations

import pickle
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.errors import ForeignFormatError
from holdfast.interop import dcp, dcp_items, pickle_records, pickles, record_runs
from holdfast.interop.dcp import read_dcp_tree
from holdfast.interop.dcp_items import ChunkBoxes, Wrong
from holdfast.interop.foreign import ForeignCheckpoint, ForeignLeaf
from holdfast.interop.foreign_images import ForeignImages
from holdfast.interop.source_files import SourceFiles

RANKS = 12
#: The sizes of a rank's shard, by leaf: of several dimensions, and one that only one rank has.
SHARDS = {"a": (2, 3), "b": (300,), "c@1": (1, 2, 2), "ä": (70_000,), "step": ()}


def again(value: Any) -> Any:
    """The same as other objects, as what came from another rank."""
    return pickle.loads(pickle.dumps(value))


def described(shards: dict[str, tuple[int, ...]] = SHARDS) -> Metadata:
    """Metadata as DCP writes them: every rank's places came pickled."""
    tensors, storage = {}, {}
    for name, shard in shards.items():
        ranks = range(RANKS if shard else 1)
        starts = [
            torch.Size([rank * one for one in shard[:1]] + [0] * len(shard[1:])) for rank in ranks
        ]
        chunks = [again(ChunkStorageMetadata(start, torch.Size(shard))) for start in starts]
        size = torch.Size([RANKS * one for one in shard[:1]] + list(shard[1:]))
        tensors[name] = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
    for rank in range(RANKS):
        file, mine = f"__{rank}_0.distcp", []
        for number, (name, about) in enumerate(tensors.items()):
            if rank < len(about.chunks):
                index = MetadataIndex(name, about.chunks[rank].offsets, rank)
                mine.append((index, _StorageInfo(file, 1000 * number, 900 + number)))
        storage.update(again(mine))
    return Metadata({**tensors}, {}, storage)


def written(directory: Path, metadata: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / ".metadata").write_bytes(metadata)
    for rank in range(RANKS):
        with (directory / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(6000)
    return directory


def read(directory: Path, many_bytes: int) -> Any:
    """Leaves and notes; or the error, which says what and where."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "MANY_BYTES", many_bytes)
        try:
            tree = read_dcp_tree(SourceFiles(directory), "", is_nested=False)
        except ForeignFormatError as error:
            return type(error)
    return tree.entries, tree.notes, tree.world


def test_a_directory_is_the_same_by_columns_and_by_records(tmp_path: Path) -> None:
    directory = written(tmp_path / "d", pickle.dumps(described()))
    entries, _, world = read(directory, 0)
    assert (entries, world) == (read(directory, 1 << 30)[0], RANKS)
    assert entries.keys() == SHARDS.keys()
    assert all(len(leaf.parts) == (RANKS if leaf.shape else 1) for leaf in entries.values())
    part = entries["b"].parts[7]
    assert (part.box.start, part.box.stop, part.rank) == ((2100,), (2400,), 7)
    assert (part.extent.file, part.extent.offset, part.extent.item_bytes) == (
        "__7_0.distcp",
        1000,
        901,
    )


def test_what_is_changed_in_metadata_is_the_same_both_ways(tmp_path: Path) -> None:
    data, chance, kept = pickle.dumps(described()), random.Random(1), 0
    for number in range(40):
        changed = bytearray(data)
        at = chance.randrange(len(data) // 3, len(data))
        changed[at] = chance.choice((chance.randrange(256), changed[at] ^ 1))
        directory = written(tmp_path / f"{number}", bytes(changed))
        one, other = read(directory, 0), read(directory, 1 << 30)
        kept += isinstance(one, tuple)
        assert one == other
    assert 0 < kept < 40


@pytest.mark.parametrize("many_bytes", [0, 1 << 30])
def test_an_item_twice_is_refused_wherever_it_is(tmp_path: Path, many_bytes: int) -> None:
    data = pickle.dumps(described())
    # Where rank 3 has "b", said to be where rank 2 has it.
    first, second = (b"M" + struct.pack("<H", rank * 300) + b"\x85" for rank in (2, 3))
    at = data.rindex(second, data.index(b"storage_data"))
    directory = written(tmp_path / "d", data[:at] + first + data[at + 4 :])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "MANY_BYTES", many_bytes)
        with pytest.raises(ForeignFormatError, match="1 items of 'b' are there twice"):
            read_dcp_tree(SourceFiles(directory), "")


def test_extensions_whose_names_double_are_refused_at_once(tmp_path: Path) -> None:
    """A list in a list in a list, twice each: printed it would have 2**60 brackets."""
    nested: Any = []
    for _ in range(60):
        nested = [nested, nested]
    metadata = described({"a": (2, 3)})
    first = next(iter(metadata.storage_data))
    metadata.storage_data[first] = _StorageInfo("__0_0.distcp", 0, 9, transform_descriptors=nested)
    directory = written(tmp_path / "d", pickle.dumps(metadata))
    with pytest.raises(ForeignFormatError, match=r"through extensions \(a list, a list\)"):
        read_dcp_tree(SourceFiles(directory), "")


def test_headers_of_images_are_those_of_each_by_itself(tmp_path: Path) -> None:
    """Also of several boxes of a rank, other types, and names that may be those of pieces."""
    entries = read(written(tmp_path / "d", pickle.dumps(described())), 0)[0]
    wide = entries["a"]
    leaves = {
        "z": ForeignLeaf("F64", wide.shape, wide.parts),
        'say "ü"': ForeignLeaf("BF16", wide.shape, tuple(reversed(wide.parts))),
        "eight": ForeignLeaf("F8_E4M3", wide.shape, wide.parts),
        "of one rank": ForeignLeaf(
            "F32",
            wide.shape,
            tuple(part.__class__(part.box, part.extent, 4) for part in wide.parts),
        ),
        **{name: leaf for name, leaf in entries.items() if "@" not in name},
    }
    for some in (leaves, entries):
        images = ForeignImages(some, RANKS)
        for rank, plan in enumerate(images.plans()):
            alone = images.plan(rank)[0]
            assert plan.header_text == alone.header_text
            assert (plan.tensor_bytes, plan.data_start) == (alone.tensor_bytes, alone.data_start)
    assert ForeignCheckpoint("dcp", 1, entries, world=RANKS).layout("here").world == RANKS


def test_columns_are_used_for_metadata_of_many_bytes_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    used: list[bool] = []

    def interpret(*given: Any, as_rows: bool, **more: Any) -> Any:
        used.append(as_rows)
        return pickles.interpret(*given, as_rows=as_rows, **more)

    monkeypatch.setattr(dcp, "interpret", interpret)
    shards: dict[str, tuple[int, ...]] = {f"layers.{number}": (2, 3) for number in range(40)}
    for some in (SHARDS, shards):
        data = pickle.dumps(described(some))
        read_dcp_tree(SourceFiles(written(tmp_path / "d", data)), "")
        assert used.pop() == (len(data) >= record_runs.MANY_BYTES)
    assert len(data) > record_runs.MANY_BYTES


def chunk(start: tuple[int, ...], sizes: tuple[int, ...]) -> pickle_records.Record:
    return pickle_records.Record("ChunkStorageMetadata", {"offsets": start, "sizes": sizes})


def test_a_shape_beyond_all_numbers_is_refused(tmp_path: Path) -> None:
    data = pickle.dumps(described({"a": (2, 3)}))
    at = data.index(b"K\x18K\x03\x86")
    huge = data[:at] + b"\x8a\x0a" + (1 << 70).to_bytes(10, "little") + data[at + 2 :]
    with pytest.raises(ForeignFormatError, match="'a' has a shape that no tensor has"):
        read_dcp_tree(SourceFiles(written(tmp_path / "d", huge)), "")


def test_a_place_whose_end_is_beyond_all_numbers_is_refused(tmp_path: Path) -> None:
    """As a number of 64 bits its end would be negative, and the file as long as it should be."""
    metadata = described({"a": (2, 3)})
    first = next(iter(metadata.storage_data))
    metadata.storage_data[first] = _StorageInfo("__0_0.distcp", (1 << 63) - 10, 900)
    with pytest.raises(ForeignFormatError, match="'a' lies at no place of a file"):
        read_dcp_tree(SourceFiles(written(tmp_path / "d", pickle.dumps(metadata))), "")


def test_chunks_that_many_tensors_share_are_known_of_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each shape they are others: metadata of 3 MB would take gigabytes."""
    monkeypatch.setattr(dcp_items, "_MAX_KNOWN", 250)
    boxes, shared = ChunkBoxes(), [chunk((at,), (1,)) for at in range(100)]
    for size in range(100, 120):
        assert len(boxes.of(shared, (size,))[1]) == 100
    assert len(boxes._known) == 2
    with pytest.raises(Wrong, match="outside"):
        boxes.of(shared, (99,))


def test_boxes_whose_hashes_are_alike_take_no_longer() -> None:
    """Each number is 0 or the modulus of Python's hashes of numbers."""
    starts = [
        tuple(((1 << 61) - 1) * (at >> bit & 1) for bit in range(14)) for at in range(1 << 14)
    ]
    begin_s = time.process_time()
    found = ChunkBoxes().of([chunk(start, (0,) * 14) for start in starts], (1,) * 14)[1]
    assert [box.start for box in found] == starts
    assert time.process_time() - begin_s < 2, "as a dictionary of tuples it takes 5 s"
