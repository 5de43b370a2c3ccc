"""Copies one rank's image into a slot, and checksums each block.

Small tensors go together in one call; large ones in segments, each checksummed while its bytes are
still in the processor's cache, by the worker and by a second thread while training waits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.accelerator.devices import host_address
from holdfast.capture.copy_plan import SharedCopy, SlotTarget, sum_blocks
from holdfast.capture.device_copies import copy_from_devices
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyProgress, ImageSeal
from holdfast.capture.replica_samples import ReplicaSample
from holdfast.format.checksum import BLOCK_BYTES, checksum, pack_table, text
from holdfast.format.image import Image


def copy_image(
    target: SlotTarget,
    image: Image,
    values: bytes,
    overtaking: OvertakeDetector,
    progress: CopyProgress,
    turn: int,
    ready: Mapping[torch.device, torch.Event],
    sample: ReplicaSample | None = None,
) -> ImageSeal:
    """Fill ``target`` with one image; ``ready`` has an event behind the computation, per device.

    ``sample`` is taken at the same moment. If CaptureOvertaken or CopyCancelled is raised, the
    image is void.
    """
    sample = sample or ReplicaSample()
    memory, start = target.memory, image.data_start
    memory[:start] = image.header
    if image.gap is not None:  # before the checksum of its block
        memory[start + image.gap[0] : start + image.gap[1]] = bytes(image.gap[1] - image.gap[0])
    if ready:
        sums = copy_from_devices(target, image, overtaking, progress, turn, ready, sample)
    else:
        sums = _copy_on_cpu(target, image, overtaking, progress, turn, sample)
    stop = start + image.values_offset + image.values_bytes
    memory[start + image.values_offset : stop] = values
    table_start = start + image.table_offset
    memory[stop:table_start] = bytes(table_start - stop)
    sum_blocks(memory, start, image.table_offset, sums, image.table_offset)
    table = pack_table(sums, image.table_entries)
    memory[table_start : image.size_bytes] = table
    progress.check()
    return ImageSeal(image.size_bytes, text(checksum(image.header)), text(checksum(table)))


def _copy_on_cpu(
    target: SlotTarget,
    image: Image,
    overtaking: OvertakeDetector,
    progress: CopyProgress,
    turn: int,
    sample: ReplicaSample,
) -> list[int]:
    if target.small[0]:
        torch._foreach_copy_(*target.small)
    for copy in target.apart:
        progress.check()
        target.view(copy).copy_(copy.source)
    data = target.memory[image.data_start :]
    sharing = SharedCopy(target.segments, data, host_address(target.data), progress.check)
    try:
        if len(target.segments) > 1:
            progress.shared(sharing)
        sharing.work(
            lambda done: progress.copied(image.data_start + done // BLOCK_BYTES * BLOCK_BYTES)
        )
        sample.sum_on_host()  # while a second thread may still copy the last segment
        sums = sharing.finish()
    finally:
        sharing.stop()  # also after an error: no thread writes to this memory any more
    progress.check()
    overtaking.check(target, turn)
    overtaking.agreeing.check()
    return sums
