"""Stands in for the streams of a device in the seam, where a test only wants to know who asked."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from holdfast.accelerator import devices


def fake_streams(monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> None:
    """Have every device but the host's count as one with streams that are entered for nothing.

    ``replaced``: functions of the seam by name.
    """
    fakes = {
        "is_streamed": lambda device: device.type not in ("cpu", "meta"),
        "use_stream": lambda _: nullcontext(),
        "use_device": lambda _: nullcontext(),
        "record_event": lambda stream: stream.record_event(),
        **replaced,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(devices, name, fake)
