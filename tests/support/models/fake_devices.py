"""Stands in for the streams of a device in the seam, where a test only wants to know who asked."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

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
        "wait_event": lambda stream, event: stream.wait_event(event),
        "await_event": lambda event: event.synchronize(),
        **replaced,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(devices, name, fake)


class Elsewhere(torch.Tensor):
    """A tensor on a device without streams, as far as its maker tells; its bytes are on the
    host.
    """

    there: torch.Tensor

    @staticmethod
    def __new__(cls, there: torch.Tensor) -> Elsewhere:
        device = torch.device("xla", 0)
        made = torch.Tensor._make_wrapper_subclass(
            cls, there.shape, strides=there.stride(), dtype=there.dtype, device=device
        )
        made.there = there
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func is torch.ops.aten._to_copy.default:
            return args[0].there.clone()  # type: ignore[no-any-return]
        if func is torch.ops.aten.detach.default:
            return Elsewhere(args[0].there)
        raise NotImplementedError(f"{func} of a tensor that is elsewhere")
