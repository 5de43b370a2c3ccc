"""One rank's side of every save: describe and stage on the training thread, the rest behind it.

The training thread gives its state away and goes on; a worker asks for a slot, copies, seals.
At most one capture is under way, and ``fence`` lets no update begin that would overtake it.
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

import torch
from torch.optim import Optimizer

from holdfast.errors import (
    CaptureOvertaken,
    Fenced,
    HoldfastError,
    KeeperError,
    PersistFailed,
    SnapshotSkipped,
)
from holdfast.events import FenceWaited, KeeperLost, SaveReturned, SnapshotMissed, emit
from holdfast.snapshot import messages as m
from holdfast.snapshot.announcing import Announcing
from holdfast.snapshot.asking import Asking
from holdfast.snapshot.capture import Overtaking, Stopped, computation_so_far, stage
from holdfast.snapshot.client import KeeperClient, NeverSaid
from holdfast.snapshot.collected import Work, end_worker, weakly, when_collected, work_off
from holdfast.snapshot.copier import Copier
from holdfast.snapshot.handle import SaveHandle
from holdfast.snapshot.heard import Heard
from holdfast.snapshot.line import LINE_IS_DOWN, Line
from holdfast.snapshot.promises import Promises
from holdfast.snapshot.stillness import Steps, Stillness
from holdfast.snapshot.underway import Capture, Patience, Place
from holdfast.state.describe import Describer

A = TypeVar("A", bound=m.Message)

#: A client that has this place at the keeper, given whether slots may still be written to and
#: whether a durable save is owed, who hears what the keeper says by itself, and who hears that
#: it went away.
Connect = Callable[
    [Place, bool, bool, Callable[[m.Message], None], Callable[[str], None]], KeeperClient
]
#: What a save that was given up before anything was granted has to end, and one being copied
#: that is left behind.
_GIVEN_UP_S, _STOP_S = 1.0, 1.0
_EXPLAIN_S = 5.0
#: Between tries to take leave of a keeper that goes away itself.
_GOODBYE_PAUSES_S = 0.1, 0.5


class Saver:
    """Takes snapshots of one state on one rank. Not for several training threads at once."""

    def __init__(
        self, describer: Describer, place: Place, connect: Connect, patience: Patience,
        *, parity: int = 0,
    ) -> None:  # fmt: skip
        self.describer = describer
        self.place = place
        self.patience = patience
        self._parity = parity
        self.updates = 0
        """How many updates passed the fence; tells whether the state changed since a save."""
        self._connect = connect
        self._line = Line(self._take_place)
        self._promises = Promises()
        self._heard = Heard(self._promises)
        self._copier = Copier()
        self._steps, self._stillness = Steps(), Stillness()
        self._current: Capture | None = None
        self._overdue: Capture | None = None
        self._end_by_s = math.inf
        self._asking = Asking(self._line, self._heard)
        self.announcing = Announcing(self._line, self._heard, self._promises)
        self._work: Work[Saver] = Work()
        self._worker = threading.Thread(
            target=work_off, args=(self._work,), name="holdfast-capture", daemon=True
        )
        self._worker.start()
        when_collected(self, end_worker, os.getpid(), self._work, self._copier.slots.files)

    # ── on the training thread ───────────────────────────────────────────────────────────

    def save(
        self, step: int, *, durable: bool, exact: bool, carried: list[SaveHandle]
    ) -> SaveHandle:
        """Give the state at ``step`` away; ``carried`` handles are fulfilled by it too.

        ``exact``: if durable, then this step and not a later one.
        """
        started_s = time.monotonic()
        waited_s = self._wait_previous()
        began_s = time.monotonic()
        description = self.describer.describe()
        bindings = description.bindings
        described_s = time.monotonic()
        stage(bindings.volatile)
        staged_s = time.monotonic()
        handle = self._handle(step, durable)
        capture = Capture(
            step=step,
            durable=durable,
            exact=exact,
            description=description,
            overtaking=Overtaking(bindings),
            handle=handle,
            started_s=started_s,
            trained=self._steps.take(bindings, self.describer.optimizers()),
            ready=computation_so_far(bindings.gpus),
        )
        for other in carried:
            other.move_to(step)
        self._promises.add(step, [handle, *carried])
        self._current = capture
        self._work.put((self, capture))
        emit(SaveReturned(
            incarnation=self.place.incarnation, step=step, rank=self.place.rank, durable=durable,
            held_s=time.monotonic() - started_s, describe_s=described_s - began_s,
            volatile_s=staged_s - described_s, wait_previous_s=waited_s,
            leaves=len(bindings), size_bytes=bindings.size_bytes,
        ))  # fmt: skip
        return handle

    def _handle(self, step: int, durable: bool) -> SaveHandle:
        return SaveHandle(step, durable=durable, explain=self.explain, parity=self._parity)

    def decline(self, step: int, durable: bool, error: Exception) -> SaveHandle:
        """This rank cannot save ``step``: tell the others, so that none waits for it."""
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(KeeperError):  # without a keeper nobody gets a snapshot
            self._line.send(m.Decline(step=step, reason=reason))
        emit(SnapshotMissed(
            incarnation=self.place.incarnation, step=step, rank=self.place.rank, reason=reason
        ))  # fmt: skip
        handle = self._handle(step, durable)
        handle.fail(SnapshotSkipped(reason), captured=False)
        return handle

    def make_durable(self, step: int) -> SaveHandle:
        """The last save, asked for again with durable=True."""
        handle = self._handle(step, True)
        self._promises.join(step, handle)
        try:
            self._wait_previous()
            self._line.require()
            self._promises.catch_up(step, handle)
            self._line.send(m.MakeDurable(step=step))
        except KeeperError as error:
            handle.fail(PersistFailed(str(error)), captured=False)
        return handle

    def fence(self) -> None:
        """Hold the caller until what an update overwrites is copied, or the capture given up."""
        self.updates += 1
        passed = None
        # Again, if a signal's handler saved once more while this waited.
        while (capture := self._current) is not None and capture is not passed:
            if not capture.released.is_set():
                started_s = time.monotonic()
                self._await_release(capture)
                emit(FenceWaited(
                    incarnation=self.place.incarnation, step=capture.step, rank=self.place.rank,
                    held_s=time.monotonic() - started_s,
                ))  # fmt: skip
            for event in capture.events:
                torch.cuda.current_stream(event.device).wait_event(event)
            passed = capture

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: what is saved next should have other parameters."""
        self._steps.note(optimizer)

    def hurry(self, end_by_s: float) -> None:
        """The process must end: from now on nothing is waited for beyond that time."""
        self._end_by_s = end_by_s

    def _at_most(self, wait_s: float) -> float:
        return min(wait_s, max(0.0, self._end_by_s - time.monotonic()))

    def _await_release(self, capture: Capture) -> None:
        patience = self.patience
        if not self._asking.was_granted:
            grant_s = patience.first_grant_s
        else:
            grant_s = patience.durable_grant_s if capture.durable else patience.grant_s
        if not capture.answered.wait(self._at_most(grant_s)):
            self._heard.is_silent = True  # until it says anything: no further step is held for it
            waited_s = min(grant_s, round(time.monotonic() - capture.started_s, 1))
            capture.call_off(f"no answer to the request for a slot within {waited_s:g} s")
        while not capture.wait_released(copy_s := self._at_most(patience.copy_s)):
            if time.monotonic() - capture.room.moved_at_s > copy_s:  # no ring, or stuck
                capture.call_off(f"the copy did not finish within {copy_s:g} s")
                return

    def _wait_previous(self) -> float:
        """One capture at a time: the one before must be sealed or given up."""
        capture = self._current
        if capture is None or capture.resolved.is_set():
            return 0.0
        started_s = time.monotonic()
        self._await_release(capture)
        # Given up without a slot, it never reads the state: its worker only waits for the keeper.
        is_mere_wait = bool(capture.called_off) and not isinstance(capture.answer, m.Grant)
        wait_s = _GIVEN_UP_S if is_mere_wait else self._at_most(self.patience.durable_grant_s)
        # Waited for once: a connection that is being made can take as long as its deadline.
        if not capture.resolved.wait(0.0 if self._overdue is capture else wait_s):
            self._overdue = capture if is_mere_wait else None
            # Its worker may still read what the next save would stage over.
            raise SnapshotSkipped(f"the capture of step {capture.step} has not ended yet")
        return time.monotonic() - started_s

    def end_capture(self, *, timeout_s: float) -> bool:
        """Wait until the capture under way is told to the keeper, or was given up; if it was."""
        return self._current is None or self._current.resolved.wait(timeout_s)

    def previous_was_skipped(self) -> bool:
        """Whether no rank captured the save before."""
        self._wait_previous()
        return self._current is not None and self._current.is_carried

    @property
    def previous_was_lost(self) -> bool:
        """Whether the save before is not durable, as it was to be, because a keeper was lost."""
        return self._current is not None and self._current.durable_lost

    def is_whole(self, step: int, *, timeout_s: float) -> bool:
        """Whether the keeper has all of ``step`` in memory, as far as it can be asked."""
        with contextlib.suppress(HoldfastError):
            return self.request(
                m.Explain(step=step), m.Explanation, timeout_s=timeout_s
            ).is_whole  # fmt: skip
        return False

    def explain(self, step: int) -> str:
        """In words: what the save of ``step`` waits for."""
        if not self._line.is_up:
            return LINE_IS_DOWN
        try:
            client = self._line.require()
            wait_s = self._at_most(_EXPLAIN_S)
            answer = client.request(m.Explain(step=step), m.Explanation, timeout_s=wait_s)
        except HoldfastError as error:
            return f"the keeper does not say why ({error})"
        return answer.text

    @property
    def is_fenced(self) -> str:
        """Why nothing more is saved by this process; "" while all is well."""
        return self._heard.fenced

    def request(self, message: m.Message, answer: type[A], *, timeout_s: float) -> A:
        """Ask the keeper something, connecting first if need be."""
        try:
            return self._line.ensure().request(message, answer, timeout_s=timeout_s)
        except NeverSaid:  # it died just now, and nobody had noticed
            return self._line.ensure().request(message, answer, timeout_s=timeout_s)

    def reconnect(self) -> None:
        """Take this rank's place, as ``self.place`` now says, at the keeper."""
        self._line.hang_up()
        self._line.ensure()

    @property
    def is_copying(self) -> bool:
        """Whether any slot may still be written to.

        From the moment a grant is heard until its worker is done with it; for good when a GPU
        stopped answering. The keeper frees slots on this word: in doubt it is True.
        """
        current = self._current
        if current is None or not isinstance(current.answer, m.Grant):
            return self._copier.lost_a_copy
        return self._copier.lost_a_copy or not current.resolved.is_set()

    def close(self, *, timeout_s: float, say_goodbye: bool = True) -> None:
        """End the capture under way, say goodbye, and let go of all memory.

        Without a goodbye the keeper takes this rank for lost, and keeps what it has. So it must
        be when the copying does not end: the memory it writes to then stays mapped, and its slot
        is given to nobody.
        """
        has_ended = False
        try:
            if say_goodbye:
                self._wait_previous()
        finally:
            try:
                has_ended = self._end_worker(timeout_s)
                if has_ended and say_goodbye and not self.is_fenced:
                    self._say_goodbye(timeout_s)
            finally:
                self._line.end()
                if has_ended:
                    self._copier.slots.close()

    def _say_goodbye(self, timeout_s: float) -> None:
        """A keeper that died meanwhile is replaced: the next finds what is in memory."""
        deadline = time.monotonic() + timeout_s
        for pause_s in _GOODBYE_PAUSES_S:  # it may die in the middle, or take a moment to die
            with contextlib.suppress(KeeperError):
                self.request(m.Goodbye(), m.Done, timeout_s=timeout_s)
                return
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        self.request(m.Goodbye(), m.Done, timeout_s=max(0.0, deadline - time.monotonic()))

    def _end_worker(self, timeout_s: float) -> bool:
        """Let it finish, or have it give up; whether it has ended."""
        self._work.put(None)
        self._worker.join(timeout_s)
        if self._worker.is_alive() and self._current is not None:
            self._current.call_off("its process left while it was copied")
            self._worker.join(_STOP_S)
        return not self._worker.is_alive()

    # ── on the worker ────────────────────────────────────────────────────────────────────

    def work_off(self, capture: Capture | None) -> None:
        """Take a snapshot, whatever comes; None: see to the keeper. On the worker."""
        if capture is None:
            self._replace_keeper()
            return
        try:
            self._take(capture)
        except Exception as error:  # the worker must live on: training depends on its fence
            reason = f"{type(error).__name__}: {error}"
            self._miss(capture, reason)
            self._abandon(capture, reason)
        finally:
            capture.answered.set()
            capture.release()
            capture.resolved.set()

    def _take(self, capture: Capture) -> None:
        try:
            self._copier.slots.drop_removed()
            grant = self._asking.ask(capture, self.patience)
            layout = self._heard.layouts[grant.layout]
            seal, sample = self._copier.copy(
                capture, grant, layout, self.place, self._line.send, self.patience.room_s
            )
            self._line.send(m.Captured(
                attempt=grant.attempt, image_bytes=seal.image_bytes,
                header_xxh3=seal.header_xxh3, table_xxh3=seal.table_xxh3, sums=sample.sums,
                same_since=self._stillness.same_since(
                    capture.step, capture.trained, capture.parameters
                ),
            ))  # fmt: skip
            # Told before the fence opens: whoever is killed after an update has handed over the
            # step before it. The keeper throws away what a dead rank sealed but did not tell.
            capture.release()
        except (HoldfastError, Stopped) as error:
            leaf = error.fields["leaf"] if isinstance(error, CaptureOvertaken) else ""
            # Reported before the keeper hears of it, whose answer already fails the handle.
            self._miss(capture, str(error), leaf=leaf)
            self._abandon(capture, str(error), leaf)

    def _abandon(self, capture: Capture, reason: str, leaf: str = "") -> None:
        if not isinstance(capture.answer, m.Grant):
            return
        with contextlib.suppress(KeeperError):  # it learns it from our death, or the slot's record
            self._line.send(m.Abandon(
                attempt=capture.answer.attempt, reason=reason, leaf=leaf,
                has_stopped=not self._copier.lost_a_copy,
            ))  # fmt: skip

    def _miss(self, capture: Capture, reason: str, *, leaf: str = "") -> None:
        capture.call_off(reason)
        emit(SnapshotMissed(
            incarnation=self.place.incarnation, step=capture.step, rank=self.place.rank,
            reason=reason, overtaken=bool(leaf), leaf=leaf,
        ))  # fmt: skip
        # Who waits is told, as the next save may be far; a rank alone saves at its next step.
        if not capture.is_carried or capture.keeper_lost or self.place.world > 1:
            kind = CaptureOvertaken if leaf else SnapshotSkipped
            self._promises.fail(capture.step, kind(reason, leaf=leaf), captured=False)

    # ── the keeper ───────────────────────────────────────────────────────────────────────

    def keep_in_touch(self) -> None:
        """Have a keeper that went away replaced, behind this: ranks hear of each other by it."""
        if self._line.is_to_be_tried and self._work.empty() and not self.is_fenced:
            self._work.put((self, None))

    def _replace_keeper(self) -> None:
        """Before the next save, as others may wait for what this rank asked the one before."""
        with contextlib.suppress(Exception):  # no memory for a process, say: the worker lives on
            client = self._line.ensure_for_save()
            lost = self._current
            if lost is not None and lost.keeper_lost and not isinstance(lost.answer, m.Grant):
                reason = "its keeper went away"
                client.send(m.Decline(step=lost.step, reason=reason, is_passing=True))

    def _take_place(self) -> KeeperClient:
        try:
            client = self._connect(
                self.place, self.is_copying, self._promises.owes_durable, weakly(self._hear),
                weakly(self._lost),
            )  # fmt: skip
        except Fenced as error:
            self._heard.fenced = str(error)
            raise
        self._heard.is_silent = False  # this one was not asked for a slot yet
        return client

    def _hear(self, message: m.Message) -> None:
        """On the listening thread: what the keeper says by itself."""
        answer = self._heard.hear(message, self._current, self.place)
        if answer is not None:
            self._line.send(answer)

    def _lost(self, reason: str) -> None:
        """On the listening thread: the keeper went away."""
        emit(KeeperLost(
            incarnation=self.place.incarnation, rank=self.place.rank, reason=reason
        ))  # fmt: skip
        self._heard.lost(reason, self._current)
        if self.place.world > 1:
            self.keep_in_touch()
