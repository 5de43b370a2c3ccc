"""The words a rule is written in."""

from __future__ import annotations

from collections.abc import Sequence


from holdfast.rules.kinds import (
    Kind,
    Padded,
    PartOf,
    Rename,
    Said,
    Stack,
    Transpose,
    Unstack,
)
from holdfast.rules.names import Template
from holdfast.rules.shares import Flat, Fused, Shard

replicated: Kind = Said(spread="replicated")
unique: Kind = Said(spread="unique")
averaged: Kind = Said(spread="averaged")
optional: Kind = Said(is_optional=True)


def cast(dtype: str) -> Kind:
    return Said(dtype=dtype)


def shard(
    dim: int,
    over: str | Sequence[str],
    sizes: Sequence[int] | int | None = None,
    units: int | None = None,
) -> Kind:
    given = sizes if sizes is None or isinstance(sizes, int) else tuple(sizes)
    return Shard(dim, _names(over), given, units)


def flat(shape: Sequence[int], over: str | Sequence[str], align: int = 1) -> Kind:
    return Flat(tuple(shape), _names(over), align)


def fused(
    dim: int,
    widths: Sequence[int],
    into: Sequence[str],
    *,
    over: str | Sequence[str] = (),
    units: Sequence[int] | None = None,
    sizes: Sequence[Sequence[int]] | None = None,
    groups: int = 1,
) -> Kind:
    return Fused(
        dim,
        tuple(widths),
        tuple(map(Template, into)),
        _names(over),
        None if units is None else tuple(units),
        None if sizes is None else tuple(map(tuple, sizes)),
        groups,
    )


def part_of(into: str, dim: int, at: int, whole: int) -> Kind:
    return PartOf(Template(into), dim, at, whole)


def padded(dim: int, true_size: int) -> Kind:
    return Padded(dim, true_size)


def rename(template: str) -> Kind:
    return Rename(Template(template))


def tied(template: str) -> tuple[Kind, ...]:
    return Rename(Template(template)), Said(is_copy=True)


def stack(into: str, dim: int, count: int, at: str = "{n}") -> Kind:
    return Stack(Template(into), dim, Template(at), count)


def unstack(dim: int, into: str) -> Kind:
    return Unstack(dim, Template(into))


def transpose(*dims: int) -> Kind:
    return Transpose(dims)


def _names(over: str | Sequence[str]) -> tuple[str, ...]:
    return (over,) if isinstance(over, str) else tuple(over)
