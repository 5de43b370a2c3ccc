"""The values that a rank needs, read from as few images as have them all.

A rank of a pipeline finds the values of its parameters in one image, most often in its own; one
that takes the place of a whole pipeline in as many as there were stages, however many ranks each
had. Which ranks had something, the layout says: their leaves stand in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.geometry.layout import Layout, LeafSpec
from holdfast.load.read import read_aliases, read_values
from holdfast.load.source import Checkpoint
from holdfast.state.following import Document, Gathered, Leaves, Need, gather, needs, things, trim
from holdfast.state.objects import Objects
from holdfast.state.regroup import Names, same_name

Ranks = tuple[int, ...]

#: Images are opened in vain at most so often: a name that is in none of these is in none.
FRUITLESS = 64


def gather_values(
    checkpoint: Checkpoint,
    objects: Objects,
    base: int,
    document: Document,
    stored: Mapping[str, Any],
    names: Names = same_name,
    leaves: Leaves | None = None,
) -> Gathered:
    """This rank's values, from the ``document`` of the saved rank ``base`` and those it lacks.

    The same for ranks that have the same objects and the same base. ``names`` and ``leaves``: what
    parameters and the tensors of modules are called in the documents and in the layout.
    """
    aliases = read_aliases(checkpoint, document)
    there = set(things(objects, document))
    missing = [n for n in needs(objects, stored, aliases, names, leaves) if n.thing not in there]
    documents: dict[int, Document] = {
        base: {"shared": document.get("shared", {}), "aliases": aliases}
    }
    if missing:
        groups = _by_holders(checkpoint.layout, missing)
        documents |= _read(checkpoint, objects, base, document, groups)
    return gather(objects, documents, stored, names)


def _by_holders(layout: Layout, missing: Iterable[Need]) -> dict[Ranks, set[Any]]:
    """What is missing, by the ranks that may have it."""
    where = _Where(layout)
    found: dict[Ranks, set[Any]] = {}
    for need in missing:
        is_alias = need.thing.kind == "alias"
        ranks = where.one_of_each(need.leaves[0]) if is_alias else where.ranks(need.leaves)
        found.setdefault(ranks, set()).add(need.thing)
    return found


def _read(
    checkpoint: Checkpoint, objects: Objects, base: int, first: Document,
    groups: dict[Ranks, set[Any]],
) -> dict[int, Document]:  # fmt: skip
    """Documents of other ranks: always of the one that has most of what is missing, the lowest."""
    found: dict[int, Document] = {}
    in_vain = 0
    while in_vain < FRUITLESS:
        counts: Counter[int] = Counter()
        for ranks, some in groups.items():
            for rank in ranks if some else ():
                if rank != base and rank not in found and rank in checkpoint.files:
                    counts[rank] += len(some)
        if not counts:
            break
        rank = min(counts, key=lambda each: (-counts[each], each))
        document = read_values(checkpoint, rank)
        aliases = read_aliases(checkpoint, document)
        there = set(things(objects, document))
        found[rank] = trim(objects, {**document, "aliases": aliases}, first)
        is_in_vain = not any(some & there for some in groups.values())
        in_vain += is_in_vain
        groups = {ranks: some - there for ranks, some in groups.items()}
    return found


class _Where:
    """Which ranks had a leaf, by its name or by how its name begins."""

    def __init__(self, layout: Layout) -> None:
        self._leaves = layout.leaves
        self._names = [leaf.name for leaf in layout.leaves]
        self._ranks: dict[int, Ranks] = {}

    def ranks(self, names: Sequence[str]) -> Ranks:
        """Those of the first of these that is stored; none if none is."""
        for name in names:
            at = bisect_left(self._names, name)
            there = self._names[at] if at < len(self._names) else ""
            if there == name or (name.endswith(".") and there.startswith(name)):
                return self._of(self._leaves[at])
        return ()

    def one_of_each(self, beginning: str) -> Ranks:
        """The lowest rank of each different set of those that had a leaf that begins so."""
        at = bisect_left(self._names, beginning)
        lowest: set[int] = set()
        while at < len(self._names) and self._names[at].startswith(beginning):
            lowest.add(self._of(self._leaves[at])[0])
            at += 1
        return tuple(sorted(lowest))

    def _of(self, leaf: LeafSpec) -> Ranks:
        key = id(leaf.instances)
        if key not in self._ranks:
            ranks = {rank for one in leaf.instances for rank in one.ranks}
            self._ranks[key] = tuple(sorted(ranks))
        return self._ranks[key]
