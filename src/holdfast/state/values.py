"""Collects everything that a state holds beside tensors, in JSON's types, read anew at every save.

Only the names in it are kept from one save to the next, as the text they become.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import nn
from torch.optim import Optimizer

from holdfast.data.planning.order import SplitList
from holdfast.errors import FormatError, UnsupportedState, UsageError
from holdfast.format import values as codec
from holdfast.state.hidden_state import inner_optimizers
from holdfast.state.objects import Objects
from holdfast.state.optimizers import NOTHING, class_of, is_tensor, of_no_parameter
from holdfast.state.tensors import DTYPE_NAMES, TORCH_DTYPES, empty, fill_small, small_tensor

#: Nesting depth of a group's options in an optimizer's values, and of its other state.
_OPTIONS_DEPTH, _STATE_DEPTH = 3, 1


class ValuesBeside(Struct, frozen=True):
    """The places where an optimizer keeps values that are no tensor; valid while its tensors do not
    change place.
    """

    optimizer: Optimizer
    groups: tuple[msgspec.Raw, ...]
    """The names of each group's parameters, as JSON."""
    titles: tuple[str, ...]
    """The name of each group: its first parameter, because ranks number groups differently."""
    state: tuple[tuple[tuple[str, ...], torch.Tensor, tuple[Any, ...]], ...]
    """(names, parameter, keys in its state that are no tensors)."""
    loose: tuple[Any, ...]
    """Keys of the state that are no parameters."""


def beside(
    optimizer: Optimizer,
    parameters: Mapping[str, torch.Tensor],
    stored: Mapping[str, Sequence[str]] | None = None,
) -> ValuesBeside:
    """Finds these places. ``stored``: the stored names of each parameter, for a fused one those of
    all its parts.

    Raises UnsupportedState for state of tensors that are in no group.
    """
    stored = {name: (name,) for name in parameters} if stored is None else stored
    names_of = {id(parameter): stored[name] for name, parameter in parameters.items()}
    members = [_once(names_of[id(p)] for p in group["params"]) for group in optimizer.param_groups]
    groups = tuple(msgspec.Raw(codec.to_bytes(names)) for names in members)
    titles = _titles(members)
    state = [
        (tuple(stored[name]), parameter, tuple([k for k, v in kept.items() if not is_tensor(v)]))
        for name, parameter in parameters.items()
        if (kept := optimizer.state.get(parameter, NOTHING))
    ]
    loose = tuple(of_no_parameter(optimizer, parameters))
    return ValuesBeside(optimizer, groups, titles, tuple(one for one in state if one[2]), loose)


def _titles(members: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns each group's first name; with its number where there is none, or two groups share
    it.
    """
    found: list[str] = []
    for number, names in enumerate(members):
        title = names[0] if names else ""
        found.append(f"{title}({number})" if not title or title in found else title)
    return tuple(found)


def _once(names: Iterable[Sequence[str]]) -> list[str]:
    """Returns all names in order, each once: several parameters may be parts of one stored leaf."""
    return list(dict.fromkeys(name for some in names for name in some))


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def _require_agreement(there: ValuesBeside) -> None:
    """Requires that parameters that are parts of one stored leaf have equal state beside
    tensors.
    """
    state = there.optimizer.state
    first: dict[str, torch.Tensor] = {}
    kinds_of = {id(parameter): kinds for _, parameter, kinds in there.state}
    for names, parameter, kinds in there.state:
        for name in names:
            other = first.setdefault(name, parameter)
            if other is parameter:
                continue
            for kind in dict.fromkeys((*kinds_of[id(other)], *kinds)):
                here, elsewhere = (state[each].get(kind, _ABSENT) for each in (parameter, other))
                if not _is_alike(here, elsewhere):
                    raise UsageError(
                        f"{kind!r} is {elsewhere!r} for one and {here!r} for another of the "
                        f"parameters that are {name} by the rules, of which there is one: do not "
                        "join parameters whose optimizer state differs",
                        leaf=name,
                    )


def _is_alike(one: Any, other: Any) -> bool:
    """True if both are stored alike; tensors in them must be the same tensor."""
    if one is other or one is _ABSENT or other is _ABSENT:
        return one is other
    first, second = (
        codec.to_bytes(codec.encode(each, "", tensor=_by_itself)) for each in (one, other)
    )
    return first == second


def _by_itself(value: Any, _: str) -> str | None:
    return str(id(value)) if isinstance(value, torch.Tensor) else None


def optimizer_values(there: ValuesBeside) -> dict[str, Any]:
    """Returns hyperparameters by group, groups by their parameters' names, and state that is no
    tensor.
    """
    optimizer = there.optimizer
    groups = [
        {"params": names, "options": {k: v for k, v in group.items() if k != "params"}}
        for names, group in zip(there.groups, optimizer.param_groups, strict=True)
    ]
    state = {
        name: {kind: optimizer.state[parameter][kind] for kind in kinds}
        for names, parameter, kinds in there.state
        for name in names
    }
    loose = {"loose": {key: optimizer.state[key] for key in there.loose}} if there.loose else {}
    return {"class": class_of(optimizer), "groups": groups, "state": state, **loose}


class Values:
    """The values of an image; ``tensor`` decides how a tensor in them is stored."""

    def __init__(self, tensor: codec.FindTensor) -> None:
        self.shared: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        self._tensor: Callable[[Any, str], Any] = tensor

    def to_bytes(self, aliases: Mapping[str, str]) -> bytes:
        """Encodes the document. Raises UnsupportedState for text that is not Unicode."""
        more = {"aliases": aliases} if aliases else {}
        return codec.to_bytes({"shared": self.shared, "own": self.own, **more})

    def add_optimizer(self, key: str, there: ValuesBeside) -> None:
        """Adds all of ``optimizer_values``. Raises UsageError when values that are merged into one
        differ.
        """
        _require_agreement(there)
        found = self.shared[key] = optimizer_values(there)
        for title, group in zip(there.titles, found["groups"], strict=True):
            path = f"{key}.groups.{title}.options"
            group["options"] = self._encode(group["options"], path, _OPTIONS_DEPTH)
        for part in [name for name in ("state", "loose") if name in found]:
            found[part] = self._encode(found[part], f"{key}.{part}", _STATE_DEPTH)

    def add_extra(self, key: str, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Adds the extra state of these parts of a module, by their names."""
        extra = {prefix: part.get_extra_state() for prefix, part in parts}
        if extra:
            self.shared[key] = self._encode(extra, key)

    def add_rest(self, objects: Objects) -> None:
        """Adds every object that is neither module nor optimizer."""
        for key, item in objects.stateful.items():
            self.shared[key] = self._encode(_state_dict_of(key, item), key)
        for key, item in objects.plain.items():
            self.shared[key] = self._encode(item, key)
        for key, generator in objects.generators.items():
            self.own[key] = codec.encode(generator.state_dict(), key)
        for key, found in objects.lists.items():
            self.own[key] = encode_list(key, found)

    def _encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Encodes ``value`` in JSON's types; its tensors become leaves of their own under their
        path.
        """
        return codec.encode(value, path, tensor=self._of_tensor, depth=depth)

    def _of_tensor(self, value: Any, where: str) -> Any:
        if isinstance(value, SplitList):
            raise UnsupportedState(
                f"{where} is a SplitList inside of another value, where it would be rank 0's on "
                "every other number of ranks: give it a key of its own in the state",
                where=where,
            )
        return self._tensor(value, where)


def _state_dict_of(key: str, item: Any) -> Any:
    """Returns what an object gives as its state.

    Raises UnsupportedState where an object that gives none holds an optimizer of torch: a
    framework's, that does not store it.
    """
    try:
        return item.state_dict()
    except Exception as error:
        held = next(iter(inner_optimizers({key: item}, ())), None)
        if held is None:
            raise
        raise UnsupportedState(
            f"{key} is a {type(item).__qualname__}, whose state_dict failed with "
            f"{type(error).__name__} ({error}), and {held.path} is a torch "
            f"{type(held.optimizer).__qualname__} that would not be stored: hand over that "
            "optimizer itself, or attach the adapter of its framework (holdfast.integrations)",
            where=key,
        ) from error


# Encodes a SplitList for storage among the values that each rank has for itself, and decodes it.
#
# Tensors among its items are stored with them, whatever their size: a leaf would be one for all
# ranks.


_KIND = "split_list"


class StoredList(NamedTuple):
    """One rank's part: its data rank, if one was given, and the encoded items."""

    data_rank: tuple[int, int] | None
    items: Sequence[Any]


def encode_list(key: str, found: SplitList) -> dict[str, Any]:
    """Encodes the list for this rank's image. UnsupportedState names what cannot be stored."""
    rank, world = found.data_rank or (None, None)
    items = codec.encode(list(found), key, tensor=_own_tensor, depth=1)
    return {"kind": _KIND, "rank": rank, "world": world, "items": items}


def stored_lists(own: Mapping[str, Any], where: str) -> dict[str, StoredList]:
    """Returns all lists in a rank's own values, by key; FormatError names the image, ``where``."""
    if not isinstance(own, Mapping):
        raise FormatError(f"{where}: what each rank has for itself is no object: {own!r:.100}")
    return {
        key: _stored(document, f"{where}: {key}")
        for key, document in own.items()
        if isinstance(document, dict) and document.get("kind") == _KIND
    }


def decode_items(items: Sequence[Any]) -> list[Any]:
    """Decodes the items; raises FormatError for one that is not an encoded value."""
    return [
        codec.decode(item, tensor=_tensor, leaf=_no_leaf, strict=True, makes_objects=True)
        for item in items
    ]


def _stored(document: Mapping[str, Any], where: str) -> StoredList:
    items, rank, world = (document.get(name) for name in ("items", "rank", "world"))
    if not isinstance(items, list):
        raise FormatError(f"{where}: a split list without a list of items")
    if rank is None and world is None:
        return StoredList(None, items)
    if type(rank) is not int or type(world) is not int or not 0 <= rank < world:
        raise FormatError(f"{where}: a split list of data rank {rank!r} of {world!r}")
    return StoredList((rank, world), items)


def _own_tensor(value: Any, where: str) -> codec.SmallTensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided
    is_plain = is_plain and not (value.is_quantized or value.is_nested)
    if not is_plain or value.device.type != "cpu" or value.dtype not in DTYPE_NAMES:
        raise UnsupportedState(
            f"{where} is a {type(value).__name__} of {value.dtype} on {value.device} in a "
            "SplitList, which holds plain tensors of the host: append tensor.detach().cpu()",
            where=where,
        )
    return small_tensor(where, value)


def _tensor(small: codec.SmallTensor) -> torch.Tensor:
    if small.dtype not in TORCH_DTYPES:
        raise FormatError(f"{small.name}: this torch has no dtype {small.dtype}")
    with torch.inference_mode(False):
        found = empty(small.shape, small.dtype)
        fill_small(found, small)
    return found


def _no_leaf(name: str) -> Any:
    raise FormatError(f"an item of a split list refers to the leaf {name!r:.100}")
