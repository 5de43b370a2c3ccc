"""Answers that only hardware has: pinning, forks, limits, and what ends a captured graph."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.copying import LAUNCH_S, longest_launch
from benchmarks.gpu.findings import at_most
from benchmarks.gpu.lab import Lab, Unseen, arena, command
from benchmarks.kit import machine
from holdfast.accelerator import devices
from holdfast.accelerator.vendors import vendor_of
from holdfast.offload import HybridAdamW

GB = 10**9
_PINNED_BYTES = 4 << 30
_FORKED_BYTES = 256 << 20
_LIMIT_BYTES = 64 << 10
#: A call that Holdfast's threads do not make while training runs.
_NEVER_CALLED = "wait for the device"
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def facts(lab: Lab) -> None:
    """What stands beside every figure."""
    here = Path(arena())
    for name, value in machine.facts(here, ["torch", "numpy"]).items():
        lab.tell(name, value)
    lab.tell("accelerators", lab.device_count())
    lab.tell("device memory free", lab.free_bytes() / GB, "GB")
    lab.tell("memory free", machine.available_bytes() / GB, "GB")
    room = os.statvfs(here)
    lab.tell("shared memory free", room.f_bavail * room.f_frsize / GB, "GB")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    lab.tell("locked memory", "no limit" if soft == resource.RLIM_INFINITY else soft)
    if lab.is_cuda():
        links = _said(["nvidia-smi", "topo", "-m"])
        lab.tell("links", links or "unseen", note="nvidia-smi topo -m")
    report = [sys.executable, "-m", "holdfast.cli", "doctor", "--json"]
    lab.tell("doctor", _findings(_said(report)))


def _said(words: list[str], timeout_s: float = 30.0) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _findings(document: str) -> list[str]:
    with suppress(ValueError, KeyError):
        return [
            f"{one['severity']} {one['about']}: {one['text']}"
            for one in json.loads(document)["findings"]
        ]
    return ["unseen"]


# ── pinning ──────────────────────────────────────────────────────────────────────────────────


class Memory:
    """A mapping, and its address."""

    def __init__(self, size_bytes: int, descriptor: int = -1, *, is_huge: bool = False) -> None:
        self.map = mmap.mmap(descriptor, size_bytes)
        if is_huge:
            self.map.madvise(_MADV_HUGEPAGE)
        self._first = ctypes.c_char.from_buffer(self.map)
        self.address, self.size_bytes = ctypes.addressof(self._first), size_bytes
        ctypes.memset(self.address, 1, size_bytes)  # pages that exist

    def close(self) -> None:
        """Give it back."""
        del self._first
        self.map.close()


@contextmanager
def _shared(size_bytes: int) -> Iterator[tuple[int, Path]]:
    with tempfile.NamedTemporaryFile(dir=arena()) as file:
        file.truncate(size_bytes)
        yield file.fileno(), Path(file.name)


@contextmanager
def _memory(size_bytes: int, descriptor: int = -1, *, is_huge: bool = False) -> Iterator[Memory]:
    made = Memory(size_bytes, descriptor, is_huge=is_huge)
    try:
        yield made
    finally:
        made.close()


def registering(lab: Lab) -> None:
    """Pin shared and private memory, in small and in huge pages."""
    size_bytes = lab.size(_PINNED_BYTES)
    lab.require_memory(3 * size_bytes)
    with _shared(size_bytes) as (descriptor, path), _memory(size_bytes, descriptor) as memory:
        _pinned_at(lab, "shared memory, 4 KiB pages", memory)
        _beside(lab, memory)
        _twice(lab, memory)
        _by_another(lab, memory, path)
    if "[never]" in _text(_SHMEM) or "[deny]" in _text(_SHMEM):
        lab.tell("pinning shared memory, huge pages", "unseen", note=f"{_SHMEM} forbids them")
    else:
        with (
            _shared(size_bytes) as (descriptor, _),
            _memory(size_bytes, descriptor, is_huge=True) as memory,
        ):
            _pinned_at(lab, "shared memory, huge pages", memory)
    with _memory(size_bytes, is_huge=True) as memory:
        _pinned_at(lab, "private memory, huge pages", memory)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _pinned_at(lab: Lab, what: str, memory: Memory) -> None:
    began_s = time.perf_counter()
    status = devices.register(memory.address, memory.size_bytes, lab.device)
    took_s = time.perf_counter() - began_s
    if status:
        lab.tell(f"pinning {what}", "refused", note=devices.explain(status))
        return
    began_s = time.perf_counter()
    devices.unregister(memory.address, lab.device)
    note = f"let go at {memory.size_bytes / (time.perf_counter() - began_s) / GB:.3g} GB/s"
    lab.tell(f"pinning {what}", memory.size_bytes / took_s / GB, "GB/s", note=note)


def _beside(lab: Lab, memory: Memory) -> None:
    """Launches of this thread while another one pins, whole and in pieces."""
    whole = memory.size_bytes
    for what, step in (("at once", whole), ("in pieces of 64 MiB", min(64 << 20, whole))):
        starts = range(0, whole - step + 1, step)

        def pin(starts: range = starts, step: int = step) -> None:
            for at in starts:
                devices.register(memory.address + at, step, lab.device)

        thread = threading.Thread(target=pin)
        thread.start()
        longest_s = 0.0
        while thread.is_alive():
            longest_s = max(longest_s, longest_launch(lab, 0.05))
        thread.join()
        for at in starts:
            devices.unregister(memory.address + at, lab.device)
        target = at_most(LAUNCH_S * 1e3) if step < whole else None
        lab.tell(f"a launch beside pinning {what}", longest_s * 1e3, "ms", target)


def _twice(lab: Lab, memory: Memory) -> None:
    """Memory that is pinned already is refused; the next launch must not fail for it."""
    page = 1 << 16
    first = devices.register(memory.address, page, lab.device)
    second = devices.register(memory.address, page, lab.device)
    try:
        torch.ones(1, device=lab.device).add_(1)
        lab.synchronize()
        broken = 0
    except RuntimeError:
        broken = 1
    if not first:
        devices.unregister(memory.address, lab.device)
    lab.tell("pinning pinned memory", f"status {second}", note=devices.explain(second))
    lab.tell("launches that fail behind a refusal", broken, "", at_most(0), counts=True)


def _by_another(lab: Lab, memory: Memory, path: Path) -> None:
    """Pages that this process has pinned, pinned by another one too, as after a restart."""
    status = devices.register(memory.address, memory.size_bytes, lab.device)
    said = _body(lab, "pin", str(path), str(memory.size_bytes))
    if not status:
        devices.unregister(memory.address, lab.device)
    lab.tell("pages pinned by another process too", said)


def _body(lab: Lab, *words: str, **more: Any) -> str:
    """What a part of a section says, run in a process of its own."""
    options = ["--simulated"] if lab.is_simulated else []
    done = subprocess.run(
        [*command(*options), "--body", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=max(5.0, lab.left_s()),
        **more,
    )
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    return lines[-1] if not done.returncode else f"ended with {done.returncode}: {lines[-1]}"


def pin_file(lab: Lab, name: str, size: str) -> str:
    """Pin a file of another process, and say how fast."""
    with open(name, "r+b") as file, _memory(int(size), file.fileno()) as memory:
        began_s = time.perf_counter()
        status = devices.register(memory.address, memory.size_bytes, lab.device)
        took_s = time.perf_counter() - began_s
        if status:
            return f"refused: {devices.explain(status)}"
        devices.unregister(memory.address, lab.device)
    return f"pinned, {int(size) / took_s / GB:.3g} GB/s"


def memlock(lab: Lab) -> None:
    """Pin more than the limit of locked memory."""
    with _shared(lab.size(_FORKED_BYTES)) as (descriptor, path):
        os.posix_fallocate(descriptor, 0, lab.size(_FORKED_BYTES))
        limits = (_LIMIT_BYTES, _LIMIT_BYTES)
        said = _body(
            lab,
            "pin",
            str(path),
            str(lab.size(_FORKED_BYTES)),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, limits),
        )
    note = f"with a limit of {_LIMIT_BYTES >> 10} KiB"
    if os.geteuid() == 0:
        note += ", as root, whom the limit may not bind"
    lab.tell("pinning beyond the limit", said, note=note)


def forks(lab: Lab) -> None:
    """What a forked process has of its own, of pinned pages of its parent."""
    size_bytes = _FORKED_BYTES if not lab.is_simulated else 8 << 20
    before = _private_bytes()
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).fill_(1)
    of_torch = _private_bytes() - before
    lab.tell("pinned by torch, copied by a fork", of_torch / pinned.nbytes, "of it")
    for what, is_shared in (("private", False), ("shared", True)):
        with _shared(size_bytes) as (descriptor, _):
            before = _private_bytes()
            with _memory(size_bytes, descriptor if is_shared else -1) as memory:
                status = devices.register(memory.address, size_bytes, lab.device)
                copied = _private_bytes() - before
                if not status:
                    devices.unregister(memory.address, lab.device)
        target = at_most(0.1) if is_shared else None
        lab.tell(
            f"{what} memory, registered, copied by a fork", copied / size_bytes, "of it", target
        )

    before = _private_bytes()
    elements = size_bytes // 16  # a master, two moments, and a place for gradients
    optimizer = HybridAdamW([torch.nn.Parameter(torch.zeros(elements, device=lab.device))])
    share = (_private_bytes() - before) / size_bytes
    lab.tell("the state of an optimizer, copied by a fork", share, "of it", at_most(0.1))
    del optimizer


def _private_bytes() -> int:
    """Bytes that a forked process has of its own, besides what it shares with its parent."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, Path("/proc/self/smaps_rollup").read_bytes())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        lines = said.read().splitlines()
    os.waitpid(child, 0)
    if not lines:
        raise Unseen("the kernel does not tell what a process has of its own")
    return sum(int(one.split()[1]) << 10 for one in lines if one.startswith("Private_"))


# ── captured graphs ──────────────────────────────────────────────────────────────────────────


def _calls(lab: Lab) -> dict[str, Callable[[], object]]:
    """Calls that a thread beside training may make."""
    device = lab.device
    stream, event = torch.Stream(device), torch.Event(device)
    there = torch.ones(1 << 16, device=device)
    pinned = torch.empty(1 << 16, pin_memory=True)

    def on_stream(act: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with devices.use_stream(stream):
                act()

        return run

    def register() -> None:
        with _memory(1 << 20) as memory:
            if not vendor_of(device).register(memory.address, 1 << 20):
                vendor_of(device).unregister(memory.address)

    event.record(stream)
    return {
        "record an event": lambda: stream.record_event(),
        "query an event": event.query,
        "wait for an event": event.synchronize,
        "wait for a stream": stream.synchronize,
        "make a stream": lambda: devices.make_stream(device),
        "copy to pinned memory": on_stream(lambda: pinned.copy_(there, non_blocking=True)),
        "copy to other memory": on_stream(lambda: there.cpu()),
        "take device memory": on_stream(lambda: torch.empty(64 << 20, device=device)),
        "take pinned memory": lambda: torch.empty(48 << 20, pin_memory=True),
        "register memory": register,
        _NEVER_CALLED: lab.synchronize,
    }


def calls(lab: Lab) -> None:
    """Each call beside a capture in global mode, as it is and relaxed; each in its own process."""
    names = list(_calls(lab))
    if lab.is_simulated:
        for way in ("plain", "relaxed"):
            lab.tell(f"{names[0]}, {way}", call_beside(lab, names[0], way))
        return
    waiting = [(name, way) for name in names for way in ("plain", "relaxed")]
    running: list[tuple[str, str, subprocess.Popen[str]]] = []
    while (waiting or running) and lab.left_s() > 2:
        while waiting and len(running) < 8:
            name, way = waiting.pop(0)
            words = [*command(), "--body", "call", name, way]
            running.append((name, way, subprocess.Popen(words, stdout=-1, stderr=-3, text=True)))
        for one in [one for one in running if one[2].poll() is not None]:
            running.remove(one)
            lines = one[2].communicate()[0].strip().splitlines() or [f"ended with {one[2].poll()}"]
            target = at_most(0) if one[1] == "relaxed" and one[0] != _NEVER_CALLED else None
            ended = int(lines[-1] != "goes on")
            lab.tell(f"{one[0]}, {one[1]}", ended, "ended", target, note=lines[-1], counts=True)
        time.sleep(0.05)
    for name, way in [*waiting, *(one[:2] for one in running)]:
        lab.tell(f"{name}, {way}", "unseen", note="no time was left")
    for *_, process in running:
        process.kill()


def call_beside(lab: Lab, name: str, way: str) -> str:
    """Make one call on another thread while this one captures; what became of both."""
    call, row = _calls(lab)[name], torch.ones(64, device=lab.device)
    row.add_(1)
    lab.synchronize()
    refused: list[str] = []

    def beside() -> None:
        try:
            if way == "relaxed":
                with devices.relax_capture(lab.device):
                    call()
            else:
                call()
        except RuntimeError as error:
            refused.append(str(error).splitlines()[0])

    try:
        with lab.graph("global"):
            row.add_(1)
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join(10)
            row.add_(1)
    except Unseen:
        raise
    except RuntimeError as error:
        return f"the capture ended: {str(error).splitlines()[0]}"
    return f"the call was refused: {refused[0]}" if refused else "goes on"
