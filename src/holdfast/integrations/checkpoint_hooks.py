"""Keeps what a module and callbacks of Lightning add to its checkpoints, through their own hooks.

``on_save_checkpoint`` and ``on_load_checkpoint`` get a dict with the keys of a checkpoint of
Lightning. What the hooks add to it or put in another place is kept; the rest is in the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: In place of a value that is the module's own state, which is saved as the model.
_OWN = "holdfast: the state of the module"


def kept_by_hooks(trainer: Any, callbacks: Iterable[Any]) -> dict[str, Any]:
    """Returns what the hooks of ``callbacks`` and of the module add to a checkpoint, by key."""
    from lightning.pytorch import Callback  # the adapter says what is to be installed without it
    from lightning.pytorch.core.hooks import CheckpointHooks

    module = trainer.lightning_module
    callbacks = [one for one in callbacks if _has_hook(one, Callback)]
    if not callbacks and not _has_hook(module, CheckpointHooks):
        return {}  # without a walk through the module
    given = _checkpoint(trainer)
    checkpoint = dict(given)
    for one in callbacks:
        one.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    own = given["state_dict"]
    return {
        key: _OWN if value is own else value
        for key, value in checkpoint.items()
        if value is not given.get(key)
    }


def _has_hook(one: Any, kind: type) -> bool:
    """True if ``one`` has another ``on_save_checkpoint`` than its ``kind``, which adds nothing."""
    own = getattr(one.on_save_checkpoint, "__func__", None)
    return own is not vars(kind)["on_save_checkpoint"]


def give_to_hooks(trainer: Any, callbacks: Iterable[Any], kept: Mapping[str, Any]) -> None:
    """Gives the hooks what they added, when the module has its state again."""
    module = trainer.lightning_module
    checkpoint = _checkpoint(trainer)
    own = checkpoint["state_dict"]
    checkpoint |= {
        key: own if isinstance(value, str) and value == _OWN else value
        for key, value in kept.items()
    }
    module.on_load_checkpoint(checkpoint)
    for one in callbacks:
        one.on_load_checkpoint(trainer, module, checkpoint)


def _checkpoint(trainer: Any) -> dict[str, Any]:
    """Returns the keys of a checkpoint of Lightning that hooks read."""
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": trainer.lightning_module.state_dict(),
        "callbacks": {},
        "loops": {},
        "optimizer_states": [],
        "lr_schedulers": [],
    }
