"""Treats the random number generators of a process as one object of the state.

Each rank has its own. On another number of ranks, a rank that was saved goes on with its own
generators. A rank that was not saved is seeded: one number is derived for each kind of generator
from the whole state of the generators of saved rank 0, and this rank's number is added to it. So
each restore of a checkpoint gives a rank the same numbers, whatever the new number of ranks; no two
new ranks get the same seed; and a later checkpoint, in which rank 0 has drawn more, gives other
numbers.
"""

from __future__ import annotations

import random
import sys
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
            "python": random.getstate(),
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


# ── states as plain values ───────────────────────────────────────────────────────────────────────


def numpy_state() -> Any:
    """Returns the state of numpy's generator as plain values: a tuple of MT19937, which it has from
    the start, and a dict of one that ``numpy.random.set_bit_generator`` was given.
    """
    return plain_numpy_state(sys.modules["numpy"].random.get_state(legacy=False))


def plain_numpy_state(state: dict[str, Any]) -> Any:
    """Returns a state that numpy gave as a dict as plain values, as ``numpy_state`` does."""
    plain = {**state, "has_gauss": int(state["has_gauss"]), "gauss": float(state["gauss"])}
    if state["bit_generator"] != "MT19937":
        return plain
    return (
        "MT19937",
        state["state"]["key"],
        int(state["state"]["pos"]),
        plain["has_gauss"],
        plain["gauss"],
    )


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
