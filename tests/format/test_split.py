"""One image in two files: the same tensors, the same block checksums, and what is frozen apart."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import FormatError
from holdfast.format.checksum import BLOCK_BYTES, unpack_table
from holdfast.format.image import GAP, PAD, TABLE, VALUES, Header, join, plan_image, split
from holdfast.format.manifest import PARTS
from support.checkpoints.images import assemble, halves
from support.checkpoints.items import Item, contents_of, items_lists, parse

ABOUT = {
    "run": "r",
    "incarnation": "1",
    "step": "7",
    "attempt": "a0",
    "rank": "3",
    "world": "4",
    "layout": "0" * 32,
}


def tensors_of(file: bytes) -> dict[str, bytes]:
    """All of a file, as the public library reads it."""
    found = dict(safetensors.deserialize(file))  # type: ignore[no-untyped-call]
    return {name: bytes(entry["data"]) for name, entry in found.items()}


def sums_of(file: bytes) -> tuple[int, ...]:
    header = parse(file)
    return unpack_table(file[header.data_start + header.table.offset :], header.blocks)


def made(
    live: list[Item], frozen: list[Item], values: bytes = b"{}", **about: str
) -> tuple[bytes, dict[str, bytes]]:
    contents = contents_of([*live, *frozen])
    plan = plan_image(live, frozen)
    return bytes(assemble(plan, contents, values, ABOUT | about)), contents


@st.composite
def states(draw: st.DrawFn) -> tuple[list[Item], list[Item]]:
    """Live tensors, and frozen ones of which at least one has elements; some of several blocks."""
    items = draw(items_lists)
    at = draw(st.integers(0, len(items)))
    live, frozen = items[:at], items[at:]
    names = {name for name, _, _ in items}
    size = draw(st.sampled_from([1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2_500_000]))
    for name, some in (("big frozen", frozen), ("big live", live)):
        if name not in names and (some is frozen or draw(st.booleans())):
            some.append((name, "U8", (size,)))
    return live, frozen


@settings(max_examples=60, deadline=None)
@given(state=states(), values=st.binary(min_size=1, max_size=50))
def test_both_files_together_are_the_image(
    state: tuple[list[Item], list[Item]], values: bytes
) -> None:
    image, contents = made(*state, values)
    live, part = halves(image)
    assert part is not None
    found, apart = tensors_of(live), tensors_of(part)
    assert found.pop(VALUES) == values and apart.pop(VALUES) == b""
    for own in (PAD, TABLE):
        found.pop(own), apart.pop(own)
    assert not any(apart.pop(GAP))
    assert found == {name: contents[name] for name, _, _ in state[0]}
    assert apart == {name: contents[name] for name, _, _ in state[1]}


@settings(max_examples=60, deadline=None)
@given(state=states(), values=st.binary(min_size=1, max_size=50))
def test_block_checksums_carry_over_and_the_two_headers_join_to_the_one(
    state: tuple[list[Item], list[Item]], values: bytes
) -> None:
    image, _ = made(*state, values)
    header = parse(image)
    found = split(header)
    live, part = halves(image)
    assert found is not None and part is not None
    # What halves() summed anew is what split() says of the image's own sums.
    assert found.tables(sums_of(image)) == (sums_of(live), sums_of(part))
    joined = join(parse(live), parse(part), "both")
    assert joined.entries == header.entries
    assert (joined.values, joined.table.offset) == (header.values, header.table.offset)
    assert (joined.gap, joined.blocks) == (header.gap, header.blocks)


@settings(max_examples=60, deadline=None)
@given(state=states(), values=st.binary(min_size=1, max_size=50))
def test_the_live_file_is_the_image_of_a_state_without_the_frozen_leaves(
    state: tuple[list[Item], list[Item]], values: bytes
) -> None:
    image, contents = made(*state, values)
    alone = assemble(plan_image(state[0]), contents, values, ABOUT)
    assert halves(image)[0] == bytes(alone)


def test_the_same_frozen_leaves_are_the_same_file_whatever_is_around_them() -> None:
    frozen: list[Item] = [("base", "F32", (300_000,)), ("norm", "F64", (8,))]
    one, contents = made([("lora", "F32", (4,))], frozen)
    plan = plan_image([("lora", "F32", (4,)), ("other", "F64", (9, 9))], frozen)
    more = contents | {"other": bytes(648)}
    later = ABOUT | {"step": "8", "attempt": "b", "incarnation": "2", "layout": "f" * 32}
    other = assemble(plan, more, b"x" * 5000, later)
    assert halves(one)[1] == halves(other)[1]


def test_no_block_has_bytes_of_both() -> None:
    image, _ = made([("live", "F32", (9,))], [("frozen", "F32", (9,))])
    header = parse(image)
    assert header.entries["frozen"].stop == 36
    assert header.entries["live"].offset == header.frozen_bytes == BLOCK_BYTES


def test_an_image_without_frozen_leaves_is_not_split() -> None:
    image, _ = made([("live", "F32", (9,))], [])
    assert split(parse(image)) is None
    assert GAP not in tensors_of(image) and PARTS not in str(parse(image).metadata)


def header_of(live: list[Item], frozen: list[Item], which: int) -> Header:
    file = halves(made(live, frozen)[0])[which]
    assert file is not None
    return parse(file)


A: list[Item] = [("a", "F32", (4,))]
B: list[Item] = [("b", "F32", (4,))]


@pytest.mark.parametrize(
    ("live", "part", "match"),
    [
        (parse(made(A, B)[0]), header_of(A, B, 1), "not an image and the frozen part"),
        (header_of(A, B, 0), parse(made(A, B)[0]), "not an image and the frozen part"),
        (header_of(A, B, 0), header_of(A, B, 0), "not an image and the frozen part"),
        (header_of(A, B, 0), header_of(B, A, 1), "'a' is in the image and in its frozen part"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(live: Any, part: Any, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        join(live, part, "both")
