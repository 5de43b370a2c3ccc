"""Joins the groups that several ranks have of one optimizer, as the stages of a pipeline have them.

A group is its parameters under ``params``, and its options in the form of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import UsageError

Group = dict[str, Any]


def join_groups(
    mine: list[Group], other: Sequence[Group], options: Callable[[Group], bytes]
) -> None:
    """Add to ``mine`` the parameters that another rank has beside them.

    Group n joins group n where both ranks have as many, with the same options there; otherwise a
    group joins the one that has its options, or is one more. UsageError where several have them.

    ``options``: bytes that are the same for the same options only.
    """
    known = {name for group in mine for name in group["params"]}
    theirs = [options(group) for group in mine]
    for number, group in enumerate(other):
        params = [name for name in group["params"] if name not in known]
        if not params:
            continue
        same = [at for at, found in enumerate(theirs) if found == options(group)]
        if len(theirs) == len(other) and number in same:
            same = [number]
        if len(same) > 1:
            raise UsageError(
                f"{params[0]} of another rank may be in each of the groups "
                f"{', '.join(map(str, same))}, which have the same options"
            )
        if same:
            mine[same[0]]["params"] += params
        else:
            mine.append({**group, "params": params})
