"""Detects rules that apply to no leaf on any rank.

A rank of a pipeline has no leaf for some of the rules. A rule that applies to no leaf of any rank
is a mistake, most often in spelling.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import msgpack

from holdfast.errors import UsageError
from holdfast.rules import Rules
from holdfast.state.identity import TensorOwner
from holdfast.state.mapped.mapper import RuleMapper, Shape
from holdfast.state.objects import Objects


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
