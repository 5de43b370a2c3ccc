"""Writes the records of a run as one table: lines of JSON, or a Parquet file for queries.

Every record is a row with the fields of ``docs/format/events-v1.md`` and of its event; what it does
not have is left out, or null. Parquet needs the package ``pyarrow`` (``holdfast[parquet]``), which
is imported only here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, get_type_hints

import msgspec

from holdfast.errors import UsageError
from holdfast.events import AnyEvent
from holdfast.observe.records import RecordHead, RecordReader
from holdfast.observe.spans import RecordChoice

#: Rows of Parquet that are in memory at once.
_ROWS = 20_000
_HEAD: dict[str, Any] = {
    "event": str,
    "time_s": float,
    "mono_s": float,
    "by_host": str,
    "boot": str,
    "version": int,
    "writer": str,
    "number": int,
}
Row = dict[str, Any]


def columns() -> dict[str, Any]:
    """Returns the columns and their types in the order of the table."""
    found = dict(_HEAD)
    for kind in AnyEvent.__args__:
        for name, hint in get_type_hints(kind).items():
            if name in kind.__struct_fields__:
                found.setdefault(name, hint)
    return found


def rows_of(reader: RecordReader, chosen: RecordChoice, kinds: frozenset[str]) -> Iterator[Row]:
    """Yields a row for each record that is chosen; ``kinds``: names of events, none for all."""
    for event, head in reader:
        if chosen.takes(event, head) and (not kinds or type(event).__name__ in kinds):
            yield _row(event, head)


def _row(event: AnyEvent, head: RecordHead) -> Row:
    row: Row = msgspec.to_builtins(event)
    row.update((name, v) for name, v in msgspec.structs.asdict(head).items() if v is not None)
    return row


def write_jsonl(rows: Iterable[Row], file: IO[bytes]) -> int:
    """Writes a line for each row, in ASCII: no character of it acts on a terminal. Returns how
    many.
    """
    return sum(file.write(json.dumps(row).encode() + b"\n") > 0 for row in rows)


def require_pyarrow() -> None:
    """Raises UsageError where the package is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "Parquet is written by the package pyarrow, which is not installed: "
            "pip install 'holdfast[parquet]', or take --to jsonl"
        ) from error


def write_parquet(rows: Iterable[Row], path: Path) -> int:
    """Writes a file with all rows; returns how many. Raises UsageError without the package."""
    require_pyarrow()
    import pyarrow
    from pyarrow import parquet

    types = {
        str: pyarrow.string(),
        float: pyarrow.float64(),
        int: pyarrow.int64(),
        bool: pyarrow.bool_(),
        tuple[str, ...]: pyarrow.list_(pyarrow.string()),
        tuple[int, ...]: pyarrow.list_(pyarrow.int64()),
        dict[str, int]: pyarrow.map_(pyarrow.string(), pyarrow.int64()),
    }
    hints = columns()
    schema = pyarrow.schema([(name, types[hint]) for name, hint in hints.items()])
    maps = [name for name, hint in hints.items() if hint == dict[str, int]]
    count, left = 0, iter(rows)
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(islice(left, _ROWS)):
            for row in batch:
                for name in maps:
                    if name in row:
                        row[name] = list(row[name].items())
            writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))
            count += len(batch)
    return count
