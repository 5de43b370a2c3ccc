"""Treats the random number generators of a process as one object of the state.

Each rank has its own. On another number of ranks, a rank that was saved goes on with its own
generators. A rank that was not saved is seeded: one number is derived for each kind of generator
from the whole state of the generators of saved rank 0, and this rank's number is added to it. So
each restore of a checkpoint gives a rank the same numbers, whatever the new number of ranks; no two
new ranks get the same seed; and a later checkpoint, in which rank 0 has drawn more, gives other
numbers.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from functools import cache
from typing import Any

import torch

from holdfast.accelerator.generators import (
    accelerator_type,
    current_index,
    generator_states,
    seed_generators,
    set_generator_states,
)
from holdfast.errors import StateMismatch
from holdfast.format import values as codec
from holdfast.format.checksum import checksum

#: Generators get different seeds, because two of one algorithm would otherwise draw the same
#: numbers. An accelerator's are known by its type.
_KINDS = ("python", "numpy", "torch", "cuda")
#: Follows the type in the key of the index of the device that was in use.
_IN_USE = "_device"


class Rng:
    """Python's, numpy's (where loaded) and torch's generators, on the CPU and every accelerator in
    use.

    Each rank of a run has its own. On another number of ranks, one that was saved goes on with its
    own; a new one is seeded from those of saved rank 0 and its own number, the same at every
    restore of a checkpoint and different for every rank.
    """

    loads = 0
    """The number of times the generators were set through this object."""

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states as plain values."""
        state: dict[str, Any] = {
            "python": python_state(),
            "torch": bytes(torch.get_rng_state().numpy()),
        }
        if "numpy" in sys.modules:
            state["numpy"] = numpy_state()
        if found := generator_states():
            kind = accelerator_type()
            state[kind] = [bytes(one.numpy()) for one in found]
            state[kind + _IN_USE] = current_index()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to these states.

        ``state``: what ``state_dict`` gave.

        The device in use gets the state of the device that was in use, whichever of the host's
        they are. What was saved of a device of another type is left out.
        """
        self.loads += 1
        random.setstate(state["python"])
        torch.set_rng_state(_byte_tensor(state["torch"]))
        if "numpy" in state:
            set_numpy_state(state["numpy"])
        kind = accelerator_type()
        saved = [_byte_tensor(one) for one in state.get(kind, ())]
        set_generator_states(saved, state.get(kind + _IN_USE))

    def derive(self, state: dict[str, Any], rank: int) -> None:
        """Seed the generators for a rank that was not saved, from the state of one that was."""
        self.loads += 1
        seeds = seeds_of(state, rank)
        random.seed(seeds["python"])
        torch.default_generator.manual_seed(seeds["torch"])
        if kind := accelerator_type():
            seed_generators(seeds[kind])
        if "numpy" in sys.modules:
            source = sys.modules["numpy"].random
            source.seed(seeds["numpy"])
            if not isinstance(now := numpy_state(), tuple):
                # Of these, a seed leaves the number that is held back for the next call.
                source.set_state({**now, "has_gauss": 0, "gauss": 0.0})


# ── states, which are made anew only where the memory of a generator has changed ─────────────────
#
# Python's and numpy's are 625 numbers, each of them an object on the way out: 30 and 60 us where
# the caches are cold, against 1 us to compare their memory. Whether all of a state lies in what is
# compared is tried once in each process, and where it does not, a state is asked for each time.

#: By the kind of a generator, its memory and its state at the last look.
_SEEN: dict[str, tuple[Any, Any]] = {}


def python_state() -> tuple[Any, ...]:
    """Returns the state of Python's generator, as ``random.getstate`` does."""
    source = getattr(random.getstate, "__self__", None)
    if type(source) is not random.Random or not _python_shows_its_state():
        return random.getstate()
    now = _memory(source), source.gauss_next
    before = _SEEN.get("python")
    if before is None or before[0] != now:
        before = _SEEN["python"] = now, random.getstate()
    found: tuple[Any, ...] = before[1]
    return found


def numpy_state() -> Any:
    """Returns the state of numpy's generator as plain values: a tuple of MT19937, which it has from
    the start, and a dict of one that ``numpy.random.set_bit_generator`` was given.
    """
    get_state = sys.modules["numpy"].random.get_state
    now = _memory_of_numpy(getattr(get_state, "__self__", None))
    before = _SEEN.get("numpy")
    if now is None or before is None or before[0] != now:
        before = _SEEN["numpy"] = now, plain_numpy_state(get_state(legacy=False))
    return before[1]


def plain_numpy_state(state: dict[str, Any]) -> Any:
    """Returns a state that numpy gave as a dict as plain values, as ``numpy_state`` does."""
    plain = {**state, "has_gauss": int(state["has_gauss"]), "gauss": float(state["gauss"])}
    if state["bit_generator"] != "MT19937":
        return plain
    keys = state["state"]["key"]
    keys.flags.writeable = False  # one array for all who ask until the generator has moved
    return "MT19937", keys, int(state["state"]["pos"]), plain["has_gauss"], plain["gauss"]


def set_numpy_state(state: Any) -> None:
    """Sets numpy's generator to what ``numpy_state`` returned.

    Raises StateMismatch where numpy has a generator of another kind.
    """
    import numpy as np

    saved = state["bit_generator"] if isinstance(state, dict) else state[0]
    now = np.random.get_state(legacy=False)["bit_generator"]
    if saved != now:
        raise StateMismatch(
            f"numpy's generator was a {saved} when it was saved, now it is a {now}: call "
            f"numpy.random.set_bit_generator(numpy.random.{saved}()) before the restore"
        )
    np.random.set_state(state)


def _memory(source: Any) -> bytes:
    """Returns the memory of an object behind its head, which counts references."""
    head = object.__basicsize__
    return ctypes.string_at(id(source) + head, type(source).__basicsize__ - head)


def _memory_of_numpy(source: Any) -> Any:
    """Returns the memory of numpy's generator and of its words; None where that may not be all."""
    kinds = sys.modules["numpy"].random
    words = getattr(source, "_bit_generator", None)
    if type(source) is not kinds.RandomState or type(words) is not kinds.MT19937:
        return None
    if not _numpy_shows_its_state():
        return None
    return _memory(source), ctypes.string_at(words.ctypes.state_address, 625 * 4)


@cache
def _python_shows_its_state() -> bool:
    """True where the memory of a generator of Python has its words and its place among them."""
    if sys.implementation.name != "cpython":
        return False  # elsewhere an id may be no address
    one = random.Random(5)
    version, words, gauss = one.getstate()
    at_600, at_601 = [(version, (*words[:-1], place), gauss) for place in (600, 601)]
    seen = []
    for state in (at_600, at_601, at_600):
        one.setstate(state)
        seen.append(_memory(one))
    has_words = struct.pack("=624I", *words[:-1]) in seen[0]
    return has_words and seen[0] == seen[2] and _differ_by_one(seen[0], seen[1])


@cache
def _numpy_shows_its_state() -> bool:
    """True where its memory has the number that is held back and whether there is one, and that of
    its words is these and the place among them.
    """
    np = sys.modules["numpy"]
    if sys.implementation.name != "cpython":
        return False
    words = np.random.MT19937(5)
    one = np.random.RandomState(words)
    keys, seen = words.state["state"]["key"], []
    for has_gauss, gauss in ((1, 0.7), (0, 0.7), (1, 0.9), (1, 0.7)):
        one.set_state(("MT19937", keys, 600, has_gauss, gauss))
        seen.append(_memory(one))
    at = ctypes.string_at(words.ctypes.state_address, 625 * 4)
    return (
        at == keys.tobytes() + struct.pack("=i", 600)
        and all(struct.pack("=d", gauss) in seen[n] for n, gauss in ((0, 0.7), (2, 0.9)))
        and seen[0] == seen[3]
        and _differ_by_one(seen[0], seen[1])
    )


def _differ_by_one(one: bytes, other: bytes) -> bool:
    return sum(a != b for a, b in zip(one, other, strict=True)) == 1


def seeds_of(state: dict[str, Any], rank: int) -> dict[str, int]:
    """Returns the seeds, 32 bits each, of a rank that was not saved, from the state of one that
    was.

    numpy takes no more, and torch's generator on the CPU uses no more. A sum, and not a hash of the
    rank, so that 2**32 ranks are told apart for certain.
    """
    said = codec.to_bytes(codec.encode(state))
    kinds = {*_KINDS, accelerator_type()} - {""}
    return {kind: (checksum(f"{kind} ".encode() + said) + rank) & 0xFFFFFFFF for kind in kinds}


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
