"""A clock that no busy machine changes: it counts instructions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from support.project.code_blocks import PROJECT


class Instructions:
    """A clock that counts the instructions of holdfast that are executed: the same at every run."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        return self.count

    @contextmanager
    def running(self) -> Iterator[None]:
        sources = str(PROJECT / "src")

        def each(frame: FrameType, event: str, _: object) -> Any:
            self.count += event == "opcode"
            return each

        def enter(frame: FrameType, event: str, _: object) -> Any:
            if not frame.f_code.co_filename.startswith(sources):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return each

        before = sys.gettrace()
        sys.settrace(enter)
        try:
            yield
        finally:
            sys.settrace(before)
