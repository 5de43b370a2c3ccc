"""The events of one kind that a run told of, out of its files, without folding all the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.events import AnyEvent, Event

E = TypeVar("E", bound=Event)

_decode = msgspec.json.Decoder(AnyEvent).decode


def told(root: str | Path, kind: type[E]) -> Iterator[E]:
    """All events of this kind below ``root``, file by file; lines cut off by a kill are left out.

    Nothing where there are no events, or none that this process may read.
    """
    name = f'"{kind.__name__}"'.encode()
    for path in sorted(Path(root, "events").glob("*.jsonl")):
        for line in _lines(path):
            if name not in line:
                continue
            try:
                event = _decode(line)
            except msgspec.DecodeError:
                continue
            if isinstance(event, kind):
                yield event


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError:
        return
