"""Whose a tensor of the state is, and so what it is called: here, and in terms of the rules."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: What comes behind the name of a parameter's own elements where only an optimizer has them.
MASTER = ".master"


class Origin(NamedTuple):
    """Whose a tensor of the state is: the ``prefix``, the parameter's ``name`` and the ``suffix``.

    Together they are its name; rules are for the middle one. ``parameter``: the one that the
    state of an optimizer is kept for, None for a tensor of a module itself.
    """

    prefix: str
    name: str
    suffix: str = ""
    parameter: torch.Tensor | None = None

    @property
    def leaf(self) -> str:
        """What the tensor is called in the training."""
        return f"{self.prefix}{self.name}{self.suffix}"

    def stored(self, name: str) -> str:
        """What a stored leaf is called whose parameter has this name there."""
        return f"{self.prefix}{name}{self.suffix}"

    def part(self, name: str, tensor: torch.Tensor) -> Origin:
        """The part called ``name`` of ``tensor``, a registered subclass; or the tensor itself."""
        behind = name[len(self.leaf) :]
        if not behind:
            return self
        owner = tensor if self.parameter is None else self.parameter
        return self._replace(suffix=f"{self.suffix}{behind}", parameter=owner)
