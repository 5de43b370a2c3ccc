"""Recognizes foreign checkpoints by their content, and reads each by its format."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.interop.arrange import Orders
from holdfast.interop.dcp import METADATA, SUFFIX, read_dcp
from holdfast.interop.deepspeed_directories import read_deepspeed, step_in
from holdfast.interop.deepspeed_tags import find_tag, other_tags
from holdfast.interop.foreign import ForeignCheckpoint
from holdfast.interop.lightning_files import (
    META,
    lightning_state,
    read_lightning_directory,
    read_lightning_file,
)
from holdfast.interop.megatron_ranks import has_rank_files, read_rank_files, step_in_ranks
from holdfast.interop.random_states import is_random_states
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.state_files import (
    Gathered,
    checkpoint_of,
    document_in,
    is_step,
    state_in,
    step_of,
)
from holdfast.interop.torch_dist import COMMON, CONFIG, is_torch_dist, read_torch_dist
from holdfast.interop.trainer_directories import (
    STATE_SUFFIXES,
    TRAINER_STATE,
    read_accelerate,
    read_trainer,
    read_weights,
    take_beside,
    weight_files,
)

#: The formats that can be named by ``format=``.
FORMATS = (
    "dcp",
    "safetensors",
    "torch",
    "lightning",
    "trainer",
    "accelerate",
    "megatron",
    "deepspeed",
)
#: What a rank of torch writes in place of the one file of metadata.
_OF_A_RANK = re.compile(r"__[0-9]+(?:_[0-9]+)?\.metadata")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def recognize(files: SourceFiles) -> str | None:
    """The format of a file or directory; None for one that is none of these.

    UsageError for a checkpoint of a kind that can't be read yet, by its name.
    """
    names = files.names()
    there = set(names)
    _refuse_unread(files, names)
    _refuse_part(files)
    if find_tag(files) is not None:
        return "deepspeed"
    if is_torch_dist(there) or has_rank_files(names):
        return "megatron"
    if METADATA in there:
        return "lightning" if META in there else "dcp"
    if any(name.endswith(SUFFIX) and "/" not in name for name in names):
        raise UsageError(
            f"{files.path} has shards of torch.distributed.checkpoint and no {METADATA}: the save "
            "was not finished, or the file was left behind"
        )
    if len(names) == 1 and files.is_file:
        return _of_file(names[0])
    if TRAINER_STATE in there:
        return "trainer"
    if any(map(is_random_states, names)):
        return "accelerate"
    if weight_files(files, names) is not None:
        return "safetensors"
    return None


def _of_file(name: str) -> str | None:
    if name.endswith(".safetensors"):
        return "safetensors"
    if name.endswith(".ckpt"):
        return "lightning"
    return "torch" if name.endswith(_TORCH_SUFFIXES) else None


def _refuse_part(files: SourceFiles) -> None:
    """One file of several says nothing of the others, whose shards look whole by themselves."""
    if not files.is_file:
        return
    kind, top = "", Path(files.path).parent
    if files.name == METADATA or files.name.endswith(SUFFIX):
        kind = "torch.distributed.checkpoint"
    elif has_rank_files([f"{top.name}/{files.name}"]):
        kind, top = "Megatron", top.parent
    if kind:
        raise UsageError(f"{files.path} is one file of a checkpoint of {kind}: give {top}")


def _refuse_unread(files: SourceFiles, names: list[str]) -> None:
    if CONFIG in names and COMMON in names and METADATA not in names:
        raise UsageError(
            f"{files.path}, a directory of Megatron-Core, has no {METADATA}: the save was not "
            "finished. Give another step"
        )
    if any(found := [one for one in names if _OF_A_RANK.fullmatch(one)]):
        raise UsageError(
            f"{files.where(found[0])} has the metadata of one rank: DCP checkpoints saved without "
            "collectives can't be read yet. Save with use_collectives=True"
        )


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
    return _READERS[format_](files, {} if orders is None else orders)


def _read_dcp(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    return read_dcp(files, "", step_of(files), orders)


def _read_torch(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    gathered = Gathered(state_in(files, files.name))
    return checkpoint_of("torch", files, step_of(files), gathered, orders)


def _read_lightning(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    if not files.is_file:
        return read_lightning_directory(files, orders)
    return read_lightning_file(files, orders)


def _read_megatron(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    read = read_rank_files if has_rank_files(files.names()) else read_torch_dist
    return read(files, orders)


def _read_deepspeed(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    tag = find_tag(files)
    if tag is None:
        raise UsageError(f"{files.path} has no checkpoint of DeepSpeed")
    found = read_deepspeed(files, tag)
    gathered = Gathered(dict(found.tree), list(found.notes), world=found.world)
    taken = take_beside(files, gathered) if tag else set()
    beside = (name for name in files.names() if tag and "/" not in name)
    left = [name for name in beside if name.endswith((*STATE_SUFFIXES, ".json"))]
    gathered.notes += [f"{files.where(name)} is not read" for name in left if name not in taken]
    gathered.notes += [
        f"{files.where(other)} is another checkpoint, and is not read: give its path"
        for other in other_tags(files, tag)
    ]
    return checkpoint_of("deepspeed", files, step_of(files, found.step), gathered, orders)


def step_inside(files: SourceFiles, format_: str) -> int | None:
    """The step that a checkpoint says it is of; None where only its name does, or all would have to
    be read for it.
    """
    found: object = None
    if format_ == "lightning":
        found = lightning_state(files).get("global_step")
    elif format_ == "trainer":
        found = document_in(files, TRAINER_STATE, "state of a trainer").get("global_step")
    elif format_ == "megatron" and has_rank_files(files.names()):
        found = step_in_ranks(files)
    elif format_ == "megatron" and COMMON in files.names():
        found = state_in(files, COMMON).get("iteration")
    elif format_ == "deepspeed" and (tag := find_tag(files)) is not None:
        found = step_in(files, tag)
    return found if is_step(found) else None


_READERS: dict[str, Callable[[SourceFiles, Orders], ForeignCheckpoint]] = {
    "dcp": _read_dcp,
    "safetensors": read_weights,
    "torch": _read_torch,
    "lightning": _read_lightning,
    "trainer": read_trainer,
    "accelerate": read_accelerate,
    "megatron": _read_megatron,
    "deepspeed": _read_deepspeed,
}
