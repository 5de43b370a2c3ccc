"""Asks torch for the streams, events and memory of any accelerator.

torch keeps what ``with stream:`` has to restore in the stream itself, so that two threads that
enter one are left on each other's; ``use_stream`` sets and restores it by thread. The host reads
memory by address only through ``host_address``, which refuses a device's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from holdfast.accelerator.vendors import UNKNOWN, vendor_of
from holdfast.events import warn

#: Device types whose tensors are host memory, or have none.
_HOST_TYPES = ("cpu", "meta")
_has_streams: dict[str, bool] = {}
_refused: list[str] = []
"""What was said of pinned memory that could not be allocated: once."""
_NODES, _PCI = Path("/sys/devices/system/node"), Path("/sys/bus/pci/devices")

#: The address of a tensor's first element, to tell memory apart; never to be read from.
memory_key = torch.Tensor.data_ptr


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's memory is an accelerator's: the host must not read it by
    address.
    """
    return tensor.device.type not in _HOST_TYPES


def storage_key(tensor: torch.Tensor) -> int:
    """Return the address of the storage that a tensor is a view of, to tell memory apart; never to
    be read from.
    """
    return tensor.untyped_storage().data_ptr()


def host_address(tensor: torch.Tensor) -> int:
    """Return the address of a host tensor's first element, for the host to read or write.

    Raises RuntimeError for a tensor of any other device.
    """
    if not tensor.is_cpu:
        raise RuntimeError(f"the memory of a tensor on {tensor.device} has no address on the host")
    return tensor.data_ptr()


def is_shared_or_pinned(tensor: torch.Tensor) -> bool:
    """Return True for host memory that other processes have too, or that a device copies from
    directly: new memory would be neither.
    """
    return tensor.is_cpu and (tensor.is_shared() or tensor.is_pinned())


def is_streamed(device: torch.device) -> bool:
    """Return True if ``device`` has streams and events, so that copies run beside its work.

    Anything else is copied by the host, one tensor after the other, while updates are held.
    """
    if device.type in _HOST_TYPES:
        return False
    if device.type not in _has_streams:
        _has_streams[device.type] = _probe(device)
    return _has_streams[device.type]


def _probe(device: torch.device) -> bool:
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != device.type:
        return False
    try:
        with work_beside([device]):  # the first to ask may be a step that is being captured
            torch.Stream(device).record_event()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def streamed_devices(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Return the devices with streams that these tensors are on."""
    return {device for device in {one.device for one in tensors} if is_streamed(device)}


def use_device(device: torch.device) -> AbstractContextManager[None]:
    """Make ``device`` this thread's current one; no other device gets a context from it."""
    if device.type in _HOST_TYPES:
        return nullcontext()
    index: AbstractContextManager[None] = torch.accelerator.device_index(device.index)
    return index


def make_stream(device: torch.device) -> torch.Stream:
    """Return a new stream of ``device``."""
    with use_device(device):
        return torch.Stream(device)


def make_own_stream(device: torch.device) -> torch.Stream:
    """Return a new stream that torch lends to nobody else, where the device has such.

    Of those in torch's pool the 33rd is the first again: a program may capture a graph on it.
    """
    with use_device(device):
        return vendor_of(device).make_own_stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return this thread's current stream of ``device``."""
    return torch.accelerator.current_stream(device)


@contextmanager
def use_stream(stream: torch.Stream) -> Iterator[None]:
    """Enqueue this thread's work on ``stream``, whose device becomes the current one."""
    with use_device(stream.device):
        before = torch.accelerator.current_stream(stream.device)
        try:  # around the next line, too: an interrupt may come right behind it
            torch.accelerator.set_stream(stream)
            yield
        finally:
            torch.accelerator.set_stream(before)


def record_event(stream: torch.Stream, event: torch.Event | None = None) -> torch.Event:
    """Return an event behind the work enqueued on ``stream``; the host waits for it asleep where
    the device can do that.

    ``event``: one of this device that nobody waits for any more, to be recorded again.
    """
    with use_device(stream.device):
        return vendor_of(stream.device).record_event(stream, event)


def wait_event(stream: torch.Stream, event: torch.Event) -> None:
    """Let all that is enqueued on ``stream`` from now on begin behind ``event``."""
    with use_device(stream.device):
        vendor_of(stream.device).wait_event(stream, event)


def empty_pinned(size_bytes: int) -> torch.Tensor:
    """Return bytes of host memory that the accelerator copies by itself; where its driver pins no
    more, memory that it copies slowly.
    """
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        if not _refused:
            _refused.append(
                "no pinned memory could be allocated for copies to or from the device "
                f"({error}): they will be slow"
            )
            warn(_refused[0])
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory that a copy of ``tensor`` lands in: it is enqueued on the current stream
    of a device that has streams, else done.
    """
    if not is_streamed(tensor.device):
        return tensor.cpu()
    there = empty_pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return there.copy_(tensor, non_blocking=True)


def copy_to_host(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Enqueue copies of bytes on one device to pinned memory, on the current stream, in one call
    where the device can do that.
    """
    if sources:
        vendor_of(sources[0].device).copy_to_host(places, sources)


class EventPool:
    """Events that are recorded again and again, since making one is a call of the driver."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[torch.Event]] = {}

    def record(self, stream: torch.Stream) -> torch.Event:
        """Return an event as ``record_event`` does, until it is given back."""
        try:
            event = self._free.setdefault(stream.device, []).pop()
        except IndexError:
            return record_event(stream)
        return record_event(stream, event)

    def give_back(self, events: Iterable[torch.Event]) -> None:
        """Take back events that nobody waits for any more."""
        for event in events:
            self._free.setdefault(event.device, []).append(event)


def computation_so_far(devices: Iterable[torch.device]) -> dict[torch.device, torch.Event]:
    """Return an event behind everything enqueued on the current stream of each device."""
    return {device: record_event(current_stream(device)) for device in devices}


def is_capturing(device: torch.device) -> bool:
    """Return True if this thread's current stream of ``device`` records its work into a graph."""
    return is_streamed(device) and vendor_of(device).is_capturing(current_stream(device))


@contextmanager
def relax_capture(device: torch.device) -> Iterator[None]:
    """Keep this thread's calls from breaking a graph that another thread captures, where the
    device can do that.
    """
    with vendor_of(device).relax_capture():
        yield


@contextmanager
def work_beside(used: Iterable[torch.device]) -> Iterator[None]:
    """Let this thread call what it likes of these devices beside the thread that trains: no other
    device gets a context from it, and no graph is broken, where the device can do that.
    """
    first = next(iter(used), None)
    if first is None:
        yield
        return
    with use_device(first), relax_capture(first):
        yield


def await_event(event: torch.Event) -> None:
    """Wait until the device is past ``event``, on a thread beside the one that trains."""
    with work_beside([event.device]):
        event.synchronize()


def delay(device: torch.device, seconds: float) -> None:
    """Keep the current stream of ``device`` busy for about so long, where it can be."""
    vendor_of(device).delay(seconds)


def numa_node(device: torch.device) -> int:
    """Return the NUMA node that ``device`` is at; -1 if there is only one, or it is not known."""
    if len(list(_NODES.glob("node[0-9]*"))) < 2:
        return -1
    with use_device(device):
        address = vendor_of(device).pci_address(device)
    try:
        return int((_PCI / address / "numa_node").read_text()) if address else -1
    except (OSError, ValueError):
        return -1


def register(address: int, size_bytes: int, device: torch.device) -> int:
    """Pin memory that exists for copies to and from ``device``; return 0, the number of the
    driver's error, or UNKNOWN.
    """
    vendor = vendor_of(device)
    with work_beside([device]):
        status = vendor.register(address, size_bytes)
        if status not in (0, UNKNOWN):
            vendor.clear_error(device)
    return status


def unregister(address: int, device: torch.device) -> None:
    """Undo ``register``, on any thread."""
    with work_beside([device]):
        vendor_of(device).unregister(address)


def explain(status: int) -> str:
    """Say in words what a status of ``register`` other than 0 means."""
    return "not known for this device" if status == UNKNOWN else f"error {status} of its driver"
