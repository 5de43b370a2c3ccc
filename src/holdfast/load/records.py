"""Records of parity, as a restore takes them: what they say of a group, checked once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.errors import FormatError
from holdfast.format.checksum import block_count
from holdfast.load.holdings import Coded, Coding, HeldRow, Image, Member


class ImageFact(Protocol):
    """An image of a member, with its header."""

    @property
    def rank(self) -> int: ...
    @property
    def image_bytes(self) -> int: ...
    @property
    def data_start(self) -> int: ...
    @property
    def header_xxh3(self) -> str: ...
    @property
    def table_xxh3(self) -> str: ...
    @property
    def head(self) -> bytes: ...


class MemberFact(Protocol):
    """A host of a group."""

    @property
    def host(self) -> str: ...
    @property
    def images(self) -> Sequence[ImageFact]: ...


class Record(Protocol):
    """What lies beside a row of parity."""

    @property
    def attempt(self) -> str: ...
    @property
    def parity(self) -> int: ...
    @property
    def members(self) -> Sequence[MemberFact]: ...
    @property
    def stripe(self) -> int: ...
    @property
    def row(self) -> int: ...
    @property
    def sums(self) -> bytes: ...


def held_row(record: Record) -> HeldRow:
    """What a host holds that has this record, and its row. FormatError for what is no group."""
    members = (
        Member(
            member.host,
            tuple(
                Coded(
                    Image(one.rank, one.image_bytes, one.header_xxh3, one.table_xxh3),
                    one.data_start,
                )
                for one in member.images
            ),
        )
        for member in record.members
    )
    return HeldRow(Coding(tuple(members), record.parity), record.stripe, record.row)


def checked_record(
    record: Record, coding: Coding, attempt: str, stripe: int, row: int, host: str
) -> Record:
    """What ``host`` gave, if it is the record of this row; FormatError when it is of another."""
    where = f"the record of row {row} of stripe {stripe} on {host}"
    is_this_one = record.attempt == attempt and held_row(record) == HeldRow(coding, stripe, row)
    if not is_this_one:
        raise FormatError(
            f"{where} is no longer that of attempt {attempt} in its group: it is of attempt "
            f"{record.attempt}, row {record.row} of stripe {record.stripe}, and of the hosts "
            f"{', '.join(one.host for one in record.members)}"
        )
    if len(record.sums) != 8 * block_count(coding.row_bytes(stripe)):
        raise FormatError(
            f"{where} has {len(record.sums)} bytes of checksums, which do not fit its row"
        )
    return record
