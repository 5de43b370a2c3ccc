"""Cancels all threads of one exchange together, limits their rate, and transfers shards by windows.

An error in one thread ends the exchange of this generation, and nothing else: the first reason
counts, open pulls are cancelled, and every waiting thread wakes up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from holdfast.errors import DeadlineExceeded, PeerError, UsageError
from holdfast.format.checksum import BLOCK_BYTES, block_count, blocks, checksum
from holdfast.parity.planning.budget import DEPTH, WINDOW_BYTES
from holdfast.parity.planning.placement import StoredShard
from holdfast.parity.planning.record import RecordTerms
from holdfast.transport.client import MOST_DOCUMENT_BYTES, Puller, WantedRange
from holdfast.transport.client_connection import Peer, SignedRequest, failed
from holdfast.transport.pull import PeerDownload, PullOperation
from holdfast.transport.wire import admission as refusals
from holdfast.transport.wire.admission import TokenBucket
from holdfast.transport.wire.http import generation_name, manifest_path, window_path

if TYPE_CHECKING:
    from holdfast.transport.server import ThreadSafeServer

Document = TypeVar("Document")
PATIENCE_S = 30.0
"""Timeout for anything one member waits for from another, beside the waits of its rate budget."""
MOST_PIECE_BYTES = 16 << 20
_SOON_S, _LATER_S = 0.001, 0.05
"""Delay between two requests of a document: longer each time that nothing is new."""
_NAP_S = 0.1
"""The longest sleep of a wait for the rate budget, because the rate may change."""


class ExchangeEnded(Exception):
    """The exchange has ended; its ``CancelScope`` has the reason."""


class RateBudget:
    """Limits the bytes a second that all exchanges of a keeper pull. Thread-safe.

    In any period of t seconds the pulls that begin are at most rate * t bytes, plus a twentieth of
    the rate and one window.
    """

    def __init__(self, rate_bytes_s: int | None = None) -> None:
        self._lock = threading.Lock()
        self._bucket = TokenBucket(None, time.monotonic())
        self.set_rate(rate_bytes_s)

    @property
    def rate_bytes_s(self) -> int | None:
        """The present rate; None: no limit."""
        return self._bucket.rate_bytes_s

    def set_rate(self, rate_bytes_s: int | None) -> None:
        """Change the rate, also for pulls under way. UsageError for a rate below 1."""
        if rate_bytes_s is not None and rate_bytes_s < 1:
            raise UsageError(
                f"parity cannot be made from {rate_bytes_s} bytes a second: give 1 or more, or None"
            )
        with self._lock:
            self._bucket.set_rate(rate_bytes_s, time.monotonic())

    def acquire(self, wanted: int) -> tuple[int, float]:
        """Return (bytes granted, 0), or (0, seconds after which to ask again)."""
        with self._lock:
            return self._bucket.acquire(wanted, time.monotonic())

    def seconds(self, count: int) -> float:
        """Return the minimum time that so many bytes take at the present rate."""
        rate = self.rate_bytes_s
        return 0.0 if rate is None else count / rate


class CancelScope:
    """Cancellation state of one exchange; the condition ``changed`` wakes its waiting threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.reason: BaseException | None = None
        self._pulls: set[PullOperation | PeerDownload] = set()

    def stop(self, reason: BaseException) -> None:
        """End the exchange, from any thread. The first reason counts."""
        with self.changed:
            if self.reason is None:
                self.reason = reason
            pulls = list(self._pulls)
            self.changed.notify_all()
        for pull in pulls:
            pull.cancel()

    def check(self) -> None:
        """Raise ExchangeEnded when the exchange has ended."""
        if self.reason is not None:
            raise ExchangeEnded

    def wait(
        self, is_ready: Callable[[], bool], within_s: float, on_timeout: Callable[[], Exception]
    ) -> None:
        """Wait until ``is_ready``, which ``changed`` signals. Raises ExchangeEnded, or ``late()``
        on timeout.
        """
        until_s = time.monotonic() + within_s
        with self.changed:
            while not is_ready():
                self.check()
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise on_timeout()
                self.changed.wait(left_s)
        self.check()

    def sleep(self, seconds: float) -> None:
        """Sleep so long. Raises ExchangeEnded as soon as the exchange ends."""
        with self.changed:
            self.changed.wait_for(lambda: self.reason is not None, seconds)
        self.check()

    def add(self, pull: PullOperation | PeerDownload) -> None:
        """Cancel this operation when the exchange ends."""
        with self.changed:
            self._pulls.add(pull)
            is_over = self.reason is not None
        if is_over:
            pull.cancel()

    def remove(self, pull: PullOperation | PeerDownload) -> None:
        """Forget this operation, which has ended."""
        with self.changed:
            self._pulls.discard(pull)


class BudgetedPuller:
    """Pulls within the rate budget, for one exchange.

    A wait for a peer may take ``patience_s``, and as long as ``before_bytes`` take at the rate.
    """

    def __init__(
        self,
        puller: Puller,
        budget: RateBudget,
        scope: CancelScope,
        *,
        patience_s: float = PATIENCE_S,
        before_bytes: int = 0,
    ) -> None:
        self.puller, self._budget, self.scope = puller, budget, scope
        self._patience_s, self._before_bytes = patience_s, before_bytes
        self.pulled_bytes = 0

    def patience(self) -> float:
        """Return the timeout of each wait for a peer, at the present rate."""
        return self._patience_s + self._budget.seconds(self._before_bytes)

    def pull(self, wanted: Sequence[WantedRange]) -> None:
        """Fill the memory of all ``wanted`` ranges. PeerError of the first peer that failed."""
        self.spend(sum(one.into.nbytes for one in wanted))
        pull = self.puller.begin(wanted, within_s=self.patience())
        self.scope.add(pull)
        try:
            failures = pull.wait()
        finally:
            self.scope.remove(pull)
        self.scope.check()
        for failure in failures.values():
            raise failure

    @contextmanager
    def stream(self, peer: Peer, path: str, generation: str, start: int) -> Iterator[PeerDownload]:
        """Open a download, to be read within this scope; call ``spend`` for each request."""
        stream = self.puller.stream(peer, path, generation, start=start)
        self.scope.add(stream)
        try:
            yield stream
        finally:
            self.scope.remove(stream)
            stream.close()

    @property
    def piece_bytes(self) -> int:
        """Return the size of one request: small where a rate must be kept."""
        return MOST_PIECE_BYTES if self._budget.rate_bytes_s is None else BLOCK_BYTES

    def document(
        self,
        peer: Peer,
        task: SignedRequest,
        kind: type[Document],
        *,
        late: str,
        most_bytes: int = MOST_DOCUMENT_BYTES,
        is_awaited: Callable[[Document], bool] = lambda _: True,
    ) -> Document:
        """Return the peer's document as soon as it is there, and ``is_awaited``.

        DeadlineExceeded says that the peer did it too ``late``.
        """
        pause_s, began_s = _SOON_S, time.monotonic()
        while True:
            self.scope.check()
            try:
                data = self.puller.document(
                    peer, task.path, generation=task.generation, most_bytes=most_bytes
                )
                found = msgspec.msgpack.decode(data, type=kind)
                if is_awaited(found):
                    return found
            except (ValueError, RecursionError) as error:
                raise nonsense(peer, task, str(error)) from None
            except PeerError as error:  # it has not begun
                if error.fields.get("status") != refusals.UNKNOWN.status:
                    raise
            if time.monotonic() - began_s > (patience_s := self.patience()):
                why = f"{peer} {late} in {patience_s:.0f} s: look at that host"
                raise DeadlineExceeded(why, phase="parity")
            self.scope.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LATER_S)

    def spend(self, count: int) -> None:
        """Wait until the budget allows so many bytes. Raises ExchangeEnded when the exchange
        ends.
        """
        self.scope.check()
        self.pulled_bytes += count
        left = count
        while left:
            granted, wait_s = self._budget.acquire(left)
            left -= granted
            if not granted:
                self.scope.sleep(min(wait_s, _NAP_S))


# Transfers a parity shard from its encoder to the member that stores it, window by window.
#
# The encoder of a stripe makes all its shards, stores the first, and has ``DEPTH`` windows of
# memory for the others. A full window is offered under a path of its own. A signed manifest beside
# it lists the windows and the checksums of their blocks. The receiver polls the manifest until it
# lists a new window, pulls the window, and verifies it. The confirmation request that ends every
# pull tells the encoder that the window has arrived: the encoder then withdraws it and writes the
# next one there.


_MOST_NOTE_BYTES = 1 << 20


class WindowManifest(msgspec.Struct, frozen=True, array_like=True):
    """Lists the windows that can be fetched now: ``first`` and its successors, one entry each."""

    window_bytes: int
    first: int
    sums: tuple[bytes, ...]
    """The checksums of each block of the window, in the form of a record."""


def block_sums(data: memoryview) -> bytes:
    """Return the checksums of the blocks of ``data``, 8 bytes each, little endian."""
    count = block_count(len(data))
    return b"".join(
        checksum(data[start:stop]).to_bytes(8, "little")
        for _, start, stop in blocks(0, count, len(data))
    )


class Outbox:
    """Offers the windows of shards 1 and up of the stripe that this member encodes.

    ``memory`` is ``DEPTH`` windows for each of these shards, in ``file`` from ``offset_bytes`` on.
    """

    def __init__(
        self,
        terms: RecordTerms,
        stripe: int,
        *,
        memory: memoryview,
        file: Path | int,
        offset_bytes: int,
        offers: ThreadSafeServer,
        budgeted: BudgetedPuller,
    ) -> None:
        self._terms, self._stripe = terms, stripe
        self._generation = generation_name(terms.generation)
        self._rows = range(1, terms.parity)
        self._memory, self._file, self._offset_bytes = memory, file, offset_bytes
        self._offers, self._scope, self._patience = offers, budgeted.scope, budgeted.patience
        self._sums: dict[int, dict[int, bytes]] = {row: {} for row in self._rows}
        self._unfetched: set[tuple[int, int]] = set()
        """(window, row) of every window that is offered and not yet fetched."""

    def begin(self) -> None:
        """Publish an empty manifest: a waiting receiver then learns at once if the exchange
        fails.
        """
        for row in self._rows:
            self._publish_manifest(row)

    def room(self, window: int, length: int) -> list[memoryview]:
        """Return the memory for the shards of a window, as soon as its place is free."""
        if window >= DEPTH:
            self._wait(lambda: all(number != window - DEPTH for number, _ in self._unfetched))
            for row in self._rows:
                self._withdraw(window - DEPTH, row)
        return [self._memory[at : at + length] for at in map(partial(self._at, window), self._rows)]

    def offer(self, window: int, length: int, sums: Sequence[bytes]) -> None:
        """Offer a window whose shards are written and have these checksums."""
        for row, of_row in zip(self._rows, sums, strict=True):
            self._sums[row][window] = of_row
            with self._scope.changed:
                self._unfetched.add((window, row))
            self._offers.offer_file(
                self._path(window, row),
                self._file,
                offset_bytes=self._offset_bytes + self._at(window, row),
                length_bytes=length,
                generation=self._generation,
                on_confirmed=partial(self._on_fetched, window, row),
            )
            self._publish_manifest(row)

    def finish(self) -> None:
        """Wait until every window was fetched."""
        self._wait(lambda: not self._unfetched)

    def close(self) -> None:
        """Withdraw all windows, fetched or not."""
        for row in self._rows:
            for window in list(self._sums[row]):
                self._withdraw(window, row)
            self._offers.withdraw(self._manifest_path(row))

    def _publish_manifest(self, row: int) -> None:
        sums = self._sums[row]
        manifest = WindowManifest(WINDOW_BYTES, min(sums, default=0), tuple(sums.values()))
        self._offers.offer_document(
            self._manifest_path(row), msgspec.msgpack.encode(manifest), generation=self._generation
        )

    def _manifest_path(self, row: int) -> str:
        return manifest_path(self._terms.attempt, self._terms.round_id, self._stripe, row)

    def _path(self, window: int, row: int) -> str:
        return window_path(self._terms.attempt, self._terms.round_id, self._stripe, row, window)

    def _at(self, window: int, row: int) -> int:
        return (window % DEPTH * len(self._rows) + row - 1) * WINDOW_BYTES

    def _on_fetched(self, window: int, row: int) -> None:
        """Record that a window was fetched. Called on the loop of the server."""
        with self._scope.changed:
            self._unfetched.discard((window, row))
            self._scope.changed.notify_all()

    def _withdraw(self, window: int, row: int) -> None:
        self._offers.withdraw(self._path(window, row))
        self._sums[row].pop(window, None)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        self._scope.wait(is_ready, self._patience(), self._late)

    def _late(self) -> DeadlineExceeded:
        window, row = min(self._unfetched)
        members = self._terms.members
        host = members[(self._stripe + row) % len(members)].host
        return DeadlineExceeded(
            f"{host} did not take window {window} of row {row} of stripe {self._stripe} in "
            f"{self._patience():.0f} s: look at that host",
            phase="parity",
        )


class Inbox:
    """Fetches a shard that another member makes into the memory of the member that stores it."""

    def __init__(
        self,
        terms: RecordTerms,
        kept: StoredShard,
        *,
        memory: memoryview,
        encoder: Peer,
        budgeted: BudgetedPuller,
    ) -> None:
        self._terms, self._kept, self._memory = terms, kept, memory
        self._encoder, self._budgeted = encoder, budgeted
        self._task = SignedRequest(
            "GET",
            manifest_path(terms.attempt, terms.round_id, kept.stripe, kept.row),
            generation_name(terms.generation),
        )

    def run(self) -> bytes:
        """Fetch the whole shard; return the checksums of its blocks."""
        sums = b""
        while (at := len(sums) // 8 * BLOCK_BYTES) < self._kept.size_bytes:
            sums += self._fetch(at, self._next_manifest(at))
        return sums

    def _next_manifest(self, at: int) -> WindowManifest:
        """Return the manifest, as soon as it lists bytes from ``at`` on."""
        row, stripe = self._kept.row, self._kept.stripe
        return self._budgeted.document(
            self._encoder,
            self._task,
            WindowManifest,
            late=f"made nothing of row {row} of stripe {stripe} from byte {at} on",
            most_bytes=_MOST_NOTE_BYTES,
            is_awaited=lambda one: self._checked_stop(one) > at // WINDOW_BYTES,
        )

    def _checked_stop(self, manifest: WindowManifest) -> int:
        if manifest.window_bytes != WINDOW_BYTES or manifest.first < 0:
            raise self._nonsense(
                f"windows of {manifest.window_bytes} bytes from {manifest.first} on"
            )
        return manifest.first + len(manifest.sums)

    def _fetch(self, at: int, manifest: WindowManifest) -> bytes:
        """Pull the windows listed from ``at`` on; return their checksums."""
        window, rest = divmod(at, manifest.window_bytes)
        news = manifest.sums[max(0, window - manifest.first) :]
        stop = min(at + len(news) * manifest.window_bytes, self._kept.size_bytes)
        if rest or manifest.first > window or len(b"".join(news)) != 8 * block_count(stop - at):
            raise self._nonsense(f"windows from {manifest.first} on, of which {window} is needed")
        parts = {
            number: self._memory[start : min(start + manifest.window_bytes, stop)]
            for number in range(window, window + len(news))
            if (start := number * manifest.window_bytes) < stop
        }
        terms, kept = self._terms, self._kept
        self._budgeted.pull(
            [
                WantedRange(
                    self._encoder,
                    window_path(terms.attempt, terms.round_id, kept.stripe, kept.row, number),
                    self._task.generation,
                    0,
                    part,
                )
                for number, part in parts.items()
            ]
        )
        actual = block_sums(self._memory[at:stop])
        if actual != b"".join(news):
            raise failed(
                self._encoder,
                self._task,
                "body",
                f"its bytes from {at} on changed after they were made, or on their way",
            )
        return actual

    def _nonsense(self, what: str) -> PeerError:
        return nonsense(self._encoder, self._task, what)


def nonsense(peer: Peer, task: SignedRequest, what: str) -> PeerError:
    """Return the error of a peer whose document cannot be."""
    return failed(peer, task, "body", f"its note makes no sense: {what}")
