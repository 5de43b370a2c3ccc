"""A list of rules, and every leaf as they see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import UsageError
from holdfast.geometry.patches import (
    LocalPatch,
    Seen,
    Shape,
    Table,
    local_padding,
    local_patches,
    renamed,
)
from holdfast.geometry.box import Box
from holdfast.rules.kinds import Kind, Place, Said
from holdfast.rules.names import Pattern


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank's plain tensor is.

    ``shape``: that of the whole training leaf. ``held``: (box in that leaf, box in the tensor).
    ``offsets``: only for a flat tensor, where in it each part begins; the second box of ``held``
    then begins at the origin. ``padding``: (part of ``held``, box), zeros that are stored nowhere;
    part -1 is the flat tensor itself. ``patches``: the parts as the rules see them.
    """

    shape: Shape
    held: tuple[tuple[Box, Box], ...]
    offsets: tuple[int, ...] | None
    patches: tuple[LocalPatch, ...]
    padding: tuple[tuple[int, Box], ...]
    seen: Seen


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
        self._rules = [(Pattern(pattern), tuple(kinds)) for pattern, *kinds in rules]
        self._seen: dict[tuple[str, Shape], Seen] = {}

    def see(self, name: str, shape: Shape) -> Seen:
        """The leaf ``name`` (without the state's key) of this global ``shape``.

        As it is when no rule is for it. UsageError names leaf and rule that do not fit.
        """
        key = name, tuple(shape)
        if key not in self._seen:
            self._seen[key] = self._see(*key)
        return self._seen[key]

    def _rule(self, name: str) -> tuple[Pattern, tuple[Kind, ...], dict[str, str]] | None:
        found = [
            (pattern, kinds, values)
            for pattern, kinds in self._rules
            if (values := pattern.match(name)) is not None
        ]
        if len(found) > 1:
            raise UsageError(
                f"{name}: both {found[0][0].text!r} and {found[1][0].text!r} are rules for it. "
                "Change one of the patterns so that one rule is left",
                leaf=name,
                pattern=found[1][0].text,
            )
        return found[0] if found else None

    def _see(self, name: str, shape: Shape) -> Seen:
        seen = renamed(name, shape)
        rule = self._rule(name)
        if rule is None:
            return seen
        pattern, kinds, values = rule
        where = f"{name} (rule {pattern.text!r})"
        for kind in kinds:
            if isinstance(kind, Said):
                seen = _said(seen, kind)
            elif hasattr(kind, "step"):
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
