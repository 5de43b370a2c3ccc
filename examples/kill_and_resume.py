"""Kill a training process with SIGKILL, start it again, and compare it with one never killed.

python examples/kill_and_resume.py"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader

import holdfast


def train(root: str) -> None:
    """Three epochs of 20 steps, with dropout: nothing in it knows of the kill."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = holdfast.ResumableSampler(pairs := torch.rand(640, 2), batch_size=32)
    loader = DataLoader(pairs, batch_sampler=sampler, generator=sampler.generator)
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.Rng(), "data": sampler}
    with holdfast.Checkpointer(root, state, storage=None) as ckpt:  # in memory only
        restored = ckpt.restore()
        print(f"resumed after step {restored.step} from {restored.source}" if restored else "new")
        batches = (batch for _ in range(sampler.epoch, 3) for batch in loader)
        for step, numbers in enumerate(batches, restored.step + 1 if restored else 0):
            (loss := (model(numbers).squeeze(1) - numbers.prod(dim=1)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance()  # this batch was trained on
            ckpt.step(step)
            print(f"step {step}: loss {loss.item():.17g}", flush=True)


def start(root: str) -> subprocess.Popen[str]:
    """A process of its own that trains."""
    return subprocess.Popen([sys.executable, __file__, root], stdout=subprocess.PIPE, text=True)


def main(root: str) -> None:
    """One run that nothing happens to, and one that is killed after a random step."""
    whole = start(f"{root}/whole").communicate()[0].splitlines()
    victim, last = start(f"{root}/killed"), random.randrange(10, 50)
    for line in victim.stdout or ():
        if line.startswith(f"step {last}:"):
            victim.kill()
    print(f"killed after step {last}: exit code {victim.wait()}")
    first, *losses = start(f"{root}/killed").communicate()[0].splitlines()
    is_same = losses == whole[-len(losses) :]
    print(f"{first}; {len(losses)} losses, {'identical' if is_same else 'DIFFERENT'}; {losses[-1]}")


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main(tempfile.mkdtemp())
