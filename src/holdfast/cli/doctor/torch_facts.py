"""Ask torch about its devices in a process of its own: it takes seconds to load, and may hang."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

from holdfast.cli.doctor.facts import Torch

TIMEOUT_S = 30.0
SCRIPT = """
import json, torch
is_there = torch.cuda.is_available()
count = torch.cuda.device_count() if is_there else 0
print(json.dumps([
    torch.version.cuda or "", is_there, [torch.cuda.get_device_name(i) for i in range(count)],
]))
"""


def probe_torch(*, ask: bool, script: str = SCRIPT, timeout_s: float = TIMEOUT_S) -> Torch:
    """Version and driver are read; devices are asked for only if ``ask``."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Torch(driver=driver())
    if not ask:
        return Torch(version, driver=driver())
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout_s,
            stdin=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        built_for, cuda, devices = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Torch(version, driver=driver(), fault=f"no answer within {timeout_s:g} s")
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"it ended with {error.returncode}"]
        return Torch(version, driver=driver(), fault=said[-1])
    except (OSError, ValueError) as error:
        return Torch(version, driver=driver(), fault=str(error))
    return Torch(version, built_for, cuda, tuple(devices), driver())


def driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the NVIDIA driver in the kernel; "" when there is none."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    except OSError:
        return ""
    return found[1] if found else "of unknown version"
