"""Writes the model of a checkpoint as safetensors files, as transformers saves and loads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from holdfast.errors import UsageError
from holdfast.geometry.box import ITEMSIZE, STORED_AS_BYTES, Box
from holdfast.interop.safetensors_files import METADATA
from holdfast.interop.writing.chosen_leaves import ChosenLeaf
from holdfast.interop.writing.planned_files import (
    FormatPlan,
    KnownBytes,
    LeafBytes,
    PlannedFile,
    require_types,
)
from holdfast.interop.writing.state_tree import MODEL, SavedState, names_its_source

TYPES = frozenset(ITEMSIZE) - STORED_AS_BYTES
INDEX = "model.safetensors.index.json"
#: What transformers looks for before it takes a file for one of torch's.
_METADATA = {"format": "pt"}
#: The last parts of names that transformers ties to another: it saves that one.
_HEADS = ("lm_head", "output", "head", "decoder", "embed_out", "score")


def plan_safetensors(saved: SavedState, file_bytes: int) -> FormatPlan:
    """The files, each of at most ``file_bytes`` or one tensor, and the index of several.

    What belongs to no module is left out. Tied tensors are there once.
    """
    modules = saved.module_names()
    key = MODEL if MODEL in modules else next(iter(modules), "")
    if not key or (key != MODEL and len(modules) > 1):
        raise UsageError(
            "safetensors files have one model; the checkpoint has "
            f"{', '.join(sorted(modules)) or 'none'}: choose one with --only"
        )
    refused = {n: why for n, why in saved.refused.items() if n == key or n.startswith(f"{key}.")}
    replace(saved, refused=refused).require_agreement()
    tensors = {name: saved.leaves[of] for name, of in once(modules[key]).items()}
    leaves = once(modules[key])
    require_types(tensors, TYPES, "safetensors")
    shards = list(_shards(tensors, file_bytes))
    files = [
        _file(_name(number, len(shards)), shard, {name: leaves[name] for name in shard})
        for number, shard in enumerate(shards)
    ]
    if len(shards) > 1:
        files.append(_index(shards))
    others = {one for one, value in saved.values.items() if not names_its_source(one, value)}
    left = sorted({*modules, *others, *saved.own} - {key})
    notes = [f"{', '.join(left)} left out: only the model goes to safetensors"] if left else []
    if key in saved.values:
        notes.append(f"the extra state of {key} is left out: safetensors have tensors only")
    return FormatPlan(tuple(files), notes=tuple(notes))


def once(names: Mapping[str, str]) -> dict[str, str]:
    """One name for each leaf: of tied tensors that which transformers keeps, the embedding's."""
    chosen: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (_is_head(name), len(name), name)):
        chosen.setdefault(names[name], name)
    return {name: leaf for leaf, name in sorted(chosen.items(), key=lambda item: item[1])}


def _is_head(name: str) -> bool:
    parts = name.split(".")
    return len(parts) > 1 and parts[-2] in _HEADS


def _shards(tensors: Mapping[str, ChosenLeaf], file_bytes: int) -> Iterator[dict[str, ChosenLeaf]]:
    shard: dict[str, ChosenLeaf] = {}
    size = 0
    for name, leaf in tensors.items():
        if shard and size + leaf.size_bytes > file_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = leaf
        size += leaf.size_bytes
    yield shard


def _name(number: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _file(path: str, shard: Mapping[str, ChosenLeaf], leaves: Mapping[str, str]) -> PlannedFile:
    """One file; large elements first, so that all are aligned, as safetensors itself orders."""
    if METADATA in shard:
        raise UsageError(
            f"{leaves[METADATA]} would be called as the metadata of safetensors are: leave it out "
            "with --only, or give it another name with --rules",
            leaf=leaves[METADATA],
        )
    header: dict[str, object] = {METADATA: _METADATA}
    placed: list[tuple[str, ChosenLeaf, int]] = []
    at = 0
    for name, leaf in sorted(shard.items(), key=lambda item: (-ITEMSIZE[item[1].dtype], item[0])):
        stop = at + leaf.size_bytes
        header[name] = {
            "dtype": leaf.dtype,
            "shape": list(leaf.shape),
            "data_offsets": [at, stop],
        }
        placed.append((leaves[name], leaf, at))
        at = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    begin = 8 + len(text)
    parts: list[KnownBytes | LeafBytes] = [KnownBytes(0, len(text).to_bytes(8, "little") + text)]
    parts += (
        LeafBytes(begin + offset, name, Box.whole(leaf.shape), leaf.dtype)
        for name, leaf, offset in placed
        if leaf.size_bytes
    )
    return PlannedFile(path, begin + at, tuple(parts))


def _index(shards: list[dict[str, ChosenLeaf]]) -> PlannedFile:
    total = sum(leaf.size_bytes for shard in shards for leaf in shard.values())
    names = {
        name: _name(number, len(shards)) for number, shard in enumerate(shards) for name in shard
    }
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    data = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    return PlannedFile(INDEX, len(data), (KnownBytes(0, data),))
