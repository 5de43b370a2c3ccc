"""What a server offers now: paths, and the bytes behind them, until they are withdrawn.

Bytes on their way to a peer lie in the very pages of the file, not in a copy (``sendfile``):
whoever writes into them before the peer has read them out changes what the peer gets. So each
offer has a tag of its own, and a peer that has copied all it wanted asks whether that tag still
stands. Withdraw before you write: then what the peer believes was whole when it was copied.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import ArenaError
from holdfast.peers import refusals
from holdfast.peers.refusals import Refused
from holdfast.peers.signing import Request, digest
from holdfast.peers.wire import check_names

NO_GENERATION = "-"
_REMEMBERED = 1024
"""How many withdrawn paths are still told from those that never were."""


@dataclass(eq=False, slots=True)
class Resource:
    """Bytes that are offered under one path."""

    path: str
    generation: str
    length_bytes: int
    descriptor: int = -1
    offset_bytes: int = 0
    document: bytes = b""
    digest: str = ""
    on_confirmed: Callable[[], None] | None = None
    """Called when a peer has copied all it wanted, and was told that this offer still stands."""
    tag: str = field(default_factory=lambda: secrets.token_hex(8))
    is_withdrawn: bool = False
    users: int = 0


class Resources:
    """All that one server offers. For the thread of its event loop alone."""

    def __init__(self) -> None:
        self._offered: dict[str, Resource] = {}
        self._withdrawn: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._offered)

    def offer_file(
        self, path: str, file: Path | int, *, offset_bytes: int, length_bytes: int,
        generation: str, on_confirmed: Callable[[], None] | None = None,
    ) -> Resource:  # fmt: skip
        """Offer bytes of a file; what the path stood for before is withdrawn.

        ``file`` is opened, or its descriptor duplicated, and stays open until the offer ends.
        ``generation``: any name of what the bytes are, for whoever asks must name the same.
        """
        check_names(path, generation)
        descriptor = _open(file)
        try:
            _check_extent(file, os.fstat(descriptor), offset_bytes, length_bytes)
        except ArenaError:
            os.close(descriptor)
            raise
        return self._offer(Resource(
            path, generation, length_bytes, descriptor, offset_bytes=offset_bytes,
            on_confirmed=on_confirmed,
        ))  # fmt: skip

    def offer_document(
        self, path: str, data: bytes, *, generation: str = NO_GENERATION
    ) -> Resource:
        """Offer bytes of our own, such as an inventory."""
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
        """Offer it no longer; was it offered?

        Its bytes may be written as soon as this returns: no peer takes for whole what it had not
        copied by then.
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
        """Offer nothing any more."""
        for path in list(self._offered):
            self.withdraw(path)

    def find(self, request: Request) -> Resource | Refused:
        """What a request asks for, as it asks for it."""
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
    """Keep its file open, also when it is withdrawn meanwhile."""
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


def _check_extent(file: Path | int, found: os.stat_result, offset: int, length: int) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        raise ArenaError(f"cannot offer {file} to peers: it is not a file of this user")
    if offset < 0 or length < 1 or offset + length > found.st_size:
        raise ArenaError(
            f"cannot offer {length} bytes from {offset} of {file} to peers: it has {found.st_size}"
        )
