"""What a copy costs the thread that enqueues it, and what bounds a restore from pinned memory."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from benchmarks.gpu.copying import ENQUEUE_64GB_S, MEMORY_RATE
from benchmarks.gpu.findings import at_least, at_most
from benchmarks.gpu.lab import Lab, Unseen, cores
from holdfast.accelerator import devices
from holdfast.accelerator.pinnable_pages import allocate, memory_of
from holdfast.capture.pinning import PIECE_BYTES
from holdfast.format.checksum import BLOCK_BYTES, checksum

GB = 10**9
_REGION_BYTES = 1 << 30
#: Copies in 64 GB, one for each piece that is pinned at once.
_COPIES = 64 * GB // PIECE_BYTES
_WAITS_S = 0.001
_MORE, _FEW = 4096, 250

Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]


def enqueueing(lab: Lab) -> None:
    """Copies of what is pinned at once, enqueued one by one and in one call."""
    piece_bytes = lab.size(PIECE_BYTES)
    region_bytes = piece_bytes * (_REGION_BYTES // PIECE_BYTES)
    lab.require_memory(region_bytes, region_bytes)
    with pinned_region(lab, region_bytes, piece_bytes) as host:
        device = torch.ones(region_bytes, dtype=torch.uint8, device=lab.device)
        stream = devices.make_own_stream(lab.device)
        pairs = _pairs(host, device, piece_bytes, lab.rounds(_FEW))
        ways: dict[str, Callable[[Pairs], object]] = {
            "one by one": _one_by_one,
            "in one call": lambda these: devices.copy_to_host(*these),
        }
        if (by_runtime := _runtime(lab, stream)) is not None:
            ways["by the runtime"] = by_runtime
        for name, way in ways.items():
            for beside in (False, True):
                took_s = _timed(lab, stream, way, pairs, is_beside=beside)
                each_us = took_s / len(pairs[0]) * 1e6
                where = f"{name}, beside a thread of Python" if beside else name
                most = at_most(ENQUEUE_64GB_S / _COPIES * 1e6) if name == "in one call" else None
                lab.tell(f"a copy, {where}", each_us, "us", most, f"{len(pairs[0])} copies")
        _until_it_waits(lab, stream, _pairs(host, device, piece_bytes, lab.rounds(_MORE)))
        if not torch.equal(host, device.cpu()):
            raise RuntimeError("the copies did not arrive")
        _from_pinned(lab, host, device, piece_bytes)


@contextmanager
def pinned_region(lab: Lab, size_bytes: int, piece_bytes: int) -> Iterator[torch.Tensor]:
    """Host memory pinned piece by piece, as a slot is."""
    host = allocate(torch.Size([size_bytes]), torch.uint8)
    memory, pinned = memory_of(host), []
    try:
        for start in range(0, size_bytes, piece_bytes):
            memory.place(start, piece_bytes, -1)
            if status := devices.register(memory.address + start, piece_bytes, lab.device):
                raise Unseen(f"memory cannot be pinned here: {devices.explain(status)}")
            pinned.append(memory.address + start)
        yield host
    finally:
        lab.synchronize()
        for address in pinned:
            devices.unregister(address, lab.device)


def _pairs(host: torch.Tensor, device: torch.Tensor, piece_bytes: int, count: int) -> Pairs:
    """Views of both sides, made beforehand as a save's are."""
    starts = [n * piece_bytes % host.numel() for n in range(count)]
    places = [host[at : at + piece_bytes] for at in starts]
    return places, [device[at : at + piece_bytes] for at in starts]


def _one_by_one(pairs: Pairs) -> None:
    for place, source in zip(*pairs, strict=True):
        place.copy_(source, non_blocking=True)


def _runtime(lab: Lab, stream: torch.Stream) -> Callable[[Pairs], object] | None:
    """The runtime's own copy, called by its address: what torch adds is the difference."""
    if not lab.is_cuda():
        return None
    with suppress(OSError, AttributeError):
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        call, words = runtime.cudaMemcpyAsync, ctypes.c_void_p
        call.argtypes = [words, words, ctypes.c_size_t, ctypes.c_int, words]
        handle = stream.native_handle if hasattr(stream, "native_handle") else stream.cuda_stream
        down = 2

        def run(pairs: Pairs) -> None:
            for place, source in zip(*pairs, strict=True):
                call(place.data_ptr(), source.data_ptr(), place.nbytes, down, handle)

        return run
    return None


def _timed(
    lab: Lab,
    stream: torch.Stream,
    way: Callable[[Pairs], object],
    pairs: Pairs,
    *,
    is_beside: bool,
) -> float:
    """Seconds until all are enqueued, the best of three; ``is_beside``: while another thread runs
    Python and launches kernels, as training does.
    """
    over = threading.Event()
    number = torch.zeros(1, device=lab.device)

    def train() -> None:
        while not over.is_set():
            number.add_(1)
            sum(range(300))

    thread = threading.Thread(target=train)
    if is_beside:
        thread.start()
    best_s = float("inf")
    try:
        for _ in range(3):
            stream.synchronize()
            with devices.use_stream(stream):
                began_s = time.perf_counter()
                way(pairs)
                best_s = min(best_s, time.perf_counter() - began_s)
    finally:
        over.set()
        if is_beside:
            thread.join()
    stream.synchronize()
    return best_s


def _until_it_waits(lab: Lab, stream: torch.Stream, pairs: Pairs) -> None:
    """How many copies a stream takes before it lets the caller wait; no events between them."""
    stream.synchronize()
    waited_at = len(pairs[0])
    with devices.use_stream(stream):
        for number, (place, source) in enumerate(zip(*pairs, strict=True)):
            began_s = time.perf_counter()
            place.copy_(source, non_blocking=True)
            if number and time.perf_counter() - began_s > _WAITS_S:
                waited_at = number
                break
    stream.synchronize()
    note = f"of {len(pairs[0])} tried; {_COPIES} are 64 GB"
    lab.tell("copies before the caller waits", waited_at, "", at_least(_COPIES), note)


def _from_pinned(lab: Lab, host: torch.Tensor, device: torch.Tensor, piece_bytes: int) -> None:
    """Copy up what lies pinned while threads checksum it: a restore that copies nothing on the
    host could be so fast.
    """
    data = memoryview(host.numpy()).cast("B")
    stream = devices.make_own_stream(lab.device)
    for threads in sorted({4, 8, max(1, cores() * 3 // 4)}):
        rounds = lab.rounds(8)
        starts = iter([at for _ in range(rounds) for at in range(0, host.numel(), piece_bytes)])
        lock = threading.Lock()

        def work(starts: Iterator[int] = starts, lock: threading.Lock = lock) -> None:
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                for at in range(start, start + piece_bytes, BLOCK_BYTES):
                    checksum(data[at : min(at + BLOCK_BYTES, start + piece_bytes)])
                with devices.use_stream(stream):
                    piece = slice(start, start + piece_bytes)
                    device[piece].copy_(host[piece], non_blocking=True)

        began_s = time.perf_counter()
        crew = [threading.Thread(target=work) for _ in range(threads)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        stream.synchronize()
        rate = rounds * host.numel() / (time.perf_counter() - began_s) / GB
        target = at_least(MEMORY_RATE) if threads > 8 else None
        lab.tell(f"checksummed and copied up, {threads} threads", rate, "GB/s", target)
