"""Which group each row belongs to: groups may be reordered, removed or filled by their user."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import UsageError
from holdfast.offload.rows import Place, Row


def find_groups(
    kind: str, groups: Sequence[Mapping[str, Any]],
    places: Mapping[torch.Tensor, tuple[Row, Place]], waiting: Collection[torch.Tensor] = (),
) -> list[Place]:  # fmt: skip
    """Give every row the number its group has now; the places that are in a group, in order.

    ``waiting``: parameters that have no memory yet, as they need none. UsageError for parameters
    nobody made room for, and for a row whose parameters are in two.
    """
    found: dict[Row, int] = {}
    there: list[Place] = []
    for number, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            known = places.get(parameter)
            if known is None and parameter in waiting:
                continue
            if known is None:
                raise UsageError(
                    f"parameter {position} of group {number} is not one that this {kind} was "
                    "given: there is no memory for its state. Add parameters by add_param_group, "
                    f"and where some were replaced make the {kind} anew"
                )
            row, place = known
            if found.setdefault(row, number) != number:
                raise UsageError(
                    f"{place.name} is in group {number} now, and parameters that came in one group "
                    f"with it are in group {found[row]}: their state lies together. Take the group "
                    "out of param_groups and give its parts to add_param_group"
                )
            there.append(place)
    for row, _ in places.values():
        row.group = found.get(row, 0)  # one without parameters in any group is not updated
    return there
