"""Defines the functions from which rules are written, and checks their arguments.

All sizes, widths and counts are those of the whole leaf, over all ranks, unless a function says
otherwise. Dimensions are counted from 0. Every function raises UsageError for arguments that cannot
be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import UsageError
from holdfast.geometry.leaf_maps import Patch, Seen, Shape, Table, joined, renamed
from holdfast.rules.kinds import (
    Annotation,
    DimCut,
    Kind,
    PaddedRule,
    PairedRule,
    PartOf,
    Rename,
    RulePlace,
    RuleStep,
    Stack,
    Transpose,
    Unstack,
    apply,
    band,
    check_apart,
    dims_of,
    is_cut,
    resized,
)
from holdfast.rules.patterns import Template
from holdfast.rules.sharding import Flat, Range, ShardRule, ranges_of, shares

Names = str | Sequence[str]
#: A name, or a name and the kinds that apply to that part of a fused leaf.
Into = str | tuple[str | Kind, ...]

#: All ranks that have the leaf have the same elements: any of them may store them.
replicated: Kind = Annotation(spread="replicated")
#: One rank has the leaf, and no other.
unique: Kind = Annotation(spread="unique")
#: Each rank has a copy of its own that may differ: all are stored, and another number of ranks gets
#: their mean.
averaged: Kind = Annotation(spread="averaged")
#: The rule may apply to no leaf.
optional: Kind = Annotation(is_optional=True)

#: torch's names of the dtypes that can be converted -> the format's names.
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def cast(dtype: str) -> Kind:
    """The tensor here has ``dtype`` ("bfloat16"); the stored leaf may have another.

    It is converted as it is restored. Nothing is converted when it is saved.

    ``dtype``: the name of a floating-point dtype of torch, as "bfloat16".
    """
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else str(dtype)
    if name in _DTYPES.values():
        return Annotation(dtype=name)
    if name not in _DTYPES:
        raise UsageError(f"cast({dtype!r}): give one of {', '.join(_DTYPES)}")
    return Annotation(dtype=_DTYPES[name])


def shard(
    dim: int, over: Names, *, sizes: Sequence[int] | int | None = None, units: int | None = None
) -> Kind:
    """A plain tensor is one of the parts into which the leaf is cut along ``dim``.

    ``dim``: the dimension that is cut. ``over``: the dimension of the mesh, or several, the last
    one fastest. ``sizes``: the extent of each part; or one number, the extent of the whole, cut as
    ``torch.chunk`` does. Equal parts by default. ``units``: how many units (heads) there are; where
    they are fewer than the parts, neighbours have the same one.

    For a DTensor, its own placements are used instead.
    """
    what = f"shard({dim}, {over!r}, sizes={sizes}, units={units})"
    _at_least(0, what, "dim", dim)
    if sizes is not None and units is not None:
        raise UsageError(f"{what}: give sizes or units; units are cut into equal sizes")
    if units is not None:
        _at_least(1, what, "units", units)
    given = sizes if sizes is None or isinstance(sizes, int) else tuple(sizes)
    _at_least(0, what, "sizes", *(given if isinstance(given, tuple) else [given or 0]))
    return ShardRule(dim, _names(what, over), given, units)


def flat(shape: Sequence[int], over: Names, *, align: int = 1) -> Kind:
    """A plain tensor of one dimension is one part of the elements of ``shape``, in their order.

    ``shape``: that of the tensor that was flattened, on this rank (a further ``shard`` says what
    part of the whole that is). ``over``: the dimension of the mesh, or several, the last one
    fastest. ``align``: parts have equal sizes, a multiple of this number of elements; the last are
    shorter or padded with zeros.
    """
    what = f"flat({list(shape)}, {over!r}, align={align})"
    _at_least(0, what, "shape", *shape)
    _at_least(1, what, "align", align)
    return Flat(tuple(shape), _names(what, over), align)


def fused(
    dim: int,
    widths: Sequence[int],
    into: Sequence[Into],
    *,
    over: Names = (),
    units: Sequence[int] | None = None,
    sizes: Sequence[Sequence[int]] | None = None,
    groups: int = 1,
) -> Kind:
    """Several leaves side by side along ``dim``, of these ``widths``.

    ``dim``: the dimension along which they lie. ``widths``: the extent of each along it, over all
    ranks. ``into``: the name of each; or a tuple of its name and kinds that apply to this part
    only. ``over``: each leaf is cut by itself over these dimensions of the mesh, and a rank has its
    part of each side by side (Megatron); without it, the leaf is cut as one, or not at all.
    ``units``: for each leaf, the number of units (heads) that a cut never splits; neighbours have
    the same unit where there are fewer units than ranks. ``sizes``: instead, for each leaf, the
    width on each rank. ``groups``: the leaves alternate this many times (query groups), each with
    an equal stretch.
    """
    what = f"fused({dim}, {list(widths)}, ...)"
    names = _names(what, over) if over else ()
    _at_least(0, what, "dim", dim)
    _at_least(1, what, "widths", *widths)
    _at_least(1, what, "groups", groups)
    counts = list(widths) if units is None else list(units)
    shares = [None] * len(widths) if sizes is None else [tuple(one) for one in sizes]
    if not widths or {len(widths)} != {len(into), len(counts), len(shares)}:
        raise UsageError(
            f"{what}: {len(widths)} widths, {len(into)} names, {len(counts)} units and "
            f"{len(shares)} sizes: give one of each for every leaf"
        )
    _at_least(1, what, "units", *counts)
    if sizes is not None and (units is not None or not names):
        raise UsageError(f"{what}: sizes are for leaves that are cut over something, without units")
    if groups > 1 and not (units is None and sizes is None):
        raise UsageError(f"{what}: groups are the units already; give no units and no sizes")
    for width, count, share in zip(widths, counts, shares, strict=True):
        _check_part(what, width, count, share, groups)
    parts = (_part(what, *one) for one in zip(into, widths, counts, shares, strict=True))
    return Fused(dim, tuple(parts), names, groups)


def _check_part(
    what: str, width: int, units: int, sizes: tuple[int, ...] | None, groups: int
) -> None:
    if width % units or width % groups:
        raise UsageError(
            f"{what}: a width of {width} cannot have {max(units % width, groups)} equal units: "
            "give widths that are a multiple of their units, and of groups"
        )
    if sizes is not None and (sum(sizes) != width or min(sizes) < 0):
        raise UsageError(
            f"{what}: the sizes {list(sizes)} add up to {sum(sizes)}, not to the width {width}"
        )


def _part(what: str, into: Into, width: int, units: int, sizes: tuple[int, ...] | None) -> RulePart:
    name, *kinds = (into,) if isinstance(into, str) else into
    if not isinstance(name, str) or not all(
        isinstance(kind, RuleStep) and not is_cut(kind) for kind in kinds
    ):
        raise UsageError(
            f"{what}: {into!r} is no part: give its name, or a tuple of its name and what it is "
            "made of (rename, padded, transpose and the like); over= says how parts are cut"
        )
    return RulePart(Template(name), width, units, sizes, tuple(kinds))  # type: ignore[arg-type]


def part_of(into: str, dim: int, *, at: int, whole: int) -> Kind:
    """The elements from ``at`` on along ``dim`` of a leaf that has extent ``whole`` there.

    For tensors that are separate here and fused in the checkpoint.

    ``into``: the name of that leaf. ``dim``: the dimension that is cut. ``at``: the first index.
    ``whole``: the extent of that leaf along ``dim``.
    """
    _at_least(0, f"part_of({into!r}, {dim}, at={at}, whole={whole})", "dim and at", dim, at)
    return PartOf(Template(into), dim, at, whole)


def padded(dim: int, true_size: int) -> Kind:
    """The tensor here is longer along ``dim`` than the stored leaf: elements beyond ``true_size``
    are zeros.

    ``dim``: the padded dimension. ``true_size``: the extent that is stored, over all ranks.
    """
    _at_least(0, f"padded({dim}, {true_size})", "dim and true_size", dim, true_size)
    return PaddedRule(dim, true_size)


def rename(template: str) -> Kind:
    """The whole leaf of that name.

    ``template``: the name; ``{i}`` in it is what the placeholder ``{i}`` of the pattern found.
    """
    return Rename(Template(template))


def tied(template: str) -> tuple[Kind, ...]:
    """The same elements as the leaf of that name, which may be another tensor here as well.

    ``template``: the name, as for ``rename``.
    """
    return Rename(Template(template)), Annotation(is_copy=True)


def stack(into: str, dim: int, *, count: int, at: str = "{n}") -> Kind:
    """One of ``count`` leaves that are one leaf in the checkpoint, with an additional dimension
    ``dim``.

    ``into``: the name of that one leaf. ``dim``: its additional dimension. ``count``: how many
    leaves there are. ``at``: the number of this one, a template of the pattern's placeholders.
    """
    what = f"stack({into!r}, {dim}, count={count}, at={at!r})"
    _at_least(0, what, "dim", dim)
    _at_least(1, what, "count", count)
    return Stack(Template(into), dim, count, Template(at))


def unstack(dim: int, into: str) -> Kind:
    """One leaf in the checkpoint for each number ``{n}`` along ``dim``, without that dimension.

    ``dim``: the dimension that goes. ``into``: the name of each, with ``{n}`` in it.
    """
    what = f"unstack({dim}, {into!r})"
    _at_least(0, what, "dim", dim)
    template = Template(into)
    if "n" not in template.names:
        raise UsageError(f"{what}: all leaves get the same name; put their number into it as {{n}}")
    return Unstack(dim, template)


def transpose(*dims: int) -> Kind:
    """The dimensions in another order: dimension ``k`` in the checkpoint is ``dims[k]`` here.

    ``dims``: each dimension once, counted from 0.
    """
    if sorted(dims) != list(range(len(dims))):
        raise UsageError(f"transpose{dims}: name each dimension once, counted from 0")
    return Transpose(dims)


def paired(dim: int, heads: int) -> Kind:
    """In each head along ``dim``, the two halves in the checkpoint are interleaved as pairs here.

    For rotary embeddings that rotate neighbours here (Meta's Llama, torchtitan), and elements half
    a head apart in the checkpoint (Hugging Face). Every row is a box of its own: meant for import
    and export.

    ``dim``: the dimension along which heads lie. ``heads``: how many there are over all ranks.
    """
    what = f"paired({dim}, {heads})"
    _at_least(0, what, "dim", dim)
    _at_least(1, what, "heads", heads)
    return PairedRule(dim, heads)


def _names(what: str, over: Names) -> tuple[str, ...]:
    names = (over,) if isinstance(over, str) else tuple(over)
    if not names or len(set(names)) < len(names):
        raise UsageError(f"{what}: over names dimensions of the mesh, each once")
    return names


def _at_least(least: int, what: str, name: str, *values: int) -> None:
    if any(type(value) is not int or value < least for value in values):
        given = ", ".join(map(repr, values))
        raise UsageError(f"{what}: {name} is a whole number from {least} on, not {given}")


# Fuses several leaves into one tensor: query, key and value, gate and up.


@dataclass(frozen=True, slots=True)
class RulePart:
    """One of the leaves that are fused: its name, its width, and its own kinds."""

    name: Template
    width: int
    units: int
    sizes: tuple[int, ...] | None
    kinds: tuple[Kind, ...]

    def shares(self, place: RulePlace, parts: int) -> list[Range]:
        """Returns the range of its width that each of ``parts`` has."""
        if self.sizes is None:
            return shares(place, repr(self.name.text), self.width, self.units, parts)
        if len(self.sizes) != parts:
            raise place.wrong(
                f"{len(self.sizes)} sizes are given for {self.name.text!r}, which is cut into "
                f"{parts} parts: give the width that each part has"
            )
        return ranges_of(self.sizes)


@dataclass(frozen=True, slots=True)
class Fused(RuleStep, DimCut):
    """Several leaves side by side along ``dim``.

    ``over``: each leaf was cut by itself into as many parts as these dimensions of the mesh have,
    and a rank has its part of each, side by side. The leaf here is what all ranks have, one rank
    behind another. ``groups``: the leaves take turns, so often, each with an equal stretch.
    """

    dim: int
    parts: tuple[RulePart, ...]
    over: tuple[str, ...]
    groups: int

    def templates(self) -> tuple[Template, ...]:
        inner = (name for part in self.parts for kind in part.kinds for name in kind.templates())
        return (*(part.name for part in self.parts), *inner)

    def offers(self) -> frozenset[str]:
        inner = (kind.offers() for part in self.parts for kind in part.kinds)
        return frozenset().union(*inner)

    def meshes(self) -> tuple[str, ...]:
        return self.over

    def step(self, place: RulePlace) -> Seen:
        extent = place.extent(self.dim)
        stretches = [one for rank in self._by_rank(place) for one in rank]
        there = ranges_of([stop - start for _, (start, stop) in stretches])
        if there[-1][1] != extent:
            widths = [part.width for part in self.parts]
            raise place.wrong(
                f"the widths {widths} give {there[-1][1]} along dimension {self.dim}, which has "
                f"{extent}: give the width that each leaf has over all ranks"
            )
        names = [place.fill(part.name) for part in self.parts]
        place.check_names(names)
        patches = []
        for (number, (start, stop)), (first, last) in zip(stretches, there, strict=True):
            shape = self._shape(place, number)
            box, here = band(shape, self.dim, start, stop), band(place.shape, self.dim, first, last)
            patches.append(Patch(names[number], shape, box, here, dims_of(shape)))
        return self._parts_through(names, Seen(place.shape, joined(patches)), place)

    def _parts_through(self, names: list[str], seen: Seen, place: RulePlace) -> Seen:
        """Maps each part through its own kinds."""
        if not any(part.kinds for part in self.parts):
            return seen
        shapes = [self._shape(place, number) for number in range(len(names))]
        steps = {
            name: apply(part.kinds, renamed(name, shape), place)
            for name, shape, part in zip(names, shapes, self.parts, strict=True)
        }
        check_apart(steps, place)
        return Table(steps).through(seen)

    def widened(self, place: RulePlace, index: int) -> tuple[Shape, int, int]:
        by_rank = self._by_rank(place)
        sizes = [sum(stop - start for _, (start, stop) in rank) for rank in by_rank]
        if place.extent(self.dim) != sizes[index]:
            widths = [part.width for part in self.parts]
            raise place.wrong(
                f"the widths {widths} cut into {len(sizes)} parts give {sizes[index]} along "
                f"dimension {self.dim} in part {index}, which has {place.shape[self.dim]}: give "
                "the width that each leaf has over all ranks"
            )
        return resized(place.shape, self.dim, sum(sizes)), self.dim, sum(sizes[:index])

    def _by_rank(self, place: RulePlace) -> list[list[tuple[int, Range]]]:
        """Returns for each rank (number of the leaf, range of its width), in the order they lie
        side by side.
        """
        ranks = place.parts(self.over)
        if self.groups > 1:
            groups = shares(place, "groups", self.groups, self.groups, ranks)
            return [
                [
                    (number, (group * each, (group + 1) * each))
                    for group in range(*held)
                    for number, part in enumerate(self.parts)
                    for each in (part.width // self.groups,)
                ]
                for held in groups
            ]
        by_part = [part.shares(place, ranks) for part in self.parts]
        return [list(enumerate(of_rank)) for of_rank in zip(*by_part, strict=True)]

    def _shape(self, place: RulePlace, number: int) -> Shape:
        return resized(place.shape, self.dim, self.parts[number].width)
