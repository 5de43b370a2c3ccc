"""Figures of saves and restores on a device, each beside a plain pinned copy of the same bytes."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import holdfast
from benchmarks.gpu.findings import Target, at_least, at_most
from benchmarks.gpu.lab import (
    Heard,
    Lab,
    OutOfTime,
    Unseen,
    arena,
    blocks,
    cores,
    listening,
    saving,
    size_of,
)
from benchmarks.samples import measure
from holdfast.accelerator import devices
from holdfast.events import ImageCaptured, ImagePassed, MemoryPinned, Restored, SaveReturned

GB = 10**9
#: Sizes of images in slots, and what copying one may take after the grant.
SLOTS = {8 * GB: 0.17, 16 * GB: 0.34, 32 * GB: 0.68}
RING, RING_S, RING_BYTES = 64 * GB, 1.35, 8 * GB
SLOTS_PER_IMAGE = 3
#: Slots for an image are made, filled and pinned in about this time.
MADE_RATE = 0.8 * GB
#: Of a plain pinned copy: into a slot, and through staging pieces with so many cores.
INTO_SLOT, THROUGH_PIECES, PIECES_CORES = 0.92, 0.5, 8
SEALED = 1.25
FENCE_S, ENQUEUE_64GB_S = 0.002, 0.030
SAVE_S, LEAVES = 0.001, 1000
#: What detecting overtaken copies costs a save, and the thread that copies behind it.
SAMPLES_S, BEHIND_S = 0.0002, 0.001
FIRST_S, LAUNCH_S = 0.050, 0.005
MEMORY_RATE, CACHE_RATE, RESTORE_CORES = 20.0, 15.0, 16
_PINNED_BYTES = 4 * GB


class Saved(NamedTuple):
    """One save, in seconds."""

    returned_s: float
    fenced_s: float
    granted_s: float
    """From the call until copying began."""
    copied_s: float
    sealed_s: float
    """From the beginning of copying, like ``copied_s``."""
    size_bytes: int

    @property
    def rate(self) -> float:
        """GB/s into memory."""
        return self.size_bytes / max(self.copied_s, 1e-9) / GB

    @property
    def enqueue_s(self) -> float:
        """How long the copies took to enqueue."""
        return max(0.0, self.fenced_s - self.granted_s)


def save_once(lab: Lab, ckpt: holdfast.Checkpointer, step: int, heard: Heard) -> Saved:
    """Save, be fenced at once, and time everything from outside.

    The fence puts the end of the copies before the next work of this stream: an event behind it
    tells when the bytes were there.
    """
    lab.synchronize()
    began_s = time.perf_counter()
    handle = ckpt.save(step)
    returned_s = time.perf_counter() - began_s
    ckpt.before_update()
    fenced_s = time.perf_counter() - began_s
    devices.current_stream(lab.device).record_event().synchronize()
    there_s = time.perf_counter()
    handle.wait_captured(120)
    sealed_at_s, event = heard.last(ImageCaptured, step)
    copied_s = event.copy_s - (sealed_at_s - there_s)
    granted_s = event.elapsed_s - event.copy_s
    return Saved(returned_s, fenced_s, granted_s, copied_s, event.copy_s, event.size_bytes)


def plain_rate(lab: Lab, module: torch.nn.Module) -> float:
    """GB/s of plain copies of these parameters into pinned memory, the best of three."""
    sources = [one.detach().view(-1) for one in module.parameters()]
    room = max(sources[0].numel(), lab.size(_PINNED_BYTES) // 4)
    pinned = torch.empty(room, dtype=sources[0].dtype, pin_memory=True)
    best = 0.0
    for _ in range(3):
        lab.synchronize()
        began_s, at = time.perf_counter(), 0
        for source in sources:
            at = 0 if at + source.numel() > room else at
            pinned[at : at + source.numel()].copy_(source, non_blocking=True)
            at += source.numel()
        lab.synchronize()
        best = max(best, size_of(module) / (time.perf_counter() - began_s) / GB)
    return best


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    """A state whose parameters an optimizer updates, so that they are copied behind training."""
    return {"model": module, "optimizer": torch.optim.SGD(module.parameters(), 1e-3)}


def slots(lab: Lab) -> None:
    """Images in slots of three sizes."""
    for size_bytes, most_s in SLOTS.items():
        what = f"{size_bytes // GB} GB"
        shared_bytes = lab.size((SLOTS_PER_IMAGE + 0.2) * size_bytes)
        on_host, on_device = shared_bytes + lab.size(_PINNED_BYTES), lab.size(1.1 * size_bytes)
        try:
            lab.require_memory(on_host, on_device, shared_bytes)
        except Unseen as reason:
            lab.tell(f"{what}: into a slot", "unseen", note=str(reason))
            continue
        if lab.left_s() < lab.size(size_bytes) / MADE_RATE:
            raise OutOfTime(f"{what} need more")
        _slot(lab, what, lab.size(size_bytes), most_s)
        torch.accelerator.empty_cache()


def _slot(lab: Lab, what: str, size_bytes: int, most_s: float) -> None:
    module = blocks(lab, size_bytes)
    plain = plain_rate(lab, module)
    with listening() as heard, saving(state_of(module)) as ckpt:
        for step in range(SLOTS_PER_IMAGE):
            save_once(lab, ckpt, step, heard)
        settle(lab, heard, SLOTS_PER_IMAGE)
        saves = [save_once(lab, ckpt, 10 + n, heard) for n in range(4)]
        held_s = _held_when_enqueued(lab, ckpt, 100, saves[-1].copied_s)
    best = min(saves, key=lambda one: one.copied_s)
    scale = 64 * GB / best.size_bytes
    lab.tell(f"{what}: plain pinned copy", plain, "GB/s")
    lab.tell(f"{what}: into a slot", best.rate, "GB/s")
    lab.tell(f"{what}: into a slot, of a plain copy", best.rate / plain, "", at_least(INTO_SLOT))
    lab.tell(f"{what}: copied after the grant", best.copied_s, "s", at_most(most_s))
    sealed = statistics.median(one.sealed_s / max(one.copied_s, 1e-9) for one in saves)
    note = f"{cores()} cores"
    lab.tell(f"{what}: sealed as late as copied", sealed, "times", at_most(SEALED), note)
    enqueue_s = statistics.median(one.enqueue_s for one in saves)
    lab.tell(f"{what}: grant", statistics.median(one.granted_s for one in saves) * 1e3, "ms")
    lab.tell(
        f"{what}: enqueueing, scaled to 64 GB",
        enqueue_s * scale * 1e3,
        "ms",
        at_most(ENQUEUE_64GB_S * 1e3),
        "the fence behind a save, less the grant",
    )
    lab.tell(f"{what}: the fence once all is enqueued", held_s * 1e3, "ms", at_most(FENCE_S * 1e3))


def _held_when_enqueued(lab: Lab, ckpt: holdfast.Checkpointer, step: int, copied_s: float) -> float:
    """The longest of a few fences in the middle of the copy."""
    held = []
    for number in range(3):
        handle = ckpt.save(step + number)
        time.sleep(copied_s / 2)
        began_s = time.perf_counter()
        ckpt.before_update()
        held.append(time.perf_counter() - began_s)
        handle.wait_captured(120)
    return max(held)


def settle(lab: Lab, heard: Heard, count: int) -> None:
    """Wait until so many slots are pinned, which happens behind the saves."""
    until_s = time.monotonic() + min(30.0, lab.left_s() / 2)
    while len(heard.all(MemoryPinned)) < count and time.monotonic() < until_s:
        time.sleep(0.01)


def ring(lab: Lab) -> None:
    """An image larger than the memory for slots; the store is in memory where that has room."""
    size_bytes, ring_bytes = lab.size(RING), lab.size(RING_BYTES)
    needed_bytes = int(1.1 * size_bytes)
    lab.require_memory(needed_bytes + ring_bytes, needed_bytes, needed_bytes + ring_bytes)
    least = 64 << 20  # a ring has room for a few segments
    with _arena_of(max(ring_bytes, least)), tempfile.TemporaryDirectory(dir=arena()) as root:
        module = blocks(lab, max(size_bytes, 3 * least))
        plain = plain_rate(lab, module)
        with listening() as heard, saving(state_of(module), Path(root)) as ckpt:
            began_s = time.perf_counter()
            handle = ckpt.save(1, durable=True)
            ckpt.before_update()
            held_s = time.perf_counter() - began_s
            handle.wait_durable(120)
            passed = heard.all(ImagePassed)
    if not passed:
        raise Unseen("the image was kept in a slot, not passed through a ring")
    (event,) = passed
    rate = event.size_bytes / event.copy_s / GB
    note = "the store is in memory, and is part of it"
    lab.tell("64 GB: through the ring", event.copy_s, "s", at_most(RING_S), note)
    lab.tell("64 GB: through the ring, of a plain copy", rate / plain, "", note=note)
    lab.tell("64 GB: held by the fence", held_s, "s")


@contextmanager
def _arena_of(size_bytes: int) -> Iterator[None]:
    name = "HOLDFAST_ARENA_BYTES"
    os.environ[name] = str(size_bytes)
    try:
        yield
    finally:
        del os.environ[name]


def saves(lab: Lab) -> None:
    """The call itself, with many leaves."""
    module = blocks(lab, lab.size(LEAVES * (1 << 20)), LEAVES)
    with listening() as heard, saving(state_of(module)) as ckpt:
        for step in range(lab.rounds(40)):
            ckpt.save(step).wait_captured(60)
        held = [one.held_s for one in heard.all(SaveReturned)][1:]
    note = f"{LEAVES} leaves, highest {max(held) * 1e3:.2f} ms"
    median_ms = statistics.median(held) * 1e3
    lab.tell("save returns", median_ms, "ms", at_most(SAVE_S * 1e3), note)
    sampled = measure(state_of(module), lab.device, tries=40)
    at_save_ms = sampled.pop("at save") * 1e3
    lab.tell("samples of a save", at_save_ms, "ms", at_most(SAMPLES_S * 1e3), f"{LEAVES} leaves")
    note = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in sampled.items())
    behind_ms = sum(sampled.values()) * 1e3
    lab.tell("samples behind its copies", behind_ms, "ms", at_most(BEHIND_S * 1e3), note)


def first_saves(lab: Lab) -> None:
    """The first three saves make slots; launches go on beside it."""
    size_bytes = lab.size(8 * GB)
    lab.require_memory(lab.size(30 * GB), lab.size(9 * GB), lab.size(26 * GB))
    module = blocks(lab, size_bytes)
    plain = plain_rate(lab, module)
    alone_s = longest_launch(lab, 1.0)
    found, launches = [], []
    with listening() as heard, saving(state_of(module)) as ckpt:
        for step in range(4):
            found.append(save_once(lab, ckpt, step, heard))
            launches.append(longest_launch(lab, 1.5))
        settle(lab, heard, 1)
        pinned = heard.all(MemoryPinned)
    held = [max(one.returned_s, one.fenced_s) for one in found]
    note = ", ".join(f"{one * 1e3:.1f}" for one in held) + " ms, one after the other"
    lab.tell(
        "the first three saves hold longer than the fourth",
        (max(held[:3]) - held[3]) * 1e3,
        "ms",
        at_most(FIRST_S * 1e3),
        note,
    )
    target: Target | None = at_least(THROUGH_PIECES) if cores() >= PIECES_CORES else None
    pieces = found[0].rate / plain
    lab.tell("through staging pieces, of a plain copy", pieces, "", target, f"{cores()} cores")
    if pinned:
        rate = statistics.median(one.gb_per_s for one in pinned)
        whole = sum(one.pinned_bytes == one.size_bytes for one in pinned)
        lab.tell(
            "pinning behind training", rate, "GB/s", note=f"{whole} of {len(pinned)} slots whole"
        )
    note = f"without saves {alone_s * 1e3:.2f} ms"
    lab.tell("a launch beside pinning", max(launches) * 1e3, "ms", at_most(LAUNCH_S * 1e3), note)


def longest_launch(lab: Lab, seconds: float) -> float:
    """The longest of many launches of a small kernel."""
    number, longest_s = torch.zeros(1, device=lab.device), 0.0
    until_s = time.perf_counter() + (0.05 if lab.is_simulated else seconds)
    while time.perf_counter() < until_s:
        began_s = time.perf_counter()
        number.add_(1)
        longest_s = max(longest_s, time.perf_counter() - began_s)
        time.sleep(0.0002)
    return longest_s


def restores(lab: Lab) -> None:
    """One checkpoint, restored from memory and from files in the page cache."""
    lab.require_memory(lab.size(36 * GB), lab.size(20 * GB), lab.size(26 * GB))
    state = state_of(module := blocks(lab, lab.size(8 * GB)))
    is_judged = cores() >= RESTORE_CORES
    note = f"{cores()} cores, {size_of(module) / GB:.3g} GB"

    def tell(source: str, seconds: float, least: float) -> None:
        rate, target = size_of(module) / seconds / GB, at_least(least) if is_judged else None
        lab.tell(f"restore from {source}", rate, "GB/s", target, note)

    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-") as name:
        tell("memory", restored_s(Path(name), state), MEMORY_RATE)
        for path in Path(name).rglob("*"):
            if path.is_file():
                _warm(path)
        took_s = []
        for _ in range(2):
            began_s = time.perf_counter()
            holdfast.load(name, state, 1)
            lab.synchronize()
            took_s.append(time.perf_counter() - began_s)
    tell("the page cache", min(took_s), CACHE_RATE)


def restored_s(root: Path, state: dict[str, Any]) -> float:
    """Seconds of a restore from memory, the best of two; the checkpoint stays in ``root``.

    A start that another one follows is not closed: its keeper, and the snapshot, stay.
    """
    run = holdfast.Checkpointer(root, state, memory=None, storage=None)
    run.save(1, durable=True).wait_durable(120)
    took_s = []
    for _ in range(2):
        with listening() as heard:
            run = holdfast.Checkpointer(root, state, memory=None, storage=None)
            restored = run.restore()
        if restored is None or restored.source != "memory":
            raise RuntimeError("the snapshot in memory was not restored")
        took_s.append(float(heard.last(Restored)[1].elapsed_s))
    run.close()
    return min(took_s)


def _warm(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        room = bytearray(16 << 20)
        while file.readinto(room):
            pass
