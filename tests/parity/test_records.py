"""A record of parity says the same to whoever reads it, or is refused, whatever is wrong."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.errors import ChecksumMismatch, FormatError, NewerFormat, UsageError
from holdfast.format.checksum import checksum
from holdfast.format.image import header_size, plan_image
from holdfast.format.manifest import AttemptId, Generation
from holdfast.parity.planning import record as records
from holdfast.parity.planning.placement import StoredShard
from holdfast.parity.planning.record import (
    ImageFact,
    MemberFact,
    ParityRecord,
    RecordTerms,
    seal,
    seals_of,
    unseal,
)
from holdfast.transport.client import MOST_DOCUMENT_BYTES
from support.checkpoints.images import assemble, seals

MIB = 1 << 20
FRAME = struct.Struct("<8sQQ")


def image(rank: int, size: int) -> ImageFact:
    memory = assemble(plan_image([("a", "U8", (size,))]), {"a": bytes(size)})
    start = header_size(memory, "image", len(memory))
    header, table = seals(memory)
    return ImageFact(rank, len(memory), start, header, table, memoryview(bytes(memory[:start])))


FACTS = tuple(
    MemberFact(host, tuple(image(rank, size) for rank, size in images))
    for host, images in {
        "a": [(0, 0), (1, 3 * MIB)],
        "b": [(2, 10)],
        "c": [],
        "d": [(3, 9)],
    }.items()
)


def record(**fields: Any) -> ParityRecord:
    made: dict[str, Any] = {
        "version": 1,
        "run_id": "run",
        "incarnation": 3,
        "step": 1200,
        "attempt": "a-0_Z",
        "world": 4,
        "layout": "0" * 32,
        "parity": 2,
        "members": FACTS,
        "stripe": 1,
        "row": 1,
        "size_bytes": 3 * MIB,
        "sums": bytes(24),
        **fields,
    }
    return ParityRecord(**made)


def sealed_anyhow(body: Any) -> bytes:
    """With a true checksum, whatever it says."""
    raw = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return FRAME.pack(b"HFPARIT1", len(raw), checksum(raw)) + raw


def test_what_is_sealed_is_read_back() -> None:
    made = record()
    assert unseal(seal(made), "here") == made
    assert unseal(memoryview(seal(made)), "here").generation == (3, 1200)
    assert made.attempt_id == AttemptId(3, 1200, "a-0_Z", 4, "0" * 32)
    assert made.placement.image_bytes[0] == (4096 + 4096, 3 * MIB + 4096 + 4096)


def changed(number: int, **fields: Any) -> tuple[MemberFact, ...]:
    """The members, with something else said of an image of the first."""
    images = list(FACTS[0].images)
    images[number] = msgspec.structs.replace(images[number], **fields)
    return (MemberFact("a", tuple(images)), *FACTS[1:])


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no version", {"version": 0}, "its version is 0"),
    ("no run", {"run_id": ""}, "'' is no run's id"),
    ("a run of many letters", {"run_id": "x" * 257}, "is no run's id"),
    ("a run with a line break", {"run_id": "a\nb"}, "is no run's id"),
    ("a negative incarnation", {"incarnation": -1}, "its incarnation -1"),
    ("a large incarnation", {"incarnation": 1 << 53}, "its incarnation"),
    ("a negative step", {"step": -1}, "its step -1"),
    ("an attempt with a path", {"attempt": "../a"}, "names no attempt"),
    ("a long attempt", {"attempt": "a" * 129}, "names no attempt"),
    ("no ranks", {"world": 0}, "it is of 0 ranks"),
    ("too many ranks", {"world": 1 << 40}, "ranks"),
    ("fewer ranks than images", {"world": 3}, "it has images of ranks"),
    ("another layout", {"layout": "0" * 31}, "32 hexadecimal digits"),
    ("a layout in capitals", {"layout": "A" * 32}, "32 hexadecimal digits"),
    ("no parity", {"parity": 0}, "its parity is 0"),
    ("parity for everybody", {"parity": 4}, "its parity is 4"),
    ("no members", {"members": ()}, "a group of 0"),
    ("one member", {"members": FACTS[:1], "parity": 1}, "a group of 1"),
    ("too many members", {"members": FACTS * 40}, "a group of 160"),
    ("members in disorder", {"members": FACTS[::-1]}, "not in the order"),
    ("a member twice", {"members": (FACTS[0], *FACTS)}, "not in the order"),
    ("a rank twice", {"members": (*FACTS, MemberFact("e", FACTS[1].images))}, "images of ranks"),
    ("a host of no name", {"members": (MemberFact("", ()), *FACTS)}, "'' names no host"),
    ("a host with a space", {"members": (MemberFact("A B", ()), *FACTS)}, "names no host"),
    (
        "images in disorder",
        {"members": (MemberFact("a", FACTS[0].images[::-1]), *FACTS[1:])},
        "not in order",
    ),
    ("a negative rank", {"members": changed(0, rank=-1)}, "images of ranks"),
    ("a rank out of the world", {"members": changed(1, rank=4)}, "images of ranks"),
    ("an image of no bytes", {"members": changed(0, image_bytes=0)}, "are none"),
    ("an image of negative bytes", {"members": changed(0, image_bytes=-5)}, "are none"),
    ("an image larger than any", {"members": changed(0, image_bytes=1 << 63)}, "are none"),
    ("an image without data", {"members": changed(0, image_bytes=4096)}, "are none"),
    ("data behind the end", {"members": changed(0, data_start=1 << 30)}, "are none"),
    ("data at the start", {"members": changed(0, data_start=0)}, "are none"),
    ("data not on a page", {"members": changed(0, data_start=4095)}, "begin at byte 4095"),
    (
        "data behind a long header",
        {"members": changed(0, data_start=101 << 20, image_bytes=1 << 40)},
        "begin at byte",
    ),
    ("an image of no size", {"members": changed(0, image_bytes=3 * 4096 + 1)}, "no image has 8193"),
    ("another checksum of the header", {"members": changed(0, header_xxh3="0" * 16)}, "header"),
    ("no checksum of the header", {"members": changed(0, header_xxh3="xyz")}, "is no checksum"),
    ("no checksum of the table", {"members": changed(0, table_xxh3="F" * 16)}, "is no checksum"),
    ("no header", {"members": changed(0, head=b"")}, "not the one that was captured"),
    (
        "another header",
        {"members": changed(0, head=bytes(FACTS[0].images[0].head[:-1]) + b"!")},
        "not the one that was",
    ),
    (
        "a longer header",
        {"members": changed(0, head=bytes(FACTS[0].images[0].head) + b" ")},
        "not the one that was",
    ),
    (
        "a header of another length",
        {
            "members": changed(
                0, head=b"\1" * 4096, header_xxh3=f"{checksum(bytes([1] * 4096)):016x}"
            )
        },
        "does not end where",
    ),
    ("no such stripe", {"stripe": 4}, "no row 1 of stripe 4"),
    ("a negative stripe", {"stripe": -1}, "of stripe -1"),
    ("no such row", {"row": 2}, "no row 2 of stripe 1"),
    ("a negative row", {"row": -1}, "no row -1"),
    ("another size", {"size_bytes": 2 * MIB}, "its row has 2097152 bytes, those of its group"),
    ("too few checksums", {"sums": bytes(16)}, "16 bytes of checksums"),
    ("too many checksums", {"sums": bytes(25)}, "25 bytes of checksums"),
]


@pytest.mark.parametrize(("fields", "match"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
def test_a_record_with_anything_wrong_is_neither_read_nor_sealed(
    fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(FormatError, match=match) as raised:
        unseal(sealed_anyhow(record(**fields)), "the record of b")
    assert str(raised.value).startswith("the record of b is not a record of parity: ")
    with pytest.raises(FormatError, match=r"^this record of parity is not"):
        seal(record(**fields))


def terms(**fields: Any) -> RecordTerms:
    made: dict[str, Any] = {
        "run_id": "run",
        "generation": Generation(3, 1200),
        "attempt": "a-0_Z",
        "world": 4,
        "layout": "0" * 32,
        "parity": 2,
        "members": FACTS,
        "round_id": 7,
        **fields,
    }
    return RecordTerms(**made)


def test_what_a_group_agreed_on_makes_its_records() -> None:
    assert terms().record(StoredShard(1, 1, 3 * MIB), bytes(24)) == record()
    assert terms().placement == record().placement
    assert [terms().number_of(host) for host in "abcd"] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match=r"e is not in the group \['a', 'b', 'c', 'd'\]"):
        terms().number_of("e")


def test_members_know_by_one_number_whether_they_agree() -> None:
    assert terms().digest == terms().digest
    others = {"round_id": 8, "run_id": "other", "attempt": "b", "parity": 1, "world": 5}
    found = {terms(**{name: value}).digest for name, value in others.items()}
    assert len(found | {terms().digest}) == 1 + len(others)


def test_one_checksum_stands_for_the_images_of_a_host_in_any_order() -> None:
    images = [one.image for member in FACTS for one in member.images]
    assert seals_of(images) == seals_of(images[::-1])
    damaged = msgspec.structs.replace(images[0], table_xxh3="0" * 16)
    assert len({seals_of(some) for some in (images, images[1:], [damaged, *images[1:]])}) == 3


@pytest.mark.parametrize(
    ("fields", "match"),
    [one[1:] for one in BAD if set(one[1]) <= set(RecordTerms.__dataclass_fields__)],
    ids=[one[0] for one in BAD if set(one[1]) <= set(RecordTerms.__dataclass_fields__)],
)
def test_what_no_record_can_say_cannot_be_agreed_on(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(FormatError, match=match):
        terms(**fields)


@pytest.mark.parametrize("name", ParityRecord.__struct_fields__)
def test_a_field_of_another_type_or_none_is_refused(name: str) -> None:
    fields = msgspec.to_builtins(record(), builtin_types=(bytes,))
    for wrong in ({"a": 1}, None, 1.5):
        with pytest.raises(FormatError, match=r"^here "):
            unseal(sealed_anyhow({**fields, name: wrong}), "here")
    del fields[name]
    with pytest.raises(FormatError, match=r"^here "):
        unseal(sealed_anyhow(fields), "here")


@pytest.mark.parametrize("name", ImageFact.__struct_fields__)
def test_a_field_of_an_image_of_another_type_or_none_is_refused(name: str) -> None:
    for wrong in ({"a": 1}, None, 1.5, "gone"):
        fields = msgspec.to_builtins(record(), builtin_types=(bytes,))
        one = fields["members"][0]["images"][0]
        one[name] = wrong
        if wrong == "gone":
            del one[name]
        with pytest.raises(FormatError, match=r"^here "):
            unseal(sealed_anyhow(fields), "here")


def test_a_record_of_newer_rules_says_so() -> None:
    fields = msgspec.to_builtins(record(), builtin_types=(bytes,))
    with pytest.raises(NewerFormat, match=r"follows version 2 .* upgrade it"):
        unseal(sealed_anyhow({**fields, "version": 2, "rows": "otherwise"}), "here")


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x90", b"\x80", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff"]
)
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(FormatError, match=r"^here "):
        unseal(sealed_anyhow(raw), "here")


def test_more_than_the_record_is_refused() -> None:
    body = msgspec.msgpack.encode(record())
    with pytest.raises(FormatError, match=r"trailing characters"):
        unseal(sealed_anyhow(body + b"\0"), "here")
    for data in (seal(record()) + b"\0", seal(record())[:-1], seal(record())[1:], b""):
        with pytest.raises(FormatError, match=r"^here is not a record of parity: it is cut short"):
            unseal(data, "here")


def test_a_record_larger_than_any_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert records.MAX_RECORD_BYTES <= MOST_DOCUMENT_BYTES, "peers would not take it"
    data = seal(record())
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", len(data))
    assert unseal(seal(record()), "here") == record()
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", len(data) - 1)
    with pytest.raises(FormatError, match=r"more than any record"):
        unseal(data, "here")
    with pytest.raises(FormatError, match=r"take fewer ranks of a host"):
        seal(record())


SEALED = seal(record())


@given(st.integers(0, len(SEALED) - 1), st.integers(1, 255))
def test_no_flipped_byte_passes(at: int, by: int) -> None:
    data = bytearray(SEALED)
    data[at] ^= by
    with pytest.raises(FormatError):
        unseal(data, "here")


@given(st.integers(0, len(SEALED) - 1))
def test_nothing_that_is_cut_short_passes(size: int) -> None:
    with pytest.raises(FormatError):
        unseal(SEALED[:size], "here")


def test_a_flipped_byte_is_called_so() -> None:
    data = bytearray(SEALED)
    data[200] ^= 1
    with pytest.raises(
        ChecksumMismatch, match=r"^here: stored checksum [0-9a-f]{16}, read"
    ) as told:
        unseal(data, "here")
    assert told.value.fields == {"path": "here"}


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.binary(max_size=9)
    | st.text(max_size=9)
    | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)


@given(st.binary(max_size=200) | values.map(msgspec.msgpack.encode))
@example(b"")
def test_anything_at_all_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(FormatError, match=r"^here "):
        unseal(sealed_anyhow(body), "here")


@given(st.sampled_from(ParityRecord.__struct_fields__), values)
def test_anything_at_all_in_a_field_is_refused_or_true(name: str, value: Any) -> None:
    fields = msgspec.to_builtins(record(), builtin_types=(bytes,))
    try:
        found = unseal(sealed_anyhow({**fields, name: value}), "here")
    except FormatError:
        return
    assert getattr(found, name) == value
    assert unseal(seal(found), "here") == found
