"""Lists the checkpoints in storage that a restore can use, and explains when there are none.

A checkpoint with an unreadable manifest is never ignored silently, and a root of a newer format is
never taken for an empty one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from holdfast.catalogue import (
    MANIFESTS,
    ROOT,
    Described,
    RootContents,
    find_manifest,
    gap_text,
    is_root,
    read_document,
    read_incarnation,
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
from holdfast.format.manifest import Lineage, Manifest, Root, checksum_in, seal
from holdfast.geometry.layout import Layout
from holdfast.overview import UNSEEN, Overview, confirmed, overview, read_first, read_more
from holdfast.restore.planning.candidates import Candidate, StartRecords, choose, undecided
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.storage.base import Store
from holdfast.storage.open import what_is_at

_SHOWN = 8


def overview_of(
    store: Store, known: Overview = UNSEEN, *, is_brief: bool = False, is_opened: bool = False
) -> Overview:
    """Return all that is stored; emit an event for each manifest that cannot be read.

    ``known`` and ``is_brief``: as ``overview`` takes them. NewerFormat when root, manifest or
    incarnation need a newer version. ``is_opened``: the root itself was read already.
    """
    if not is_opened:
        _refuse_newer_root(store)
    return _told(overview(store, known, is_brief=is_brief), UNSEEN)


def first_read(
    store: Store, found: Overview, line: Lineage, wanted: int | str | None = None
) -> Overview:
    """Read what a restore of ``wanted`` tries first; see ``read_first``."""
    return _told(read_first(store, found, line, wanted), found)


def all_read(store: Store, found: Overview) -> Overview:
    """Read all that is unread."""
    return _told(read_more(store, found, found.unread), found)


def _told(found: Overview, before: Overview) -> Overview:
    for path, reason in broken_manifests(found):
        if (path, reason) not in before.broken:
            emit(SourceDropped(rank=0, source=f"storage {path}", reason=reason))
    return found


def run_id_of(known: RootContents[Described]) -> str:
    """Return the run id that the stored checkpoints name; "" when there are none.

    For a root whose holdfast.json was lost: its history continues and does not begin anew.
    """
    newest = max(known.manifests, key=lambda each: each.generation, default=None)
    if newest is not None:
        return newest.run_id
    # Before its first checkpoint everything saved is in memory, under the run's id.
    return known.incarnations[-1].run_id if known.incarnations else ""


def _refuse_newer_root(store: Store) -> None:
    try:
        read_document(store, Root, ROOT)
    except NewerFormat:
        raise
    except (NotFound, FormatError):
        return  # a damaged or missing one hides no checkpoint


def stored(contents: Overview) -> list[Candidate]:
    """Return every checkpoint that is known as a restore candidate."""
    return [
        Candidate(*each.generation, "storage", each.attempt, each.seal)
        for each in contents.manifests
    ]


def stored_starts(store: Store, found: Overview, known: Iterable[int]) -> StartRecords:
    """What storage says of the starts of the run.

    ``known``: those that memory has records of. Where storage has one that it cannot read now,
    nobody can tell whether it is the same start: StorageError.
    """
    for n in {*found.unreadable}.intersection(known):
        with suppress(NotFound, FormatError):  # damaged, or gone: then memory's is all there is
            read_incarnation(store, n)
    return StartRecords(found.parents, found.starts)


def seal_of(manifest: Manifest) -> str:
    """Return a checksum that is equal only for identical manifests: the one sealed in them."""
    return checksum_in(seal(manifest))


def open_stored(
    store: Store,
    candidate: Candidate,
    rank: int,
    *,
    manifest: Manifest | None = None,
    layout: Layout | None = None,
) -> Checkpoint:
    """Open the checkpoint that rank 0 chose.

    ``manifest`` and ``layout``: its documents, where they are known; otherwise they are read, as
    this rank sees them. NotFound when it is gone, UsageError when a different one lies here under
    its name.
    """
    manifest = manifest or _manifest_here(store, candidate, rank)
    return from_manifest(store, manifest, layout, plans_headers=True)


def _manifest_here(store: Store, candidate: Candidate, rank: int) -> Manifest:
    found = find_manifest(store, candidate.generation)
    if found is None:
        raise NotFound(
            f"{candidate.generation} is no longer in storage, as rank {rank} sees {store.url}"
        )
    manifest, sealed = found
    if sealed != candidate.seal:  # what another version wrote is sealed differently here
        sealed = seal_of(manifest)
    if (manifest.attempt, sealed) != (candidate.attempt, candidate.seal):
        raise UsageError(
            f"the ranks see different directories at {store.url}: generation "
            f"{candidate.generation} is attempt {candidate.attempt} (manifest {candidate.seal}) "
            f"on rank 0, attempt {manifest.attempt} (manifest {seal_of(manifest)}) on rank {rank}. "
            "Nothing was restored. Give a directory that all ranks reach, and not one of each "
            "node's own."
        )
    return manifest


def choose_stored(store: Store, step: int | str | None) -> tuple[Overview, list[Candidate]]:
    """Return what is stored, and candidates for ``step``, best first, of which the first was read.
    NotFound says why there is none.
    """
    contents, is_whole = overview_of(store, is_brief=True), False
    while True:
        if is_whole:
            contents = all_read(store, contents)
        else:
            contents = first_read(store, contents, contents.line, step)
        fit = choose(stored(contents), contents.parents, step, contents.unreadable)
        if fit and fit[0].generation in contents.read:
            return contents, fit
        if fit:  # only the index has told of it
            contents = _told(confirmed(store, contents, [fit[0].generation]), contents)
        elif is_whole:
            break
        is_whole = is_whole or not fit
    require_whole_line(store, stored(contents), contents.line, step)
    raise nothing_fits(store, contents, step)


def require_whole_line(
    store: Store, candidates: Iterable[Candidate], line: Lineage, step: int | str | None
) -> None:
    """Raise RestoreError when it is unknown whether some of ``candidates`` match ``step``.

    Call it when none is known to match: a missing record does not mean that there is no match.
    """
    unknown = undecided(candidates, line, step)
    if line.missing is None or not unknown:
        return
    newest = max(unknown, key=lambda one: (one.step, one.incarnation))
    raise RestoreError(
        f"nothing is restored from {store.url}: {gap_text(line.missing, unknown)}. Put that record "
        f'back; or say yourself which to go on from, by its name: "{newest}" is the one of the '
        f'largest step (restore("{newest}"), load(..., step="{newest}"), '
        f"--step {newest}). The run then goes on from that one."
    )


def require_there(store: Store) -> None:
    """Raise RestoreError when the root of a run has vanished since it began: it is not empty
    then.
    """
    if not is_root(store):
        raise RestoreError(
            f"nothing is found in {store.url}, and its {ROOT} is not there any more: the root was "
            "removed, moved, or is not mounted. Start the run again when it is back."
        )


def nothing_fits(store: Store, contents: Overview, step: int | str | None) -> HoldfastError:
    """Return the error that says why nothing can be restored for ``step``, and what exists instead.

    RestoreError where a checkpoint exists but its manifest cannot be read: it is not absent.
    """
    text = _why_nothing(store, contents, step)
    ending = "" if step is None else f"{'-' if isinstance(step, int) else '/'}{step}.json"
    if any(path.endswith(ending) for path, _ in broken_manifests(contents)):
        return RestoreError(
            f"{text}\nPut good copies of them back, as `holdfast repair ROOT --from COPY` does, "
            "or begin anew with another root."
        )
    return NotFound(text, root=store.url, step=step)


def _why_nothing(store: Store, contents: Overview, step: int | str | None) -> str:
    if not (contents.manifests or contents.broken or is_root(store)):
        return f"{store.url} is not a directory of Holdfast checkpoints. {what_is_at(store.url)}"
    text = f"{store.url} has no checkpoint" + ("" if step is None else f" of step {step}")
    if contents.manifests:
        text += f"; there are {_steps(contents)} (all of them: `holdfast ls`)"
    elif not contents.broken:
        text += " yet: nothing that was saved there became durable"
    for path, reason in broken_manifests(contents):
        text += f"\n  {path} cannot be read: {reason}"
    return text


def _steps(contents: Overview) -> str:
    line = [str(generation.step) for generation in contents.lineage]
    shown = [f"steps {', '.join(_newest(line))}"] if line else []
    for kind, some in (("abandoned", contents.abandoned), ("undecided", contents.undecided)):
        if some:
            shown.append(f"{kind} {', '.join(_newest(list(map(str, some))))} (by that name)")
    return " and ".join(shown)


def _newest(names: list[str]) -> list[str]:
    return ["...", *names[-_SHOWN:]] if len(names) > _SHOWN else names


def broken_manifests(contents: RootContents[Described]) -> list[tuple[str, str]]:
    """Return (path, reason) of the manifests that exist and cannot be read."""
    return [(path, reason) for path, reason in contents.broken if path.startswith(f"{MANIFESTS}/")]
