"""What a reader must know to read a file: features it requires by name, or is refused with.

A feature that changes what bytes mean (compressed, encrypted) is *required*: a reader that does
not know it must not read on. One that may be read over is *optional*.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Frozen leaves lie in an image of their own, which many manifests name; or before a gap in an
#: image, ready to be cut off.
PARTS = "parts"

#: The layout lists boxes of leaves that no mesh describes.
LISTINGS = "listings"

#: The features this version can read. Version 1 of the format was frozen with none.
KNOWN_FEATURES: frozenset[str] = frozenset({PARTS, LISTINGS})


def needed(*, parts: bool, listings: bool) -> tuple[str, ...]:
    """What a manifest requires that names frozen parts, or a layout with listings."""
    return ((PARTS,) if parts else ()) + ((LISTINGS,) if listings else ())


def unknown_features(requires: Iterable[str]) -> list[str]:
    """Those of ``requires`` that this version cannot read."""
    return sorted(set(requires) - KNOWN_FEATURES)
