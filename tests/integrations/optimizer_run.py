"""Trains with one optimizer after the other of the libraries that are installed, in one process.

``save ROOT`` trains, saves a checkpoint of each, says what an unbroken run comes to, and kills
itself.
``load ROOT`` makes everything anew, restores, goes on, and says what it comes to.

Under torchrun the model is sharded by FSDP2, and the first rank says what all have.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its steps

import torch
import torch.distributed as dist
from torch import nn

import holdfast

WIDTH, BEFORE, AFTER = 64, 3, 7
Make = Callable[[nn.Module], Any]


def of_torch() -> Iterator[tuple[str, Make]]:
    for name, kind in sorted(vars(torch.optim).items()):
        if is_optimizer(kind) and kind is not torch.optim.Optimizer:
            yield f"torch.{name}", partial(of_suiting, kind)


def of_suiting(kind: Any, model: nn.Module) -> Any:
    return kind(suiting(kind, model), lr=1e-3)


def of_all(kind: Any, options: dict[str, Any], model: nn.Module) -> Any:
    return kind(model.parameters(), **options)


def is_optimizer(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)


def suiting(kind: type, model: nn.Module) -> list[nn.Parameter]:
    is_of_matrices = kind.__name__ == "Muon"
    return [p for p in model.parameters() if p.ndim == 2 or not is_of_matrices]


def of_torchao() -> Iterator[tuple[str, Make]]:
    import torchao.optim as library

    for name in ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"):
        kind = getattr(library, name)
        size = {} if name == "_AdamW" else {"block_size": 64}
        yield f"torchao.{name}", partial(of_all, kind, {"lr": 1e-3, **size})
    amsgrad = {"block_size": 64, "amsgrad": True}
    yield "torchao.AdamW8bit amsgrad", lambda m: library.AdamW8bit(m.parameters(), **amsgrad)


def of_bitsandbytes() -> Iterator[tuple[str, Make]]:
    import bitsandbytes.optim as library

    for name, kind in sorted(vars(library).items()):
        if is_optimizer(kind):
            options = {"lr": 1e-3, "momentum": 0.9}
            options = {k: v for k, v in options.items() if k in inspect.signature(kind).parameters}
            yield f"bitsandbytes.{name}", partial(of_all, kind, options)


def of_pytorch_optimizer() -> Iterator[tuple[str, Make]]:
    import pytorch_optimizer as library

    for name in library.get_supported_optimizers():
        kind = library.load_optimizer(name)
        yield f"pytorch_optimizer.{name}", partial(by_its_arguments, kind)
    for name in ("Lookahead", "TRAC", "OrthoGrad", "ScheduleFreeWrapper", "SAM", "GSAM", "PCGrad"):
        kind = getattr(library, name, None)
        if kind is not None:
            yield f"pytorch_optimizer.{name} around AdamW", partial(around, kind)


def by_its_arguments(kind: Any, model: nn.Module) -> Any:
    """The optimizer, made as its arguments without a default ask for."""
    given: dict[str, Any] = {"num_iterations": 100, "model": model, "total_steps": 100}
    wanted = inspect.signature(kind).parameters
    options = {name: given[name] for name in wanted if name in given}
    if "use_muon" in inspect.getsource(kind):
        groups = [
            {"params": [p for p in model.parameters() if (p.ndim == 2) is muon], "use_muon": muon}
            for muon in (True, False)
        ]
        return kind(groups, **options)
    if "model" in wanted:
        return kind(model, **{k: v for k, v in options.items() if k != "model"})
    return kind(model.parameters(), **options)


def around(kind: Any, model: nn.Module) -> Any:
    if "base_optimizer" in inspect.signature(kind).parameters:
        return kind(model.parameters(), base_optimizer=torch.optim.AdamW, lr=1e-3)
    return kind(torch.optim.AdamW(model.parameters(), lr=1e-3))


LIBRARIES: dict[str, Callable[[], Iterator[tuple[str, Make]]]] = {
    "torch": of_torch,
    "torchao": of_torchao,
    "bitsandbytes": of_bitsandbytes,
    "pytorch_optimizer": of_pytorch_optimizer,
}


def makers(libraries: list[str]) -> Iterator[tuple[str, Make]]:
    for library in libraries:
        yield from LIBRARIES[library]()


def built(make: Make) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return {"model": model, "optimizer": make(model), "rng": holdfast.Rng()}


def train(state: dict[str, Any], steps: range) -> None:
    model, optimizer = state["model"], state["optimizer"]
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(x) - x.flip(1)).square().mean()
            loss.backward(create_graph=needs_graph(optimizer))
            return loss

        closure()
        try:
            optimizer.step()
        except (TypeError, NotImplementedError, ValueError, RuntimeError):
            optimizer.step(closure)


def needs_graph(optimizer: Any) -> bool:
    return type(optimizer).__name__ in ("AdaHessian", "SophiaH")


def digest(state: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for parameter in state["model"].parameters():
        whole = parameter.full_tensor() if dist.is_initialized() else parameter
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def attempt(work: Callable[[], str]) -> str:
    try:
        return work()
    except holdfast.HoldfastError as error:
        return f"refused: {type(error).__name__}: {error}"
    except Exception as error:  # what the optimizer itself asks for is another's matter
        return f"failed: {type(error).__name__}: {error}"[:300]


def saved(make: Make, root: Path) -> str:
    try:
        train(built(make), range(1))
    except Exception as error:  # it does not train as other optimizers do
        return f"not constructed: {type(error).__name__}: {error}"[:200]
    state = built(make)
    train(state, range(BEFORE))
    holdfast.save(root, state, step=BEFORE)
    train(state, range(BEFORE, AFTER))
    return digest(state)


def loaded(make: Make, root: Path) -> str:
    state = built(make)
    holdfast.load(root, state)
    train(state, range(BEFORE, AFTER))
    return digest(state)


def main(how: str, root: Path, libraries: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    run = {"save": saved, "load": loaded}[how]
    for name, make in makers(libraries):
        there = root / name.replace(" ", "-")
        if how == "save" or there.is_dir():
            result = attempt(lambda make=make, there=there: run(make, there))  # type: ignore[misc]
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(json.dumps([name, result]), flush=True)
    if dist.is_initialized():
        dist.barrier()  # or the end of one would be that of another, which has not said all
    if how == "save":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
