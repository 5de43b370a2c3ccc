"""What the scripts of this folder share: their arguments, what they write down, where they die.

A script is started as SCRIPT ROOT STEP PLACE [OPTIONS AS JSON] and kills itself once, at PLACE of
STEP. The option ``loses`` names what is neither saved nor restored, as by an adapter that has
forgotten it: a key of the state, or ``key/name``, a value in what the object under a key gives;
``loser`` is the only rank that does.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import holdfast

ROOT, STEP, PLACE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
OPTIONS: dict[str, Any] = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
RANK = int(os.environ.get("RANK", "0"))


def note(line: str, who: str = f"{RANK}: ") -> None:
    with Path(f"{ROOT}.log").open("a") as file:
        file.write(f"{who}{line}\n")


def pass_by(place: str, step: int) -> None:
    died = Path(f"{ROOT}.died")
    if (place, step, RANK) == (PLACE, STEP, OPTIONS.get("who", 0)) and not died.exists():
        died.touch()
        os.kill(os.getpid(), OPTIONS.get("signal", signal.SIGKILL))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def moments(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield from (one for _, one in sorted(optimizer.state[parameter].items()))


# ── what is lost ─────────────────────────────────────────────────────────────────────────────────


class Without:
    """An object that keeps what it has under some names, whatever is restored."""

    def __init__(self, inner: Any, names: list[str]) -> None:
        self._inner, self._names = inner, names

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._inner.state_dict()
        return found

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(_left(self._names, found, self._inner.state_dict()))


def _left(names: list[str], found: Any, own: Any) -> Any:
    """Returns ``found`` with the value at a path as it is in ``own``."""
    name, *others = names
    if isinstance(found, list):
        return [_left(names, one, mine) for one, mine in zip(found, own, strict=True)]
    assert name in found, f"{name} is not kept anyway"
    return {**found, name: _left(others, found[name], own[name]) if others else own[name]}


def _lose(state: Any, what: str) -> None:
    """Takes a key out of the state, or a value out of what its object takes back."""
    key, *names = what.split("/")
    if not names:
        assert state.pop(key, None) is not None, f"{key} is not kept anyway"
    elif not isinstance(state[key], Without):
        state[key] = Without(state[key], names)


def _forget(what: str) -> None:
    """Makes every Checkpointer of this process forget ``what``."""

    def forgetful(original: Any) -> Any:
        def call(self: Any, *given: Any, **named: Any) -> Any:
            if what.split("/")[0] in self.state:  # some adapters add their keys later
                _lose(self.state, what)
            return original(self, *given, **named)

        return call

    for name in ("restore", "step"):
        setattr(holdfast.Checkpointer, name, forgetful(getattr(holdfast.Checkpointer, name)))


if "loses" in OPTIONS and OPTIONS.get("loser", RANK) == RANK:
    _forget(OPTIONS["loses"])
