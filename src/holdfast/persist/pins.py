"""Pins keep a checkpoint from removal, at any moment, also while a run trains.

A pin is a document of its own, because a manifest is never changed. Its *name* pins the
generation, so that a pin whose bytes are damaged still counts. Setting a pin takes no lock of the
root, and so may run at any point of a pruner, which holds that lock. For one generation, they do

    pruner   R1 read the pins      W remove the manifest      R2 read the pins
             B  publish the same bytes back, or those that the pin has, if it was pinned
                by then
    pin      A  read the manifest  P publish the pin          C does the manifest stand?
             U  if not, remove the pin again and fail with NotFound

Then a checkpoint whose ``pin`` succeeded stays:

* P before R2: the pruner sees the pin at R1 and does nothing, or at R2 and publishes the manifest
  back. (Unless U came between: then ``pin`` has failed and promised nothing.)
* P after R2, hence after W: C finds no manifest, since only a pruner that saw a pin would have
  put it back; ``pin`` fails.
* The pruner is killed between W and B: the pin has the manifest's own bytes (A), and the next
  pruner publishes them (``mend``) before it removes anything else. The images are still there:
  only pruners remove them, and a pruner mends first.

In a bucket a request to remove the pin, of an earlier call, may land after P if nobody answered it:
while one may, ``pin`` fails, although it has set the pin.

U can only remove the pin that P of the same call made: calls of ``pin`` take turns, and a call
that finds an existing pin leaves it there, whatever C finds. Nobody reads images between W and B:
they are removed later, by the manifests that are published then. tests/persist/test_pins.py
interleaves both sides at every step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec

from holdfast.catalogue import (
    PINS,
    PINS_LOCK,
    Described,
    RootContents,
    generation_of,
    layout_path,
    manifest_path,
    pin_path,
    read_document,
)
from holdfast.errors import (
    AlreadyPublished,
    FormatError,
    HoldfastError,
    NotFound,
    RootBusy,
    StorageError,
)
from holdfast.events import warn
from holdfast.format.manifest import Generation, Manifest, Pin, seal, unseal
from holdfast.storage.base import Lock, Store

_PATIENCE_S = 10.0
_PAUSE_S = 0.02


class PinnedGenerations(msgspec.Struct, frozen=True):
    """A pinned generation. ``pin`` is None, and ``reason`` says why, when the pin is unreadable."""

    generation: Generation
    pin: Pin | None
    reason: str = ""

    @property
    def note(self) -> str:
        """The note of the user who pinned it."""
        return "" if self.pin is None else self.pin.note


def pinned(store: Store) -> frozenset[Generation]:
    """Returns the generations that must not be removed."""
    named = (generation_of(name) for name in store.list(PINS))
    return frozenset(generation for generation in named if generation is not None)


def read_pins(store: Store) -> dict[Generation, PinnedGenerations]:
    """Returns all pins with their content, oldest generation first."""
    found = {}
    for generation in sorted(pinned(store)):
        path = pin_path(generation)
        try:
            pin = read_document(store, Pin, path)
        except NotFound:  # removed since it was listed
            continue
        except HoldfastError as error:
            found[generation] = PinnedGenerations(generation, None, str(error))
        else:
            if pin.generation == generation:
                found[generation] = PinnedGenerations(generation, pin)
            else:
                found[generation] = PinnedGenerations(
                    generation, None, f"it speaks of {pin.generation}"
                )
    return found


def pin(store: Store, generation: Generation, note: str = "") -> Pin:
    """Keep the checkpoint of ``generation`` from now on. Raises NotFound when there is none (any
    more).

    A second pin only renews the note. RootBusy when other calls hold pins for ten seconds;
    StorageError where a removal of this pin may still land that nobody answered.
    """
    with _turn(store) as lock:
        data = _manifest(store, generation)
        made = Pin(
            run_id=unseal(Manifest, data, manifest_path(generation)).run_id,
            incarnation=generation.incarnation,
            step=generation.step,
            manifest=data.decode(),
            note=note,
            created_s=time.time(),
        )
        if _publish(store, made) and not store.exists(manifest_path(generation)):
            store.remove(pin_path(generation))
            raise _gone(store, generation)
        # A pin comes back under the name that such a request removes.
        if waits_s := getattr(lock, "unsettled_s", 0.0):
            raise StorageError(
                f"{generation} in {store.url} is pinned now, but a request of an earlier call that "
                "nobody answered may still remove this pin. Pin it again in "
                f"{math.ceil(waits_s / 60)} minutes to be sure of it.",
                operation="pin",
                path=pin_path(generation),
                url=store.url,
                errno=0,
            )
        return made


def copy_pin(source: Store, target: Store, manifest: Manifest) -> None:
    """Pins a checkpoint that the holder of ``target``'s lock is about to publish there, if
    ``source`` pins it. Nobody prunes meanwhile; the turn is for removals of pins that were refused,
    which the next call would make. Where none is to be had, it is done without one.
    """
    held = read_pins(source).get(manifest.generation)
    if held is None:
        return
    made = Pin(
        run_id=manifest.run_id,
        incarnation=manifest.incarnation,
        step=manifest.step,
        manifest=seal(manifest).decode(),
        note=held.note,
        created_s=time.time(),
    )
    with ExitStack() as turn, suppress(AlreadyPublished):
        waits_s = 0.0
        try:
            waits_s = getattr(turn.enter_context(_turn(target)), "unsettled_s", 0.0)
        except StorageError as error:  # else one pin that stays keeps all of a cache from the root
            warn(f"{error} The pin of {manifest.generation} is copied all the same.")
        if waits_s:
            warn(
                f"{manifest.generation} is pinned in {target.url} too, but a request of an earlier "
                "call that nobody answered may still remove this pin there. Pin it again in "
                f"{math.ceil(waits_s / 60)} minutes to be sure of it."
            )
        target.publish(pin_path(manifest.generation), seal(made))


def unpin(store: Store, generation: Generation) -> None:
    """Unpins the checkpoint, so that retention may remove it. Raises NotFound when it is not
    pinned.
    """
    with _turn(store):
        if not store.exists(pin_path(generation)):
            raise NotFound(f"{generation} in {store.url} is not pinned", generation=str(generation))
        store.remove(pin_path(generation))


def without_manifest(
    found: RootContents[Described], pins: Collection[Generation]
) -> set[Generation]:
    """Returns those of ``pins`` whose manifest is gone. One that is there and cannot be read is
    not: nobody removed it.
    """
    unreadable = {path for path, _ in found.broken}
    gone = set(pins).difference(found.generations)
    return {generation for generation in gone if manifest_path(generation) not in unreadable}


def mendable(
    store: Store, found: RootContents[Described], pins: Collection[Generation] | None = None
) -> list[tuple[Manifest, bytes]]:
    """Returns pinned checkpoints whose manifest is gone though all files that it names still exist.
    ``pins``: those that are looked at; all without it.
    """
    gone = without_manifest(found, pinned(store) if pins is None else pins)
    return [one for one in manifests_in_pins(store, gone) if _is_whole(store, one[0])]


def pinned_alone(
    store: Store, manifests: Iterable[Described], pins: Collection[Generation]
) -> list[Manifest]:
    """Returns the manifests that pins hold of checkpoints that are not among ``manifests``: what
    they name stays, so that a repair can bring the rest back. ``pins``: those there are now.
    """
    alone = set(pins) - {manifest.generation for manifest in manifests}
    return [manifest for manifest, _ in manifests_in_pins(store, alone)]


def manifests_in_pins(
    store: Store, generations: Collection[Generation]
) -> list[tuple[Manifest, bytes]]:
    """Returns the manifests that the pins of these generations hold, with their bytes."""
    held = []
    for generation in sorted(generations):
        try:
            one = read_document(store, Pin, pin_path(generation))
        except (NotFound, FormatError):
            continue
        manifest = _copied(one)
        if manifest is not None and manifest.generation == generation:
            held.append((manifest, one.manifest.encode()))
    return held


def mend(
    store: Store, found: RootContents[Described], pins: Collection[Generation] | None = None
) -> bool:
    """Publishes the manifests again that a pruner removed before it was killed; True if there were
    any. ``pins``: those that are looked at; all without it.

    Called by the holder of the root's lock, before anything is pruned or swept.
    """
    mended = mendable(store, found, pins)
    for manifest, data in mended:
        with suppress(AlreadyPublished):  # a list lags
            store.publish(manifest_path(manifest.generation), data)
    return bool(mended)


def _publish(store: Store, made: Pin) -> bool:
    """Writes the pin; True if it is new. An existing one is only renewed: others rely on it."""
    path = pin_path(made.generation)
    try:
        store.publish(path, seal(made))
    except AlreadyPublished:
        store.publish(path, seal(made), replace=True)
        return False
    return True


def _manifest(store: Store, generation: Generation) -> bytes:
    try:
        return store.read(manifest_path(generation))
    except NotFound:
        raise _gone(store, generation) from None


def _gone(store: Store, generation: Generation) -> NotFound:
    return NotFound(
        f"there is no checkpoint {generation} in {store.url}, or retention took it just now; "
        "`holdfast ls` shows what is there",
        generation=str(generation),
    )


def _copied(one: Pin) -> Manifest | None:
    """Returns the manifest in a pin, if it is sound and of the right generation."""
    try:
        manifest = unseal(Manifest, one.manifest.encode(), "the manifest in a pin")
    except HoldfastError:
        return None
    return manifest if manifest.generation == one.generation else None


def _is_whole(store: Store, manifest: Manifest) -> bool:
    try:
        files = (*manifest.images, *manifest.parts)
        sizes = [store.size_bytes(file.path) for file in files]
    except NotFound:
        return False
    is_complete = sizes == [file.size_bytes for file in files]
    return is_complete and store.exists(layout_path(manifest.layout))


@contextmanager
def _turn(store: Store) -> Iterator[Lock]:
    """Admits one call at a time; each takes milliseconds."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            lock = store.lock(PINS_LOCK, "holdfast pin")
            break
        except RootBusy:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_PAUSE_S)
    with lock:
        yield lock
