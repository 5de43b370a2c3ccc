"""Registers the paths that a server offers, and the bytes behind them, until they are withdrawn.

``sendfile`` sends the very pages of the file, not a copy: a writer that changes them before the
peer has received them changes what the peer gets. So each offer has a tag of its own, and a peer
that has copied all it wanted asks whether that tag is still valid. Withdraw before writing: then
the peer detects every copy that was not complete.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field

from holdfast.errors import ArenaError
from holdfast.format.checksum import Buffer
from holdfast.transport.wire import admission as refusals
from holdfast.transport.wire.admission import AdmissionRefused
from holdfast.transport.wire.http import check_names
from holdfast.transport.wire.signing import HttpRequest, digest

NO_GENERATION = "-"
_REMEMBERED = 1024
"""Withdrawn paths that are remembered, to distinguish them from paths that never existed."""


class Resource(Struct, eq=False):
    """Bytes that are offered under one path."""

    path: str
    generation: str
    length_bytes: int
    descriptor: int = -1
    offset_bytes: int = 0
    document: Buffer = b""
    digest: str = ""
    on_confirmed: Callable[[], None] | None = None
    """Called when a peer has copied all it wanted, and was told that this offer is still valid."""
    tag: str = field(default_factory=lambda: secrets.token_hex(8))
    is_withdrawn: bool = False
    users: int = 0


class Resources:
    """The offers of one server. Only for the thread of its event loop."""

    def __init__(self) -> None:
        self._offered: dict[str, Resource] = {}
        self._withdrawn: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._offered)

    def offer_file(
        self,
        path: str,
        file: Path | int,
        *,
        offset_bytes: int,
        length_bytes: int,
        generation: str,
        on_confirmed: Callable[[], None] | None = None,
    ) -> Resource:
        """Offer bytes of a file; an earlier offer of this path is withdrawn.

        ``file`` is opened, or its descriptor duplicated, and stays open until the offer ends.
        ``generation``: any name for these bytes; a request must give the same name.
        """
        check_names(path, generation)
        descriptor = _open(file)
        try:
            _check_extent(file, os.fstat(descriptor), offset_bytes, length_bytes)
        except ArenaError:
            os.close(descriptor)
            raise
        return self._offer(
            Resource(
                path,
                generation,
                length_bytes,
                descriptor,
                offset_bytes=offset_bytes,
                on_confirmed=on_confirmed,
            )
        )

    def offer_document(
        self, path: str, data: Buffer, *, generation: str = NO_GENERATION
    ) -> Resource:
        """Offer bytes from memory, such as an inventory."""
        check_names(path, generation)
        return self._offer(
            Resource(path, generation, len(data), document=data, digest=digest(data))
        )

    def _offer(self, resource: Resource) -> Resource:
        self.withdraw(resource.path)
        self._withdrawn.pop(resource.path, None)
        self._offered[resource.path] = resource
        return resource

    def withdraw(self, path: str) -> bool:
        """End an offer; return whether the path was offered.

        The bytes may be overwritten as soon as this returns: a peer that had not copied all of them
        detects that its copy is incomplete.
        """
        resource = self._offered.pop(path, None)
        if resource is None:
            return False
        resource.is_withdrawn = True
        self._withdrawn[path] = None
        if len(self._withdrawn) > _REMEMBERED:
            del self._withdrawn[next(iter(self._withdrawn))]
        _close_if_unused(resource)
        return True

    def withdraw_all(self) -> None:
        """End all offers."""
        for path in list(self._offered):
            self.withdraw(path)

    def find(self, request: HttpRequest) -> Resource | AdmissionRefused:
        """Return the resource that a request names, and the range it asks for."""
        resource = self._offered.get(request.path)
        if resource is None:
            was_there = request.path in self._withdrawn
            return refusals.WITHDRAWN if was_there else refusals.UNKNOWN
        is_this_one = request.tag in ("", resource.tag)
        if not is_this_one or request.generation != resource.generation:
            return refusals.WITHDRAWN
        return resource


@contextmanager
def held(resource: Resource) -> Iterator[None]:
    """Keep the file of ``resource`` open, also when the offer is withdrawn meanwhile."""
    resource.users += 1
    try:
        yield
    finally:
        resource.users -= 1
        _close_if_unused(resource)


def _close_if_unused(resource: Resource) -> None:
    if resource.is_withdrawn and not resource.users and resource.descriptor >= 0:
        os.close(resource.descriptor)
        resource.descriptor = -1


def _open(file: Path | int) -> int:
    try:
        if isinstance(file, int):
            return os.dup(file)
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ArenaError(f"cannot offer {file} to peers: {error.strerror}") from error


def _check_extent(file: Path | int, status: os.stat_result, offset: int, length: int) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        raise ArenaError(f"cannot offer {file} to peers: it is not a file of this user")
    if offset < 0 or length < 1 or offset + length > status.st_size:
        raise ArenaError(
            f"cannot offer {length} bytes from {offset} of {file} to peers: it has {status.st_size}"
        )
