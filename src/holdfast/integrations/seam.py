"""Connects a run to loops that are not Holdfast's: places loaders, and names the mistakes of users.

A loader is placed behind the batches that were trained on without reading them, where its data have
an index or a state. The generators that it draws from are then those of the begin of its epoch, so
that it gives the same order, and afterwards those of the restored step again; what data without
workers draw for a sample, they draw from the generators that they would have had.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from holdfast.checkpointer import Checkpointer
from holdfast.data.sampler import ResumableSampler
from holdfast.errors import StateMismatch, UsageError
from holdfast.events import warn
from holdfast.integrations.orders import (
    is_process_at,
    order_state,
    packed,
    process_state,
    set_own_generators,
    set_process_generators,
)
from holdfast.storage.files import ROOT_FILE
from holdfast.storage.open import is_bucket, normal_root

if TYPE_CHECKING:
    from holdfast.restore.restore import Restored

#: Patterns of files by which the directories of other libraries are known, and whose they are.
_FOREIGN = {
    "trainer_state.json": "the Trainer of transformers",
    "checkpoint-*/trainer_state.json": "the Trainer of transformers",
    "*.ckpt": "Lightning",
    "random_states_0.pkl": "accelerate",
    "scheduler.bin": "accelerate",
    ".metadata": "torch.distributed.checkpoint",
    "step-*/.metadata": "torchtitan",
    "step-*/model.safetensors.index.json": "torchtitan",
    "meta.pt": "Lightning",
    "latest_checkpointed_iteration.txt": "Megatron-LM",
    "zero_to_fp32.py": "DeepSpeed",
    "model.safetensors": "transformers or accelerate",
}
_END = object()


# ── mistakes, by name ────────────────────────────────────────────────────────────────────────────


def missing(framework: str, error: ImportError) -> UsageError:
    """Returns the error for a framework that cannot be imported."""
    return UsageError(
        f"holdfast.integrations.{framework} needs {framework}, which cannot be imported "
        f"({error}): pip install 'holdfast[{framework}]'"
    )


@dataclass(frozen=True, slots=True)
class Adapter:
    """What an adapter asks of its arguments: the same of all, each mistake by name."""

    framework: str
    least: str
    """The oldest version that it works with."""
    keys: tuple[str, ...] = ()
    """The keys of the state that are its own."""
    whose: str = "the adapter's"
    never_beside: tuple[str, ...] = ()
    """Patterns of checkpoints of the framework's own that may not lie in a root of Holdfast:
    no run writes both, so that one of the two has gone on without the other."""

    def check(
        self,
        version: str,
        root: str | os.PathLike[str],
        state: Mapping[str, Any] | None = None,
        options: Iterable[str] | None = None,
    ) -> dict[str, Any]:
        """Returns ``state=`` as a dict.

        Raises UsageError for a framework that is too old, for a state that is no dict or has keys
        that are the adapter's, for ``options`` that are no arguments of ``Checkpointer``, and for a
        directory in which another library keeps its checkpoints.
        """
        self.check_version(version)
        check_options(options)
        if not isinstance(state, Mapping | None):
            raise UsageError(
                f"the state is a dict from names to objects, got a {type(state).__qualname__}"
            )
        taken = sorted(set(self.keys) & set(state or {}))
        if taken:
            raise UsageError(
                f"state= has the keys {', '.join(taken)}, which are {self.whose} own: choose "
                "other names"
            )
        check_root(root, self.never_beside)
        return dict(state or {})

    def check_version(self, version: str) -> None:
        """Raises UsageError for a framework that is too old."""
        if _numbers(version) < _numbers(self.least):
            raise UsageError(
                f"holdfast.integrations.{self.framework} needs {self.framework} {self.least} or "
                f"later, got {version}: pip install --upgrade 'holdfast[{self.framework}]'"
            )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:2]))


def check_options(options: Iterable[str] | None) -> None:
    """Raises UsageError for what is no argument of ``Checkpointer`` beside root and state."""
    known = list(inspect.signature(Checkpointer).parameters)[2:]
    for name in options or ():
        if name not in known:
            raise UsageError(
                f"{name!r} is no option of a Checkpointer here: it has {', '.join(known)}"
            )


def check_root(root: str | os.PathLike[str], never_beside: Iterable[str] = ()) -> None:
    """Raises UsageError for a directory in which another library keeps its checkpoints.

    A root of Holdfast may have files of others in it, such as an exported model; but none of the
    patterns ``never_beside``.
    """
    where = normal_root(root)
    if is_bucket(where):
        return
    path = Path(where)
    if path.is_file():
        raise UsageError(
            f"{where} holds a file, {path.name}, and is no root of Holdfast: name a directory of "
            "its own for this run"
        )
    is_ours = (path / ROOT_FILE).is_file()
    patterns = never_beside if is_ours else _FOREIGN
    found = next((name for name in patterns if any(path.glob(name))), None)
    if found is None:
        return
    if is_ours:
        raise UsageError(
            f"{where} is a root of Holdfast and holds {found}, a file of {_FOREIGN[found]}: which "
            "of the two the run goes on from would be a guess. Move the other's checkpoints out of "
            "it, or name another directory for this run"
        )
    raise UsageError(
        f"{where} holds {found}, a file of {_FOREIGN[found]}, and is no root of Holdfast: name a "
        "directory of its own for this run"
    )


def restore_loop_first(
    checkpointer: Checkpointer, key: str, step: int | str | None, *, adapter: str | None = None
) -> Restored | None:
    """Restores the value of ``key`` alone, with the place of the run; None with nothing to restore.

    ``adapter``: the name of the module, where the key has another one. Raises UsageError for a root
    whose checkpoints do not have it: another program wrote them.
    """
    try:
        return checkpointer.restore(step, only=[key])
    except StateMismatch as error:
        raise UsageError(
            f"{checkpointer.root} was not written by holdfast.integrations.{adapter or key}, and "
            f"has no place in its loop ({error}): use another root"
        ) from error


def restore_run(
    checkpointer: Checkpointer,
    key: str,
    step: int | str | None,
    check: Callable[[], None] | None = None,
) -> Restored | None:
    """Restores the value of ``key`` alone, and, where ``check`` lets it pass, the rest."""
    first = restore_loop_first(checkpointer, key, step)
    if first is None:
        return None
    if check is not None:
        check()
    return checkpointer.restore(f"{first.generation}")


def one_or_all(objects: Iterable[Any]) -> Any:
    """Returns the only object of several, or all as a list: what a key of the state holds."""
    found = list(objects)
    return found[0] if len(found) == 1 else found


# ── loaders ──────────────────────────────────────────────────────────────────────────────────────


class LoaderPlace:
    """The place of a run in the data of one loader.

    ``loader``: a DataLoader of torch or one derived from it, which then begins where ``set`` said
    and counts the batches that it gives. ``settle``: called when a loader that was placed in the
    middle of an epoch has its order: sets the generators again. ``runs_ahead``: a batch more is
    fetched before the last one is given to the loop.
    """

    def __init__(
        self, loader: Any, settle: Callable[[], None], *, runs_ahead: bool = False
    ) -> None:
        self.loader = loader
        self._is_in_process = loader.num_workers == 0 and not hasattr(loader, "state_dict")
        # A stream without an index is read again from the begin of its epoch.
        is_stream = isinstance(loader.dataset, IterableDataset)
        self._follows_draws = runs_ahead and self._is_in_process and not is_stream
        self._before: dict[str, Any] | None = None
        """The generators before the last batch was fetched, where that has drawn from them."""
        self.given = 0
        """The batches of this epoch that were given out or passed over."""
        self.is_open = False
        """True from the begin of an iteration on, until one is given up; also of one that ended."""
        self.skips_finished: Callable[[], None] = lambda: None
        """Called in place of an epoch of which every batch was trained on."""
        self.own_state: Callable[[], Mapping[str, Any]] = lambda: loader.state_dict()
        """Returns the state of a loader that finds its place by itself."""
        self._settle = settle
        self._began = order_state(loader)
        self._target: dict[str, Any] | None = None
        self.begun = 0
        """The iterations of the run so far, the one under way among them."""
        self._must_warm = False
        self._first: dict[str, Any] | None = None
        """The generators before the first batch of this epoch was fetched, where something has
        drawn from them since the loader was asked for an iteration."""
        self._rest = 0
        self._rests: list[_Rest] = []
        """The samplers that pass over batches, of which the one that was begun counts."""
        kind = _placed_kind(type(loader))
        loader._holdfast_place = self
        loader.__class__ = kind
        self._advanced = 0

    @property
    def sampler(self) -> ResumableSampler | None:
        """The loader's ResumableSampler, which has a place of its own; None for other samplers."""
        sampler = self.loader.batch_sampler
        return sampler if isinstance(sampler, ResumableSampler) else None

    @property
    def passed(self) -> int:
        """The batches of the epoch that the length of a ResumableSampler leaves out."""
        return 0 if self.sampler is None else self._advanced

    def advance(self, batches: int, *, is_over: bool) -> None:
        """Notes that so many batches of this epoch were trained on. ``is_over``: they are all."""
        new = batches - self._advanced
        if self.sampler is not None and new:
            self.sampler.advance(new)
        self._advanced = 0 if is_over else batches

    # ── as a part of the state ───────────────────────────────────────────────────────────────────

    def save(self, batches: int | None, *, is_over: bool = False) -> dict[str, Any]:
        """Returns the place after so many batches, as plain values; None is between two epochs.

        ``is_over``: they are all that the epoch has, and what follows the last one is to come.
        """
        is_inside = batches is not None and not is_over
        return {
            "batches": batches or 0,
            "over": is_over,
            "begun": self.begun,
            "generators": self._began if is_inside else order_state(self.loader),
            "first": self._first if is_inside else None,
            "ahead": self._before if is_inside and self.given > (batches or 0) else None,
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "state": self.own_state() if is_inside and _has_state(self.loader) else None,
        }

    def set(self, saved: Mapping[str, Any]) -> None:
        """Makes the next iteration begin at a saved place."""
        if self.sampler is not None and saved["sampler"] is not None:
            self.sampler.load_state_dict(saved["sampler"])
        self._advanced = 0 if saved["over"] else saved["batches"]
        self._target = dict(saved) if saved["batches"] or saved["over"] else None
        is_under_way = self._target is not None and not saved["over"]
        self.begun = saved["begun"] - is_under_way
        self._must_warm = self.loader.persistent_workers and self.begun > 0
        must_load = saved["state"] is not None or self.begun > 0
        if hasattr(self.loader, "load_state_dict") and must_load:
            # Without a state it forgets the iteration that it began when it was asked for one.
            # An unbroken run has used that for its first epoch.
            self.loader.load_state_dict(saved["state"] or {})
        if not is_under_way:
            set_own_generators(self.loader, saved["generators"])

    # ── iterations ───────────────────────────────────────────────────────────────────────────────

    def begin(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begins an iteration of the loader, at the place that was set."""
        target, self._target = self._target, None
        self.is_open = True
        if self._must_warm:
            self._warm(iterate)
        if target is None or not target["over"]:
            self.begun += 1
        if target is None:
            self.given, self._advanced, self._began = 0, 0, order_state(self.loader)
            batches, self._first = iterate(), None
            return self._give(self.begun, self._noted(self.begun, process_state(), batches))
        if target["over"]:
            self.given = target["batches"]
            self._settle()
            self.skips_finished()
            return iter(())
        return self._resume(iterate, target)

    def _warm(self, iterate: Callable[[], Iterator[Any]]) -> None:
        """Starts workers that stay: an unbroken run has them, and draws no seed for them here."""
        state, self._must_warm = order_state(self.loader), False
        iterate()
        set_process_generators(state)
        set_own_generators(self.loader, state)

    def _resume(
        self, iterate: Callable[[], Iterator[Any]], target: Mapping[str, Any]
    ) -> Iterator[Any]:
        now = order_state(self.loader)
        self._began = target["generators"]
        set_process_generators(self._began)
        set_own_generators(self.loader, self._began)
        count = target["batches"]
        is_placed = self.sampler is not None or target["state"] is not None
        # One that was begun when its state was asked for cannot pass over indices any more.
        is_early = getattr(self.loader, "_initial_iter_for_state_dict", False)
        reads = (isinstance(self.loader.dataset, IterableDataset) or is_early) and not is_placed
        self._rest = 0 if reads or is_placed else count
        draws_itself = self._is_in_process and not reads
        workers = getattr(self.loader, "_iterator", None)
        if workers is not None:  # those that stay have a sampler already
            workers._index_sampler = self.rest_of(workers._index_sampler)
        batches, first = iterate(), list[Any]()
        self._first = target.get("first")  # the first versions kept none
        if self._first is not None:
            set_process_generators(self._first)
        if self._rest and self._begun_rest() is None:
            # A class that yields its batches asks for indices with the first of them.
            first, draws_itself = list(islice(batches, 1)), False
            if self._begun_rest() is None:
                raise UsageError(
                    f"a {type(self.loader).__qualname__} does not begin its sampler anew for each "
                    "iteration, so that it cannot go on in the middle of an epoch: use a DataLoader"
                )
        rest, self._rest, self._rests = self._begun_rest(), 0, []
        if draws_itself and rest is not None:
            rest.pass_over()
        if reads:
            _read(batches, count)
        self.given = count
        ahead = target.get("ahead") if draws_itself else None  # the first version kept none
        if ahead is not None:
            set_process_generators(ahead)
        if not first and (ahead is not None or not draws_itself):
            first = list(islice(batches, 1))
        set_process_generators(now)
        self._settle()
        return self._give(self.begun, batches, first, ahead)

    def _give(
        self,
        number: int,
        batches: Iterator[Any],
        first: Iterable[Any] = (),
        before: dict[str, Any] | None = None,
    ) -> Iterator[Any]:
        """Yields batches; an iteration that another one has followed counts no more.

        ``first``: those that were fetched already. ``before``: the generators before that.
        """
        try:
            for batch in first:
                self._before = before
                self.given += number == self.begun
                yield batch
            while (batch := self._fetch(batches)) is not _END:
                self.given += number == self.begun
                yield batch
        except GeneratorExit:
            self.is_open &= number != self.begun
            raise

    def _noted(
        self, number: int, asked: Mapping[str, Any], batches: Iterator[Any]
    ) -> Iterator[Any]:
        """Yields batches; notes the generators before the first one where they are not as they were
        when the loader was ``asked``: of two that are iterated together, the other one has drawn.
        """
        if number == self.begun and not is_process_at(asked):
            self._first = packed(process_state())
        yield from batches

    def _fetch(self, batches: Iterator[Any]) -> Any:
        if not self._follows_draws:
            return next(batches, _END)
        before = process_state()
        found = next(batches, _END)
        self._before = None if is_process_at(before) else packed(before)
        return found

    def release(self) -> None:
        """Gives the loader its own class again."""
        kind = getattr(type(self.loader), "_holdfast_kind", None)
        if kind is not None:
            self.loader.__class__ = kind

    def rest_of(self, indices: Any) -> Any:
        """Returns the sampler behind the batches that are passed over by their indices."""
        if not self._rest:
            return indices
        self._rests.append(_Rest(indices, self._rest))
        return self._rests[-1]

    def _begun_rest(self) -> _Rest | None:
        return next((one for one in self._rests if one.is_begun), None)


class _Rest:
    """A batch sampler that passes over some batches, the first time that one is asked for."""

    def __init__(self, indices: Any, count: int) -> None:
        self._indices, self._count = indices, count
        self._begun: Iterator[Any] = iter(())
        self.is_begun = False

    def __iter__(self) -> Iterator[Any]:
        # At once, as a sampler may draw its order then; a loader may drop this iteration unused.
        self._begun, self.is_begun = iter(self._indices), True
        return self._behind(self._begun)

    def pass_over(self) -> None:
        """Passes over the batches now: what the sampler draws for the next one is not its order."""
        count, self._count = self._count, 0
        for _ in islice(self._begun, count):
            pass

    def _behind(self, indices: Iterator[Any]) -> Iterator[Any]:
        self.pass_over()
        yield from indices

    def __len__(self) -> int:
        return len(self._indices)


def _placed_kind(kind: Any) -> Any:
    """Returns the class of a loader with a place; an instance of ``kind`` can change to it."""
    if hasattr(kind, "_holdfast_kind"):
        raise UsageError("this loader is in another run of Holdfast already: close that first")
    if not issubclass(kind, DataLoader):
        raise UsageError(f"a {kind.__qualname__} is no DataLoader, which can be placed in its data")

    class Placed(kind):  # type: ignore[misc]
        __slots__ = ()
        _holdfast_kind = kind

        def __iter__(self) -> Iterator[Any]:
            place: LoaderPlace = self._holdfast_place
            return place.begin(super().__iter__)

        def __len__(self) -> int:
            place: LoaderPlace = self._holdfast_place
            return int(super().__len__()) + place.passed

        @property
        def _index_sampler(self) -> Any:
            place: LoaderPlace = self._holdfast_place
            return place.rest_of(super()._index_sampler)

    Placed.__name__, Placed.__qualname__ = kind.__name__, kind.__qualname__
    Placed.__module__ = kind.__module__
    return Placed


def _has_state(loader: Any) -> bool:
    """True for a loader that finds its place by a state of its own, not by indices."""
    return hasattr(loader, "state_dict") and (
        isinstance(loader.dataset, IterableDataset) or hasattr(loader.dataset, "state_dict")
    )


def _read(batches: Iterator[Any], count: int) -> None:
    """Reads batches and drops them, and says what that cost."""
    started_s = time.monotonic()
    for _ in islice(batches, count):
        pass
    warn(
        f"{count} batches were read and dropped in "
        f"{time.monotonic() - started_s:.1f} s, to reach the place in an epoch of data without "
        "an index: a StatefulDataLoader, or data with an index, are placed without reading"
    )
