"""One rank's side of every save: describe and stage on the training thread, the rest behind it.

The training thread gives its state away and goes on; a worker asks for a slot, copies, seals.
At most one capture is under way, and ``fence`` lets no update begin that would overtake it.
Trouble with the keeper or with memory costs a snapshot, never a step.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from holdfast.errors import (
    CaptureOvertaken,
    Fenced,
    HoldfastError,
    KeeperError,
    PersistFailed,
    SnapshotSkipped,
)
from holdfast.events import (
    FenceWaited,
    ImageCaptured,
    KeeperLost,
    SaveReturned,
    SnapshotMissed,
    emit,
)
from holdfast.format.image import fill_in
from holdfast.geometry.layout import Layout
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import SlotFile, SlotRecord, boot_id, process_start
from holdfast.snapshot.capture import (
    Overtaking,
    Progress,
    Seal,
    StillCopying,
    Stopped,
    Target,
    computation_so_far,
    copy_image,
    stage,
)
from holdfast.snapshot.client import KeeperClient
from holdfast.snapshot.collected import (
    Work,
    end_worker,
    unmap,
    weakly,
    when_collected,
    work_off,
)
from holdfast.snapshot.copies import CopyPlan, plan_copies
from holdfast.snapshot.handle import CAPTURED, DURABLE, SaveHandle
from holdfast.snapshot.pinning import pin_memory
from holdfast.snapshot.underway import Capture, Patience, Place
from holdfast.state.describe import Describer, Description

A = TypeVar("A", bound=m.Message)


Reconnect = Callable[[Callable[[m.Message], None], Callable[[str], None]], KeeperClient]


class Saver:
    """Takes snapshots of one state on one rank. Not for several training threads at once."""

    def __init__(
        self, describer: Describer, place: Place, connect: Reconnect, patience: Patience
    ) -> None:
        self.describer = describer
        self.place = place
        self.patience = patience
        self.announced: set[tuple[int, str]] = set()
        self.is_fenced = ""
        self._is_silent = False
        self.updates = 0
        """How many updates passed the fence; tells whether the state changed since a save."""
        self._connect = connect
        self._client: KeeperClient | None = None
        self._current: Capture | None = None
        self._known_table = ""
        self._layouts: dict[str, Layout] = {}
        self._plan: tuple[str, str, CopyPlan] | None = None
        self._slots: dict[str, SlotFile] = {}
        self._targets: dict[str, Target] = {}
        self._handles: dict[int, list[SaveHandle]] = {}
        self._turn = 0
        self._was_granted = False
        self._lost_a_copy = False
        self._boot_id = boot_id()
        self._process_start = process_start(os.getpid())
        self._work: Work[Saver] = Work()
        self._worker = threading.Thread(
            target=work_off, args=(self._work,), name="holdfast-capture", daemon=True
        )
        self._worker.start()
        when_collected(self, end_worker, self._work, self._slots)
        self._hang_up_when_collected: weakref.finalize[[], Saver] | None = None

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
        described_s = time.monotonic()
        stage(description.bindings)
        staged_s = time.monotonic()
        handle = SaveHandle(step, durable=durable, explain=self.explain)
        capture = Capture(
            step=step,
            durable=durable,
            exact=exact,
            description=description,
            overtaking=Overtaking(description.bindings),
            handle=handle,
            started_s=started_s,
            ready=computation_so_far(description.bindings),
        )
        for other in carried:
            other.move_to(step)
        self._handles.setdefault(step, []).extend([handle, *carried])
        self._forget_old_handles()
        self._current = capture
        self._work.put((self, capture))
        emit(SaveReturned(
            incarnation=self.place.incarnation, step=step, rank=self.place.rank, durable=durable,
            held_s=time.monotonic() - started_s, describe_s=described_s - began_s,
            volatile_s=staged_s - described_s, wait_previous_s=waited_s,
            leaves=len(description.bindings),
            size_bytes=sum(b.local.nbytes for b in description.bindings),
        ))  # fmt: skip
        return handle

    def decline(self, step: int, durable: bool, error: Exception) -> SaveHandle:
        """This rank cannot save ``step``: tell the others, so that none waits for it."""
        reason = f"{type(error).__name__}: {error}"
        if self._client is not None:
            with contextlib.suppress(KeeperError):
                self._client.send(m.Decline(step=step, reason=reason))
        emit(SnapshotMissed(
            incarnation=self.place.incarnation, step=step, rank=self.place.rank, reason=reason
        ))  # fmt: skip
        handle = SaveHandle(step, durable=durable, explain=self.explain)
        handle.fail(SnapshotSkipped(reason), captured=False)
        return handle

    def make_durable(self, step: int) -> SaveHandle:
        """The last save, asked for again with durable=True."""
        handle = SaveHandle(step, durable=True, explain=self.explain)
        self._handles.setdefault(step, []).append(handle)
        try:
            self._wait_previous()
            if self._client is None:
                raise KeeperError("the keeper of this host went away")
            for other in self._handles[step]:
                if other.state in (CAPTURED, DURABLE):
                    handle.reach(other.state)
            self._client.send(m.MakeDurable(step=step))
        except KeeperError as error:
            handle.fail(PersistFailed(str(error)), captured=False)
        return handle

    def fence(self) -> None:
        """Hold the caller until what an update overwrites is copied, or the capture given up."""
        self.updates += 1
        capture = self._current
        if capture is None:
            return
        if not capture.released.is_set():
            started_s = time.monotonic()
            self._await_release(capture)
            emit(FenceWaited(
                incarnation=self.place.incarnation, step=capture.step, rank=self.place.rank,
                held_s=time.monotonic() - started_s,
            ))  # fmt: skip
        for event in capture.events:
            torch.cuda.current_stream(event.device).wait_event(event)

    def _await_release(self, capture: Capture) -> None:
        patience = self.patience
        if not self._was_granted:
            grant_s = patience.first_grant_s
        else:
            grant_s = patience.durable_grant_s if capture.durable else patience.grant_s
        if not capture.answered.wait(grant_s):
            self._is_silent = True  # until it says anything: no further step is held for it
            capture.call_off(f"no answer to the request for a slot within {grant_s:g} s")
        if not capture.released.wait(patience.copy_s):
            capture.call_off(f"the copy did not finish within {patience.copy_s:g} s")

    def _wait_previous(self) -> float:
        """One capture at a time: the one before must be sealed or given up."""
        capture = self._current
        if capture is None or capture.resolved.is_set():
            return 0.0
        started_s = time.monotonic()
        self._await_release(capture)
        if not capture.resolved.wait(self.patience.durable_grant_s):
            # Its worker may still read what the next save would stage over.
            raise SnapshotSkipped(f"the capture of step {capture.step} has not ended yet")
        return time.monotonic() - started_s

    def end_capture(self, *, timeout_s: float) -> None:
        """Wait until the capture under way is told to the keeper, or was given up."""
        if self._current is not None:
            self._current.resolved.wait(timeout_s)

    def previous_was_skipped(self) -> bool:
        """Whether no rank captured the save before: known alike on every rank by now."""
        self._wait_previous()
        capture = self._current
        return capture is not None and capture.is_carried

    def explain(self, step: int) -> str:
        """In words: what the save of ``step`` waits for."""
        client = self._client
        if client is None:
            return "the keeper of this host went away"
        try:
            answer = client.request(m.Explain(step=step), m.Explanation, timeout_s=5.0)
        except HoldfastError as error:
            return f"the keeper does not say why ({error})"
        return answer.text

    def announce(self, step: int, which: str) -> None:
        """Rank 0: a timed save is due at ``step``, ahead of every rank, by the policy ``which``."""
        if self._client is not None:
            try:
                self._client.send(m.Announce(step=step, which=which))
            except KeeperError:
                return  # the next try is as good

    def request(self, message: m.Message, answer: type[A], *, timeout_s: float) -> A:
        """Ask the keeper something, connecting first if need be."""
        return self._ensure_client().request(message, answer, timeout_s=timeout_s)

    def reconnect(self) -> None:
        """Take this rank's place, as ``self.place`` now says, at the keeper."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._ensure_client()

    @property
    def is_copying(self) -> bool:
        """Whether any slot may still be written to.

        From the moment a grant is heard until its worker is done with it; for good when a GPU
        stopped answering. The keeper frees slots on this word: in doubt it is True.
        """
        current = self._current
        if current is None or not isinstance(current.answer, m.Grant):
            return self._lost_a_copy
        return self._lost_a_copy or not current.resolved.is_set()

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def close(self, *, timeout_s: float, say_goodbye: bool = True) -> None:
        """End the capture under way, say goodbye, and let go of all memory.

        Without a goodbye the keeper takes this rank for lost, and keeps what it has.
        """
        if say_goodbye:
            self._wait_previous()
        self._work.put(None)
        self._worker.join(timeout=timeout_s)
        if self.is_fenced or not say_goodbye:
            self._hang_up()
        else:
            try:
                # A keeper that died meanwhile is replaced: the next one finds what is in memory.
                self._ensure_client().request(m.Goodbye(), m.Done, timeout_s=timeout_s)
            finally:
                self._hang_up()
        for path in list(self._slots):
            self._close_slot(path)

    def _forget_old_handles(self) -> None:
        for step in [s for s, hs in self._handles.items() if all(_is_final(h) for h in hs)]:
            if len(self._handles) > 16 and step != max(self._handles):
                del self._handles[step]

    # ── on the worker ────────────────────────────────────────────────────────────────────

    def work_off(self, capture: Capture) -> None:
        """Take a snapshot, whatever comes; on the worker."""
        try:
            self._take(capture)
        except Exception as error:  # the worker must live on: training depends on its fence
            reason = f"{type(error).__name__}: {error}"
            self._miss(capture, reason)
            self._abandon(capture, reason)
        finally:
            capture.answered.set()
            capture.released.set()
            capture.resolved.set()

    def _take(self, capture: Capture) -> None:
        try:
            grant = self._ask(capture)
            layout = self._layouts[grant.layout]
            seal = self._copy(capture, grant, layout)
            self._send(m.Captured(
                attempt=grant.attempt, image_bytes=seal.image_bytes,
                header_xxh3=seal.header_xxh3, table_xxh3=seal.table_xxh3,
            ))  # fmt: skip
            # Told before the fence opens: whoever is killed after an update has handed over the
            # step before it. The keeper throws away what a dead rank sealed but did not tell.
            capture.released.set()
        except (HoldfastError, Stopped) as error:
            leaf = error.fields["leaf"] if isinstance(error, CaptureOvertaken) else ""
            # Reported before the keeper hears of it, whose answer already fails the handle.
            self._miss(capture, str(error), leaf=leaf)
            self._abandon(capture, str(error), leaf)

    def _ask(self, capture: Capture) -> m.Grant:
        """Ask for a slot; SnapshotSkipped when no rank gets one."""
        if self.is_fenced:
            raise Fenced(self.is_fenced)
        if self._is_silent:
            capture.keeper_lost = True
            raise SnapshotSkipped(
                "the keeper has not answered since the last save (is it stopped?)"
            )
        client = self._ensure_client()
        described = capture.description
        if described.table_hash != self._known_table:
            table = m.Table(hash=described.table_hash, data=described.table)
            # Not longer than the fence waits, or the next saves would wait for this one to end.
            wait_s = self.patience.grant_s if self._was_granted else self.patience.first_grant_s
            client.request(table, m.Done, timeout_s=wait_s)
            self._known_table = described.table_hash
        client.send(m.Ask(
            step=capture.step, table=described.table_hash, durable=capture.durable,
            values_bytes=len(described.values), exact=capture.exact,
        ))  # fmt: skip
        capture.answered.wait()  # the fence, the keeper or its loss ends it
        if capture.called_off and not isinstance(capture.answer, m.Grant):
            client.send(m.Withdraw(step=capture.step))
        capture.check()
        if not isinstance(capture.answer, m.Grant):
            reason = capture.answer.reason if capture.answer is not None else "no answer"
            raise SnapshotSkipped(f"step {capture.step} was skipped on all ranks: {reason}")
        self._was_granted = True
        return capture.answer

    def _copy(self, capture: Capture, grant: m.Grant, layout: Layout) -> Seal:
        plan = self._copy_plan(capture.description, layout)
        slot, target = self._target(grant.slot, plan, pinned=bool(capture.ready))
        values = capture.description.values
        image = fill_in(plan.image, self._metadata(grant), len(values))
        began_s = time.monotonic()
        self._turn += 1

        def copied(size_bytes: int) -> None:
            if grant.durable:
                self._send(m.Progress(attempt=grant.attempt, size_bytes=size_bytes))

        def enqueued(events: list[torch.cuda.Event]) -> None:
            capture.is_copied(events)
            capture.released.set()

        progress = Progress(check=capture.check, copied=copied, enqueued=enqueued)
        with torch.no_grad():
            try:
                seal = copy_image(
                    target, image, values, capture.overtaking, progress, self._turn, capture.ready
                )
            except StillCopying:
                self._lost_a_copy = True
                raise
        if not capture.copied:
            capture.is_copied([])
        slot.write_record(self._sealed_record(grant, seal))
        now_s = time.monotonic()
        emit(ImageCaptured(
            incarnation=self.place.incarnation, step=capture.step, rank=self.place.rank,
            elapsed_s=now_s - capture.started_s, copy_s=now_s - began_s,
            size_bytes=seal.image_bytes,
        ))  # fmt: skip
        return seal

    def _copy_plan(self, description: Description, layout: Layout) -> CopyPlan:
        """The copies of this description under this layout, made when either is new."""
        key = (description.table_hash, layout.hash)
        bindings = description.bindings
        known = self._plan
        if known is not None and known[:2] == key and self._planned_for is bindings:
            return known[2]
        for target in self._targets.values():
            target.let_go()
        self._targets.clear()
        plan = plan_copies(layout, self.place.rank, bindings)
        self._plan, self._planned_for = (*key, plan), bindings
        return plan

    _planned_for: object = None

    def _target(self, path: str, plan: CopyPlan, *, pinned: bool) -> tuple[SlotFile, Target]:
        """The slot at ``path``, mapped once, and its memory as seen by ``plan``."""
        slot = self._slots.get(path)
        if slot is None or slot.inode != Path(path).stat().st_ino:
            # What is mapped is not given back to the machine, although the keeper removed it.
            for gone in [p for p in self._slots if p == path or not Path(p).exists()]:
                self._close_slot(gone)
            slot = self._slots[path] = SlotFile.open(Path(path), writable=True)
            slot.populate()
            if pinned:
                pin_memory(slot)
        if path not in self._targets:
            self._targets[path] = Target(slot.image, plan)
        return slot, self._targets[path]

    def _close_slot(self, path: str) -> None:
        target = self._targets.pop(path, None)
        if target is not None:
            target.let_go()
        unmap(self._slots.pop(path))

    def _metadata(self, grant: m.Grant) -> dict[str, str]:
        place = self.place
        return {
            "run": place.run_id, "incarnation": str(place.incarnation), "step": str(grant.step),
            "attempt": grant.attempt, "rank": str(place.rank), "world": str(place.world),
            "layout": grant.layout,
        }  # fmt: skip

    def _sealed_record(self, grant: m.Grant, seal: Seal) -> SlotRecord:
        place = self.place
        return SlotRecord(
            state="captured", boot_id=self._boot_id, run_id=place.run_id,
            incarnation=place.incarnation, nonce=place.nonce, step=grant.step,
            attempt=grant.attempt, rank=place.rank, world=place.world, layout=grant.layout,
            image_bytes=seal.image_bytes, header_xxh3=seal.header_xxh3,
            table_xxh3=seal.table_xxh3, writer_pid=os.getpid(), writer_start=self._process_start,
        )  # fmt: skip

    def _abandon(self, capture: Capture, reason: str, leaf: str = "") -> None:
        if isinstance(capture.answer, m.Grant) and self._client is not None:
            try:
                self._client.send(m.Abandon(
                    attempt=capture.answer.attempt, reason=reason, leaf=leaf,
                    has_stopped=not self._lost_a_copy,
                ))  # fmt: skip
            except KeeperError:
                return  # the keeper learns it from our death, or from the slot's record

    def _miss(self, capture: Capture, reason: str, *, leaf: str = "") -> None:
        capture.call_off(reason)
        emit(SnapshotMissed(
            incarnation=self.place.incarnation, step=capture.step, rank=self.place.rank,
            reason=reason, overtaken=bool(leaf), leaf=leaf,
        ))  # fmt: skip
        if not capture.is_carried:
            kind = CaptureOvertaken if leaf else SnapshotSkipped
            self._fail(capture.step, kind(reason, leaf=leaf), captured=False)

    # ── the keeper ───────────────────────────────────────────────────────────────────────

    def _ensure_client(self) -> KeeperClient:
        if self._client is None or not self._client.is_open:
            self._known_table = ""
            if self._hang_up_when_collected is not None:
                self._hang_up_when_collected.detach()
            self._client = self._connect(weakly(self._hear), weakly(self._lost))
            self._hang_up_when_collected = when_collected(self, self._client.hang_up)
        return self._client

    def _send(self, message: m.Message) -> None:
        if self._client is None:
            raise KeeperError("the keeper of this host went away")
        self._client.send(message)

    def _hear(self, message: m.Message) -> None:
        """On the listening thread: what the keeper says by itself."""
        self._is_silent = False
        current = self._current
        match message:
            case m.LayoutAgreed(hash=hash_, data=data):
                self._layouts = {hash_: Layout.from_json(data)}
            case m.Grant() | m.Skip():
                self._answered(current, message)
            case m.Aborted():
                self._aborted(current, message)
            case m.Complete(step=step):
                self._reach(step, CAPTURED)
            case m.Durable(step=step, fulfils=fulfils):
                for asked in (step, *fulfils):
                    self._reach(asked, DURABLE, saved_as=step)
            case m.NotDurable(step=step, reason=reason, fulfils=fulfils):
                for asked in (step, *fulfils):
                    self._fail(asked, PersistFailed(f"step {step}: {reason}"), captured=True)
            case m.Announced(step=step, which=which):
                self.announced.add((step, which))
            case m.FencedOff(incarnation=n):
                self.is_fenced = f"incarnation {n} of this run has begun; this one is over"
                if current is not None:
                    current.call_off(self.is_fenced)

    def _answered(self, current: Capture | None, message: m.Grant | m.Skip) -> None:
        is_awaited = current is not None and current.step == message.step and current.answer is None
        if current is not None and is_awaited and not current.called_off:
            current.answer = message
            current.answered.set()
        elif isinstance(message, m.Grant):  # too late: nobody waits for it any more
            self._send(m.Abandon(attempt=message.attempt, reason="its save was given up"))

    def _aborted(self, current: Capture | None, message: m.Aborted) -> None:
        kind = CaptureOvertaken if message.overtaken else SnapshotSkipped
        self._fail(message.step, kind(message.reason, leaf=message.leaf), captured=False)
        if current is None or current.step != message.step:
            return
        if current.answer is None:
            current.answer = message
            current.answered.set()
        else:
            current.call_off(message.reason)

    def _lost(self, reason: str) -> None:
        """On the listening thread: the keeper went away; the next save starts another."""
        self._is_silent = False  # the next one has not been asked yet
        emit(KeeperLost(
            incarnation=self.place.incarnation, rank=self.place.rank, reason=reason
        ))  # fmt: skip
        current = self._current
        if current is not None and not current.resolved.is_set():
            current.keeper_lost = True
            current.call_off(f"the keeper went away: {reason}")
        for step, handles in list(self._handles.items()):
            if any(not _is_final(handle) for handle in handles):
                error = PersistFailed(f"step {step}: the keeper went away: {reason}")
                self._fail(step, error, captured=False)

    def _reach(self, step: int, what: str, *, saved_as: int | None = None) -> None:
        for handle in self._handles.get(step, []):
            if what == CAPTURED or handle.durable:
                if saved_as is not None:
                    handle.move_to(saved_as)
                handle.reach(what)

    def _fail(self, step: int, error: HoldfastError, *, captured: bool) -> None:
        for handle in self._handles.get(step, []):
            if not _is_final(handle):
                handle.fail(error, captured=captured)


def _is_final(handle: SaveHandle) -> bool:
    wanted = DURABLE if handle.durable else CAPTURED
    return handle.state in (wanted, DURABLE, "failed")
