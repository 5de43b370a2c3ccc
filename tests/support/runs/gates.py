"""Copies that wait: whatever happens meanwhile happens during a capture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.capture import copier as copier_module


def capture_at_last(checkpointer: holdfast.Checkpointer, step: int) -> None:
    """Save ``step``; again, if the death of the keeper had not been noticed yet."""
    for _ in range(20):
        try:
            checkpointer.save(step).wait_captured(60)
            return
        except holdfast.SnapshotSkipped:
            continue
    raise AssertionError(f"step {step} is skipped again and again")


class Gate:
    """Holds the copies of this process while it is shut."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.reached = threading.Event()
        self._real: Callable[..., Any] = vars(copier_module)["copy_image"]
        patch.setattr(copier_module, "copy_image", self._copy)

    def _copy(self, *arguments: Any) -> Any:
        self.reached.set()
        assert self.is_open.wait(60)
        return self._real(*arguments)

    def shut(self) -> None:
        self.reached.clear()
        self.is_open.clear()
