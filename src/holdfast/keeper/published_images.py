"""Publishes this host's sealed images to its peers, each until its slot is reused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.slots import Slot
from holdfast.errors import ArenaError, HoldfastError
from holdfast.events import warn
from holdfast.format.manifest import AttemptId, ImageId
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.protocol import messages as m
from holdfast.protocol.arena import IMAGE_START
from holdfast.transport.wire.http import INVENTORY, generation_name, image_path, layout_path

if TYPE_CHECKING:  # a run on one host does not need it
    from holdfast.keeper.parity.store import StoredParity
    from holdfast.transport.server import PeerServer


class PublishedImages:
    """Published images by slot; empty while no server runs. On the keeper's loop."""

    def __init__(self, memory: ArenaFiles) -> None:
        self._memory = memory
        self.shards: Callable[[], Sequence[StoredParity]] = tuple
        """Returns the parity shards stored here."""
        self._server: PeerServer | None = None
        self._paths: dict[int, str] = {}
        self._layouts: set[str] = set()
        self._is_stale = False
        self._host, self._port = "", 0

    @property
    def port(self) -> int:
        """Return the port where images of this host are served; 0 where no other host needs
        them.
        """
        return self._port

    def serve(self, server: PeerServer | None, host: str = "", port: int = 0) -> None:
        """Publish all images in memory through this server, or nothing more (None)."""
        self._server, self._paths = server, {}
        self._layouts.clear()
        self._host, self._port = host, port
        if server is None:
            return
        slots, attempts = self._memory.discovered()
        by_id = {attempt.id: attempt for attempt in attempts}
        for slot in slots:
            attempt = by_id.get(slot.attempt)
            if attempt is not None and attempt.slots.get(slot.rank) == slot.id:
                self.publish(slot.id, attempt.attempt_id, slot.image)
        self._publish_inventory()

    def publish(self, slot: int, attempt_id: AttemptId, image: ImageId) -> None:
        """Publish the captured image in this slot."""
        if self._server is not None:
            self._publish_image(self._server, slot, attempt_id, image)
            self._publish_layout(attempt_id.layout)
            self._is_stale = True

    def refresh(self) -> None:
        """Publish an inventory with all recent captures; called periodically."""
        if self._server is not None and self._is_stale:
            self._publish_inventory()

    def holdings_changed(self) -> None:
        """Mark the inventory as changed: other images or other shards are valid than before."""
        if self._server is not None:
            self._publish_inventory()

    def withdraw(self, slot: int) -> None:
        """Withdraw the image of a slot, which may be written to from now on."""
        path = self._paths.pop(slot, None)
        if path is not None and self._server is not None:
            self._server.withdraw(path)

    def _publish_image(
        self, server: PeerServer, slot: int, attempt_id: AttemptId, image: ImageId
    ) -> None:
        path = image_path(attempt_id.attempt, image.rank)
        try:
            server.offer_file(
                path,
                self._memory.slot_path(slot),
                offset_bytes=IMAGE_START,
                length_bytes=image.image_bytes,
                generation=generation_name(attempt_id.generation),
            )
        except HoldfastError as error:  # the arena was removed, for example
            warn(f"an image is not offered to peers: {error}")
            return
        self._paths[slot] = path

    def _publish_layout(self, hash_: str) -> None:
        if not hash_ or hash_ in self._layouts or self._server is None:
            return
        self._withdraw_layouts()
        try:
            self._server.offer_document(layout_path(hash_), self._memory.layout(hash_))
        except ArenaError as error:
            warn(f"a layout is not offered to peers: {error}")
            return
        self._layouts.add(hash_)

    def _withdraw_layouts(self) -> None:
        """Withdraw layouts that memory has dropped: a run may have a new layout at every save."""
        assert self._server is not None
        for hash_ in [one for one in self._layouts if not self._memory.has_layout(one)]:
            self._server.withdraw(layout_path(hash_))
            self._layouts.discard(hash_)

    def _publish_inventory(self) -> None:
        assert self._server is not None
        self._is_stale = True
        with suppress(ArenaError):  # a record cannot be read now: what is published stays
            self._server.offer_document(INVENTORY, msgspec.msgpack.encode(self.inventory()))
            self._is_stale = False

    def inventory(self) -> m.Inventory:
        """Return this host's inventory, from the records of its slots."""
        slots, attempts = self._memory.discovered()
        by_id = {slot.id: slot for slot in slots}
        return inventory(self._host, self._memory, by_id, attempts, self.shards())


def inventory(
    host: str,
    memory: ArenaFiles,
    slots: Mapping[int, Slot],
    attempts: Iterable[Attempt],
    shards: Iterable[StoredParity] = (),
) -> m.Inventory:
    """Return the inventory of these attempts, whose images are in ``slots``, and parity shards."""
    rows: defaultdict[AttemptId, set[tuple[int, int]]] = defaultdict(set)
    for one in shards:
        rows[one.record.attempt_id].add((one.record.stripe, one.record.row))
    parts = [
        m.HoldingPart(
            attempt.attempt_id,
            tuple(slots[slot].image for _, slot in sorted(attempt.slots.items())),
            tuple(sorted(rows.pop(attempt.attempt_id, ()))),
            attempt.nonce,
        )
        for attempt in attempts
    ]
    parts += [m.HoldingPart(id_, parity=tuple(sorted(there))) for id_, there in rows.items()]
    records = memory.incarnations()
    return m.Inventory(
        host,
        tuple(parts),
        {each.n: each.parent for each in records},
        {each.n: (each.nonce, each.created_s) for each in records},
    )
