"""Defines the report of a run: starts and what was lost between them, saves, restores, trouble.

``observe.report_builder`` makes it from the events that the run left behind, ``observe.tables``
prints it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from holdfast.events.fields import parent_in_run
from holdfast.observe.clocks import ClockOffset
from holdfast.observe.interference import Interference
from holdfast.observe.ledger import Ledger
from holdfast.observe.log import Divergence
from holdfast.observe.phases import OF_SAVES
from holdfast.observe.reliability import Reliability
from holdfast.observe.rollups import PhaseSpread


@dataclass(frozen=True, slots=True)
class LostTrainer:
    """A rank that went away without a goodbye, as the coordinating keeper saw it."""

    rank: int
    host: str
    pid: int
    time_s: float
    phase: str = ""
    """What it was doing, where its memory was found: training, saving, a phase of the program."""
    step: int = -1
    """The last step that it had ended, where that is known."""
    reason: str = ""
    """What it left in the error file that torchrun gave it."""


@dataclass(frozen=True, slots=True)
class Start:
    """One incarnation as its trainers announced it."""

    incarnation: int
    world: int
    hosts: tuple[str, ...]
    time_s: float
    ended: str = "open"
    """closed | failed (an error ended it) | open (ranks did not close: killed, or still at work)"""
    open_ranks: tuple[int, ...] = ()
    """The ranks that did not close."""
    lost: tuple[LostTrainer, ...] = ()
    """Of these, the ones that were seen to go away, the first of them first."""
    newest_step: int | None = None
    """The newest step that a rank saved, or tried to."""
    down_s: float | None = None
    """Seconds without training before this start: since the last record of the one before."""
    lost_steps: int | None = None
    """Steps that were done before and are not part of the state that this start took up."""


@dataclass(frozen=True, slots=True)
class Save:
    """One save of all ranks. Times are None where nothing was recorded.

    ``held_s``, ``fence_s``, ``copy_s`` and ``write_s`` are those of the slowest rank, which all
    wait for: ``slowest`` names it. ``captured_s`` and ``durable_s`` count from the call of
    ``save``, by the clock of the host that coordinates, ``persist_s`` from when its keeper began
    to write, and ``protect_s`` from when parity was begun.
    """

    incarnation: int
    step: int
    state: str
    """durable | protected | captured | missed | unfinished (the ranks ended before it was)"""
    ranks: int
    held_s: float | None
    fence_s: float | None
    captured_s: float | None
    durable_s: float | None
    persist_s: float | None
    size_bytes: int
    reason: str = ""
    reused_bytes: int | None = None
    """Bytes of ``size_bytes`` that were stored before, if any: frozen and unchanged."""
    describe_s: float | None = None
    volatile_s: float | None = None
    wait_previous_s: float | None = None
    copy_s: float | None = None
    write_s: float | None = None
    protect_s: float | None = None
    slowest: dict[str, int] = field(default_factory=dict)
    """The slowest rank by quantity."""
    ring_bytes: int = 0
    """Bytes of the rings through which its images went to storage, if memory kept none of them."""
    phases: dict[str, PhaseSpread] = field(default_factory=dict)
    """Each phase over the ranks: quantiles to 1 %, and the slowest 16 by name."""
    even: dict[str, PhaseSpread] = field(default_factory=dict)
    """Those that grow with the bytes, as if all ranks had the same."""
    even_bytes: dict[str, float] = field(default_factory=dict)
    """What the same is for each of these phases: the bytes of a rank, on average."""
    time_s: float | None = None
    """When the first rank called ``save``, by the wall clock of its host."""
    late_s: float | None = None
    """How long after the first rank the last one called ``save``, by one clock for all hosts."""
    late_rank: int = -1
    """The last rank to call it."""
    asked_durable: bool = False
    """It was to be durable."""
    uncopied: tuple[int, ...] = ()
    """Of a save that was not captured: ranks that returned and copied no image; 16 at most."""
    unwritten: tuple[int, ...] = ()
    """Of one that was to be durable and is not: ranks whose image was not written; 16 at most."""
    is_abandoned: bool = False
    """A later start went on from an older generation."""

    def bytes_of(self, phase: str) -> dict[int, int]:
        """Returns the bytes that ranks went through a phase with, of those that are named in it: to
        7 digits, as what a rank took and what it would take for the bytes of the others tell them.
        """
        if phase not in self.even or phase not in self.phases:
            return {}
        taken_s, usual_bytes = dict(self.phases[phase].slowest), self.even_bytes.get(phase, 0.0)
        return {
            rank: round(taken_s[rank] / even_s * usual_bytes)
            for rank, even_s in self.even[phase].slowest
            if rank in taken_s and even_s > 0
        }

    @property
    def throughput_bytes_per_s(self) -> float | None:
        """Bytes written and made durable per second of writing."""
        written_bytes = self.size_bytes - (self.reused_bytes or 0)
        return written_bytes / self.persist_s if self.persist_s else None


@dataclass(frozen=True, slots=True)
class Restore:
    """One restore of all ranks: of generation (``parent_incarnation``, ``step``).

    Together the ranks read ``read_bytes`` from the source, and received ``received_bytes`` from
    each other. ``phases``: what they spent in each phase, as docs/operations/metrics.md names them.
    """

    incarnation: int
    parent_incarnation: int
    step: int
    sources: tuple[str, ...]
    elapsed_s: float
    size_bytes: int
    saved_world: int
    world: int
    time_s: float
    read_bytes: int = 0
    received_bytes: int = 0
    phases: dict[str, PhaseSpread] = field(default_factory=dict)

    @property
    def parent(self) -> tuple[int, int] | None:
        """Returns the generation, if it is one of this run."""
        return parent_in_run(self.incarnation, (self.parent_incarnation, self.step), self.sources)


@dataclass(frozen=True, slots=True)
class WrongClock:
    """A host whose clock contradicts what must have been: a rank of it called ``save`` after all
    had been given a place for that save, or copied before.

    ``ahead_s``: how far it is ahead at least (below zero: behind), of what it was compared to.
    ``saves``: in how many of them, the first of which is ``since``.
    """

    host: str
    ahead_s: float
    saves: int
    since: str


@dataclass(frozen=True, slots=True)
class RunMesh:
    """The device mesh that a run's tensors lie on: ``ranks`` in row-major order of ``sizes``, empty
    where that is the order of their numbers.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """Returns the coordinates of each rank."""
        every = itertools.product(*map(range, self.sizes))
        return dict(zip(self.ranks or range(math.prod(self.sizes)), every, strict=False))


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Round trips of short messages between the keepers of two hosts, in seconds.

    ``count``: how often they were measured, ``median_s``: half of the last hundreds took more,
    ``newest_s``: of the last twenty.
    """

    host: str
    other: str
    count: int
    median_s: float
    newest_s: float
    largest_s: float


@dataclass(frozen=True, slots=True)
class KeeperLoss:
    """A lost keeper, counted once however many ranks noticed."""

    incarnation: int
    host: str
    reason: str
    time_s: float


@dataclass(frozen=True, slots=True)
class ProtectionFigures:
    """The losses of hosts that the protected snapshots of an incarnation survive, in words.

    ``missing``: the protection that was asked for and not reached, a sentence each.
    """

    incarnation: int
    parity: int
    hosts: int
    survives: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefusedAtDoor:
    """Requests that the keeper of a host refused at its ``socket``, ``peers`` or ``control``
    port.
    """

    host: str
    door: str
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that changed in a host's memory after they were sealed; see ``events.DamageFound``."""

    incarnation: int
    step: int
    host: str
    what: str
    name: str
    size_bytes: int
    outcome: str
    reason: str
    time_s: float


@dataclass(frozen=True, slots=True)
class RebuiltImage:
    """An image that a lost host had, decoded on ``host``."""

    incarnation: int
    step: int
    rank: int
    host: str
    elapsed_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class KeeperLife:
    """The keepers of one host: their starts, the slowest of these, and the reasons of their ends.

    ``held``: how often the loop of one answered nobody for more than 50 ms, for ``longest_held_s``
    at most.
    """

    host: str
    starts: int
    slowest_start_s: float
    ends: dict[str, int]
    held: int = 0
    longest_held_s: float = 0.0
    samples: int = 0
    """How often it told what its host was like; the next four are the extremes of that."""
    longest_queued_s: float = 0.0
    slowest_finish_s: float = 0.0
    least_free_bytes: int | None = None
    most_keeper_bytes: int = 0
    cpu_pressure: float = -1.0
    """The part of the time in which a process of the host waited for a CPU; -1: not told."""
    io_pressure: float = -1.0
    """The same for I/O."""
    doing: dict[str, int] = field(default_factory=dict)
    """How many trainers were in each phase at the newest sample."""


@dataclass(frozen=True, slots=True)
class PinnedMemory:
    """The shared memory that a rank pinned for its device most slowly."""

    rank: int
    size_bytes: int
    pinned_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One quantity over all saves that have it.

    ``generation`` and ``rank`` are those of the largest; ``rank`` is -1 where it is of no rank.
    """

    count: int
    total: float
    median: float
    largest: float
    p90: float
    p99: float
    generation: str
    rank: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything in a run's events, saves in the order of their generations."""

    root: str
    files: int
    torn_lines: int
    unknown_lines: int
    starts: tuple[Start, ...]
    saves: tuple[Save, ...]
    restores: tuple[Restore, ...]
    keeper_losses: tuple[KeeperLoss, ...]
    persist_failures: tuple[str, ...]
    warnings: tuple[str, ...]
    pruned: int
    divergences: tuple[Divergence, ...] = ()
    protection: tuple[ProtectionFigures, ...] = ()
    unprotected: tuple[str, ...] = ()
    """Snapshots of which no parity could be made, with the reason."""
    refused: tuple[RefusedAtDoor, ...] = ()
    """Requests and connections that keepers refused."""
    damages: tuple[Damage, ...] = ()
    """Damage found in memory, in the order of discovery."""
    late_hosts: dict[str, int] = field(default_factory=dict)
    """Hosts that the others waited for in vain, and at how many saves."""
    invalid_lines: int = 0
    """Records with a value that cannot be: a negative time, a size beyond all."""
    lost_records: int = 0
    """Records that were numbered and are in no file."""
    unreadable: tuple[str, ...] = ()
    """Files that could not be read, with the reason."""
    dropped_sources: tuple[str, ...] = ()
    """Sources of restores that failed or did not verify, with the reason."""
    differing_values: tuple[str, ...] = ()
    """Plain values that differed between ranks at a restore into another world."""
    rebuilt: tuple[RebuiltImage, ...] = ()
    """Images of lost hosts that were decoded."""
    keepers: tuple[KeeperLife, ...] = ()
    """The starts and orderly ends of keepers, by host."""
    ledger: Ledger | None = None
    """Where the time of the run went; None where no start was recorded."""
    reliability: Reliability | None = None
    """What interruptions cost, and what a loss would cost now."""
    clocks: tuple[ClockOffset, ...] = ()
    """How far the clocks of hosts are ahead of the first host's."""
    unplaced_hosts: tuple[str, ...] = ()
    """Hosts whose clock could not be compared with the others."""
    ranks_by_host: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of the newest start."""
    placed_since: int = 0
    """The first start since which no rank is known to have been on another host."""
    last_s: float = 0.0
    """The newest moment in any record."""
    trained_s: float = 0.0
    """The newest moment in any record of a trainer of the newest start."""
    longest_step_s: float = 0.0
    """The longest step, phase of the program or beginning of a start so far."""
    pinned: tuple[PinnedMemory, ...] = ()
    """The slowest pinning of shared memory on each rank."""
    behind: tuple[int, ...] = ()
    """Ranks that did not return from the newest save, from which others did; 16 at most."""
    interference: Interference | None = None
    """What a step takes longer behind a copy or a write; None where that cannot be told."""
    links: tuple[LinkFigures, ...] = ()
    """What messages between keepers take."""
    wrong_clocks: tuple[WrongClock, ...] = ()
    """Clocks that contradict what must have been: nothing is said of who was late by them."""
    mesh: RunMesh | None = None
    """The device mesh of the newest start of which one is known."""

    def hosts_at(self, incarnation: int) -> dict[int, str]:
        """Returns the host of each rank in a start; of none where they were on others."""
        if incarnation < self.placed_since:
            return {}
        return {rank: host for host, ranks in self.ranks_by_host.items() for rank in ranks}

    @property
    def misses(self) -> tuple[Save, ...]:
        """Returns the saves that gave no generation."""
        return tuple(save for save in self.saves if save.state == "missed")

    @property
    def figures(self) -> dict[str, Figures]:
        """Returns sum, median and largest of every quantity that was recorded at all."""
        kept = {name: _values(self.saves, name) for name in QUANTITIES}
        return {name: _figures(name, values) for name, values in kept.items() if values}


#: The phases, and what else each save has one of.
QUANTITIES = (
    *OF_SAVES,
    "captured_s",
    "durable_s",
    "size_bytes",
    "reused_bytes",
    "throughput_bytes_per_s",
)


def _values(saves: Iterable[Save], quantity: str) -> list[tuple[float, Save]]:
    values = ((_value(save, quantity), save) for save in saves)
    return [(value, save) for value, save in values if value is not None]


def _value(save: Save, quantity: str) -> float | None:
    """Returns a quantity of a save: of a phase that of the slowest rank; None without one."""
    spread = save.phases.get(quantity)
    if spread is not None:
        return spread.largest_s
    return getattr(save, quantity, None)


def _figures(quantity: str, values: list[tuple[float, Save]]) -> Figures:
    ordered = sorted(value for value, _ in values)
    largest, save = max(values, key=lambda each: each[0])
    return Figures(
        count=len(ordered),
        total=math.fsum(ordered),
        median=statistics.median(ordered),
        largest=largest,
        p90=_percentile(ordered, 90),
        p99=_percentile(ordered, 99),
        generation=f"{save.incarnation}-{save.step}",
        rank=save.slowest.get(quantity, -1),
    )


def _percentile(ordered: list[float], percent: int) -> float:
    """Returns the smallest value that so many percent are not above."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def to_json(report: Report) -> dict[str, Any]:
    """Returns the report as plain values, with its sums, for ``--json``.

    ``docs/format/report-v1.schema.json`` describes them.
    """
    document = dataclasses.asdict(report)
    for record, save in zip(document["saves"], report.saves, strict=True):
        record["throughput_bytes_per_s"] = save.throughput_bytes_per_s
    if report.ledger is not None:
        document["ledger"]["goodput"] = report.ledger.goodput
        document["ledger"]["ettr"] = report.ledger.ettr
    document["figures"] = {name: dataclasses.asdict(f) for name, f in report.figures.items()}
    return document
