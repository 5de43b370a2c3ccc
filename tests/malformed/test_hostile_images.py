"""For every rule of an image's header, one file that breaks it: refused, with the reason."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.errors import FormatError, NewerFormat
from holdfast.format import image as formats
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import (
    MAX_HEADER_BYTES,
    MAX_VALUES_BYTES,
    PAD,
    TABLE,
    VALUES,
    Header,
    fill_in,
    header_size,
    parse_header,
    plan_image,
)
from support.checkpoints.images import assemble

Document = dict[str, Any]
FILE_BYTES = len(
    assemble(
        plan_image([("a", "F32", (2, 3)), ("b", "I8", (5,))]),
        {
            "a": bytes(24),
            "b": bytes(5),
        },
    )
)


def image() -> bytearray:
    """A good one, small: two tensors, values, padding and a table."""
    items = [("a", "F32", (2, 3)), ("b", "I8", (5,))]
    return assemble(plan_image(items), {"a": bytes(24), "b": bytes(5)})


def parse(data: bytes | bytearray) -> Header:
    start = header_size(data[:8], "x.safetensors", len(data))
    return parse_header(data[:start], "x.safetensors", len(data))


def document() -> Document:
    data = image()
    (length,) = struct.unpack_from("<Q", data)
    found: Document = json.loads(data[8 : 8 + length])
    return found


def with_header(text: str | bytes) -> bytes:
    """The good image with another header text, as long as the old one."""
    raw = text.encode() if isinstance(text, str) else text
    data = image()
    (length,) = struct.unpack_from("<Q", data)
    assert len(raw) <= length
    data[8 : 8 + length] = raw.ljust(length)
    return bytes(data)


def refused(data: bytes | bytearray, match: str, kind: type[FormatError] = FormatError) -> None:
    with pytest.raises(kind, match=match) as caught:
        parse(data)
    assert "x.safetensors" in str(caught.value)
    assert type(caught.value) is kind


def test_the_good_image_is_good() -> None:
    assert set(parse(image()).entries) == {"a", "b"}
    assert set(parse(with_header(json.dumps(document()))).entries) == {"a", "b"}


# ── lengths ──────────────────────────────────────────────────────────────────────────────────


def test_an_image_cut_short_anywhere_is_refused() -> None:
    whole = bytes(image())
    for length in range(len(whole)):
        with pytest.raises(FormatError):
            parse(whole[:length])


def test_an_image_with_bytes_behind_its_end_is_refused() -> None:
    refused(image() + b"\0", "bytes of data")


@pytest.mark.parametrize("claimed", [FILE_BYTES - 7, MAX_HEADER_BYTES, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused_before_memory_is_taken(claimed: int) -> None:
    data = struct.pack("<Q", claimed) + bytes(image())[8:]
    refused(data, f"claims {claimed + 8} bytes")


def test_a_header_of_a_file_of_any_size_is_bounded() -> None:
    with pytest.raises(FormatError, match="claims"):
        header_size(struct.pack("<Q", MAX_HEADER_BYTES), "x", 2**60)


def test_an_empty_header_is_refused() -> None:
    refused(struct.pack("<Q", 0) + bytes(100), "not the JSON")


# ── text ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        '"a"',
        "{'a': 1}",
        '{"a": }',
        "{} {}",
        "{}\0",
        b'{"a\xff": 1}',
        b"\xff\xfe{\0}\0",
        '{"__metadata__":{"holdfast":"1"}',
    ],
)
def test_a_header_that_is_not_a_json_object_is_refused(text: str | bytes) -> None:
    refused(with_header(text), "not the JSON of an image")


def test_text_that_is_not_utf8_inside_an_entry_is_refused() -> None:
    text = json.dumps(document()).encode().replace(b'"I8"', b'"I\xff"')
    refused(with_header(text), "not the JSON|entry 'b'")


def test_a_header_nested_without_end_is_refused() -> None:
    text = b'{"__metadata__":{"holdfast":"1"},"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    data = struct.pack("<Q", len(text)) + text
    refused(data, "not the JSON|entry 'a'")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"b": {', '"a": {"dtype": "I8", "shape": [24], "data_offsets": [0, 24]}, "b": {'),
        ('"b": {', '"b": {"dtype": "I8", "shape": [5], "data_offsets": [24, 29]}, "b": {'),
        ('"b": {', r'"\u0062": {"dtype": "I8", "shape": [5], "data_offsets": [24, 29]}, "b": {'),
        # Spelt with escapes throughout, so that no count of plain spellings notices.
        (
            '"b": {',
            r'"b": {"d\u0074ype": "U8", "sh\u0061pe": [5], "data\u005foffsets": [24, 29]}, '
            '"b": {',
        ),
        ('"dtype": "I8"', '"dtype": "I8", "dtype": "U8"'),
        ('"shape": [5]', '"shape": [5], "shape": [1, 5]'),
        ('"__metadata__"', '"__metadata__": {"holdfast": "1"}, "__metadata__"'),
        ('"holdfast": "1"', '"holdfast": "2", "holdfast": "1"'),
        ('"a": {', '"__metadata__": {"holdfast": "2"}, "a": {'),
    ],
)
def test_a_name_that_is_there_twice_is_refused(old: str, new: str) -> None:
    text = json.dumps(document())
    assert text.count(old) == 1
    refused(with_header(text.replace(old, new)), "is there twice")


# ── what it says of itself ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("metadata", [[], "1", {"holdfast": 1}, {"holdfast": "1", "n": None}, None])
def test_metadata_that_are_not_strings_are_refused(metadata: Any) -> None:
    refused(with_header(json.dumps(document() | {"__metadata__": metadata})), "metadata")


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}])
def test_a_safetensors_file_of_somebody_else_is_refused(metadata: dict[str, str]) -> None:
    text = json.dumps(document() | {"__metadata__": metadata})
    refused(with_header(text), "not a Holdfast image")


def test_a_file_without_metadata_is_not_an_image() -> None:
    found = document()
    del found["__metadata__"]
    refused(with_header(json.dumps(found)), "not a Holdfast image")


@pytest.mark.parametrize("version", ["2", "10", "0", "", "1.0"])
def test_another_version_is_refused_as_such(version: str) -> None:
    text = json.dumps(document() | {"__metadata__": {"holdfast": version}})
    refused(with_header(text), "upgrade", NewerFormat)


# ── entries ──────────────────────────────────────────────────────────────────────────────────


def changed(name: str, **fields: Any) -> bytes:
    """The good image with some fields of one entry replaced."""
    found = document()
    found[name] = found[name] | fields
    return with_header(json.dumps(found))


@pytest.mark.parametrize(
    "entry",
    [
        7,
        [],
        None,
        {},
        {"dtype": "I8", "shape": [5]},
        {"shape": [5], "data_offsets": [24, 29]},
        {"dtype": "I8", "shape": [5], "data_offsets": [24]},
        {"dtype": "I8", "shape": [5], "data_offsets": [24, 29, 30]},
        {"dtype": "I8", "shape": [5.5], "data_offsets": [24, 29]},
        {"dtype": "I8", "shape": [True], "data_offsets": [24, 29]},
        {"dtype": "I8", "shape": 5, "data_offsets": [24, 29]},
        {"dtype": 8, "shape": [5], "data_offsets": [24, 29]},
        {"dtype": "I8", "shape": ["5"], "data_offsets": [24, 29]},
    ],
)
def test_an_entry_that_is_none_is_refused_by_name(entry: Any) -> None:
    refused(with_header(json.dumps(document() | {"b": entry})), "entry 'b'|there twice")


@pytest.mark.parametrize("dtype", ["", "i8", "F128", "C128", "F4"])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    refused(changed("b", dtype=dtype), "entry 'b'")


@pytest.mark.parametrize("shape", [[], [4], [6], [5, 2], [-5], [-1, -5], [5, 0], [2**40] * 40])
def test_a_shape_that_does_not_make_the_bytes_is_refused(shape: list[int]) -> None:
    refused(changed("b", shape=shape), "entry 'b'")


@pytest.mark.parametrize(
    ("name", "offsets", "match"),
    [
        ("b", [25, 30], "gap or overlap"),
        ("b", [23, 28], "gap or overlap"),
        ("b", [0, 5], "gap or overlap"),
        ("a", [4, 28], "gap or overlap"),
        ("a", [-24, 0], "gap or overlap"),
        ("b", [24, 28], "entry 'b' has 4 bytes"),
        ("b", [29, 24], "entry 'b' has -5 bytes"),
        ("b", [2**62, 2**62 + 5], "gap or overlap"),
    ],
)
def test_entries_that_do_not_lie_side_by_side_are_refused(
    name: str, offsets: list[int], match: str
) -> None:
    refused(changed(name, data_offsets=offsets), match)


def test_a_hole_where_an_entry_was_is_refused() -> None:
    found = document()
    del found["a"]
    refused(with_header(json.dumps(found)), "gap or overlap")


# ── the table ────────────────────────────────────────────────────────────────────────────────


def test_values_larger_than_any_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formats, "MAX_VALUES_BYTES", MAX_VALUES_BYTES + 1)  # in the writer alone
    found = {n: fill_in(plan_image([]), {}, n) for n in (MAX_VALUES_BYTES, MAX_VALUES_BYTES + 1)}
    monkeypatch.undo()
    for size, image in found.items():
        if size <= MAX_VALUES_BYTES:
            assert parse_header(image.header, "x", image.size_bytes).values.size_bytes == size
        else:
            with pytest.raises(FormatError, match=f"its values claim {size} bytes"):
                parse_header(image.header, "x", image.size_bytes)


@pytest.mark.parametrize("name", [TABLE, VALUES, PAD])
def test_an_image_without_values_padding_or_table_is_refused(name: str) -> None:
    found = document()
    found["c"] = found.pop(name)
    refused(with_header(json.dumps(found)), f"has no '{name}'")


def test_a_table_that_is_not_of_checksums_is_refused() -> None:
    found = document()[TABLE]
    size = found["data_offsets"][1] - found["data_offsets"][0]
    refused(changed(TABLE, dtype="U8", shape=[size]), "not a row of U64")


def move_table(found: Document) -> None:
    """Swap padding and table: all bytes are accounted for, in another order."""
    pad, table = found[PAD]["data_offsets"], found[TABLE]["data_offsets"]
    start, size = pad[0] + -pad[0] % 8, table[1] - table[0]
    values = found[VALUES]["data_offsets"]
    found[VALUES] |= {"shape": [start - values[0]], "data_offsets": [values[0], start]}
    found[TABLE]["data_offsets"] = [start, start + size]
    found[PAD] |= {
        "shape": [table[1] - start - size],
        "data_offsets": [start + size, table[1]],
    }


def no_table(found: Document) -> None:
    """A table of no entries; its bytes are given to the padding."""
    pad, table = found[PAD]["data_offsets"], found[TABLE]["data_offsets"]
    found[PAD] |= {"shape": [table[1] - pad[0]], "data_offsets": [pad[0], table[1]]}
    found[TABLE] |= {"shape": [0], "data_offsets": [table[1], table[1]]}


@pytest.mark.parametrize(
    ("change", "match"), [(move_table, "in order"), (no_table, "not on the page")]
)
def test_a_table_in_the_wrong_place_is_refused(
    change: Callable[[Document], None], match: str
) -> None:
    found = document()
    change(found)
    refused(with_header(json.dumps(found)), match)


@pytest.mark.parametrize(("entries", "match"), [(512, "512 entries"), (1024, ""), (1536, "1536")])
def test_a_table_has_as_many_entries_as_its_blocks_need(entries: int, match: str) -> None:
    blocks = 513
    stop = blocks * BLOCK_BYTES
    found: Document = {
        "__metadata__": {"holdfast": "1"},
        "a": {"dtype": "U8", "shape": [stop - 2], "data_offsets": [0, stop - 2]},
        VALUES: {"dtype": "U8", "shape": [2], "data_offsets": [stop - 2, stop]},
        PAD: {"dtype": "U8", "shape": [0], "data_offsets": [stop, stop]},
        TABLE: {"dtype": "U64", "shape": [entries], "data_offsets": [stop, stop + 8 * entries]},
    }
    raw = struct.pack("<Q", 4088) + json.dumps(found).encode().ljust(4088)
    file_bytes = len(raw) + stop + 8 * entries
    if not match:
        assert parse_header(raw, "x", file_bytes).blocks == blocks
        return
    with pytest.raises(FormatError, match=match):
        parse_header(raw, "x", file_bytes)


# ── accidents ────────────────────────────────────────────────────────────────────────────────


def test_a_changed_byte_of_the_header_is_refused_or_harmless_and_never_a_crash() -> None:
    """The checksum in the manifest finds every change; parsing alone must survive them all."""
    whole = image()
    used = 8 + len(bytes(whole[8:]).split(b"   ")[0])
    for position in range(used):
        for bit in range(8):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            try:
                found = parse(data)
            except FormatError:
                continue
            assert found.size_bytes == len(data)
