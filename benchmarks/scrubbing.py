"""What looking at memory again and again costs: of a core, and of copying done at the same time.

``python benchmarks/scrubbing.py``, or ``--quick`` with 64 MB. A sealed image in shared memory is
looked through at the keeper's rate, for a while, beside the same while without; and once without
a rate, to see how far below what it could do that is. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import tempfile
import threading
import time
from pathlib import Path

from holdfast.format.checksum import block_count, checksum, pack_table, text
from holdfast.format.image import fill_in, plan_image
from holdfast.keeper.memory import Memory
from holdfast.keeper.scrubbing import SCRUB_BYTES_S, Scrubbing
from holdfast.snapshot.arena import SlotRecord

MIB = 1 << 20
COPY_BYTES = 64 * MIB
VALUES = b'{"shared":{},"own":{}}'


def seal_image(memory: Memory, size: int) -> int:
    """A slot with one image of this size; its bytes."""
    image = fill_in(plan_image([("a", "U8", (size,))]), {"rank": "0"}, len(VALUES))
    file = memory.files[0] = memory.create(0, image.size_bytes + MIB)
    view, start = file.image, image.data_start
    view[:start] = image.header
    view[start + image.values_offset : start + image.values_offset + len(VALUES)] = VALUES
    end = start + image.table_offset
    sums = [
        checksum(view[start + n * MIB : min(start + (n + 1) * MIB, end)])
        for n in range(block_count(image.table_offset))
    ]
    table = pack_table(sums, image.table_entries)
    view[end : image.size_bytes] = table
    file.write_record(SlotRecord(
        state="captured", boot_id=memory.boot_id, run_id="bench", attempt="a0", rank=0, world=1,
        image_bytes=image.size_bytes, header_xxh3=text(checksum(image.header)),
        table_xxh3=text(checksum(table)),
    ))  # fmt: skip
    return image.size_bytes


def core_share(looking: Scrubbing, for_s: float) -> tuple[float, float]:
    """(share of a core, bytes a second) of looking for so long."""
    used, before = [], looking.checked_bytes

    def work() -> None:
        began_s = time.thread_time()
        looking._work()
        used.append(time.thread_time() - began_s)

    thread = threading.Thread(target=work)
    started_s = time.monotonic()
    thread.start()
    time.sleep(for_s)
    looking.end()
    thread.join()
    took_s = time.monotonic() - started_s
    return used[0] / took_s, (looking.checked_bytes - before) / took_s


def copies(source: memoryview, target: memoryview, for_s: float) -> list[float]:
    """How long each copy took, again and again."""
    found, until_s = [], time.monotonic() + for_s
    while time.monotonic() < until_s:
        began_s = time.perf_counter()
        target[:] = source
        found.append(time.perf_counter() - began_s)
        time.sleep(0.01)
    return found


def main() -> None:
    """Measure, and print what was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    size, for_s = (64 * MIB, 1.0) if quick else (1024 * MIB, 10.0)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hf-scrub-") as directory:
        memory = Memory(Path(directory), "bench")
        image_bytes = seal_image(memory, size)
        found: list[object] = []
        free = Scrubbing(memory, list, found.append, rate_bytes_s=1 << 50)
        began_s = time.perf_counter()
        free.look_through()
        unbounded = free.checked_bytes / (time.perf_counter() - began_s)
        share, rate = core_share(Scrubbing(memory, list, found.append, pause_s=0.0), for_s)
        source, target = (memoryview(mmap.mmap(-1, COPY_BYTES)) for _ in range(2))
        target[:] = source
        alone = copies(source, target, for_s)
        beside = Scrubbing(memory, list, found.append, pause_s=0.0)
        beside.begin()
        beside_s = copies(source, target, for_s)
        beside.end()
    assert not found, "a bit flipped, or the code is wrong"
    print(json.dumps({
        "image_bytes": image_bytes,
        "rate_bytes_s": SCRUB_BYTES_S,
        "measured_bytes_s": round(rate),
        "share_of_a_core": round(share, 5),
        "unbounded_bytes_s": round(unbounded),
        "copy_alone_s": round(statistics.median(alone), 5),
        "copy_beside_s": round(statistics.median(beside_s), 5),
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
