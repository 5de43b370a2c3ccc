"""Strategies of Megatron-Core's ``dist_checkpointing`` that save and load in a root of Holdfast.

For code that calls ``dist_checkpointing.save`` already: what Megatron cuts over its ranks is stored
as whole leaves, verified when it is read. Megatron's own translation of its tensors is used.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast.dcp import Reader, Writer
from holdfast.errors import UsageError
from holdfast.integrations.seam import missing

try:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as translated
    from megatron.core.dist_checkpointing.strategies.base import (
        LoadShardedStrategy,
        SaveShardedStrategy,
        StrategyAction,
        register_default_strategy,
    )
except ImportError as error:
    raise missing("megatron", error) from error

BACKEND, VERSION = "holdfast", 1
_DIRECTORY = "holdfast"


class HoldfastSaveStrategy(SaveShardedStrategy):  # type: ignore[misc]
    """Give ``dist_checkpointing.save(..., sharded_strategy=("holdfast", 1))``.

    The sharded part is in ``holdfast`` below the directory of the checkpoint, durable when ``save``
    returns. All ranks call it. Raises UnsupportedState for objects that are no data.
    """

    def __init__(self, backend: str = BACKEND, version: int = VERSION) -> None:
        super().__init__(backend, version)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: objects are stored as plain values."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Save the tensors and objects that Megatron has cut over the ranks."""
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


class HoldfastLoadStrategy(LoadShardedStrategy):  # type: ignore[misc]
    """What ``dist_checkpointing.load`` takes for a checkpoint that HoldfastSaveStrategy saved."""

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

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Load what each rank has of the tensors and objects; every byte is checked."""
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

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Returns the tensors of a checkpoint without their data, by key."""
        return {
            key: one
            for key, one in self.load_sharded_metadata(checkpoint_dir).items()
            if _is_tensor(one)
        }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Returns the tensors and objects of a checkpoint without their data, by key."""
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


def _is_tensor(one: Any) -> bool:
    return isinstance(one, ShardedTensor)


def _root_of(checkpoint_dir: str | Path) -> str:
    return str(Path(checkpoint_dir) / _DIRECTORY)


def _step_of(checkpoint_dir: str | Path) -> int:
    """Returns the number at the end of a directory's name, as in ``iter_0000100``; else 0."""
    found = re.search(r"\d+$", Path(checkpoint_dir).name)
    return int(found[0]) if found else 0


for _action, _strategy in (
    (StrategyAction.SAVE_SHARDED, HoldfastSaveStrategy()),
    (StrategyAction.LOAD_SHARDED, HoldfastLoadStrategy()),
):
    register_default_strategy(_action, BACKEND, VERSION, _strategy)
