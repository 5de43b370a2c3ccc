"""Reads the files of a state, and makes a checkpoint of what several of them hold together."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from msgspec import structs

from holdfast.errors import ForeignFormatError
from holdfast.interop.arrange import MODEL, Orders, arrange, is_module
from holdfast.interop.foreign import ForeignCheckpoint, ForeignLeaf
from holdfast.interop.pickle_records import Opaque
from holdfast.interop.source_files import SourceFiles, refuse_hollow
from holdfast.interop.torch_files import Tree, open_torch_file

#: A number at the end, and no part of a version or of a decimal number.
_STEP = re.compile(r"(?:.*[^0-9.])?([0-9]{1,15})")
#: How Lightning names the step in the names of its files, before what makes a name unlike others;
#: ``loss_step=0.35`` is a metric.
_NAMED_STEP = re.compile(r"(?:.*[^A-Za-z_])?step=([0-9]{1,15})(?![0-9]|\.[0-9]).*")
_TIME = r"[-_T. ](?:[01][0-9]|2[0-3])[-_.:]?[0-5][0-9][-_.:]?[0-5][0-9]"
#: A day at the end of a name, or a day and a time, as programs call their runs: no step.
_DATE = re.compile(
    r"(?:.*[^0-9])?(?:19|20)[0-9]{2}"
    rf"(?:[-_.][01][0-9][-_.][0-3][0-9](?:{_TIME})?|[01][0-9][0-3][0-9]{_TIME})"
)
#: Of a file of Lightning, which may have an epoch or a metric in its name.
CKPT = ".ckpt"
_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")


def step_of(files: SourceFiles, inside: object = None) -> int:
    """The step that a checkpoint says it is of, or that its name has, as ``step-100``; 0 when
    neither does.

    ``inside``: what stands where the writer of this kind puts the step.
    """
    if is_step(inside):
        return inside
    named = named_step(files.name)
    return 0 if named is None else named


def is_step(value: object) -> TypeGuard[int]:
    """True for a number that a step may have."""
    return type(value) is int and value >= 0


def named_step(name: str) -> int | None:
    """The step in the name of a directory or file; None when there is none."""
    if matched := _NAMED_STEP.fullmatch(name.removesuffix(CKPT)):
        return int(matched[1])
    if name.endswith(CKPT):
        return None
    stem = next((name.removesuffix(one) for one in _SUFFIXES if name.endswith(one)), name)
    matched = None if _DATE.fullmatch(stem) else _STEP.fullmatch(stem)
    return int(matched[1]) if matched else None


@dataclass(slots=True)
class Gathered:
    """What the files of a checkpoint hold, by key of the state.

    ``own``: the values that each rank has of its own. ``world``: how many images the parts of the
    leaves name.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    own: list[Mapping[str, Any]] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    world: int = 1


def checkpoint_of(
    format_: str, files: SourceFiles, step: int, gathered: Gathered, orders: Orders
) -> ForeignCheckpoint:
    """Arrange what was gathered. Where ranks have values of their own, there are as many images."""
    found = arrange(gathered.tree, orders, str(files.path))
    leaves: Mapping[str, ForeignLeaf] = found.leaves
    world = gathered.world
    if gathered.own:
        world = len(gathered.own)
        leaves = {name: _among(leaf, world) for name, leaf in leaves.items()}
    aliases = {
        name: there
        for name, there in gathered.aliases.items()
        if there in leaves and name not in leaves
    }
    return ForeignCheckpoint(
        format_,
        step,
        leaves,
        found.values,
        found.aliases | aliases,
        (*gathered.notes, *found.notes),
        world,
        tuple(gathered.own),
    )


def _among(leaf: ForeignLeaf, world: int) -> ForeignLeaf:
    """The leaf with its parts shown in the first ``world`` images."""
    parts = tuple(structs.replace(part, rank=part.rank % world) for part in leaf.parts)
    return replace(leaf, parts=parts)


def value_in(files: SourceFiles, name: str) -> Any:
    """What a ``torch.save`` file holds, with leaves in place of tensors."""
    return Tree(open_torch_file(files, name)).value()


def document_in(files: SourceFiles, name: str, what: str) -> dict[str, Any]:
    """The object in a JSON file; ``what``: what it should be, for the error."""
    where = files.where(name)
    try:
        document = json.loads(refuse_hollow(files.read(name), where))
        if not isinstance(document, dict):
            raise ValueError("it holds no object")
    except (ValueError, RecursionError) as error:
        raise ForeignFormatError(
            f"{where} is no {what}: {error!s:.200}", path=where, offset=0
        ) from None
    return document


def state_in(files: SourceFiles, name: str) -> dict[str, Any]:
    """The state in a file: a dictionary, in which a state dict alone is the model."""
    value = value_in(files, name)
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


def whole_bytes(files: SourceFiles, leaf: Any, limit: int) -> bytes | None:
    """All bytes of a small tensor that lies in one run; None for anything else."""
    if not isinstance(leaf, ForeignLeaf) or len(leaf.parts) != 1 or leaf.dtype != "U8":
        return None
    (part,) = leaf.parts
    size = part.box.volume
    if part.extent.strides is not None or part.extent.item_bytes is not None or size > limit:
        return None
    return files.read(part.extent.file, part.extent.offset, size)


def sorted_ranks(names: Sequence[str], pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    """(rank, name) of the files whose name has a number by ``pattern``, by rank."""
    return sorted((int(found[1]), name) for name in names if (found := pattern.fullmatch(name)))
