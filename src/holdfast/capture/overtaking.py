"""Detects updates that went around the fence and changed a leaf before its copy was done."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import compress, count
from operator import ne

import torch

from holdfast.accelerator.devices import host_address
from holdfast.capture.copy_plan import SlotTarget
from holdfast.capture.replica_samples import ScalarAgreement
from holdfast.errors import CaptureOvertaken
from holdfast.state.bindings import Bindings
from holdfast.state.unchanged import plain_looks

_SAMPLE_BYTES, _SAMPLES = 64, 32
_captures = count()
_version: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class OvertakeDetector:
    """Detects lazy leaves that changed before their copy was done. A heuristic, never a proof.

    The proof is the fence, which holds every hooked update; this detects updates that bypass it: by
    changed version counters, by sampled bytes that differ from their copy, and by copies that
    differ from the bytes at the time of the save.
    """

    def __init__(self, bindings: Bindings) -> None:
        self.agreeing = ScalarAgreement(bindings.joined)
        self._lazy, self._watched = bindings.lazy, bindings.watched
        self._leaves = bindings.sampled
        self._versions = self._versions_now()
        self._samples = list(self._sample(next(_captures)))

    def _versions_now(self) -> list[int]:
        with plain_looks():
            return list(map(_version, self._watched))

    def _sample(self, number: int) -> Iterator[tuple[str, int, bytes]]:
        """Yield (leaf, address, current bytes) of some host leaves, different ones each time."""
        leaves, distance = len(self._leaves), number * 7919 * _SAMPLE_BYTES
        for place in range(number * _SAMPLES, number * _SAMPLES + min(_SAMPLES, leaves)):
            name, address, size = self._leaves[place % leaves]
            length = size if size < _SAMPLE_BYTES else _SAMPLE_BYTES
            at = address + distance % (size - length + 1)
            yield name, at, ctypes.string_at(at, length)

    def _check_versions(self) -> None:
        versions = self._versions_now()
        if versions != self._versions:
            moved = map(ne, versions, self._versions)
            raise _overtaken(next(compress(self._lazy, moved)).name)

    def check(self, target: SlotTarget, turn: int) -> None:
        """Raise CaptureOvertaken, naming the first leaf that changed."""
        self._check_versions()
        self.agreeing.read_on_host()
        for name, at, before in self._samples:
            there = target.address_of(name, at, len(before))
            if there is not None and ctypes.string_at(there, len(before)) != before:
                raise _overtaken(name)
        lazy = target.sampled
        for number in range(min(_SAMPLES, len(lazy))):
            copy = lazy[(turn * _SAMPLES + number) % len(lazy)]
            if copy.source.is_contiguous():
                at = (turn * 7919 * _SAMPLE_BYTES) % (copy.size_bytes - _SAMPLE_BYTES + 1)
                there = host_address(target.data) + copy.offset + at
                if _libc.memcmp(there, host_address(copy.source) + at, _SAMPLE_BYTES):
                    raise _overtaken(copy.leaf)

    def check_sources(self) -> None:
        """Check like ``check`` after the copy has left the ring: nothing may change before the
        fence opens.
        """
        self._check_versions()
        self.agreeing.read_on_host()
        for name, at, before in self._samples:
            if ctypes.string_at(at, len(before)) != before:
                raise _overtaken(name)


def _overtaken(name: str) -> CaptureOvertaken:
    return CaptureOvertaken(
        f"{name} changed while it was copied, by an update that went around the optimizer's step "
        "hooks. Call checkpointer.before_update() before such updates.",
        leaf=name,
    )
