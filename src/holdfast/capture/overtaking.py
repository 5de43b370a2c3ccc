"""Judges by samples and versions if an update changed a leaf before its copy was done."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import compress, count
from operator import ne

import torch

from holdfast.accelerator import devices
from holdfast.accelerator.devices import host_address
from holdfast.capture.copy_plan import SlotTarget
from holdfast.capture.device_samples import SAMPLE_BYTES, SAMPLES, sample_devices
from holdfast.capture.replica_samples import ScalarAgreement
from holdfast.errors import CaptureOvertaken
from holdfast.state.bindings import Bindings
from holdfast.state.unchanged import plain_looks

_captures = count()
_version: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]
#: What ``ctypes.string_at`` calls.
_read = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class OvertakeDetector:
    """Detects lazy leaves that changed before their copy was done. A heuristic, never a proof.

    The proof is the fence, which holds every hooked update; this detects updates that bypass it: by
    changed version counters, by sampled bytes that differ from their copy, and by copies that
    differ from the bytes at the time of the save.

    Copies from a device land after the fence has opened, since updates are enqueued behind them.
    What may change then is what an update that passed the fence changes: so the fence notes what
    had changed when it opened first, and the end of the copies looks again.
    """

    def __init__(self, bindings: Bindings) -> None:
        self.agreeing = ScalarAgreement(bindings.joined)
        self._watched, self._counted = bindings.watched, bindings.counted
        self._bindings, self._leaves = bindings, bindings.sampled
        self._versions = self._versions_now()
        number = next(_captures)
        self._samples = self._sample(number)
        self._device_samples = sample_devices(bindings, number)
        self._at_fence: list[list[int]] = []
        """Versions when an update was let pass, those of the first one in front."""

    def _versions_now(self) -> list[int]:
        with plain_looks():
            return list(map(_version, self._counted))

    def _sample(self, number: int) -> list[tuple[str, int, bytes]]:
        """Return (leaf, address, current bytes) of some host leaves, different ones each time."""
        leaves, distance = self._leaves, number * 7919 * SAMPLE_BYTES
        first = number * SAMPLES % len(leaves) if leaves else 0
        chosen = leaves[first : first + SAMPLES]
        chosen += leaves[: min(first, SAMPLES - len(chosen))]
        return [
            (name, at := address + distance % (size - length + 1), _read(at, length))
            for name, address, size in chosen
            for length in (size if size < SAMPLE_BYTES else SAMPLE_BYTES,)
        ]

    def pass_fence(self) -> None:
        """Note the versions the first time that an update is let pass."""
        if not self._at_fence:
            # The first of several threads to append has looked before any of them updates.
            self._at_fence.append(self._versions_now())

    def _check_versions(self, *, has_landed: bool = False) -> None:
        versions = self._versions_now()
        if self._at_fence:  # looked at behind the versions: without one they are from before any
            versions = self._at_fence[0]
        if versions != self._versions:
            for leaf in compress(self._watched, map(ne, versions, self._versions)):
                if not has_landed or devices.is_on_device(leaf.local):
                    raise _overtaken(leaf.name)

    def _check_devices(self, *, has_landed: bool) -> None:
        for sample in self._device_samples:
            if sample.is_streamed == has_landed:
                if not has_landed:  # copied by the host, just now
                    sample.take_again()
                changed = sample.find_changed()
                if changed is not None:
                    raise _overtaken(changed)

    def enqueue(self, device: torch.device) -> None:
        """Enqueue what is compared when the copies have landed, behind them, on the device's
        current stream.
        """
        self.agreeing.enqueue(device)
        for sample in self._device_samples:
            if sample.device == device:
                sample.take_again()

    def check_landed(self) -> None:
        """Check like ``check`` when the copies from devices have landed; leaves in host memory
        were copied before the fence opened.
        """
        self._check_versions(has_landed=True)
        self._check_devices(has_landed=True)

    def check(self, target: SlotTarget, turn: int) -> None:
        """Raise CaptureOvertaken, naming the first leaf that changed."""
        self._check_versions()
        self.agreeing.read_on_host()
        for name, at, before in self._samples:
            there = target.address_of(name, at, len(before))
            if there is not None and _read(there, len(before)) != before:
                raise _overtaken(name)
        lazy, copies_at = target.sampled, host_address(target.data)
        for number in range(min(SAMPLES, len(lazy))):
            copy = lazy[(turn * SAMPLES + number) % len(lazy)]
            if copy.source.is_contiguous():
                at = (turn * 7919 * SAMPLE_BYTES) % (copy.size_bytes - SAMPLE_BYTES + 1)
                there = copies_at + copy.offset + at
                if _libc.memcmp(there, host_address(copy.source) + at, SAMPLE_BYTES):
                    raise _overtaken(copy.leaf)
        self._check_devices(has_landed=False)

    def check_sources(self) -> None:
        """Check like ``check`` after the copy has left the ring: nothing may change before the
        fence opens.
        """
        self._check_versions()
        self.agreeing.read_on_host()
        for name, at, before in self._samples:
            if _read(at, len(before)) != before:
                raise _overtaken(name)
        self._check_devices(has_landed=False)


def _overtaken(name: str) -> CaptureOvertaken:
    return CaptureOvertaken(
        f"{name} changed while it was copied, by an update that went around the optimizer's step "
        "hooks. Call checkpointer.before_update() before such updates, and before each replay of "
        "a graph that has them.",
        leaf=name,
    )
