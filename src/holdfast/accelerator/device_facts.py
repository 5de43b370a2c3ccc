"""Reports what torch and its accelerator can do, as one line of JSON.

``holdfast doctor`` calls it in a process of its own, because it loads no torch itself.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import tempfile
import time
from contextlib import closing
from typing import Any

import torch

from holdfast.accelerator import devices
from holdfast.accelerator.generators import accelerator_type

#: More than a limit of locked memory usually is, so that it shows whether the driver counts.
PINNED_BYTES = 64 << 20


def report(directory: str) -> dict[str, Any]:
    """Return the accelerator's type and devices, and what pinning memory in ``directory`` gave."""
    kind = accelerator_type() if torch.accelerator.is_available() else ""
    module = torch.get_device_module(kind) if kind else None
    named = getattr(module, "get_device_name", lambda index: f"{kind}:{index}")
    count = torch.accelerator.device_count() if kind else 0
    return {
        "built_for": torch.version.cuda or torch.version.hip or "",
        "cuda": kind == "cuda",
        "accelerator": kind,
        "devices": [named(index) for index in range(count)],
        "pinning": pin(directory, torch.device(kind, 0)) if count else None,
    }


def pin(directory: str, device: torch.device, size_bytes: int = PINNED_BYTES) -> dict[str, Any]:
    """Pin a file in ``directory`` for ``device``, and let it go again."""
    try:
        reason, took_s = _pin(directory, device, size_bytes)
    except OSError as error:
        reason, took_s = str(error), 0.0
    return {"size_bytes": size_bytes, "elapsed_s": took_s, "reason": reason}


def _pin(directory: str, device: torch.device, size_bytes: int) -> tuple[str, float]:
    with tempfile.TemporaryFile(dir=directory, prefix=".doctor-") as file:
        file.truncate(size_bytes)
        with closing(mmap.mmap(file.fileno(), size_bytes)) as memory:
            memory[:] = bytes(size_bytes)  # pages that exist, as a slot's do
            start = ctypes.c_char.from_buffer(memory)
            address, began_s = ctypes.addressof(start), time.monotonic()
            status = devices.register(address, size_bytes, device)
            took_s = time.monotonic() - began_s
            if not status:
                devices.unregister(address, device)
            del start  # nothing points into the mapping when it is closed
    return devices.explain(status) if status else "", took_s


def main() -> None:
    """Print the report; the first argument is a directory in shared memory."""
    sys.stdout.write(json.dumps(report(sys.argv[1])))
