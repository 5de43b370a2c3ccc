"""Maps tensors of the state through rules and declarations to boxes of the stored leaves.

A leaf of the training may be a part of a stored leaf, or made of several. What that comes to is
views of the tensor's memory, each a box of a stored leaf: a save copies from these views and a
restore reads into them, and neither knows of any rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from msgspec import msgpack
from torch.distributed.tensor import DTensor

from holdfast.errors import UnsupportedState, UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.layout import Instance
from holdfast.geometry.leaf_maps import Seen, Table, local_padding, local_patches, renamed, turned
from holdfast.rules import Rules
from holdfast.state.identity import TensorOwner
from holdfast.state.mapped.shards import (
    FlatBuffer,
    NamedShard,
    Shard,
    ShardPiece,
    View,
    box_view,
    declared,
    patch_view,
    whole_view,
)
from holdfast.state.mapped.tensor_parts import (
    LeafPart,
    MappedSource,
    TensorMapping,
    is_identity,
    map_scalar,
    merge_mappings,
    part_of,
    permuted_part,
    whole_shard,
    with_flags,
)
from holdfast.state.objects import Objects
from holdfast.state.selection import LeafSelection
from holdfast.state.subclasses import plain_parts
from holdfast.state.tensors import leaf_entry, local_of

Shape = tuple[int, ...]
Spec = tuple[str, Shape]


Found = tuple[TensorOwner, torch.Tensor]


class RuleMapper:
    """Applies rules and declarations on one rank of ``world``.

    ``table``: the leaves that the rules lead to, composed from the leaves of a checkpoint that was
    saved without the rules.
    """

    def __init__(
        self, rules: Rules | None, rank: int, world: int, table: Table | None = None
    ) -> None:
        self.rules = rules
        self.table = table
        self.rank = rank
        self.world = world
        self._known: dict[tuple[str, Shape, object], list[MappedSource]] = {}

    def sight(self, origin: TensorOwner, tensor: torch.Tensor) -> TensorMapping | None:
        """Maps ``tensor`` to stored leaves; None where it is stored as one leaf under its own name.

        UsageError names a leaf that does not fit its rule or its declaration, UnsupportedState a
        tensor whose part of a leaf cannot be determined.
        """
        owner = tensor if origin.parameter is None else origin.parameter
        if self._is_plain(owner) and declared(tensor) is None:
            return None
        found: TensorMapping | None
        if tensor.shape == owner.shape:
            sources = self._sources(origin, owner)
            found = merge_mappings(
                [self._local_parts(origin, tensor, source) for source in sources], tensor, sources
            )
        elif tensor.numel() == 1 and not isinstance(tensor, DTensor):
            found = map_scalar(origin, tuple(tensor.shape), self._sources(origin, owner))
        else:
            found = self._other(origin, tensor, owner)
        return None if found is None or is_identity(origin, found, tensor) else found

    def leaves(self, origin: TensorOwner) -> list[str]:
        """Returns the stored leaves that a parameter is made of, by the names the rules give
        them.
        """
        assert origin.parameter is not None
        if self._is_plain(origin.parameter):
            return [origin.name]
        seen = [source.leaf_map for source in self._sources(origin, origin.parameter)]
        return list(dict.fromkeys(leaf for one in seen for leaf in one.leaves))

    def leaf_parts(self, origin: TensorOwner) -> dict[str, LeafPart]:
        """Returns the same leaves as parts with their shapes, without saying which boxes this rank
        has.
        """
        assert origin.parameter is not None
        tensor = origin.parameter
        if self._is_plain(tensor):
            return {origin.name: LeafPart(origin.name, tuple(tensor.shape), (), ())}
        return {
            leaf: LeafPart(
                leaf, shape, (), (), None, *self._copies(origin, tensor, source.leaf_map)
            )
            for source in self._sources(origin, tensor)
            for leaf, shape in source.leaf_map.leaves.items()
        }

    def shapes(self, origin: TensorOwner, tensor: torch.Tensor) -> dict[str, Shape]:
        """Returns the leaves of the training that a parameter is, or has parts of, with their
        shapes.
        """
        sources = self._sources(origin, tensor)
        shards = [source.declared for source in sources]
        return {shard.name or origin.name: shard.shape for shard in shards}

    def aliases(self, one: Found, leaf: Found) -> dict[str, str]:
        """Returns further names of stored leaves -> the leaf they name, for two names of one
        tensor.

        Raises UsageError when the rules make different leaves of the two.
        """
        names, leaves = (self._parts(*each) for each in (one, leaf))
        if self._is_copy(*one):
            return {}
        if all(math.prod(shape) == 1 for _, shape, _ in (*names, *leaves)):
            first = leaves[0][0]  # numbers are one, however many each is stored as
            return {name: first for name, *_ in names if name != first}
        if [part[1:] for part in names] != [part[1:] for part in leaves]:
            raise UsageError(
                f"{one[0].leaf} and {leaf[0].leaf} are one tensor, and the rules see it as parts "
                "of different leaves under its two names: give both the same kinds",
                leaf=one[0].leaf,
            )
        pairs = zip(names, leaves, strict=True)
        return {name: there for (name, *_), (there, *_) in pairs if name != there}

    def _parts(self, origin: TensorOwner, tensor: torch.Tensor) -> list[tuple[str, Shape, object]]:
        mapping = self.sight(origin, tensor)
        if mapping is None:
            return [(origin.leaf, tuple(tensor.shape), None)]
        return [
            (part.leaf, part.shape, None if part.is_whole or part.instance else part.boxes)
            for part in mapping.parts
        ]

    def _is_copy(self, origin: TensorOwner, tensor: torch.Tensor) -> bool:
        mapping = self.sight(origin, tensor)
        return mapping is not None and mapping.is_copy

    def reference(self, origin: TensorOwner, tensor: torch.Tensor) -> str:
        """Returns the name by which a value refers to this leaf. Raises UnsupportedState unless it
        is stored as exactly one leaf.
        """
        found = self._parts(origin, tensor)
        if len(found) == 1 and found[0][1:] == (tuple(tensor.shape), None):
            return found[0][0]
        raise UnsupportedState(
            f"a value in the state is {origin.leaf}, which the rules do not store as one leaf of "
            "its shape: keep it out of the value, or let the rules only rename it",
            leaf=origin.leaf,
        )

    def _sources(self, origin: TensorOwner, tensor: torch.Tensor) -> list[MappedSource]:
        """Returns which parts of which leaves of the training a parameter is, each leaf with its
        mapping by the rules.

        The state of an optimizer needs the same answer as its parameter, and every save needs it
        again, so the answer is kept.
        """
        what = "on a mesh" if isinstance(tensor, DTensor) else declared(tensor)
        key = origin.name, tuple(tensor.shape), what
        if key not in self._known:
            self._known[key] = self._find_sources(origin, tensor)
        return self._known[key]

    def _find_sources(self, origin: TensorOwner, tensor: torch.Tensor) -> list[MappedSource]:
        what = declared(tensor)
        shape = tuple(tensor.shape)
        if isinstance(tensor, DTensor):  # what it holds is asked of each tensor that has its shape
            return [MappedSource(whole_shard(shape), self._map_leaf(origin.name, shape), False)]
        if what is not None:
            is_flat = not isinstance(what, Shard)
            return [
                MappedSource(one, self._map_leaf(one.name or origin.name, one.shape), is_flat)
                for one in what.of(shape)
            ]
        if self.rules is None:
            return [MappedSource(whole_shard(shape), self._map_leaf(origin.name, shape), False)]
        local = self.rules.local(origin.name, shape, self.rank)
        if local.offsets is None:
            pieces = [ShardPiece(box, inside) for box, inside in local.held]
        else:
            held = zip(local.held, local.offsets, strict=True)
            pieces = [ShardPiece(box, inside, at) for (box, inside), at in held]
        named = NamedShard(None, local.shape, tuple(pieces))
        leaf_map = self._map_leaf(origin.name, local.shape)
        return [MappedSource(named, leaf_map, local.offsets is not None)]

    def _map_leaf(self, name: str, shape: Shape) -> Seen:
        seen = renamed(name, shape) if self.rules is None else self.rules.see(name, shape)
        return seen if self.table is None else self.table.through(seen)

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        return self.rules is None and self.table is None and declared(tensor) is None

    def _local_parts(
        self, origin: TensorOwner, tensor: torch.Tensor, source: MappedSource
    ) -> TensorMapping:
        seen, pieces = source.leaf_map, source.declared.pieces
        if isinstance(tensor, DTensor):
            entry = leaf_entry(origin.leaf, tensor, self.rank, "split")
            assert isinstance(entry.instance, Instance)
            turned = permuted_part(origin, seen, entry.instance, local_of(tensor))
            if turned is not None:
                return with_flags(TensorMapping((turned,)), seen)
            pieces = tuple(ShardPiece(box, inside) for box, inside in entry.boxes(self.rank))
        held = [(piece.box, piece.inside) for piece in pieces]
        found: dict[str, list[tuple[Box, View]]] = {leaf: [] for leaf in seen.leaves}
        for patch in local_patches(seen, held):
            if not patch.box.is_empty:
                view = patch_view(patch, pieces[patch.part])
                found[patch.leaf].append((patch.box, view))
        rows, row = self._copies(origin, tensor, seen)
        parts = [
            part_of(origin.stored(leaf), shape, found[leaf], rows, row)
            for leaf, shape in seen.leaves.items()
        ]
        zeros = [box_view(pieces[at], box) for at, box in local_padding(seen, held)]
        return with_flags(TensorMapping(tuple(parts), tuple(zeros)), seen)

    def _copies(self, origin: TensorOwner, tensor: torch.Tensor, seen: Seen) -> tuple[int, int]:
        """Returns how many copies of a leaf there are that may differ, and the number of the copy
        here.

        Copies are ranks that have the same part of the leaf by the rules.
        """
        if seen.spread != "averaged":
            return 0, 0
        if isinstance(tensor, DTensor) or declared(tensor) is not None or self.rules is None:
            raise UnsupportedState(
                f"{origin.leaf} is averaged by its rule, and is a {type(tensor).__name__} or was "
                "declared a part of a leaf: which ranks have copies of it is only known of plain "
                "tensors, from the mesh of the rules",
                leaf=origin.leaf,
            )
        shape = tuple(tensor.shape)
        held = [self.rules.local(origin.name, shape, rank).held for rank in range(self.world)]
        alike = [rank for rank, one in enumerate(held) if one == held[self.rank]]
        return len(alike), alike.index(self.rank)

    def _other(
        self, origin: TensorOwner, tensor: torch.Tensor, owner: torch.Tensor
    ) -> TensorMapping | None:
        """Maps state of another shape than its parameter's: a leaf of its own, whole or
        declared.
        """
        sources = self._sources(origin, owner)
        name = sources[0].leaf_map.same_as if len(sources) == 1 else None
        leaf, shape = origin.stored(name or origin.name), tuple(tensor.shape)
        what = declared(tensor)
        if what is not None:
            named = what.of(shape)[0]
            found = [(piece.box, box_view(piece, piece.inside)) for piece in named.pieces]
            return TensorMapping((part_of(leaf, named.shape, found, 0, 0),))
        if isinstance(tensor, DTensor):
            entry = leaf_entry(leaf, tensor, self.rank, "split")
            assert isinstance(entry.instance, Instance)
            view = whole_view(tuple(local_of(tensor).shape))
            return TensorMapping((LeafPart(leaf, shape, (), (view,), entry.instance),))
        is_cut = not isinstance(owner, DTensor) and any(
            source.declared.pieces != whole_shard(source.declared.shape).pieces
            for source in sources
        )
        if is_cut and tensor.numel() > 1:
            raise UnsupportedState(
                f"{origin.leaf} has the shape {list(shape)}, and its parameter, of shape "
                f"{list(owner.shape)}, is a part of a leaf: which part of its own leaf the state "
                "is cannot be known. Say it with holdfast.declare(tensor, holdfast.Shard(...))",
                leaf=origin.leaf,
            )
        return TensorMapping((part_of(leaf, shape, [(Box.whole(shape), whole_view(shape))], 0, 0),))


def shard_sight(name: str, tensor: torch.Tensor, rank: int) -> TensorMapping | None:
    """Maps an entry of the state that is itself a tensor; None where nothing was declared of it.

    A leaf in a flat buffer is named by the buffer's name and its own.
    """
    what = declared(tensor)
    if what is None:
        return None
    through, origin = RuleMapper(None, rank, 1), TensorOwner("", name)
    is_buffer = isinstance(what, FlatBuffer)
    is_flat = not isinstance(what, Shard)
    sources: list[MappedSource] = [
        MappedSource(one, renamed(f"{name}.{one.name}" if is_buffer else name, one.shape), is_flat)
        for one in what.of(tuple(tensor.shape))
    ]
    return merge_mappings(
        [through._local_parts(origin, tensor, source) for source in sources], tensor, sources
    )


class StateView:
    """Maps the leaves of a checkpoint to ``objects``. ``stored``: leaf -> (dtype, shape).

    ``is_plain``: all leaves are wanted, each under its own name.
    """

    def __init__(
        self,
        objects: Objects,
        through: RuleMapper,
        stored: Mapping[str, Spec],
        choice: LeafSelection,
        *,
        is_plain: bool,
    ) -> None:
        self.objects, self.through, self.choice = objects, through, choice
        self.stored, self.is_plain = stored, is_plain

    @cached_property
    def origins(self) -> dict[str, dict[str, TensorOwner]]:
        """Returns the owners of the state of each optimizer, by parameter name."""
        return {key: self.objects.origins(key) for key in self.objects.optimizers}

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        return {
            name: self._inner_names(key, origin)
            for key, origins in self.origins.items()
            for name, origin in origins.items()
        }

    def names(self, here: str) -> Sequence[str]:
        """Returns the names of a parameter in the values of a checkpoint: those of all leaves it is
        made of.
        """
        return [here] if self.is_plain else self._names[here]

    def _inner_names(self, key: str, origin: TensorOwner) -> list[str]:
        inner = origin.prefix[len(key) + 1 :]
        return [f"{inner}{leaf}" for leaf in self.through.leaves(origin)]

    def leaves(self, key: str) -> Iterator[str]:
        """Yields the stored leaves that the tensors of a module map to, whether the checkpoint has
        them or not.
        """
        if self.is_plain:
            yield from (name for name, _ in self.named(key))
            return
        for origin, tensor in self.held(key):
            mapping = self.through.sight(origin, tensor)
            yield from [origin.leaf] if mapping is None else (part.leaf for part in mapping.parts)

    def named(self, key: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the plain tensors of a module, each with its name here."""
        for held in self.objects.tensors[key]:
            yield from plain_parts(f"{key}.{held.name}", held.tensor)

    def held(self, key: str) -> Iterator[tuple[TensorOwner, torch.Tensor]]:
        """Yields the plain tensors of a module, each with its owner."""
        for held in self.objects.tensors[key]:
            origin = TensorOwner(f"{key}.", held.name)
            for part, inner in plain_parts(origin.leaf, held.tensor):
                yield origin.part(part, held.tensor), inner


# Composes the leaves that rules lead to from the leaves of a checkpoint saved in another form.


Shapes = Mapping[str, tuple[int, ...]]


def table_as_saved(
    rules: Rules, modules: Iterable[str], stored: Shapes, aliases: Mapping[str, str]
) -> Table:
    """Returns the leaves that ``rules`` lead to, composed from the ``stored`` leaves of
    ``modules``.

    ``stored``: leaf -> shape; ``aliases``: further names of leaves. UsageError names a stored leaf
    that does not fit its rule.
    """
    seen: dict[str, Seen] = {}
    for key in modules:
        prefix = f"{key}."
        names = {n: stored[n] for n in stored if n.startswith(prefix)}
        names |= {n: stored[leaf] for n, leaf in aliases.items() if n.startswith(prefix)}
        for name, shape in names.items():
            inner = name[len(prefix) :]
            seen.setdefault(inner, rules.see(inner, shape))
    return Table(turned(seen))


# Detects rules that apply to no leaf on any rank.
#
# A rank of a pipeline has no leaf for some of the rules. A rule that applies to no leaf of any rank
# is a mistake, most often in spelling.


def check_rules(what: str, rules: object) -> None:
    """Raises UsageError for a value that is not a set of rules."""
    if rules is not None and not isinstance(rules, Rules):
        raise UsageError(f"{what} is a {type(rules).__name__}: give a holdfast.rules.Rules")


def report_usage(through: RuleMapper, objects: Objects) -> bytes:
    """Encodes the rules and which of them apply to a leaf here; b"" where there are no rules.

    UsageError names a leaf here that does not fit its rule.
    """
    rules = through.rules
    if rules is None:
        return b""
    leaves: dict[str, Shape] = {}
    for key, tensors in objects.tensors.items():
        for held in tensors:
            leaves.update(through.shapes(TensorOwner(f"{key}.", held.name), held.tensor))
    for key in objects.optimizers:
        for origin, tensor in objects.masters(key):
            leaves.update(through.shapes(origin, tensor))
    rules.check(leaves, elsewhere=rules.patterns)
    return msgpack.encode((rules.patterns, rules.used(leaves)))


def require_all_used(said: Sequence[bytes]) -> None:
    """Raises UsageError, the same on all ranks, for a rule that applies to no leaf of any rank."""
    heard = [msgpack.decode(one, type=tuple[list[str], list[str]]) for one in said if one]
    used = {pattern for _, some in heard for pattern in some}
    for patterns, _ in heard:
        unused = [pattern for pattern in patterns if pattern not in used]
        if unused:
            raise UsageError(
                f"the rule for {unused[0]!r} is for no leaf of any rank: patterns are of names as "
                "the modules have them, without the key in the state. Correct it, leave it out, or "
                "mark it with rules.optional",
                pattern=unused[0],
            )
