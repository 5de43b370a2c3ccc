"""Find the checkpoints of a root, and the one that a person named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import NotFound, UsageError
from holdfast.format.manifest import Generation, Manifest
from holdfast.persist.commit import Catalogue, catalogue, is_root
from holdfast.storage.local import LocalStore

STEP_HELP = "a step, or INCARNATION-STEP for one that was saved twice or abandoned"


@dataclass(frozen=True, slots=True)
class Opened:
    """A root and what it holds."""

    root: str
    store: LocalStore
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
    if not Path(root).is_dir():
        raise NotFound(f"{root} is not a directory", root=root)
    store = LocalStore(root)
    found = catalogue(store)
    if not (found.manifests or found.broken or is_root(store)):
        raise NotFound(f"{root} holds no checkpoints (it has no holdfast.json)", root=root)
    return Opened(root, store, found, frozenset(found.lineage), found.latest)


def choose(opened: Opened, name: str | None) -> Manifest:
    """The checkpoint that ``name`` (None: the newest) means; NotFound lists what there is."""
    wanted = opened.latest if name is None else _generation(opened, name)
    manifest = None if wanted is None else opened.catalogue.find(wanted)
    if manifest is not None:
        return manifest
    raise NotFound(_absent(opened, name), root=opened.root, step=name)


def _generation(opened: Opened, name: str) -> Generation | None:
    incarnation, _, step = name.rpartition("-")
    try:
        if incarnation:
            return Generation(int(incarnation), int(step))
        number = int(step)
    except ValueError:
        raise UsageError(f"--step {name!r}: give {STEP_HELP}") from None
    manifests = opened.catalogue.manifests
    same = [manifest.generation for manifest in manifests if manifest.step == number]
    # Of several, the one the newest incarnation descends from; else the latest saved.
    return max(same, key=lambda each: (each in opened.lineage, each), default=None)


def _absent(opened: Opened, name: str | None) -> str:
    what = "no checkpoint" if name is None else f"no checkpoint of step {name}"
    there = ", ".join(str(manifest.generation) for manifest in opened.catalogue.manifests)
    return f"{what} in {opened.root}; there are: {there or 'none'}"
