"""Finds the folder of a DeepSpeed checkpoint: its tag, and the names of its files and in them."""

from __future__ import annotations

import re

from holdfast.errors import UsageError
from holdfast.interop.source_files import SourceFiles

#: The files of ranks: of the optimizer, and of the model; of the universal form, experts, layers.
OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{1,6})_optim_states\.pt"
)
MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{1,6})_model_states\.pt")
ATOM = re.compile(r"zero/(.+)/fp32\.pt")
EXPERT = re.compile(
    r"(?:layer_([0-9]{1,6})_)?expert_([0-9]{1,6})_mp_rank_([0-9]{1,6})_model_states\.pt"
)
#: The state that each rank of experts has of an optimizer without ZeRO.
EXPERT_OPTIMIZER = re.compile(r"expp_rank_([0-9]{1,6})_mp_rank_([0-9]{1,6})_optim_states\.pt")
LAYER = re.compile(r"layer_([0-9]{1,6})-(?:[a-z]+_[0-9]+-)*model_states\.pt")
#: What describes the files of a checkpoint and is no state.
DESCRIBING = frozenset(
    (
        *("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "buffer_names", "dp_world_size", "mp_world_size", "ds_config"),
        *("checkpoint_parallel_dimensions", "ds_version", "universal_checkpoint_info"),
        *("num_experts", "ds_autoep_layers"),
    )
)
#: The files that name the tag to read.
LATEST = ("latest", "latest_universal")


def find_tag(files: SourceFiles) -> str | None:
    """The folder of the checkpoint to read, "" or with "/" at its end; None if there is none.

    That is the folder itself, the one that ``latest`` names, or the only one directly below it:
    those deeper are of the steps of another writer.
    """
    found = _tags(files)
    if files.is_file and found:
        raise UsageError(f"{files.path} is one file of a DeepSpeed checkpoint: give its directory")
    if not found or "" in found:
        return "" if found else None
    names = set(files.names())
    for pointer in LATEST:
        if pointer in names:
            tag = files.read(pointer).decode("utf-8", "replace").strip()
            if f"{tag}/" not in found:
                raise UsageError(
                    f"{files.where(pointer)} names {tag!r:.100}, which is not there. There are "
                    f"{_shown(found)}: give the path of one"
                )
            return f"{tag}/"
    found = [tag for tag in found if tag.count("/") == 1]
    if len(found) > 1:
        raise UsageError(
            f"{files.path} has DeepSpeed checkpoints below it, and no file 'latest' that names "
            f"one. There are {_shown(found)}: give the path of one"
        )
    return found[0] if found else None


def is_of_another_rank(name: str, other: str) -> bool:
    """True for the names of two ranks', experts' or layers' files, or of two kinds of files; the
    same beside what stands before the numbers of a rank is one.
    """
    patterns = (OPTIMIZER, MODEL, EXPERT, EXPERT_OPTIMIZER, LAYER)
    matches = [(one.fullmatch(name), one.fullmatch(other)) for one in patterns]
    if not any(theirs for _, theirs in matches):
        return False
    return not any(
        own and theirs and [*map(_number, own.groups())] == [*map(_number, theirs.groups())]
        for own, theirs in matches
    )


def _number(digits: str | None) -> int:
    return -1 if digits is None else int(digits)


def other_tags(files: SourceFiles, tag: str) -> list[str]:
    """The folders of checkpoints that are not in the one to read, without "/" at their ends."""
    return [one.rstrip("/") for one in _tags(files) if not one.startswith(tag)]


def _tags(files: SourceFiles) -> list[str]:
    return sorted({tag for name in files.names() if (tag := _tag_of(name)) is not None})


def _shown(tags: list[str]) -> str:
    return ", ".join(tag.rstrip("/") for tag in tags[:5]) + (", ..." if len(tags) > 5 else "")


def _tag_of(name: str) -> str | None:
    folder, _, last = name.rpartition("/")
    if any(one.fullmatch(last) for one in (OPTIMIZER, MODEL, EXPERT, LAYER)):
        return f"{folder}/" if folder else ""
    if last == "fp32.pt":
        at = f"/{name}".rfind("/zero/")
        return name[:at] if at >= 0 else None
    return None
