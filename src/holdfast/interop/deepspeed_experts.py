"""Tells which experts the data-parallel ranks of DeepSpeed hold; each calls its own 0, 1, 2.

Ranks of a group of experts have the same ones, cut over them; in a model's file an expert has the
number that it has among all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.interop import deepspeed_tags as tags
from holdfast.interop.deepspeed_files import TagFiles
from holdfast.interop.deepspeed_pipeline import Shapes
from holdfast.interop.parameter_partition import PartitionError

_EXPERT = re.compile(
    r"((?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]{1,6})(\..+)", re.DOTALL
)
#: The setting by which ranks with the same experts follow each other.
DATA_FIRST = "use_data_before_expert_parallelism"


class ExpertRanks:
    """The experts of each rank. PartitionError for groups that are not those of whole experts.

    ``shapes``: by the groups of the first rank. ``counts``: over how many ranks each group is cut.
    ``shapes`` of this are those of all experts, by the numbers that they have among all.
    """

    def __init__(self, shapes: Shapes, counts: Sequence[int], is_data_first: bool) -> None:
        self._world = max(counts)
        if len(counts) != len(shapes) or any(self._world % count for count in counts):
            raise PartitionError(
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
                raise PartitionError(
                    f"a rank has the experts {sorted(numbers)!s:.60} of {prefix:.200}, and should "
                    f"have the first {len(numbers)}"
                )
            self._local[prefix] = len(numbers)
        self.shapes: Shapes = []
        for group, count in zip(shapes, counts, strict=True):
            ranks = range(self._world // count)
            if len(ranks) > 1 and any(_EXPERT.fullmatch(name) is None for name in group):
                raise PartitionError("a group of experts has a parameter that is of none")
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


def experts_in(files: TagFiles, main: str, counts: Any) -> dict[str, Any]:
    """The tensors of all expert files by their names in the whole model.

    ``counts``: how many experts the layers have, in their order, as the model's file ``main`` says.
    ForeignFormatError for a file that has another expert, and for one that is missing.
    """
    found: dict[str, Any] = {}
    layers: dict[int, dict[int, str]] = {}
    for name in sorted(files.names):
        matched = tags.EXPERT.fullmatch(name)
        if matched is None:
            continue
        layers.setdefault(int(matched[1] or 0), {})[int(matched[2])] = name
        value = files.tree(name)
        if not isinstance(value, Mapping) or found.keys() & value.keys():
            raise files.error(name, "it holds no state of an expert, or that of another file")
        for key in value:
            inner = _EXPERT.fullmatch(key) if type(key) is str else None
            if inner is None or int(inner[2]) != int(matched[2]):
                raise files.error(name, f"it has {key!r:.200}, which is not of its expert")
        found |= value
    if not isinstance(counts, list) or any(type(one) is not int for one in counts):
        raise files.error(main, "it does not say how many experts its layers have (num_experts)")
    for layer, count in enumerate(counts):
        there = layers.pop(layer, {})
        # Not all numbers below the count, which is the file's and may be any.
        missing = next(number for number in range(len(there) + 1) if number not in there)
        if missing < count:
            like = next(iter(there.values()), f"layer_{layer}_expert_0_mp_rank_00_model_states.pt")
            name = re.sub("expert_[0-9]+", f"expert_{missing}", like)
            raise files.missing(name, f"the {count} experts of layer {layer}")
        if extra := [number for number in there if number >= count]:
            raise files.error(
                there[min(extra)],
                f"by {main} layer {layer} has {count} experts: the file is of another save",
            )
    for layer, there in layers.items():
        raise files.error(
            there[min(there)],
            f"by {main} layer {layer} has no experts: the file is of another save",
        )
    return found
