"""Verified bytes on their way to tensors that the host cannot fill as they lie.

Tensors on a GPU are filled by copies on a side stream, out of a bounded amount of pinned memory,
while the next bytes are read; so is, on the CPU, what is stored in another form than it is shown
(conjugated or negated views). Host memory does not grow with the state.

The order of copies is what makes this safe: a side stream begins behind all that the caller's
stream was given before; memory is lent again only when the copies out of it are done; and the
caller's stream goes on behind the last copy.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from holdfast.geometry.box import Box
from holdfast.load.plan import BATCH_BYTES

Array = np.ndarray[Any, Any]


class Copies(Protocol):
    """Copies that are made in the order they are asked for, maybe later: the seam to a device."""

    def begin(self) -> None:
        """Before the first copy, on the thread whose work the tensors are part of."""
        ...

    def memory(self, size_bytes: int) -> torch.Tensor:
        """Bytes on the host that can be copied from while the host goes on."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Fill ``to``, of the same shape; ``source`` is read until a later mark.

        Where their dtypes differ it is converted.
        """
        ...

    def mark(self) -> Callable[[], None]:
        """What to call to wait until all copies asked for so far are done."""
        ...

    def end(self) -> None:
        """Wait for all copies; what that thread asks of its devices next comes after them."""
        ...


class StreamCopies:
    """Copies on a side stream of each GPU; those between tensors of the host are made at once."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self) -> None:
        for device in self._devices:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=bool(self._devices))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if to.device not in self._streams:
            to.copy_(source)
            return
        with torch.cuda.stream(self._streams[to.device]):
            if to.dtype != source.dtype:  # converted there, out of memory of this stream's own
                source = source.to(to.device, non_blocking=True)
            to.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        events = [stream.record_event() for stream in self._streams.values()]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def end(self) -> None:
        for device, stream in self._streams.items():
            stream.synchronize()  # a copy that failed is heard of here
            torch.cuda.current_stream(device).wait_stream(stream)


class LateTensor:
    """A tensor as a destination (``holdfast.load.move.Late``).

    ``stored``: what it is converted from, where that is another dtype.
    """

    def __init__(
        self, tensor: torch.Tensor, copies: Copies, stored: torch.dtype | None = None
    ) -> None:
        self._tensor, self._copies = tensor, copies
        self._dtype = stored or tensor.dtype
        is_as_it_lies = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        self.is_flat = is_as_it_lies and stored in (None, tensor.dtype)

    def take(self, at: int, data: memoryview) -> None:
        """See ``Late``."""
        to = self._tensor.reshape(-1).view(torch.uint8)[at : at + len(data)]
        self._copies.copy(to, torch.from_numpy(np.frombuffer(data, np.uint8)))

    def take_box(self, box: Box, data: Array) -> None:
        """See ``Late``."""
        to = self._tensor[box.slices()] if box.ndim else self._tensor
        self._copies.copy(to, torch.from_numpy(data).view(self._dtype))


class _Lent(NamedTuple):
    memory: torch.Tensor | None
    wait: Callable[[], None]


class Staging:
    """A bounded amount of memory, lent in parts: each again only when its copies are done."""

    def __init__(self, copies: Copies, size_bytes: int, part_bytes: int | None = None) -> None:
        self._copies = copies
        self._part_bytes = part_bytes or BATCH_BYTES
        self._free: queue.SimpleQueue[_Lent] = queue.SimpleQueue()
        for _ in range(max(2, size_bytes // self._part_bytes)):
            self._free.put(_Lent(None, _nothing))

    @contextmanager
    def lend(self, size_bytes: int) -> Iterator[memoryview]:
        """Memory of this size, to be copied from until it is lent again."""
        memory, wait = self._free.get()
        try:
            wait()
            wait = _nothing
            if memory is None or memory.nbytes < size_bytes:
                memory = self._copies.memory(max(size_bytes, self._part_bytes))
            yield memory.numpy().data[:size_bytes]
            wait = self._copies.mark()
        except BaseException:
            memory = None  # copies may be under way out of it: it is not lent again
            raise
        finally:
            self._free.put(_Lent(memory, wait))  # whatever happened: others wait for a part


def _nothing() -> None:
    """There is nothing to wait for."""
