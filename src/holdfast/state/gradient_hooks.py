"""Says that what a hook of DDP keeps to itself is in no part of the state.

Hooks that compress gradients remember what they left out, and add it to the next ones: PowerSGD's
errors, for example. No ``state_dict`` has that, and a restart begins without it.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.events import warn

#: States of torch's own hooks that remember nothing.
_EMPTY = ("ProcessGroup", "_AllreduceUpcastHookState")
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def warn_of_hooks(key: str, module: nn.Module) -> None:
    """Warns, once for a module, of the states of its communication hooks. ``key``: its name."""
    if module in _warned:
        return
    for part in module.modules():
        for hook, state in getattr(part, "_comm_hooks", ()):
            if not isinstance(part, DistributedDataParallel) or _is_empty(state):
                continue
            _warned.add(module)
            warn(
                f"{key} sends its gradients by "
                f"{getattr(hook, '__qualname__', type(hook).__qualname__)}, whose "
                f"{type(state).__qualname__} is in no part of the state: a restart makes it anew, "
                "and goes on otherwise than without one. Give what it remembers in the state, by "
                "an object with state_dict() and load_state_dict()"
            )


def _is_empty(state: object) -> bool:
    return state is None or any(kind.__name__ in _EMPTY for kind in type(state).__mro__)
