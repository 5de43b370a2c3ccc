"""What looking at memory again and again costs: of a core, and of copying done at the same time.

``python benchmarks/scrubbing.py``, or ``--quick`` with 64 MB. A sealed image in shared memory is
looked through at the keeper's rate, for a while, beside the same while without; and once without
a rate, to see how far below what it could do that is.
"""

from __future__ import annotations

import argparse
import mmap
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness

from holdfast.format.checksum import block_count, checksum, pack_table, text
from holdfast.format.image import fill_in, plan_image
from holdfast.keeper.memory import Memory
from holdfast.keeper.scrubbing import SCRUB_BYTES_S, Scrubbing
from holdfast.snapshot.arena import SlotRecord

MIB = 1 << 20
COPY_BYTES = 64 * MIB
VALUES = b'{"shared":{},"own":{}}'
PLACE, TITLE = "## The keeper\n", "## Looking for damage\n"
LEAD = (
    "`python benchmarks/scrubbing.py`: a sealed image is looked through again and again, as\n"
    "keepers do, beside copying.\n"
)


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


def measure(size: int, for_s: float) -> dict[str, Any]:
    """Of an image of this size, with as much time for each of three measurements."""
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
    if found:
        raise SystemExit(f"{found} was found damaged: a bit flipped, or the code is wrong")
    return {
        "image_bytes": image_bytes,
        "rate_bytes_s": SCRUB_BYTES_S,
        "measured_bytes_s": round(rate),
        "share_of_a_core": round(share, 5),
        "unbounded_bytes_s": round(unbounded),
        "copy_alone_s": harness.summary(alone),
        "copy_beside_s": harness.summary(beside_s),
    }


def shown(found: dict[str, Any]) -> str:
    """The table."""
    copy_mb = COPY_BYTES / 1e6
    rows = [
        ["looked at with the keeper's rate, MB/s", f"{found['measured_bytes_s'] / 1e6:.0f}"],
        ["share of a core that takes", f"{found['share_of_a_core']:.1%}"],
        ["looked at without a rate, MB/s", f"{found['unbounded_bytes_s'] / 1e6:.0f}"],
        [f"a copy of {copy_mb:.0f} MB alone, s", harness.seconds(found["copy_alone_s"])],
        ["the same beside the looking, s", harness.seconds(found["copy_beside_s"])],
    ]
    return harness.table([f"an image of {found['image_bytes'] / 1e6:.0f} MB", ""], rows)


def put_into(document: Path, text: str) -> None:
    """Into its section, which is made the first time there are figures for it."""
    page = document.read_text()
    if TITLE not in page:
        section = f"{TITLE}\n{LEAD}\n<!-- scrubbing -->\n<!-- /scrubbing -->\n\n"
        before, place, after = page.partition(PLACE)
        document.write_text(before + section + place + after)
    harness.replace_block(document, "scrubbing", text)


def main() -> None:
    """Measure, print what was, and keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="64 MB, a second each, nothing kept")
    harness.add_document_option(parser)
    options = parser.parse_args()
    found = measure(*((64 * MIB, 1.0) if options.quick else (1024 * MIB, 10.0)))
    text = shown(found)
    print(text)
    if options.quick:
        return
    facts = harness.machine_facts(Path("/dev/shm"), ["xxhash"])
    print(f"results/{harness.write_results('scrubbing', facts, found, text).name}")
    if options.document:
        put_into(harness.DOCUMENT, text)


if __name__ == "__main__":
    main()
