"""Train a small network; start the script again, and it goes on where it was.

python examples/minimal.py runs/minimal     # end it with kill -9, and start it again
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import holdfast

STEPS = 100


def main(root: str) -> None:
    """Learn to multiply two numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.Rng(), "examples": 0}

    # In memory after every step, in a process that outlives this one; on disk after every 50.
    ckpt = holdfast.Checkpointer(root, state, storage=holdfast.Every(steps=50))
    restored = ckpt.restore()
    if restored:
        print(f"resumed after step {restored.step} from {restored.source}", flush=True)

    for step in range(restored.step + 1 if restored else 0, STEPS):
        numbers = torch.rand(32, 2)  # the generator is part of the state
        loss = (model(numbers).squeeze(1) - numbers.prod(dim=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["examples"] += len(numbers)
        ckpt.step(step)
        if (step + 1) % 10 == 0:
            print(f"step {step}: loss {loss.item():.9f}", flush=True)
        time.sleep(0.02)  # a larger model would take this long, and you have to hit it

    ckpt.close()
    print(f"done after {state['examples']} examples")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/minimal")
