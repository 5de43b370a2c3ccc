"""Gradients go to the host as the backward makes them, where they are complete then."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from holdfast.offload.rows import Place


class Watch:
    """Hooks on parameters that hold neither them nor their optimizer, of which these methods are.

    ``coming``: more will be added to a gradient that is there; it is asked for by ``add_coming``.
    """

    def __init__(
        self, ready: Callable[[torch.Tensor], None], coming: Callable[[torch.Tensor], None]
    ) -> None:
        self._ready, self._coming = weakref.WeakMethod(ready), weakref.WeakMethod(coming)
        self._is_coming: dict[int, weakref.ref[torch.Tensor]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def add(self, parameter: torch.Tensor) -> None:
        """Say when its gradient is ready, if one is made for it now."""
        if not parameter.requires_grad or not parameter.is_leaf:
            return  # then it is sent at the step
        known = self._ready

        def ready(parameter: torch.Tensor) -> None:
            hear = known()
            if hear is not None:
                hear(parameter)

        self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))

    def add_coming(self, parameter: torch.Tensor) -> None:
        """Say so before a backward adds to its gradient, from now on."""
        known, of = self._coming, self._is_coming.get(id(parameter))
        if of is not None and of() is parameter:
            return
        if not parameter.requires_grad or not parameter.is_leaf:
            return
        self._is_coming[id(parameter)] = of = weakref.ref(parameter)

        def coming(_: torch.Tensor) -> None:
            hear, parameter = known(), of()
            if hear is not None and parameter is not None and parameter.grad is not None:
                hear(parameter)

        self._hooks.append(parameter.register_hook(coming))


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def is_complete(place: Place, early: bool | None) -> bool:
    """Whether a gradient that is ready is what the step will use, as far as is known.

    ``early``: what the user says; None: nothing.
    """
    if not place.is_reduced:
        return False
    if early is not None:
        return early
    if not dist.is_initialized():
        return True
    # A plain one may be averaged over the ranks yet, by DDP; a sharded one was, where its mesh
    # is of all ranks.
    parameter = place.parameter
    ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
    return ranks == dist.get_world_size()
