"""The tensors of modules beside the stored leaves of their names, and what does not fit."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping

import torch

from holdfast.state.known import Known
from holdfast.state.memory import shares_its_own
from holdfast.state.objects import Objects
from holdfast.state.offer import Spec
from holdfast.state.subclasses import plain_parts
from holdfast.state.tensors import DTYPE_NAMES

#: How many missing names are compared with how many stored ones: each takes a moment.
_HINTS, _SEARCHED = 5, 2000


class ModuleLeaves:
    """What modules hold of ``stored`` leaves.

    ``aliases``: further names of leaves. ``left``: the tensors that stay as they are.
    """

    def __init__(
        self,
        objects: Objects,
        stored: Mapping[str, Spec],
        aliases: Mapping[str, str],
        left: Collection[str],
    ) -> None:
        self._objects, self._stored, self._aliases, self._left = objects, stored, aliases, left
        self._hints = _HINTS

    def _leaf(self, name: str) -> str:
        return self._aliases.get(name, name)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """(name, tensor, the name it was first met under) of all that modules hold."""
        known = Known()
        for key, tensors in self._objects.tensors.items():
            for held in tensors:
                for part, inner in plain_parts(f"{key}.{held.name}", held.tensor):
                    if part not in self._left:
                        yield part, inner, known.name(inner, part)

    def targets(self) -> list[tuple[str, torch.Tensor]]:
        """(leaf, tensor), tied tensors once."""
        return [
            (self._leaf(name), tensor) for name, tensor, first in self._tensors() if first == name
        ]

    def problems(self) -> Iterator[str]:
        """What of it does not fit, in words."""
        first_here: dict[str, str] = {}
        for name, tensor, first in self._tensors():
            leaf = self._leaf(name)
            found = self._stored.get(leaf)
            wanted = (DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            tied = first_here.setdefault(leaf, first)
            if found is None:
                if first == name:
                    yield f"{name}: in the model, but not in the checkpoint{self._near(name)}"
            elif found != wanted:
                yield (
                    f"{name}: the checkpoint has {found[0]} {list(found[1])}, the model "
                    f"{wanted[0]} {list(wanted[1])}"
                )
            elif shares_its_own(tensor):
                yield f"{name}: several of its elements are the same memory; make it contiguous"
            elif self._leaf(first) != leaf:
                yield f"{name}: tied to {first} in the model, but not in the checkpoint"
            elif tied != first:
                yield f"{name}: tied to {tied} in the checkpoint, but not in the model"

    def _near(self, name: str) -> str:
        """What it may be called in the checkpoint."""
        if not self._hints:
            return ""
        self._hints -= 1
        key = name.partition(".")[0]
        others = [leaf for leaf in self._stored if leaf.startswith(f"{key}.")]
        near = difflib.get_close_matches(name, others[:_SEARCHED], n=1, cutoff=0.8)
        return f"; did you mean {near[0]}?" if near else ""
