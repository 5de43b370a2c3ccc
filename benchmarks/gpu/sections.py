"""List the sections of a day with a GPU: what each finds, how long it may take, what it needs.

No torch: the command, the page of what was not seen and the tests read this list.
"""

from __future__ import annotations

from typing import NamedTuple


class Section(NamedTuple):
    """A part of the day that runs in a process of its own."""

    name: str
    caption: str
    """What it finds; a line of the page of what was not seen."""
    place: str
    """The module below this package, and the function in it."""
    budget_s: float
    devices: int = 1
    """So many accelerators are needed."""


SECTIONS = (
    Section(
        "facts", "device, driver, links, memory, limits, pages and nodes", "hardware:facts", 15
    ),
    Section("tests", "`tests/gpu` pass", "suites:tests", 100),
    Section(
        "registering",
        "GB/s of pinning by page size, launches beside it, pages of two processes, refusal",
        "hardware:registering",
        25,
    ),
    Section("forks", "a forked process copies pinned pages, or shares them", "hardware:forks", 10),
    Section(
        "calls", "calls of another thread that end a capture, by its mode", "hardware:calls", 25
    ),
    Section("memlock", "the driver counts locked memory, or does not", "hardware:memlock", 5),
    Section(
        "slots",
        "GB/s into a slot, how late it is sealed, how long copies take to enqueue, the fence",
        "copying:slots",
        60,
    ),
    Section(
        "enqueueing",
        "what a copy costs the thread that enqueues it; how many are taken before it waits; "
        "checksums and copies up of pinned memory",
        "enqueueing:enqueueing",
        10,
    ),
    Section("ring", "64 GB through a ring of shared memory", "copying:ring", 45),
    Section(
        "saves",
        "how long `save` holds the thread with 1,000 leaves, and its samples",
        "copying:saves",
        10,
    ),
    Section(
        "first_saves",
        "how long the first three saves hold training; launches beside pinning; the staging pieces",
        "copying:first_saves",
        25,
    ),
    Section("training", "what a snapshot every step costs training", "steps:training", 25),
    Section(
        "collectives",
        "the same beside a collective on several GPUs",
        "steps:collectives",
        10,
        devices=2,
    ),
    Section("graphs", "captures of graphs beside 100 saves", "steps:graphs", 15),
    Section("samples", "what comparing replicas costs a save", "steps:samples", 10),
    Section(
        "restores", "GB/s of a restore from memory and from the page cache", "copying:restores", 30
    ),
    Section(
        "sums", "checksums of offload: their time, and launches a subgroup", "offloading:sums", 10
    ),
    Section(
        "contexts",
        "contexts on other devices after capture, ring, restore and offload",
        "steps:contexts",
        10,
        devices=2,
    ),
    Section(
        "sanitizer",
        "`TORCH_CUDA_SANITIZER` over a capture on the main thread",
        "suites:sanitizer",
        15,
    ),
    Section("compute_sanitizer", "compute-sanitizer over the same", "suites:compute_sanitizer", 15),
    Section("offload", "the targets of `benchmarks/offload.py`", "offloading:offload", 70),
)
MINUTES = 9.0


def page_row(section: Section) -> str:
    """The section's line on docs/operations/accelerators.md."""
    needs = "" if section.devices < 2 else f" (needs {section.devices} devices)"
    return f"| {section.caption}{needs} | `python -m benchmarks gpu --only {section.name}` |"
