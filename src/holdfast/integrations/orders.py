"""Keeps what the order of a loader's samples is drawn from: generators, and samplers' seeds.

Those of the process are torch's, Python's and numpy's. A loader's own are in its samplers, in its
data where these are a stream, and in itself.
"""

from __future__ import annotations

import base64
import ctypes
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from holdfast.errors import UsageError
from holdfast.format import values as codec
from holdfast.state.rng import numpy_state, plain_numpy_state, set_numpy_state


def order_state(loader: Any) -> dict[str, Any]:
    """Returns the states of the process's generators and of a loader's own, as plain values."""
    return {
        **packed(process_state()),
        "own": [_state_of(one) for one in _own_generators(loader)],
        "seeds": [one.initial_seed for one in _seeded(loader)],
    }


def process_state() -> dict[str, Any]:
    """Returns the states of the process's generators, as plain values."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        found["numpy"] = numpy_state()
    return found


def packed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what ``process_state`` returned with text in place of numbers and of a tensor: each
    save of an epoch has it, and text is encoded already.
    """
    version, numbers, gauss = _pack(state["python"])
    found = {"torch": text_of(state["torch"]), "python": (version, _text(numbers), gauss)}
    if "numpy" in state:
        found["numpy"] = state["numpy"]
        if isinstance(found["numpy"], tuple):
            kind, keys, *rest = found["numpy"]
            found["numpy"] = (kind, _text(keys.tobytes()), *rest)
    return found


def is_process_at(state: Mapping[str, Any]) -> bool:
    """True where the process's generators are as ``process_state`` returned them."""
    if random.getstate() != state["python"]:
        return False
    if not torch.equal(torch.get_rng_state(), state["torch"]):
        return False
    if ("numpy" in sys.modules) != ("numpy" in state):
        return False
    return "numpy" not in state or _is_numpy_at(state["numpy"])


def _is_numpy_at(state: Any) -> bool:
    if isinstance(state, tuple) and not state[3]:
        kinds: Any = sys.modules["numpy"].random
        source: Any = getattr(kinds, "get_bit_generator", lambda: None)()
        if type(source) is kinds.MT19937:
            # A number that is held back comes with a move: without one its words say all, and
            # numpy's own way to them takes a hundred times as long.
            words = state[1].tobytes() + struct.pack("=i", state[2])
            return bool(ctypes.string_at(source.ctypes.state_address, len(words)) == words)
    return bool(codec.encode(numpy_state()) == codec.encode(state))


def set_process_generators(state: Mapping[str, Any]) -> None:
    """Sets torch's, Python's and numpy's generators; earlier versions kept bytes, or numbers."""
    torch.set_rng_state(tensor_of(state["torch"]))
    random.setstate(_unpacked(state["python"]))
    if "numpy" in state and "numpy" in sys.modules:
        found = state["numpy"]
        if not isinstance(found, dict):
            kind, keys, *rest = found
            if isinstance(keys, str | bytes):
                keys = sys.modules["numpy"].frombuffer(_bytes(keys), dtype="uint32")
            found = (kind, keys, *rest)
        set_numpy_state(found)


def set_own_generators(loader: Any, state: Mapping[str, Any]) -> None:
    """Sets a loader's own generators and seeds; raises UsageError where there are others now."""
    own, seeded = list(_own_generators(loader)), list(_seeded(loader))
    counts = (len(own), len(seeded))
    saved = (len(state["own"]), len(state["seeds"]))
    if counts != saved:
        raise UsageError(
            f"a loader was saved with {saved[0]} generators and {saved[1]} seeds in its samplers, "
            f"and has {counts[0]} and {counts[1]} now: make it with the same samplers, which have "
            "their generators from the start"
        )
    for generator, found in zip(own, state["own"], strict=True):
        _set_state(generator, found)
    for sampler, seed in zip(seeded, state["seeds"], strict=True):
        sampler.initial_seed = seed


def _parts(loader: Any) -> Iterator[Any]:
    """Yields a loader, its samplers, the samplers in these, and the data where it is a stream."""
    seen: list[Any] = []
    inner = [loader, loader.sampler, loader.batch_sampler]
    if isinstance(loader.dataset, IterableDataset):
        inner.append(loader.dataset)
    while inner:
        one = inner.pop(0)
        if one is None or any(one is each for each in seen):
            continue
        seen.append(one)
        yield one
        inner += [getattr(one, "sampler", None), getattr(one, "batch_sampler", None)]


def _own_generators(loader: Any) -> Iterator[Any]:
    seen: list[Any] = []
    for part in _parts(loader):
        if hasattr(part, "initial_seed"):
            continue  # it seeds its generator at the begin of each iteration
        for _, one in sorted(getattr(part, "__dict__", {}).items()):
            if _is_generator(one) and not any(one is each for each in seen):
                seen.append(one)
                yield one


def _seeded(loader: Any) -> Iterator[Any]:
    """Yields samplers that seed their order by a number and the epoch, as accelerate's does."""
    return (one for one in _parts(loader) if hasattr(one, "initial_seed"))


def _is_generator(one: Any) -> bool:
    if isinstance(one, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(one, numpy.random.Generator | numpy.random.RandomState)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return _pack(generator.getstate())
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return plain_numpy_state(generator.get_state(legacy=False))


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(_unpacked(state))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def text_of(state: torch.Tensor) -> str:
    """Returns the state of a generator of torch as text."""
    return _text(state.numpy())


def tensor_of(state: Any) -> torch.Tensor:
    """Returns what ``text_of`` was given; earlier versions kept bytes, and the first a tensor."""
    if isinstance(state, str | bytes):
        return torch.frombuffer(bytearray(_bytes(state)), dtype=torch.uint8)
    found: torch.Tensor = state.cpu()
    return found


def _text(data: Any) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str | bytes) -> bytes:
    return base64.b64decode(text, validate=True) if isinstance(text, str) else text


def _pack(state: tuple[Any, ...]) -> tuple[Any, ...]:
    version, numbers, gauss = state
    return version, struct.pack(f"<{len(numbers)}I", *numbers), gauss


def _unpacked(state: Any) -> tuple[Any, ...]:
    """Returns a state of Python's generator; the first versions kept its numbers one by one."""
    version, numbers, gauss = state
    if isinstance(numbers, str | bytes):
        numbers = _bytes(numbers)
        numbers = struct.unpack(f"<{len(numbers) // 4}I", numbers)
    return version, tuple(numbers), gauss
