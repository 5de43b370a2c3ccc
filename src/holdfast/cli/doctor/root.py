"""Find out what a run says of its hosts, and where launchers on this machine meet others.

Hosts and protection are in the run's own events. A launcher's endpoint is on its command line, or
in the environment, torchrun's PET_ variables; nothing is asked of whoever listens there.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from holdfast.cli.doctor.facts import Meeting, Protected
from holdfast.events import (
    ProtectionPlanned,
    RunStarted,
    SnapshotNotProtected,
    SnapshotProtected,
)
from holdfast.observe.told import told

ENDPOINT, NODES = "PET_RDZV_ENDPOINT", "PET_NNODES"
_ENDPOINT = ("--rdzv-endpoint", "--rdzv_endpoint")
_NODES = ("--nnodes",)
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")


def probe_hosts(root: str) -> tuple[str, ...]:
    """The hosts of the newest start, by name."""
    starts: dict[int, set[str]] = defaultdict(set)
    for event in told(root, RunStarted):
        starts[event.incarnation].add(event.host)
    return tuple(sorted(starts[max(starts)])) if starts else ()


def probe_protected(root: str) -> Protected | None:
    """What the newest start says of its protection; None when it never kept any parity."""
    planned = max(told(root, ProtectionPlanned), key=lambda e: e.incarnation, default=None)
    if planned is None:
        return None
    n = planned.incarnation
    newest = max((e.step for e in told(root, SnapshotProtected) if e.incarnation == n), default=-1)
    missed = max(
        (e for e in told(root, SnapshotNotProtected) if e.incarnation == n and e.step > newest),
        key=lambda e: e.step, default=None,
    )  # fmt: skip
    return Protected(
        n, planned.parity, planned.hosts, planned.survives, planned.missing,
        newest=f"{n}-{newest}" if newest >= 0 else "",
        reason="" if missed is None else missed.reason,
    )  # fmt: skip


def probe_meetings(hosts: Collection[str], proc: Path = Path("/proc")) -> tuple[Meeting, ...]:
    """The endpoints of all launchers that can be seen, and of this very environment."""
    found: dict[str, list[int]] = {}
    said = os.environ.get(ENDPOINT, "").strip()
    if said and _are_several(os.environ.get(NODES, "2")):
        found[said] = []
    for pid, endpoint in _launchers(proc):
        found.setdefault(endpoint, []).append(pid)
    return tuple(_meeting(one, tuple(pids), hosts) for one, pids in sorted(found.items()))


def _launchers(proc: Path) -> Iterator[tuple[int, str]]:
    """Processes that run torchrun for several hosts, and where they were told to meet."""
    for name in sorted(filter(str.isdecimal, os.listdir(proc)), key=int):
        try:
            words = (proc / name / "cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue
        is_launcher = any(word in _LAUNCHERS or Path(word).name == "torchrun" for word in words[:4])
        endpoint = _option(words, _ENDPOINT) if is_launcher else ""
        if endpoint and _are_several(_option(words, _NODES)):
            yield int(name), endpoint


def _option(words: list[str], names: tuple[str, ...]) -> str:
    for number, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name in names:
            return value if has_value else "".join(words[number + 1 : number + 2])
    return ""


def _are_several(nodes: str) -> bool:
    """Of "4" or "2:4"; torchrun's own is one."""
    most = nodes.rpartition(":")[2].strip()
    return most.isdecimal() and int(most) > 1


def _meeting(endpoint: str, launchers: tuple[int, ...], hosts: Collection[str]) -> Meeting:
    name = endpoint.rsplit(":", 1)[0].strip("[]")
    addresses = _addresses(name)
    on = next((one for one in sorted(hosts) if one == name), "")
    if not on and addresses:
        on = next((one for one in sorted(hosts) if _addresses(one) & addresses), "")
    is_here = any(map(_is_of_this_machine, addresses)) if addresses else None
    return Meeting(endpoint, launchers, is_here, on)


def _addresses(name: str) -> set[str]:
    try:
        return {str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)}
    except (OSError, UnicodeError):
        return set()


def _is_of_this_machine(address: str) -> bool:
    """Whether something could listen there: only a machine's own addresses can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
