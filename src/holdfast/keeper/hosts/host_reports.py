"""Encodes joined reports of a host's ranks as columns: what is equal on all ranks is sent once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

from holdfast.coordinator.requests import HostReports
from holdfast.errors import FormatError
from holdfast.keeper.hosts import host_messages
from holdfast.protocol import messages as m
from holdfast.protocol.facts import Column

T = TypeVar("T")
_SUM_BYTES = 8
_SEAL_BYTES = 2 * _SUM_BYTES


def to_column(values: Sequence[T]) -> Column[T]:
    """Encode one field of several reports."""
    distinct = tuple(dict.fromkeys(values))
    where = {value: number for number, value in enumerate(distinct)}
    return distinct, () if len(distinct) == 1 else tuple(where[value] for value in values)


def from_column(column: Column[T], count: int) -> Sequence[T]:
    """Decode one field of ``count`` reports. Raises FormatError for another number of values."""
    distinct, which = column
    if not which and len(distinct) == 1:
        return distinct * count
    if len(which) != count or not all(0 <= number < len(distinct) for number in which):
        raise FormatError(f"{len(which)} values were sent for {count} ranks")
    return [distinct[number] for number in which]


def seals_to_bytes(seals: Iterable[tuple[str, str]]) -> bytes:
    """Encode (header, block table) checksums."""
    return b"".join(bytes.fromhex(header + table) for header, table in seals)


def seals_from_bytes(seals: bytes) -> list[tuple[str, str]]:
    """Decode (header, block table) checksums."""
    halves = [seals[n : n + _SUM_BYTES].hex() for n in range(0, len(seals), _SUM_BYTES)]
    return list(zip(halves[::2], halves[1::2], strict=True))


def encode_reports(reports: HostReports) -> host_messages.HostRequests | host_messages.HostCaptured:
    """Encode valid reports by the numbers of their connections."""
    lines, every = tuple(reports), list(reports.values())

    def column(name: str) -> Column[Any]:
        return to_column([getattr(report, name) for report in every])

    if isinstance(every[0], m.RequestCapture):
        names = m.RequestCapture.__struct_fields__[1:]
        return host_messages.HostRequests(
            lines=lines, step=every[0].step, **{name: column(name) for name in names}
        )
    captured = cast(Sequence[m.Captured], every)
    return host_messages.HostCaptured(
        lines=lines,
        attempt=every[0].attempt,
        image_bytes=column("image_bytes"),
        seals=seals_to_bytes((one.header_xxh3, one.table_xxh3) for one in captured),
        sums=column("sums"),
        same_since=column("same_since"),
    )


def decode_reports(fact: host_messages.HostRequests | host_messages.HostCaptured) -> HostReports:
    """Decode reports by the numbers of their connections. Raises FormatError for invalid ones."""
    lines, count = fact.lines, len(fact.lines)
    if len(set(lines)) < count:
        raise FormatError("a trainer reports twice in one message")
    if isinstance(fact, host_messages.HostCaptured):
        if len(fact.seals) != count * _SEAL_BYTES:
            raise FormatError(f"{len(fact.seals)} bytes of checksums for {count} images")
        rows = zip(
            from_column(fact.image_bytes, count),
            from_column(fact.sums, count),
            from_column(fact.same_since, count),
            seals_from_bytes(fact.seals),
            strict=True,
        )
        return {
            line: m.Captured(
                attempt=fact.attempt,
                image_bytes=size,
                header_xxh3=header,
                table_xxh3=table,
                sums=sums,
                same_since=since,
            )
            for line, (size, sums, since, (header, table)) in zip(lines, rows, strict=True)
        }
    names = m.RequestCapture.__struct_fields__[1:]
    columns = {name: getattr(fact, name) for name in names}
    if not any(which for _, which in columns.values()):
        one = {name: from_column(column, 1)[0] for name, column in columns.items()}
        return dict.fromkeys(lines, m.RequestCapture(step=fact.step, **one))
    fields = zip(*(from_column(column, count) for column in columns.values()), strict=True)
    return {
        line: m.RequestCapture(step=fact.step, **dict(zip(names, row, strict=True)))
        for line, row in zip(lines, fields, strict=True)
    }
