"""Strategies of Megatron-Core's ``dist_checkpointing`` that save and load in a root of Holdfast.

For code that calls ``dist_checkpointing.save`` already: what Megatron cuts over its ranks is stored
as whole leaves, verified when it is read. Megatron's own translation of its tensors is used.
"""

from __future__ import annotations

import importlib
import io
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast.dcp import Reader, Writer
from holdfast.errors import UsageError
from holdfast.integrations.seam import missing
from holdfast.storage.local import LocalStore

try:
    from megatron.core.dist_checkpointing.core import maybe_load_config
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as translated
except ImportError as error:
    raise missing("megatron", error) from error

try:
    base: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.base")
except ImportError:  # from 0.19 on strategies have no names, and Megatron takes its own alone
    base = None
_SaveBase: Any = base.SaveShardedStrategy if base else translated.TorchDistSaveShardedStrategy
_LoadBase: Any = base.LoadShardedStrategy if base else translated.TorchDistLoadShardedStrategy

BACKEND, VERSION = "holdfast", 1
_DIRECTORY = "holdfast"
#: State that is not cut: from 0.19 on it is one of the objects, and its loader takes this file too.
_COMMON, _COMMON_FILE = "common_state", "common.pt"


class HoldfastSaveStrategy(_SaveBase):  # type: ignore[misc]
    """Give ``dist_checkpointing.save(..., sharded_strategy=HoldfastSaveStrategy())``; up to
    Megatron-Core 0.18 ``("holdfast", 1)`` is the same.

    The sharded part is in ``holdfast`` below the directory of the checkpoint, durable when ``save``
    returns. All ranks call it. Raises UnsupportedState for objects that are no data.
    """

    def __init__(self, backend: str = BACKEND, version: int = VERSION) -> None:
        super().__init__(backend, version)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: objects are stored as plain values."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Save the tensors and objects that Megatron has cut over the ranks."""
        if base is None:
            sharded_state_dict = _without_common(sharded_state_dict, checkpoint_dir)
        found, _, _ = translated._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, True
        )
        dcp.save(
            translated.mcore_to_pyt_state_dict(found, False),
            storage_writer=Writer(_root_of(checkpoint_dir), step=_step_of(checkpoint_dir)),
            planner=translated.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            ),
        )

    def async_save(self, *given: Any, **named: Any) -> Any:
        """Raises UsageError."""
        raise UsageError(
            "async_sharded_save=True does not go through Holdfast: leave it out, or keep the loop "
            "with holdfast.integrations.megatron.attach, which copies and saves behind it"
        )


class HoldfastLoadStrategy(_LoadBase):  # type: ignore[misc]
    """What ``dist_checkpointing.load`` takes for a checkpoint that HoldfastSaveStrategy saved: up
    to Megatron-Core 0.18 by itself, later as ``sharded_strategy=HoldfastLoadStrategy()``.
    """

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: objects are stored as plain values."""
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raises UsageError for a checkpoint of another strategy."""
        if loaded_backend != BACKEND:
            raise UsageError(
                f"the checkpoint was saved by the strategy {loaded_backend!r}, not by "
                f"{BACKEND!r}: leave sharded_strategy= out of load()"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raises UsageError for a version that is not known."""
        if loaded_version > VERSION:
            raise UsageError(
                f"the checkpoint has version {loaded_version} of {BACKEND!r}, and this Holdfast "
                f"knows {VERSION}: pip install --upgrade holdfast"
            )

    def load(
        self, sharded_state_dict: Any, checkpoint_dir: str | Path, async_strategy: str = ""
    ) -> Any:
        """Load what each rank has of the tensors and objects; every byte is checked."""
        self._require_ours(checkpoint_dir)
        tensors = [one for one in nested_values(sharded_state_dict) if _is_tensor(one)]
        found, flat, renamed = translated._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict
        )
        loaded = translated.mcore_to_pyt_state_dict(found, True)
        dcp.load(
            loaded,
            storage_reader=Reader(_root_of(checkpoint_dir)),
            planner=translated.MCoreLoadPlanner(
                shapes_validation_sharded_tensors=[
                    one for one in tensors if not one.allow_shape_mismatch
                ],
                allow_shape_mismatch_sharded_tensors={
                    one.key: one for one in tensors if one.allow_shape_mismatch
                },
            ),
        )
        inner = {key: translated._unwrap_pyt_sharded_tensor(one) for key, one in loaded.items()}
        result = translated._replace_sharded_keys_with_state_dict_keys(inner, flat, renamed)
        translated._restore_dict_types(result, sharded_state_dict)
        return result

    def _require_ours(self, checkpoint_dir: str | Path) -> None:
        """Megatron-Core 0.19 does not look who wrote a checkpoint."""
        if (config := maybe_load_config(str(checkpoint_dir))) is not None:
            self.check_backend_compatibility(config.sharded_backend)
            self.check_version_compatibility(config.sharded_backend_version)

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Any = None) -> Any:
        """Returns the tensors of a checkpoint without their data, by key."""
        return {
            key: one
            for key, one in self.load_sharded_metadata(checkpoint_dir).items()
            if _is_tensor(one)
        }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Returns the tensors and objects of a checkpoint without their data, by key."""
        self._require_ours(checkpoint_dir)
        metadata = Reader(_root_of(checkpoint_dir)).read_metadata()
        found: dict[str, Any] = {}
        for name, one in metadata.state_dict_metadata.items():
            key = metadata.planner_data[name][0]
            if key != name or not isinstance(one, TensorStorageMetadata):  # a value, or in one
                found[key] = ShardedObject.empty_from_unique_key(key)
            else:
                empty = torch.empty(one.size, dtype=one.properties.dtype, device="meta")
                found[key] = ShardedTensor.from_rank_offsets(key, empty).without_data()
        return found

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Raises UsageError: a published checkpoint is not changed."""
        raise UsageError(
            f"remove_sharded_tensors({key_prefix!r}): a checkpoint of Holdfast is not changed "
            "after it was published. Save another one without them"
        )


def _without_common(sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
    """The same without the state that is not cut, which rank 0 writes where its loader looks."""
    common = sharded_state_dict.get(_COMMON)
    if not isinstance(common, ShardedObject) or common.key != _COMMON:
        return sharded_state_dict
    if dist.get_rank() == 0:
        written = io.BytesIO()
        torch.save(common.data, written)
        LocalStore(checkpoint_dir).publish(_COMMON_FILE, written.getvalue(), replace=True)
    return {key: value for key, value in sharded_state_dict.items() if key != _COMMON}


def _is_tensor(one: Any) -> bool:
    return isinstance(one, ShardedTensor)


def _root_of(checkpoint_dir: str | Path) -> str:
    return str(Path(checkpoint_dir) / _DIRECTORY)


def _step_of(checkpoint_dir: str | Path) -> int:
    """Returns the number at the end of a directory's name, as in ``iter_0000100``; else 0."""
    found = re.search(r"\d+$", Path(checkpoint_dir).name)
    return int(found[0]) if found else 0


if base is not None:
    for _action, _strategy in (
        (base.StrategyAction.SAVE_SHARDED, HoldfastSaveStrategy()),
        (base.StrategyAction.LOAD_SHARDED, HoldfastLoadStrategy()),
    ):
        base.register_default_strategy(_action, BACKEND, VERSION, _strategy)
