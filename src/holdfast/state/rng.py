"""The random number generators of a process as one object of the state.

Each rank has its own. On another number of ranks, a rank that did not exist before gets a
generator seeded from the state of saved rank 0 and its own number: a stated rule, the same at
every restore, and no two ranks draw the same numbers.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from holdfast.format.checksum import checksum


class Rng:
    """Python's, numpy's (where loaded) and torch's generators, on the CPU and every GPU in use."""

    def state_dict(self) -> dict[str, Any]:
        """The generators' states as plain values."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "torch": bytes(torch.get_rng_state().numpy()),
        }
        if "numpy" in sys.modules:
            kind, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
            state["numpy"] = (kind, keys, int(position), int(has_gauss), float(gauss))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [bytes(s.numpy()) for s in torch.cuda.get_rng_state_all()]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators as they were."""
        random.setstate(state["python"])
        torch.set_rng_state(_byte_tensor(state["torch"]))
        if "numpy" in state:
            import numpy as np

            np.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_byte_tensor(saved), device)

    def derive(self, state: dict[str, Any], rank: int) -> None:
        """Seed the generators for a rank that was not saved, from the state of one that was."""
        seed = checksum(bytes(state["torch"]) + rank.to_bytes(8, "little")) >> 1
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
