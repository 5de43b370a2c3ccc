"""Makes states of ``holdfast.Rng`` of the random states that the Trainer and Accelerate write.

Both keep Python's, numpy's and torch's generators of each rank, and those of its devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast.errors import UnsupportedState
from holdfast.format import values as codec
from holdfast.interop.arrange import Unfit, array_of
from holdfast.interop.pickle_records import NumpyArray
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.state_files import Gathered, sorted_ranks, value_in, whole_bytes

#: The key of the state that they are.
RNG = "rng"
_FILE = re.compile(r"(?:rng_state|random_states)_([0-9]{1,6})\.(?:pth|pkl)")
_ALONE = "rng_state.pth"
#: The state of one generator has some thousand bytes.
_MAX_BYTES = 1 << 20
#: Devices whose generators are kept under their name.
_DEVICES = ("cuda", "npu", "hpu", "mlu", "musa", "xpu", "sdaa", "neuron")
_COUNT = 625


def is_random_states(name: str) -> bool:
    """True for the file of the random states of a rank."""
    return name == _ALONE or _FILE.fullmatch(name) is not None


def take_random_states(files: SourceFiles, names: list[str], gathered: Gathered) -> None:
    """Add the random states of all ranks; note them where they are not those of each rank."""
    ranks = sorted_ranks(names, _FILE) or [(0, _ALONE)] * (_ALONE in names)
    if not ranks:
        return
    numbers = [rank for rank, _ in ranks]
    if numbers != list(range(len(ranks))):
        gathered.notes.append(
            f"random states of the ranks {', '.join(map(str, numbers[:20]))} are there and not of "
            "those between: they are left out"
        )
        return
    try:
        gathered.own = [{RNG: _encoded(files, name, gathered.notes)} for _, name in ranks]
    except (Unfit, UnsupportedState) as error:
        gathered.notes.append(f"random states are left out: {error}")


def _encoded(files: SourceFiles, name: str, notes: list[str]) -> Any:
    value = value_in(files, name)
    where = files.where(name)
    if not isinstance(value, dict):
        raise Unfit(f"{where} holds no states of generators")
    state: dict[str, Any] = {
        "python": _python(_first(value, "python", "random_state"), where),
        "torch": _bytes(files, _first(value, "cpu", "torch_manual_seed"), where),
        "numpy": _numpy(_first(value, "numpy", "numpy_random_seed"), where),
    }
    for kind in _DEVICES:
        found = _first(value, kind, f"torch_{kind}_manual_seed")
        if isinstance(found, (list, tuple)):
            state[kind] = [_bytes(files, one, where) for one in found]
        elif found is not None:  # of the device in use alone
            state[kind] = [_bytes(files, found, where)]
            state[f"{kind}_device"] = 0
    for kind in ("xla", "xm_seed"):
        if kind in value:
            notes.append(f"{where}: the generator of XLA is left out")
    return codec.encode(state, RNG)


def _first(value: Mapping[Any, Any], *keys: str) -> Any:
    return next((value[key] for key in keys if key in value), None)


def _python(value: Any, where: str) -> Any:
    is_known = (
        isinstance(value, tuple)
        and len(value) == 3
        and value[0] == 3
        and isinstance(value[1], tuple)
        and len(value[1]) == _COUNT
        and all(type(one) is int and 0 <= one < 1 << 32 for one in value[1])
        and (value[2] is None or type(value[2]) is float)
    )
    if not is_known:
        raise Unfit(f"{where} has no state of Python's generator")
    return value


def _numpy(value: Any, where: str) -> Any:
    if isinstance(value, dict):  # as newer ones write it, for readers of plain types
        inner = value.get("state")
        parts = inner if isinstance(inner, dict) else {}
        value = (
            value.get("bit_generator"),
            parts.get("key"),
            parts.get("pos"),
            value.get("has_gauss"),
            value.get("gauss"),
        )
    if not isinstance(value, (tuple, list)) or len(value) != 5 or value[0] != "MT19937":
        raise Unfit(f"{where} has no state of numpy's generator")
    kind, keys, position, has_gauss, gauss = value
    if not isinstance(keys, NumpyArray):
        raise Unfit(f"{where} has no state of numpy's generator")
    array = array_of(keys, where)
    numbers = (position, has_gauss, gauss)
    if array.shape != (_COUNT - 1,) or any(type(one) not in (int, float) for one in numbers):
        raise Unfit(f"{where} has no state of numpy's generator")
    return kind, array, int(position), int(has_gauss), float(gauss)


def _bytes(files: SourceFiles, leaf: Any, where: str) -> bytes:
    found = whole_bytes(files, leaf, _MAX_BYTES)
    if found is None:
        raise Unfit(f"{where} has no state of torch's generator")
    return found
