"""The rows of parity that this host believes: it offers each of them, and no other.

A host offers one row of a name. Another of the same images, made for another division of the
hosts, waits in the other half until the first is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.errors import ArenaError
from holdfast.events import Warned, emit
from holdfast.keeper.rows import KeptRow, RowMemory
from holdfast.peers.names import generation_name, parity_path, record_path
from holdfast.peers.server import PeerServer
from holdfast.redundancy.records import ParityRecord
from holdfast.snapshot.arena import IMAGE_START


class KeptRows:
    """On the keeper's loop. ``changed`` is told whenever there are other rows."""

    def __init__(self, files: RowMemory, changed: Callable[[], None]) -> None:
        self._files, self._changed = files, changed
        self._kept = files.scan()
        self._doubted: list[KeptRow] = []
        """Damaged, and not mended yet."""
        self._server: PeerServer | None = None

    def serve(self, server: PeerServer | None) -> None:
        """Offer what is kept through this one from now on, or nothing more (None)."""
        self._server = server
        self._keep_only(self._kept, self._kept)

    def all(self) -> Sequence[KeptRow]:
        """Each whole."""
        return self._kept

    def of(self, attempt: str, half: int | None = None) -> list[KeptRow]:
        """Those of an attempt: in this half, or in both (None)."""
        return [
            row for row in self._kept
            if row.record.attempt == attempt and half in (row.half, None)
        ]  # fmt: skip

    def add(self, rows: Iterable[KeptRow]) -> None:
        """These are whole now."""
        rows = list(rows)
        for row in rows:
            self._offer(row)
        self._kept = [*self._kept, *rows]
        if rows:
            self._changed()

    def forget(self, half: int) -> None:
        """Withdraw all that is in this half, before it is written."""
        gone = [row for row in self._kept if row.half == half]
        self._withdraw(gone)
        self._files.forget(half)
        self._doubted = [row for row in self._doubted if row.half != half]
        if gone:
            self._changed()

    # ── damage ───────────────────────────────────────────────────────────────────────────

    def doubt(self, row: KeptRow) -> bool:
        """Neither believe nor offer a damaged row; whether it is kept at all."""
        if all(one is not row for one in self._kept):
            return False
        self._withdraw([row])
        self._files.disbelieve(row)
        self._doubted.append(row)
        self._changed()
        return True

    def is_doubted(self, row: KeptRow) -> bool:
        """Whether it may still be mended: nothing newer is written there."""
        return any(one is row for one in self._doubted)

    def mend(self, row: KeptRow, data: Mapping[int, bytes]) -> bool:
        """Write what was damaged, and believe the row again; whether that could be."""
        self._doubted = [one for one in self._doubted if one is not row]
        try:
            self._files.patch(row, data)
            self._files.keep(row.half, [(row.offset_bytes, row.data)])
        except OSError:
            return False
        self.add([row])
        return True

    # ── offers ───────────────────────────────────────────────────────────────────────────

    def _withdraw(self, gone: Sequence[KeptRow]) -> None:
        """These are kept no more; others take their names."""
        if self._server is not None:
            for row in gone:
                self._server.withdraw(parity_path(*name_of(row.record)))
                self._server.withdraw(record_path(*name_of(row.record)))
        names = {name_of(row.record) for row in gone}
        left = [row for row in self._kept if all(row is not one for one in gone)]
        self._keep_only(left, [row for row in left if name_of(row.record) in names])

    def _keep_only(self, kept: list[KeptRow], offered_anew: Iterable[KeptRow]) -> None:
        self._kept = []
        for row in offered_anew:
            self._offer(row)
            self._kept.append(row)
        self._kept = kept

    def _offer(self, row: KeptRow) -> None:
        """Unless another row has its name, of the same images in another division of the hosts.

        That one stays until its half is written.
        """
        at = name_of(row.record)
        if self._server is None or at in (name_of(one.record) for one in self._kept):
            return
        record, generation = row.record, generation_name(row.record.generation)
        try:
            if record.size_bytes:
                self._server.offer_file(
                    parity_path(*at), self._files.path(str(row.half)),
                    offset_bytes=IMAGE_START + row.offset_bytes, length_bytes=record.size_bytes,
                    generation=generation,
                )  # fmt: skip
            self._server.offer_document(record_path(*at), row.data, generation=generation)
        except ArenaError as error:  # the arena was removed, say
            emit(Warned(message=f"parity is not offered to peers: {error}"))


def name_of(record: ParityRecord) -> tuple[str, int, int]:
    """What a row is called, whatever the hosts were divided into when it was made."""
    return record.attempt, record.stripe, record.row
