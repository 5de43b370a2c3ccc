"""Lets code that calls ``torch.distributed.checkpoint`` save and load checkpoints of Holdfast.

    dcp.save(state_dict, storage_writer=holdfast.dcp.Writer("runs/gpt", step=step))
    dcp.load(state_dict, storage_reader=holdfast.dcp.Reader("runs/gpt"))

One argument is changed, the calls stay. ``save``, ``async_save`` and ``load`` here have the
arguments of torch's. See docs/foreign-checkpoints.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Reader", "Stager", "Writer", "async_save", "load", "save"]

if TYPE_CHECKING:
    from .calls import async_save, load, save
    from .dcp_reader import Reader
    from .dcp_writer import Writer
    from .stager import Stager
else:  # torch is loaded when one of these is used
    import importlib

    _HOME = {
        "Reader": ".dcp_reader",
        "Stager": ".stager",
        "Writer": ".dcp_writer",
        "async_save": ".calls",
        "load": ".calls",
        "save": ".calls",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'holdfast.dcp' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOME[name], __name__), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
