"""Keep a PyTorch training run alive: snapshots every few steps, exact resumption on what is left.

    ckpt = holdfast.Checkpointer("runs/gpt", {"model": model, "optimizer": optimizer})
    restored = ckpt.restore()
    for step in range(restored.step + 1 if restored else 0, steps):
        ...
        ckpt.step(step)
    ckpt.close()

Everything public is named here and found on first use, so that importing the package loads no
torch: the command line answers at once, and the keeper never carries it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "AlreadyPublished",
    "ArenaError",
    "CaptureOvertaken",
    "Checkpointer",
    "ChecksumMismatch",
    "CoverageError",
    "DeadlineExceeded",
    "Event",
    "Every",
    "Fenced",
    "FlatBuffer",
    "FlatRange",
    "FlatShard",
    "FormatError",
    "HoldfastError",
    "Keep",
    "KeeperError",
    "NewerFormat",
    "NotFound",
    "NotProtected",
    "PeerError",
    "PersistFailed",
    "Preempted",
    "RestoreError",
    "RestorePlan",
    "Restored",
    "ResumableSampler",
    "Rng",
    "RootBusy",
    "SaveError",
    "SaveHandle",
    "Shard",
    "SnapshotSkipped",
    "SplitList",
    "StateMismatch",
    "StatePoisoned",
    "StorageError",
    "TooManyLost",
    "UnsupportedState",
    "UsageError",
    "__version__",
    "declare",
    "load",
    "offload",
    "open",
    "plan_restore",
    "register_enum",
    "register_tensor",
    "rules",
    "save",
    "subscribe",
]

if TYPE_CHECKING:
    from . import offload, rules
    from .checkpointer import Checkpointer
    from .data.sampler import ResumableSampler
    from .data.split_list import SplitList
    from .errors import (
        AlreadyPublished,
        ArenaError,
        CaptureOvertaken,
        ChecksumMismatch,
        CoverageError,
        DeadlineExceeded,
        Fenced,
        FormatError,
        HoldfastError,
        KeeperError,
        NewerFormat,
        NotFound,
        NotProtected,
        PeerError,
        PersistFailed,
        Preempted,
        RestoreError,
        RootBusy,
        SaveError,
        SnapshotSkipped,
        StateMismatch,
        StatePoisoned,
        StorageError,
        TooManyLost,
        UnsupportedState,
        UsageError,
    )
    from .events import Event, subscribe
    from .format.foreign import register_enum
    from .load.ahead import plan_restore
    from .load.dryrun import RestorePlan
    from .load.restore import Restored
    from .oneshot import load, open, save
    from .policy.interval import Every
    from .policy.retention import Keep
    from .snapshot.handle import SaveHandle
    from .state.declared import FlatBuffer, FlatRange, FlatShard, Shard, declare
    from .state.rng import Rng
    from .state.subclasses import register_tensor
else:  # hidden from type checkers, which would take every misspelt name for a public one
    import importlib
    import sys
    from types import ModuleType

    _HOME = {
        "Checkpointer": ".checkpointer",
        "Event": ".events",
        "Every": ".policy.interval",
        "FlatBuffer": ".state.declared",
        "FlatRange": ".state.declared",
        "FlatShard": ".state.declared",
        "Keep": ".policy.retention",
        "Restored": ".load.restore",
        "ResumableSampler": ".data.sampler",
        "Rng": ".state.rng",
        "SaveHandle": ".snapshot.handle",
        "Shard": ".state.declared",
        "SplitList": ".data.split_list",
        "declare": ".state.declared",
        "load": ".oneshot",
        "offload": ".offload",
        "RestorePlan": ".load.dryrun",
        "open": ".oneshot",
        "plan_restore": ".load.ahead",
        "register_enum": ".format.foreign",
        "register_tensor": ".state.subclasses",
        "rules": ".rules",
        "save": ".oneshot",
        "subscribe": ".events",
    }  # every other public name is an error

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
        home = importlib.import_module(_HOME.get(name, ".errors"), __name__)
        value = home if name in ("offload", "rules") else getattr(home, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    class _Package(ModuleType):
        """Keeps ``holdfast.load`` the function, although a package of that name lies beside it.

        Importing ``holdfast.load.plan`` makes Python set ``holdfast.load`` to that package,
        and the public function would be gone from then on.
        """

        def __setattr__(self, name: str, value: object) -> None:
            if name in __all__ and isinstance(value, ModuleType):
                return
            super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package
