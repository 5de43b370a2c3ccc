"""The public object: snapshots of a state by policy, and its restore, on every rank alike.

It joins the rooms and owns none of their work: `state` describes, `snapshot` captures, the
keeper makes durable, `load` restores. No error of a save reaches the training loop; it
is an event, and it is what ``handle.wait_*`` raises.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from holdfast.errors import (
    Fenced,
    SaveError,
    SnapshotSkipped,
    StatePoisoned,
    UnsupportedState,
    UsageError,
)
from holdfast.events import RunStarted, emit
from holdfast.format.manifest import Generation
from holdfast.load.compare import Request
from holdfast.load.restore import Restored, restore_first
from holdfast.meeting import Terms, meet
from holdfast.observe.follow import follow_run
from holdfast.policy.arguments import (
    check_policies,
    claim,
    count_of_saves,
    duration_s,
    step_number,
    wanted_step,
    whole,
)
from holdfast.policy.due import Due, Pace
from holdfast.policy.interval import Every
from holdfast.policy.retention import Keep
from holdfast.preemption.grace import Preemption, grace
from holdfast.preemption.leaving import leave
from holdfast.rules import Rules
from holdfast.snapshot import messages as m
from holdfast.snapshot.handle import DURABLE, SaveHandle
from holdfast.snapshot.opened import opened
from holdfast.state.choice import choose
from holdfast.state.objects import State
from holdfast.state.usage import check_rules
from holdfast.storage.open import normal_root, open_store
from holdfast.world import World, current_world, host_id, refuse_rank_without_group, tell_all

_RETRY_S, _LONGEST_RETRY_S = 0.05, 1.0
#: How long a save at the end is tried again whose keeper was lost.
_LOST_S = 60.0
_HANG_UP_S = 5.0
#: How long a close waits for the last events to be written.
_LAST_EVENTS_S = 5.0
#: Whoever lives beyond its grace is ended by nobody: it may say goodbye all the same.
_LEAST_GOODBYE_S = 1.0
#: How much longer than for a message the ranks wait for each other's reading.
_READ_PATIENCE = 10


class Checkpointer:
    """Keeps one training state: snapshots in memory, checkpoints in storage, and the way back.

    Every rank makes one, with the same arguments, after ``init_process_group`` (or without a
    group, alone). ``root`` is a directory all ranks reach. ``state`` maps names to modules,
    optimizers, schedulers, ``holdfast.Rng()``, anything with ``state_dict`` and
    ``load_state_dict``, and plain values; it stays yours to change between saves.

    ``memory`` and ``storage`` say when ``step`` takes a snapshot and makes one durable; ``keep``
    which checkpoints stay; ``parity`` how many hosts of a group can be lost with what they have in
    memory, where ranks are on several; ``rules`` what the tensors of the state are in checkpoints,
    where that is something else than here; ``timeout_s`` bounds every wait for other ranks or the
    keeper, and ten times as long each wait for their reading in a restore.

    Parameters and optimizer state that several ranks hold are compared between them, another part
    at each save and all of it in ``compare_replicas`` saves (0: never). By default it is 50 saves
    for each replica, which keeps a part to a fiftieth of what a rank copies. What is not the same
    is told by the event ``ReplicasDiffer`` and by the save's handle; the save goes on.

    ``grace_s``: what there is between SIGTERM and the end. With it a SIGTERM to any rank makes
    ``step`` save one last step on all of them, wait until it is in storage, and raise Preempted.

    Raises UsageError for arguments that mean nothing or differ between ranks, UnsupportedState
    for what cannot be stored, KeeperError and StorageError when keeper or root cannot be reached:
    at the start these are yours to mend, later they only cost a snapshot. A process that is forked
    off, such as a data loader's worker, leaves the Checkpointer alone: there it refuses every call.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: State,
        *,
        memory: Every | None = Every(steps=1),  # noqa: B008  (a frozen value)
        storage: Every | None = Every(steps=500),  # noqa: B008
        keep: Keep = Keep(),  # noqa: B008
        parity: int = 0,
        rules: Rules | None = None,
        timeout_s: float = 120.0,
        compare_replicas: int | None = None,
        grace_s: float | None = None,
    ) -> None:
        check_rules("rules", rules)
        check_policies(memory, storage, keep, parity)
        self._state = state
        self.root = normal_root(root)
        self.memory, self.storage, self.keep = memory, storage, keep
        self.timeout_s = duration_s("timeout_s", timeout_s)
        self._process = os.getpid()
        refuse_rank_without_group()
        self.world: World = current_world(timeout_s=self.timeout_s)
        self._is_poisoned = False
        self._is_closed = False
        self._is_adopted = False
        self._last_step: int | None = None
        self._last_handle: SaveHandle | None = None
        self._asked_again: SaveHandle | None = None
        """Of the same step, when it was to be durable after all."""
        self._carried: list[SaveHandle] = []
        self._fulfilled_by_last: list[SaveHandle] = []
        """What the last save was to fulfil, itself among it."""
        self._is_owed = False
        self._retaken_at = -1
        self._updates_at_save = 0
        self._ended: tuple[int | None, int] = None, 0
        """The last step that was told of, and how many updates there were by then."""
        now_s = time.monotonic()
        self._dues = Due("storage", storage, now_s), Due("memory", memory, now_s)
        self._pace = Pace()
        self.rules = rules
        terms = Terms(
            self.root, memory, storage, keep, self.timeout_s, rules,
            count_of_saves("compare_replicas", compare_replicas), whole("parity", parity),
            grace(grace_s),
        )  # fmt: skip
        run = meet(self.world, open_store(self.root), state, terms)
        self.incarnation, self._may_restore = run.incarnation, run.may_restore
        self._saver, self._offers = run.saver, run.offers
        self._preemption = (
            None if terms.grace_s is None
            else Preemption(terms.grace_s, self._saver, is_alone=self.world.size == 1)
        )  # fmt: skip
        self._stop_tracing = follow_run(self.root, self.world.rank)
        # Of a Checkpointer that nobody closes; its Saver ends by itself as well.
        # The collector ends it on whatever thread it runs: that one waits for nothing.
        weakref.finalize(self, self._stop_tracing, 0.0).atexit = False
        emit(RunStarted(
            incarnation=self.incarnation, rank=self.world.rank, run_id=run.run_id,
            world=self.world.size, host=host_id(), pid=os.getpid(),
        ))  # fmt: skip
        opened.add(self._saver)

    @property
    def state(self) -> State:
        """The state that is saved and restored: this very dict, to be changed in place."""
        return self._state

    @state.setter
    def state(self, _: State) -> None:
        raise UsageError(
            "checkpointer.state is the dict that was given at the start; another would not be "
            "saved. Change it in place: checkpointer.state[name] = ..., on every rank."
        )

    # ── restoring ────────────────────────────────────────────────────────────────────────

    def restore(
        self,
        step: int | str | None = None,
        *,
        only: Sequence[str] | None = None,
        allow_missing: Sequence[str] = (),
        stored_rules: Rules | None = None,
    ) -> Restored | None:
        """Fill the state with the newest generation all ranks can have; None when there is none.

        ``step``: restore this step instead, or, as "incarnation-step", a generation that was
        abandoned. ``only``: patterns of the names to restore, all else stays as it is;
        ``allow_missing``: of names that need not be stored; ``stored_rules``: for generations that
        were saved without the rules that they should have been saved with, these. All ranks call
        it, with the same arguments, before the first save. Raises StateMismatch listing every
        difference, NotFound for a step that is not there, RestoreError when no source was good;
        after RestoreError in the middle the state is poisoned and ``step`` and ``save`` refuse.
        """
        self._check_usable(poison_is_fine=True)
        step = wanted_step(step)
        check_rules("stored_rules", stored_rules)
        request = Request(self.rules, stored_rules, choose(only, allow_missing))
        if self._last_step is not None:
            raise UsageError(
                "restore() comes before the first save: make a new Checkpointer to go back, so "
                "that steps saved again are told apart from the old ones"
            )
        candidates = self._offers.first(self.world, step, timeout_s=self.timeout_s)
        restored = restore_first(
            self.world, self.state, candidates, self._offers.open, incarnation=self.incarnation,
            timeout_s=self.timeout_s * _READ_PATIENCE, on_poison=self._poison, request=request,
            plan_again=self._offers.plan_again(),
        )  # fmt: skip
        self._adopt(restored.generation if restored else None)
        return restored

    def _adopt(self, parent: Generation | None) -> None:
        self._offers.close()

        def tell() -> bytes:
            pair = None if parent is None else (parent.incarnation, parent.step)
            self._saver.request(m.Adopt(parent=pair), m.Done, timeout_s=self.timeout_s)
            return b""

        phase = "the start of saving" if parent is None else "restore: adopt"
        tell_all(self.world, phase, tell, timeout_s=self.timeout_s)
        self._is_adopted = True

    def _poison(self, is_poisoned: bool) -> None:
        self._is_poisoned = is_poisoned

    # ── saving ───────────────────────────────────────────────────────────────────────────

    def step(self, step: int) -> SaveHandle | None:
        """Call after each optimizer step, on all ranks; saves when a policy says so.

        Returns the save's handle, None when none was due. Never waits for storage, and never
        raises because a snapshot failed. With ``grace_s``, Preempted once a rank was told to end.
        """
        self._check_usable()
        step = step_number(step)
        self._pace.learn(step, time.monotonic())
        self._ended = step, self._saver.updates
        preemption = self._preemption
        if preemption is not None and preemption.is_last(step, self._pace.step_s):
            handle = self._step(step, is_last=True)
            assert handle is not None  # it is due, whatever the policies say
            leave(
                step, handle, preemption,
                keep_promises=self._keep_promises, close=self.close, hang_up=self._hang_up,
            )  # fmt: skip
        return self._step(step, is_last=False)

    def _step(self, step: int, *, is_last: bool) -> SaveHandle | None:
        durable, in_memory = (self._is_due(due, step) for due in self._dues)
        durable = durable or is_last
        try:
            durable = self._is_retaken(step, is_due=durable or in_memory) or durable
            if not (durable or in_memory):
                return None
            return self._save(step, durable=durable, exact=False)
        except Exception as error:  # of the user's own state_dict, say: it costs a snapshot
            if _is_mistake(error):
                raise
            self._last_step, self._updates_at_save = step, self._saver.updates
            self._is_owed |= durable  # the next save that is due is durable for it
            self._last_handle = declined = self._saver.decline(step, durable, error)
            self._fulfilled_by_last = [declined]
            return declined

    def save(self, step: int, *, durable: bool = False) -> SaveHandle:
        """Snapshot the state as it is now, whatever the policies say; all ranks call it.

        Returns as soon as the state may be trained on: parameters and optimizer state are copied
        behind the next forward and backward, all else before this returns. With ``durable`` the
        snapshot is also published in storage. Saving the same step again with ``durable``
        makes the snapshot taken of it durable. Steps must not fall within one run.
        """
        self._check_usable()
        step, durable = step_number(step), claim("durable", durable)
        try:
            return self._save(step, durable=durable, exact=True)
        except Exception as error:
            if not _is_mistake(error):
                self._saver.decline(step, durable, error)
            raise

    def _save(self, step: int, *, durable: bool, exact: bool) -> SaveHandle:
        if not self._is_adopted:
            if self._may_restore:
                raise UsageError(
                    f"{self.root} holds generations of this run: call restore() before the first "
                    "save, or use another root to begin anew"
                )
            self._adopt(None)
        last = self._last_step
        if last is not None and step < last:
            raise UsageError(f"step {step} was saved after step {last}: steps only grow in a run")
        if step == last and self._last_handle is not None:
            if durable:
                with suppress(SnapshotSkipped):  # of the one before that has not ended yet
                    self._saver.previous_was_skipped()  # only then is it known to be missed
            missed = self._last_handle.state == "failed"
            if not missed and not durable:
                return self._last_handle
            if not missed:
                self._asked_again = self._saver.make_durable(step)
                return self._asked_again
        carried = list(self._carried_over())
        durable = durable or bool(carried) or self._is_owed
        for one in carried:
            one.renew()
        handle = self._saver.save(step, durable=durable, exact=exact, carried=carried)
        self._carried.clear()
        self._fulfilled_by_last = [*carried, handle]
        self._is_owed = False
        self._last_step, self._last_handle, self._asked_again = step, handle, None
        self._updates_at_save = self._saver.updates
        return handle

    def before_update(self) -> None:
        """Wait until an update may overwrite the state: for loops without a torch optimizer.

        Optimizers of torch do this by themselves, in a hook before each step.
        """
        if self._process == os.getpid():
            self._saver.fence()

    def _is_due(self, due: Due, step: int) -> bool:
        now_s, world = time.monotonic(), self.world
        is_due = due.is_due(
            step, self._last_step, now_s, is_alone=world.size == 1,
            was_announced=due.is_timed and self._saver.announcing.take_announced(step, due.which),
        )  # fmt: skip
        if due.is_timed and world.rank == 0 and world.size > 1:
            ahead = due.to_announce(step, now_s, self._pace)
            if ahead is not None:
                self._saver.announcing.announce(ahead, due.which)
        return is_due

    def _is_retaken(self, step: int, *, is_due: bool) -> bool:
        """Whether a durable save that was missed is made good at ``step``.

        At the next step that is saved at all, or else, of several ranks, at one that is announced:
        when a keeper dies, some may have missed what others have not, and would save alone.
        """
        is_missed = bool(self._carried_over())
        if self.world.size == 1:
            return is_missed
        self._saver.keep_in_touch()
        announcing = self._saver.announcing
        was_announced = announcing.take_announced(step, m.MISSED, after=self._last_step)
        if is_missed and not (was_announced or is_due) and step >= self._retaken_at:
            self._retaken_at = self._pace.ahead(step)
            announcing.announce(self._retaken_at, m.MISSED)
        return was_announced or (is_missed and is_due)

    def _carried_over(self) -> list[SaveHandle]:
        """What a durable save that no rank could take was to fulfil: the next one is to."""
        handle = self._last_handle
        if handle is None or not handle.durable or handle in self._carried:
            return self._carried
        if self._saver.previous_was_skipped() and handle.state != DURABLE:
            self._carry()
        return self._carried

    def _carry(self) -> None:
        self._carried += self._fulfilled_by_last
        self._last_handle = None

    def _check_usable(self, *, poison_is_fine: bool = False) -> None:
        if self._process != os.getpid():
            raise UsageError(
                f"this Checkpointer belongs to process {self._process}, this one was forked off "
                "it: save there, or make a Checkpointer with another root here"
            )
        if self._is_closed:
            raise UsageError("this Checkpointer is closed")
        if self._saver.is_fenced:
            raise Fenced(
                f"{self._saver.is_fenced}: another Checkpointer was opened on {self.root}, by a "
                "restart of this run or by mistake. Nothing more is saved here; end this process, "
                "or give each run a root of its own."
            )
        if self._is_poisoned and not poison_is_fine:
            raise StatePoisoned(
                "a restore broke off half-way: the objects hold a mixture of two states. Restore "
                "again, or start the process anew."
            )

    # ── the end ──────────────────────────────────────────────────────────────────────────

    def close(self, timeout_s: float = 600.0) -> None:
        """Wait for what was promised, and let the keeper end when all ranks have closed.

        Durable saves under way are finished, and with a ``storage`` policy the newest snapshot
        is made durable too; one that was missed is taken again, if the state is still that of its
        step. Raises the error of a promised save that failed. Twice is once.
        """
        timeout_s = duration_s("timeout_s", timeout_s, least="from 0 on")
        if self._is_closed or self._process != os.getpid():
            return
        try:
            self._keep_promises(timeout_s)
        finally:
            self._end(timeout_s, say_goodbye=True)

    def _hang_up(self, timeout_s: float = _HANG_UP_S) -> None:
        """Leave without a goodbye: what is in memory stays there for the next start."""
        if not self._is_closed and self._process == os.getpid():
            if self._preemption is not None:
                self._preemption.rescue()
            self._end(timeout_s, say_goodbye=False)

    def _end(self, timeout_s: float, *, say_goodbye: bool) -> None:
        self._is_closed = True
        left_s = math.inf if self._preemption is None else self._preemption.end()
        events_s = min(_LAST_EVENTS_S, left_s / 2)
        opened.discard(self._saver)
        try:
            timeout_s = min(timeout_s, max(left_s - events_s, _LEAST_GOODBYE_S))
            self._saver.close(timeout_s=timeout_s, say_goodbye=say_goodbye)
        finally:
            self._stop_tracing(events_s)

    def _keep_promises(self, timeout_s: float) -> None:
        """Take the durable save that was carried along, if the state is still that of its step."""
        deadline = time.monotonic() + timeout_s
        if self.storage is not None and not self._saver.is_fenced:
            self._retake_missed(deadline)
        self._saver.end_capture(timeout_s=timeout_s)
        self._retake_carried(deadline)
        try:
            self._wait_promised(deadline)
        except SaveError:
            if self._last_handle is None or not self._saver.previous_was_lost:
                raise
            self._retake_lost(self._last_handle.step, min(deadline, time.monotonic() + _LOST_S))

    def _wait_promised(self, deadline: float) -> None:
        for handle in (self._last_handle, self._asked_again):
            if handle is not None and handle.durable:
                handle.wait_durable(max(0.0, deadline - time.monotonic()))

    def _retake_lost(self, step: int, deadline: float) -> None:
        """Its keeper died before ``step`` was durable. Once: the next one may be lost too."""
        left_s = max(0.0, deadline - time.monotonic())
        if self._saver.is_whole(step, timeout_s=left_s):
            self._asked_again, self._last_handle = self._saver.make_durable(step), None
        else:
            self._carry()
            self._retake_carried(deadline)
        self._wait_promised(deadline)

    def _retake_carried(self, deadline: float) -> None:
        pause_s = _RETRY_S
        while self._carried_over():
            step = self._step_of_state()
            if step is None or time.monotonic() > deadline:
                raise self._missed_for_good()
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
            if all(carried.state == DURABLE for carried in self._carried):
                self._carried.clear()  # the next keeper found it whole
                return
            self.save(step, durable=True)
            self._saver.end_capture(timeout_s=max(0.0, deadline - time.monotonic()))

    def _step_of_state(self) -> int | None:
        """The step whose state is still there; None when it went on."""
        saved = self._last_step, self._updates_at_save
        found = [step for step, updates in (saved, self._ended) if updates == self._saver.updates]
        return max((step for step in found if step is not None), default=None)

    def _missed_for_good(self) -> SnapshotSkipped:
        last = next((one.failure for one in reversed(self._carried) if one.failure), None)
        reason = SnapshotSkipped(
            f"step {self._last_step} was to be durable, was missed, and could not be saved again "
            f"before the state went on or time was up{f' ({last})' if last else ''}"
        )
        for carried in self._carried:
            carried.fail(reason, captured=False)
        return reason

    def _retake_missed(self, deadline: float) -> None:
        """The newest snapshot is to be durable at the end: it is taken again if it was missed.

        On all ranks alike, each of which knows that it was missed; once, as a rank may be gone.
        """
        handle = self._last_handle
        if handle is None or handle.durable:
            return
        try:
            handle.wait_captured(max(0.0, deadline - time.monotonic()))
        except SaveError:
            if self._saver.updates != self._updates_at_save:
                raise
            # Durable at once: there may be no memory to keep it in.
            self.save(handle.step, durable=True)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._hang_up()


def _is_mistake(error: Exception) -> bool:
    """A call that means nothing, the same on every rank: the caller must know, nobody waits."""
    is_usage = isinstance(error, UsageError) and not isinstance(error, UnsupportedState)
    return is_usage or isinstance(error, StatePoisoned)
