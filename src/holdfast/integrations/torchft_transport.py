"""Sends the state of a living replica group of torchft to one that comes back, between their hosts.

The state is written once more into memory, as a checkpoint, and its files are served as those of
keepers are: the requests are signed, each byte is checked, and nothing is unpickled. The training
of the group that gives goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import mmap
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from holdfast.errors import PeerError, UnsupportedState, UsageError
from holdfast.integrations.lone_checkpoints import read_alone, write_alone
from holdfast.integrations.seam import missing
from holdfast.meeting import ADDRESS, address_towards
from holdfast.protocol.arena import arena_home
from holdfast.transport.client import Puller, WantedRange
from holdfast.transport.client_connection import Peer
from holdfast.transport.server import PeerServer, ThreadSafeServer

try:
    from torchft.checkpointing.transport import CheckpointTransport
except ImportError as error:
    raise missing("torchft", error) from error

T = TypeVar("T")
_NAME, _INCARNATION, _FILES = "group", 1, "/files"
_PREFIX, _LEFT_S, _PAUSE_S = "holdfast-heal-", 60.0, 0.05


class HoldfastTransport(CheckpointTransport[Any]):  # type: ignore[misc]
    """Give it to ``Manager(checkpoint_transport=...)``, in every group.

    ``host``: the address at which other groups reach this host; by default that of
    HOLDFAST_HOST_ADDRESS, or the one that the host of TORCHFT_LIGHTHOUSE sees. The key that signs
    requests goes from manager to manager beside it. The state is tensors and plain values. It takes
    as much memory as it is large, below HOLDFAST_ARENA_DIR: where it is given until it is given
    again, and where it is taken until it is read.

    Raises UsageError where the address is not known.
    """

    def __init__(self, host: str | None = None) -> None:
        self._host = host or os.environ.get(ADDRESS, "").strip() or _address_of_this_host()
        self._secret = secrets.token_hex(32)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="holdfast-heal", daemon=True
        )
        self._thread.start()
        self._offered: list[str] = []
        self._files: list[int] = []
        self._server, self._port = self._wait(self._listen())
        self._offers = ThreadSafeServer(self._server, self._loop)
        _remove_left()

    async def _listen(self) -> tuple[PeerServer, int]:
        server = PeerServer(self._secret.encode(), name=_NAME, incarnation=_INCARNATION)
        return server, await server.start(self._host)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def metadata(self) -> str:
        """Returns what another group needs to ask this one: address, port and key."""
        return json.dumps([self._host, self._port, self._secret])

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        """Copy the state into memory and offer it until the next; all groups may ask for it.

        Raises UnsupportedState for what is neither a plain tensor nor a value.
        """
        self._withdraw()
        refuse_sharded(tree_leaves(state_dict))
        with _directory() as where:
            root = where / "root"
            write_alone(root, state_dict, step)
            sizes = {}
            for file in sorted(one for one in root.rglob("*") if one.is_file()):
                name, size = str(file.relative_to(root)), file.stat().st_size
                sizes[name] = size
                if size:
                    self._files.append(os.open(file, os.O_RDONLY))
                    self._offer(name, self._files[-1], size, step)
        self._offered.append(_FILES)
        listing = json.dumps(sizes).encode()
        self._offers.offer_document(_FILES, listing, generation=str(step))

    def _offer(self, name: str, file: int, size: int, step: int) -> None:
        path = f"{_FILES}/{name}"
        self._offered.append(path)
        self._offers.offer_file(path, file, offset_bytes=0, length_bytes=size, generation=str(step))

    def _withdraw(self) -> None:
        while self._offered:
            self._offers.withdraw(self._offered.pop())
        while self._files:
            os.close(self._files.pop())

    def disallow_checkpoint(self) -> None:
        """The next step may change the state at once: what is sent is a copy."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state of another group at ``step``, its tensors on the CPU.

        It may not be offered yet: both groups hear of each other at the same time. Raises PeerError
        where it is not there within ``timeout``, and ChecksumMismatch for bytes that are not those
        that were sent.
        """
        host, port, secret = json.loads(metadata)
        peer = Peer(_NAME, host, port)
        puller = Puller(secret.encode(), incarnation=_INCARNATION)
        until_s = time.monotonic() + timeout.total_seconds()
        try:
            with _directory() as where:
                listing = _wait_for_offer(puller, peer, step, until_s)
                _pull(puller, peer, json.loads(listing), step, where / "root", timeout)
                return read_alone(where / "root")
        finally:
            puller.close()

    def shutdown(self, wait: bool = True) -> None:
        """End the server."""
        if self._loop.is_closed():
            return
        self._withdraw()
        self._wait(self._server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def refuse_sharded(tensors: Iterable[Any]) -> None:
    """Raises UnsupportedState for tensors that the ranks of a group have in parts."""
    if any(isinstance(one, DTensor) for one in tensors):
        raise UnsupportedState(
            "the state has DTensors, whose parts HoldfastTransport cannot send: leave the Manager "
            "of groups that shard their state (FSDP2) with torchft's own transport"
        )


def _address_of_this_host() -> str:
    lighthouse = urlsplit(os.environ.get("TORCHFT_LIGHTHOUSE", "")).hostname
    found = address_towards(lighthouse) if lighthouse else ""
    if not found:
        raise UsageError(
            "HoldfastTransport does not know by which address other groups reach this host: give "
            f"HoldfastTransport(host=...), or set {ADDRESS} or TORCHFT_LIGHTHOUSE"
        )
    return found


def _wait_for_offer(puller: Puller, peer: Peer, step: int, until_s: float) -> bytes:
    """Returns the listing of a step; asks again until it is there."""
    while True:
        try:
            return puller.document(peer, _FILES, generation=str(step))
        except PeerError:
            if time.monotonic() + _PAUSE_S > until_s:
                raise
            time.sleep(_PAUSE_S)


def _pull(
    puller: Puller, peer: Peer, sizes: dict[str, int], step: int, root: Path, timeout: timedelta
) -> None:
    """Fetches all files into a directory."""
    wanted = []
    for name, size in sizes.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise PeerError(f"{peer} offers a file called {name!r:.100}: it is no group's")
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb+") as made:
            made.truncate(size)
            if size:
                into = memoryview(mmap.mmap(made.fileno(), size))
                wanted.append(WantedRange(peer, f"{_FILES}/{name}", str(step), 0, into))
    puller.pull(wanted, within_s=timeout.total_seconds())


@contextmanager
def _directory() -> Iterator[Path]:
    """Makes a directory in memory, which is locked while it is used, and removes it."""
    where = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=arena_home().parent))
    lock = os.open(where, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield where
    finally:
        shutil.rmtree(where, ignore_errors=True)
        os.close(lock)


def _remove_left() -> None:
    """Removes the directories of processes that were killed; a new one may not be locked yet."""
    for left in arena_home().parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_mtime > _LEFT_S:
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
