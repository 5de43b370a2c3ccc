"""Images in the memory of other hosts, read through their keepers in ranges, as from any store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.errors import PeerError
from holdfast.format.image import Header
from holdfast.geometry.codec import MAX_BYTES
from holdfast.load.source import read_head
from holdfast.peers.calling import Peer
from holdfast.peers.client import Puller, Wanted
from holdfast.snapshot.messages import HeldGeneration, HostPlace, SlotInfo
from holdfast.snapshot.offered import generation_name, image_path, layout_path


class PeerImage:
    """An image that another host's keeper offers. What comes is verified as from any source."""

    is_mapped = False

    def __init__(
        self, puller: Puller, peer: Peer, path: str, generation: str, slot: SlotInfo
    ) -> None:
        self.name = f"{path} of host {peer.name}"
        self.size_bytes = slot.image_bytes
        self.header_xxh3, self.table_xxh3 = slot.header_xxh3, slot.table_xxh3
        self._puller, self._peer = puller, peer
        self._path, self._generation = path, generation

    def check_length(self) -> None:
        """See ``ImageFile``: a peer refuses a range that is not wholly there."""

    def open(self, expected: Mapping[str, str]) -> tuple[Header, tuple[int, ...]]:
        """See ``ImageFile``."""
        return read_head(self, expected)

    def block_name(self, number: int) -> str:
        """See ``ImageFile``."""
        return f"block {number} of {self.name}"

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """See ``ImageFile``. PeerError when it does not come."""
        if len(staging) < stop - start:
            staging = bytearray(stop - start)
        view = memoryview(staging)[: stop - start]
        self._puller.pull([Wanted(self._peer, self._path, self._generation, start, view)])
        return view


class Peers:
    """The keepers of the other hosts of an incarnation; ``own``: the name of this one."""

    def __init__(
        self, hosts: Sequence[HostPlace], own: str, secret: bytes, incarnation: int
    ) -> None:
        self.own = own
        self._peers = {h.id: Peer(h.id, h.address, h.port) for h in hosts if h.id != own}
        self._puller = Puller(secret, incarnation=incarnation)

    def image(self, held: HeldGeneration, slot: SlotInfo) -> PeerImage:
        """See ``FarImages``."""
        return PeerImage(
            self._puller, self._peer(slot.host, slot.port), image_path(held.attempt, slot.rank),
            generation_name(held.incarnation, held.step), slot,
        )  # fmt: skip

    def layout(self, held: HeldGeneration) -> bytes:
        """See ``FarImages``. PeerError when no host gives it."""
        failure: PeerError | None = None
        far = [(slot.host, slot.port) for slot in held.slots if slot.host != self.own]
        for name, port in dict.fromkeys(far):
            try:
                return self._puller.document(
                    self._peer(name, port), layout_path(held.layout), most_bytes=MAX_BYTES
                )
            except PeerError as error:
                failure = error
        raise failure or PeerError(f"no other host has the layout {held.layout}")

    def _peer(self, name: str, port: int) -> Peer:
        if name not in self._peers:
            raise PeerError(f"host {name} is none of this start of the run", peer=name)
        agreed = self._peers[name]
        return Peer(name, agreed.host, port) if port else agreed

    def close(self) -> None:
        """End the connections that are idle."""
        self._puller.close()
