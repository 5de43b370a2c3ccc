"""Records of DCP's metadata that are interpreted at once are what they are opcode by opcode."""

from __future__ import annotations

import itertools
import pickle
import pickletools
import random
import re
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
from holdfast.interop import pickle_records, pickles, record_runs
from holdfast.interop.pickles import interpret
from holdfast.interop.record_runs import RecordRuns

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


def outcome(data: bytes) -> Any:
    """The value, all that the memo has, and the end; or the error."""
    try:
        machine = pickles._Machine(memoryview(data), "here", 1 << 30)
        return machine.run(), machine.memo, machine.at
    except ForeignFormatError as error:
        return type(error)


def slowly(data: bytes) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordRuns, "follow", lambda *_: None)
        return outcome(data)


def test_the_values_the_memo_and_the_cost_are_those_of_each_opcode() -> None:
    data = metadata(40)
    left: list[int] = []
    for follows in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not follows:
                patch.setattr(RecordRuns, "follow", lambda *_: None)
            machine = pickles._Machine(memoryview(data), "here", 1 << 30)
            value = machine.run()
            left.append(machine.room_bytes)
            assert len(value.fields["storage_data"]) == 4 * 40 + 1
    assert outcome(data) == slowly(data)
    used = [(1 << 30) - one for one in left]
    assert used[1] <= used[0] <= 1.1 * used[1], "never counted below what it is"


def test_most_records_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So long as this holds, metadata of many ranks take a quarter of the time."""
    taken = 0

    def counted(*given: Any) -> Any:
        nonlocal taken
        taken += 1
        return pickle_records.new(*given)

    monkeypatch.setattr(pickles, "new", counted)
    interpret(metadata(200), "here")
    assert 0 < taken < 100, "of 2,400 records"


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
                changed[at] = chance.choice(b"hjKMJ)}(ub\x81\x85\x86\x87\x94R\x8ctqr")
            else:
                del changed[at : at + chance.randrange(1, 5)]
        assert outcome(bytes(changed)) == slowly(bytes(changed))


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
    assert outcome(swapped) == slowly(swapped)
    tensors = interpret(swapped, "here").value.fields["state_dict_metadata"]
    chunks = [one.fields for one in next(iter(tensors.values())).fields["chunks"]]
    assert [chunk["sizes"] for chunk in chunks] != [(3,)] * 6
    assert sorted(chunk["offsets"] for chunk in chunks) != [(3 * rank,) for rank in range(6)]


def test_runs_without_an_end_are_bounded_in_number_and_memory() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.interop.record_runs.MAX_RECORDS", 50)
        assert outcome(metadata(40)) == slowly(metadata(40))
    data = metadata(40)
    machine = pickles._Machine(memoryview(data), "here", 40_000)
    with pytest.raises(ForeignFormatError, match="too much memory"):
        machine.run()


def test_hostile_numbers_of_sizes_are_refused() -> None:
    """In the last record of a run, which is never interpreted by itself."""
    data = metadata(4)
    size = b"J" + struct.pack("<i", 70_000)
    at = data.rindex(size, 0, data.index(b"storage_data"))
    negative = data[:at] + b"J" + struct.pack("<i", -70_000) + data[at + 5 :]
    assert outcome(negative) == slowly(negative)
    with pytest.raises(ForeignFormatError):
        interpret(negative, "here")


def test_forms_that_are_forgotten_again_and_again_are_no_longer_learned() -> None:
    """To compile one takes longer than to go by opcodes: a file could ask for it at each record."""
    runs = RecordRuns()
    data = metadata(6)
    machine = pickles._Machine(memoryview(data), "here", 1 << 30)
    machine.runs = runs
    machine.run()
    for _ in range(record_runs.MAX_LEARNED):
        runs._learned = {"chunk": re.compile(b"x")}
        runs.forget()
    chunk = pickle_records.Record("ChunkStorageMetadata", {})
    machine.at, before = 0, dict(runs._learned)
    runs.follow(chunk, machine)
    assert runs._learned == before == {} and runs._may_learn <= 0
