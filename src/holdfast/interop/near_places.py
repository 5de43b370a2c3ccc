"""Finds the checkpoint of another writer near a path that has none, for who gave another level."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import NotFound
from holdfast.interop import deepspeed_tags as tags
from holdfast.interop.dcp import METADATA
from holdfast.interop.steps import LAST
from holdfast.interop.trainer_directories import TRAINER_STATE
from holdfast.storage.open import root_around

#: The files that lie at the top of a checkpoint, or of several steps of one run.
_TOP_FILES = frozenset((*tags.LATEST, LAST, METADATA, TRAINER_STATE))
_MEGATRON_RANK = re.compile(r"mp_rank_[0-9]{1,6}(?:_[0-9]{1,6}){0,2}")
#: How far it is looked, and at how many names.
_LEVELS = 3
_MAX_NAMES = 2000


def refuse_level(path: Path) -> None:
    """Raise NotFound, which names the directory to give in place of ``path``, where that is a part
    of a checkpoint, or one lies below it.
    """
    if root_around(path):
        return
    said = f"{path} is no checkpoint of a kind that is read"
    for outer in [*path.parents][:_LEVELS]:
        if _is_top(outer):
            raise NotFound(f"{said}, and a part of one in {outer}: give that", root=str(path))
    for inner in _below(path):
        if _is_top(inner):
            raise NotFound(f"{said}, and there is one below it: give {inner}", root=str(path))


def _is_top(directory: Path) -> bool:
    for entry in _entries(directory):
        if entry.name in _TOP_FILES or tags.MODEL.fullmatch(entry.name):
            if not entry.is_symlink() and entry.is_file():
                return True
        elif _MEGATRON_RANK.fullmatch(entry.name) and not entry.is_file():
            return True
    return False


def _below(path: Path) -> Iterator[Path]:
    """The directories below, those further up first."""
    level, left = [path], _MAX_NAMES
    for _ in range(_LEVELS):
        inner = []
        for directory in level:
            entries = _entries(directory)
            left -= len(entries)
            if left < 0:
                return
            inner += sorted(Path(one.path) for one in entries if one.is_dir(follow_symlinks=False))
        yield from inner
        level = inner


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return [entry for entry, _ in zip(entries, range(_MAX_NAMES), strict=False)]
    except OSError:
        return []
