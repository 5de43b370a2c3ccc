"""This rank's session with its keeper: connection, reconnects, slot requests, notifications."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from holdfast.capture.handles import PendingHandles
from holdfast.capture.save_state import (
    Consumed,
    Event,
    Explained,
    KeeperGone,
    Requested,
    SaveState,
    SaveStore,
    Unreached,
)
from holdfast.capture.task import CaptureTask, RankIdentity, SaveTimes, finalize_weakly
from holdfast.errors import (
    CaptureOvertaken,
    DeadlineExceeded,
    Fenced,
    FormatError,
    HoldfastError,
    KeeperError,
    NotProtected,
    PersistFailed,
    SnapshotSkipped,
    UsageError,
)
from holdfast.events import PersistBroke, SnapshotNotProtected, emit
from holdfast.geometry.layout import deflate
from holdfast.protocol import messages as m
from holdfast.protocol.client import KeeperClient, NeverSent
from holdfast.protocol.replica_events import difference_events

NOT_CONNECTED = "the keeper of this host went away"
#: Pause after a failed connection attempt; doubled each time up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
#: Pauses between attempts to say goodbye to a keeper that is terminating.
_GOODBYE_PAUSES_S = 0.1, 0.5

A = TypeVar("A", bound=m.Message)


class KeeperSession:
    """Holds at most one client; ``connect`` creates a client that has joined as this rank."""

    def __init__(self, connect: Callable[[], KeeperClient]) -> None:
        self._connect = connect
        self._client: KeeperClient | None = None
        self._connecting = threading.RLock()  # a signal handler may save in the middle of it
        self._is_over = False
        self._disconnect_when_collected: weakref.finalize[[], KeeperSession] | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._next_try_s, self._failure = 0.0, ""

    @property
    def is_up(self) -> bool:
        """True if there is a client, with a living keeper or not."""
        return self._client is not None

    @property
    def is_open(self) -> bool:
        """True if there is a client whose connection is not broken."""
        return self._client is not None and self._client.is_open

    def ensure(self) -> KeeperClient:
        """Return the client, connecting if necessary; from any thread."""
        with self._connecting:
            if self._client is not None and self._client.is_open:
                return self._client
            if self._is_over:
                raise KeeperError("this rank has left its keeper")
            if self._disconnect_when_collected is not None:
                self._disconnect_when_collected.detach()
            self._client = client = self._connect()
            self._disconnect_when_collected = finalize_weakly(self, client.disconnect)
            if self._is_over:  # ended meanwhile
                self.disconnect()
            return client

    @property
    def is_backing_off(self) -> bool:
        """Return True if a connection attempt failed recently: frequent saves must not each
        retry.
        """
        return not self.is_open and self.retry_in_s > 0

    @property
    def retry_in_s(self) -> float:
        """Return how long to wait, after a failed connection attempt, before the next one."""
        return max(0.0, self._next_try_s - time.monotonic())

    @property
    def should_reconnect(self) -> bool:
        """Return True if the connection is broken and a reconnect is due."""
        return self.is_up and not (self.is_open or self.is_backing_off or self._is_over)

    def ensure_for_save(self) -> KeeperClient:
        """Return the client like ``ensure``, but raise KeeperError at once while the session backs
        off.
        """
        if self.is_backing_off:
            raise KeeperError(f"{NOT_CONNECTED}, and the last try failed just now: {self._failure}")
        try:
            client = self.ensure()
        except Exception as error:  # whatever it is, it lasts: nobody tries again at once
            self._failure = str(error)
            self._next_try_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            raise
        self._pause_s = _FIRST_PAUSE_S
        return client

    def require(self) -> KeeperClient:
        """Return the existing client. Raises KeeperError if there is none."""
        if self._client is None:
            raise KeeperError(NOT_CONNECTED)
        return self._client

    def send(self, message: m.Message) -> None:
        """Send a message on the existing connection. Raises KeeperError if there is none."""
        self.require().send(message)

    def request(self, message: m.Message, answer: type[A], *, timeout_s: float) -> A:
        """Send a request to the keeper, connecting first if necessary."""
        try:
            return self.ensure().request(message, answer, timeout_s=timeout_s)
        except NeverSent:  # the keeper died just now, before its loss was noticed
            return self.ensure().request(message, answer, timeout_s=timeout_s)

    def say_goodbye(self, timeout_s: float) -> None:
        """Send the goodbye; the successor of a keeper that died discovers what is in memory."""
        deadline = time.monotonic() + timeout_s
        for pause_s in _GOODBYE_PAUSES_S:  # the keeper may die meanwhile, or take a moment
            with contextlib.suppress(KeeperError):
                self.request(m.Goodbye(), m.Done, timeout_s=timeout_s)
                return
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        self.request(m.Goodbye(), m.Done, timeout_s=max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Disconnect permanently: no later connection is made."""
        self._is_over = True
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection if there is one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


# Requests a slot for a capture on the worker thread, and waits for the grant. A keeper that cannot
# be reached or does not answer costs this save, and no later save waits for it.


#: Timeout for the keeper's explanation of a missing answer; the next save waits that long.
_EXPLAIN_S = 0.5


class SlotRequests:
    """Requests a slot for one capture after the other."""

    def __init__(self, line: KeeperSession) -> None:
        self._line = line
        self.was_granted = False
        """True once a slot was granted: the first grant takes longest, as memory must be
        allocated.
        """
        self._table, self.times = "", SaveTimes()
        self._turns = 0
        self._silent: tuple[KeeperClient, int] | None = None
        """The client that left a request unanswered, and its count of received messages at that
        time.
        """

    def request_slot(self, capture: CaptureTask, *, is_copying: bool) -> m.Grant:
        """Request a slot; raises SnapshotSkipped if no rank gets one."""
        fenced = capture.store.state.fenced
        if fenced:
            raise Fenced(fenced)
        try:
            client = self._reach_keeper()
        except (Fenced, UsageError, FormatError):
            raise
        except (HoldfastError, OSError):
            capture.tell(Unreached())  # nobody received the request: a durable save is owed
            raise
        self._turns += 1
        capture.tell(Requested(self._turns))
        table = capture.description.table_hash
        if table != self._table:
            self._table, self.times = table, SaveTimes()  # those of another state say nothing
        spare_ms = 0 if capture.durable else self.times.spare_ms
        self.times.requested(capture.number, time.monotonic(), spare_ms)
        client.send(
            m.RequestCapture(
                step=capture.step,
                table=table,
                durable=capture.durable,
                values_bytes=len(capture.description.values),
                exact=capture.exact,
                request_number=self._turns,
                updates=tuple(capture.trained.updates.items()),
                is_copying=is_copying,
                spare_ms=spare_ms,
            )
        )
        capture.answered.wait()  # ended by the fence, the keeper, or the loss of the keeper
        known = capture.known
        if known.cancelled and not isinstance(known.answer, m.Grant):
            if known.is_unanswered:
                capture.tell(Explained(self._why_unanswered(client, capture.step)))
            client.send(m.CancelRequest(step=capture.step))
        if not isinstance(known.answer, m.Grant):
            self.times = SaveTimes()  # who may have been late is given more time for once
        capture.check()
        if not isinstance(known.answer, m.Grant):
            reason = known.answer.reason if known.answer is not None else "no answer"
            raise SnapshotSkipped(f"step {capture.step} was skipped on all ranks: {reason}")
        self.was_granted = True
        return known.answer

    def _why_unanswered(self, client: KeeperClient, step: int) -> str:
        """Ask the keeper whom it waits for. A keeper that does not answer is marked as silent."""
        received_before = client.received_count
        try:
            answer = client.request(m.Explain(step=step), m.Explanation, timeout_s=_EXPLAIN_S)
        except DeadlineExceeded:
            self._silent = client, received_before
            return ""
        return f": {answer.text}"

    def _reach_keeper(self) -> KeeperClient:
        """Return the client of a keeper that is not marked as silent on this connection."""
        if self._line.is_open and self._is_silent(self._line.require()):
            raise SnapshotSkipped(
                "the keeper has not answered since the last save (is it stopped?)"
            )
        return self._line.ensure_for_save()

    def _is_silent(self, client: KeeperClient) -> bool:
        """Return True if the keeper left a request unanswered and has sent nothing since."""
        return self._silent is not None and self._silent == (client, client.received_count)


# Sends and queries announcements of due steps, and requests durability of the newest snapshot. From
# any thread, also while the training thread hangs in a collective.


class StepAnnouncements:
    """Step announcements of one rank, over the connection of its saves."""

    def __init__(self, line: KeeperSession, store: SaveStore) -> None:
        self._line, self._store = line, store

    def announce(self, step: int, which: str) -> None:
        """Announce a save by the policy ``which`` at ``step``, which all ranks have yet to
        reach.
        """
        with contextlib.suppress(KeeperError):  # the next attempt is as good
            self._line.send(m.Announce(step=step, which=which))

    def consume_announced(self, step: int, which: str, after: int | None = None) -> bool:
        """Return True once if ``which`` was announced for ``step`` or a skipped earlier one.

        Steps need not be consecutive, so the announced step may never come. ``after``:
        announcements up to that step do not count any more.
        """
        found = self._store.state.due(step, which)
        if found:
            self._store.tell(Consumed(found))
        return any(after is None or n > after for n, _ in found)

    def was_announced(self, step: int | None, which: str) -> bool:
        """Return True if ``which`` was announced for ``step`` or an earlier one; None: for any
        step.
        """
        announced = self._store.state.announced
        return any(name == which and (step is None or n <= step) for n, name in announced)

    def reach_keeper(self) -> bool:
        """Connect to the keeper, starting a new one if it died; return True if connected. May
        block.

        Never on the training thread: a step waits for no keeper.
        """
        with contextlib.suppress(HoldfastError):
            self._line.ensure()
            return True
        return False

    def make_newest_durable(self) -> bool:
        """Ask the keeper to make the newest snapshot durable; return True if the request was sent.

        Never on the training thread.
        """
        with contextlib.suppress(HoldfastError):
            self._line.ensure().send(m.MakeDurable(step=0, newest=True))
            return True
        return False

    @property
    def is_newest_settled(self) -> bool:
        """Return True if the newest snapshot in memory is durable too, or was refused by
        storage.
        """
        return self._store.state.is_newest_settled


# Handles the keeper's notifications on the listener thread, and updates captures and handles. A
# message that must be answered is returned to the owner of the connection.


class KeeperNotifications:
    """Applies the keeper's notifications: to what is known, then to the waiting threads and
    handles.
    """

    def __init__(self, promises: PendingHandles) -> None:
        self._promises, self._store = promises, promises.store

    def handle(
        self, message: m.Message, current: CaptureTask | None, place: RankIdentity
    ) -> m.Message | None:
        """Handle one notification; return the reply to send, or None."""
        before, after = self._tell(message, current)
        match message:
            case m.RequestTable(hash=hash_) if current is not None:
                described = current.description
                if described.table_hash == hash_:  # else it was asked for an earlier save
                    return m.LeafTable(hash=hash_, deflated=deflate(described.table))
            case m.Grant() if after.capture.answer is not message:
                # Too late: nobody waits for the grant any more.
                return m.AbortCapture(attempt=message.attempt, reason="its save was given up")
            case m.Aborted() if not before.is_of_an_earlier_try(message):
                kind = CaptureOvertaken if message.overtaken else SnapshotSkipped
                error = kind(message.reason, leaf=message.leaf)
                self._promises.fail(message.step, error, captured=False)
            case m.Complete() | m.Durable() | m.NotDurable() | m.ReplicaDifferences():
                self._record_outcome(message, place)
            case m.Cached(step=step):
                self._promises.cached(step)
            case m.Protected(step=step):
                self._promises.protected(step)
            case m.Unprotected():
                self._not_protected(message, place)
            case m.RingSpaceFreed(attempt=attempt, size_bytes=size_bytes):
                if current is not None and current.known.is_granted(attempt):
                    current.room.freed(size_bytes)
        if current is not None:
            current.wake()
        return None

    def lost(self, reason: str, current: CaptureTask | None) -> None:
        """Handle the loss of the keeper; the next save starts another one."""
        why = f"the keeper went away: {reason}"
        self._tell(KeeperGone(why), current)
        if current is not None:
            current.wake()
        self._promises.fail_all(why)

    def _tell(self, event: Event, current: CaptureTask | None) -> tuple[SaveState, SaveState]:
        """Change what is known, and let nobody wait for ring space of a cancelled capture."""
        before, after = self._store.tell(event)
        is_mine = current is not None and current.number == after.capture.number
        reason = _why_cancelled(event, before, after)
        if current is not None and is_mine and reason:
            current.room.close(reason)  # its copier may still wait, though all is read
        return before, after

    def _record_outcome(
        self,
        message: m.Complete | m.Durable | m.NotDurable | m.ReplicaDifferences,
        place: RankIdentity,
    ) -> None:
        match message:
            case m.Complete(step=step):
                self._promises.captured(step)
            case m.Durable(step=step):
                self._promises.durable(step)
            case m.NotDurable():
                self._not_durable(message, place)
            case m.ReplicaDifferences():
                self._differ(message, place)

    def _differ(self, message: m.ReplicaDifferences, place: RankIdentity) -> None:
        for event in difference_events(message, place.incarnation, place.rank):
            if place.rank in (0, *event.ranks):  # reported by rank 0 and the ranks concerned
                emit(event)
        self._promises.differ(message.step, {each.leaf: each.ranks for each in message.leaves})

    def _not_protected(self, message: m.Unprotected, place: RankIdentity) -> None:
        step, reason = message.step, message.reason
        if place.rank == 0:  # every rank is notified, and one reports it
            emit(
                SnapshotNotProtected(
                    incarnation=place.incarnation, step=step, rank=0, reason=reason
                )
            )
        error = NotProtected(
            f"step {step} is captured and not protected: {reason}",
            generation=f"{place.incarnation}-{step}",
            host=message.host,
        )
        self._promises.not_protected(step, error)

    def _not_durable(self, message: m.NotDurable, place: RankIdentity) -> None:
        if place.rank == 0:  # every rank is notified, and one reports it
            emit(
                PersistBroke(
                    incarnation=place.incarnation, step=message.step, rank=0, reason=message.reason
                )
            )
        error = PersistFailed(f"step {message.step}: {message.reason}")
        self._promises.not_durable(message.step, message.since, error, captured=message.in_memory)


def _why_cancelled(event: Event, before: SaveState, after: SaveState) -> str:
    """Return why nothing more becomes of the capture; "" if ``event`` does not end it."""
    match event:
        case KeeperGone(reason=reason) if before.capture.is_open:
            return reason
        case m.Aborted(step=step, reason=reason) if step == after.capture.step:
            return "" if before.is_of_an_earlier_try(event) else reason
        case m.FencedOff():
            return after.fenced
        case _:
            return ""
