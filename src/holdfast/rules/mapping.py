"""A list of rules, and every leaf as they see it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.patches import (
    LocalPatch,
    Seen,
    Shape,
    Table,
    local_padding,
    local_patches,
    renamed,
)
from holdfast.geometry.rows import between
from holdfast.rules.kinds import Cut, Kind, Place, Said, Step
from holdfast.rules.names import Pattern
from holdfast.rules.shares import Flat


@dataclass(frozen=True, slots=True)
class Local:
    """What the plain tensor of one rank is.

    ``shape``: that of the whole training leaf. ``held``: (box in that leaf, box in the tensor).
    ``offsets``: only for a flat tensor, where in it each part begins; the second box of ``held``
    is then counted in a view of the part that has the shape of the box. ``patches``: the parts as
    the rules see them. ``padding``: (part, box), zeros that are stored nowhere; part -1 is the
    flat tensor itself.
    """

    shape: Shape
    held: tuple[tuple[Box, Box], ...]
    offsets: tuple[int, ...] | None
    patches: tuple[LocalPatch, ...]
    padding: tuple[tuple[int, Box], ...]
    seen: Seen


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: Pattern
    kinds: tuple[Kind, ...]

    @property
    def is_optional(self) -> bool:
        return any(isinstance(kind, Said) and kind.is_optional for kind in self.kinds)


class Rules:
    """What the tensors of a training are in the checkpoint, by patterns of their names.

    ``rules``: (pattern, kind, kind, ...), the kinds listed from the tensor here towards the leaf
    in the checkpoint. ``mesh``: the names and sizes of the dimensions that ranks are numbered
    over, the last one fastest; plain tensors are cut over them by name.

    UsageError for a rule that means nothing, whatever the leaves are.
    """

    def __init__(
        self, rules: Sequence[tuple[Any, ...]], mesh: Mapping[str, int] | None = None
    ) -> None:
        self.mesh = dict(mesh or {})
        self._rules = [_Rule(Pattern(pattern), tuple(kinds)) for pattern, *kinds in rules]
        self._seen: dict[tuple[str, Shape], Seen] = {}

    def see(self, name: str, shape: Shape) -> Seen:
        """The leaf ``name`` (without the state's key) of this global ``shape``.

        As it is when no rule is for it. UsageError names leaf and rule that do not fit.
        """
        key = name, tuple(shape)
        if key not in self._seen:
            self._seen[key] = self._see(*key)
        return self._seen[key]

    def local(self, name: str, shape: Shape, rank: int) -> Local:
        """What the plain tensor ``name`` of ``rank`` is, which has this ``shape`` there.

        UsageError names leaf and rule that do not fit, or a rank that is not on the mesh.
        """
        rule, values, where = self._rule_for(name)
        at = self._coordinate(rank)
        whole, origin, held, offsets, padding = shape, (0,) * len(shape), None, None, []
        for kind in rule.kinds if rule else ():
            place = Place(name, whole, values, self.mesh, where)
            if isinstance(kind, Flat):
                start, stop = kind.range_of(place, self._index(at, kind.over))
                boxes = tuple(between(kind.shape, start, stop))
                held = [(box, Box.whole(box.shape)) for box in boxes]
                sizes = [box.volume for box in boxes]
                offsets = tuple(sum(sizes[:n]) for n in range(len(sizes)))
                if stop - start < shape[0]:
                    padding.append((-1, Box((stop - start,), shape)))
                whole, origin = kind.shape, (0,) * len(kind.shape)
            elif isinstance(kind, Cut):
                whole, dim, begin = kind.widened(place, self._index(at, kind.over))
                origin = (*origin[:dim], origin[dim] + begin, *origin[dim + 1 :])
        if held is None:
            held = [(Box.whole(shape), Box.whole(shape))]
        placed = tuple((box.shift(origin), local) for box, local in held)
        seen = self.see(name, whole)
        return Local(
            whole,
            placed,
            offsets,
            tuple(local_patches(seen, placed)),
            (*padding, *local_padding(seen, placed)),
            seen,
        )

    def beside(self, name: str, shape: Shape, state_shape: Shape) -> tuple[str, ...]:
        """What state of the parameter ``name`` is called that has another shape than it.

        ``shape``: the parameter's. A scalar is one of every leaf the parameter is made of. Other
        state (Adafactor's factors) follows the parameter where that is one whole leaf, and keeps
        the name it has here where it is not.
        """
        seen = self.see(name, shape)
        if math.prod(state_shape) == 1:
            return tuple(seen.leaves)
        return (seen.same_as or name,)

    def check(self, leaves: Mapping[str, Shape], elsewhere: Collection[str] = ()) -> None:
        """UsageError when these ``leaves`` and the rules do not fit.

        ``elsewhere``: patterns for which other ranks have leaves (what ``used`` gave there).
        """
        unused = [p for p in self.patterns if p not in self.used(leaves) and p not in elsewhere]
        if unused:
            raise UsageError(f"no leaf for {unused[0]!r}", pattern=unused[0])
        for name, shape in leaves.items():
            self.see(name, shape)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns for which there must be a leaf on some rank."""
        return tuple(rule.pattern.text for rule in self._rules if not rule.is_optional)

    def used(self, leaves: Collection[str]) -> tuple[str, ...]:
        """The patterns for which there is a leaf among these."""
        found = (rule for rule in self._rules if any(map(rule.pattern.match, leaves)))
        return tuple(rule.pattern.text for rule in found)

    def _coordinate(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < math.prod(self.mesh.values()):
            if not self.mesh:
                return {}
            raise UsageError(
                f"rank {rank} is not on the mesh {self.mesh} of the rules, which has "
                f"{math.prod(self.mesh.values())} ranks: give the sizes this run has"
            )
        at = {}
        for dim, size in reversed(self.mesh.items()):
            rank, at[dim] = divmod(rank, size)
        return at

    def _index(self, at: Mapping[str, int], over: tuple[str, ...]) -> int:
        index = 0
        for dim in over:
            index = index * self.mesh[dim] + at[dim]
        return index

    def _rule_for(self, name: str) -> tuple[_Rule | None, dict[str, str], str]:
        """(the rule for a leaf, what its open places are, leaf and rule for messages)."""
        found = [
            (rule, values)
            for rule in self._rules
            if (values := rule.pattern.match(name)) is not None
        ]
        if not found:
            return None, {}, name
        (rule, values), *others = found
        if others:
            raise UsageError(
                f"{name}: both {rule.pattern.text!r} and {others[0][0].pattern.text!r} are rules "
                "for it. Change the patterns so that one rule is left",
                leaf=name,
                pattern=others[0][0].pattern.text,
            )
        return rule, values, f"{name} (rule {rule.pattern.text!r})"

    def _see(self, name: str, shape: Shape) -> Seen:
        rule, values, where = self._rule_for(name)
        seen = renamed(name, shape)
        for kind in rule.kinds if rule else ():
            if isinstance(kind, Said):
                seen = _said(seen, kind)
            elif isinstance(kind, Step):
                steps = {
                    leaf: kind.step(Place(leaf, there, values, self.mesh, where))
                    for leaf, there in seen.leaves.items()
                }
                seen = Table(steps).through(seen)
        return seen


def _said(seen: Seen, kind: Said) -> Seen:
    return replace(
        seen,
        spread=kind.spread or seen.spread,
        dtype=kind.dtype or seen.dtype,
        is_copy=kind.is_copy or seen.is_copy,
    )
