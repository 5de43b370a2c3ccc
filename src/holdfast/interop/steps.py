"""Shows the checkpoints of several steps below one directory as one root.

So do the Trainer (``checkpoint-500``), Lightning (``epoch=1-step=20.ckpt``), Accelerate, torchtitan
and Megatron keep them. The newest is the one with the highest step, or the one that a file of the
directory names as the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from holdfast.errors import HoldfastError, NotFound, StorageError, UsageError
from holdfast.interop.directories import read_directory, recognize, step_inside
from holdfast.interop.foreign_store import ForeignStore
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.state_files import CKPT, named_step
from holdfast.storage.base import ImageSink, Lock

#: What Lightning wrote last, at a step that another file may have too.
_LAST_FILE = "last.ckpt"
#: The file in which Megatron names the last step.
LAST = "latest_checkpointed_iteration.txt"
_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class StepPlace:
    """The checkpoint of one step: its step, and its name in the directory."""

    step: int
    name: str


def find_steps(path: Path) -> tuple[list[StepPlace], list[str]]:
    """The steps below a directory in order, and notes about what is left out: what has a step in
    its name and is no checkpoint, and files without a step. Of two of one step, Lightning's
    ``last.ckpt`` gives way to the one that names it.
    """
    by_step: dict[int, str] = {}
    notes: list[str] = []
    try:
        children = [child for child in path.iterdir() if _may_be_step(child)]
    except OSError as error:
        raise StorageError(
            f"{path} cannot be listed: {error.strerror}", operation="list", errno=error.errno
        ) from error
    for child in sorted(children, key=lambda one: (one.name == _LAST_FILE, one.name)):
        try:
            step = _step_at(child)
        except HoldfastError as error:
            notes.append(f"{child} is left out: {error}")
            continue
        if step in by_step and child.name != _LAST_FILE:
            notes.append(
                f"{child} is left out: it is of step {step}, as another is ({by_step[step]}); give "
                "the path of one"
            )
        if step is not None:
            by_step.setdefault(step, child.name)
    return [StepPlace(step, name) for step, name in sorted(by_step.items())], notes


def _may_be_step(child: Path) -> bool:
    """True for what is finished, and has a step in its name or is of Lightning."""
    if child.name.startswith((".", "tmp-")):
        return False
    if child.suffix == CKPT:
        return child.is_file() or child.is_dir()
    return named_step(child.name) is not None and child.is_dir()


def _step_at(child: Path) -> int | None:
    """The step that a checkpoint has in it, or else in its name; None for what is none."""
    files, named = SourceFiles(child), named_step(child.name)
    format_ = recognize(files)
    if format_ is None:
        return None
    try:
        inside = step_inside(files, format_)
    except HoldfastError:
        if named is None:
            raise
        inside = None  # it is told when it is to be read
    step = named if inside is None else inside
    if step is None:
        raise UsageError("nothing in its name or in it says of which step it is")
    return step


def finished(path: Path, places: list[StepPlace]) -> tuple[list[StepPlace], list[str]]:
    """The steps up to the one that is named as the last, and notes about those behind it."""
    last = _last_named(path)
    kept = [place for place in places if last is None or place.step <= last]
    return kept or places, [
        f"{path / place.name} is left out: {LAST} names step {last} as the last"
        for place in places
        if kept and place not in kept
    ]


def choose_step(path: Path, places: list[StepPlace], step: int | str | None) -> StepPlace:
    """The place of ``step``, None: of the last; NotFound lists those that there are."""
    wanted = step
    if step is None:
        wanted = _last_named(path)
        if wanted is None:
            return places[-1]
    by_step = {place.step: place for place in places}
    number = int(str(wanted)) if str(wanted).isdecimal() and len(str(wanted)) < 20 else None
    if number is not None and number in by_step:
        return by_step[number]
    there = ", ".join(f"{place.name} (step {place.step})" for place in places[-_MAX_SHOWN:])
    why = (
        f"{path / LAST} names step {number}, which is not there"
        if step is None
        else (f"{path} has no step {step}")
    )
    raise NotFound(f"{why}; there are {there}", root=str(path), step=str(wanted))


def _last_named(path: Path) -> int | None:
    files = SourceFiles(path)  # which a pipe of this name does not hold
    try:
        size_bytes = min(64, files.size_bytes(LAST))
        text = files.read(LAST, 0, size_bytes).decode(errors="replace").strip()
    except HoldfastError:
        return None
    return int(text) if text.isdecimal() and len(text) < 16 else None


def _refuse_twice(step: int, known: set[int]) -> None:
    if step in known:
        raise UsageError(f"it is of step {step}, as another is; give the path of one")


class ForeignSteps:
    """A read-only store of the checkpoints of several steps."""

    has_block_sums = False

    def __init__(self, path: Path, places: list[StepPlace], notes: list[str]) -> None:
        self._path, self._run_id = path, xxhash.xxh3_64_hexdigest(str(path).encode())[:12]
        places, unfinished = finished(path, places)
        self._notes = [*notes, *unfinished]
        self._stores: dict[str, ForeignStore] = {}
        steps: set[int] = set()
        for place in places:
            files = SourceFiles(path / place.name)
            try:
                found = read_directory(files, None, None)
                if found is not None:
                    _refuse_twice(found.step, steps)
                    steps.add(found.step)
                    self._stores[place.name] = ForeignStore(files, found, run_id=self._run_id)
            except HoldfastError as error:
                self._notes.append(f"{files.path} is left out: {error}")
        if not self._stores:
            raise NotFound(f"{path}: {'; '.join(self._notes)}", root=str(path))
        self._of = {name: store for store in self._stores.values() for name in store.names()}

    @property
    def url(self) -> str:
        """The path of the directory."""
        return str(self._path)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is there and is not read, in words."""
        return (*self._notes, *(note for one in self._stores.values() for note in one.notes))

    def identity(self) -> str:
        """See ``Store``."""
        return f"foreign {self._run_id}"

    def facts(self, path: str) -> list[str]:
        """See ``ForeignStore``, of the step that this is a path of."""
        return self._store(path).facts()

    def lacks(self, path: str) -> str:
        """See ``ForeignStore``, of the step that this is a path of."""
        return self._store(path).lacks()

    def require_unchanged(self, path: str) -> None:
        """See ``ForeignStore``, of the step that this is a path of."""
        self._store(path).require_unchanged()

    def data_faults(self) -> Iterator[str]:
        """See ``ForeignStore``, of all steps."""
        for store in self._stores.values():
            yield from store.data_faults()

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """See ``Store``."""
        return self._store(path).read(path, offset_bytes, size_bytes)

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        """See ``Store``."""
        self._store(path).read_into(path, offset_bytes, buffer, is_shared=is_shared)

    def size_bytes(self, path: str) -> int:
        """See ``Store``."""
        return self._store(path).size_bytes(path)

    def exists(self, path: str) -> bool:
        """See ``Store``."""
        return path in self._of

    def list(self, prefix: str) -> list[str]:
        """See ``Store``."""
        return sorted({name for store in self._stores.values() for name in store.list(prefix)})

    def _store(self, path: str) -> ForeignStore:
        if path not in self._of:
            raise NotFound(f"{self.url} shows no {path}", path=path)
        return self._of[path]

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Refused, as everything that writes."""
        self._any().publish(path, data, replace=replace)

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        """Refused."""
        return self._any().create(path, size_bytes, aside=aside)

    def remove(self, path: str) -> None:
        """Refused."""
        self._any().remove(path)

    def remove_tree(self, prefix: str) -> None:
        """Refused."""
        self._any().remove_tree(prefix)

    def lock(self, name: str, owner: str) -> Lock:
        """Refused."""
        return self._any().lock(name, owner)

    def _any(self) -> ForeignStore:
        return next(iter(self._stores.values()))
