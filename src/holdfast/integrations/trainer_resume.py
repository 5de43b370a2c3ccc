"""Reads what ``resume_from_checkpoint`` names: the run's own root, or a checkpoint of the Trainer.

Whatever names another root of Holdfast is refused: to begin from it in silence would be a guess.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.storage.files import ROOT_FILE
from holdfast.storage.open import is_bucket, normal_root

#: Of which files the Trainer writes one, under FSDP too: without it another object is begun with.
_FILES = {
    "optimizer": ("optimizer.pt", "optimizer.bin", "optimizer_0/.metadata"),
    "scheduler": ("scheduler.pt",),
}


@dataclass(frozen=True, slots=True)
class Resume:
    """What a run is told to go on from."""

    generation: str | None = None
    """The generation of the root; None is the newest."""
    must: bool = False
    """True where a root without a checkpoint is a mistake."""
    foreign: str | None = None
    """The directory of a checkpoint of the Trainer's own, where the root has none."""
    gone: str | None = None
    """That directory, where it was removed since the run began."""


def read_resume(given: str | os.PathLike[str] | bool | None, root: str) -> Resume:
    """Returns what ``resume_from_checkpoint`` says to a run whose root is ``root``.

    Raises UsageError for another root of Holdfast, and for a checkpoint of the Trainer without
    optimizer or scheduler.
    """
    text = "" if given is None or isinstance(given, bool) else os.fspath(given)
    if not text:
        return Resume(must=bool(given))
    where, at, generation = text.rpartition("@")  # runs/x@1-39
    if at and _is_same(where, root):
        return Resume(generation=generation, must=True)
    if not (at and is_bucket(text)) and _is_same(text, root):
        return Resume(must=True)
    for one in (where, text):
        if is_bucket(one) or (one and os.path.isfile(os.path.join(one, ROOT_FILE))):
            raise UsageError(
                f"resume_from_checkpoint={text!r} is of {one}, another root of Holdfast than the "
                f"{root} of this Trainer: give holdfast={one!r} to go on there, or begin a run "
                "with what holdfast.load() reads from it"
            )
    if not os.path.isdir(text):
        return Resume(gone=text)
    lacks = [what for what, names in _FILES.items() if not _has(text, names)]
    if lacks:
        raise UsageError(
            f"{text} has no {' and no '.join(lacks)}, as save_only_model=True leaves it: the "
            "Trainer would begin with others in silence: load the model from there by "
            "from_pretrained(), and begin a run"
        )
    return Resume(foreign=text)


def _is_same(path: str, root: str) -> bool:
    """True for another way to write the root: relative, with a slash at its end, by a link."""
    if not path:
        return False
    one, other = normal_root(path), normal_root(root)
    if is_bucket(one) or is_bucket(other):
        return one == other
    return Path(one).resolve() == Path(other).resolve()


def _has(directory: str, names: Iterable[str]) -> bool:
    return any(os.path.isfile(os.path.join(directory, name)) for name in names)
