"""What a section needs of the device: sizes, clocks, streams, graphs, contexts, a place for memory.

The simulated device of ``tests/device`` has no speed: sizes are small there, and figures are not
held against their targets; counts are.
"""

from __future__ import annotations

import copy
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import holdfast
from benchmarks.gpu.findings import Finding, Target
from benchmarks.kit import machine
from holdfast.events import Event, subscribe

#: Bytes on a GPU for one on the simulated device.
_SHRUNK = 10_000
_LEAST_BYTES = 1 << 16


class Unseen(Exception):
    """A section cannot find here what it looks for; the message says why."""


class OutOfTime(Exception):
    """A section has more to find than its time allows."""


class Lab:
    """The accelerator of this machine, and the way to report what is found with it."""

    is_simulated = False

    def __init__(self, section: str, seconds: float, send: Callable[[Finding], None]) -> None:
        self._section, self._send = section, send
        self._until_s = time.monotonic() + seconds
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            raise Unseen("there is no accelerator")
        self.device = torch.device(found.type, torch.accelerator.current_device_index())

    # ── findings ─────────────────────────────────────────────────────────────────────────

    def tell(
        self,
        name: str,
        value: Any,
        unit: str = "",
        target: Target | None = None,
        note: str = "",
        *,
        counts: bool = False,
    ) -> None:
        """Report a finding. ``counts``: it means the same on the simulated device."""
        is_judged = target is not None and (counts or not self.is_simulated)
        said = "" if target is None else str(target)
        met = target.is_met(value) if target is not None and is_judged else None
        today = time.strftime("%Y-%m-%d")
        finding = Finding(self._section, name, value, unit, said, met, note, today, **self.about())
        self._send(finding)

    def about(self) -> dict[str, str]:
        """Device, torch and driver, as every finding names them."""
        return {"device": self.name(), "torch": torch.__version__, "driver": self.driver()}

    def name(self) -> str:
        """What the device calls itself."""
        module = torch.get_device_module(self.device.type)
        named = getattr(module, "get_device_name", None)
        return str(named(self.device)) if named else self.device.type

    def driver(self) -> str:
        """The driver in the kernel and the runtime that torch was built for."""
        try:
            words = Path("/proc/driver/nvidia/version").read_text().split()
            version = next(word for word in words if word[:1].isdigit() and "." in word)
        except (OSError, StopIteration):
            version = "none"
        return f"{version}, {torch.version.cuda or torch.version.hip or 'no runtime'}"

    def quiet(self) -> Lab:
        """This lab, for a call whose findings are not wanted."""
        other = copy.copy(self)
        other._send = lambda _: None
        return other

    # ── time and size ────────────────────────────────────────────────────────────────────

    def left_s(self) -> float:
        """Seconds that this section still has."""
        return self._until_s - time.monotonic()

    def size(self, on_gpu: float) -> int:
        """Bytes to use, for so many on a GPU: a multiple of 4096."""
        return int(on_gpu) // 4096 * 4096

    def rounds(self, on_gpu: int) -> int:
        """How often to do something."""
        return on_gpu

    def synchronize(self) -> None:
        """Wait for everything enqueued on the device."""
        torch.accelerator.synchronize(self.device)

    def device_count(self) -> int:
        """How many accelerators there are."""
        return torch.accelerator.device_count()

    def require_memory(self, host_bytes: int, device_bytes: int = 0, shared_bytes: int = 0) -> None:
        """Unseen where less memory is free; ``shared_bytes`` are part of the host's."""
        room = os.statvfs(arena())
        if shared_bytes > room.f_bavail * room.f_frsize:
            raise Unseen(f"less than {shared_bytes / 1e9:.0f} GB of shared memory are free")
        if host_bytes > machine.available_bytes():
            raise Unseen(f"less than {host_bytes / 1e9:.0f} GB of memory are free")
        if device_bytes > self.free_bytes():
            raise Unseen(f"less than {device_bytes / 1e9:.0f} GB of the device are free")

    def free_bytes(self) -> int:
        """Memory of the device that can be taken."""
        return int(torch.cuda.mem_get_info(self.device)[0]) if self.is_cuda() else 1 << 34

    def is_cuda(self) -> bool:
        """Whether torch.cuda is the device's module."""
        return self.device.type == "cuda"

    # ── what torch has no common name for ────────────────────────────────────────────────

    def use(self, index: int) -> None:
        """Make another device this process's own."""
        torch.accelerator.set_device_index(index)
        self.device = torch.device(self.device.type, index)

    def contexts(self) -> set[int]:
        """Devices on which this process has a context."""
        if not self.is_cuda():
            raise Unseen(f"contexts of {self.device.type} cannot be listed")
        driver = ctypes.CDLL("libcuda.so.1")
        found = set()
        for index in range(self.device_count()):
            flags, active = ctypes.c_uint(), ctypes.c_int()
            driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
            if active.value:
                found.add(index)
        return found

    @contextmanager
    def graph(self, mode: str = "global") -> Iterator[None]:
        """Capture what is enqueued, into a graph that is thrown away."""
        if not self.is_cuda():
            raise Unseen(f"graphs of {self.device.type} have no common name in torch")
        before = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
                yield
        finally:  # torch stays on the stream of a capture that failed
            torch.cuda.set_stream(before)

    def unordered(self) -> list[str]:
        """Accesses to memory that nothing ordered, as far as the device tells."""
        return []


class SimulatedLab(Lab):
    """The simulated device: small sizes, no speed."""

    is_simulated = True

    def __init__(self, section: str, seconds: float, send: Callable[[Finding], None]) -> None:
        self._sim = _load_simulated()
        super().__init__(section, seconds, send)
        self._sim.forget_contexts()

    def name(self) -> str:
        return "simulated"

    def driver(self) -> str:
        return "simulated"

    def size(self, on_gpu: float) -> int:
        return max(_LEAST_BYTES, super().size(on_gpu / _SHRUNK))

    def rounds(self, on_gpu: int) -> int:
        return max(2, on_gpu // 20)

    def free_bytes(self) -> int:
        return 1 << 30

    def contexts(self) -> set[int]:
        return {int(index) for index in self._sim.contexts()}

    def use(self, index: int) -> None:
        super().use(index)
        self._sim.forget_contexts()

    @contextmanager
    def graph(self, mode: str = "global") -> Iterator[None]:
        torch.accelerator.synchronize()
        stream, before = torch.Stream(self.device), torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(stream)
        try:
            graph = self._sim.begin_capture()
            try:
                yield
            finally:
                self._sim.end_capture(graph)
        finally:
            torch.accelerator.set_stream(before)

    def unordered(self) -> list[str]:
        return sorted(set(self._sim.reports()))


def _load_simulated() -> Any:
    from device import simulator, vendor

    try:
        loaded = simulator.load()
    except simulator.CannotBuild as error:
        raise Unseen(str(error)) from None
    simulator.calm()
    vendor.add_simulated_vendor(loaded)
    return loaded


def make_lab(
    section: str, seconds: float, send: Callable[[Finding], None], *, is_simulated: bool
) -> Lab:
    """The lab of a section."""
    return (SimulatedLab if is_simulated else Lab)(section, seconds, send)


# ── what several sections do ─────────────────────────────────────────────────────────────────


class Heard:
    """Events of this process, each with the moment at which it was heard."""

    def __init__(self) -> None:
        self._events: list[tuple[float, Event]] = []

    def note(self, event: Event, _: object = None) -> None:
        """Keep an event."""
        self._events.append((time.perf_counter(), event))

    def last(self, kind: type[Any], step: int | None = None) -> tuple[float, Any]:
        """The newest event of that kind and step, and when it was heard."""
        for at_s, event in reversed(self._events):
            if isinstance(event, kind) and step in (None, event.step):
                return at_s, event
        raise LookupError(f"no {kind.__name__} of step {step} was heard")

    def all(self, kind: type[Any]) -> list[Any]:
        """All events of that kind."""
        return [event for _, event in self._events if isinstance(event, kind)]


@contextmanager
def listening() -> Iterator[Heard]:
    """Hear the events of this process."""
    heard = Heard()
    end = subscribe(heard.note)
    try:
        yield heard
    finally:
        end()


def blocks(lab: Lab, total_bytes: int, count: int = 32) -> torch.nn.Module:
    """A module of so many parameters, in all of about so many bytes."""
    each = max(1, total_bytes // count // 4)
    module = torch.nn.Module()
    for number in range(count):
        tensor = torch.full((each,), float(number), device=lab.device)
        module.register_parameter(f"p{number}", torch.nn.Parameter(tensor))
    return module


def size_of(module: torch.nn.Module) -> int:
    """Bytes of its parameters."""
    return sum(one.nbytes for one in module.parameters())


@contextmanager
def saving(
    state: dict[str, Any], root: Path | None = None, **options: Any
) -> Iterator[holdfast.Checkpointer]:
    """A Checkpointer that saves when it is told, closed at the end."""
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-") as made:
        ways = {"memory": None, "storage": None, **options}
        with holdfast.Checkpointer(root or made, state, **ways) as checkpointer:
            yield checkpointer


def arena() -> str:
    """The directory in shared memory that this section may use."""
    return os.environ.get("HOLDFAST_ARENA_DIR", "/dev/shm")


def command(*options: str) -> list[str]:
    """This benchmark through its door, for a process of its own."""
    return [sys.executable, "-m", "benchmarks", "gpu", *options]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
