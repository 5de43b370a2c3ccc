"""Opens what is in a checkpoint as a whole, chooses a part of it, and maps it through rules."""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from holdfast.errors import UsageError
from holdfast.geometry.box import ITEMSIZE, Box, cover_fault
from holdfast.geometry.leaf_maps import Seen, Shape, Table, ranges
from holdfast.interop.writing.chosen_leaves import ChosenLeaf, LeafReader, leaves_of
from holdfast.interop.writing.state_tree import (
    SavedState,
    comparable,
    extra_state_name,
    is_optimizer,
    merged_optimizer,
    references,
)
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import CARRIERS, read_aliases, read_values
from holdfast.rules import Rules
from holdfast.rules.patterns import Pattern
from holdfast.state.param_groups import SavedGroups, extra_state_members, mapping


def saved_state(checkpoint: Checkpoint) -> SavedState:
    """All leaves and values of a checkpoint, of all its ranks; those that each rank has its own of
    by name only.
    """
    document = read_values(checkpoint, 0)
    leaves = leaves_of(checkpoint.layout)
    found = _JoinedValues(leaves, document.get("shared", {}))
    aliases = dict(read_aliases(checkpoint, document))
    own = set(document.get("own", {}))
    for rank in range(1, checkpoint.world):
        document = read_values(checkpoint, rank)
        own |= document.get("own", {}).keys()
        for name, of in read_aliases(checkpoint, document).items():
            if aliases.setdefault(name, of) != of:
                found.refused[name] = f"it is {of} on rank {rank}, and {aliases[name]} on another"
        found.add(rank, document.get("shared", {}))
    unlike = tuple(sorted(found.unlike))
    return SavedState(leaves, aliases, found.values, tuple(sorted(own)), unlike, found.refused)


class _JoinedValues:
    """The values of all ranks, put together: an optimizer has the groups of all, a module the extra
    state of all its parts, and what only some ranks have is taken from them.
    """

    def __init__(self, leaves: Mapping[str, ChosenLeaf], first: Mapping[str, Any]) -> None:
        self._leaves = leaves
        self._first = first
        self.values = dict(first)
        self.unlike: set[str] = set()
        self.refused: dict[str, str] = {}

    def add(self, rank: int, shared: Mapping[str, Any]) -> None:
        """Add the values of one more rank."""
        if shared == self._first:
            return
        both = SavedGroups({0: self._first, rank: shared})
        for key, value in shared.items():
            whole = both.whole(rank, value)
            if key not in self.values:
                self.values[key] = whole
                continue
            mine = both.whole(0, self.values[key])
            if comparable(mine) != comparable(whole):
                self._join(key, mine, whole, rank)

    def _join(self, key: str, mine: Any, other: Any, rank: int) -> None:
        if is_optimizer(mine) and is_optimizer(other):
            try:
                self.values[key] = merged_optimizer(mine, other)
            except UsageError as error:
                self.refused[key] = str(error)
        elif self._is_module(key, [mine, other]):
            self._join_extra(key, mine, other, rank)
        else:
            self.unlike.add(key)

    def _is_module(self, key: str, values: list[Any]) -> bool:
        """True if there are leaves below the key that its values do not refer to."""
        own = set(references(values))
        inside = (name for name in self._leaves if name.startswith(f"{key}."))
        return any(name not in own for name in inside)

    def _join_extra(self, key: str, mine: Any, other: Any, rank: int) -> None:
        parts = dict(extra_state_members(mine))
        for prefix, value in extra_state_members(other).items():
            if comparable(parts.setdefault(prefix, value)) != comparable(value):
                why = f"it is not the same on rank {rank} as on another"
                self.refused[extra_state_name(key, prefix)] = why
        self.values[key] = mapping(parts)


def choose_only(saved: SavedState, only: Sequence[str]) -> SavedState:
    """The leaves that match one of these patterns, and the values beside them.

    Raises UsageError for a pattern that nothing matches.
    """
    patterns = [Pattern(text) for text in only]
    named = {*saved.leaves, *saved.aliases, *saved.values, *saved.own}
    for pattern in patterns:
        if not any(pattern.match(name) is not None for name in named):
            raise UsageError(f"--only {pattern.text}: nothing is called so", pattern=pattern.text)

    def is_chosen(name: str) -> bool:
        return any(pattern.match(name) is not None for pattern in patterns)

    aliases = {name: of for name, of in saved.aliases.items() if is_chosen(name)}
    kept = {name for name in saved.leaves if is_chosen(name)} | {*aliases.values()}
    leaves = {name: leaf for name, leaf in saved.leaves.items() if name in kept}
    # A leaf that is kept for one of its other names alone keeps that one only.
    keys = {name.partition(".")[0] for name in kept}
    values = {k: v for k, v in saved.values.items() if k in keys or is_chosen(k)}
    own = tuple(key for key in saved.own if is_chosen(key))
    refused = {
        name: why for name, why in saved.refused.items() if name in values or is_chosen(name)
    }
    for name in saved.refused.keys() - refused.keys():
        _drop_extra_state(values, name)
    return SavedState(leaves, aliases, values, own, saved.unlike, refused)


def _drop_extra_state(values: dict[str, Any], name: str) -> None:
    """Leave out the extra state of this name, if it is one."""
    key, _, _ = name.partition(".")
    if key in values and key != name:
        parts = extra_state_members(values[key])
        kept = {part: one for part, one in parts.items() if extra_state_name(key, part) != name}
        values[key] = mapping(kept)


def read_rules(path: str | os.PathLike[str]) -> Rules:
    """The rules that a Python file defines as ``rules``, or makes of a list of that name.

    The file is run. Raises UsageError when there is none, or it defines none.
    """
    try:
        found: Any = runpy.run_path(os.fspath(path)).get("rules")
    except OSError as error:
        raise UsageError(f"--rules {path}: {error.strerror}") from None
    except Exception as error:  # whatever a file of the user's may raise
        raise UsageError(f"--rules {path}: {type(error).__name__}: {error}") from error
    if isinstance(found, list):
        found = Rules(found)
    if not isinstance(found, Rules):
        raise UsageError(
            f"--rules {path} defines no `rules`: make it a holdfast.rules.Rules, or a list of "
            "rules, such as holdfast.rules.llama(config)"
        )
    return found


def map_state(saved: SavedState, rules: Rules, checkpoint: Checkpoint) -> SavedState:
    """The same state under the names and shapes that ``rules`` give it, optimizers too.

    Raises UsageError for leaves that do not fit the rules, and for an optimizer whose state cannot
    follow them.
    """
    leaves = dict(saved.leaves)
    aliases: dict[str, str] = {}
    values = dict(saved.values)
    tables: dict[str, _MappedModule] = {}
    for key, names in saved.module_names().items():
        mapped = _MappedModule(saved, key, names, rules)
        tables[key] = mapped
        for name in names.values():
            leaves.pop(name, None)
        leaves |= mapped.leaves
    for key in saved.optimizers:
        module = _module_of(key, saved, tables)
        if module is not None:
            _map_optimizer(saved, key, module, leaves, values, checkpoint)
    return replace(saved, leaves=leaves, aliases=aliases, values=values)


class _MappedModule:
    """A module's leaves through rules, and the table by which its optimizer follows."""

    def __init__(self, saved: SavedState, key: str, names: Mapping[str, str], rules: Rules) -> None:
        shapes: dict[str, Shape] = {name: saved.leaves[of].shape for name, of in names.items()}
        rules.check(shapes)
        self.table: Table = rules.inverse(shapes)
        self.names = names
        self.leaves: dict[str, ChosenLeaf] = {}
        for name in self.table.leaves:
            seen = self.table.see(name)
            dtypes = {saved.leaves[names[patch.leaf]].stored for patch in seen.patches}
            if len(dtypes) > 1:
                raise UsageError(
                    f"{key}.{name} would be made of {' and '.join(sorted(dtypes))}, and a tensor "
                    "has one type",
                    leaf=name,
                )
            fault = cover_fault(Box.whole(seen.shape), (patch.here for patch in seen.patches))
            if fault is not None:
                raise UsageError(
                    f"{key}.{name}: the rules give nothing for its elements {ranges(fault.box)}: "
                    "give rules for all its parts",
                    leaf=name,
                )
            full = f"{key}.{name}"
            self.leaves[full] = _leaf(seen, {one: names[one] for one in seen.leaves}, *dtypes)


def _leaf(seen: Seen, stored: Mapping[str, str], dtype: str) -> ChosenLeaf:
    patches = tuple(replace(patch, leaf=stored[patch.leaf]) for patch in seen.patches)
    return ChosenLeaf(dtype, seen.shape, dtype, patches)


def _module_of(
    key: str, saved: SavedState, modules: Mapping[str, _MappedModule]
) -> _MappedModule | None:
    """The module whose parameters an optimizer has; None for one of numbers or other names."""
    params = {name for group in saved.values[key]["groups"] for name in group["params"]}
    return next((one for one in modules.values() if params and params <= one.names.keys()), None)


def _map_optimizer(
    saved: SavedState,
    key: str,
    module: _MappedModule,
    leaves: dict[str, ChosenLeaf],
    values: dict[str, Any],
    checkpoint: Checkpoint,
) -> None:
    kinds: dict[str, set[str]] = {}
    for name in [name for name in saved.leaves if name.startswith(f"{key}.")]:
        parameter, _, kind = name.removeprefix(f"{key}.").rpartition(".")
        if parameter in module.names:
            kinds.setdefault(parameter, set()).add(kind)
            leaves.pop(name, None)
    names: dict[str, list[str]] = {}
    for name in module.table.leaves:
        seen = module.table.see(name)
        for parameter in seen.leaves:
            names.setdefault(parameter, []).append(name)
        for kind in sorted(set().union(*(kinds.get(one, set()) for one in seen.leaves))):
            stored = {one: f"{key}.{one}.{kind}" for one in seen.leaves}
            leaves[f"{key}.{name}.{kind}"] = _state_leaf(saved, seen, stored, module, checkpoint)
    values[key] = _renamed_groups(key, saved.values[key], names)


def _state_leaf(
    saved: SavedState,
    seen: Seen,
    stored: Mapping[str, str],
    module: _MappedModule,
    checkpoint: Checkpoint,
) -> ChosenLeaf:
    for name in stored.values():
        if name not in saved.leaves:
            raise UsageError(
                f"{name} is not stored, and what the rules make of it needs it: leave the "
                "optimizer out with --only 'model.**'",
                leaf=name,
            )
    parts = {one: saved.leaves[name] for one, name in stored.items()}
    dtypes = {leaf.stored for leaf in parts.values()}
    if len(dtypes) == 1 and all(
        leaf.shape == saved.leaves[module.names[one]].shape for one, leaf in parts.items()
    ):
        return _leaf(seen, stored, *dtypes)
    first = next(iter(stored.values()))
    found = {name: _small(saved.leaves[name], checkpoint, name) for name in stored.values()}
    if len(set(found.values())) > 1:
        raise UsageError(
            f"{first} and {max(stored.values())} are different numbers, and the rules make one "
            "tensor of their parameters: leave the optimizer out with --only 'model.**'",
            leaf=first,
        )
    return saved.leaves[first]


def _small(leaf: ChosenLeaf, checkpoint: Checkpoint, name: str) -> bytes:
    """The bytes of a single number; UsageError for state of another shape than its parameter's."""
    if Box.whole(leaf.shape).volume != 1:
        raise UsageError(
            f"{name} has the shape {list(leaf.shape)}, another than its parameter, and cannot "
            "follow the rules: leave the optimizer out with --only 'model.**'",
            leaf=name,
        )
    into = memoryview(bytearray(ITEMSIZE[leaf.dtype]))
    LeafReader(checkpoint, {name: leaf}).fill([(name, Box.whole(leaf.shape), into)])
    return bytes(np.frombuffer(into, CARRIERS[ITEMSIZE[leaf.dtype]]).tobytes())


def _renamed_groups(
    key: str, value: Mapping[str, Any], names: Mapping[str, list[str]]
) -> dict[str, Any]:
    """The groups of an optimizer with the new names of its parameters, each once."""
    if value["state"]:
        raise UsageError(
            f"{key} has state that is no tensor, which cannot follow rules: leave it out with "
            "--only 'model.**'"
        )
    taken: dict[str, int] = {}
    groups = []
    for number, group in enumerate(value["groups"]):
        params: dict[str, None] = {}
        for old in group["params"]:
            for new in names.get(old, ()):
                if taken.setdefault(new, number) != number:
                    raise UsageError(
                        f"{new} would be made of parameters of two groups of {key}: leave the "
                        "optimizer out with --only 'model.**'",
                        leaf=new,
                    )
                params[new] = None
        groups.append({**group, "params": list(params)})
    return {**value, "groups": groups}
