"""A row passes from its encoder to its keeper window by window, through little memory.

The encoder of a stripe makes all its rows, keeps the first, and has ``DEPTH`` windows of memory
for the others. A window that is full is offered under a path of its own; a note beside it, which
is signed, says which windows there are and the checksums of their blocks. The row's keeper looks
at the note until there is something new, pulls, and compares. When it has all of a window it says
so by the request that ends every pull: the encoder then withdraws it and writes the next there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.errors import DeadlineExceeded, PeerError
from holdfast.format.checksum import BLOCK_BYTES, block_count, blocks, checksum
from holdfast.peers import refusals
from holdfast.peers.calling import Peer, Task, failed
from holdfast.peers.client import Wanted
from holdfast.peers.names import generation_name, note_path, window_path
from holdfast.redundancy.capacity import DEPTH, WINDOW_BYTES
from holdfast.redundancy.records import Terms
from holdfast.redundancy.stripes import Kept
from holdfast.redundancy.waiting import Fetcher, Halt

_MOST_NOTE_BYTES = 1 << 20
_SOON_S, _LATER_S = 0.001, 0.05
"""Between two looks at a note: longer each time that nothing is new."""


class Offers(Protocol):
    """What this host offers its peers, said from any thread; see ``holdfast.peers.offering``."""

    def offer_file(
        self, path: str, file: Path | int, *, offset_bytes: int, length_bytes: int,
        generation: str, on_confirmed: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Offer bytes of a file; ``on_confirmed`` when a peer has them."""
        ...

    def offer_document(self, path: str, data: bytes, *, generation: str) -> None:
        """Offer bytes of our own."""
        ...

    def withdraw(self, path: str) -> bool:
        """Offer it no longer."""
        ...


class WindowNote(msgspec.Struct, frozen=True, array_like=True):
    """The windows that can be fetched now: ``first`` and those behind it, one entry each."""

    window_bytes: int
    first: int
    sums: tuple[bytes, ...]
    """As in a record: of each block of the window."""


def block_sums(data: memoryview) -> bytes:
    """The checksums of the blocks of ``data``, 8 bytes each, little endian."""
    count = block_count(len(data))
    return b"".join(
        checksum(data[start:stop]).to_bytes(8, "little")
        for _, start, stop in blocks(0, count, len(data))
    )


class Outbox:
    """The windows of rows 1 and up of the stripe that this member encodes.

    ``memory`` is ``DEPTH`` windows for each of these rows, in ``file`` from ``offset_bytes`` on.
    """

    def __init__(
        self, terms: Terms, stripe: int, *, memory: memoryview, file: Path | int,
        offset_bytes: int, offers: Offers, halt: Halt, patience: Callable[[], float],
    ) -> None:  # fmt: skip
        self._terms, self._stripe = terms, stripe
        self._generation = generation_name(terms.generation)
        self._rows = range(1, terms.parity)
        self._memory, self._file, self._offset_bytes = memory, file, offset_bytes
        self._offers, self._halt, self._patience = offers, halt, patience
        self._sums: dict[int, dict[int, bytes]] = {row: {} for row in self._rows}
        self._left: set[tuple[int, int]] = set()
        """(window, row) of what is offered and was not taken yet."""

    def begin(self) -> None:
        """Say that nothing is made yet: whoever waits then learns at once if nothing will be."""
        for row in self._rows:
            self._note(row)

    def room(self, window: int, length: int) -> list[memoryview]:
        """Where the rows of a window are to be written, as soon as its place is free."""
        if window >= DEPTH:
            self._wait(lambda: all(number != window - DEPTH for number, _ in self._left))
            for row in self._rows:
                self._withdraw(window - DEPTH, row)
        return [self._memory[at : at + length] for at in map(partial(self._at, window), self._rows)]

    def offer(self, window: int, length: int, sums: Sequence[bytes]) -> None:
        """Its rows are made, and have these checksums."""
        for row, of_row in zip(self._rows, sums, strict=True):
            self._sums[row][window] = of_row
            with self._halt.changed:
                self._left.add((window, row))
            self._offers.offer_file(
                self._path(window, row), self._file,
                offset_bytes=self._offset_bytes + self._at(window, row), length_bytes=length,
                generation=self._generation, on_confirmed=partial(self._taken, window, row),
            )  # fmt: skip
            self._note(row)

    def finish(self) -> None:
        """Wait until all was taken."""
        self._wait(lambda: not self._left)

    def close(self) -> None:
        """Offer nothing any more, whatever was taken."""
        for row in self._rows:
            for window in list(self._sums[row]):
                self._withdraw(window, row)
            self._offers.withdraw(self._note_path(row))

    def _note(self, row: int) -> None:
        sums = self._sums[row]
        note = WindowNote(WINDOW_BYTES, min(sums, default=0), tuple(sums.values()))
        self._offers.offer_document(
            self._note_path(row), msgspec.msgpack.encode(note), generation=self._generation
        )

    def _note_path(self, row: int) -> str:
        return note_path(self._terms.attempt, self._terms.turn, self._stripe, row)

    def _path(self, window: int, row: int) -> str:
        return window_path(self._terms.attempt, self._terms.turn, self._stripe, row, window)

    def _at(self, window: int, row: int) -> int:
        return (window % DEPTH * len(self._rows) + row - 1) * WINDOW_BYTES

    def _taken(self, window: int, row: int) -> None:
        """Called on the loop of the server."""
        with self._halt.changed:
            self._left.discard((window, row))
            self._halt.changed.notify_all()

    def _withdraw(self, window: int, row: int) -> None:
        self._offers.withdraw(self._path(window, row))
        self._sums[row].pop(window, None)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        self._halt.wait(is_ready, self._patience(), self._late)

    def _late(self) -> DeadlineExceeded:
        window, row = min(self._left)
        members = self._terms.members
        host = members[(self._stripe + row) % len(members)].host
        return DeadlineExceeded(
            f"{host} did not take window {window} of row {row} of stripe {self._stripe} in "
            f"{self._patience():.0f} s: look at that host",
            phase="parity",
        )


class Inbox:
    """A row that another member makes, on its way into the memory of its keeper."""

    def __init__(
        self, terms: Terms, kept: Kept, *, memory: memoryview, encoder: Peer, fetcher: Fetcher,
        halt: Halt, patience: Callable[[], float],
    ) -> None:  # fmt: skip
        self._terms, self._kept, self._memory = terms, kept, memory
        self._encoder, self._fetcher, self._halt = encoder, fetcher, halt
        self._patience = patience
        self._task = Task("GET", note_path(terms.attempt, terms.turn, kept.stripe, kept.row),
                          generation_name(terms.generation))  # fmt: skip

    def run(self) -> bytes:
        """Fetch all of it; the checksums of its blocks."""
        sums = b""
        while (at := len(sums) // 8 * BLOCK_BYTES) < self._kept.size_bytes:
            sums += self._fetch(at, self._news(at))
        return sums

    def _news(self, at: int) -> WindowNote:
        """The note, as soon as it speaks of bytes from ``at`` on."""
        pause_s, began_s = _SOON_S, time.monotonic()
        while True:
            note = self._note()
            if note is not None and note.first + len(note.sums) > at // note.window_bytes:
                return note
            if time.monotonic() - began_s > self._patience():
                raise DeadlineExceeded(
                    f"{self._encoder} made nothing of row {self._kept.row} of stripe "
                    f"{self._kept.stripe} from byte {at} on in "
                    f"{self._patience():.0f} s: look at that host",
                    phase="parity",
                )
            self._halt.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LATER_S)

    def _note(self) -> WindowNote | None:
        """What the encoder says now; None when it has not begun."""
        self._halt.check()
        try:
            data = self._fetcher.puller.document(
                self._encoder, self._task.path, generation=self._task.generation,
                most_bytes=_MOST_NOTE_BYTES,
            )  # fmt: skip
        except PeerError as error:
            if error.fields.get("status") == refusals.UNKNOWN.status:
                return None
            raise
        try:
            note = msgspec.msgpack.decode(data, type=WindowNote)
        except (ValueError, RecursionError) as error:
            raise self._nonsense(str(error)) from None
        if note.window_bytes != WINDOW_BYTES or note.first < 0:
            raise self._nonsense(f"windows of {note.window_bytes} bytes from {note.first} on")
        return note

    def _fetch(self, at: int, note: WindowNote) -> bytes:
        """Pull the windows from ``at`` on that there are; their checksums."""
        window, rest = divmod(at, note.window_bytes)
        news = note.sums[max(0, window - note.first) :]
        stop = min(at + len(news) * note.window_bytes, self._kept.size_bytes)
        if rest or note.first > window or len(b"".join(news)) != 8 * block_count(stop - at):
            raise self._nonsense(f"windows from {note.first} on, of which {window} is needed")
        parts = {
            number: self._memory[start : min(start + note.window_bytes, stop)]
            for number in range(window, window + len(news))
            if (start := number * note.window_bytes) < stop
        }
        terms, kept = self._terms, self._kept
        self._fetcher.pull([
            Wanted(
                self._encoder,
                window_path(terms.attempt, terms.turn, kept.stripe, kept.row, number),
                self._task.generation, 0, part,
            )
            for number, part in parts.items()
        ])  # fmt: skip
        found = block_sums(self._memory[at:stop])
        if found != b"".join(news):
            raise failed(
                self._encoder, self._task, "body",
                f"its bytes from {at} on changed after they were made, or on their way",
            )  # fmt: skip
        return found

    def _nonsense(self, what: str) -> PeerError:
        return failed(self._encoder, self._task, "body", f"its note makes no sense: {what}")
