"""One rank's saves: hands state to a worker to capture, and fences updates until it is copied.

The training thread hands over its state and continues; a worker requests a slot, copies and seals.
At most one capture is in progress, and ``fence`` delays every update that would overtake it.
Trouble with the keeper or with memory costs a snapshot, never a step.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torch.optim import Optimizer

from holdfast.accelerator import devices
from holdfast.capture.copier import Copier
from holdfast.capture.handles import PendingHandles, SaveHandle
from holdfast.capture.mesh_teller import MeshTeller
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyCancelled
from holdfast.capture.replica_samples import OptimizerSteps, StandstillProbe
from holdfast.capture.save_state import NO_CAPTURE, Failed, FoundFenced, Unanswered, Unreached
from holdfast.capture.save_turns import StepBegan, Turns
from holdfast.capture.session import (
    NOT_CONNECTED,
    KeeperNotifications,
    KeeperSession,
    SlotRequests,
    StepAnnouncements,
)
from holdfast.capture.task import (
    CaptureQueue,
    CaptureTask,
    RankIdentity,
    Reading,
    Timeouts,
    call_later,
    finalize_weakly,
    run_worker,
    stop_worker,
    weakly,
)
from holdfast.capture.volatile_copies import stage
from holdfast.errors import (
    CaptureOvertaken,
    Fenced,
    HoldfastError,
    KeeperError,
    PersistFailed,
    SnapshotSkipped,
)
from holdfast.events import FenceWaited, KeeperLost, SaveReturned, SnapshotMissed, emit
from holdfast.protocol import messages as m
from holdfast.protocol.client import KeeperClient
from holdfast.state.describe import Describer

A = TypeVar("A", bound=m.Message)

#: Creates a client that has joined as this rank. Arguments: True if slots may still be written
#: to, the standing order (``Join.order``), the listener for notifications, the listener for the
#: loss of the keeper.
Connect = Callable[
    [RankIdentity, bool, m.StandingOrder, Callable[[m.Message], None], Callable[[str], None]],
    KeeperClient,
]
#: The copying of a capture that was cancelled before a grant must end within the first time; a
#: running copy is abandoned after the second.
_GIVEN_UP_S, _STOP_S = 1.0, 1.0
_EXPLAIN_S = 5.0


class Saver:
    """Takes snapshots of one state on one rank, one at a time (``turns``)."""

    def __init__(
        self,
        describer: Describer,
        place: RankIdentity,
        connect: Connect,
        patience: Timeouts,
        *,
        parity: int = 0,
        has_cache: bool = False,
    ) -> None:
        self.describer, self.place, self.timeouts = describer, place, patience
        self._parity, self._has_cache = parity, has_cache
        self.updates = 0
        """Number of updates that passed the fence; shows if the state changed since a save."""
        self._connect = connect
        self._session = KeeperSession(self._join_keeper)
        self._pending_handles = PendingHandles()
        self._store = self._pending_handles.store
        self._notifications = KeeperNotifications(self._pending_handles)
        self._copier = Copier()
        self._steps, self._standstill = OptimizerSteps(), StandstillProbe()
        self._current: CaptureTask | None = None
        self._overdue: CaptureTask | None = None
        self._reading: Reading | None = None
        self.turns = Turns(describer.is_changed_by)
        self._mesh_teller = MeshTeller()
        self._saves, self._end_by_s = 0, math.inf
        self._slot_requests = SlotRequests(self._session)
        self.announcements = StepAnnouncements(self._session, self._store)
        self._work: CaptureQueue[Saver] = CaptureQueue()
        self._worker = threading.Thread(
            target=run_worker, args=(self._work,), name="holdfast-capture", daemon=True
        )
        self._worker.start()
        finalize_weakly(self, stop_worker, os.getpid(), self._work, self._copier.slots.files)

    # ── on the training thread ───────────────────────────────────────────────────────────────────

    def save(
        self,
        step: int,
        *,
        durable: bool,
        exact: bool,
        is_repeated: bool = False,
        handle: SaveHandle | None = None,
    ) -> SaveHandle:
        """Hand over the state at ``step`` for capture.

        ``exact``: if durable, then this step and not a later one. ``is_repeated``: it also fulfils
        the missed save before. ``handle``: that of a deferred save. Raises StepBegan, before
        anything was read, if an optimizer steps.
        """
        started_s = time.monotonic()
        waited_s = self._wait_previous()
        reading = Reading()
        try:  # around all of it: an interrupt may come between any two lines
            self._reading = reading
            if self.turns.is_step_under_way:
                raise StepBegan
            handle = handle or self.handle(step, durable=durable)
            handle.exact = exact
            return self._hand_over(
                step, handle, reading, is_repeated, started_s=started_s, waited_s=waited_s
            )
        finally:
            self._reading = None
            reading.over.set()

    def _hand_over(
        self,
        step: int,
        handle: SaveHandle,
        reading: Reading,
        is_repeated: bool,
        *,
        started_s: float,
        waited_s: float,
    ) -> SaveHandle:
        began_s = time.monotonic()
        description = self.describer.describe(is_checked=not handle.durable)
        bindings = description.bindings
        described_s = time.monotonic()
        stage(bindings.volatile, bindings.gpus)
        staged_s = time.monotonic()
        self._saves += 1
        capture = CaptureTask(
            self._saves,
            self._store,
            step=step,
            durable=handle.durable,
            exact=handle.exact,
            description=description,
            overtaking=OvertakeDetector(bindings),
            handle=handle,
            started_s=started_s,
            trained=self._steps.collect(bindings, self.describer.optimizers),
            ready=devices.computation_so_far(bindings.gpus),
        )
        missed = self.unpaid() if is_repeated else []
        self._pending_handles.add(step, [handle, *missed])
        try:  # around all of it, as the fence waits for it from the first line on
            self._current = capture
            capture.begin()
            if reading.is_overtaken:  # checked after the line above: the fence checks it
                capture.cancel("the state was not described by the time an update had to begin")
            self._work.put((self, capture))
        except BaseException:
            capture.give_up("its save was interrupted")
            self._work.put((self, capture))  # once more, perhaps
            raise
        emit(
            SaveReturned(
                incarnation=self.place.incarnation,
                step=step,
                rank=self.place.rank,
                durable=handle.durable,
                held_s=time.monotonic() - started_s,
                describe_s=described_s - began_s,
                volatile_s=staged_s - described_s,
                wait_previous_s=waited_s,
                leaves=len(bindings),
                size_bytes=bindings.size_bytes,
            )
        )
        self._mesh_teller.tell(self.place, step, description)
        return handle

    def unpaid(self) -> list[SaveHandle]:
        """Return the handles of the last save that are to be durable and are not."""
        return [] if self._current is None else self._pending_handles.unpaid(self._current.step)

    def handle(self, step: int, *, durable: bool) -> SaveHandle:
        """Create the handle of a requested save."""
        made = SaveHandle(
            step,
            durable=durable,
            explain=self.explain,
            add_helper=self._add_helper,
            parity=self._parity,
        )
        made.has_cache = self._has_cache
        return made

    def _add_helper(self, step: int) -> None:
        """Let a second thread copy ``step`` while the thread that saved it waits."""
        capture, thread = self._current, threading.get_native_id()
        if capture is not None and (capture.step, capture.thread) == (step, thread):
            capture.add_helper()

    def decline(
        self, step: int, durable: bool, error: Exception, handle: SaveHandle | None = None
    ) -> SaveHandle:
        """Tell the other ranks that this one cannot save ``step``, so that none waits for it."""
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(KeeperError):  # without a keeper no rank gets a snapshot
            self._session.send(m.DeclineStep(step=step, reason=reason))
        emit(
            SnapshotMissed(
                incarnation=self.place.incarnation, step=step, rank=self.place.rank, reason=reason
            )
        )
        handle = handle or self.handle(step, durable=durable)
        handle.fail(SnapshotSkipped(reason), captured=False)
        return handle

    def join(self, step: int, handle: SaveHandle) -> SaveHandle:
        """Request the last save again: ``handle`` gets its current and its later states."""
        self._pending_handles.join(step, handle)
        self._pending_handles.catch_up(step, handle)
        return handle

    def make_durable(self, step: int, handle: SaveHandle | None = None) -> SaveHandle:
        """Request the last save again with durable=True."""
        handle = handle or self.handle(step, durable=True)
        self._pending_handles.join(step, handle)
        try:
            self._wait_previous()
            self._session.require()
            self._pending_handles.catch_up(step, handle)
            self._session.send(m.MakeDurable(step=step))
        except KeeperError as error:
            handle.fail(PersistFailed(str(error)), captured=False)
        return handle

    def fence(self) -> None:
        """Block until the data that an update overwrites is copied, or the capture is cancelled."""
        self._await_reading()
        passed = None
        # Repeat if a signal handler saved once more during the wait.
        while (capture := self._current) is not None and capture is not passed:
            if capture.is_update_recorded():
                self._await_release(capture)
                capture.resolved.wait(self._at_most(self.timeouts.copy_s))  # replays wait for none
                return
            self._slot_requests.times.update_came(capture.number, time.monotonic())
            if not capture.released.is_set():
                started_s = time.monotonic()
                self._await_release(capture)
                emit(
                    FenceWaited(
                        incarnation=self.place.incarnation,
                        step=capture.step,
                        rank=self.place.rank,
                        held_s=time.monotonic() - started_s,
                    )
                )
            capture.order_updates()
            passed = capture
        self.updates += 1  # now, as a save during the wait is still of the state before

    def stepping(self, optimizer: Optimizer) -> None:
        """Note that an optimizer is about to step: the next save should have other parameters."""
        self._steps.note(optimizer)

    def stepped(self, optimizer: Optimizer | None) -> None:
        """Count a whole step of ``optimizer``; None: an update by no torch optimizer."""
        self._steps.count(optimizer)

    def steps_ended(self) -> None:
        """Execute deferred saves, because this thread is in no step any more."""
        self.turns.drain(patience_s=self.turn_s)

    @property
    def has_deferred(self) -> bool:
        """Return True if a save waits for the end of a step."""
        return self.turns.has_deferred

    @property
    def turn_s(self) -> float:
        """Return how long a save waits for the save of another thread."""
        return self._at_most(self.timeouts.durable_grant_s)

    def restart(self) -> None:
        """Reset the update counts after another state was loaded."""
        self._steps.restart()

    def _await_reading(self) -> None:
        """Wait while another thread describes the state for a save: no update begins before."""
        reading = self._reading
        if reading is None or reading.thread == threading.get_ident():
            return
        reading.is_overtaken = not reading.over.wait(self._at_most(self.timeouts.copy_s))

    def hurry(self, end_by_s: float) -> None:
        """Limit all waits to that time, because the process must end."""
        self._end_by_s = end_by_s

    def _at_most(self, wait_s: float) -> float:
        return min(wait_s, max(0.0, self._end_by_s - time.monotonic()))

    def _await_release(self, capture: CaptureTask) -> None:
        patience = self.timeouts
        if not self._slot_requests.was_granted:
            grant_s = patience.first_grant_s
        else:
            grant_s = patience.durable_grant_s if capture.durable else patience.grant_s
        wait_s = self._slot_requests.times.wait_s(capture.number, time.monotonic(), grant_s)
        if not capture.answered.wait(self._at_most(wait_s)):
            capture.tell(Unanswered())
            waited_s = min(grant_s, round(time.monotonic() - capture.started_s, 1))
            capture.cancel(f"no answer to the request for a slot within {waited_s:g} s")
        while not capture.wait_released(copy_s := self._at_most(patience.copy_s)):
            if time.monotonic() - capture.room.moved_at_s > copy_s:  # no ring, or no progress in it
                capture.cancel(f"the copy did not finish within {copy_s:g} s")
                return

    def _wait_previous(self) -> float:
        """Wait until the previous capture is sealed or cancelled: at most one is in progress."""
        capture = self._current
        if capture is None or capture.resolved.is_set():
            return 0.0
        started_s = time.monotonic()
        self._await_release(capture)
        # A capture cancelled without a slot never reads the state: its worker only waits for the
        # keeper.
        known = capture.known
        is_mere_wait = bool(known.cancelled) and not isinstance(known.answer, m.Grant)
        wait_s = _GIVEN_UP_S if is_mere_wait else self._at_most(self.timeouts.durable_grant_s)
        # Waited for only once: connecting can take as long as its deadline.
        if not capture.resolved.wait(0.0 if self._overdue is capture else wait_s):
            self._overdue = capture if is_mere_wait else None
            # Its worker may still read the staging buffers that the next save would overwrite.
            raise SnapshotSkipped(f"the capture of step {capture.step} has not ended yet")
        return time.monotonic() - started_s

    def end_capture(self, *, timeout_s: float) -> bool:
        """Wait until the capture in progress is reported or cancelled; return True if it is."""
        return self._current is None or self._current.resolved.wait(timeout_s)

    def previous_was_skipped(self) -> bool:
        """Return True if no rank captured the previous save."""
        self._wait_previous()
        return self._current is not None and self._current.known.is_carried

    @property
    def is_capturing(self) -> bool:
        """Return True if the previous save may still be captured: nothing was missed so far."""
        current = self._current
        return current is not None and not (current.known.cancelled or current.resolved.is_set())

    @property
    def previous_was_lost(self) -> bool:
        """Return True if the previous save should be durable and is not, because a keeper was
        lost.
        """
        return self._current is not None and self._current.known.durable_lost

    def is_whole(self, step: int, *, timeout_s: float) -> bool:
        """Return True if the keeper reports all of ``step`` in memory; False if it cannot be
        asked.
        """
        with contextlib.suppress(HoldfastError):
            return self.request(m.Explain(step=step), m.Explanation, timeout_s=timeout_s).is_whole
        return False

    def explain(self, step: int) -> str:
        """Describe in words what the save of ``step`` waits for."""
        if not self._session.is_up:
            return NOT_CONNECTED
        try:
            client = self._session.require()
            wait_s = self._at_most(_EXPLAIN_S)
            answer = client.request(m.Explain(step=step), m.Explanation, timeout_s=wait_s)
        except HoldfastError as error:
            return f"the keeper does not say why ({error})"
        return answer.text

    @property
    def is_fenced(self) -> str:
        """Return the reason why this process saves no more; "" if it may save."""
        return self._store.state.fenced

    def request(self, message: m.Message, answer: type[A], *, timeout_s: float) -> A:
        """Send a request to the keeper, connecting first if necessary."""
        return self._session.request(message, answer, timeout_s=timeout_s)

    def reconnect(self) -> None:
        """Join as this rank, as given by ``self.place``, at the keeper."""
        self._session.disconnect()
        self._session.ensure()

    @property
    def is_copying(self) -> bool:
        """True if any slot may still be written to.

        That is from the receipt of a grant until the worker is done with it; permanently if a GPU
        stopped answering. The keeper frees slots relying on this value: in doubt it is True.
        """
        current = self._current
        if current is None or not isinstance(current.known.answer, m.Grant):
            return self._copier.lost_a_copy
        return self._copier.lost_a_copy or not current.resolved.is_set()

    def close(self, *, timeout_s: float, say_goodbye: bool = True) -> None:
        """End the capture in progress, say goodbye, and unmap all memory.

        Without a goodbye the keeper treats this rank as lost, and keeps its memory. This happens if
        the copying does not end: the memory that it writes to then stays mapped, and its slot is
        not reused.
        """
        has_ended = False
        try:
            if say_goodbye:
                self._wait_previous()
        finally:
            try:
                has_ended = self._end_worker(timeout_s)
                if has_ended and say_goodbye and not self.is_fenced:
                    self._session.say_goodbye(timeout_s)
            finally:
                self._session.end()
                if has_ended:
                    self._copier.slots.close()

    def _end_worker(self, timeout_s: float) -> bool:
        """Let the worker finish, or cancel its capture; return True if it has ended."""
        self._work.put(None)
        self._worker.join(timeout_s)
        if self._worker.is_alive() and self._current is not None:
            self._current.cancel("its process left while it was copied")
            self._worker.join(_STOP_S)
        return not self._worker.is_alive()

    # ── on the worker ────────────────────────────────────────────────────────────────────────────

    def execute(self, capture: CaptureTask | None) -> None:
        """Execute a capture and record any error; None: reconnect the keeper. On the worker."""
        if capture is None:
            self._replace_keeper()
            return
        try:
            with devices.work_beside(capture.ready):
                self._capture(capture)
        except Exception as error:  # the worker must survive: training depends on its fence
            reason = f"{type(error).__name__}: {error}"
            self._report_missed(capture, reason)
            self._abandon(capture, reason)
        finally:
            capture.resolve()

    def _capture(self, capture: CaptureTask) -> None:
        try:
            self._copier.slots.drop_removed()
            # The worker takes one capture after the other: the one before copies no more, unless
            # a GPU stopped answering.
            asked_s = time.monotonic()
            grant = self._slot_requests.request_slot(capture, is_copying=self._copier.lost_a_copy)
            granted_s = time.monotonic()
            capture.grant_s = granted_s - asked_s
            seal, sample = self._copier.copy(
                capture, grant, self.place, self._session.send, self.timeouts.room_s
            )
            self._session.send(
                m.Captured(
                    attempt=grant.attempt,
                    image_bytes=seal.image_bytes,
                    header_xxh3=seal.header_xxh3,
                    table_xxh3=seal.table_xxh3,
                    sums=sample.sums,
                    same_since=self._standstill.same_since(
                        capture.step, capture.trained, capture.parameters
                    ),
                )
            )
            # Reported before the fence opens: a rank killed after an update has handed over the
            # step before it. The keeper discards images that a dead rank sealed but did not report.
            capture.release()
            self._slot_requests.times.copied(time.monotonic() - granted_s)
        except (HoldfastError, CopyCancelled) as error:
            is_lost = isinstance(error, KeeperError) and not isinstance(error, Fenced)
            if is_lost:  # noticed here first, perhaps: a durable save is owed
                capture.tell(Unreached())
            leaf = error.fields["leaf"] if isinstance(error, CaptureOvertaken) else ""
            # Emitted before the keeper receives it, because the keeper's answer already fails the
            # handle.
            self._report_missed(capture, str(error), leaf=leaf)
            self._abandon(capture, str(error), leaf)

    def _abandon(self, capture: CaptureTask, reason: str, leaf: str = "") -> None:
        answer = capture.known.answer
        if not isinstance(answer, m.Grant):
            return
        with contextlib.suppress(KeeperError):  # its death, or the slot's record, tells the keeper
            self._session.send(
                m.AbortCapture(
                    attempt=answer.attempt,
                    reason=reason,
                    leaf=leaf,
                    has_stopped=not self._copier.lost_a_copy,
                )
            )

    def _report_missed(self, capture: CaptureTask, reason: str, *, leaf: str = "") -> None:
        capture.cancel(reason)
        emit(
            SnapshotMissed(
                incarnation=self.place.incarnation,
                step=capture.step,
                rank=self.place.rank,
                reason=reason,
                overtaken=bool(leaf),
                leaf=leaf,
            )
        )
        # Callers wait, and the next save may be far; a single rank saves at its next step.
        known = capture.known
        is_told = known.keeper_lost or known.is_unanswered or self.place.world > 1
        if is_told or not known.is_carried:
            capture.tell(Failed(capture.step))
            kind = CaptureOvertaken if leaf else SnapshotSkipped
            self._pending_handles.fail(capture.step, kind(reason, leaf=leaf), captured=False)

    # ── keeper connection ────────────────────────────────────────────────────────────────────────

    def keep_in_touch(self) -> None:
        """Reconnect in the background to a lost keeper: ranks reach each other through it."""
        if self._session.should_reconnect and self._work.empty() and not self.is_fenced:
            self._work.put((self, None))

    def _replace_keeper(self) -> None:
        """Connect to a new keeper before the next save, as other ranks may wait for this rank's
        request; if that fails, again after a pause.
        """
        try:
            client = self._session.ensure_for_save()
            lost = self._current
            known = NO_CAPTURE if lost is None else lost.known
            if lost is not None and known.keeper_lost and not isinstance(known.answer, m.Grant):
                reason = "its keeper went away"
                client.send(m.DeclineStep(step=lost.step, reason=reason, is_passing=True))
        except Exception:  # no memory for a process, say: the worker survives
            with contextlib.suppress(RuntimeError):  # no thread can be started: a step tries again
                call_later(self._session.retry_in_s, self.keep_in_touch)

    def _join_keeper(self) -> KeeperClient:
        try:
            client = self._connect(
                self.place,
                self.is_copying,
                self._store.state.order,
                weakly(self._handle_notification),
                weakly(self._lost),
            )
        except Fenced as error:
            self._store.tell(FoundFenced(str(error)))
            raise
        return client

    def _handle_notification(self, message: m.Message) -> None:
        """Handle a notification of the keeper. On the listener thread."""
        answer = self._notifications.handle(message, self._current, self.place)
        if answer is not None:
            self._session.send(answer)

    def _lost(self, reason: str) -> None:
        """Handle the loss of the keeper. On the listener thread."""
        emit(KeeperLost(incarnation=self.place.incarnation, rank=self.place.rank, reason=reason))
        self._notifications.lost(reason, self._current)
        if self.place.world > 1:
            self.keep_in_touch()
