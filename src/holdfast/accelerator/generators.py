"""Reads, sets and seeds the random number generators of the accelerator, of whatever type it is.

A generator's state is the algorithm's own: one type's means nothing to another's, so states are
stored under the name of their type. AMD's GPUs have the name of NVIDIA's in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def accelerator_type() -> str:
    """Return the type of the accelerator that torch was built for; "" if it was built for none."""
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


def generator_states() -> list[torch.Tensor]:
    """Return the state of each device's generator; [] if this process has used no device yet, or
    the devices have no generators.
    """
    module = _module()
    if not (module and module.is_available() and _is_initialized(module)):
        return []
    return [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]


def set_generator_states(states: Sequence[torch.Tensor], used: int | None) -> None:
    """Set the generator of each device that there is; the device in use gets the state of device
    ``used``, if that is known.
    """
    module = _module()
    if not (module and states and module.is_available()):
        return
    for index, state in enumerate(states[: torch.accelerator.device_count()]):
        module.set_rng_state(state, index)
    current = torch.accelerator.current_device_index()
    if used is not None and used != current:
        module.set_rng_state(states[used], current)


def seed_generators(seed: int) -> None:
    """Seed the generator of every device: once the devices are in use, if they are not yet."""
    module = _module()
    if module:
        seed_all = getattr(module, "manual_seed_all", None) or module.manual_seed
        seed_all(seed)


def current_index() -> int:
    """Return the index of the device in use."""
    return torch.accelerator.current_device_index()


def _module() -> Any:
    """Return torch's module for the accelerator; None if there is none, or it has no
    generators.
    """
    kind = accelerator_type()
    module = torch.get_device_module(kind) if kind else None
    return module if hasattr(module, "set_rng_state") else None


def _is_initialized(module: Any) -> bool:
    asked = getattr(module, "is_initialized", None)
    return asked is None or bool(asked())
