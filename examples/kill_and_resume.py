"""Kill a training process with SIGKILL, start it again, and compare it with one never killed.

python examples/kill_and_resume.py
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile

import torch
from torch import nn

import holdfast

STEPS = 60


def train(root: str) -> None:
    """What the killed process does: nothing in it knows of the kill."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.Rng()}
    with holdfast.Checkpointer(root, state, storage=None) as ckpt:  # in memory only
        restored = ckpt.restore()
        print(f"resumed after step {restored.step} from {restored.source}" if restored else "new")
        for step in range(restored.step + 1 if restored else 0, STEPS):
            numbers = torch.rand(32, 2)
            loss = (model(numbers).squeeze(1) - numbers.prod(dim=1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
            print(f"step {step}: loss {loss.item():.17g}", flush=True)


def start(root: str) -> subprocess.Popen[str]:
    """A process of its own that trains."""
    return subprocess.Popen([sys.executable, __file__, root], stdout=subprocess.PIPE, text=True)


def main(root: str) -> None:
    """One run that nothing happens to, and one that is killed after a random step."""
    whole = start(f"{root}/whole").communicate()[0].splitlines()
    victim, last = start(f"{root}/killed"), random.randrange(10, STEPS - 10)
    for line in victim.stdout or ():
        if line.startswith(f"step {last}:"):
            victim.kill()
    print(f"killed after step {last}: exit code {victim.wait()}")
    first, *losses = start(f"{root}/killed").communicate()[0].splitlines()
    same = "identical" if losses == whole[-len(losses) :] else "DIFFERENT"
    print(f"{first}; {len(losses)} losses, {same}; {losses[-1]}")


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main(tempfile.mkdtemp())
