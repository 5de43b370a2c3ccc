"""What doctor knows of a machine, an arena directory and a root: values, without any judgement."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as this process sees it. ``None`` of a limit: there is none."""

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
        """By affinity and by quota."""
        return min(self.cores_allowed, self.cores_quota or self.cores_allowed)


@dataclass(frozen=True, slots=True)
class Place:
    """A directory and the file system it lies on.

    ``links``, ``locks`` and ``is_direct`` say whether it takes hard links, locks, and I/O past
    the page cache; None: not tried. ``fault`` is why nothing could be written there.
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


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes a second, as measured just now; None: not measured."""

    write: float | None = None
    read: float | None = None
    copy: float | None = None
    checksum: float | None = None


@dataclass(frozen=True, slots=True)
class Torch:
    """The torch of this Python. ``cuda`` None: it was not asked, or did not answer (``fault``)."""

    version: str = ""
    built_for: str = ""
    cuda: bool | None = None
    devices: tuple[str, ...] = ()
    driver: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Arena:
    """One run's memory on this host.

    ``answers`` None: nobody listens. ``is_grave``: half removed, by somebody who was killed.
    ``newest`` is the newest generation captured on all ranks, ``part`` the newest of which an image
    or parity lies here, and the rest on other hosts. ``has_news``: whether one of them is newer
    than all that storage has; None: storage could not be asked.
    """

    path: str
    run_id: str = ""
    host_id: str = ""
    size_bytes: int = 0
    keeper_pid: int = 0
    keeper_state: str = ""
    answers: bool | None = None
    root: str = ""
    root_exists: bool | None = None
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
        """Nobody keeps it, and nobody has it mapped or is writing to it."""
        return not (self.keeper_pid or self.answers is not None or self.users or self.fault)

    @property
    def may_go(self) -> bool:
        """Whether nobody has it, and nothing would be lost with it."""
        return (self.is_grave and not self.users) or (self.is_stale and self.has_news is False)


@dataclass(frozen=True, slots=True)
class Protected:
    """How the hosts of a run's newest start protect each other, as it said itself.

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
class Meeting:
    """Where launchers of this machine meet those of other hosts.

    ``is_here``: whether that is this machine; None when the name says nothing here. ``on``: the
    host of the run that it is, as far as it is known; "" for none.
    """

    endpoint: str
    launchers: tuple[int, ...] = ()
    is_here: bool | None = None
    on: str = ""


@dataclass(frozen=True, slots=True)
class Root:
    """A directory of checkpoints. ``holder_pid`` 0: no process of this machine has its lock.

    ``keeps`` is how many checkpoints the run keeps, 0: as many as there are.
    """

    path: str
    exists: bool = True
    keeps: int = 0
    run_id: str = ""
    checkpoints: int = 0
    newest: str = ""
    newest_bytes: int = 0
    newest_written_bytes: int = 0
    """Without what it shares with earlier checkpoints."""
    newest_images: int = 0
    broken: tuple[tuple[str, str], ...] = ()
    leftovers: int = 0
    leftover_bytes: int = 0
    pins_gone: tuple[str, ...] = ()
    pins_unreadable: tuple[str, ...] = ()
    holder_pid: int = 0
    holder: str = ""
    fault: str = ""
    hosts: tuple[str, ...] = ()
    """Those of the newest start."""
    protected: Protected | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was found out. ``root`` None: none was named."""

    host: Host
    memory: Place
    storage: Place
    torch: Torch
    speeds: Speeds = Speeds()
    settings: dict[str, str] = field(default_factory=dict)
    arenas: tuple[Arena, ...] = ()
    root: Root | None = None
    meetings: tuple[Meeting, ...] = ()
