"""Images: valid safetensors files whose every byte has its place before any is copied."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import FormatError, UsageError
from holdfast.format.checksum import BLOCK_BYTES, block_count, checksum, unpack_table
from holdfast.format.image import (
    MAX_VALUES_BYTES,
    METADATA,
    PAD,
    PAGE_BYTES,
    RESERVED,
    TABLE,
    VALUES,
    fill_in,
    image_bytes,
    piece_name,
    plan_image,
)
from holdfast.geometry.box import ITEMSIZE, STORED_AS_BYTES, Box
from support.checkpoints.images import assemble
from support.checkpoints.items import Item, contents_of, items_lists, parse

# ── any reader of safetensors can read an image ──────────────────────────────────────────────


@given(items=items_lists, values=st.binary(max_size=50))
def test_the_public_safetensors_library_reads_every_image(items: list[Item], values: bytes) -> None:
    contents = contents_of(items)
    image = assemble(plan_image(items), contents, values)
    found = dict(safetensors.deserialize(bytes(image)))  # type: ignore[no-untyped-call]
    for name, dtype, shape in items:
        stored = found.pop(name)
        assert bytes(stored["data"]) == contents[name]
        if dtype in STORED_AS_BYTES:
            assert (stored["dtype"], stored["shape"]) == ("U8", [len(contents[name])])
        else:
            assert (stored["dtype"], stored["shape"]) == (dtype, list(shape))
    assert bytes(found.pop(VALUES)["data"]) == values
    assert set(found) == {PAD, TABLE}


def _tensor(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.arange(48, dtype=torch.uint8)
    if dtype is torch.bool:
        return (raw % 3 == 0).reshape(4, 12)
    return raw.view(dtype).reshape(-1, 3)


TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def test_every_dtype_is_known_to_torch_or_stored_as_bytes() -> None:
    assert set(TORCH_DTYPES) | STORED_AS_BYTES == set(ITEMSIZE)
    for name, dtype in TORCH_DTYPES.items():
        assert dtype.itemsize == ITEMSIZE[name]


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_a_tensor_of_each_dtype_opens_as_that_in_torch(dtype: str, tmp_path: Path) -> None:
    tensor = _tensor(TORCH_DTYPES[dtype])
    raw = tensor.view(torch.uint8).numpy().tobytes()
    items: list[Item] = [
        ("matrix", dtype, tuple(tensor.shape)),
        ("scalar", dtype, ()),
        ("none", dtype, (0, 3)),
    ]
    contents = {"matrix": raw, "scalar": raw[: ITEMSIZE[dtype]], "none": b""}
    path = tmp_path / "image.safetensors"
    path.write_bytes(assemble(plan_image(items), contents))
    with safetensors.safe_open(str(path), framework="pt") as opened:
        found = {name: opened.get_tensor(name) for name in ("matrix", "scalar", "none")}
    assert found["matrix"].dtype is tensor.dtype
    assert torch.equal(found["matrix"].view(torch.uint8), tensor.view(torch.uint8))
    assert found["scalar"].shape == ()
    assert found["scalar"].reshape(1).view(torch.uint8).numpy().tobytes() == contents["scalar"]
    assert found["none"].shape == (0, 3)


def test_complex128_which_safetensors_lacks_is_stored_as_its_bytes() -> None:
    array = np.arange(6, dtype=np.complex128).reshape(2, 3) * 1j
    items: list[Item] = [("c", "C128", (2, 3)), ("f", "F32", (2,)), ("z", "C128", ())]
    f32 = np.array([1, 2], np.float32)
    contents = {"c": array.tobytes(), "f": f32.tobytes(), "z": array[0, 1].tobytes()}
    found = safetensors.numpy.load(bytes(assemble(plan_image(items), contents)))
    assert found["c"].dtype == np.uint8
    assert np.array_equal(found["c"].view(np.complex128).reshape(2, 3), array)
    assert np.array_equal(found["f"], f32)


# ── where the bytes lie ──────────────────────────────────────────────────────────────────────


@given(items=items_lists, values=st.binary(max_size=50))
def test_an_image_reads_back_as_it_was_planned(items: list[Item], values: bytes) -> None:
    plan = plan_image(items)
    metadata = {"run": "r", "step": "7"}
    image = assemble(plan, contents_of(items), values, metadata)
    header = parse(image)
    assert header.metadata == {"holdfast": "1"} | metadata
    assert header.data_start == plan.data_start
    assert header.size_bytes == len(image) == image_bytes(plan, len(values))
    assert set(header.entries) == {name for name, _, _ in items}
    for planned in plan.entries:
        found = header.entries[planned.name]
        assert (found.offset, found.size_bytes) == (planned.offset, planned.size_bytes)
    start = header.data_start + header.values.offset
    assert image[start : start + header.values.size_bytes] == values


@given(items=items_lists, values_bytes=st.integers(0, 3 * PAGE_BYTES))
def test_data_and_table_begin_on_pages_and_every_tensor_is_aligned(
    items: list[Item], values_bytes: int
) -> None:
    plan = plan_image(items)
    image = fill_in(plan, {"step": "1"}, values_bytes)
    assert image.data_start % PAGE_BYTES == 0
    assert image.table_offset % PAGE_BYTES == 0
    assert image.size_bytes % PAGE_BYTES == 0
    for entry in plan.entries:
        # A complex number is aligned as its parts are.
        assert entry.offset % min(8, ITEMSIZE[entry.dtype]) == 0
    assert image.header[8:].rstrip(b" ").endswith(b"}")


@given(items=items_lists, steps=st.lists(st.integers(0, 10**18), min_size=2, max_size=4))
def test_the_header_stays_the_same_size_however_long_the_step_number_is(
    items: list[Item], steps: list[int]
) -> None:
    plan = plan_image(items)
    images = [
        fill_in(plan, {"step": str(step), "incarnation": str(step), "rank": "0"}, 10)
        for step in steps
    ]
    assert len({(len(image.header), image.data_start, image.size_bytes) for image in images}) == 1


@pytest.mark.parametrize(
    "tensor_bytes",
    [0, 1, BLOCK_BYTES - PAGE_BYTES, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES - 1],
)
def test_the_block_table_holds_the_checksum_of_every_block_before_it(tensor_bytes: int) -> None:
    items: list[Item] = [("t", "U8", (tensor_bytes,))]
    image = assemble(plan_image(items), contents_of(items))
    header = parse(image)
    data = image[header.data_start :]
    table = unpack_table(data[header.table.offset :], header.blocks)
    assert header.blocks == block_count(header.table.offset) == len(table)
    for number, stored in enumerate(table):
        block = data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        if (number + 1) * BLOCK_BYTES > header.table.offset:
            block = data[number * BLOCK_BYTES : header.table.offset]
        assert checksum(block) == stored


def test_there_is_room_for_the_metadata_however_the_rest_fills_the_last_page() -> None:
    metadata = {
        "run": "r" * 64,
        "incarnation": "9" * 12,
        "step": "9" * 12,
        "attempt": "a" * 32,
        "rank": "9" * 6,
        "world": "9" * 6,
        "layout": "f" * 32,
    }
    for length in range(1, PAGE_BYTES + 1):
        image = fill_in(plan_image([("n" * length, "F32", (2,))]), metadata, 10**9)
        assert image.data_start % PAGE_BYTES == 0


def test_metadata_that_outgrow_their_room_are_refused_before_they_move_the_data() -> None:
    plan = plan_image([("t", "U8", (3,))])
    fill_in(plan, {"run": "r" * 500}, 10)
    with pytest.raises(FormatError, match="metadata"):
        fill_in(plan, {"run": "r" * (plan.data_start + 1)}, 10)


def test_values_that_no_reader_takes_are_refused_before_they_are_written() -> None:
    fill_in(plan_image([]), {}, MAX_VALUES_BYTES)
    with pytest.raises(UsageError, match="as tensors"):
        fill_in(plan_image([]), {}, MAX_VALUES_BYTES + 1)


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="'a@0:2'"):
        plan_image([("a@0:2", "F32", (2,)), ("b", "F32", ()), ("a@0:2", "I32", (3,))])


@pytest.mark.parametrize("name", [METADATA, VALUES, PAD, TABLE, RESERVED + "later"])
def test_a_name_of_the_formats_own_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="own"):
        plan_image([("a", "F32", (2,)), (name, "U8", (2,))])


def test_a_piece_is_called_by_its_box_unless_it_is_the_whole_leaf() -> None:
    assert piece_name("w", (4, 6), Box.whole((4, 6))) == "w"
    assert piece_name("w", (4, 6), Box((2, 0), (4, 6))) == "w@2:4,0:6"
    assert piece_name("scalar", (), Box((), ())) == "scalar"


@given(items=items_lists)
def test_the_plan_does_not_depend_on_what_the_image_is_filled_with(items: list[Item]) -> None:
    one, other = plan_image(items), plan_image(iter(items))
    assert one == other
    order = [ITEMSIZE[entry.dtype] for entry in one.entries]
    assert order == sorted(order, reverse=True)


def test_a_header_says_its_own_length_as_safetensors_does() -> None:
    image = fill_in(plan_image([]), {}, 2)
    assert struct.unpack("<Q", image.header[:8]) == (image.data_start - 8,)
