"""PURE. Holds the facts that probes collect about a machine, its arenas and a root, without judging
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The machine as this process sees it. A limit of ``None``: there is none."""

    system: str
    kernel: str
    python: tuple[int, int, int]
    cores: int
    cores_allowed: int
    cores_quota: float | None
    memory_bytes: int
    memory_limit_bytes: int | None
    locked_memory_bytes: int | None
    open_files: int | None

    @property
    def cores_usable(self) -> float:
        """The usable cores, by affinity and by quota."""
        return min(self.cores_allowed, self.cores_quota or self.cores_allowed)


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    """A directory and the file system it is on.

    ``links``, ``locks`` and ``is_direct`` say whether it supports hard links, locks, and I/O past
    the page cache; None: not tried. ``fault`` is the reason why nothing could be written there.
    """

    path: str
    kind: str = ""
    mount: str = ""
    size_bytes: int = 0
    free_bytes: int = 0
    free_files: int | None = None
    is_direct: bool | None = None
    links: bool | None = None
    locks: bool | None = None
    fault: str = ""
    kept: tuple[tuple[str, bool], ...] = ()
    """Of a bucket: what was tried at its server, and whether the server keeps it."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes a second, as measured just now; None: not measured."""

    write: float | None = None
    read: float | None = None
    copy: float | None = None
    checksum: float | None = None


@dataclass(frozen=True, slots=True)
class Pinning:
    """What it gave to pin shared memory for the first device; ``reason``: why it was refused."""

    size_bytes: int
    elapsed_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Near:
    """Where cores, memory and accelerators are, and the processes that use NVIDIA's GPUs.

    A node of -1: the machine does not say. ``contexts``: processes, each with its GPUs.
    """

    nodes: tuple[int, ...] = ()
    nodes_of_cores: tuple[int, ...] = ()
    nodes_of_accelerators: tuple[int, ...] = ()
    huge_pages: str = ""
    contexts: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Torch:
    """The torch of this Python. ``cuda`` None: it was not queried, or did not answer
    (``fault``). ``accelerator``: the type of ``devices``, "" when there are none.
    """

    version: str = ""
    built_for: str = ""
    cuda: bool | None = None
    devices: tuple[str, ...] = ()
    driver: str = ""
    fault: str = ""
    accelerator: str = ""
    pinning: Pinning | None = None


@dataclass(frozen=True, slots=True)
class Arena:
    """One run's memory on this host.

    ``answers`` None: nobody listens. ``is_grave``: half removed, by a process that was killed.
    ``newest`` is the newest generation captured on all ranks, ``part`` the newest of which an image
    or parity is here, and the rest on other hosts. ``has_news``: True if storage lacks one of them
    and has nothing newer of this root; None: storage could not be read.
    """

    path: str
    run_id: str = ""
    root_key: str = ""
    """The key of its root among the run's roots; "": an older version left it, and no run reads
    it.
    """
    host_id: str = ""
    size_bytes: int = 0
    keeper_pid: int = 0
    keeper_state: str = ""
    answers: bool | None = None
    root: str = ""
    root_exists: bool | None = None
    is_its_root: bool | None = None
    """True if the root there is the run's, and no copy; None: that cannot be known."""
    newest: str = ""
    newest_is_durable: bool | None = None
    part: str = ""
    has_news: bool | None = False
    parity_bytes: int = 0
    users: tuple[int, ...] = ()
    is_grave: bool = False
    fault: str = ""

    @property
    def is_stale(self) -> bool:
        """True if nobody keeps it, and nobody has it mapped or is writing to it."""
        return not (self.keeper_pid or self.answers is not None or self.users or self.fault)

    @property
    def may_go(self) -> bool:
        """True if nobody uses it, and nothing would be lost with it."""
        return (self.is_grave and not self.users) or (self.is_stale and self.has_news is False)


@dataclass(frozen=True, slots=True)
class ProtectedFacts:
    """The protection of a run's newest start, as it recorded it.

    ``newest`` is the newest protected generation, ``""`` for none; ``reason`` why the one after it
    is not.
    """

    incarnation: int
    parity: int
    hosts: int
    survives: str
    missing: tuple[str, ...] = ()
    newest: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The endpoint where launchers of this machine meet those of other hosts.

    ``is_here``: True if it is on this machine; None when the name cannot be resolved here. ``on``:
    the host of the run that has it, if known; "" otherwise.
    """

    endpoint: str
    launchers: tuple[int, ...] = ()
    is_here: bool | None = None
    on: str = ""


@dataclass(frozen=True, slots=True)
class RootFacts:
    """A directory of checkpoints. ``holder_pid`` 0: no process of this machine has its lock.

    ``keeps`` is how many checkpoints the run keeps, 0: as many as there are.
    """

    path: str
    exists: bool = True
    keeps: int = 0
    run_id: str = ""
    keys: tuple[str, ...] = ()
    """The keys that its arenas may have."""
    checkpoints: int = 0
    newest: str = ""
    newest_bytes: int = 0
    newest_written_bytes: int = 0
    """Bytes of the newest checkpoint, without those it shares with earlier ones."""
    newest_images: int = 0
    broken: tuple[tuple[str, str], ...] = ()
    damaged: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Checkpoints that lack files or have some of another size, with what is wrong with each."""
    unchecked: int = 0
    """Older checkpoints whose files were not looked up."""
    gap: str = ""
    """The missing record of a start, and the question that it leaves open."""
    leftovers: int = 0
    leftover_bytes: int = 0
    pins_gone: tuple[str, ...] = ()
    pins_unreadable: tuple[str, ...] = ()
    holder_pid: int = 0
    holder: str = ""
    fault: str = ""
    hosts: tuple[str, ...] = ()
    """The hosts of the newest start."""
    protected: ProtectedFacts | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All collected facts. ``root`` None: none was named."""

    host: HostFacts
    memory: PlaceFacts
    storage: PlaceFacts
    torch: Torch
    speeds: Speeds = Speeds()
    settings: dict[str, str] = field(default_factory=dict)
    arenas: tuple[Arena, ...] = ()
    root: RootFacts | None = None
    meetings: tuple[Rendezvous, ...] = ()
    near: Near = Near()


# Defines one finding of doctor.


Severity = Literal["ok", "warn", "bad"]
ORDER: tuple[Severity, ...] = ("ok", "warn", "bad")


@dataclass(frozen=True, slots=True)
class Finding:
    """``text`` states the fact; ``remedy`` says what to run or set, whenever it is not "ok"."""

    severity: Severity
    about: str
    text: str
    remedy: str = ""


def worst(findings: list[Finding]) -> Severity:
    """Returns the highest severity."""
    return max((one.severity for one in findings), key=ORDER.index, default="ok")
