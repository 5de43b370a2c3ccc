"""The images of this host that its peers may read, each until its slot is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import ArenaError, HoldfastError
from holdfast.events import Warned, emit
from holdfast.format.manifest import Generation
from holdfast.keeper.memory import Memory
from holdfast.peers.names import INVENTORY, generation_name, image_path, layout_path
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import IMAGE_START

if TYPE_CHECKING:  # a run on one host needs none of it
    from holdfast.keeper.rows import KeptRow
    from holdfast.peers.server import PeerServer


class Offering:
    """What is offered at the moment, by slot; nothing while nobody serves. On the keeper's loop."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.rows: Callable[[], Sequence[KeptRow]] = tuple
        """The rows of parity that are kept here."""
        self._server: PeerServer | None = None
        self._paths: dict[int, str] = {}
        self._layouts: set[str] = set()
        self._is_stale = False
        self._host, self._address, self._port = "", "", 0

    @property
    def port(self) -> int:
        """Where images of this host are to be had; 0 where nobody else needs them."""
        return self._port

    def serve(
        self, server: PeerServer | None, host: str = "", address: str = "", port: int = 0
    ) -> None:
        """Offer all that is found in memory through this server, or nothing more (None)."""
        self._server, self._paths = server, {}
        self._layouts.clear()
        self._host, self._address, self._port = host, address, port
        if server is None:
            return
        slots, attempts = self._memory.found()
        by_id = {attempt.id: attempt for attempt in attempts}
        for slot in slots:
            attempt = by_id.get(slot.attempt)
            if attempt is not None and attempt.slots.get(slot.rank) == slot.id:
                self._offer_image(
                    slot.id, slot.attempt, slot.rank, attempt.incarnation, attempt.step,
                    slot.image_bytes,
                )  # fmt: skip
                self._offer_layout(attempt.layout)
        self._offer_inventory()

    def offer(
        self, slot: int, attempt: str, rank: int, incarnation: int, step: int, image_bytes: int,
        layout: str = "",
    ) -> None:  # fmt: skip
        """An image is captured in this slot."""
        if self._server is not None:
            self._offer_image(slot, attempt, rank, incarnation, step, image_bytes)
            self._offer_layout(layout)
            self._is_stale = True

    def refresh(self) -> None:
        """Offer an inventory that has what was captured since; to be called now and then."""
        if self._server is not None and self._is_stale:
            self._offer_inventory()

    def holdings_changed(self) -> None:
        """Other images are to be believed, or other rows of parity are kept, than before."""
        if self._server is not None:
            self._offer_inventory()

    def withdraw(self, slot: int) -> None:
        """The slot may be written to from now on."""
        path = self._paths.pop(slot, None)
        if path is not None and self._server is not None:
            self._server.withdraw(path)

    def _offer_image(
        self, slot: int, attempt: str, rank: int, incarnation: int, step: int, image_bytes: int
    ) -> None:
        assert self._server is not None
        path = image_path(attempt, rank)
        try:
            self._server.offer_file(
                path, self._memory.slot_path(slot), offset_bytes=IMAGE_START,
                length_bytes=image_bytes, generation=generation_name(Generation(incarnation, step)),
            )  # fmt: skip
        except HoldfastError as error:  # the arena was removed, say
            emit(Warned(message=f"an image is not offered to peers: {error}"))
            return
        self._paths[slot] = path

    def _offer_layout(self, hash_: str) -> None:
        if not hash_ or hash_ in self._layouts or self._server is None:
            return
        try:
            self._server.offer_document(layout_path(hash_), self._memory.layout(hash_))
        except ArenaError as error:
            emit(Warned(message=f"a layout is not offered to peers: {error}"))
            return
        self._layouts.add(hash_)

    def _offer_inventory(self) -> None:
        assert self._server is not None
        self._is_stale = False
        self._server.offer_document(INVENTORY, msgspec.msgpack.encode(self.holding()))

    def holding(self) -> m.Holding:
        """This host's inventory, as the slots have it."""
        slots, attempts = self._memory.found()
        by_id = {slot.id: slot for slot in slots}
        records = self._memory.incarnations()
        parity = self._parity()
        parts = [
            m.HeldPart(
                incarnation=attempt.incarnation, step=attempt.step, attempt=attempt.id,
                world=attempt.world, layout=attempt.layout,
                images=tuple(
                    m.HeldImage(
                        rank=rank, image_bytes=by_id[slot].image_bytes,
                        header_xxh3=by_id[slot].header_xxh3, table_xxh3=by_id[slot].table_xxh3,
                    )
                    for rank, slot in sorted(attempt.slots.items())
                ),
                parity=parity.pop(attempt.id).parity if attempt.id in parity else (),
            )
            for attempt in attempts
        ]  # fmt: skip
        parts += parity.values()
        return m.Holding(
            host=self._host, address=self._address, port=self._port, parts=tuple(parts),
            parents={each.n: each.parent for each in records},
            newest_incarnation=max([self._memory.begun(), *(each.n for each in records)]),
        )  # fmt: skip

    def _parity(self) -> dict[str, m.HeldPart]:
        """What parity is kept of each attempt, as if there were no images of it."""
        found: dict[str, m.HeldPart] = {}
        for row in self.rows():
            record, at = row.record, (row.record.stripe, row.record.row)
            before = found[record.attempt].parity if record.attempt in found else ()
            found[record.attempt] = m.HeldPart(
                incarnation=record.incarnation, step=record.step, attempt=record.attempt,
                world=record.world, layout=record.layout, images=(),
                parity=tuple(sorted({*before, at})),
            )  # fmt: skip
        return found
