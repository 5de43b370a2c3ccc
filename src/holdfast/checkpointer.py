"""The public object: snapshots of a state by policy, and its restore, on every rank alike.

It joins the rooms and owns none of their work: `state` describes, `snapshot` captures, the
keeper makes durable, `load` restores. No error of a save reaches the training loop; it
is an event, and it is what ``handle.wait_*`` raises.
"""

from __future__ import annotations

import atexit
import os
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.catalogue import Catalogue, catalogue
from holdfast.errors import (
    Fenced,
    HoldfastError,
    NotFound,
    SnapshotSkipped,
    StatePoisoned,
    UnsupportedState,
    UsageError,
)
from holdfast.events import RunStarted, emit, subscribe
from holdfast.format.manifest import Generation
from holdfast.load.choose import Candidate, choose
from holdfast.load.restore import Restored, restore_first
from holdfast.load.source import Checkpoint, from_manifest, from_memory
from holdfast.load.stored import broken_manifests, catalogue_of, nothing_fits, run_id_of, stored
from holdfast.observe.sinks import JsonlSink, log_sink_from_environment
from holdfast.persist import commit
from holdfast.policy.arguments import claim, duration_s, step_number, wanted_step
from holdfast.policy.interval import Every
from holdfast.policy.retention import Keep
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import arena_dir
from holdfast.snapshot.client import KeeperClient, find_or_start
from holdfast.snapshot.handle import SaveHandle
from holdfast.snapshot.saver import Saver
from holdfast.snapshot.underway import Patience, Place
from holdfast.state.describe import Describer
from holdfast.state.objects import State
from holdfast.storage.base import Store
from holdfast.storage.open import normal_root, open_store
from holdfast.world import World, agree, current_world, host_id, tell_all

#: How far ahead of every rank a timed save is announced.
_ANNOUNCE_AHEAD_S = 0.5
_RETRY_S = 0.05
_HANG_UP_S = 5.0
_AT_EXIT_S = 10.0
#: How much longer than for a message the ranks wait for each other's reading.
_READ_PATIENCE = 10


class Checkpointer:
    """Keeps one training state: snapshots in memory, checkpoints in storage, and the way back.

    Every rank makes one, with the same arguments, after ``init_process_group`` (or without a
    group, alone). ``root`` is a directory all ranks reach. ``state`` maps names to modules,
    optimizers, schedulers, ``holdfast.Rng()``, anything with ``state_dict`` and
    ``load_state_dict``, and plain values; it stays yours to change between saves.

    ``memory`` and ``storage`` say when ``step`` takes a snapshot and makes one durable; ``keep``
    which checkpoints stay; ``timeout_s`` bounds every wait for other ranks or the keeper, and ten
    times as long each wait for their reading in a restore.

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
        timeout_s: float = 120.0,
    ) -> None:
        _check(memory, storage, keep, parity)
        self.state = state
        self.root = normal_root(root)
        self.memory, self.storage, self.keep = memory, storage, keep
        self.timeout_s = duration_s("timeout_s", timeout_s)
        self._process = os.getpid()
        self.world: World = current_world(timeout_s=self.timeout_s)
        self._store: Store = open_store(self.root)
        self._describer = Describer(state, self.world.rank)
        self._is_poisoned = False
        self._is_closed = False
        self._is_adopted = False
        self._last_step: int | None = None
        self._last_handle: SaveHandle | None = None
        self._carried: list[SaveHandle] = []
        self._timed_at = dict.fromkeys(("memory", "storage"), time.monotonic())
        self._step_times: list[float] = []
        self._announced_until = dict.fromkeys(("memory", "storage"), -1)
        self._updates_at_save = 0
        self._meet()
        _open_checkpointers.add(self)

    # ── the run ──────────────────────────────────────────────────────────────────────────

    def _meet(self) -> None:
        """Agree with the other ranks on run, host and incarnation, and reach the keeper."""
        world, timeout_s = self.world, self.timeout_s
        host = host_id()
        self._require_one_plan(agree(world, "start: state", self._plan, timeout_s=timeout_s))
        run_id = tell_all(world, "start: root", self._open_root, timeout_s=timeout_s).decode()
        self._arena = arena_dir(run_id, host)
        place = Place(run_id, 0, world.nonce, world.rank, world.size)
        usual = Patience()
        patience = Patience(
            first_grant_s=2.5 * timeout_s, grant_s=min(usual.grant_s, timeout_s),
            durable_grant_s=min(usual.durable_grant_s, timeout_s), keeper_s=timeout_s,
        )  # fmt: skip
        self._saver = Saver(self._describer, place, self._connect, patience)
        try:
            begun = tell_all(world, "start: incarnation", self._begin, timeout_s=timeout_s)
            self.incarnation, self._may_restore = msgspec.json.decode(begun, type=tuple[int, bool])
            self._saver.place = Place(run_id, self.incarnation, world.nonce, world.rank, world.size)
            agree(world, "start: join", self._join, timeout_s=timeout_s)
        except BaseException:
            # A keeper that still hears from us would hold the root against the next try.
            self._saver.close(timeout_s=_HANG_UP_S, say_goodbye=False)
            raise
        self._trace = JsonlSink(Path(self.root) / "events" / f"rank-{world.rank:05d}.jsonl")
        self._stop_traces = [subscribe(self._trace)]
        log = log_sink_from_environment()
        if log is not None:
            self._stop_traces.append(subscribe(log))
        # Of a Checkpointer that nobody closes; its Saver ends by itself as well.
        finalizer = weakref.finalize(self, _stop_tracing, self._stop_traces, self._trace)
        finalizer.atexit = False
        emit(RunStarted(
            incarnation=self.incarnation, rank=world.rank, run_id=run_id, world=world.size,
            host=host, pid=os.getpid(),
        ))  # fmt: skip

    def _plan(self) -> bytes:
        """What must be alike on all ranks; raises for a state that cannot be saved."""
        if not isinstance(self.state, dict) or not self.state:
            raise UsageError("the state is a dict from names to objects, and not empty")
        self._describer.describe()
        return msgspec.json.encode({
            "root": self.root, "memory": str(self.memory), "storage": str(self.storage),
            "keep": str(self.keep), "timeout_s": str(self.timeout_s), "host": host_id(),
        })  # fmt: skip

    def _require_one_plan(self, plans: list[bytes]) -> None:
        ranks = [msgspec.json.decode(plan, type=dict[str, str]) for plan in plans]
        hosts = sorted({plan["host"] for plan in ranks})
        if len(hosts) > 1:
            raise UsageError(
                f"the ranks run on {len(hosts)} hosts ({', '.join(hosts)}); this version keeps "
                "runs on one host"
            )
        for rank, plan in enumerate(ranks):
            for name, value in plan.items():
                if value != ranks[0][name]:
                    raise UsageError(
                        f"the ranks disagree: {name} is {ranks[0][name]} on rank 0 and {value} on "
                        f"rank {rank}. Give every rank's Checkpointer the same arguments."
                    )

    def _open_root(self) -> bytes:
        wanted = os.environ.get("HOLDFAST_RUN_ID", "")
        before = wanted or run_id_of(self._store)  # of a root that lost its holdfast.json
        found = commit.open_root(self._store, before or uuid.uuid4().hex[:12])
        if wanted and found.run_id != wanted:
            raise UsageError(
                f"{self.root} belongs to run {found.run_id}, HOLDFAST_RUN_ID says {wanted}: unset "
                "it, or use another root"
            )
        return found.run_id.encode()

    def _connect(self, listener: Any, on_lost: Any) -> KeeperClient:
        """A line to this host's keeper, and this rank's place in the incarnation on it."""
        place = self._saver.place
        line = find_or_start(
            self._arena, run_id=place.run_id, root=self.root, host_id=host_id(),
            timeout_s=self.timeout_s,
        )  # fmt: skip
        client = KeeperClient(line, listener, on_lost)
        try:
            hello = m.Hello(run_id=place.run_id, root=self.root)
            client.request(hello, m.Welcome, timeout_s=self.timeout_s)
            if place.incarnation:
                join = m.Join(
                    incarnation=place.incarnation, nonce=place.nonce, rank=place.rank,
                    keep_last=self.keep.last, keep_every=self.keep.every,
                    persist_at_end=self.storage is not None, is_copying=self._saver.is_copying,
                )  # fmt: skip
                client.request(join, m.Done, timeout_s=self.timeout_s)
        except HoldfastError:
            client.close()
            raise
        return client

    def _begin(self) -> bytes:
        message = m.Begin(nonce=self.world.nonce, world=self.world.size)
        begun = self._saver.request(message, m.Begun, timeout_s=self.timeout_s)
        found = catalogue_of(self._store)
        may_restore = bool(self._candidates(found, None) or broken_manifests(found))
        return msgspec.json.encode((begun.incarnation, may_restore))

    def _join(self) -> bytes:
        self._saver.reconnect()
        return b""

    # ── restoring ────────────────────────────────────────────────────────────────────────

    def restore(self, step: int | str | None = None) -> Restored | None:
        """Fill the state with the newest generation all ranks can have; None when there is none.

        ``step``: restore this step instead, or, as "incarnation-step", a generation that was
        abandoned. All ranks call it, before the first save. Raises StateMismatch listing every
        difference, NotFound for a step that is not there, RestoreError when no source was good;
        after RestoreError in the middle the state is poisoned and ``step`` and ``save`` refuse.
        """
        self._check_usable(poison_is_fine=True)
        step = wanted_step(step)
        if self._last_step is not None:
            raise UsageError(
                "restore() comes before the first save: make a new Checkpointer to go back, so "
                "that steps saved again are told apart from the old ones"
            )
        listed = tell_all(
            self.world, "restore: candidates", lambda: self._list(step), timeout_s=self.timeout_s
        )
        candidates = msgspec.json.decode(listed, type=list[Candidate])
        restored = restore_first(
            self.world, self.state, candidates, self._open, incarnation=self.incarnation,
            timeout_s=self.timeout_s * _READ_PATIENCE, on_poison=self._poison,
        )  # fmt: skip
        self._adopt(restored.generation if restored else None)
        return restored

    def _list(self, step: int | str | None) -> bytes:
        found = catalogue_of(self._store)
        fit = self._candidates(found, step)
        if not fit and (step is not None or broken_manifests(found)):
            raise nothing_fits(self._store, found, step)
        return msgspec.json.encode(fit)

    def _candidates(self, found: Catalogue, step: int | str | None) -> list[Candidate]:
        inventory = self._inventory()
        held = [
            Candidate(g.incarnation, g.step, "memory", g.attempt) for g in inventory.generations
        ]
        return choose([*held, *stored(found)], inventory.parents | found.parents, step)

    def _inventory(self) -> m.Inventory:
        return self._saver.request(m.ListInventory(), m.Inventory, timeout_s=self.timeout_s)

    def _open(self, candidate: Candidate) -> Checkpoint:
        if candidate.where == "memory":
            held = next(
                (g for g in self._inventory().generations if g.attempt == candidate.attempt), None
            )
            if held is None:
                raise NotFound(f"{candidate.generation} is no longer in memory")
            self._saver.request(m.Pin(attempt=candidate.attempt), m.Done, timeout_s=self.timeout_s)
            return from_memory(self._arena, held)
        manifest = catalogue(self._store).find(candidate.generation)
        if manifest is None:
            raise NotFound(f"{candidate.generation} is no longer in storage")
        return from_manifest(self._store, manifest)

    def _adopt(self, parent: Generation | None) -> None:
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
        raises because a snapshot failed.
        """
        self._check_usable()
        step = step_number(step)
        self._learn_pace()
        durable = self.storage is not None and self._is_due(self.storage, step, "storage")
        in_memory = self.memory is not None and self._is_due(self.memory, step, "memory")
        try:
            durable = bool(self._carried_over()) or durable
            if not (durable or in_memory):
                return None
            return self._save(step, durable=durable, exact=False)
        except Exception as error:  # of the user's own state_dict, say: it costs a snapshot
            if _is_mistake(error):
                raise
            self._last_step = step
            self._last_handle = self._saver.decline(step, durable, error)
            return self._last_handle

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
            missed = self._last_handle.state == "failed"
            if not missed:
                return self._saver.make_durable(step) if durable else self._last_handle
        carried = list(self._carried_over())
        handle = self._saver.save(
            step, durable=durable or bool(carried), exact=exact, carried=carried
        )
        self._carried.clear()
        self._last_step, self._last_handle = step, handle
        self._updates_at_save = self._saver.updates
        return handle

    def before_update(self) -> None:
        """Wait until an update may overwrite the state: for loops without a torch optimizer.

        Optimizers of torch do this by themselves, in a hook before each step.
        """
        if self._process == os.getpid():
            self._saver.fence()

    def _is_due(self, policy: Every, step: int, which: str) -> bool:
        by_steps = policy.is_due_by_steps(step, self._last_step)
        if policy.minutes is None:
            return by_steps
        return self._is_timed_due(policy, step, which) or by_steps

    def _is_timed_due(self, policy: Every, step: int, which: str) -> bool:
        """Rank 0's clock decides; the step is told to all ranks ahead, so that all act on it."""
        now = time.monotonic()
        if (step, which) in self._saver.announced:
            self._saver.announced.discard((step, which))
            self._timed_at[which] = now
            return True
        may_announce = self.world.rank == 0 and step > self._announced_until[which]
        if not (may_announce and policy.is_due_by_time(now, self._timed_at[which])):
            return False
        if self.world.size == 1:
            self._timed_at[which] = now
            return True
        ahead = max(2, int(_ANNOUNCE_AHEAD_S / max(1e-3, self._pace())) + 1)
        self._announced_until[which] = step + ahead
        self._saver.announce(step + ahead, which)
        return False

    def _learn_pace(self) -> None:
        self._step_times = [*self._step_times[-8:], time.monotonic()]

    def _pace(self) -> float:
        times = self._step_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1.0

    def _carried_over(self) -> list[SaveHandle]:
        """A durable save that no rank could take is due again at the next step."""
        handle = self._last_handle
        if handle is None or not handle.durable or handle in self._carried:
            return self._carried
        if self._saver.previous_was_skipped():
            handle.renew()
            self._carried.append(handle)
            self._last_handle = None
        return self._carried

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
        is made durable too. Raises the error of a promised save that failed. Twice is once.
        """
        timeout_s = duration_s("timeout_s", timeout_s, least="from 0 on")
        if self._is_closed or self._process != os.getpid():
            return
        try:
            self._keep_promises(timeout_s)
        finally:
            self._is_closed = True
            _open_checkpointers.discard(self)
            try:
                self._saver.close(timeout_s=timeout_s)
            finally:
                self._stop_tracing()

    def _keep_promises(self, timeout_s: float) -> None:
        """Take the durable save that was carried along, if the state is still that of its step."""
        deadline = time.monotonic() + timeout_s
        while self._carried_over():
            if self._saver.updates != self._updates_at_save or time.monotonic() > deadline:
                reason = SnapshotSkipped("no slot came free before the state went on; not saved")
                for carried in self._carried:
                    carried.fail(reason, captured=False)
                raise reason
            time.sleep(_RETRY_S)
            self.save(self._last_step or 0, durable=True)
        handle = self._last_handle
        if handle is not None and handle.durable:
            handle.wait_durable(max(0.0, deadline - time.monotonic()))

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

    def _hang_up(self) -> None:
        """Leave without a goodbye: what is in memory stays there for the next start."""
        if not self._is_closed and self._process == os.getpid():
            self._is_closed = True
            _open_checkpointers.discard(self)
            self._saver.close(timeout_s=_HANG_UP_S, say_goodbye=False)
            self._stop_tracing()

    def _stop_tracing(self) -> None:
        _stop_tracing(self._stop_traces, self._trace)


def _stop_tracing(stop_traces: list[Callable[[], None]], trace: JsonlSink) -> None:
    for stop in stop_traces:
        stop()
    trace.close()


def _is_mistake(error: Exception) -> bool:
    """A call that means nothing, the same on every rank: the caller must know, nobody waits."""
    is_usage = isinstance(error, UsageError) and not isinstance(error, UnsupportedState)
    return is_usage or isinstance(error, StatePoisoned)


def _check(memory: object, storage: object, keep: object, parity: object) -> None:
    for name, policy in (("memory", memory), ("storage", storage)):
        if not (policy is None or isinstance(policy, Every)):
            raise UsageError(
                f"{name}={policy!r}: say holdfast.Every(steps=...), Every(minutes=...) or None"
            )
    if not isinstance(keep, Keep):
        raise UsageError(f"keep={keep!r}: say holdfast.Keep(last=...), or Keep() for all")
    if parity != 0 or isinstance(parity, bool):
        raise UsageError(f"parity={parity!r}: this version protects by storage only; use parity=0")


_open_checkpointers: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


@atexit.register
def _end_captures() -> None:
    """At the interpreter's end: a capture under way is finished, and its keeper goes on with it."""
    for checkpointer in tuple(_open_checkpointers):
        checkpointer._saver.end_capture(timeout_s=_AT_EXIT_S)


def _fence_all(*_: object) -> None:
    """Before any torch optimizer of this process steps: nothing is overtaken.

    The hook is the global one: it also sees optimizers that were not handed over but share
    parameters, and it survives pickling and copying of an optimizer.
    """
    for checkpointer in tuple(_open_checkpointers):
        checkpointer.before_update()


register_optimizer_step_pre_hook(_fence_all)
# A forked child (a data loader's worker) has neither the capture thread nor anything to fence.
os.register_at_fork(after_in_child=_open_checkpointers.clear)
