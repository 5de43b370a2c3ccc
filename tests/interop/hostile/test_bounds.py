"""What a pickle may cost: memory by its size, ten seconds; what was really written is within it."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ForeignFormatError
from holdfast.interop import pickles
from holdfast.interop.pickle_records import Opaque
from holdfast.interop.pickles import BASE_BYTES, FACTOR, interpret
from support.checkpoints.commands import SOURCE

P = b"\x80\x02"


def name(module: str, of: str) -> bytes:
    return f"c{module}\n{of}\n".encode()


def text(data: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(data)) + data


def doubled() -> bytes:
    """One list in two places of the next, forty times: on the stack is the last."""
    each = (b"](" + (b"h" + bytes([n])) * 2 + b"eq" + bytes([n + 1]) + b"0" for n in range(40))
    return b"]q\x000" + b"".join(each) + b"h\x28"


def tuples_of_one_hash(count: int) -> bytes:
    """Pairs of numbers, made by turning the hash of tuples around."""
    word = 1 << 64
    p1, p2, p5 = 11400714785074694791, 14029467366897019727, 2870177450012600261

    def step(acc: int, lane: int) -> int:
        acc = (acc + lane * p2) % word
        return ((acc << 31) | (acc >> 33)) % word * p1 % word

    goal = step(step(p5, 5), 7) * pow(p1, -1, word) % word
    goal = ((goal >> 31) | (goal << 33)) % word
    found: list[tuple[int, int]] = []
    number = 0
    while len(found) < count:
        number += 1
        other = (goal - step(p5, number)) * pow(p2, -1, word) % word
        if other < (1 << 61) - 1:
            found.append((number, other))
    assert len({hash(one) for one in found}) == 1
    return pickle.dumps(dict.fromkeys(found), 2)


def nested_key() -> bytes:
    wide = (b"(" + (b"h" + bytes([n])) * 64 + b"tq" + bytes([n + 1]) for n in range(3))
    return P + b"(" + b"K\1" * 64 + b"tq\0" + b"".join(wide) + b"}" + b"h\3Ns" * 100 + b"."


FROM_TYPE = name("torch._tensor", "_rebuild_from_type_v2") + b"q\x000"
PAIRS = b"".join(text(b"%x" % n) + b"N\x86" for n in range(20_000))
CASES = {
    "sizes that double": P + doubled() + name("torch", "Size") + b"h\x28\x85R.",
    "a type of storage that doubles": P
    + text(b"storage")
    + doubled()
    + b"("
    + text(b"0")
    + b"NK\1tQ.",
    "deep lists as sizes": P + name("torch", "Size") + b"]" * 20_000 + b"a" * 19_999 + b"\x85R.",
    "a tensor of a class in itself": P
    + FROM_TYPE
    + name("torch", "Tensor")
    + b"q\x010h\0"
    + b"h\0h\1" * 5000
    + b")"
    + b"\x87" * 5000
    + b"R.",
    "a complex number of 1000 bytes": P
    + name("builtins", "complex")
    + b"\x8b"
    + struct.pack("<i", 1000)
    + b"\x7f" * 1000
    + b"\x85R.",
    "half of a pair of surrogates": P + b"}" + text(b"\xed\xa0\x80") + b"K\1s.",
    "a key of 64^4 parts": nested_key(),
    "tuples of one hash": tuples_of_one_hash(40_000),
    "one list of pairs for many": P
    + b"("
    + PAIRS
    + b"l\x85q\0"
    + name("collections", "OrderedDict")
    + b"q\1("
    + b"h\1h\0R" * 1000
    + b"t.",
    "a long path": P
    + name("pathlib", "PosixPath")
    + text(b"a" * 2_000_000)
    + b"q\x000("
    + b"h\0" * 999
    + b"tR.",
    "bytes of one text": P
    + text(b"a" * 4_000_000)
    + b"q\0"
    + name("_codecs", "encode")
    + b"q\1("
    + b"h\1h\0\x85R" * 1000
    + b"t.",
    "a memo with gaps": P + b"Nr\xff\xff\xff\x7f.",
}
SCRIPT = """
import resource, sys, time
from holdfast.errors import ForeignFormatError
from holdfast.interop.pickles import interpret
raw = open(sys.argv[1], "rb").read()
began_s, began_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    interpret(raw, "evil")
except ForeignFormatError as error:
    assert "evil, byte " in str(error) and len(str(error)) < 600
    print("refused", end=" ")
print(time.process_time() - began_s)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began_kib) << 10)
"""


@pytest.mark.promise
@pytest.mark.parametrize("raw", CASES.values(), ids=CASES.keys())
def test_a_pickle_takes_no_more_memory_and_time_than_its_size_allows(
    tmp_path: Path, raw: bytes
) -> None:
    (tmp_path / "raw").write_bytes(raw)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "raw")],
        env={"PYTHONPATH": SOURCE},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    *refused, took_s, took_bytes = done.stdout.split()
    assert refused == [b"refused"] or FROM_TYPE in raw  # the latter is read as Opaque
    assert float(took_s) < 10
    assert int(took_bytes) <= BASE_BYTES + FACTOR * len(raw)


def test_many_small_values_are_read() -> None:
    numbers = list(range(300_000))
    assert interpret(pickle.dumps(numbers, 2), "f").value == numbers
    import torch
    from torch.distributed.checkpoint import metadata as m

    def size(number: int) -> torch.Size:
        return torch.Size([number])

    chunks = [m.ChunkStorageMetadata(size(n), size(4)) for n in range(8000)]
    about = m.TensorStorageMetadata(m.TensorProperties(torch.float32), size(8004), chunks)
    keys = {m.MetadataIndex("w", size(n)): None for n in range(8000)}
    found = interpret(pickle.dumps(m.Metadata({"w": about}, {}, keys)), ".metadata").value
    assert not isinstance(found, Opaque) and len(found.fields["storage_data"]) == 8000


def test_opcodes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pickles.MAX_OPCODES <= 10**7
    monkeypatch.setattr(pickles, "MAX_OPCODES", 1000)
    assert interpret(P + b"N0" * 498 + b"N.", "f").value is None
    with pytest.raises(ForeignFormatError, match="more than 1000 opcodes"):
        interpret(P + b"N0" * 500 + b"N.", "f")
