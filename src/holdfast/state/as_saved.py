"""A checkpoint that was saved in another form than its rules give it, as made of what it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.geometry.patches import Seen
from holdfast.geometry.tables import Table, turned
from holdfast.rules import Rules

Shapes = Mapping[str, tuple[int, ...]]


def stored_table(
    rules: Rules, modules: Iterable[str], stored: Shapes, aliases: Mapping[str, str]
) -> Table:
    """The leaves that ``rules`` lead to, as they are made of the ``stored`` ones of ``modules``.

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
