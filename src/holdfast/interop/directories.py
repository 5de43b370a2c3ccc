"""Recognizes foreign checkpoints by their content, and reads each by its format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import ForeignFormatError, UsageError
from holdfast.interop.arrange import MODEL, Orders, arrange, is_module
from holdfast.interop.dcp import METADATA, SUFFIX, read_dcp
from holdfast.interop.deepspeed import find_tag, read_deepspeed
from holdfast.interop.foreign import ForeignCheckpoint, ForeignLeaf
from holdfast.interop.records import Opaque
from holdfast.interop.safetensors_files import (
    check_index,
    indexed_names,
    read_safetensors,
    refuse_without_siblings,
)
from holdfast.interop.source_files import SourceFiles, refuse_hollow
from holdfast.interop.torch_files import Tree, open_torch_file

#: The formats that can be named by ``format=``.
FORMATS = ("dcp", "safetensors", "torch", "lightning", "trainer", "accelerate", "deepspeed")
_STEP = re.compile(r"(?:.*[^0-9])?([0-9]{1,15})")
_INDEX = ".safetensors.index.json"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_STATE_SUFFIXES = (*_TORCH_SUFFIXES, ".pkl", ".safetensors", SUFFIX)
_RANDOM = re.compile(r"(?:rng_state(?:_[0-9]+)?\.pth|random_states_[0-9]+\.pkl)")


def recognize(files: SourceFiles) -> str | None:
    """The format of a file or directory; None for one that is none of these.

    UsageError for a checkpoint of a kind that can't be read yet, by its name.
    """
    names = files.names()
    there = set(names)
    _refuse_unread(names)
    if find_tag(files) is not None:
        return "deepspeed"
    if METADATA in there:
        return "dcp"
    if any(name.endswith(SUFFIX) and "/" not in name for name in names):
        raise UsageError(
            f"{files.path} has shards of torch.distributed.checkpoint and no {METADATA}: the save "
            "was not finished, or the file was left behind"
        )
    if len(names) == 1 and files.path.is_file():
        return _of_file(names[0])
    if "trainer_state.json" in there:
        return "trainer"
    if any(re.fullmatch(r"random_states_[0-9]+\.pkl", name) for name in names):
        return "accelerate"
    if _weights(files, names) is not None:
        return "safetensors"
    return None


def _of_file(name: str) -> str | None:
    if name.endswith(".safetensors"):
        return "safetensors"
    if name.endswith(".ckpt"):
        return "lightning"
    return "torch" if name.endswith(_TORCH_SUFFIXES) else None


def _refuse_unread(names: list[str]) -> None:
    last = [name.rpartition("/")[2] for name in names]
    if "metadata.json" in names and ("common.pt" in names or METADATA in names):
        raise UsageError("Megatron-Core torch_dist directories can't be read yet")
    if any(name in ("model_optim_rng.pt", "distrib_optim.pt") for name in last):
        raise UsageError("Megatron-LM mp_rank directories can't be read yet")
    if any(name.endswith(".metadata") and "_" in name for name in last if name != METADATA):
        raise UsageError("DCP checkpoints saved without collectives can't be read yet")


def read_directory(
    files: SourceFiles, format_: str | None = None, orders: Orders | None = None
) -> ForeignCheckpoint | None:
    """Read the checkpoint at a path; None when nothing that is known is there.

    ``orders``: as in ``arrange``.
    """
    if format_ is not None and format_ not in FORMATS:
        raise UsageError(f"format={format_!r}: there are {', '.join(FORMATS)}")
    format_ = format_ or recognize(files)
    if format_ is None:
        return None
    return _READERS[format_](files, orders or {})


def step_of(name: str) -> int:
    """The step in the name of a directory, as in ``step-100``; 0 when there is none."""
    stem = name.partition(".")[0]
    matched = _STEP.fullmatch(stem)
    return int(matched[1]) if matched else 0


def _read_dcp(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    return read_dcp(files, "", step_of(files.path.name), orders)


def _weights(files: SourceFiles, names: list[str]) -> list[str] | None:
    """The safetensors files of a directory: those an index names, or all at the top."""
    top = [name for name in names if "/" not in name]
    indexes = [name for name in top if name.endswith(_INDEX)]
    if len(indexes) > 1:
        raise UsageError(
            f"{files.path} has several indexes ({', '.join(indexes)}): give the path of one file"
        )
    if indexes:
        return indexed_names(files, indexes[0])
    found = [name for name in top if name.endswith(".safetensors")]
    return found or None


def _read_safetensors(files: SourceFiles, _: Orders) -> ForeignCheckpoint:
    names = files.names()
    weights = _weights(files, names)
    if weights is None:
        raise UsageError(f"{files.path} has no safetensors files")
    if not any(name.endswith(_INDEX) for name in names):
        refuse_without_siblings(files, weights)
    leaves, world = read_safetensors(files, weights)
    for index in (name for name in names if name.endswith(_INDEX) and "/" not in name):
        check_index(files, index, leaves)
    step = step_of(files.path.name)
    return _of_tree("safetensors", files, step, {MODEL: leaves}, {}, world)


def _value(files: SourceFiles, name: str) -> Any:
    return Tree(open_torch_file(files, name)).value()


def _state(files: SourceFiles, name: str) -> dict[str, Any]:
    """The state in a file: a dictionary, in which a state dict alone is the model."""
    value = _value(files, name)
    where = files.where(name)
    if isinstance(value, Opaque):
        raise ForeignFormatError(
            f"{where}, byte {value.offset} of its pickle: it holds {value.what}, an object that "
            "needs code to be read, and no state",
            path=where,
            offset=value.offset,
        )
    if isinstance(value, ForeignLeaf):
        return {"tensor": value}
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        raise ForeignFormatError(
            f"{where} holds a {type(value).__name__} and no dictionary of a state",
            path=where,
            offset=0,
        )
    if is_module(value):
        return {MODEL: value}
    if {"state", "param_groups"} <= value.keys():
        return {"optimizer": value}
    return dict(value)


def _read_torch(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    state = _state(files, files.path.name)
    return _of_tree("torch", files, step_of(files.path.name), state, orders)


def _of_tree(
    format_: str,
    files: SourceFiles,
    step: int,
    tree: dict[str, Any],
    orders: Orders,
    world: int = 1,
    notes: Sequence[str] = (),
) -> ForeignCheckpoint:
    found = arrange(tree, orders, str(files.path))
    notes = (*notes, *found.notes)
    return ForeignCheckpoint(format_, step, found.leaves, found.values, found.aliases, notes, world)


def _read_lightning(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    state = _state(files, files.path.name)
    if "state_dict" not in state or "pytorch-lightning_version" not in state:
        return _of_tree("torch", files, step_of(files.path.name), state, orders)
    tree: dict[str, Any] = {MODEL: state.pop("state_dict")}
    for name, key in (("optimizer_states", "optimizer"), ("lr_schedulers", "lr_scheduler")):
        some = state.pop(name, [])
        if isinstance(some, list):
            tree |= {f"{key}{number or ''}": one for number, one in enumerate(some)}
    step = state.get("global_step")
    number = step if type(step) is int and step >= 0 else 0
    twice = sorted(tree.keys() & state.keys())
    notes = [f"{key} of the file is left out: what Lightning keeps is called so" for key in twice]
    return _of_tree("lightning", files, number, state | tree, orders, notes=notes)


def _read_trainer(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    where = files.where("trainer_state.json")
    try:
        trainer = json.loads(refuse_hollow(files.read("trainer_state.json"), where))
        step = trainer["global_step"]
        if type(step) is not int or step < 0:
            raise ValueError(f"the step {step!r:.50}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ForeignFormatError(
            f"{where} is no state of a trainer: {error!s:.200}", path=where, offset=0
        ) from None
    return _read_parts("trainer", files, step, {"trainer_state": trainer}, orders)


def _read_deepspeed(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    tag = find_tag(files)
    if tag is None:
        raise UsageError(f"{files.path} has no checkpoint of DeepSpeed")
    found = read_deepspeed(files, tag)
    beside = (name for name in files.names() if tag and "/" not in name)
    left = (name for name in beside if name.endswith((*_STATE_SUFFIXES, ".json")))
    notes = (*found.notes, *(f"{files.where(name)} is not read" for name in left))
    return _of_tree("deepspeed", files, found.step, found.tree, orders, found.world, notes)


def _read_accelerate(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    return _read_parts("accelerate", files, step_of(files.path.name), {}, orders)


#: The files of the Trainer and of Accelerate, and the keys of a state that they are.
_PARTS = {
    "optimizer.pt": "optimizer",
    "optimizer.bin": "optimizer",
    "scheduler.pt": "scheduler",
    "scheduler.bin": "scheduler",
    "scaler.pt": "scaler",
}


def _read_parts(
    format_: str, files: SourceFiles, step: int, values: dict[str, Any], orders: Orders
) -> ForeignCheckpoint:
    names = files.names()
    weights = _weights(files, names)
    tree: dict[str, Any] = {}
    world = 1
    if weights is not None:
        leaves, world = read_safetensors(files, weights)
        tree[MODEL] = leaves
    elif "pytorch_model.bin" in names:
        tree[MODEL] = _value(files, "pytorch_model.bin")
    notes: list[str] = []
    taken = {*(weights or ()), "pytorch_model.bin", "trainer_state.json"}
    for name, key in _PARTS.items():
        if name in names:
            tree[key] = _value(files, name)
            taken.add(name)
    for name in names:
        if _RANDOM.fullmatch(name):
            tree[f"random_states.{name.rpartition('.')[0]}"] = _value(files, name)
            taken.add(name)
        elif name.endswith(_STATE_SUFFIXES) and name not in taken:
            notes.append(f"{files.where(name)} is not read")
    return _of_tree(format_, files, step, tree | values, orders, world, notes)


_READERS: dict[str, Callable[[SourceFiles, Orders], ForeignCheckpoint]] = {
    "dcp": _read_dcp,
    "safetensors": _read_safetensors,
    "torch": _read_torch,
    "lightning": _read_lightning,
    "trainer": _read_trainer,
    "accelerate": _read_accelerate,
    "deepspeed": _read_deepspeed,
}
