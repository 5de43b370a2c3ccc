"""Leases what roots have while they are read, and tells what was pruned there all the same.

Where no lease can be written, as below a root that is mounted read-only, retention may take a file
that is being read: whoever reads asks afterwards what is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast.catalogue import MANIFESTS, NEW_LISTS, Catalogue, catalogue, generation_of
from holdfast.format.manifest import Generation
from holdfast.leases import ReadLease
from holdfast.storage.base import Store


@contextmanager
def leased(places: Sequence[Store]) -> Iterator[list[tuple[Store, Catalogue]]]:
    """Leases what these roots have, so that their files stay while they are read."""
    leases, known = [ReadLease(place) for place in places], []
    try:
        for place, lease in zip(places, leases, strict=True):
            for _ in range(NEW_LISTS):
                there = catalogue(place)
                newest = there.manifests[::-1]
                is_held = not newest or lease.take(newest[0], newest[1:])
                if is_held and not gone_since(place, there):
                    break  # else retention was faster
            known.append((place, there))
        yield known
    finally:
        for lease in leases:
            lease.end()


def gone_since(place: Store, there: Catalogue) -> set[Generation]:
    """Returns the checkpoints that were removed from a root since it was read."""
    found = {manifest.generation for manifest in there.manifests}
    return found.difference(map(generation_of, place.list(MANIFESTS))) if found else set()


def pruned_text(place: Store, there: Catalogue) -> str:
    """Formats what is gone, for errors."""
    gone = ", ".join(map(str, sorted(gone_since(place, there))))
    return f"{place.url} was pruned while it was read: {gone}. Repair again."
