"""Measure what looking at memory again and again costs, of a core and of copying beside it.

A sealed image in shared memory is looked through at the keeper's rate, for a while, beside the
same while without; and once without a rate, to see how far below what it could do that is.
"""

from __future__ import annotations

import mmap
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit import images, machine, markdown, results, series
from benchmarks.kit.disk import MEMORY
from benchmarks.kit.options import Parser
from holdfast.format.image import fill_in, plan_image
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.scrub import SCRUB_BYTES_S, Scrubber
from holdfast.protocol.arena import SlotRecord

MIB = 1 << 20
COPY_BYTES = 64 * MIB
VALUES = b'{"shared":{},"own":{}}'
SECTION = results.Section(
    "Looking for damage",
    "`python -m benchmarks scrubbing`: a sealed image is looked through again and again, as\n"
    "keepers do, beside copying.",
)


def seal_image(memory: ArenaFiles, size: int) -> int:
    """A slot with one image of this size; its bytes."""
    image = fill_in(plan_image([("a", "U8", (size,))]), {"rank": "0"}, len(VALUES))

    def fill(data: memoryview) -> None:
        data[image.values_offset : image.values_offset + len(VALUES)] = VALUES

    made, fact = images.sealed(image, 0, fill)
    file = memory.files[0] = memory.create(0, image.size_bytes + MIB)
    file.image[: image.size_bytes] = made
    file.write_record(
        SlotRecord(
            state="captured",
            boot_id=memory.boot_id,
            run_id="bench",
            attempt="a0",
            rank=0,
            world=1,
            image_bytes=image.size_bytes,
            header_xxh3=fact.header_xxh3,
            table_xxh3=fact.table_xxh3,
        )
    )
    return image.size_bytes


def core_share(looking: Scrubber, for_s: float) -> tuple[float, float]:
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


def measure(size: int, for_s: float) -> dict[str, Any]:
    """Of an image of this size, with as much time for each of three measurements."""
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="hf-scrub-") as directory:
        memory = ArenaFiles(Path(directory), "bench")
        image_bytes = seal_image(memory, size)
        found: list[object] = []
        free = Scrubber(memory, list, found.append, rate_bytes_s=1 << 50)
        began_s = time.perf_counter()
        free.run_pass()
        unbounded = free.checked_bytes / (time.perf_counter() - began_s)
        share, rate = core_share(Scrubber(memory, list, found.append, pause_s=0.0), for_s)
        source, target = (memoryview(mmap.mmap(-1, COPY_BYTES)) for _ in range(2))
        target[:] = source
        alone = copies(source, target, for_s)
        beside = Scrubber(memory, list, found.append, pause_s=0.0)
        beside.begin()
        beside_s = copies(source, target, for_s)
        beside.end()
    if found:
        raise SystemExit(f"{found} was found damaged: a bit flipped, or the code is wrong")
    return {
        "image_bytes": image_bytes,
        "rate_bytes_s": SCRUB_BYTES_S,
        "measured_bytes_s": round(rate),
        "share_of_a_core": round(share, 5),
        "unbounded_bytes_s": round(unbounded),
        "copy_alone_s": series.summary(alone),
        "copy_beside_s": series.summary(beside_s),
    }


def shown(found: dict[str, Any]) -> str:
    """The table."""
    copy_mb = COPY_BYTES / 1e6
    rows = [
        ["looked at with the keeper's rate, MB/s", f"{found['measured_bytes_s'] / 1e6:.0f}"],
        ["share of a core that takes", f"{found['share_of_a_core']:.1%}"],
        ["looked at without a rate, MB/s", f"{found['unbounded_bytes_s'] / 1e6:.0f}"],
        [f"a copy of {copy_mb:.0f} MB alone, s", markdown.spread(found["copy_alone_s"])],
        ["the same beside the looking, s", markdown.spread(found["copy_beside_s"])],
    ]
    return markdown.table([f"an image of {found['image_bytes'] / 1e6:.0f} MB", ""], rows)


def main(arguments: Sequence[str]) -> int:
    """Measure, print what was, and keep it."""
    parser = Parser("scrubbing", __doc__, quick="64 MB, a second each, nothing kept")
    parser.add_document()
    options = parser.parse(arguments)
    found = measure(*((64 * MIB, 1.0) if options.quick else (1024 * MIB, 10.0)))
    text = shown(found)
    print(text)
    if not options.quick:
        facts = machine.facts(MEMORY, ["xxhash"])
        results.keep("scrubbing", facts, found, text, document=options.document, section=SECTION)
    return 0
