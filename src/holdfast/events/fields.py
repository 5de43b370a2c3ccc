"""Defines what the fields of all events have in common, and which values a reader accepts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec

# The values a reader accepts. Who makes an event is not checked: a record out of these bounds is
# damaged, and must not become a figure.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
#: A difference of two clocks: as large as a boot is long ago.
Difference = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
#: A part of a whole; -1 where it is not known.
PartOrNone = Annotated[float, msgspec.Meta(ge=-1, le=1)]
StepOrNone = Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
RankOrKeeper = Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)]
#: The origin of what was restored out of another root.
START_FROM = "start_from"


def parent_in_run(
    incarnation: int, parent: tuple[int, int], origins: Collection[str]
) -> tuple[int, int] | None:
    """Returns the generation that a start restored; None for one of another root.

    Older versions wrote no such origin; no start goes on from itself, or from a later one.
    """
    is_other = START_FROM in origins or parent[0] >= incarnation > 0
    return None if is_other else parent


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """The fields of every event.

    ``incarnation``: the start of the run that the event belongs to; 0 where it belongs to none.
    ``step``: the step that the event is about; -1 where it is about none. ``rank``: the rank that
    reports; -1 for the keeper.
    """

    incarnation: Count = 0
    step: StepOrNone = -1
    rank: RankOrKeeper = -1
