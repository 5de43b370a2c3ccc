"""The words a rule is written in, each looked at once, here.

All sizes, widths and counts are those of the whole leaf, over all ranks, unless a word says
otherwise. Dimensions are counted from 0. Every word raises UsageError for what cannot be.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import UsageError
from holdfast.rules.fused import Fused, Part
from holdfast.rules.kinds import Kind, Said, Step, is_cut
from holdfast.rules.names import Template
from holdfast.rules.shares import Flat, Shard
from holdfast.rules.steps import Padded, Paired, PartOf, Rename, Stack, Transpose, Unstack

Names = str | Sequence[str]
#: A name, or a name and what else that part of a fused leaf is.
Into = str | tuple[str | Kind, ...]

#: All ranks that have the leaf have the same elements: any of them may store them.
replicated: Kind = Said(spread="replicated")
#: One rank has the leaf, and no other.
unique: Kind = Said(spread="unique")
#: Each rank has a copy that goes its own way: all are stored, and another number of ranks gets
#: their mean.
averaged: Kind = Said(spread="averaged")
#: There may be no leaf for this rule.
optional: Kind = Said(is_optional=True)

#: torch's names of what can be converted -> ours.
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def cast(dtype: str) -> Kind:
    """The tensor here has ``dtype`` ("bfloat16"); what is stored may be of another.

    It is converted as it is restored. Nothing is converted when it is saved.
    """
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else str(dtype)
    if name in _DTYPES.values():
        return Said(dtype=name)
    if name not in _DTYPES:
        raise UsageError(f"cast({dtype!r}): give one of {', '.join(_DTYPES)}")
    return Said(dtype=_DTYPES[name])


def shard(
    dim: int, over: Names, *, sizes: Sequence[int] | int | None = None, units: int | None = None
) -> Kind:
    """A plain tensor is one of the parts the leaf is cut into along ``dim``.

    ``over``: the dimension of the mesh, or several, the last one fastest. ``sizes``: the extent of
    each part; or one number, the extent of the whole, cut as ``torch.chunk`` does. Equal parts by
    default. ``units``: how many units (heads) there are; where they are fewer than the parts,
    neighbours have the same one. For a DTensor, its own placements are what counts.
    """
    what = f"shard({dim}, {over!r}, sizes={sizes}, units={units})"
    _at_least(0, what, "dim", dim)
    if sizes is not None and units is not None:
        raise UsageError(f"{what}: give sizes or units; units are cut into equal sizes")
    if units is not None:
        _at_least(1, what, "units", units)
    given = sizes if sizes is None or isinstance(sizes, int) else tuple(sizes)
    _at_least(0, what, "sizes", *(given if isinstance(given, tuple) else [given or 0]))
    return Shard(dim, _names(what, over), given, units)


def flat(shape: Sequence[int], over: Names, *, align: int = 1) -> Kind:
    """A plain tensor of one dimension is one part of the elements of ``shape``, in their order.

    ``shape``: that of the tensor that was flattened, on this rank (a further ``shard`` says what
    part of the whole that is). Parts have equal sizes, a multiple of ``align``; the last are
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

    ``into``: the name of each; or a tuple of its name and kinds that only this part is. ``over``:
    each leaf is cut by itself over these dimensions of the mesh, and a rank has its part of each
    side by side (Megatron); without it, the leaf is cut as one, or not at all. ``units``: for each
    leaf, how many units (heads) no cut parts; neighbours have the same one where there are fewer
    than ranks. ``sizes``: instead, for each leaf, the width on each rank. ``groups``: the leaves
    take turns, so often (query groups), each with an equal stretch.
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


def _part(what: str, into: Into, width: int, units: int, sizes: tuple[int, ...] | None) -> Part:
    name, *kinds = (into,) if isinstance(into, str) else into
    if not isinstance(name, str) or not all(
        isinstance(kind, Step) and not is_cut(kind) for kind in kinds
    ):
        raise UsageError(
            f"{what}: {into!r} is no part: give its name, or a tuple of its name and what it is "
            "made of (rename, padded, transpose and the like); over= says how parts are cut"
        )
    return Part(Template(name), width, units, sizes, tuple(kinds))  # type: ignore[arg-type]


def part_of(into: str, dim: int, *, at: int, whole: int) -> Kind:
    """The elements from ``at`` on along ``dim`` of a leaf that has ``whole`` there.

    What is separate here and fused there.
    """
    _at_least(0, f"part_of({into!r}, {dim}, at={at}, whole={whole})", "dim and at", dim, at)
    return PartOf(Template(into), dim, at, whole)


def padded(dim: int, true_size: int) -> Kind:
    """Longer along ``dim`` than what is stored: what is beyond ``true_size`` is zeros."""
    _at_least(0, f"padded({dim}, {true_size})", "dim and true_size", dim, true_size)
    return Padded(dim, true_size)


def rename(template: str) -> Kind:
    """All of the leaf of that name."""
    return Rename(Template(template))


def tied(template: str) -> tuple[Kind, ...]:
    """The same elements as the leaf of that name, which another tensor here may be too."""
    return Rename(Template(template)), Said(is_copy=True)


def stack(into: str, dim: int, *, count: int, at: str = "{n}") -> Kind:
    """One of ``count`` leaves that are one leaf in the checkpoint, with ``dim`` more.

    ``at``: which one, from the open places of the pattern.
    """
    what = f"stack({into!r}, {dim}, count={count}, at={at!r})"
    _at_least(0, what, "dim", dim)
    _at_least(1, what, "count", count)
    return Stack(Template(into), dim, count, Template(at))


def unstack(dim: int, into: str) -> Kind:
    """One leaf in the checkpoint for each number ``{n}`` along ``dim``, without that dimension."""
    what = f"unstack({dim}, {into!r})"
    _at_least(0, what, "dim", dim)
    template = Template(into)
    if "n" not in template.names:
        raise UsageError(f"{what}: all leaves get the same name; put their number into it as {{n}}")
    return Unstack(dim, template)


def transpose(*dims: int) -> Kind:
    """The dimensions in another order: there, dimension ``k`` is ``dims[k]`` here."""
    if sorted(dims) != list(range(len(dims))):
        raise UsageError(f"transpose{dims}: name each dimension once, counted from 0")
    return Transpose(dims)


def paired(dim: int, heads: int) -> Kind:
    """In each head along ``dim``, the two halves there stand in pairs here.

    For rotary embeddings that turn neighbours here (Meta's Llama, torchtitan), and elements half a
    head apart there (Hugging Face). Every row is a box of its own: meant for import and export.
    """
    what = f"paired({dim}, {heads})"
    _at_least(0, what, "dim", dim)
    _at_least(1, what, "heads", heads)
    return Paired(dim, heads)


def _names(what: str, over: Names) -> tuple[str, ...]:
    names = (over,) if isinstance(over, str) else tuple(over)
    if not names or len(set(names)) < len(names):
        raise UsageError(f"{what}: over names dimensions of the mesh, each once")
    return names


def _at_least(least: int, what: str, name: str, *values: int) -> None:
    if any(type(value) is not int or value < least for value in values):
        given = ", ".join(map(repr, values))
        raise UsageError(f"{what}: {name} is a whole number from {least} on, not {given}")
