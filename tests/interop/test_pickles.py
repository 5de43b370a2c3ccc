"""The interpreter of pickles agrees with torch on what both accept, and executes nothing."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ForeignFormatError
from holdfast.interop.pickle_records import NumpyArray, Opaque, Record, TensorRef, TorchDtype
from holdfast.interop.pickles import interpret
from holdfast.interop.zip_entries import ZipFile

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64)
KEYS = st.one_of(st.text(max_size=8), st.integers(-(1 << 40), 1 << 40))
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of several types, also views: transposed, with steps, scalars, empty ones."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    raw = torch.randint(
        0, 2, [*shape, 3], generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    one = raw.to(draw(st.sampled_from(DTYPES)))
    view = draw(st.sampled_from(("whole", "last", "turned", "steps")))
    if view == "last":
        return one[..., 1]
    if view == "turned":
        return one.transpose(0, -1)
    return one[..., ::2] if view == "steps" else one


STATES = st.recursive(
    st.one_of(PLAIN, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(max_size=5), inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=4).map(tuple),
    ),
    max_leaves=12,
)


def opened(raw: bytes) -> tuple[ZipFile, Any]:
    """The zip and the value of its pickle."""
    found = ZipFile(lambda at, size: raw[at : at + size], 0, len(raw), "f.pt")
    return found, interpret(found.read("archive/data.pkl"), "f.pt").value


def made(ref: TensorRef, zipped: ZipFile) -> torch.Tensor:
    """The tensor that a record says."""
    names = {v: k for k, v in _names().items()}
    data = bytearray(zipped.read(f"archive/data/{ref.storage.key}"))
    dtype = names[ref.dtype]
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.as_strided(ref.shape, ref.strides, ref.offset)


def _names() -> dict[torch.dtype, str]:
    return dict(zip(DTYPES, ("F32", "BF16", "I64", "BOOL", "U8", "F64"), strict=True))


def alike(one: Any, other: Any, zipped: ZipFile) -> bool:
    """Whether what torch read is what we read, types included."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, TensorRef)
        there = made(other, zipped)
        return (
            there.dtype == one.dtype and there.stride() == one.stride() and torch.equal(there, one)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[k], other[k], zipped) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            alike(a, b, zipped) for a, b in zip(one, other, strict=True)
        )
    return bool(one == other)


@settings(max_examples=60, deadline=None)
@given(STATES)
def test_states_are_read_as_torch_reads_them(state: Any) -> None:
    file = io.BytesIO()
    torch.save(state, file)
    try:
        expected = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except pickle.UnpicklingError:
        return  # torch refuses long integers and others
    zipped, found = opened(file.getvalue())
    assert alike(expected, found, zipped)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_in_every_protocol(protocol: int) -> None:
    value = {"a": [1, -(1 << 80), 2.5, None, True], ("b", 3): (b"x" * 300, "é" * 300), "s": {1, 2}}
    raw = pickle.dumps(value, protocol)
    assert interpret(raw, "f").value == value


def test_numpy_becomes_bytes() -> None:
    found = interpret(
        pickle.dumps({"a": np.arange(3, dtype=">i4"), "b": np.float64(2.5)}, 2), "f"
    ).value
    assert found["a"] == NumpyArray(">i4", (3,), np.arange(3, dtype=">i4").tobytes())
    assert found["b"] == NumpyArray("<f8", None, struct.pack("<d", 2.5))


def test_metadata_of_dcp_is_read_without_torch() -> None:
    from torch.distributed.checkpoint import metadata as m

    made = m.Metadata(
        {
            "w": m.TensorStorageMetadata(
                m.TensorProperties(torch.bfloat16),
                torch.Size([4, 2]),
                [m.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 2]))],
            ),
            "n": m.BytesStorageMetadata(),
        },
        {"w": ("model", "w")},
        {m.MetadataIndex("w", torch.Size([0, 0]), 0): None},
    )
    found = interpret(pickle.dumps(made), ".metadata")
    assert found.opaque == ()
    fields = found.value.fields
    one = fields["state_dict_metadata"]["w"]
    assert one.fields["size"] == (4, 2)
    assert one.fields["properties"].fields["dtype"] == TorchDtype("bfloat16")
    assert one.fields["chunks"][0] == Record(
        "ChunkStorageMetadata", {"offsets": (0, 0), "sizes": (4, 2)}
    )
    assert fields["storage_data"] == {("MetadataIndex", "w", (0, 0), 0): None}


class _Other:
    def __init__(self) -> None:
        self.x = 1


def test_objects_that_are_not_known_are_listed_and_stay_closed() -> None:
    raw = pickle.dumps({"args": _Other(), "n": 1}).replace(__name__.encode(), __name__.encode())
    found = interpret(raw, "f")
    assert isinstance(found.value["args"], Opaque) and found.value["n"] == 1
    assert [one.what.rpartition(".")[2] for one in found.opaque] == ["_Other"]
    assert 0 < found.opaque[0].offset < len(raw)


def test_a_compressed_zip_is_refused_with_file_and_offset() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("archive/data.pkl", b"x" * 1000)
    raw = file.getvalue()
    with pytest.raises(ForeignFormatError, match=r"f\.pt, byte \d+: .*compressed") as error:
        opened(raw)
    assert error.value.fields["path"] == "f.pt" and error.value.fields["offset"] > 0


def test_a_zip_of_more_entries_than_a_state_has_is_refused() -> None:
    count = 1 << 18
    size = 46 * count
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    long = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, 0)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, size, 1)
    with pytest.raises(ForeignFormatError, match="a directory of 262144 entries"):
        opened(bytes(size) + long + locator + end)
