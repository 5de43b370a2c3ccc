"""What trainers and keeper say to each other arrives as it was said, or is refused as nonsense."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from holdfast.errors import FormatError
from holdfast.protocol import messages as m

ASK = m.RequestCapture(step=7, table="0f" * 16, values_bytes=10, durable=True, exact=False)
KINDS = sorted(m.Message.__subclasses__(), key=lambda kind: kind.__name__)


def body_of(frame: bytes) -> bytes:
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    return frame[4:]


def messages(kind: type[m.Message]) -> st.SearchStrategy[m.Message]:
    if kind is m.Refused:
        told = st.dictionaries(st.text(), st.none() | st.booleans() | st.text() | st.floats(0, 1))
        return st.builds(m.Refused, kind=st.text(), reason=st.text(), fields=told)
    if kind is m.Inventory:  # its defaults are made anew for each
        numbers = st.integers(0, 9)
        return st.builds(
            m.Inventory,
            parts=st.lists(st.from_type(m.HoldingPart)).map(tuple),
            parents=st.dictionaries(numbers, st.none() | st.tuples(numbers, numbers)),
            starts=st.dictionaries(numbers, st.tuples(st.text(), st.floats(0, 9))),
        )
    return st.from_type(kind)


st.register_type_strategy(float, st.floats(allow_nan=False))  # not equal to itself


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much])
@given(seq=st.integers(0, 2**32), data=st.data())
def test_every_message_arrives_as_it_was_said(
    kind: type[m.Message], seq: int, data: st.DataObject
) -> None:
    message = data.draw(messages(kind))
    try:
        frame = m.pack(message, seq)
    except OverflowError:  # no number here has more than 64 bits
        reject()
    assert m.unpack(body_of(frame)) == (seq, message)


def test_a_field_that_a_later_version_adds_is_passed_over() -> None:
    body = body_of(m.pack(ASK)).replace(b"\xa5exact", b"\xa5later")
    assert m.unpack(body) == (0, ASK)


NONSENSE = {
    "nothing": b"",
    "no frame": b"\x80",
    "cut short": body_of(m.pack(ASK))[:-1],
    "one byte more": body_of(m.pack(ASK)) + b"\0",
    "a message of no kind": b"\x92\x00\x80",
    "a message of another kind": body_of(m.pack(ASK)).replace(b"RequestCapture", b"RequestRapture"),
    "a field missing": body_of(m.pack(ASK)).replace(b"\xa4step", b"\xa4stop"),
    "text that is not UTF-8": body_of(m.pack(ASK)).replace(b"0f0f", b"\xff\xff\xff\xff"),
    "too deep": b"\x92\x00\x82\xa1x" + b"\x91" * 100_000,
}


@pytest.mark.parametrize("body", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused_as_such_and_never_falls_over(body: bytes) -> None:
    with pytest.raises(FormatError, match="between trainer and keeper is malformed"):
        m.unpack(body)


@given(at=st.integers(0, 1000), byte=st.integers(0, 255))
def test_a_message_with_any_byte_changed_is_a_message_or_refused(at: int, byte: int) -> None:
    body = bytearray(body_of(m.pack(ASK)))
    body[at % len(body)] = byte
    with suppress(FormatError):
        m.unpack(bytes(body))
