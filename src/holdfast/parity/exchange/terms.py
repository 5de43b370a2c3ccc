"""Agrees the terms of a parity round: the members of a group read each other's images' headers.

Each member offers a list of its images. A header is listed by what differs in it from the one that
the last protected generation's records keep; whoever lacks that one reads the header in the image
itself. So a list is small, and the coordinator hears none of it. Every header is compared with the
checksum in its seal by ``RecordTerms``; and that all members read the same, with ``digest``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from holdfast.format.checksum import checksum, text
from holdfast.format.image import MAX_HEADER_BYTES
from holdfast.parity.exchange.windows import BudgetedPuller, nonsense
from holdfast.parity.planning.record import ImageFact, MemberFact, MemberImage, ParityRecord
from holdfast.transport.client import WantedRange
from holdfast.transport.client_connection import Peer, SignedRequest
from holdfast.transport.wire.http import image_path, members_path


class ListedImage(MemberImage, frozen=True, array_like=True):
    """An image without its header.

    With ``base``, the checksum of an earlier header, the header begins with that one's first
    ``same_before`` bytes, goes on with ``middle``, and ends with that one's last ``same_after``.
    """

    base: str = ""
    same_before: int = 0
    middle: bytes = b""
    same_after: int = 0


class MemberList(msgspec.Struct, frozen=True, array_like=True):
    """The images of one host that parity is to be made of."""

    host: str
    images: tuple[ListedImage, ...]


def list_of(member: MemberFact, earlier: Mapping[int, ImageFact]) -> bytes:
    """Return the document that lists a host's images. ``earlier``: of the last round, by rank."""
    images = (_listed(image, earlier.get(image.rank)) for image in member.images)
    return msgspec.msgpack.encode(MemberList(member.host, tuple(images)))


def _listed(image: ImageFact, earlier: ImageFact | None) -> ListedImage:
    listed = ListedImage(
        image.rank, image.image_bytes, image.data_start, image.header_xxh3, image.table_xxh3
    )
    if earlier is None:
        return listed
    head, base = bytes(image.head), bytes(earlier.head)
    before = _same(head, base)
    after = _same(head[before:][::-1], base[before:][::-1])
    if before + after < len(head) // 2:  # it is another layout's
        return listed
    middle = head[before : len(head) - after]
    return msgspec.structs.replace(
        listed, base=earlier.header_xxh3, same_before=before, middle=middle, same_after=after
    )


def _same(a: bytes, b: bytes) -> int:
    """Return how many first bytes are equal."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        half = (low + high + 1) // 2
        low, high = (half, high) if a[low:half] == b[low:half] else (low, half - 1)
    return low


def heads_of(records: Iterable[ParityRecord]) -> dict[str, memoryview]:
    """Return all headers in these records, by their checksums."""
    return {
        image.header_xxh3: image.head
        for record in records
        for member in record.members
        for image in member.images
    }


class TermsReader:
    """Reads the lists of all other members of a group, for one round.

    ``generation``: the name of the images' generation. ``heads``: headers that are known here, by
    checksum.
    """

    def __init__(
        self,
        own: MemberFact,
        peers: Sequence[Peer],
        *,
        attempt: str,
        round_id: int,
        generation: str,
        heads: Mapping[str, memoryview],
        budgeted: BudgetedPuller,
    ) -> None:
        self._own, self._peers, self._heads = own, peers, heads
        self._attempt, self._generation = attempt, generation
        self._budgeted = budgeted
        self._task = SignedRequest("GET", members_path(attempt, round_id), generation)

    def run(self) -> tuple[MemberFact, ...]:
        """Return all members in the order of their hosts, with the headers of their images.

        PeerError or DeadlineExceeded of a member that does not tell them.
        """
        lists = [(peer, self._list(peer)) for peer in self._peers]
        heads = {
            (listed.host, image.rank): head
            for _, listed in lists
            for image in listed.images
            if (head := self._known(image)) is not None
        }
        missing = {
            (listed.host, image.rank): WantedRange(
                peer,
                image_path(self._attempt, image.rank),
                self._generation,
                0,
                memoryview(bytearray(image.data_start)),
            )
            for peer, listed in lists
            for image in listed.images
            if (listed.host, image.rank) not in heads
        }
        self._budgeted.pull(list(missing.values()))
        heads |= {at: wanted.into for at, wanted in missing.items()}
        others = (MemberFact(one.host, tuple(_facts(one, heads))) for _, one in lists)
        return tuple(sorted([self._own, *others], key=lambda member: member.host))

    def _known(self, image: ListedImage) -> memoryview | None:
        """Return the header of an image, if this host has what it differs from."""
        base = self._heads.get(image.base)
        if base is None or not 0 <= image.same_after <= len(base) - image.same_before:
            return None
        end = len(base) - image.same_after
        head = b"".join((base[: image.same_before], image.middle, base[end:]))
        return memoryview(head) if text(checksum(head)) == image.header_xxh3 else None

    def _list(self, peer: Peer) -> MemberList:
        """Return the list of one host, as soon as that host has begun the round."""
        task = self._task
        listed = self._budgeted.document(peer, task, MemberList, late="did not list its images")
        if listed.host != peer.name:
            raise nonsense(peer, task, f"it is that of {listed.host}")
        if any(not 0 < image.data_start <= MAX_HEADER_BYTES for image in listed.images):
            raise nonsense(peer, task, "no image has such a header")
        return listed


def _facts(listed: MemberList, heads: Mapping[tuple[str, int], memoryview]) -> Iterator[ImageFact]:
    for one in listed.images:
        yield ImageFact(
            one.rank,
            one.image_bytes,
            one.data_start,
            one.header_xxh3,
            one.table_xxh3,
            heads[listed.host, one.rank],
        )
