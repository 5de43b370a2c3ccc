"""Restores with thousands of leaves wait for no garbage collection, which would go through all that
torch imported.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import holdfast


class Crowd:
    """An object of the state that makes many others while it loads."""

    def __init__(self) -> None:
        self.made: list[list[int]] = []
        self.collections: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"count": 7}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        gc.callbacks.append(self.note)
        try:
            self.made = [[] for _ in range(20 * gc.get_threshold()[0])]
        finally:
            gc.callbacks.remove(self.note)

    def note(self, phase: str, _: dict[str, int]) -> None:
        self.collections.append(phase)


@pytest.mark.promise
def test_no_garbage_is_collected_while_a_state_is_restored(tmp_path: Path) -> None:
    state = {"crowd": Crowd()}
    state["crowd"].load_state_dict({})
    assert state["crowd"].collections, "it makes enough"
    state["crowd"].collections.clear()
    holdfast.save(tmp_path, state)
    holdfast.load(tmp_path, state)
    assert state["crowd"].made and not state["crowd"].collections
    assert gc.isenabled()
