"""Holds the callbacks of a copier, the errors that end its copy, and the seal that it returns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec import Struct

from holdfast.capture.copy_plan import SharedCopy


class ImageSeal(Struct, frozen=True):
    """Checksums and sizes of the finished image."""

    image_bytes: int
    header_xxh3: str
    table_xxh3: str


class CopyCancelled(Exception):
    """The capture was cancelled by another thread; its copy is void."""


class GpuCopyStuck(Exception):
    """A GPU no longer answers, so its copies may still be in flight into the slot."""


class CopyProgress(Struct):
    """Callbacks of a copier: check for cancellation, report progress, wait for ring space."""

    check: Callable[[], None]
    """Raises CopyCancelled if the capture was cancelled."""
    copied: Callable[[int], None]
    """Called with the number of bytes from the start of the image that are final."""
    enqueued: Callable[[list[torch.Event]], None]
    """Called once when the last GPU copy is enqueued: updates may wait on these events."""
    shared: Callable[[SharedCopy], None] = lambda _: None
    """Called with the copying that other threads may join until it is finished."""
    has_room: Callable[[int], bool] = lambda _: True
    """Returns True if this many bytes from the start of the image are stored (in a ring)."""
    pace: Callable[[int], None] | None = None
    """Waits until this many more bytes may be copied from devices; None: at any rate. Raises
    CopyCancelled if the capture was cancelled.
    """
    wait_room: Callable[[int], None] = lambda _: None
    """Waits until they are. Raises CopyCancelled if the capture was cancelled, or storage makes no
    progress.
    """
