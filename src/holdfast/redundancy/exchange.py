"""One generation becomes protected, or what was protected before stays as it was.

What one member of a group does: it encodes the stripe of its own number out of the images of the
others, fetches the further rows that it keeps from those who encode them, and hands over the
further rows of its own. ``run`` takes its time, and threads of its own, never the keeper's loop;
whatever goes wrong ends it with one error, and leaves rows without a seal. See
docs/design/0006-redundancy.md.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import Fenced, HoldfastError, NotProtected, UsageError
from holdfast.peers.calling import Peer
from holdfast.peers.client import Puller
from holdfast.peers.names import generation_name
from holdfast.redundancy.backends import chosen
from holdfast.redundancy.capacity import WINDOW_BYTES, passing_bytes, staging_bytes
from holdfast.redundancy.encoding import Encoder
from holdfast.redundancy.erasure import Coder
from holdfast.redundancy.records import Terms, seal
from holdfast.redundancy.stripes import Kept, Placement, stored_by
from holdfast.redundancy.waiting import Budget, Ended, Fetcher, Halt
from holdfast.redundancy.windows import Inbox, Offers, Outbox

PATIENCE_S = 30.0
"""For whatever one member waits for from another, beside what its budget makes it wait."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for one exchange. What is touched already is several times faster.

    ``rows``: for each (stripe, row) that the member keeps, as large as the row. ``staging``: any
    memory. ``passing``: of ``file``, from ``offset_bytes`` on. See ``capacity`` for how much.
    """

    rows: Mapping[tuple[int, int], memoryview]
    staging: memoryview
    passing: memoryview = field(default_factory=lambda: memoryview(b""))
    file: Path | int = -1
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sealed:
    """A row that is whole, and its record as it is kept and offered."""

    kept: Kept
    record: bytes


class Exchange:
    """What the member ``own`` does for one generation. All images must have been captured.

    ``peers``: where the keepers of all other hosts are. ``offers``: what this keeper's server
    offers. UsageError for memory that does not fit.
    """

    def __init__(
        self, terms: Terms, own: str, *, peers: Mapping[str, Peer], room: Room, offers: Offers,
        puller: Puller, budget: Budget, patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        self.terms, self.own = terms, own
        self._number = terms.number_of(own)
        self._kept = stored_by(terms.placement, self._number)
        _check_room(terms.placement, self._kept, room)
        if missing := {one.host for one in terms.members} - {own, *peers}:
            raise UsageError(f"it is not said where the keepers of {sorted(missing)} are")
        self._peers, self._room, self._offers = peers, room, offers
        self._budget, self._patience_s = budget, patience_s
        self._halt = Halt()
        self._fetcher = Fetcher(puller, budget, self._halt, patience=self._patience)
        self._sums: dict[Kept, bytes] = {}

    @property
    def pulled_bytes(self) -> int:
        """How many bytes were asked for until now."""
        return self._fetcher.pulled_bytes

    def run(self) -> tuple[Sealed, ...]:
        """Make and fetch all rows that this member keeps; their records, sealed.

        NotProtected when that did not succeed, Fenced when this run goes on elsewhere. When it
        returns, or raises, nothing of it goes on.
        """
        threads = [
            threading.Thread(
                target=self._guarded, args=(kept,), daemon=True,
                name=f"holdfast-row-{kept.stripe}-{kept.row}",
            )
            for kept in self._kept[1:]
        ]  # fmt: skip
        try:
            for thread in threads:
                thread.start()
        except RuntimeError as error:  # no more threads: those that run are to end
            self._halt.stop(error)
        self._guarded(self._kept[0])
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if self._halt.reason is not None:
            raise self._error(self._halt.reason)
        return tuple(
            Sealed(kept, seal(self.terms.record(kept, self._sums[kept]))) for kept in self._kept
        )

    def cancel(self, why: str) -> None:
        """End it, from any thread: ``run`` raises when the question that it waits on has ended."""
        self._halt.stop(self._not_protected(why))

    def _guarded(self, kept: Kept) -> None:
        """Whatever goes wrong with one row ends the work on all."""
        try:
            self._sums[kept] = self._fetch(kept) if kept.row else self._encode(kept)
        except Ended:
            return
        except BaseException as error:
            self._halt.stop(error)

    def _encode(self, kept: Kept) -> bytes:
        outbox = self._outbox() if self.terms.parity > 1 else None
        try:
            if outbox is not None:
                outbox.begin()
            return Encoder(
                self.terms, kept.stripe, peers=self._peers, coder=self._coder(),
                row=self._memory(kept), staging=self._room.staging, outbox=outbox,
                fetcher=self._fetcher, halt=self._halt,
            ).run()  # fmt: skip
        finally:
            if outbox is not None:
                outbox.close()

    def _outbox(self) -> Outbox:
        return Outbox(
            self.terms, self._number, memory=self._room.passing, file=self._room.file,
            offset_bytes=self._room.offset_bytes, offers=self._offers, halt=self._halt,
            patience=self._patience,
        )  # fmt: skip

    def _fetch(self, kept: Kept) -> bytes:
        encoder = self.terms.members[kept.stripe].host
        return Inbox(
            self.terms, kept, memory=self._memory(kept), encoder=self._peers[encoder],
            fetcher=self._fetcher, halt=self._halt, patience=self._patience,
        ).run()  # fmt: skip

    def _coder(self) -> Coder:
        return Coder(self.terms.placement.columns, self.terms.parity, chosen().backend)

    def _memory(self, kept: Kept) -> memoryview:
        return self._room.rows[kept.stripe, kept.row][: kept.size_bytes]

    def _patience(self) -> float:
        """Peers pull a window of every column first, at a rate that is probably ours."""
        count = len(self.terms.members) * WINDOW_BYTES
        return self._patience_s + self._budget.seconds(count)

    def _error(self, reason: BaseException) -> BaseException:
        if isinstance(reason, (Fenced, NotProtected)) or not isinstance(reason, HoldfastError):
            return reason
        error = self._not_protected(str(reason), str(reason.fields.get("peer", "")))
        error.__cause__ = reason
        return error

    def _not_protected(self, why: str, host: str = "") -> NotProtected:
        generation = generation_name(self.terms.generation)
        return NotProtected(
            f"generation {generation} is captured but not protected, for {self.own} cannot make "
            f"its parity: {why.rstrip('.')}. What was protected before stays so; the next one is "
            "tried.",
            generation=generation, host=host,
        )  # fmt: skip


def _check_room(placement: Placement, kept: tuple[Kept, ...], room: Room) -> None:
    """UsageError when something does not fit into its memory."""
    columns, parity = placement.columns, placement.parity
    needed = {
        "what is pulled": (staging_bytes(columns), room.staging),
        "what is handed on of other rows": (passing_bytes(parity), room.passing),
    }
    for one in kept:
        memory = room.rows.get((one.stripe, one.row), memoryview(b""))
        needed[f"row {one.row} of stripe {one.stripe}"] = (one.size_bytes, memory)
    for what, (size, memory) in needed.items():
        if len(memory) < size:
            raise UsageError(f"{what} takes {size} bytes of memory, there are {len(memory)}")
