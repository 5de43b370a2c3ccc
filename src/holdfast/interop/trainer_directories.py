"""Reads what transformers' Trainer and Accelerate's ``save_state`` wrote, and PEFT's adapters.

All three have weights as safetensors; what else is there are ``torch.save`` files and, where the
state was sharded, directories of DCP.
"""

from __future__ import annotations

import re
from typing import Any

from holdfast.errors import ForeignFormatError, UsageError
from holdfast.interop.arrange import MODEL, Orders
from holdfast.interop.dcp import METADATA, SUFFIX, read_dcp_tree
from holdfast.interop.foreign import ForeignCheckpoint
from holdfast.interop.random_states import is_random_states, take_random_states
from holdfast.interop.safetensors_files import (
    check_index,
    indexed_names,
    read_safetensors,
    refuse_without_siblings,
)
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.state_files import (
    Gathered,
    checkpoint_of,
    document_in,
    step_of,
    value_in,
)

TRAINER_STATE = "trainer_state.json"
INDEX = ".safetensors.index.json"
ADAPTER = "adapter_config.json"
#: Files that hold state; those among them that are not read are noted.
STATE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors", SUFFIX)
#: The files of the Trainer and of Accelerate, and the keys of a state that they are; a second
#: model of Accelerate's has a 1 in the names of its files.
_PARTS = {
    "pytorch_model.bin": MODEL,
    "pytorch_model_fsdp.bin": MODEL,
    "optimizer.pt": "optimizer",
    "optimizer.bin": "optimizer",
    "scheduler.pt": "scheduler",
    "scheduler.bin": "scheduler",
    "scaler.pt": "scaler",
}
_NUMBERED = re.compile(r"(pytorch_model|optimizer|scheduler)_([1-9][0-9]{0,3})\.bin")
_MORE_WEIGHTS = re.compile(r"(model_[1-9][0-9]{0,3})\.safetensors")
_CUSTOM = re.compile(r"(custom_checkpoint_[0-9]{1,4})\.pkl")
#: Directories of DCP, of a sharded model and its optimizer.
_SHARDED = re.compile(r"(pytorch_model_fsdp|optimizer)_([0-9]{1,4})/" + re.escape(METADATA))


def read_trainer(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    """Read a ``checkpoint-N`` of the Trainer."""
    trainer = document_in(files, TRAINER_STATE, "state of a trainer")
    step = trainer.get("global_step")
    if type(step) is not int or step < 0:
        where = files.where(TRAINER_STATE)
        raise ForeignFormatError(
            f"{where} is no state of a trainer: its global_step is {step!r:.50}",
            path=where,
            offset=0,
        )
    gathered = _gather(files)
    gathered.tree["trainer_state"] = trainer
    return checkpoint_of("trainer", files, step, gathered, orders)


def read_accelerate(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    """Read what ``save_state`` wrote."""
    return checkpoint_of("accelerate", files, step_of(files), _gather(files), orders)


def read_weights(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    """Read safetensors files that stand alone: weights, or an adapter."""
    weights = weight_files(files, files.names())
    if weights is None:
        raise UsageError(f"{files.path} has no safetensors files")
    gathered = Gathered()
    _take_weights(files, weights, gathered)
    gathered.notes += [
        f"{files.where(name)} is not read"
        for name in files.names()
        if name.endswith(".safetensors") and "/" not in name and name not in weights
    ]
    return checkpoint_of("safetensors", files, step_of(files), gathered, orders)


def weight_files(files: SourceFiles, names: list[str]) -> list[str] | None:
    """The safetensors files of a directory: those an index names, or all at the top."""
    top = [name for name in names if "/" not in name]
    indexes = [name for name in top if name.endswith(INDEX)]
    if len(indexes) > 1:
        raise UsageError(
            f"{files.path} has several indexes ({', '.join(indexes)}): give the path of one file"
        )
    if indexes:
        return indexed_names(files, indexes[0])
    found = [name for name in top if name.endswith(".safetensors")]
    return found or None


def _take_weights(files: SourceFiles, weights: list[str], gathered: Gathered) -> None:
    names = files.names()
    indexes = [name for name in names if name.endswith(INDEX) and "/" not in name]
    if not indexes:
        refuse_without_siblings(files, weights)
    leaves, world = read_safetensors(files, weights)
    for index in indexes:
        check_index(files, index, leaves)
    gathered.tree[MODEL] = leaves
    if not indexes and any(len(leaf.parts) > 1 for leaf in leaves.values()):
        gathered.notes.append(
            f"{files.where(weights[-1])} is the last shard that is there: no file says how many "
            "there were, and without the last ones tensors are smaller than they were"
        )
    gathered.world = max(gathered.world, world)
    if ADAPTER in names:
        _name_adapter(files, list(leaves), gathered)


def take_beside(files: SourceFiles, gathered: Gathered) -> set[str]:
    """Add what the Trainer and Accelerate keep beside a checkpoint of DeepSpeed: schedules, random
    states, registered objects, what the Trainer says. Returns the names of these files.
    """
    names, taken = [name for name in files.names() if "/" not in name], set()
    for name in names:
        key = _key(name)
        is_state = key is None or key.startswith((MODEL, "optimizer"))
        if key is not None and not is_state and key not in gathered.tree:
            gathered.tree[key] = value_in(files, name)
            taken.add(name)
    if TRAINER_STATE in names and "trainer_state" not in gathered.tree:
        gathered.tree["trainer_state"] = document_in(files, TRAINER_STATE, "state of a trainer")
        taken.add(TRAINER_STATE)
    random = [name for name in names if is_random_states(name)]
    take_random_states(files, random, gathered)
    return taken.union(random)


def _gather(files: SourceFiles) -> Gathered:
    names, gathered = files.names(), Gathered()
    weights = weight_files(files, names) or []
    more = {name: found[1] for name in weights if (found := _MORE_WEIGHTS.fullmatch(name))}
    taken = {*weights, TRAINER_STATE}
    if first := [name for name in weights if name not in more]:
        _take_weights(files, first, gathered)
    for name, key in more.items():
        gathered.tree[key], _ = read_safetensors(files, [name])
    for name in names:
        key = _key(name)
        if key is not None and key not in gathered.tree:
            gathered.tree[key] = value_in(files, name)
            taken.add(name)
        elif found := _SHARDED.fullmatch(name):
            taken |= _take_sharded(files, names, found[1], int(found[2]), gathered)
    take_random_states(files, [name for name in names if is_random_states(name)], gathered)
    gathered.notes += [
        f"{files.where(name)} is not read"
        for name in names
        if name.endswith(STATE_SUFFIXES) and name not in taken and not is_random_states(name)
    ]
    return gathered


def _key(name: str) -> str | None:
    """The key of a state that a file is."""
    if found := _NUMBERED.fullmatch(name):
        return f"{found[1].removeprefix('pytorch_')}_{found[2]}"
    found = _CUSTOM.fullmatch(name)
    return found[1] if found else _PARTS.get(name)


def _take_sharded(
    files: SourceFiles, names: list[str], kind: str, number: int, gathered: Gathered
) -> set[str]:
    """Take a sharded model or optimizer; returns the files below its directory, if it is taken."""
    prefix = f"{kind}_{number}/"
    inner = "optimizer" if kind == "optimizer" else MODEL
    key = f"{inner}_{number}" if number else inner
    if key in gathered.tree:  # a file beside the directory has it, too
        return set()
    tree = read_dcp_tree(files, prefix)
    gathered.tree[key] = tree.entries.get(inner, tree.entries)
    gathered.world = max(gathered.world, tree.world)
    gathered.notes += tree.notes
    return {name for name in names if name.startswith(prefix)}


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────

#: What begins the names of an adapter's tensors, by its kind.
_PREFIXES = {
    "LORA": ("lora_",),
    "ADALORA": ("lora_",),
    "LOHA": ("hada_",),
    "LOKR": ("lokr_",),
    "IA3": ("ia3_",),
    "VERA": ("vera_lambda_",),
    "OFT": ("oft_",),
    "BOFT": ("boft_",),
}
#: What DoRA adds to an adapter of LoRA.
_MAGNITUDE = "lora_magnitude_vector"
#: The name that an adapter has in a model unless it is given another.
_DEFAULT = "default"


def _name_adapter(files: SourceFiles, names: list[str], gathered: Gathered) -> None:
    """Give each tensor of an adapter the name too that it has in a model: files leave the
    adapter's own name out.
    """
    config: dict[str, Any] = document_in(files, ADAPTER, "configuration of an adapter")
    kind = str(config.get("peft_type"))[:40]
    if kind not in _PREFIXES:
        gathered.notes.append(
            f"{files.where(ADAPTER)}: an adapter of the kind {kind} has the names of its file only"
        )
        return
    modules = config.get("modules_to_save")
    kept = [one for one in modules if type(one) is str] if isinstance(modules, list) else []
    for name in names:
        if other := _in_model(name, _PREFIXES[kind], kept):
            gathered.aliases[f"{MODEL}.{other}"] = f"{MODEL}.{name}"


def _in_model(name: str, prefixes: tuple[str, ...], kept: list[str]) -> str | None:
    """The name that a model has for a tensor of its adapter called ``default``."""
    for prefix in prefixes:
        if prefix in name:
            start = name.rfind(prefix)
            dot = name.find(".", start)
            cut = len(name) if dot < 0 else dot
            if name[start:] == _MAGNITUDE:  # PEFT leaves the end of this one out, too
                return f"{name}.{_DEFAULT}.weight"
            return f"{name[:cut]}.{_DEFAULT}{name[cut:]}"
    for module in kept:
        if f".{module}." in name:
            before, _, rest = name.rpartition(f".{module}.")
            return f"{before}.{module}.modules_to_save.{_DEFAULT}.{rest}"
    return None
