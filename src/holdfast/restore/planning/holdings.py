"""PURE. What hosts say they hold of a run's generations, and where a restore takes each image from.

The same facts as in the keepers' inventories and in the records of parity, reduced to what the
choice of a source needs. Values only: equal ones are the same thing, whoever told of it.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.errors import FormatError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.load.choose import Candidate
from holdfast.peers.names import image_path
from holdfast.redundancy.stripes import Placement, stripes


class Image(Struct, frozen=True, order=True):
    """One image, told from every other by its checksums."""

    rank: int
    image_bytes: int
    header_xxh3: str
    table_xxh3: str


class Coded(Struct, frozen=True, order=True):
    """An image as a group codes it: from ``data_start`` on."""

    image: Image
    data_start: int

    @property
    def size_bytes(self) -> int:
        """How much of it is coded."""
        return self.image.image_bytes - self.data_start


class Member(Struct, frozen=True, order=True):
    """A host of a group, with its images in order of rank."""

    host: str
    images: tuple[Coded, ...]


class Coding(Struct, frozen=True, order=True):
    """A group that coded an attempt, as each of its records of parity says."""

    members: tuple[Member, ...]
    parity: int

    def __post_init__(self) -> None:
        ranks = [one.image.rank for member in self.members for one in member.images]
        sizes = [one.size_bytes for member in self.members for one in member.images]
        if not 0 < self.parity < len(self.members) or len(set(ranks)) < len(ranks):
            raise FormatError(
                f"{len(self.members)} hosts with images of ranks {ranks!s:.100} and parity="
                f"{self.parity} are no group"
            )
        if min(sizes, default=1) < 1:
            raise FormatError(f"a group cannot have coded {min(sizes)} bytes of an image")

    @property
    def placement(self) -> Placement:
        """Where every byte of it lies."""
        sizes = (tuple(one.size_bytes for one in member.images) for member in self.members)
        return Placement(tuple(sizes), self.parity, BLOCK_BYTES)

    def row_bytes(self, stripe: int) -> int:
        """How long the rows of a stripe are."""
        return stripes(self.placement)[stripe].size_bytes


class HeldRow(Struct, frozen=True, order=True):
    """Parity on a host: row ``row`` of stripe ``stripe`` of a coding."""

    coding: Coding
    stripe: int
    row: int


class HeldPart(Struct, frozen=True, order=True):
    """What one host holds of one attempt."""

    incarnation: int
    step: int
    attempt: str
    world: int
    layout: str
    images: tuple[Image, ...] = ()
    rows: tuple[HeldRow, ...] = ()


class Holding(Struct, frozen=True):
    """All that one host holds, and where its keeper is asked for it."""

    host: str
    parts: tuple[HeldPart, ...] = ()
    parents: dict[int, tuple[int, int] | None] = {}
    address: str = ""
    port: int = 0


class Row(Struct, frozen=True, order=True):
    """A row of parity that is there, and the hosts that hold it."""

    stripe: int
    row: int
    hosts: tuple[str, ...]


class Decoding(Struct, frozen=True):
    """How a lost image is made anew: it is image ``image`` of member ``member`` of a coding.

    ``rows`` is all parity of it that is there; ``absent`` are the members whose images are not.
    """

    coding: Coding
    member: int
    image: int
    rows: tuple[Row, ...]
    absent: tuple[int, ...]


class Source(Struct, frozen=True):
    """Where one image comes from: ``hosts`` that hold it, else ``decoding``, else storage."""

    rank: int
    image: Image | None = None
    hosts: tuple[str, ...] = ()
    decoding: Decoding | None = None


class Recovery(Struct, frozen=True):
    """A generation that can be restored. ``sources`` by rank; without any, all is in storage.

    ``holders``: the hosts that hold anything of it, and so its layout. ``survives``: of these, so
    many can still be lost, whichever they are, and all that is in memory can be rebuilt.
    """

    candidate: Candidate
    world: int = 0
    layout: str = ""
    sources: tuple[Source, ...] = ()
    holders: tuple[str, ...] = ()
    survives: int = 0

    @property
    def text(self) -> str:
        """One line for people: where its images come from."""
        if not self.sources:
            return f"{self.candidate.generation} from storage"
        decoded = [str(one.rank) for one in self.sources if one.decoding is not None]
        stored = [str(one.rank) for one in self.sources if not one.hosts and one.decoding is None]
        words = [f"{self.candidate.held} of {self.world} images from memory"]
        if decoded:
            words.append(f"of ranks {', '.join(decoded)} decoded from parity")
        if stored:
            words.append(f"of ranks {', '.join(stored)} from storage")
        return f"{self.candidate.generation}: {', '.join(words)}"


class Refusal(Struct, frozen=True):
    """An attempt of which something is in memory, but not enough; ``reason`` is a sentence."""

    incarnation: int
    step: int
    attempt: str
    reason: str


def image_name(host: str, attempt: str, rank: int) -> str:
    """What an image in a host's memory is called in errors, on whatever rank they are raised."""
    return f"{host}{image_path(attempt, rank)}"
