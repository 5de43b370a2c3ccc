"""Keeps and resumes the replica groups of torchft: what no living peer can give comes from here.

Each group has a root of its own and snapshots in the memory of its hosts. One group, the leader,
makes checkpoints durable. A group that comes back restores its own newest state; where a peer has
gone on, torchft then gives it the peer's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from holdfast.errors import UsageError
from holdfast.integrations.attached import AttachedCheckpointer
from holdfast.integrations.seam import Adapter, missing
from holdfast.integrations.torchft_transport import HoldfastTransport, refuse_sharded
from holdfast.policy.when import Every
from holdfast.state.rng import Rng
from holdfast.storage.open import normal_root

if TYPE_CHECKING:
    from holdfast.capture.handles import SaveHandle

try:
    from torchft.manager import Manager
except ImportError as error:
    raise missing("torchft", error) from error

_LOOP = "torchft"
_MANAGER = "manager"
_ADAPTER = Adapter("torchft", "0.2", (_LOOP, _MANAGER))
#: The key of the state functions that are registered with a manager that has none.
_REGISTERED = "holdfast"
#: Begins the keys of the state functions that DiLoCo registers.
_OF_DILOCO = "StreamingDiLoCoFragment"


def attach(
    manager: Manager,
    state: Mapping[str, Any],
    root: str | os.PathLike[str],
    *,
    storage: Every | None = Every(steps=500),  # noqa: B008  (a frozen value)
    step: int | str | None = None,
    **options: Any,
) -> ManagerCheckpointer:
    """Attach a Checkpointer to a Manager of torchft, and go on from its group's newest generation.

    Call it on all ranks of the group, before the first quorum.

    ``state``, ``options``: as for ``Checkpointer``. A manager without state functions gets those of
    ``state``: what a living peer sends. ``root``: a directory or bucket; each group has its own
    below it, named by ``replica_id`` of the Manager. ``storage``: when the leader makes a snapshot
    durable, in steps; None for never. ``step``: go on from this step instead, or from a generation
    as "incarnation-step".

    Raises UsageError for a manager whose group has no name, or that has begun.
    """
    _ADAPTER.check_version(_version())
    if not isinstance(manager, Manager):
        raise UsageError(f"attach() takes a torchft Manager, got a {type(manager).__qualname__}")
    if storage is not None and storage.steps is None:
        raise UsageError(
            "storage=Every(minutes=) has no step at which all groups know who the leader is: give "
            "Every(steps=)"
        )
    if manager.current_step() or manager._quorum_future is not None:
        raise UsageError(
            f"the manager is at step {manager.current_step()} and has begun: call attach() before "
            "the first zero_grad() or start_quorum()"
        )
    _refuse_outer_steps(manager)
    where = f"{normal_root(root)}/{_group_of(manager)}"
    own = _ADAPTER.check(_version(), where, state)
    return ManagerCheckpointer(manager, own, where, storage, step, options)


class ManagerCheckpointer(AttachedCheckpointer):
    """A Checkpointer attached to a Manager of torchft, made by ``attach``."""

    has_committed: bool = False
    """True if the last step of the optimizer was made: not where too few groups or an error of one
    of them stopped it. What counts steps, a scheduler for example, goes on only then.
    """

    def __init__(
        self,
        manager: Manager,
        state: Mapping[str, Any],
        root: str,
        storage: Every | None,
        step: int | str | None,
        options: Mapping[str, Any],
    ) -> None:
        self._manager, self._storage = manager, storage
        if isinstance(manager._checkpoint_transport, HoldfastTransport):
            modules = (one for one in state.values() if isinstance(one, nn.Module))
            refuse_sharded(chain.from_iterable(one.parameters() for one in modules))
        parts = {_MANAGER: manager, **state}
        super().__init__(manager, root, _LOOP, {}, parts, {**options, "storage": None})
        self._restore(step)
        self._given = tuple(state)
        if not manager._load_state_dict_fns:
            manager.register_state_dict_fn(_REGISTERED, self._take, self._give)
        self._fence_peers()
        self._follow_commits()

    @property
    def is_leader(self) -> bool:
        """True on the ranks of the group that makes checkpoints durable: the first of a quorum."""
        return bool(self._manager.participating_rank() == 0)

    def step(self, step: int | None = None) -> SaveHandle | None:
        """Call after the optimizer's step, on all ranks of the group; saves when a policy says so.

        A step that was not committed is not saved: None is returned. ``step``: the manager's count,
        and no other.
        """
        now = self._manager.current_step()
        if step not in (None, now):
            raise UsageError(
                f"step({step}): the manager is at step {now}, whose count is saved. Call step() "
                "without a number"
            )
        if not self.has_committed or now == self.steps:
            return None
        _refuse_outer_steps(self._manager)  # made after attach()
        last, self.steps = self.steps, now
        if self.is_leader and self._is_due(last, now):
            return self.checkpointer.save(now, durable=True)
        return self.checkpointer.step(now)

    def _is_due(self, last: int, now: int) -> bool:
        return self._storage is not None and self._storage.is_due_by_steps(now, last)

    # ── what peers give each other ───────────────────────────────────────────────────────────────

    def _give(self) -> dict[str, Any]:
        """Returns the state for a peer: all but generators, which are each rank's own."""
        found = {key: self._state[key] for key in self._given}
        return {
            key: one.state_dict() if _has_state(one) else one
            for key, one in found.items()
            if not isinstance(one, Rng)
        }

    def _take(self, given: Mapping[str, Any]) -> None:
        for key, one in given.items():
            if _has_state(self._state[key]):
                self._state[key].load_state_dict(one)
            else:
                self._state[key] = one

    def _fence_peers(self) -> None:
        """Lets what a peer sends overwrite the state only when the last snapshot is taken of it."""
        functions = self._manager._load_state_dict_fns
        self._functions = dict(functions)
        for key, load in self._functions.items():
            functions[key] = self._fenced(load)

    def _fenced(self, load: Callable[[Any], None]) -> Callable[[Any], None]:
        def after_capture(given: Any) -> None:
            self.checkpointer.before_update()
            load(given)

        return after_capture

    def _follow_commits(self) -> None:
        """Notes whether a step was committed: the count of a manager that is healed moves, too."""
        original = self._manager.should_commit

        def should_commit(*args: Any, **kwargs: Any) -> bool:
            self.has_committed = False
            self.has_committed = bool(original(*args, **kwargs))
            return self.has_committed

        self._manager.should_commit = should_commit

    def _hand_back(self) -> None:
        vars(self._manager).pop("should_commit", None)
        functions = self._manager._load_state_dict_fns
        functions.update(getattr(self, "_functions", {}))
        if functions.get(_REGISTERED) == self._take:
            del functions[_REGISTERED]
            del self._manager._user_state_dicts[_REGISTERED]


def _has_state(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _refuse_outer_steps(manager: Manager) -> None:
    """Raises UsageError for DiLoCo, by the functions that it registers with its manager."""
    if any(key.startswith(_OF_DILOCO) for key in manager._user_state_dicts):
        raise UsageError(
            "the manager is that of a DiLoCo, which has the parameters of its last outer step, its "
            "outer optimizers and the place in its round in itself: they are not kept yet. "
            "attach() keeps loops with an Optimizer of torchft"
        )


def _group_of(manager: Manager) -> str:
    """Returns the name of a group, which its next start has too."""
    name = str(manager._logger._replica_id).rpartition(":")[0]
    if not name or "/" in name:
        raise UsageError(
            f"the group of this manager is called {name!r}, which names no root that its next "
            "start finds again: give Manager(replica_id=...), the same at each start and another "
            "for each group"
        )
    return name


def _version() -> str:
    for package in ("torchft", "torchft-nightly"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return _ADAPTER.least  # built from source, without metadata
