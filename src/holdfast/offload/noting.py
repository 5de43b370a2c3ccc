"""Whether parameters are still what their masters say: others write to them, too."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.offload.checksums import are_same, checksum
from holdfast.offload.rows import Place
from holdfast.offload.small import Small


def note(places: Iterable[Place]) -> None:
    """These parameters are now what their masters say."""
    for place in places:
        if place.small is None:  # else its row knows what was written there
            place.bits = checksum(place.flat(place.local))
        place.seen = _seen(place)  # last: an interrupt leaves it as it was


def changed(places: Iterable[Place]) -> set[Place]:
    """Those whose parameter is not what was noted."""
    found: set[Place] = set()
    large: list[Place] = []
    small: dict[Small, list[Place]] = {}
    for place in places:
        if not place.seen or place.seen != _seen(place):
            found.add(place)
        elif place.small is not None:
            small.setdefault(place.small, []).append(place)
        else:
            large.append(place)
    before = [place.bits for place in large if place.bits is not None]
    now = [checksum(place.flat(place.local)) for place in large]
    same = are_same(before, now)
    found.update(place for place, is_same in zip(large, same, strict=True) if not is_same)
    for of, doubtful in small.items():
        found.update(of.changed(doubtful))
    return found


def _seen(place: Place) -> tuple[int, ...]:
    # What is done in place to a DTensor moves its own version, and not that of its local tensor.
    local = place.raw
    return local.data_ptr(), local._version, place.parameter._version
