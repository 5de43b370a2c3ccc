"""Stages state dicts into shared memory, from which the keeper writes them.

``dcp.async_save`` returns as soon as the state dict is copied. What its thread or process is given
in its place is a note of the save: they wait until the keeper has published it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager

from holdfast.capture.handles import SaveHandle
from holdfast.capture.save_turns import StepBegan
from holdfast.dcp.checkpoint_ids import CheckpointPlace, refuse_other_prefix, warn_if_begun_anew
from holdfast.dcp.dcp_writer import Writer, place_of_next
from holdfast.dcp.forms import form_of
from holdfast.dcp.plan_state import PlannedPart, describe_part, items_of
from holdfast.dcp.staged_saves import STAGED, StagedSave, add, sessions
from holdfast.errors import HoldfastError, PersistFailed, SnapshotSkipped, UsageError
from holdfast.format.manifest import Generation
from holdfast.policy.when import Keep
from holdfast.protocol import messages as m
from holdfast.restore.reading.stored import overview_of
from holdfast.startup import RunOptions, start_run
from holdfast.state.describe import Describer, Description
from holdfast.storage.base import Store
from holdfast.storage.open import open_store
from holdfast.world import current_world, from_rank0, refuse_rank_without_group


class Stager(AsyncStager):
    """The ``async_stager`` of ``dcp.async_save`` beside a ``Writer``: copies into shared memory.

    ``writer``: the Writer of the same call. Its ``step`` must be set, and be another one, before
    each save. ``timeout_s``: as for a Checkpointer.

    The copy is in the arena, the keeper writes it behind the training, and the checkpoint survives
    the end of this process. The first save starts the keeper, which has the root's lock until
    ``close``, or until the Writer saves without staging. All ranks of the default process group
    take part. Only torch's ``DefaultSavePlanner`` can be used: another one would have to change
    what is copied already.
    """

    _synchronize_after_execute = False

    def __init__(self, writer: Writer, *, timeout_s: float = 120.0) -> None:
        if not isinstance(writer, Writer):
            raise UsageError(f"a Stager is for a holdfast.dcp.Writer, and not {writer!r:.60}")
        self._writer, self._timeout_s = writer, timeout_s
        self._session: _Session | None = None
        self._outcomes = Path(tempfile.mkdtemp(prefix="holdfast-dcp-"))
        weakref.finalize(self, shutil.rmtree, self._outcomes, ignore_errors=True)
        self._last: int | None = None
        self._prefix: str | None = None
        self._is_closed = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state dict, which may change when this returns; what stands for it is returned.

        ``state_dict``: what is saved.

        UsageError without a new step. Any other error is raised by the future of the save.
        """
        if self._is_closed:
            raise UsageError("this Stager is closed")
        step = self._writer.step
        if step is None or step == self._last:
            raise UsageError(
                f"the Writer has {'no step' if step is None else f'still the step {step}'}: set "
                "writer.step before each async_save with a Stager"
            )
        prefix = place_of_next(self._writer).prefix
        is_back = self._last is not None and (step < self._last or prefix != self._prefix)
        before = self._last, self._prefix
        self._last, self._prefix = step, prefix
        if is_back:  # a run's steps grow; these are another run's, from an earlier checkpoint on
            self._end_session()
        handle: SaveHandle | None = None
        error: HoldfastError | None = None
        try:
            handle = self._open(state_dict).save(state_dict, step)
        except HoldfastError as failed:  # the other ranks hear of it where they all wait
            error = failed
            if self._session is None:  # on no rank: this step can be saved yet
                self._last, self._prefix = before
        token = uuid.uuid4().hex
        rank = 0 if self._session is None else self._session.rank
        save = StagedSave(token, self._writer.root, step, rank, str(self._outcomes / token))
        add(save, handle, error)
        return {STAGED: save}

    def _open(self, state_dict: dict[str, Any]) -> _Session:
        if self._session is None:
            root, keep = self._writer.root, self._writer.keep
            keep, place = keep or Keep(), place_of_next(self._writer)
            self._session = _Session(root, keep, self._timeout_s, state_dict, place)
            mine = weakref.ref(self)
            sessions[root] = lambda: None if (one := mine()) is None else one._end_session()
        return self._session

    def _end_session(self) -> None:
        session, self._session = self._session, None
        sessions.pop(self._writer.root, None)
        if session is not None:
            session.close()

    def synchronize_staging(self) -> None:
        """See torch: the copy is whole when ``stage`` returns."""

    def close(self) -> None:
        """Wait until what was staged is durable, and let the keeper end; all ranks call it."""
        self._is_closed = True
        try:
            self._end_session()
        finally:
            shutil.rmtree(self._outcomes, ignore_errors=True)


class _StateDictDescriber(Describer):
    """Describes a state dict as a save plan of torch's has it."""

    def __init__(self, state_dict: dict[str, Any], rank: int, world: int) -> None:
        super().__init__({}, rank, world)
        self.state_dict = state_dict
        self.prefix: str | None = None
        self._memory: dict[str, torch.Tensor] = {}
        self._described: Description | None = None

    def describe(self, *, is_checked: bool = False) -> Description:
        planner = DefaultSavePlanner()
        planner.set_up_planner(self.state_dict)
        plan = planner.create_local_plan()
        items = items_of(plan)
        form = form_of(items, is_apart=self.world > 1, prefix=self.prefix)
        paths = {name: item.path for name, item in items.items()}
        part = PlannedPart(plan, (), paths, form, self.rank, self.world)
        found = describe_part(part, planner, self._memory)
        last = self._described
        if last is not None and _are_alike(last, found):
            for old, new in zip(last.bindings, found.bindings, strict=True):
                old.tensor, old.local, old.signature = new.tensor, new.local, new.signature
            found.bindings = last.bindings  # what is planned for these stays planned
        self._described = found
        return found

    def let_go(self) -> None:
        """Keep the memory, and no tensor of the state dict."""
        self.state_dict = {}


def _are_alike(one: Description, other: Description) -> bool:
    return one.table_hash == other.table_hash and all(
        old.staged is new.staged and old.name == new.name
        for old, new in zip(one.bindings, other.bindings, strict=True)
    )


class _Session:
    """The ranks' session with their keepers, for saves of one run."""

    def __init__(
        self,
        root: str,
        keep: Keep,
        timeout_s: float,
        state_dict: dict[str, Any],
        place: CheckpointPlace,
    ) -> None:
        refuse_rank_without_group()
        self._timeout_s = timeout_s
        self._world = current_world(timeout_s=timeout_s)
        self.rank = self._world.rank
        store = open_store(root)
        describer = _StateDictDescriber(state_dict, self.rank, self._world.size)
        self._describer = describer
        describer.prefix = place.prefix
        options = RunOptions(root, None, None, keep, timeout_s, compare_replicas=0)
        try:
            run = start_run(self._world, store, state_dict, options, describer)
            self._saver = run.saver
            try:
                self._adopt(store, place)
            except BaseException:
                self._saver.close(timeout_s=timeout_s, say_goodbye=False)
                raise
        except BaseException:
            self._world.close()
            raise

    def _adopt(self, store: Store, place: CheckpointPlace) -> None:
        """Go on from the newest checkpoint before a step, as ``holdfast.save`` does."""
        step = place.step
        assert step is not None  # or nothing was staged

        def tell() -> bytes:
            refuse_other_prefix(store, place)
            warn_if_begun_anew(place.root, step)
            earlier = [one for one in overview_of(store).lineage if one.step < step]
            parent: Generation | None = max(
                earlier, key=lambda one: (one.step, one.incarnation), default=None
            )
            pair = None if parent is None else (parent.incarnation, parent.step)
            self._saver.request(m.Adopt(parent=pair), m.Done, timeout_s=self._timeout_s)
            return b""

        from_rank0(self._world, "the start of saving", tell, timeout_s=self._timeout_s)

    def save(self, state_dict: dict[str, Any], step: int) -> SaveHandle:
        self._describer.state_dict = state_dict
        try:
            return self._saver.save(step, durable=True, exact=True)
        except StepBegan:
            error = SnapshotSkipped(f"step {step}: an optimizer steps, save after it")
            self._saver.decline(step, True, error)
            raise error from None
        except HoldfastError as error:
            self._saver.decline(step, True, error)
            raise
        finally:
            self._describer.let_go()

    def close(self) -> None:
        try:
            self._saver.end_capture(timeout_s=self._timeout_s)
            with contextlib.suppress(PersistFailed):  # each save's future tells of its own
                self._saver.close(timeout_s=self._timeout_s, say_goodbye=True)
        finally:
            self._world.close()
