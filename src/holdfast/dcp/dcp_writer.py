"""The ``storage_writer`` of ``torch.distributed.checkpoint.save``: it saves in a root here.

The plans of the ranks become boxes of leaves, the rest is ``holdfast.save``: one image for each
rank, the manifest last. DCP's planners and its collectives are used as they are.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.dcp.checkpoint_ids import (
    CheckpointPlace,
    newest_step,
    place_below,
    refuse_other_prefix,
    warn_if_begun_anew,
)
from holdfast.dcp.dcp_reader import Reader
from holdfast.dcp.forms import DictForm, PlanItem, form_of
from holdfast.dcp.plan_state import PlannedPart, describe_part, items_of
from holdfast.dcp.staged_saves import STAGED, StagedSave, close_session, wait_durable
from holdfast.errors import HoldfastError, UsageError
from holdfast.events import warn
from holdfast.format.manifest import Generation
from holdfast.oneshot import save_described
from holdfast.persist.removal import Removal, plan, remove
from holdfast.policy.arguments import duration_s, step_number
from holdfast.policy.when import Keep
from holdfast.storage.base import Store
from holdfast.storage.open import normal_root, open_store
from holdfast.world import TorchWorld, World, refuse_rank_without_group


class _Ticket(NamedTuple):
    """What rank 0 tells each rank with its plan."""

    meeting: str
    rank: int
    world: int
    step: int
    form: DictForm


class Writer(StorageWriter):
    """The ``storage_writer`` of ``dcp.save`` and ``dcp.async_save``: saves below a root.

    ``root``: a directory that all ranks reach, or a bucket. ``step``: the step that the checkpoint
    is of; None: the number at the end of ``checkpoint_id``, or, without one, the one after the
    newest that is stored. ``keep``: which checkpoints stay; those that it releases are removed
    after each save. ``timeout_s``: as for ``holdfast.save``.

    What is saved can be read by ``dcp.load`` through ``Reader``, by ``holdfast.load``, by a
    Checkpointer and by all commands. An error of one rank is raised on all, as DCP does it: a
    ``CheckpointException`` with the error of Holdfast in it, such as RootBusy while a run saves
    there, UnsupportedState for a value that cannot be stored, StorageError, StateMismatch for
    tensors that the plans cover in part. Then nothing is published.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        step: int | None = None,
        keep: Keep | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        self.root = normal_root(root)
        self.step = None if step is None else step_number(step)
        self._place = CheckpointPlace(self.root, None, None)
        self._places: dict[int, CheckpointPlace] = {}
        """What a save has as its id, by thread: others may run beside the one that calls."""
        self._owner = threading.get_ident()
        if keep is not None and not isinstance(keep, Keep):
            raise UsageError(f"keep={keep!r:.60}: give a holdfast.Keep")
        self.keep = keep
        self.timeout_s = duration_s("timeout_s", timeout_s)
        self.generation: Generation | None = None
        """The checkpoint that was saved last."""
        self._own_values: list[WriteItem] = []
        self._own_items: dict[str, PlanItem] = {}
        self._staged: WriteItem | None = None
        self._staged_step = 0

    @property
    def checkpoint_id(self) -> str:
        """The root; as DCP's own writers name theirs."""
        return self.root

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See torch: always False, because a directory does not say by whom it is to be written.

        ``checkpoint_id``: a path.
        """
        return False

    def storage_meta(self) -> StorageMeta | None:
        """See torch."""
        return StorageMeta(checkpoint_id=self.root)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the step of the next save from an id.

        ``checkpoint_id``: a path that ends with the step, as ``step-500``; the root itself, or
        None, changes nothing. UsageError for any other.
        """
        thread = threading.get_ident()
        self._places.pop(thread, None)
        if checkpoint_id is not None:
            place = place_below(checkpoint_id, self.root)
            if place.step is not None:
                self._places[thread] = place
                if thread == self._owner:  # a save behind it changes nothing for the next one
                    self.step, self._place = place.step, place

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See torch, which calls it. UsageError for a rank without its group.

        ``is_coordinator``, ``args``, ``kwargs``: as torch gives them.
        """
        refuse_rank_without_group()
        if kwargs.get("use_collectives") is False:
            raise UsageError(
                "use_collectives=False: the ranks of a checkpoint agree on what each writes; "
                "leave it out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See torch, which calls it.

        ``plan``: what this rank has.
        """
        if not plan.usable:
            raise UsageError(
                "the planner sends no plan because it has cached one (enable_plan_caching=True): "
                "leave that out, the ranks need each other's plans here"
            )
        is_staged = [item.index.fqn for item in plan.items] == [STAGED]
        self._staged = plan.items[0] if is_staged else None
        self._own_values = [item for item in plan.items if item.type is WriteItemType.BYTE_IO]
        self._own_items = items_of(plan)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See torch, which calls it on rank 0: names the leaves, and tells each rank its place.

        ``plans``: what each rank writes.
        """
        from dataclasses import replace

        items = dict(self._own_items)
        for one in plans:
            items |= items_of(one)
        values = {name for name, item in items.items() if item.shape is None}
        place = self._places.pop(threading.get_ident(), None) or place_of_next(self)
        if self._staged is None:
            refuse_other_prefix(open_store(self.root), place)
        is_apart = not values <= self._own_items.keys()
        form = form_of(items, is_apart=is_apart, prefix=place.prefix)
        step = newest_step(self.root) + 1 if place.step is None else place.step
        if self._staged is None:
            warn_if_begun_anew(self.root, step)
        meeting = uuid.uuid4().hex
        return [
            replace(one, storage_data=_Ticket(meeting, rank, len(plans), step, form))
            for rank, one in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See torch, which calls it: everything is durable, and published, when it returns.

        ``plan``: what this rank writes. ``planner``: gives the tensors and values.
        """
        ticket = plan.storage_data
        if not isinstance(ticket, _Ticket):
            raise UsageError("the planner leaves out storage_data of a plan: hand it on")
        if self._staged is not None:
            return self._wait_staged(self._staged, planner)
        close_session(self.root)
        items = self._own_items | items_of(plan)
        part = PlannedPart(
            plan,
            self._own_values,
            {name: item.path for name, item in items.items()},
            ticket.form,
            ticket.rank,
            ticket.world,
        )
        world = _world_of(ticket, self.timeout_s)
        store = open_store(self.root)
        try:
            self.generation = save_described(
                store,
                world,
                lambda: (describe_part(part, planner), b""),
                ticket.step,
                timeout_s=self.timeout_s,
                published=lambda _: self._prune(store),
            )
        finally:
            world.close()
        done: Future[list[WriteResult]] = Future()
        done.set_result([_result(item, self.generation) for item in plan.items])
        return done

    def _wait_staged(self, item: WriteItem, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Wait until the keeper has published what a Stager copied."""
        if type(planner) is not DefaultSavePlanner:
            raise UsageError(
                f"a {type(planner).__qualname__} plans nothing of what a Stager has copied: leave "
                "out the planner, or the Stager"
            )
        save = planner.lookup_object(item.index)
        if not isinstance(save, StagedSave) or save.root != self.root:
            raise UsageError(f"{self.root} is not the root that the Stager copies for")
        self._staged_step = save.step
        wait_durable(save, self.timeout_s)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, str(save.step))])
        return done

    def _prune(self, store: Store) -> None:
        if self.keep is None:
            return
        try:
            remove(store, Removal(plan(store, self.keep, abandoned=False).checkpoints, (), ()))
        except HoldfastError as error:  # the checkpoint is there, whatever becomes of older ones
            warn(f"older checkpoints in {store.url} were not pruned: {error}")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See torch, which calls it on rank 0. The manifest is published by then.

        ``metadata``: of the checkpoint; of what was staged they are filled in. ``results``: of all
        ranks.
        """
        if self._staged is not None:
            with contextlib.suppress(HoldfastError):
                found = Reader(self.root, step=self._staged_step).read_metadata()
                metadata.state_dict_metadata = dict(found.state_dict_metadata)
                metadata.planner_data = found.planner_data


def place_of_next(writer: Writer) -> CheckpointPlace:
    """The id that the step of the next save was taken from; without a prefix if from none."""
    is_by_id = writer._place.step == writer.step
    return writer._place if is_by_id else CheckpointPlace(writer.root, writer.step, None)


def _world_of(ticket: _Ticket, timeout_s: float) -> World:
    if ticket.world == 1:
        return World()
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("the plan is for several ranks, and there is no process group")
    among = (ticket.rank, ticket.world, ticket.meeting)
    return TorchWorld(timeout_s=timeout_s, among=among)


def _result(item: WriteItem, generation: Generation) -> WriteResult:
    size = 0
    if item.tensor_data is not None:
        tensor = item.tensor_data
        size = tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize
    return WriteResult(item.index, size, str(generation))
