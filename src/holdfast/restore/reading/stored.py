"""What storage offers to a restore, and when it offers nothing, why: in words.

A checkpoint whose manifest cannot be read is never passed over in silence, and a root of a newer
format is never taken for an empty one.
"""

from __future__ import annotations

from holdfast.catalogue import (
    MANIFESTS,
    ROOT,
    Catalogue,
    catalogue,
    find_manifest,
    is_root,
    read_document,
)
from holdfast.errors import (
    FormatError,
    HoldfastError,
    NewerFormat,
    NotFound,
    RestoreError,
    UsageError,
)
from holdfast.events import SourceDropped, emit
from holdfast.format.checksum import checksum, text
from holdfast.format.manifest import Manifest, Root, seal
from holdfast.load.choose import Candidate, choose
from holdfast.load.source import Checkpoint, from_manifest
from holdfast.storage.base import Store
from holdfast.storage.place import what_is_at

_SHOWN = 8


def catalogue_of(store: Store, *, rank: int = 0) -> Catalogue:
    """All that is stored; an event for each manifest that cannot be read.

    NewerFormat when root, manifest or incarnation need a newer version.
    """
    _refuse_newer_root(store)
    found = catalogue(store)
    for path, reason in broken_manifests(found):
        emit(SourceDropped(rank=rank, source=f"storage {path}", reason=reason))
    return found


def run_id_of(store: Store) -> str:
    """The run whose checkpoints lie there, by their own word; "" when there are none.

    For a root whose holdfast.json was lost: its history goes on, it does not begin anew.
    """
    newest = max(catalogue(store).manifests, key=lambda each: each.generation, default=None)
    return "" if newest is None else newest.run_id


def _refuse_newer_root(store: Store) -> None:
    try:
        read_document(store, Root, ROOT)
    except NewerFormat:
        raise
    except (NotFound, FormatError):
        return  # one that is damaged or lost hides no checkpoint


def stored(found: Catalogue) -> list[Candidate]:
    """Every checkpoint as something to restore from."""
    return [
        Candidate(*each.generation, "storage", each.attempt, seal_of(each))
        for each in found.manifests
    ]


def seal_of(manifest: Manifest) -> str:
    """What is alike only for manifests that are the same in every word."""
    return text(checksum(seal(manifest)))


def open_stored(store: Store, candidate: Candidate, rank: int) -> Checkpoint:
    """The checkpoint that rank 0 chose, as this rank sees it.

    NotFound when it is gone, UsageError when another lies here under its name.
    """
    manifest = find_manifest(store, candidate.generation)
    if manifest is None:
        raise NotFound(
            f"{candidate.generation} is no longer in storage, as rank {rank} sees {store.url}"
        )
    if (manifest.attempt, seal_of(manifest)) != (candidate.attempt, candidate.seal):
        raise UsageError(
            f"the ranks see different directories at {store.url}: generation "
            f"{candidate.generation} is attempt {candidate.attempt} (manifest {candidate.seal}) "
            f"on rank 0, attempt {manifest.attempt} (manifest {seal_of(manifest)}) on rank {rank}. "
            "Nothing was restored. Give a directory that all ranks reach, and not one of each "
            "node's own."
        )
    return from_manifest(store, manifest)


def choose_stored(store: Store, step: int | str | None) -> tuple[Catalogue, list[Candidate]]:
    """What is stored, and of it what fits ``step``, best first. NotFound says why nothing does."""
    found = catalogue_of(store)
    fit = choose(stored(found), found.parents, step)
    if not fit:
        raise nothing_fits(store, found, step)
    return found, fit


def nothing_fits(store: Store, found: Catalogue, step: int | str | None) -> HoldfastError:
    """The error that says why there is nothing to restore for ``step``, and what there is instead.

    RestoreError where a checkpoint is there but its manifest cannot be read: it is not absent.
    """
    text = _why_nothing(store, found, step)
    ending = "" if step is None else f"{'-' if isinstance(step, int) else '/'}{step}.json"
    if any(path.endswith(ending) for path, _ in broken_manifests(found)):
        return RestoreError(f"{text}\nPut the files back, or begin anew with another root.")
    return NotFound(text, root=store.url, step=step)


def _why_nothing(store: Store, found: Catalogue, step: int | str | None) -> str:
    if not (found.manifests or found.broken or is_root(store)):
        return f"{store.url} is not a directory of Holdfast checkpoints. {what_is_at(store.url)}"
    text = f"{store.url} has no checkpoint" + ("" if step is None else f" of step {step}")
    if found.manifests:
        text += f"; there are {_steps(found)} (all of them: `holdfast ls`)"
    elif not found.broken:
        text += " yet: nothing that was saved there became durable"
    for path, reason in broken_manifests(found):
        text += f"\n  {path} cannot be read: {reason}"
    return text


def _steps(found: Catalogue) -> str:
    line = [str(generation.step) for generation in found.lineage]
    abandoned = [str(generation) for generation in found.abandoned]
    shown = f"steps {', '.join(_newest(line))}" if line else ""
    if abandoned:
        given_up = f"abandoned {', '.join(_newest(abandoned))} (by that name)"
        shown += f" and {given_up}" if shown else given_up
    return shown


def _newest(names: list[str]) -> list[str]:
    return ["...", *names[-_SHOWN:]] if len(names) > _SHOWN else names


def broken_manifests(found: Catalogue) -> list[tuple[str, str]]:
    """(path, reason) of the manifests that are there and cannot be read."""
    return [(path, reason) for path, reason in found.broken if path.startswith(f"{MANIFESTS}/")]
