"""What the demo learns: the source text of the interpreter's own standard library, as bytes.

A batch is a function of its step and nothing else, so that a run that fell back, or goes on with
another number of ranks, sees the same text again.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

#: Divisible by 1, 2, 3 and 4: every number of data ranks has an equal share.
SEQUENCES = 12
#: Bytes a sequence predicts.
CONTEXT = 128
MOST_BYTES = 4 << 20


def corpus() -> torch.Tensor:
    """Up to 4 MiB of Python, always the same for one installation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:MOST_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(
    text: torch.Tensor, step: int, rank: int, world: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and the bytes after them: the share of data rank ``rank`` in ``step``.

    Both int64 of shape (SEQUENCES / world, CONTEXT).
    """
    chosen = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - CONTEXT - 1, (SEQUENCES,), generator=chosen)
    share = SEQUENCES // world
    mine = starts[rank * share : (rank + 1) * share]
    windows = mine[:, None] + torch.arange(CONTEXT + 1)
    found = text[windows].long()
    return found[:, :-1], found[:, 1:]
