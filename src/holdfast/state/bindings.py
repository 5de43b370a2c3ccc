"""Binds each leaf to the tensor that holds its memory, from which a capture copies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from msgspec import Struct

from holdfast.accelerator.devices import host_address, is_on_device, memory_key, streamed_devices
from holdfast.errors import UsageError
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.layout import LeafEntry
from holdfast.geometry.leaves import HolderBoxes
from holdfast.state.mapped.shards import View
from holdfast.state.mapped.tensor_parts import LeafPart, TensorMapping
from holdfast.state.tensors import DTYPE_NAMES, TINY_BYTES
from holdfast.state.walk import Found


class Binding(Struct):
    """A leaf's name, its tensor, and this rank's part of it."""

    name: str
    tensor: torch.Tensor
    local: torch.Tensor
    signature: tuple[object, ...]
    spread: str
    """How replicas may divide the leaf between them for storing, as the walk found it."""
    is_hooked: bool
    """True if the leaf changes only in an optimizer step that is hooked."""
    lazy: bool
    """True if the leaf is captured in place: its step is hooked, or it was the same in several
    images, and its memory holds its true values.
    """
    entry: LeafEntry
    staged: torch.Tensor | None = None
    """The copy of a volatile leaf, made before ``save`` returns."""
    sight: TensorMapping | None = None
    """The stored leaves this tensor maps to through rules; None where it is stored as one leaf
    under its own name.
    """
    is_copied_out: bool = False
    """True if its copy is in host memory, and it is not."""

    @property
    def is_sampled(self) -> bool:
        """True if samples show if it changed before it was copied: of a frozen leaf that is
        captured in place checksums do.
        """
        return self.lazy and not self.entry.is_frozen

    @property
    def source(self) -> torch.Tensor:
        """The tensor that the capture copies from."""
        return self.local if self.staged is None else self.staged


class LeafSource(NamedTuple):
    """One place in memory where a stored leaf, or the ``box`` of it that this rank has, lies as a
    view of a tensor.

    Without a box the view is all that this rank has by the leaf's mesh.
    """

    binding: Binding
    view: View | None = None
    box: Box | None = None

    @property
    def memory(self) -> torch.Tensor:
        """The memory that the capture copies from."""
        whole = self.binding.source
        return whole if self.view is None else self.view.of(whole)


class Bindings(list[Binding]):
    """All leaves of a state in one order, with everything a save needs of them, computed once."""

    def __init__(
        self, bindings: Iterable[Binding] = (), joined: Iterable[tuple[str, list[LeafSource]]] = ()
    ) -> None:
        super().__init__(bindings)
        self.sources: dict[str, tuple[LeafSource, ...]] = {}
        """Stored leaf -> the places in memory where its parts lie."""
        self.origin: Bindings | None = None
        """Those of which these are another form, with more leaves captured in place."""
        self.joined = list(joined)
        """Stored one-element leaves that several tensors share; their values must agree at every
        save.
        """
        self.lazy = [binding for binding in self if binding.lazy]
        counters = [(one, _here(one.tensor)) for one in self.lazy]
        counters += [(one, one.tensor) for one, local in counters if one.tensor is not local]
        counters = [(one, tensor) for one, tensor in counters if not tensor.is_inference()]
        self.watched = [one for one, _ in counters]
        """Lazy leaves, each as often as it has version counters that show it was written to: none
        where it was made in inference mode.
        """
        self.counted = [tensor for _, tensor in counters]
        """The tensors of these counters: what is done to a DTensor moves its own, and what is done
        to its local tensor that one's.
        """
        self.volatile = [binding for binding in self if not binding.lazy]
        self.gpus = streamed_devices(binding.local for binding in self)
        sampled = [binding for binding in self.lazy if binding.is_sampled]
        self.sampled = [
            (one.name, host_address(one.local), one.local.numel() * one.local.element_size())
            for one in sampled
            if one.local.is_cpu and one.local.is_contiguous() and one.local.numel()
        ]
        """Name, address and bytes of the lazy leaves on the host whose bytes lie together."""
        there = [one for one in sampled if is_on_device(one.local) and _is_dense(one.local)]
        self.sampled_on_devices = (
            [one for one in there if isinstance(one.tensor, torch.nn.Parameter)],
            [one for one in there if not isinstance(one.tensor, torch.nn.Parameter)],
        )
        """Parameters and other lazy leaves on devices that fill their memory, in any order."""
        self.size_bytes = sum(binding.local.nbytes for binding in self)


def is_plain(local: torch.Tensor) -> bool:
    """True if the memory of a tensor holds its values: a conjugate or negative view differs from
    it by a flag, and only a copy has the true values.
    """
    return not (local.is_conj() or local.is_neg())


def same_bindings(bindings: list[Binding], found: list[Found]) -> bool:
    return len(bindings) == len(found) and all(map(is_bound, bindings, found))


def is_bound(binding: Binding, found: Found) -> bool:
    name, tensor, hooked, spread, frozen = found
    return (
        binding.tensor is tensor
        and binding.is_hooked == hooked
        and binding.name == name
        and binding.spread == spread
        and binding.entry.is_frozen == frozen
        and signature(tensor) == binding.signature
    )


def same_storage_form(
    there: torch.Tensor | None, local: torch.Tensor, device: torch.device
) -> bool:
    return there is not None and (
        (there.shape, there.dtype, there.device) == (local.shape, local.dtype, device)
    )


def signature(tensor: torch.Tensor) -> tuple[object, ...]:
    """Memory, shape, strides and dtype of a tensor: all must be unchanged for its binding to be
    reused.
    """
    local = _here(tensor)
    flags = local.is_conj(), local.is_neg(), local.device
    placed = getattr(tensor, "_spec", None)
    return memory_key(local), local.shape, local.stride(), local.dtype, flags, placed


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the memory from the tensor's first element to its last is elements of it alone."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return expected > 0


def _here(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


# Builds the table of leaves that a rank declares, and records where the parts of each stored leaf
# lie.
#
# Several tensors may be parts of one stored leaf, and one tensor may be part of several leaves.


def declare_all(bindings: Bindings) -> list[LeafEntry]:
    """Returns this rank's declaration of each stored leaf, by name, and sets ``bindings.sources``
    to match.

    Raises UsageError when two tensors are the same elements of one leaf, or disagree about the
    leaf's shape or type.
    """
    entries: list[LeafEntry] = []
    parts: dict[str, list[tuple[Binding, LeafPart]]] = {}
    for binding in bindings:
        if binding.sight is None:
            entries.append(binding.entry)
            bindings.sources[binding.entry.name] = (LeafSource(binding),)
        elif not binding.sight.is_copy:
            for part in binding.sight.parts:
                parts.setdefault(part.leaf, []).append((binding, part.as_stored()))
    for leaf, found in parts.items():
        if len(found) > 1 and all(one.is_whole and math.prod(one.shape) == 1 for _, one in found):
            numbers = [LeafSource(binding, one.views[0], one.boxes[0]) for binding, one in found]
            bindings.joined.append((leaf, numbers))
            _require_all_alike(leaf, found)
            found = found[:1]
        entry, sources = _declare(leaf, found)
        entries.append(entry)
        bindings.sources[leaf] = sources
    entries.sort(key=lambda entry: entry.name)
    for one, other in pairwise(entries):
        if one.name == other.name:
            raise UsageError(
                f"two tensors of the state are both called {one.name!r}, by themselves or by rules"
            )
    return entries


def entry_of(part: LeafPart, dtype: str, spread: str, *, is_frozen: bool = False) -> LeafEntry:
    """Returns the declaration of a leaf by a rank that has this part of it. No element occurs twice
    in it.
    """
    if part.instance is not None:
        return LeafEntry(part.leaf, dtype, part.shape, spread, part.instance, is_frozen)
    size_bytes = math.prod(part.shape) * ITEMSIZE[dtype]
    spread = "lowest" if size_bytes <= TINY_BYTES else spread
    held = None if part.is_whole or not size_bytes else HolderBoxes(part.boxes)
    return LeafEntry(part.leaf, dtype, part.shape, spread, held, is_frozen)


def _declare(
    leaf: str, found: list[tuple[Binding, LeafPart]]
) -> tuple[LeafEntry, tuple[LeafSource, ...]]:
    first, part = found[0]
    is_frozen = all(binding.entry.is_frozen for binding, _ in found)
    assert first.sight is not None
    spread = first.sight.spread or first.spread
    dtype = DTYPE_NAMES[first.tensor.dtype]
    _require_all_alike(leaf, found)
    if part.instance is not None:
        if len(found) > 1:
            raise _same(leaf, (binding for binding, _ in found))
        return entry_of(part, dtype, spread, is_frozen=is_frozen), (
            LeafSource(first, part.views[0]),
        )
    sources = [LeafSource(binding, view, box) for binding, one in found for box, view in _once(one)]
    sources.sort(key=_start)
    boxes = tuple(source.box for source in sources if source.box is not None)
    try:
        entry = entry_of(LeafPart(leaf, part.shape, boxes, ()), dtype, spread, is_frozen=is_frozen)
    except UsageError as error:
        raise _same(leaf, (binding for binding, _ in found)) from error
    return entry, tuple(sources) or (LeafSource(first, _nothing_of(first.local)),)


def _nothing_of(tensor: torch.Tensor) -> View:
    none = (0,) * tensor.ndim
    return View(Box(none, none), tuple(range(tensor.ndim)))


def _once(part: LeafPart) -> list[tuple[Box, View]]:
    """Returns boxes and their views; an element that the tensor has several times is stored from
    its first place.

    A rank that holds a tensor whole in which others have copies has each of them.
    """
    found: list[tuple[Box, View]] = []
    for box, view in zip(part.boxes, part.views, strict=True):
        if all(box != other for other, _ in found):
            found.append((box, view))
    return found


def _start(source: LeafSource) -> tuple[int, ...]:
    return () if source.box is None else source.box.start


def _require_all_alike(leaf: str, found: list[tuple[Binding, LeafPart]]) -> None:
    first, part = found[0]
    for binding, other in found[1:]:
        _require_alike(leaf, first, part, binding, other)


def _require_alike(
    leaf: str, one: Binding, part: LeafPart, other: Binding, theirs: LeafPart
) -> None:
    if (part.shape, one.tensor.dtype) != (theirs.shape, other.tensor.dtype):
        raise UsageError(
            f"{one.name} and {other.name} are both seen as parts of {leaf}, the one "
            f"{one.tensor.dtype} of shape {list(part.shape)}, the other {other.tensor.dtype} of "
            f"shape {list(theirs.shape)}: change the rules so that they agree",
            leaf=leaf,
        )


def _same(leaf: str, bindings: Iterable[Binding]) -> UsageError:
    names = ", ".join(dict.fromkeys(binding.name for binding in bindings))
    return UsageError(
        f"{names} are the same elements of {leaf} by the rules or by what was declared: of two "
        "tensors one would be lost. Change the rule, or say which is a copy with rules.tied",
        leaf=leaf,
    )
