"""Find the checkpoints of a root, and the one that a person named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.catalogue import Catalogue, catalogue, is_root
from holdfast.errors import NotFound, UsageError
from holdfast.format.manifest import Generation, Manifest
from holdfast.load.choose import Candidate
from holdfast.load.choose import choose as choose_candidates
from holdfast.storage.base import Store
from holdfast.storage.open import normal_root, open_store

STEP_HELP = "a step as restore() takes it, or INCARNATION-STEP for any that `holdfast ls` shows"


@dataclass(frozen=True, slots=True)
class Opened:
    """A root and what it holds."""

    root: str
    store: Store
    catalogue: Catalogue
    lineage: frozenset[Generation]
    latest: Generation | None

    def state_of(self, generation: Generation) -> str:
        """newest | kept | abandoned: of a future given up, restored only when named."""
        if generation == self.latest:
            return "newest"
        return "kept" if generation in self.lineage else "abandoned"


def open_root(root: str) -> Opened:
    """Read what lies in ``root``; NotFound when it is no directory of checkpoints."""
    if not Path(normal_root(root)).is_dir():
        raise NotFound(f"{root} is not a directory", root=root)
    store = open_store(root)
    found = catalogue(store)
    if not (found.manifests or found.broken or is_root(store)):
        raise NotFound(f"{root} holds no checkpoints (it has no holdfast.json)", root=root)
    return Opened(root, store, found, frozenset(found.lineage), found.latest)


def choose(opened: Opened, name: str | None) -> Manifest:
    """The checkpoint that a restore of ``name`` (None: the newest) takes.

    NotFound lists what there is.
    """
    found = opened.catalogue
    stored = [Candidate(*each.generation, "storage", each.attempt) for each in found.manifests]
    fit = choose_candidates(stored, found.parents, _wanted(name))
    manifest = found.find(fit[0].generation) if fit else None
    if manifest is None:
        raise NotFound(_absent(opened, name), root=opened.root, step=name)
    return manifest


def _wanted(name: str | None) -> int | str | None:
    if name is None or "-" in name:
        return name
    if not name.isdecimal():
        raise UsageError(f"--step {name}: give {STEP_HELP}")
    return int(name)


def _absent(opened: Opened, name: str | None) -> str:
    what = "no checkpoint" if name is None else f"no checkpoint of step {name}"
    generations = [each.generation for each in opened.catalogue.manifests]
    there = ", ".join(
        str(each) if each in opened.lineage else f"{each} (abandoned)" for each in generations
    )
    return f"{what} in {opened.root}; there are: {there or 'none'}"
