"""Merges the leaves that all ranks declared into one set, or lists where the ranks differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from holdfast.errors import StateMismatch
from holdfast.geometry.leaves import (
    MIN_FROZEN_BYTES,
    BoxList,
    HolderBoxes,
    LeafEntry,
    LeafSpec,
    list_parts,
)
from holdfast.geometry.mesh import REPLICATE, Instance, Mesh
from holdfast.geometry.rank_ranges import ranks_text

#: Differences written out in the message; all of them are in the error's fields.
SHOWN = 20

Ranks = Sequence[int]
Declared = list[tuple[int, LeafEntry]]  # (which of the distinct tables, its entry)
Instances = tuple[Instance | BoxList, ...]


def agree(
    tables: Sequence[Sequence[LeafEntry]], *, is_partial: bool = False
) -> tuple[LeafSpec, ...]:
    """Returns the leaves of all ranks, sorted by name, from the table of each rank.

    A rank need not have every leaf, but all ranks of an instance must declare it alike, and the
    boxes that ranks hold without a mesh must make up the leaf, unless ``is_partial``: then the
    tables are not of all ranks, or not of all that they hold. Raises StateMismatch with every leaf
    where ranks contradict each other, or of which nobody holds some elements. A table that occurs
    several times, as one object, is checked once.
    """
    distinct: dict[int, tuple[Sequence[LeafEntry], list[int]]] = {}
    for rank, table in enumerate(tables):
        distinct.setdefault(id(table), (table, []))[1].append(rank)
    ranks = [some for _, some in distinct.values()]  # by rising lowest rank
    by_name: dict[str, Declared] = {}
    faults: list[tuple[str, str]] = []
    for number, (table, some) in enumerate(distinct.values()):
        for entry in table:
            declared = by_name.setdefault(entry.name, [])
            if declared and declared[-1][0] == number:
                declare = "declares" if len(some) == 1 else "declare"
                faults.append((entry.name, f"{ranks_text(some)} {declare} it twice"))
            else:
                declared.append((number, entry))
    groups = _Groups(len(tables), ranks)
    leaves = []
    for name, declared in sorted(by_name.items()):
        instances, contradictions = groups.find(declared)
        contradictions = [*_differences(declared, ranks), *contradictions]
        if not contradictions and not is_partial:
            contradictions = groups.missing(declared[0][1].shape, instances)
        faults += [(name, text) for text in contradictions]
        if not contradictions:
            first = declared[0][1]
            # Ranks may differ in this flag: it decides where a leaf is stored, not its content.
            is_frozen = all(entry.is_frozen for _, entry in declared)
            leaves.append(
                LeafSpec(name, first.dtype, first.shape, first.spread, instances, is_frozen)
            )
    if faults:
        raise _mismatch(faults)
    return _worth_freezing(leaves)


def _worth_freezing(leaves: Sequence[LeafSpec]) -> tuple[LeafSpec, ...]:
    """Returns the same leaves; none is frozen where all frozen ones together have too few bytes to
    matter.
    """
    if sum(leaf.size_bytes for leaf in leaves if leaf.is_frozen) >= MIN_FROZEN_BYTES:
        return tuple(leaves)
    return tuple(replace(leaf, is_frozen=False) if leaf.is_frozen else leaf for leaf in leaves)


def _mismatch(faults: list[tuple[str, str]]) -> StateMismatch:
    names = sorted({name for name, _ in faults})
    lines = [f"  {name}: {text}" for name, text in faults[:SHOWN]]
    if len(faults) > SHOWN:
        lines.append(f"  and {len(faults) - SHOWN} more")
    what = "1 leaf" if len(names) == 1 else f"{len(names)} leaves"
    return StateMismatch(
        f"the states of the ranks do not fit each other in {what}:\n" + "\n".join(lines),
        problems=[f"{name}: {text}" for name, text in faults],
        leaves=tuple(names),
        differences=tuple(faults),
    )


def _differences(declared: Declared, ranks: Sequence[Ranks]) -> list[str]:
    first = declared[0][1]
    texts = []
    for what in ("dtype", "shape", "spread"):
        expected = getattr(first, what)
        if all(getattr(entry, what) == expected for _, entry in declared):
            continue
        ranks_of: dict[object, list[int]] = {}
        for table, entry in declared:
            ranks_of.setdefault(getattr(entry, what), []).extend(ranks[table])
        values = (f"{value} on {ranks_text(some)}" for value, some in ranks_of.items())
        texts.append(f"its {what} is " + ", ".join(values))
    return texts


class _Groups:
    """Checks the instances that ranks declare for a leaf; once for all leaves that are alike."""

    def __init__(self, world: int, ranks: Sequence[Ranks]) -> None:
        self.world = world
        self._ranks = ranks
        """The ranks of each distinct table."""
        self._numbers: dict[Instance | HolderBoxes | None, int] = {}
        self._instances: list[Instance | HolderBoxes | None] = []
        self._numbers_by_id: dict[int, int] = {}
        self._found: dict[tuple[tuple[int, int], ...], tuple[Instances, list[str]]] = {}
        self._groups: dict[Instances, Instances] = {}
        self._missing: dict[tuple[int, tuple[int, ...]], list[str]] = {}

    def find(self, declared: Declared) -> tuple[Instances, list[str]]:
        """Returns the instances of a leaf, and the contradictions between them."""
        key = tuple([(table, self._number(entry.instance)) for table, entry in declared])
        if key not in self._found:
            self._found[key] = self._check(key)
        return self._found[key]

    def missing(self, shape: tuple[int, ...], instances: Instances) -> list[str]:
        """Describes the first box of a leaf of ``shape`` that nobody holds; empty when there is
        none.
        """
        listing = next((one for one in instances if isinstance(one, BoxList)), None)
        if listing is None or len(instances) > 1:  # an instance has the whole leaf
            return []
        key = (id(listing), shape)
        if key not in self._missing:
            # Imported here: most runs have no box lists, and the module loads numpy.
            from holdfast.geometry.partition import partition

            box = partition(shape, listing.parts).missing
            by = ranks_text(listing.ranks) if listing.ranks else "no rank"
            self._missing[key] = (
                []
                if box is None
                else [
                    f"no rank holds the box {box.start} to {box.stop} of its shape {shape}; boxes "
                    f"of it are held by {by}"
                ]
            )
        return self._missing[key]

    def _number(self, instance: Instance | HolderBoxes | None) -> int:
        # Compared by identity first: comparing a large mesh for every leaf of every rank takes
        # seconds.
        number = self._numbers_by_id.get(id(instance))
        if number is None:
            number = self._numbers.setdefault(instance, len(self._numbers))
            if number == len(self._instances):
                self._instances.append(instance)
            self._numbers_by_id[id(instance)] = number
        return number

    def _check(self, key: tuple[tuple[int, int], ...]) -> tuple[Instances, list[str]]:
        declared_by: dict[int, set[int]] = {}
        for table, number in key:
            declared_by.setdefault(number, set()).update(self._ranks[table])
        everybody = set().union(*declared_by.values())
        texts: list[str] = []
        alone: list[int] = []
        held: list[tuple[tuple[int, ...], HolderBoxes]] = []
        instances: list[Instance] = []
        for number, ranks in declared_by.items():
            instance = self._instances[number]
            if instance is None:
                alone += ranks
            elif isinstance(instance, HolderBoxes):
                held.append((tuple(ranks), instance))
            else:
                texts += self._contradictions(instance, ranks, everybody)
                instances.append(instance)
        listings = [list_parts(held)] if held else []
        found = _sorted([*_collapse(instances, alone), *listings])
        return self._groups.setdefault(found, found), texts

    def _contradictions(
        self, instance: Instance, ranks: set[int], ranks_with_leaf: set[int]
    ) -> list[str]:
        mesh = set(instance.mesh.ranks)
        outside = ranks - mesh
        beyond = {rank for rank in mesh if rank >= self.world}
        absent = mesh - beyond - ranks_with_leaf
        otherwise = (mesh - ranks) & ranks_with_leaf
        here = f"the mesh {instance.mesh.shape} of {ranks_text(instance.mesh.ranks)}"
        texts = []
        if outside:
            texts.append(f"{ranks_text(outside)} declared {here}, outside of it")
        if beyond:
            texts.append(f"{here} names {ranks_text(beyond)}, but the world has {self.world}")
        if absent:
            texts.append(f"{ranks_text(absent)} in {here} did not declare it")
        if otherwise:
            texts.append(f"{ranks_text(otherwise)} in {here} declared another mesh or placement")
        return texts


def _sorted(instances: Iterable[Instance | BoxList]) -> Instances:
    """Sorts the instances by their lowest rank; an empty box list comes first."""
    return tuple(sorted(instances, key=lambda one: min(one.ranks, default=-1)))


def _collapse(instances: Iterable[Instance], alone: Iterable[int]) -> list[Instance]:
    """Merges instances that are whole on each rank into one.

    Otherwise a plain tensor would have as many instances as there are ranks: it is ``alone`` on
    each of these.
    """
    whole = [*alone]
    found = []
    for instance in instances:
        if instance.is_whole:
            whole += instance.mesh.ranks
        else:
            found.append(instance)
    if whole:
        ranks = tuple(sorted(set(whole)))
        found.append(Instance(Mesh((len(ranks),), ranks), (REPLICATE,)))
    return found
