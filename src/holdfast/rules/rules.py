"""Checks a list of rules, and maps every leaf through it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UsageError
from holdfast.geometry.leaf_maps import Seen, Shape, Table, clash, renamed, turned
from holdfast.rules.kinds import Annotation, Kind, RulePlace, RuleStep, apply, is_cut
from holdfast.rules.patterns import Pattern
from holdfast.rules.sharding import Flat, Local, coordinate, local

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern, and the kinds of the leaves that match it."""

    pattern: Pattern
    kinds: tuple[Kind, ...]

    @property
    def is_optional(self) -> bool:
        """True if there may be no leaf for it."""
        return any(isinstance(kind, Annotation) and kind.is_optional for kind in self.kinds)


class Rules:
    """Maps the tensors of a training to the leaves of a checkpoint, by patterns of their names.

    ``rules``: (pattern, kind, kind, ...), the kinds listed from the tensor here towards the leaf in
    the checkpoint. Kinds that cut a plain tensor come first, the one that cut last before the
    others. ``mesh``: names and sizes of the dimensions that ranks are numbered over, the last one
    fastest. ``values``: numbers that templates may compute with, such as the first layer of this
    stage.

    Raises UsageError for a rule that is invalid for every leaf.
    """

    def __init__(
        self,
        rules: Sequence[tuple[Any, ...]],
        mesh: Mapping[str, int] | None = None,
        *,
        values: Mapping[str, int] | None = None,
    ) -> None:
        self.mesh = dict(mesh or {})
        self.values = {name: str(value) for name, value in (values or {}).items()}
        _check_mesh(self.mesh)
        self._rules = tuple(self._checked(one) for one in rules)
        self._given = tuple(rules)
        self._seen: dict[tuple[str, Shape], Seen] = {}

    def on(self, mesh: Mapping[str, int]) -> Rules:
        """Return the same rules for ranks on another ``mesh``."""
        values = {name: int(value) for name, value in self.values.items()}
        return Rules(self._given, mesh, values=values)

    def see(self, name: str, shape: Shape) -> Seen:
        """Map the leaf ``name`` (without the state's key) of this global ``shape``.

        A leaf without a rule is returned as it is. UsageError names leaf and rule that do not fit.
        """
        key = name, tuple(shape)
        if key not in self._seen:
            rule, place = self._rule_for(*key)
            kinds = rule.kinds if rule else ()
            self._seen[key] = apply(kinds, renamed(*key), place)
        return self._seen[key]

    def local(self, name: str, shape: Shape, rank: int) -> Local:
        """Map the plain tensor ``name`` that has this ``shape`` on ``rank``.

        UsageError names leaf and rule that do not fit, or a rank that is not on the mesh.
        """
        rule, place = self._rule_for(name, shape)
        cuts = [kind for kind in rule.kinds if is_cut(kind)] if rule else []
        at = coordinate(self.mesh, rank)
        return local(cuts, place, at, lambda whole: self.see(name, whole))

    def beside(self, name: str, shape: Shape, state_shape: Shape) -> tuple[str, ...]:
        """Return the stored names of state of the parameter ``name`` that has another shape than
        it.

        ``shape``: the parameter's. ``state_shape``: that of the state.

        A scalar belongs to every leaf the parameter is made of. Other
        state (Adafactor's factors) follows the parameter where that is one whole leaf, and keeps
        the name it has here where it is not.
        """
        seen = self.see(name, shape)
        if math.prod(state_shape) == 1:
            return tuple(seen.leaves)
        return (seen.same_as or name,)

    def inverse(self, leaves: Mapping[str, Shape]) -> Table:
        """Return the leaves in the checkpoint, each composed of these ``leaves`` here.

        Used for a checkpoint that was saved in another form than this one's, given its leaves and
        the rules of that form. Raises UsageError as ``check`` does, except for rules without a
        leaf.
        """
        return Table(turned(self._see_all(leaves)))

    def check(self, leaves: Mapping[str, Shape], elsewhere: Collection[str] = ()) -> None:
        """Raise UsageError when these ``leaves`` do not fit the rules.

        The reasons: a pattern that matches nothing, two rules for one leaf, sizes that do not fit a
        leaf, two leaves that would be the same elements. ``elsewhere``: patterns that match leaves
        on other ranks.
        """
        found = {*self.used(leaves), *elsewhere}
        unused = [text for text in self.patterns if text not in found]
        if unused:
            names = ", ".join(list(leaves)[:_SHOWN]) or "none"
            raise UsageError(
                f"rule {unused[0]!r}: no leaf is called so. Correct the pattern, or add "
                f"rules.optional to the rule. Leaves are: {names}",
                pattern=unused[0],
            )
        self._see_all(leaves)

    def _see_all(self, leaves: Mapping[str, Shape]) -> dict[str, Seen]:
        seen = {name: self.see(name, shape) for name, shape in leaves.items()}
        wrong = clash(seen)
        if wrong is not None:
            raise UsageError(
                f"{wrong.one} and {wrong.other} {wrong.why}. Change the name that one of their "
                "rules gives; if they are the same tensor, one of them is rules.tied(...)",
                leaf=wrong.one,
            )
        return seen

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns that must match a leaf on some rank."""
        return tuple(rule.pattern.text for rule in self._rules if not rule.is_optional)

    def used(self, leaves: Iterable[str]) -> tuple[str, ...]:
        """Return the patterns that match one of these ``leaves``."""
        names = list(leaves)
        return tuple(
            rule.pattern.text
            for rule in self._rules
            if any(rule.pattern.match(name) is not None for name in names)
        )

    def _rule_for(self, name: str, shape: Shape) -> tuple[Rule | None, RulePlace]:
        matches = ((rule, rule.pattern.match(name)) for rule in self._rules)
        found = [(rule, values) for rule, values in matches if values is not None]
        if len(found) > 1:
            one, other = (repr(rule.pattern.text) for rule, _ in found[:2])
            raise UsageError(
                f"{name}: both {one} and {other} are rules for it. Change the patterns so that "
                "one of them is left",
                leaf=name,
                pattern=found[1][0].pattern.text,
            )
        if not found:
            return None, RulePlace(name, tuple(shape), {}, self.mesh, name)
        rule, values = found[0]
        where = f"{name} (rule {rule.pattern.text!r})"
        return rule, RulePlace(name, tuple(shape), {**self.values, **values}, self.mesh, where)

    def _checked(self, given: tuple[Any, ...]) -> Rule:
        if not isinstance(given, tuple) or not given or not isinstance(given[0], str):
            raise UsageError(
                f"{given!r} is no rule: give a tuple of a pattern and what its leaves are"
            )
        text, *kinds = given
        rule = Rule(Pattern(text), tuple(_flattened(text, kinds)))
        _check_names(rule, self.values)
        _check_order(rule)
        for dim in (dim for kind in rule.kinds for dim in kind.meshes()):
            if dim not in self.mesh:
                raise UsageError(
                    f"rule {text!r}: it cuts over {dim!r}, and the mesh has "
                    f"{', '.join(self.mesh) or 'no dimensions'}. Give its size in mesh=, 1 if "
                    "nothing is cut over it",
                    pattern=text,
                )
        return rule


def _check_mesh(mesh: Mapping[str, int]) -> None:
    for name, size in mesh.items():
        if type(size) is not int or size < 1:
            raise UsageError(f"mesh: {name!r} has {size!r} ranks: give a whole number from 1 on")


def _flattened(text: str, kinds: Sequence[Any]) -> Iterator[Kind]:
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from _flattened(text, kind)
        elif isinstance(kind, Kind):
            yield kind
        else:
            raise UsageError(
                f"rule {text!r}: {kind!r} is nothing a leaf can be. Use what holdfast.rules has, "
                "and call it where it takes arguments",
                pattern=text,
            )


def _check_names(rule: Rule, values: Collection[str]) -> None:
    """Checks that names use only existing placeholders, and that no name is made twice."""
    text, said = rule.pattern.text, [kind for kind in rule.kinds if isinstance(kind, Annotation)]
    for kind in rule.kinds:
        twice = (rule.pattern.names & ({"name", *values} | kind.offers())) | (
            kind.offers() & {*values}
        )
        if twice:
            raise UsageError(
                f"rule {text!r}: {{{min(twice)}}} would be two things in {kind}. Call the open "
                "place or the value otherwise",
                pattern=text,
            )
        for template in kind.templates():
            template.check({*rule.pattern.names, *values, "name", *kind.offers()}, text)
    spreads = {kind.spread for kind in said if kind.spread}
    dtypes = {kind.dtype for kind in said if kind.dtype}
    if len(spreads) > 1 or len(dtypes) > 1:
        raise UsageError(
            f"rule {text!r}: its leaves cannot be {' and '.join(sorted(spreads | dtypes))} at once",
            pattern=text,
        )


def _check_order(rule: Rule) -> None:
    """Checks that cuts come first, because they apply to the tensor as it is here."""
    cut: Kind | None = None
    ended: Kind | None = None
    for kind in rule.kinds:
        before = ended or (cut if isinstance(kind, Flat) else None)
        if is_cut(kind) and before is not None:
            raise UsageError(
                f"rule {rule.pattern.text!r}: {_word(kind)} is listed behind {_word(before)}, and "
                "says which part of the tensor here a rank has. List flat first, then shard, then "
                "what has units or is fused over ranks, then the others",
                pattern=rule.pattern.text,
            )
        cut = kind if is_cut(kind) else cut
        ended = ended or (kind if _ends_cuts(kind) else None)


def _ends_cuts(kind: Kind) -> bool:
    """True if the kinds listed after it apply to another leaf than the one here."""
    return isinstance(kind, RuleStep) and kind.changes_shape()


def _word(kind: Kind) -> str:
    return type(kind).__name__.removesuffix("Rule").lower()
