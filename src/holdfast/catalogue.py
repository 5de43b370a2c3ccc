"""Where everything lies below a root, and what a root holds: names, and reading them all once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

from holdfast.errors import FormatError, HoldfastError, NewerFormat
from holdfast.format.manifest import (
    MAX_DOCUMENT_BYTES,
    Generation,
    Incarnation,
    Lineage,
    Manifest,
    Pin,
    Root,
    unseal,
)
from holdfast.storage.base import Store

ROOT, LOCK = "holdfast.json", "writer"
MANIFESTS, INCARNATIONS, LAYOUTS, STEPS = "manifests", "incarnations", "layouts", "steps"
PINS, PINS_LOCK = "pins", "pins"
PARTS = "parts"
_NUMBER = "(0|[1-9][0-9]{0,15})"
_MANIFEST_NAME = re.compile(rf"{_NUMBER}-{_NUMBER}\.json")
_INCARNATION_NAME = re.compile(rf"{_NUMBER}\.json")
D = TypeVar("D", Manifest, Incarnation, Root, Pin)


def manifest_path(generation: Generation) -> str:
    """Where the manifest of a generation stands."""
    return f"{MANIFESTS}/{generation.incarnation}-{generation.step}.json"


def pin_path(generation: Generation) -> str:
    """Where the pin of a generation stands."""
    return f"{PINS}/{generation.incarnation}-{generation.step}.json"


def generation_of(name: str) -> Generation | None:
    """The generation that a manifest or pin of this file name is of; None for other files."""
    matched = _MANIFEST_NAME.fullmatch(name)
    return None if matched is None else Generation(int(matched[1]), int(matched[2]))


def attempt_dir(generation: Generation, attempt: str) -> str:
    """Where the images of one attempt at a generation lie; never used twice."""
    return f"{STEPS}/{generation.incarnation}-{generation.step}-{attempt}"


def image_path(generation: Generation, attempt: str, rank: int) -> str:
    """Where the image of one rank lies."""
    return f"{attempt_dir(generation, attempt)}/live-{rank:05d}.safetensors"


def part_dir(generation: Generation, attempt: str) -> str:
    """Where the frozen parts that one attempt wrote lie; later checkpoints may name them too."""
    return f"{PARTS}/{generation.incarnation}-{generation.step}-{attempt}"


def part_path(generation: Generation, attempt: str, rank: int) -> str:
    """Where the frozen part of one rank lies."""
    return f"{part_dir(generation, attempt)}/frozen-{rank:05d}.safetensors"


def damage_note(path: str) -> str:
    """The file beside a part that says that it was found damaged: it is not named again."""
    return path.removesuffix(".safetensors") + ".damaged"


def layout_path(hash_: str) -> str:
    """Where a layout lies; its name is its content."""
    return f"{LAYOUTS}/{hash_}.json"


def is_root(store: Store) -> bool:
    """Whether checkpoints can lie here."""
    return store.exists(ROOT)


def read_bounded(store: Store, path: str, limit_bytes: int) -> bytes:
    """A whole file of at most this size; FormatError, before memory is taken, for a larger one."""
    size_bytes = store.size_bytes(path)
    if size_bytes > limit_bytes:
        raise FormatError(
            f"{store.url}/{path} has {size_bytes} bytes, more than any of ours ({limit_bytes})",
            path=path,
        )
    return store.read(path)


def read_document(store: Store, kind: type[D], path: str) -> D:
    """A sealed document of a root. NotFound or FormatError when there is none to be read."""
    data = read_bounded(store, path, MAX_DOCUMENT_BYTES)
    return unseal(kind, data, f"{store.url}/{path}")


def read_incarnation(store: Store, n: int) -> Incarnation:
    """The record of an incarnation. NotFound or FormatError when there is none to be read."""
    path = f"{INCARNATIONS}/{n}.json"
    found = read_document(store, Incarnation, path)
    if found.n != n:
        raise FormatError(f"{store.url}/{path} speaks of incarnation {found.n}", path=path)
    return found


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What a root holds, read once."""

    manifests: tuple[Manifest, ...] = ()
    incarnations: tuple[Incarnation, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()

    @property
    def parents(self) -> dict[int, tuple[int, int] | None]:
        """The parent of each incarnation, from its own record or from its manifests."""
        known = {m.incarnation: m.parent for m in self.manifests}
        return known | {i.n: i.parent for i in self.incarnations}

    @property
    def lineage(self) -> tuple[Generation, ...]:
        """The generations that are not abandoned, oldest first."""
        line = Lineage(self.parents)
        return tuple(m.generation for m in self.manifests if m.generation in line)

    @property
    def abandoned(self) -> tuple[Generation, ...]:
        """The generations of futures that were given up, oldest first."""
        line = Lineage(self.parents)
        return tuple(m.generation for m in self.manifests if m.generation not in line)

    @property
    def latest(self) -> Generation | None:
        """The newest generation that is not abandoned."""
        return max(self.lineage, key=lambda g: (g.step, g.incarnation), default=None)

    def find(self, generation: Generation) -> Manifest | None:
        """The manifest of a generation."""
        return next((m for m in self.manifests if m.generation == generation), None)


def catalogue(store: Store) -> Catalogue:
    """Read every manifest and incarnation of a root; what cannot be read is listed as broken.

    A manifest of a newer format is an error, not a broken file: what it holds must not be
    taken for absent.
    """
    broken: list[tuple[str, str]] = []
    manifests: list[Manifest] = []
    incarnations: list[Incarnation] = []
    for name in store.list(MANIFESTS):
        if (generation := generation_of(name)) is not None:
            found = _read_manifest(store, generation, broken)
            if found is not None:
                manifests.append(found)
    for name in store.list(INCARNATIONS):
        if matched := _INCARNATION_NAME.fullmatch(name):
            path = f"{INCARNATIONS}/{name}"
            record = _read(Incarnation, store, path, broken)
            if record is not None and record.n == int(matched[1]):
                incarnations.append(record)
            elif record is not None:
                broken.append((path, f"it speaks of incarnation {record.n}"))
    return Catalogue(
        tuple(sorted(manifests, key=lambda m: m.generation)),
        tuple(sorted(incarnations, key=lambda i: i.n)),
        tuple(broken),
    )


def find_manifest(store: Store, generation: Generation) -> Manifest | None:
    """The manifest of one generation, and no other file read; None if none can be read."""
    return _read_manifest(store, generation, [])


def _read_manifest(
    store: Store, generation: Generation, broken: list[tuple[str, str]]
) -> Manifest | None:
    path = manifest_path(generation)
    found = _read(Manifest, store, path, broken)
    if found is not None and found.generation != generation:
        broken.append((path, f"it speaks of {found.generation}"))
        return None
    return found


def _read(kind: type[D], store: Store, path: str, broken: list[tuple[str, str]]) -> D | None:
    try:
        return read_document(store, kind, path)
    except NewerFormat:
        raise
    except HoldfastError as error:  # damaged, or removed by a prune since it was listed
        broken.append((path, str(error)))
        return None
