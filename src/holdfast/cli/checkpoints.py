"""Find the checkpoints of a root, the one that a person named, and a leaf in it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.catalogue import Catalogue, catalogue, is_root
from holdfast.errors import NotFound, UsageError
from holdfast.format.manifest import Generation, Manifest
from holdfast.load.choose import Candidate
from holdfast.load.choose import choose as choose_candidates
from holdfast.load.source import Checkpoint, from_manifest
from holdfast.storage.base import Store
from holdfast.storage.open import normal_root, open_store

STEP_HELP = "a step as restore() takes it, or INCARNATION-STEP for any that `holdfast ls` shows"
#: A step has no more; Python itself refuses to read numbers of thousands of digits.
MAX_DIGITS = 20
#: An error names no more checkpoints than these.
MAX_LISTED = 10


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


@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint to look into.

    ``leaves``: name -> number in the layout; tied tensors have several names, and are stored once.
    ``values``: those of rank 0, as they are stored.
    """

    root: str
    manifest: Manifest
    checkpoint: Checkpoint
    leaves: dict[str, int]
    values: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        """Which it is, as every command's JSON says it."""
        return {
            "root": self.root,
            "checkpoint": str(self.manifest.generation),
            "step": self.manifest.step,
            "world": self.manifest.world,
        }


def open_checkpoint(opened: Opened, name: str | None) -> Chosen:
    """The checkpoint that ``choose`` takes, its layout read and checked."""
    manifest = choose(opened, name)
    checkpoint = from_manifest(opened.store, manifest)
    leaves = {leaf.name: number for number, leaf in enumerate(checkpoint.layout.leaves)}
    values, aliases = _values(manifest, checkpoint)
    tied = {name: leaves[of] for name, of in aliases.items() if of in leaves}
    return Chosen(opened.root, manifest, checkpoint, leaves | tied, values)


def _values(manifest: Manifest, checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and aliases, from the image where they were too long for the manifest."""
    if manifest.values or manifest.aliases:
        return manifest.values, manifest.aliases
    # By name, because it loads numpy, and completion is to be fast.
    read = importlib.import_module("holdfast.load.read")
    document = read.read_values(checkpoint, 0)
    return document.get("shared", {}), read.read_aliases(checkpoint, document)


def unknown(what: str, name: str, known: Sequence[str], root: str) -> NotFound:
    """The error for a name that is not there; it offers its likes."""
    close = ", ".join(difflib.get_close_matches(name, known, n=3))
    hint = f"did you mean {close}?" if close else f"`holdfast show {root}` lists them"
    return NotFound(f"no {what} {name}: {hint}", leaf=name)


def _wanted(name: str | None) -> int | str | None:
    if name is None or ("-" in name and len(name) <= 2 * MAX_DIGITS):
        return name
    if not name.isdecimal() or len(name) > MAX_DIGITS:
        raise UsageError(f"--step {name}: give {STEP_HELP}")
    return int(name)


def _absent(opened: Opened, name: str | None) -> str:
    what = "no checkpoint" if name is None else f"no checkpoint of step {name}"
    generations = [each.generation for each in opened.catalogue.manifests]
    shown = [
        str(each) if each in opened.lineage else f"{each} (abandoned)"
        for each in generations[-MAX_LISTED:]
    ]
    if len(generations) > MAX_LISTED:
        shown.insert(0, f"{len(generations) - MAX_LISTED} older")
    return f"{what} in {opened.root}; there are: {', '.join(shown) or 'none'}"
