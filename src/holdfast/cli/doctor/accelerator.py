"""Finds out which accelerators there are, what torch can do with them, and where their memory lies.

torch takes seconds to load, and may hang: it is queried in a process of its own.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.cli.doctor.rules.probe_facts import Near, Pinning, Torch

TIMEOUT_S = 30.0
#: Prints what is found about devices, and about a directory in the first argument.
REPORT = "from holdfast.accelerator.device_facts import main; main()"
#: Classes of the PCI bus: other display controllers, and accelerators of computation.
_CLASSES = ("0x0302", "0x0380", "0x1200")
_CONTEXTS_TIMEOUT_S = 5.0


def probe_torch(
    *, ask: bool, directory: str = "/dev/shm", script: str = REPORT, timeout_s: float = TIMEOUT_S
) -> Torch:
    """Reads version and driver; devices are queried, and memory in ``directory`` is pinned for
    them, only if ``ask``.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Torch(driver=driver())
    if not ask:
        return Torch(version, driver=driver())
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, directory],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        return _described(version, json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return Torch(version, driver=driver(), fault=f"no answer within {timeout_s:g} s")
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"it ended with {error.returncode}"]
        return Torch(version, driver=driver(), fault=lines[-1])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Torch(version, driver=driver(), fault=str(error))


def _described(version: str, said: dict[str, Any]) -> Torch:
    pinning = said.pop("pinning")
    return Torch(
        version,
        driver=driver(),
        devices=tuple(said.pop("devices")),
        pinning=Pinning(**pinning) if pinning else None,
        **said,
    )


def driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Returns the version of the NVIDIA driver in the kernel; "" when there is none."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    except OSError:
        return ""
    return found[1] if found else "of unknown version"


def probe_near(sys_dir: Path = Path("/sys"), *, cores: frozenset[int] | None = None) -> Near:
    """Reads on which memory nodes cores and accelerators are, and how large shared pages are."""
    mine = frozenset(os.sched_getaffinity(0)) if cores is None else cores
    nodes = sorted(
        int(path.name[4:]) for path in (sys_dir / "devices/system/node").glob("node[0-9]*")
    )
    near = [
        node
        for node in nodes
        if mine & _numbers(sys_dir / f"devices/system/node/node{node}/cpulist")
    ]
    return Near(
        nodes=tuple(nodes),
        nodes_of_cores=tuple(near),
        nodes_of_accelerators=tuple(_accelerator_nodes(sys_dir / "bus/pci/devices")),
        huge_pages=_chosen(sys_dir / "kernel/mm/transparent_hugepage/shmem_enabled"),
        contexts=_contexts(),
    )


def _numbers(path: Path) -> frozenset[int]:
    """Returns the numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in _text(path).split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _accelerator_nodes(bus: Path) -> Iterator[int]:
    for device in sorted(bus.glob("*")):
        if _text(device / "class").startswith(_CLASSES):
            node = _text(device / "numa_node")
            yield int(node) if node.isdecimal() else -1


def _chosen(path: Path) -> str:
    """Returns the chosen one of a line such as "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", _text(path))
    return found[1] if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _contexts() -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Returns the processes that have a context on NVIDIA's GPUs, each with the GPUs' numbers."""
    numbers = {uuid: int(index) for index, uuid in _nvidia_smi("--query-gpu=index,uuid")}
    found: dict[int, set[int]] = defaultdict(set)
    for pid, uuid in _nvidia_smi("--query-compute-apps=pid,gpu_uuid"):
        if uuid in numbers and pid.isdecimal():
            found[int(pid)].add(numbers[uuid])
    return tuple((pid, tuple(sorted(on))) for pid, on in sorted(found.items()))


def _nvidia_smi(query: str) -> list[tuple[str, str]]:
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_CONTEXTS_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [(row[0], row[1]) for row in rows if len(row) == 2]
