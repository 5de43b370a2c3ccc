"""Where everything lies below a root, and what a root holds: names, and reading them all once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

from holdfast.errors import HoldfastError, NewerFormat
from holdfast.format.manifest import Generation, Incarnation, Lineage, Manifest, unseal
from holdfast.storage.base import Store

ROOT, LOCK = "holdfast.json", "writer"
MANIFESTS, INCARNATIONS, LAYOUTS, STEPS = "manifests", "incarnations", "layouts", "steps"
_MANIFEST_NAME = re.compile(r"(\d+)-(\d+)\.json")
_INCARNATION_NAME = re.compile(r"(\d+)\.json")
D = TypeVar("D", Manifest, Incarnation)


def manifest_path(generation: Generation) -> str:
    """Where the manifest of a generation stands."""
    return f"{MANIFESTS}/{generation.incarnation}-{generation.step}.json"


def attempt_dir(generation: Generation, attempt: str) -> str:
    """Where the images of one attempt at a generation lie; never used twice."""
    return f"{STEPS}/{generation.incarnation}-{generation.step}-{attempt}"


def image_path(generation: Generation, attempt: str, rank: int) -> str:
    """Where the image of one rank lies."""
    return f"{attempt_dir(generation, attempt)}/live-{rank:05d}.safetensors"


def layout_path(hash_: str) -> str:
    """Where a layout lies; its name is its content."""
    return f"{LAYOUTS}/{hash_}.json"


def is_root(store: Store) -> bool:
    """Whether checkpoints can lie here."""
    return store.exists(ROOT)


def read_incarnation(store: Store, n: int) -> Incarnation:
    """The record of an incarnation. NotFound or FormatError when there is none to be read."""
    path = f"{INCARNATIONS}/{n}.json"
    return unseal(Incarnation, store.read(path), path)


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
        if matched := _MANIFEST_NAME.fullmatch(name):
            found = _read(Manifest, store, f"{MANIFESTS}/{name}", broken)
            if found is not None:
                generation = Generation(int(matched[1]), int(matched[2]))
                if found.generation == generation:
                    manifests.append(found)
                else:
                    broken.append((f"{MANIFESTS}/{name}", f"it speaks of {found.generation}"))
    for name in store.list(INCARNATIONS):
        if _INCARNATION_NAME.fullmatch(name):
            path = f"{INCARNATIONS}/{name}"
            record = _read(Incarnation, store, path, broken)
            if record is not None:
                incarnations.append(record)
    return Catalogue(
        tuple(sorted(manifests, key=lambda m: m.generation)),
        tuple(sorted(incarnations, key=lambda i: i.n)),
        tuple(broken),
    )


def _read(kind: type[D], store: Store, path: str, broken: list[tuple[str, str]]) -> D | None:
    try:
        return unseal(kind, store.read(path), f"{store.url}/{path}")
    except NewerFormat:
        raise
    except HoldfastError as error:  # damaged, or removed by a prune since it was listed
        broken.append((path, str(error)))
        return None
