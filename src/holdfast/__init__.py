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

__version__ = "0.1.0"

#: Type checkers take it for true. ``typing`` itself takes longer to import than all else here.
TYPE_CHECKING = False

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
    "ForeignFormatError",
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
    "dcp",
    "declare",
    "derived",
    "events",
    "load",
    "loader",
    "loggers",
    "offload",
    "open",
    "plan_restore",
    "register_enum",
    "register_tensor",
    "register_value",
    "rules",
    "save",
    "subscribe",
]

if TYPE_CHECKING:
    from . import dcp, events, loggers, offload, rules
    from .capture.handles import SaveHandle
    from .checkpointer import Checkpointer
    from .data.loader import loader
    from .data.planning.order import SplitList
    from .data.sampler import ResumableSampler
    from .errors import (
        AlreadyPublished,
        ArenaError,
        CaptureOvertaken,
        ChecksumMismatch,
        CoverageError,
        DeadlineExceeded,
        Fenced,
        ForeignFormatError,
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
    from .format.native_types import register_enum, register_value
    from .oneshot import load, open, save
    from .policy.when import Every, Keep
    from .restore.dry_run import plan_restore
    from .restore.reading.layout_check import RestorePlan
    from .restore.restore import Restored
    from .state.mapped.shards import FlatBuffer, FlatRange, FlatShard, Shard, declare
    from .state.modules import derived
    from .state.rng import Rng
    from .state.subclasses import register_tensor
else:  # hidden from type checkers, which would take every misspelt name for a public one
    _HOME = {
        "Checkpointer": ".checkpointer",
        "Event": ".events",
        "Every": ".policy.when",
        "FlatBuffer": ".state.mapped.shards",
        "FlatRange": ".state.mapped.shards",
        "FlatShard": ".state.mapped.shards",
        "Keep": ".policy.when",
        "Restored": ".restore.restore",
        "ResumableSampler": ".data.sampler",
        "Rng": ".state.rng",
        "SaveHandle": ".capture.handles",
        "Shard": ".state.mapped.shards",
        "SplitList": ".data.planning.order",
        "dcp": ".dcp",
        "declare": ".state.mapped.shards",
        "derived": ".state.modules",
        "events": ".events",
        "load": ".oneshot",
        "loader": ".data.loader",
        "loggers": ".loggers",
        "offload": ".offload",
        "RestorePlan": ".restore.reading.layout_check",
        "open": ".oneshot",
        "plan_restore": ".restore.dry_run",
        "register_enum": ".format.native_types",
        "register_tensor": ".state.subclasses",
        "register_value": ".format.native_types",
        "rules": ".rules",
        "save": ".oneshot",
        "subscribe": ".events",
    }  # every other public name is an error

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
        import gc
        from importlib import import_module

        was_enabled = gc.isenabled()
        gc.disable()  # collections beside torch took 24 of the 190 ms that this takes
        try:
            home = import_module(_HOME.get(name, ".errors"), __name__)
        finally:
            if was_enabled:
                gc.enable()
        is_module = name in ("dcp", "events", "loggers", "offload", "rules")
        value = home if is_module else getattr(home, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
