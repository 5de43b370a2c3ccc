"""Asks the keepers of a run on this host what the host is like now, beside the event files.

What a keeper tells every 10 s in an event is told at once to who asks. A keeper does not stay for
who watches, and counts it as no trainer. One that does not answer is left alone for a while.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.errors import FormatError, HoldfastError
from holdfast.events import HostSampled
from holdfast.observe.records import RecordHead
from holdfast.protocol import messages as m
from holdfast.protocol.arena import arena_home, boot_id, parse_arena_name, root_key
from holdfast.protocol.client import connect_socket
from holdfast.storage.files import UNKNOWN, views
from holdfast.storage.open import open_store

#: Seconds that an answer may take, and after which a keeper that gave none is asked again.
ANSWER_S, PAUSE_S = 0.5, 60.0
_MOST_BYTES = 1 << 20
_decode = msgspec.msgpack.Decoder(HostSampled).decode


class KeeperSamples:
    """Connections to the keepers on this host that serve ``root``."""

    def __init__(self, root: str) -> None:
        self._keys = set[str]()
        with suppress(HoldfastError, OSError):  # the files can be followed all the same
            identities = views(open_store(root).identity())
            self._keys = {root_key(each) for each in identities if each != UNKNOWN}
        self._lines: dict[Path, socket.socket] = {}
        self._not_before_s: dict[Path, float] = {}

    def read(self) -> Iterator[tuple[HostSampled, RecordHead]]:
        """Yields a sample of each keeper that answers, as its record would be."""
        for arena in self._arenas():
            if self._not_before_s.get(arena, 0.0) > time.monotonic():
                continue
            try:
                sample = self._ask(arena)
            except (OSError, FormatError, msgspec.DecodeError, UnicodeDecodeError):
                self._close(arena)
                self._not_before_s[arena] = time.monotonic() + PAUSE_S
                continue
            yield sample, RecordHead(time.time(), time.monotonic(), sample.host, boot_id()[:8])

    def close(self) -> None:
        """Closes all connections."""
        for arena in list(self._lines):
            self._close(arena)

    def _arenas(self) -> list[Path]:
        with suppress(OSError):
            home, uid = arena_home(), os.getuid()
            named = [p for p in home.iterdir() if parse_arena_name(p.name)[1] in self._keys]
            return sorted(path for path in named if path.lstat().st_uid == uid)
        return []

    def _ask(self, arena: Path) -> HostSampled:
        if arena not in self._lines:
            self._lines[arena] = connect_socket(arena)
        line = self._lines[arena]
        line.settimeout(ANSWER_S)
        line.sendall(m.pack(m.TakeSample(), 1))
        size = int.from_bytes(_receive(line, m.LENGTH_BYTES), "little")
        if size > _MOST_BYTES:
            raise FormatError(f"a message of {size} bytes")
        _, answer = m.unpack(_receive(line, size))
        if not isinstance(answer, m.SampleTaken):
            raise FormatError(f"the answer is {type(answer).__name__}")
        return _decode(answer.event)

    def _close(self, arena: Path) -> None:
        line = self._lines.pop(arena, None)
        if line is not None:
            line.close()


def _receive(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionError("the keeper closed the connection")
        data += part
    return data
