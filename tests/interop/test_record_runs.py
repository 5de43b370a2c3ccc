"""Records of DCP's metadata that are read by columns are what they are opcode by opcode."""

from __future__ import annotations

import itertools
import pickle
import pickletools
import random
import struct
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
from holdfast.interop import pickle_records, pickles
from holdfast.interop.pickles import interpret
from holdfast.interop.record_runs import Rows, Unlike

#: Sizes of one tensor's shards, by its dimensions: small, and beyond each width of a number.
STEPS = ((3,), (300, 7), (70_000, 5, 2), (3, 2, 2, 2, 2), ())


def again(value: Any) -> Any:
    """The same as other objects, as what came from another rank."""
    return pickle.loads(pickle.dumps(value))


def metadata(ranks: int) -> bytes:
    """What DCP writes of tensors that are cut over ranks."""
    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for number, step in enumerate(STEPS):
        chunks = []
        for rank in range(ranks if step else 1):
            start = torch.Size([rank * one for one in step[:1]] + [0] * len(step[1:]))
            chunks.append(again(ChunkStorageMetadata(start, torch.Size(step))))
        size = torch.Size([ranks * one for one in step[:1]] + list(step[1:]))
        properties = TensorProperties(dtype=torch.float32)
        tensors[f"layers.{number}.ä"] = TensorStorageMetadata(properties, size, chunks)
    for rank in range(ranks):
        at, mine = 0, []
        for number, (name, about) in enumerate(tensors.items()):
            if rank < len(about.chunks):
                index = MetadataIndex(name, about.chunks[rank].offsets, rank)
                mine.append((index, _StorageInfo(f"__{rank}_0.distcp", at, 900 + number)))
                at += (1 << 31) if number == 1 else (1 << 41) if number == 2 else 40_000
        storage.update(again(mine))
    return pickle.dumps(Metadata(tensors, {}, storage))


def records(rows: Rows) -> list[Any]:
    """What stands in rows, each as the interpreter makes it by its opcodes."""
    columns = rows.columns
    found: list[Any] = []

    def sizes(some: Any, row: int) -> tuple[int, ...]:
        return tuple(some.values[row, : some.ndim[row]].tolist())

    for row in range(rows.first, rows.stop):
        parts = columns.parts
        if columns.is_pair:
            name, file = (columns.texts[parts[which].number[row]] for which in (0, 3))
            index, offset, length = (int(parts[which][row]) for which in (1, 4, 5))
            fields = {"relative_path": file, "offset": offset, "length": length}
            key = "MetadataIndex", name, sizes(parts[2], row), index
            found.append((key, pickle_records.Record("_StorageInfo", fields)))
        else:
            fields = {"offsets": sizes(parts[0], row), "sizes": sizes(parts[1], row)}
            found.append(pickle_records.Record("ChunkStorageMetadata", fields))
    return found


def spelled_out(value: Any) -> Any:
    """The same with records in place of rows."""
    if isinstance(value, pickle_records.Record):
        return value.kind, spelled_out(value.fields)
    if isinstance(value, dict):
        found: dict[Any, Any] = {}
        for key, item in value.items():
            some = records(key) if type(key) is Rows else [(key, item)]
            assert found.keys().isdisjoint(one for one, _ in some), "nothing is there twice"
            found |= {one: spelled_out(info) for one, info in some}
        return found
    if isinstance(value, list):
        some = [records(one) if type(one) is Rows else [one] for one in value]
        return [spelled_out(one) for one in itertools.chain(*some)]
    return value


def outcome(data: bytes, as_rows: bool = True) -> Any:
    """The value, all that the memo has and no row, and the end; or the error."""
    try:
        machine = pickles._Machine(memoryview(data), "here", 1 << 30, as_rows)
        value, memo, at = machine.run(), machine.memo, machine.at
    except ForeignFormatError as error:
        return type(error)
    except Unlike:
        return outcome(data, False)
    try:
        return spelled_out(value), memo, at
    except AssertionError:  # which the machine refuses, and of rows interop.dcp_items
        return ForeignFormatError


def slowly(data: bytes) -> Any:
    return outcome(data, False)


def agree(data: bytes) -> bool:
    """True if both ways give the same; what the memo has as rows is what nobody asked for."""
    fast, slow = outcome(data), slowly(data)
    if isinstance(fast, type) or isinstance(slow, type):
        return fast is slow
    assert len(fast[1]) == len(slow[1])
    pairs = zip(fast[1], slow[1], strict=True)
    is_same = all(type(a) is Rows or spelled_out(a) == spelled_out(b) for a, b in pairs)
    return is_same and fast[0] == slow[0] and fast[2] == slow[2]


def taken(data: bytes) -> int:
    """How many records stand in rows."""
    machine = pickles._Machine(memoryview(data), "here", 1 << 30, True)
    value = machine.run()
    tables = value.fields["state_dict_metadata"].values()
    places = [value.fields["storage_data"], *(about.fields["chunks"] for about in tables)]
    return sum(one.stop - one.first for place in places for one in place if type(one) is Rows)


def test_the_values_and_the_memo_are_those_of_each_opcode() -> None:
    data = metadata(40)
    assert agree(data) and taken(data) > 280, "of 322"
    assert len(outcome(data)[0][1]["storage_data"]) == 4 * 40 + 1


def test_most_records_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So long as this holds, metadata of many ranks take a thirtieth of the time."""
    count = 0

    def counted(*given: Any) -> Any:
        nonlocal count
        count += 1
        return pickle_records.new(*given)

    monkeypatch.setattr(pickles, "new", counted)
    interpret(metadata(1500), "here", as_rows=True)
    assert 0 < count < 100, "of 18,000 records"


@pytest.mark.parametrize("seed", range(4))
def test_what_is_changed_anywhere_is_read_or_refused_as_opcode_by_opcode(seed: int) -> None:
    chance, data = random.Random(seed), metadata(6)
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(changed))
            kind = chance.randrange(3)
            if kind == 0:
                changed[at] = chance.randrange(256)
            elif kind == 1:
                changed[at] = chance.choice(b"hjKMJ)}(ub\x81\x85\x86\x87\x94R\x8ctqr0012ea")
            else:
                del changed[at : at + chance.randrange(1, 5)]
        assert agree(bytes(changed))


def test_a_place_of_the_memo_that_another_object_takes_is_not_the_name_that_it_was() -> None:
    """In the midst of a run the places of "offsets" and "sizes" are made those of each other."""
    data, places, builds = metadata(6), {}, []
    memoized = 0
    operations = list(pickletools.genops(data))
    for before, (operation, _, _) in itertools.pairwise(operations):
        if operation.name == "MEMOIZE":
            places[before[1]] = memoized if isinstance(before[1], str) else None
            memoized += 1
    for (operation, _, _), (_, _, at) in itertools.pairwise(operations):
        if operation.name == "BUILD":
            builds.append(at)
    at = builds[4]  # of the first tensor: its properties, then shards
    swap = b"".join(
        b"\x8c" + bytes([len(name)]) + name.encode() + b"q" + bytes([places[there] or 0]) + b"0"
        for name, there in (("sizes", "offsets"), ("offsets", "sizes"))
    )
    swapped = data[:at] + swap + data[at:]
    assert agree(swapped)
    tensors = interpret(swapped, "here", as_rows=True).value.fields["state_dict_metadata"]
    chunks = [one.fields for one in next(iter(tensors.values())).fields["chunks"]]
    assert [chunk["sizes"] for chunk in chunks] != [(3,)] * 6
    assert sorted(chunk["offsets"] for chunk in chunks) != [(3 * rank,) for rank in range(6)]


def test_rows_are_bounded_in_number_and_memory() -> None:
    data = metadata(40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.interop.record_runs.MAX_RECORDS", 50)
        assert agree(data) and 0 < taken(data) <= 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickles, "BASE_BYTES", 0)
        patch.setattr(pickles, "FACTOR", 1)
        with pytest.raises(ForeignFormatError, match="too much memory"):
            interpret(data, "here", as_rows=True)
    # Where begins of records are all that there is, and columns of them would take too much.
    start = data[data.index(b"ub") + 2 :][:6]
    many = data.replace(b"\x8c\x07version", b"X" + struct.pack("<I", 60_000) + start * 10_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickles, "BASE_BYTES", 0)
        assert interpret(data, "here", as_rows=True).stop == len(data)
        with pytest.raises(ForeignFormatError):
            interpret(many, "here", as_rows=True)


def test_negative_numbers_are_what_they_are_opcode_by_opcode() -> None:
    data = metadata(6)
    wide, length = ((1 << 31) + 40_000).to_bytes(5, "little"), b"M" + struct.pack("<H", 901)
    for number, other in (
        (b"\x8a\x05" + wide, b"\x8a\x05" + (-7).to_bytes(5, "little", signed=True)),
        (length, b"J" + struct.pack("<i", -901)),
    ):
        at = data.rindex(number)
        changed = data[:at] + other + data[at + len(number) :]
        assert agree(changed) and outcome(changed) is not ForeignFormatError


def test_hostile_numbers_of_sizes_are_refused() -> None:
    """In the last record of a run, which is never interpreted by itself."""
    data = metadata(4)
    size = b"J" + struct.pack("<i", 70_000)
    at = data.rindex(size, 0, data.index(b"storage_data"))
    negative = data[:at] + b"J" + struct.pack("<i", -70_000) + data[at + 5 :]
    assert agree(negative)
    with pytest.raises(ForeignFormatError):
        interpret(negative, "here", as_rows=True)


#: Opcodes behind a run of records, where its list or dictionary is closed.
OTHERWISE = {
    "a tuple in place of the list": b"t",
    "a tuple in the list": b"ta",
    "a list of its own": b"l",
    "without the last": b"0e",
    "all of them dropped": b"1",
    "the last one again": b"2e",
    "the last one memoized": b"\x94e",
    "a set": b"\x90",
    "as a dictionary": b"d",
    "items for a dictionary": b"u",
    "one more": b"Ne",
}


@pytest.mark.parametrize("how", OTHERWISE)
@pytest.mark.parametrize("kind", ["chunks", "pairs"])
def test_rows_that_do_not_end_as_dcp_writes_them_are_read_by_their_opcodes(
    how: str, kind: str
) -> None:
    data = metadata(6)
    closing = b"ubeub" if kind == "chunks" else b"ubu\x8c\x0cstorage_meta"
    at = data.index(closing) + 2
    changed = data[:at] + OTHERWISE[how] + data[at + 1 :]
    assert taken(data) > 20 and agree(changed)


def test_a_record_that_is_taken_from_the_memo_again_is_read_by_its_opcodes() -> None:
    """Each place that a run has added: as the version of the metadata, which may be anything."""
    data = metadata(6)
    _, memo, _ = outcome(data)
    at = data.rindex(b"\x8c\x07version\x94N") + len(b"\x8c\x07version\x94")
    inside = [place for place, one in enumerate(memo) if type(one) is Rows]
    assert len(inside) > 200
    for place in inside[::29]:
        changed = data[:at] + b"j" + struct.pack("<I", place) + data[at + 1 :]
        assert agree(changed)


def test_texts_that_records_share_are_found_in_the_memo() -> None:
    """The name of a file is one object for all of its items, as torch's writer has it."""
    tensors = {f"w{number}": torch.Size((8, 4)) for number in range(9)}
    storage: dict[Any, Any] = {}
    for rank in range(30):
        file, mine = f"__{rank}_0.distcp", []
        for number, (name, size) in enumerate(tensors.items()):
            index = MetadataIndex(name, torch.Size((rank * 8, 0)), rank)
            mine.append((index, _StorageInfo(file, 40 * number, size.numel())))
        storage.update(again(mine))
    data = pickle.dumps(Metadata({}, {}, storage))
    assert agree(data) and taken(data) > 260, "of 270"
    files = {info[1]["relative_path"] for info in outcome(data)[0][1]["storage_data"].values()}
    assert files == {f"__{rank}_0.distcp" for rank in range(30)}
    # One that is named before it is there: by an earlier record, and by its own.
    memo = slowly(data)[1]
    first, second = (memo.index(f"__{rank}_0.distcp") for rank in (20, 25))
    early = data.replace(b"j" + struct.pack("<I", first), b"j" + struct.pack("<I", second), 1)
    assert early != data and agree(early) and outcome(early) is ForeignFormatError
    later = data.replace(b"__7_0.distcp", b"__7_0\xffdistcp")  # which is no text
    assert agree(later) and outcome(later) is ForeignFormatError
