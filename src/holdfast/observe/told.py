"""The events of one kind that a run told of, out of its files, without folding all the others.

Files are searched in large pieces for the kind's name, and only lines that have it are decoded: a
long run leaves gigabytes of events, most of them of other kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.events import AnyEvent, Event

E = TypeVar("E", bound=Event)

_PIECE_BYTES = 8 << 20
_decode = msgspec.json.Decoder(AnyEvent).decode


def told(root: str | Path, kind: type[E]) -> Iterator[E]:
    """All events of this kind below ``root``, file by file; lines cut off by a kill are left out.

    Nothing where there are no events, or none that this process may read.
    """
    name = f'"{kind.__name__}"'.encode()
    for path in sorted(Path(root, "events").glob("*.jsonl")):
        for line in _lines_with(path, name):
            try:
                event = _decode(line)
            except msgspec.DecodeError:
                continue
            if isinstance(event, kind):
                yield event


def _lines_with(path: Path, name: bytes) -> Iterator[bytes]:
    """The whole lines of a file that have ``name`` in them."""
    rest = b""
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                data = rest + piece
                end = data.rfind(b"\n") + 1
                at = data.find(name, 0, end)
                while at >= 0:
                    stop = data.index(b"\n", at)
                    yield data[data.rfind(b"\n", 0, at) + 1 : stop]
                    at = data.find(name, stop, end)
                rest = data[end:]
    except OSError:
        return
