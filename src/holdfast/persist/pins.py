"""Pins: a person's word that a checkpoint stays, given at any moment, also while a run trains.

A pin is a document of its own, because a manifest is never changed; its *name* pins, so that a
pin whose bytes are damaged still does. Setting one takes no lock of the root, and so may meet a
pruner, who holds that lock, at any point. Let them do, for one generation,

    pruner   R1 read the pins      W remove the manifest      R2 read the pins
             B  publish the same bytes back, if it was pinned by then
    pin      A  read the manifest  P publish the pin          C does the manifest stand?
             U  if not, remove the pin again and fail with NotFound

Then a ``pin`` that succeeded is of a checkpoint that stays:

* P before R2: the pruner sees the pin at R1 and does nothing, or at R2 and publishes the manifest
  back. (Unless U came between: then ``pin`` has failed and promised nothing.)
* P after R2, hence after W: C finds no manifest, since only a pruner that saw a pin would have
  put it back; ``pin`` fails.
* The pruner is killed between W and B: the pin has the manifest's own bytes (A), and the next
  pruner publishes them (``mend``) before it takes anything else away. The images are still there:
  only pruners remove them, and a pruner mends first.

U can only take away the pin that P of the same call made: calls of ``pin`` take turns, and one
that finds a pin in its place leaves it there, whatever C says. Images are not looked at between W
and B by anybody: they go later, named by what is published then. tests/persist/test_pins.py
interleaves both sides at every step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.catalogue import (
    PINS,
    PINS_LOCK,
    Catalogue,
    generation_of,
    layout_path,
    manifest_path,
    pin_path,
    read_document,
)
from holdfast.errors import AlreadyPublished, HoldfastError, NotFound, RootBusy
from holdfast.format.manifest import Generation, Manifest, Pin, seal, unseal
from holdfast.storage.base import Store

_PATIENCE_S = 10.0
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Pinned:
    """A generation that stays. ``pin`` is None, and ``reason`` says why, when it is unreadable."""

    generation: Generation
    pin: Pin | None
    reason: str = ""

    @property
    def note(self) -> str:
        """What whoever pinned it wrote."""
        return "" if self.pin is None else self.pin.note


def pinned(store: Store) -> frozenset[Generation]:
    """The generations that must not be taken away."""
    named = (generation_of(name) for name in store.list(PINS))
    return frozenset(generation for generation in named if generation is not None)


def read_pins(store: Store) -> dict[Generation, Pinned]:
    """All pins with what they say, oldest generation first."""
    found = {}
    for generation in sorted(pinned(store)):
        path = pin_path(generation)
        try:
            pin = read_document(store, Pin, path)
        except NotFound:  # removed since it was listed
            continue
        except HoldfastError as error:
            found[generation] = Pinned(generation, None, str(error))
        else:
            if pin.generation == generation:
                found[generation] = Pinned(generation, pin)
            else:
                found[generation] = Pinned(generation, None, f"it speaks of {pin.generation}")
    return found


def pin(store: Store, generation: Generation, note: str = "") -> Pin:
    """Keep the checkpoint of ``generation`` from now on. NotFound when there is none (any more).

    A second pin only renews the note. RootBusy when other calls hold pins for ten seconds.
    """
    with _turn(store):
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
        return made


def unpin(store: Store, generation: Generation) -> None:
    """Let retention have the checkpoint again. NotFound when it is not pinned."""
    with _turn(store):
        if not store.exists(pin_path(generation)):
            raise NotFound(f"{generation} in {store.url} is not pinned", generation=str(generation))
        store.remove(pin_path(generation))


def mendable(store: Store, found: Catalogue) -> list[tuple[Manifest, bytes]]:
    """The pinned checkpoints whose manifest is gone though all that it names is still there.

    A manifest that stands and cannot be read is not among them: nobody took it away.
    """
    there = {manifest.generation for manifest in found.manifests}
    unreadable = {path for path, _ in found.broken}
    return [
        (manifest, one.pin.manifest.encode())
        for generation, one in read_pins(store).items()
        if generation not in there and manifest_path(generation) not in unreadable
        if one.pin is not None and (manifest := _copied(one.pin)) is not None
        if _is_whole(store, manifest)
    ]


def mend(store: Store, found: Catalogue) -> bool:
    """Publish back what a pruner took away and was killed before it saw the pin; whether any.

    For the holder of the root's lock, before anything is pruned or swept.
    """
    mended = mendable(store, found)
    for manifest, data in mended:
        store.publish(manifest_path(manifest.generation), data)
    return bool(mended)


def _publish(store: Store, made: Pin) -> bool:
    """Whether the pin is new. One that was there is only renewed: others rely on it."""
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
    """The manifest in a pin, if it is sound and the one it should be."""
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
def _turn(store: Store) -> Iterator[None]:
    """One call at a time; each takes milliseconds."""
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
        yield
