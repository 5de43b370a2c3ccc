"""Shows a checkpoint as the state dict that ``torch.distributed.checkpoint`` flattens.

A name is found in each of the forms that a state dict can have: optimizers nested, flattened or
numbered, a model below its key or at the top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict

from holdfast.dcp.forms import (
    FORM,
    NESTED,
    DictForm,
    Path,
    StoredOptimizer,
    joined,
    split_leaf,
)
from holdfast.errors import FormatError, UsageError
from holdfast.format import values as codec
from holdfast.interop.arrange import MODEL
from holdfast.restore.reading.reader import CheckpointReader
from holdfast.state.param_groups import is_optimizer
from holdfast.state.tensors import TORCH_DTYPES, empty, fill_small

#: Names that programs use for the one optimizer they have.
_OPTIMIZER_KEYS = ("optimizer", "optim")


class StoredDict:
    """The items of one checkpoint by flattened name: a ``LeafRef`` for what is stored as a leaf."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        first = reader.document(0)
        self.form = form_in(first)
        self._has_form = FORM in first.get("own", {})
        world = reader.manifest.world
        # A Checkpointer does not say that ranks have values of their own, as stages have.
        ranks = range(world) if self.form.is_apart or not self._has_form else range(1)
        documents = [first, *(reader.document(rank) for rank in ranks if rank)]
        self._aliases = dict(reader.aliases)
        self._optimizers: dict[str, StoredOptimizer] = {}
        self._refused: dict[str, str] = {}
        """Why an optimizer cannot be put together, by its key."""
        self._values: dict[Path, Any] = {}
        self._whole: dict[str, Any] = {}
        """Values by key, for state dicts that are not flattened."""
        found = [_Reading(document["shared"]) for document in documents]
        self._referred = {name for one in found for name in one.referred}
        self._free = [name for name in reader.leaves if name not in self._referred]
        for one in found:
            self._add(one)
        self._take_leaves()

    # ── reading it in ────────────────────────────────────────────────────────────────────

    def _add(self, read: _Reading) -> None:
        for key, encoded in read.shared.items():
            if is_optimizer(encoded):
                found = read.optimizer(encoded)
                try:
                    self._optimizers.setdefault(key, found).add(found)
                except UsageError as error:  # for whoever wants it: the rest can be loaded
                    self._refused[key] = str(error)
            elif self._is_module(key):
                self._add_extra(key, read.value(encoded))
            else:
                value = read.value(encoded)
                self._whole.setdefault(key, value)
                self._flatten((key,), value)

    def _is_module(self, key: str) -> bool:
        """True if a value is the extra state of a module: keys of DCP may be called like leaves."""
        if self._has_form:
            return key in self.form.modules or (self.form.is_bare and key == MODEL)
        return any(name.startswith(f"{key}.") for name in self._free)

    def _add_extra(self, key: str, parts: Any) -> None:
        for prefix, value in parts.items() if isinstance(parts, dict) else ():
            name = f"{prefix}._extra_state" if prefix else "_extra_state"
            top = (name,) if self.form.is_bare and key == MODEL else (key, name)
            self._flatten(top, value)

    def _flatten(self, top: Path, value: Any) -> None:
        def visit(path: Path, item: Any) -> None:
            self._values.setdefault((*top, *path[1:]), item)

        traverse_state_dict({"": value}, visit, _is_stored_tensor)

    def _take_leaves(self) -> None:
        names = {name: name for name in self._free}
        for name, leaf in (names | self._aliases).items():
            self._take_leaf(name, codec.LeafRef(leaf))

    def _take_leaf(self, name: str, ref: codec.LeafRef) -> None:
        owners = [key for key in self._optimizers if name.startswith(f"{key}.")]
        for key in sorted(owners, key=len, reverse=True):
            optimizer = self._optimizers[key]
            found = split_leaf(name, key, optimizer.names)
            if found is not None:
                optimizer.state.setdefault(found[0], {}).setdefault(found[1], ref)
                return
        key, dot, rest = name.partition(".")
        is_bare = self.form.is_bare and key == MODEL
        self._values.setdefault((rest,) if is_bare else (key, rest) if dot else (key,), ref)

    # ── finding names ────────────────────────────────────────────────────────────────────

    @cached_property
    def items(self) -> dict[str, tuple[Path, Any]]:
        """All items by the name that a state dict of the form that was saved gives them."""
        found = {joined(path): (path, item) for path, item in self._values.items()}
        for key, optimizer in self._optimizers.items():
            if key in self._refused:
                continue
            how = self.form.optimizers.get(key, NESTED)
            for path, item in optimizer.items(how):
                found.setdefault(joined((key, *path)), ((key, *path), item))
        return found

    def find(self, name: str, *, numbered: bool = False) -> tuple[Any, ...]:
        """The item of this name, in whatever form it is asked for: (item,), or () for nothing.

        ``numbered``: the state dict calls parameters by number.
        """
        there = self.items.get(name)
        if there is not None and not (numbered and name.endswith(".params")):
            return (there[1],)
        for key, optimizer in self._optimizers.items():
            for prefix in (key, *self._synonyms(key), *self._bare_keys()):
                rest = name.removeprefix(f"{prefix}.") if prefix else name
                if rest != name or not prefix:
                    found = optimizer.find(rest, is_numbered=numbered)
                    if key in self._refused and (found or prefix):
                        raise UsageError(f"{key}: {self._refused[key]}")
                    if found:
                        return found
        if name in self._whole:
            return (self._whole[name],)
        for other in (f"{MODEL}.{name}", name.removeprefix(f"{MODEL}.")):
            if other in self.items:
                return (self.items[other][1],)
        return ()

    def numbered_prefix(self, name: str) -> str | None:
        """What names of an optimizer begin with, if this one counts a parameter of it by number."""
        head, found, rest = f".{name}".partition(".state.")
        is_number = bool(found) and rest.partition(".")[0].isdecimal() and name not in self.items
        return f"{head}.param_groups.".removeprefix(".") if is_number else None

    def _synonyms(self, key: str) -> Iterator[str]:
        if len(self._optimizers) == 1 and key in _OPTIMIZER_KEYS:
            tops = {str(path[0]) for path in self._values}
            yield from (one for one in _OPTIMIZER_KEYS if one != key and one not in tops)

    def _bare_keys(self) -> tuple[str, ...]:
        """An optimizer's state dict may stand at the top."""
        tops = {str(path[0]) for path in self._values}
        is_alone = len(self._optimizers) == 1 and tops.isdisjoint(("state", "param_groups"))
        return ("",) if is_alone else ()


class _Reading:
    """Decodes the values of one document."""

    def __init__(self, shared: Mapping[str, Any]) -> None:
        self.shared = shared
        self.referred: set[str] = set()
        """The leaves that values refer to."""
        self._small: dict[str, torch.Tensor] = {}
        for encoded in shared.values():
            codec.decode(encoded, leaf=self.referred.add, tensor=self._add_small)
        self.referred -= self._small.keys()

    def _add_small(self, small: codec.SmallTensor) -> None:
        if small.name not in self._small:
            room = self._small[small.name] = empty(small.shape, small.dtype)
            fill_small(room, small)

    def value(self, encoded: Any) -> Any:
        return codec.decode(encoded, leaf=self._leaf, tensor=lambda one: self._small[one.name])

    def _leaf(self, name: str) -> Any:
        return self._small[name] if name in self._small else codec.LeafRef(name)

    def optimizer(self, encoded: Mapping[str, Any]) -> StoredOptimizer:
        groups = [
            {"params": list(group["params"]), **self.value(group["options"])}
            for group in encoded["groups"]
        ]
        return StoredOptimizer(groups, dict(self.value(encoded.get("state", {}))))


def form_in(document: Mapping[str, Any]) -> DictForm:
    """The form that a state dict had, by the values of an image."""
    found = document.get("own", {}).get(FORM, {})
    try:
        return msgspec.convert(found, DictForm)
    except msgspec.ValidationError as error:
        raise FormatError(f"the form of its state dict is none: {error}") from None


def _is_stored_tensor(value: object) -> bool:
    return isinstance(value, (codec.LeafRef, torch.Tensor))


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a leaf; FormatError where this torch lacks it."""
    if name not in TORCH_DTYPES:
        raise FormatError(f"this torch has no dtype {name}")
    return TORCH_DTYPES[name]
