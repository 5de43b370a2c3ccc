"""Tells which experts the data-parallel ranks of DeepSpeed hold; each calls its own 0, 1, 2.

Ranks of a group of experts have the same ones, cut over them; in a model's file an expert has the
number that it has among all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from holdfast.errors import UsageError
from holdfast.interop import deepspeed_tags as tags
from holdfast.interop.deepspeed_pipeline import Shapes

_EXPERT = re.compile(
    r"((?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]{1,6})(\..+)", re.DOTALL
)
#: The setting by which ranks with the same experts follow each other.
DATA_FIRST = "use_data_before_expert_parallelism"


class ExpertRanks:
    """The experts of each rank. UsageError for groups that are not those of whole experts.

    ``shapes``: by the groups of the first rank. ``counts``: over how many ranks each group is cut.
    ``shapes`` of this are those of all experts, by the numbers that they have among all.
    """

    def __init__(self, shapes: Shapes, counts: Sequence[int], is_data_first: bool) -> None:
        self._world = max(counts)
        if len(counts) != len(shapes) or any(self._world % count for count in counts):
            raise UsageError(
                f"DeepSpeed cut its {len(shapes)} groups over {[*counts]!s:.100} ranks, which are "
                "no groups of experts"
            )
        self._counts, self._is_data_first = counts, is_data_first
        #: How many experts a rank has, by what is before their numbers in a name.
        self._local: dict[str, int] = {}
        held: dict[str, set[int]] = {}
        for name in (name for group in shapes for name in group):
            if matched := _EXPERT.fullmatch(name):
                held.setdefault(matched[1], set()).add(int(matched[2]))
        for prefix, numbers in held.items():
            if numbers != set(range(len(numbers))):
                raise UsageError(f"a rank has the experts {sorted(numbers)!s:.60} of {prefix:.200}")
            self._local[prefix] = len(numbers)
        self.shapes: Shapes = []
        for group, count in zip(shapes, counts, strict=True):
            ranks = range(self._world // count)
            if len(ranks) > 1 and any(_EXPERT.fullmatch(name) is None for name in group):
                raise UsageError("a group of experts has a parameter that is of none")
            self.shapes.append(
                {self._numbered(name, at): shape for at in ranks for name, shape in group.items()}
            )

    def name_of(self, name: str, group: int, rank: int) -> str:
        """The name among all of what a rank has in a group."""
        count = self._counts[group]
        at = rank // count if self._is_data_first else rank % (self._world // count)
        return self._numbered(name, at)

    def _numbered(self, name: str, at: int) -> str:
        matched = _EXPERT.fullmatch(name)
        if matched is None or not at:
            return name
        return f"{matched[1]}{at * self._local[matched[1]] + int(matched[2])}{matched[3]}"


def experts_in(names: Iterable[str], read: Callable[[str], Any], counts: Any) -> dict[str, Any]:
    """The tensors of all expert files by their names in the whole model.

    ``read``: the value of a file. ``counts``: how many experts the layers have, in their order.
    UsageError for a file that has another expert, and for one that is missing.
    """
    found: dict[str, Any] = {}
    layers: dict[int, set[int]] = {}
    for name in sorted(names):
        matched = tags.EXPERT.fullmatch(name)
        if matched is None:
            continue
        layers.setdefault(int(matched[1] or 0), set()).add(int(matched[2]))
        value = read(name)
        if not isinstance(value, Mapping) or found.keys() & value.keys():
            raise UsageError(f"{name} holds no state of an expert, or that of another file")
        for key in value:
            inner = _EXPERT.fullmatch(key) if type(key) is str else None
            if inner is None or int(inner[2]) != int(matched[2]):
                raise UsageError(f"{name} has {key!r:.200}, which is not of its expert")
        found |= value
    if not isinstance(counts, list) or any(type(one) is not int for one in counts):
        raise UsageError("the file of the model does not say how many experts its layers have")
    for layer, count in enumerate(counts):
        there = layers.pop(layer, set())
        # Not all numbers below the count, which is the file's and may be any.
        missing = next(number for number in range(len(there) + 1) if number not in there)
        wrong = [number for number in (missing, *there) if (number < count) == (number == missing)]
        if wrong:
            other = min(wrong)
            what = "there is no file" if other < count else "there is a file"
            raise UsageError(f"layer {layer} has {count} experts, and {what} of expert {other}")
    if layers:
        raise UsageError(f"there are files of experts of layer {min(layers)}, which has none")
    return found
