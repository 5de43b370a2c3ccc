"""The tensors inside of values, which their values refer to: room for what is stored of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch

from holdfast.errors import FormatError
from holdfast.format import values as codec
from holdfast.state.modules import extra_state
from holdfast.state.objects import Objects
from holdfast.state.offer import Spec
from holdfast.state.tensors import TORCH_DTYPES, empty
from holdfast.state.values import beside, optimizer_values


class ValueTensors:
    """What ``shared``, the decoded values by key, refers to.

    ``small``: the tensors that are stored among the values. ``references``: what values call
    tensors of modules -> their names here.
    """

    def __init__(
        self,
        objects: Objects,
        stored: Mapping[str, Spec],
        shared: Mapping[str, Any],
        small: Mapping[str, codec.SmallTensor],
        references: Mapping[str, str],
    ) -> None:
        self._objects, self._stored, self._shared = objects, stored, shared
        self._small, self._references = small, references
        self._fresh: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        """Whether the leaf was found to be one of them."""
        return name in self._fresh

    def name(self, leaf: str) -> str:
        """What a leaf that a value names is called here."""
        return self._references.get(leaf, leaf)

    def targets(self, of_modules: Collection[str]) -> list[tuple[str, torch.Tensor]]:
        """(leaf, tensor): the one that is there if it fits, else a new one.

        ``of_modules``: the leaves that modules hold.
        """
        objects = self._objects
        for key in [*objects.stateful, *objects.plain, *objects.optimizers, *objects.modules]:
            there: Any = objects.plain.get(key)
            if key in objects.modules:
                there = extra_state(objects.modules[key])
            if key in objects.stateful:
                there = None
                with suppress(Exception):  # before its first load it may have none to give
                    there = objects.stateful[key].state_dict()
            if key in objects.optimizers:
                there = optimizer_values(beside(objects.optimizers[key], objects.parameters(key)))
            self._collect(self._shared.get(key), there, of_modules)
        return list(self._fresh.items())

    def _collect(self, saved: Any, there: Any, of_modules: Collection[str]) -> None:
        if isinstance(saved, (codec.LeafRef, codec.SmallTensor)):
            small = self._small.get(saved.name)
            name = saved.name if small is not None else self.name(saved.name)
            found = self._stored.get(name) if small is None else (small.dtype, small.shape)
            if found is None:
                raise FormatError(f"a stored value refers to {saved.name!r}, which is no leaf")
            if name not in of_modules and name not in self._fresh:
                self._fresh[name] = _room_for(found, there)
        elif isinstance(saved, dict):
            for key, item in saved.items():
                inner = there.get(key) if isinstance(there, dict) else None
                self._collect(item, inner, of_modules)
        elif isinstance(saved, (list, tuple)):
            for index, item in enumerate(saved):
                is_there = isinstance(there, (list, tuple)) and index < len(there)
                self._collect(item, there[index] if is_there else None, of_modules)


def _room_for(spec: Spec, there: Any) -> torch.Tensor:
    dtype, shape = TORCH_DTYPES[spec[0]], spec[1]
    if isinstance(there, torch.Tensor):
        if tuple(there.shape) == shape and there.dtype == dtype:
            return there
        if tuple(there.shape) == shape:
            return torch.empty_like(there, dtype=dtype)
    return empty(shape, spec[0])
