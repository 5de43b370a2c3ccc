"""Provides the public Checkpointer: snapshots of a state by policy, and its restore, on every rank.

It connects the packages and does none of their work: `state` describes, `capture` copies, the
keeper makes durable, `restore` restores. No error of a save reaches the training loop; it is an
event, and ``handle.wait_*`` raises it.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NoReturn, TypeVar

import torch

from holdfast.capture.handles import SaveHandle
from holdfast.capture.pending_saves import PendingSaves, is_mistake
from holdfast.errors import Fenced, SnapshotSkipped, StatePoisoned, UsageError
from holdfast.events import Event, RunStarted, emit, warn
from holdfast.format.manifest import Generation
from holdfast.interop.opening import open_source
from holdfast.meeting import host_id
from holdfast.observe import run_events
from holdfast.observe.training import RESTORING, SAVING, TRAINING
from holdfast.policy.arguments import (
    check_policies,
    claim,
    count_of_saves,
    duration_s,
    require_beyond,
    step_number,
    wanted_step,
    whole,
)
from holdfast.policy.when import DueTimer, Every, Keep, Pace
from holdfast.preemption import Preemption, grace, leave
from holdfast.protocol import messages as m
from holdfast.restore.from_storage import READ_PATIENCE, restore_stored
from holdfast.restore.match import RestoreRequest
from holdfast.restore.restore import Restored, restore_first
from holdfast.rules import Rules
from holdfast.startup import RunOptions, StartedRun, start_run
from holdfast.state.mapped.mapper import check_rules
from holdfast.state.objects import State
from holdfast.state.optimizers import fence_replays
from holdfast.state.saved_values import parameter_orders
from holdfast.state.selection import choose
from holdfast.state.step_calls import listeners
from holdfast.storage.open import normal_cache, normal_root, open_store
from holdfast.world import World, current_world, from_rank0, refuse_rank_without_group

T = TypeVar("T")

_HANG_UP_S = 5.0
#: Seconds for which a close waits for the last events to be written.
_LAST_EVENTS_S = 5.0
#: After the grace period nobody may end this process: it still says goodbye.
_LEAST_GOODBYE_S = 1.0


class Checkpointer:
    """Keeps one training state: snapshots in memory, checkpoints in storage, and the way back.

    Every rank makes one, with the same arguments, after ``init_process_group`` (or without a group,
    alone).

    ``root``: a directory that all ranks reach, or a bucket: ``s3://bucket/prefix``,
    ``gs://bucket/prefix`` or ``az://container/prefix``.
    ``state``: names to modules, optimizers, schedulers, ``holdfast.Rng()``, anything with
    ``state_dict`` and ``load_state_dict``, and plain values. It stays yours to change between
    saves.
    ``memory``: when ``step`` takes a snapshot; None for never.
    ``storage``: when ``step`` makes a snapshot durable; None for never.
    ``keep``: which checkpoints stay in storage.
    ``parity``: how many hosts of a group can be lost with their memory, where ranks are on several
    hosts.
    ``rules``: how the tensors of the state correspond to leaves of checkpoints, where the two
    differ.
    ``timeout_s``: the bound, in seconds, of every wait for other ranks or the keeper; a wait for
    their reading in a restore may last ten times as long.
    ``compare_replicas``: the number of saves in which all parameters and optimizer state that
    several ranks hold are compared between them, another part at each save; 0 for never. None is 50
    saves for each replica, which keeps a part to a fiftieth of the bytes that a rank copies.
    Differences are reported by the event ``ReplicasDiffer`` and by the save's handle; the save goes
    on.
    ``grace_s``: the seconds between SIGTERM and the end. With it a SIGTERM to any rank makes
    ``step`` save one last step on all of them, wait until it is in storage, and raise Preempted.

    ``cache``: a directory on each host's own fast disk, such as "/nvme/holdfast". What is to be
    stored is whole there first, *cached*, and is drained to the root in the background, by each
    host the images of its own ranks. ``keep`` speaks of the root. ``cache_keep``: which checkpoints
    stay in the cache, of those that the root has.

    Raises UsageError for arguments that are invalid or differ between ranks, UnsupportedState for
    state that cannot be stored, KeeperError and StorageError when keeper or root cannot be reached:
    at the start you must fix these, later they only cost a snapshot. A forked process, such as a
    data loader's worker, does not use the Checkpointer: there every call is refused.
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
        cache: str | os.PathLike[str] | None = None,
        cache_keep: Keep = Keep(last=2),  # noqa: B008
    ) -> None:
        check_rules("rules", rules)
        check_policies(memory, storage, keep, parity, cache_keep)
        self._state, self.rules = state, rules
        self.root = normal_root(root)
        cache = None if cache is None else normal_cache(cache, self.root)
        self.memory, self.storage, self.keep = memory, storage, keep
        self.timeout_s = duration_s("timeout_s", timeout_s)
        self._process = os.getpid()
        refuse_rank_without_group()
        self.world: World = current_world(timeout_s=self.timeout_s)
        self._is_poisoned = self._is_closed = self._is_adopted = False
        self._restored: Restored | None = None
        """Kept for what it notices at the first update."""
        self._is_warned_of_restored_step = False
        self._restored_step: int | None = None
        """The step that the run goes on from: that of the last restore that found one."""
        now_s = time.monotonic()
        self._dues = DueTimer("storage", storage, now_s), DueTimer("memory", memory, now_s)
        options = RunOptions(
            self.root,
            memory,
            storage,
            keep,
            self.timeout_s,
            rules,
            count_of_saves("compare_replicas", compare_replicas),
            whole("parity", parity),
            grace(grace_s),
            cache or "",
            cache_keep,
            run_events.check_settings,
        )
        self._start(options, now_s)

    def _start(self, options: RunOptions, now_s: float) -> None:
        """Joins the run with all ranks; from now on it is saved when something is due."""
        with run_events.collected_events() as early:
            run = start_run(self.world, open_store(self.root), self._state, options)
        self.incarnation, self._may_restore = run.incarnation, run.may_restore
        self._saver, self._offers = run.saver, run.offers
        self._pace, is_alone = Pace(), self.world.size == 1
        self._promised = PendingSaves(self._saver, self._pace, is_alone=is_alone)
        grace_s = options.grace_s
        self._preemption = (
            None if grace_s is None else Preemption(grace_s, self._saver, is_alone=is_alone)
        )
        self._follow(run, early, now_s)

    def _follow(
        self, run: StartedRun, early: Sequence[tuple[Event, float]], began_s: float
    ) -> None:
        """Has the events of this process recorded, those of the start first."""
        started = RunStarted(
            incarnation=self.incarnation,
            rank=self.world.rank,
            run_id=run.run_id,
            world=self.world.size,
            host=host_id(),
            pid=self._process,
            process_s=run_events.process_age_s(),
            joined_s=time.monotonic() - began_s,
        )
        self._training, self._stop_tracing = run_events.follow_run(
            self.root, run.arena, started, torch.__version__, early
        )
        # For a Checkpointer that nobody closes; its Saver ends by itself as well. The garbage
        # collector may run this on any thread, which must not wait.
        weakref.finalize(self, self._stop_tracing, 0.0).atexit = False
        listeners.add(self._saver)

    def __repr__(self) -> str:
        last = self._restored_step if self._promised.last_step is None else self._promised.last_step
        step = "no step yet" if last is None else f"step {last}"
        return f"<Checkpointer in {self.root}: {step}{', closed' * self._is_closed}>"

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
        start_from: str | os.PathLike[str] | None = None,
    ) -> Restored | None:
        """Fill the state with the newest generation all ranks can have; None when there is none.

        ``step``: the step to restore instead, or, as "incarnation-step", a generation that was
        abandoned. ``only``: patterns of the names to restore; everything else stays as it is.
        ``allow_missing``: patterns of names that need not be stored. ``stored_rules``: the rules
        that generations should have been saved with, where they were saved without.
        ``start_from``: what is read when this run has nothing to restore, and never after: another
        root, or a checkpoint of another writer, as in ``holdfast.load``.

        All ranks call it, with the same arguments, before the first save, whose step must be beyond
        the restored one; of several calls, as with ``only``, the last decides the step that the run
        goes on from. Raises StateMismatch listing every difference, NotFound for a step that does
        not exist, RestoreError when no source was good or a lost record leaves open which
        generations are this run's (name one then); after RestoreError in the middle the state is
        poisoned and ``step`` and ``save`` refuse.
        """
        self._check_usable(poison_is_fine=True)
        self._saver.turns.refuse_here("restore()")
        step = wanted_step(step)
        check_rules("stored_rules", stored_rules)
        request = RestoreRequest(self.rules, stored_rules, choose(only, allow_missing))
        if self._promised.last_step is not None:
            raise UsageError(
                "restore() comes before the first save: make a new Checkpointer to go back, so "
                "that steps saved again are told apart from the old ones"
            )
        self._training.enter(RESTORING)
        restored = self._restore_own(step, request)
        self._saver.restart()
        if restored is None:
            if start_from is not None and step is None:
                restored = self._restore_from(start_from, request)
            self._begin_anew()
        self._offers.close()
        self._offers.forget()
        self._is_adopted, self._restored = True, restored
        self._restored_step = None if restored is None else restored.step
        self._training.begin()
        return restored

    def _restore_own(self, step: int | str | None, request: RestoreRequest) -> Restored | None:
        """Fills the state with a generation of this run, and tells the keeper which it was."""
        try:
            return restore_first(
                self.world,
                self.state,
                self._offers.first(self.world, step, timeout_s=self.timeout_s),
                self._offers.open,
                incarnation=self.incarnation,
                timeout_s=self.timeout_s * READ_PATIENCE,
                on_poison=self._poison,
                request=request,
                plan_again=self._offers.plan_again,
                adopt=self._tell_parent,
                clock=self._offers.clock,
            )
        finally:
            self._offers.let_go()

    def _restore_from(self, place: str | os.PathLike[str], request: RestoreRequest) -> Restored:
        """Fills the state with what another root has, or another writer's checkpoint."""
        source = open_source(place, None, partial(parameter_orders, self.state), None)
        return restore_stored(
            self.world,
            self.state,
            source,
            request,
            timeout_s=self.timeout_s,
            incarnation=self.incarnation,
            on_poison=self._poison,
        )

    def _begin_anew(self) -> None:
        """Begins to save with nothing restored, on all ranks together."""

        def tell() -> bytes:
            self._tell_parent(None)
            return b""

        from_rank0(self.world, "the start of saving", tell, timeout_s=self.timeout_s)
        self._is_adopted = True

    def _tell_parent(self, parent: Generation | None) -> None:
        """On rank 0: tells the keeper from which generation this start goes on."""
        self._saver.request(m.Adopt(parent=parent), m.Done, timeout_s=self.timeout_s)

    def _poison(self, is_poisoned: bool) -> None:
        self._is_poisoned = is_poisoned

    # ── saving ───────────────────────────────────────────────────────────────────────────

    def step(self, step: int, *, tokens: int = 0) -> SaveHandle | None:
        """Call after each optimizer step, on all ranks; saves when a policy says so.

        Returns the save's handle, None when none was due. Never waits for storage, and never raises
        because a snapshot failed. With ``grace_s``, Preempted once a rank was told to end.
        UsageError for a step before the restored one, whether a save is due or not; that one itself
        is saved already, so not due. From a hook of an optimizer's step: what is due is saved at
        the end of that step.

        ``step``: the number of the optimizer step that has just ended. ``tokens``: how many this
        rank trained on in it, for the report's throughput.
        """
        self._check_usable()
        step = step_number(step)
        if step == self._restored_step:
            self._warn_of_restored_step(step)
            return None
        require_beyond(self._restored_step, step)
        self._training.step(step, whole("tokens", tokens, least=0))
        self._pace.learn(step, time.monotonic())
        preemption = self._preemption
        is_last = preemption is not None and preemption.is_last(step, self._pace.step_s)
        durable, in_memory = (self._is_due(due, step) for due in self._dues)
        try:
            handle = self._in_turn(
                lambda: self._step(step, durable, in_memory, is_last),
                lambda: self._defer_step(step, durable, in_memory, is_last),
            )
        except SnapshotSkipped as error:  # another thread saves, and does not end that
            if not (durable or in_memory or is_last):
                return None
            handle = self._promised.decline(step, durable=durable or is_last, error=error)
        finally:
            self._training.enter(TRAINING)
        if is_last and not self._saver.turns.why_not_here():
            self._leave(step, handle)
        return handle

    def phase(self, name: str) -> AbstractContextManager[None]:
        """``with ckpt.phase("evaluation"):`` tells the report what time is no training.

        ``name``: what the report calls it, such as "evaluation" or "data".
        """
        return self._training.phase(name)

    def _warn_of_restored_step(self, step: int) -> None:
        """Once: a loop may call ``step`` several times for one step, or do that step again."""
        if not self._is_warned_of_restored_step:
            self._is_warned_of_restored_step = True
            warn(
                f"step({step}) is the step that was restored, and is not saved again: "
                "if the loop does that step a second time, count on from it, "
                "`for step in range(restored.step + 1, steps)`"
            )

    def _step(
        self,
        step: int,
        durable: bool,
        in_memory: bool,
        is_last: bool,
        handle: SaveHandle | None = None,
    ) -> SaveHandle | None:
        self._promised.step_ended(step)
        durable = durable or is_last
        try:
            durable = self._promised.is_retaken(step, is_due=durable or in_memory) or durable
            if not (durable or in_memory):
                return None
            return self._save(step, durable=durable, exact=False, handle=handle)
        except Exception as error:  # of the user's own state_dict, say: it costs a snapshot
            return self._promised.decline(step, durable=durable, error=error, handle=handle)

    def _defer_step(
        self, step: int, durable: bool, in_memory: bool, is_last: bool
    ) -> SaveHandle | None:
        is_due = durable or in_memory or is_last
        handle = self._saver.handle(step, durable=durable or is_last) if is_due else None
        must_leave = is_last and bool(self._saver.turns.why_not_here())

        def act() -> Callable[[], object] | None:
            self._step(step, durable, in_memory, is_last, handle)
            return partial(self._leave, step, handle) if must_leave else None

        self._saver.turns.defer(act, handle)
        return handle

    def _leave(self, step: int, handle: SaveHandle | None) -> NoReturn:
        assert handle is not None  # it is due, whatever the policies say
        assert self._preemption is not None
        leave(
            step,
            handle,
            self._preemption,
            keep_promises=self._keep_promises,
            close=self.close,
            hang_up=self._hang_up,
        )

    def save(self, step: int, *, durable: bool = False) -> SaveHandle:
        """Snapshot the state as it is now, whatever the policies say; all ranks call it.

        Returns as soon as the state may be trained on: parameters, optimizer state and, unless
        ``durable``, frozen parameters that were the same twice are copied during the next forward
        and backward, all else before this returns. With ``durable`` the snapshot is also published
        in storage. Saving the same step again with ``durable`` makes the snapshot taken of it
        durable. Steps must not decrease within one run, and must be beyond the restored one:
        otherwise UsageError, before anything is captured.

        Any thread may call it at any time, and so may a signal handler. In the middle of a step
        of a torch optimizer the save is deferred to the end of the call of ``step``: the state is
        captured there, under the number given here. Waiting for the handle on the very thread that
        is in that step raises UsageError. Everything else that training changes (buffers,
        generators, values of yours) is saved as it is at that moment; when called from another
        thread than the training thread it may be changing, and only tensors that optimizers change
        are of one moment. On several ranks a save is taken if all have made the same whole updates,
        and is skipped otherwise. After a step that raised, it raises UnsupportedState until that
        optimizer's next whole step, or a restore. In a loop without a torch optimizer the end of an
        update is not known: save between two of them. That a save came to nothing its handle tells.

        ``step``: the number under which the state is saved. ``durable``: publish it in storage too.
        """
        self._check_usable()
        step, durable = step_number(step), claim("durable", durable)
        require_beyond(self._restored_step, step)
        given = step, durable
        try:
            return self._in_turn(
                partial(self._save_or_decline, *given), partial(self._defer_save, *given)
            )
        except SnapshotSkipped as error:  # another thread saves, and does not end that
            return self._promised.decline(step, durable=durable, error=error)

    def _save_or_decline(self, step: int, durable: bool) -> SaveHandle:
        try:
            return self._save(step, durable=durable, exact=True)
        except SnapshotSkipped as error:  # the capture of the save before has not ended
            return self._promised.decline(step, durable=durable, error=error)
        except Exception as error:
            if not is_mistake(error):
                self._saver.decline(step, durable, error)
            raise

    def _defer_save(self, step: int, durable: bool) -> SaveHandle:
        self._require_growing(step)
        handle = self._saver.handle(step, durable=durable)

        def act() -> None:
            self._check_usable()
            try:
                self._save(step, durable=durable, exact=True, handle=handle)
            except Exception as error:
                self._promised.decline(step, durable=durable, error=error, handle=handle)

        self._saver.turns.defer(act, handle)
        return handle

    def _in_turn(self, act: Callable[[], T], defer: Callable[[], T]) -> T:
        return self._saver.turns.run_or_defer(act, defer, patience_s=self._saver.turn_s)

    def _require_growing(self, step: int) -> None:
        last = self._promised.last_step
        if last is not None and step < last:
            raise UsageError(f"step {step} was saved after step {last}: steps only grow in a run")

    def _save(
        self, step: int, *, durable: bool, exact: bool, handle: SaveHandle | None = None
    ) -> SaveHandle:
        if not self._is_adopted:
            if self._may_restore:
                raise UsageError(
                    f"{self.root} holds generations of this run: call restore() before the first "
                    "save, or use another root to begin anew"
                )
            self._offers.close()
            self._begin_anew()
        self._require_growing(step)
        if self._promised.last_step is not None:
            # Nothing that ranks agree on comes after the first save, and all are past what came
            # before it: a step is saved by all together.
            self.world.end()
        return self._promised.save(step, durable=durable, exact=exact, handle=handle)

    def before_update(self) -> None:
        """Wait until an update may overwrite the state: for loops without a torch optimizer, and
        before each replay of a graph that was captured with a step in it.

        Optimizers of torch do this by themselves, before each step; a replay calls none of their
        hooks. Call it outside of captures. Where the state has no optimizer, every rank must call
        it equally often: ranks are saved together only after equally many updates.
        """
        if self._process == os.getpid():
            self._saver.fence()
            self._saver.stepped(None)
            fence_replays(self._saver.describer.optimizers)

    def _is_due(self, due: DueTimer, step: int) -> bool:
        now_s, world = time.monotonic(), self.world
        is_due = due.is_due(
            step,
            self._promised.last_step,
            now_s,
            is_alone=world.size == 1,
            was_announced=due.is_timed
            and self._saver.announcements.consume_announced(step, due.which),
        )
        if due.is_timed and world.rank == 0 and world.size > 1:
            ahead = due.to_announce(step, now_s, self._pace)
            if ahead is not None:
                self._saver.announcements.announce(ahead, due.which)
        return is_due

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
        """Wait for the promised durable saves, and let the keeper end when all ranks have closed.

        Durable saves under way are finished, and with a ``storage`` policy the newest snapshot is
        made durable too; a missed one is taken again, if the state is still that of its step.
        Raises the error of a promised save that failed. A second call does nothing.

        ``timeout_s``: the bound of all waits together, in seconds.
        """
        timeout_s = duration_s("timeout_s", timeout_s, least="from 0 on")
        if self._is_closed or self._process != os.getpid():
            return
        self._saver.turns.refuse_here("close()")
        started_s = time.monotonic()
        self._training.enter(SAVING)
        self._saver.turns.wait_empty(started_s + timeout_s)
        timeout_s = max(0.0, timeout_s - (time.monotonic() - started_s))
        try:
            self._keep_promises(timeout_s)
        finally:
            self._end(timeout_s, say_goodbye=True)

    def _hang_up(self, timeout_s: float = _HANG_UP_S) -> None:
        """Disconnects without a goodbye: snapshots in memory stay there for the next start."""
        if not self._is_closed and self._process == os.getpid():
            if self._preemption is not None:
                self._preemption.rescue()
            self._end(timeout_s, say_goodbye=False)

    def _end(self, timeout_s: float, *, say_goodbye: bool) -> None:
        self._is_closed = True
        self._saver.turns.drop("its Checkpointer was closed before the step had ended")
        left_s = math.inf if self._preemption is None else self._preemption.end()
        events_s = min(_LAST_EVENTS_S, left_s / 2)
        listeners.discard(self._saver)
        try:
            timeout_s = min(timeout_s, max(left_s - events_s, _LEAST_GOODBYE_S))
            self._saver.close(timeout_s=timeout_s, say_goodbye=say_goodbye)
        finally:
            outcome = "closed" if say_goodbye else "failed"
            emit(self._training.ended(outcome))
            self._stop_tracing(events_s)
            self._offers.close()
            self.world.close()

    def _keep_promises(self, timeout_s: float) -> None:
        is_stored = self.storage is not None and not self._saver.is_fenced
        self._promised.keep(self.save, timeout_s=timeout_s, is_newest_promised=is_stored)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._hang_up()
