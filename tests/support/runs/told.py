"""Writes the records of runs that never were; what a test does not say of an event is zero."""

from __future__ import annotations

import inspect
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from holdfast import events
from holdfast.events import AnyEvent

_TYPES = {
    "Seconds": 0.0,
    "Difference": 0.0,
    "Rate": 0.0,
    "Count": 0,
    "Bytes": 0,
    "bool": False,
    "str": "",
}
_EMPTY = {
    "dict[str, Count]": {},
    "tuple[Count, ...]": (),
    "tuple[str, ...]": (),
    **_TYPES,
}


def of(kind: type[Any], number: int, rank: int = 0, **fields: Any) -> AnyEvent:
    """An event of a start and a rank; required fields that are not given are empty."""
    hints = {
        name: hint for one in kind.__mro__ for name, hint in inspect.get_annotations(one).items()
    }
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in fields:
            fields[field.name] = _EMPTY[hints[field.name]]
    event: AnyEvent = kind(incarnation=number, rank=rank, **fields)
    return event


class Told:
    """The records of a run, by host. ``ahead_s``: how far the clocks of a host are ahead."""

    def __init__(self, root: Path, ahead_s: dict[str, float] | None = None) -> None:
        self._root, self._ahead_s = root, ahead_s or {}
        self._lines: dict[str, list[bytes]] = defaultdict(list)

    def __call__(self, event: AnyEvent, at_s: float, host: str = "a") -> None:
        """Records an event at a moment by the true clock."""
        at_s += self._ahead_s.get(host, 0.0)
        record = events.to_record(event, at_s + 1_700_000_000)
        record |= {"mono_s": at_s + 4000, "by_host": host, "boot": "b"}
        self._lines[host].append(msgspec.json.encode(record))

    def write(self) -> Path:
        """Writes all to files, as keepers do."""
        folder = self._root / "events"
        folder.mkdir(exist_ok=True)
        for number, lines in enumerate(self._lines.values()):
            (folder / f"host-{number}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        return self._root


def tell_save(
    told: Told,
    number: int,
    step: int,
    at_s: float,
    ranks: dict[int, str],
    *,
    durable: bool = True,
    **seconds: Any,
) -> None:
    """One save of all ranks; ``seconds``: of a phase, as a number or by rank."""

    def took(name: str, rank: int, usual_s: float) -> float:
        given = seconds.get(name, usual_s)
        return float(given.get(rank, usual_s) if isinstance(given, dict) else given)

    for rank, host in ranks.items():
        held_s = took("held_s", rank, 0.01)
        image = {"step": step, "size_bytes": int(took("size_bytes", rank, 1_000_000))}
        told(of(events.SaveReturned, number, rank, held_s=held_s, **image), at_s + held_s, host)
        copy_s, grant_s = took("copy_s", rank, 0.2), took("grant_s", rank, 0.0)
        parts = {"elapsed_s": copy_s + grant_s, "copy_s": copy_s, "grant_s": grant_s}
        told(of(events.ImageCaptured, number, rank, **parts, **image), at_s + copy_s, host)
        write_s = took("write_s", rank, 0.3)
        if durable:
            told(
                of(events.ImageDurable, number, rank, elapsed_s=write_s, **image),
                at_s + 0.2 + write_s,
                host,
            )
    world = len(ranks)
    captured = of(events.SnapshotCaptured, number, -1, step=step, elapsed_s=0.2, world=world)
    told(captured, at_s + 0.25, ranks[0])
    if durable:
        persist_s = seconds.get("persist_s", 0.5)
        published = of(
            events.CheckpointPublished,
            number,
            -1,
            step=step,
            elapsed_s=persist_s,
            receipt_s=seconds.get("receipt_s", 0.0),
            size_bytes=world * 1_000_000,
            images=world,
        )
        told(published, at_s + 0.2 + persist_s, ranks[0])


def tell_start(
    told: Told,
    number: int,
    at_s: float,
    ranks: dict[int, str],
    parent: tuple[int, int] | None = None,
    source: str = "memory",
) -> None:
    """The start of all ranks, and their restore, which takes a second."""
    for rank, host in ranks.items():
        fields = {"run_id": "r", "world": len(ranks), "host": host, "pid": 100 + rank}
        told(of(events.RunStarted, number, rank, process_s=3.0, joined_s=1.0, **fields), at_s, host)
        if parent is not None:
            told(
                of(
                    events.Restored,
                    number,
                    rank,
                    step=parent[1],
                    source=source,
                    elapsed_s=1.0,
                    parent_incarnation=parent[0],
                    world=len(ranks),
                    saved_world=len(ranks),
                ),
                at_s + 1,
                host,
            )


RANKS = {0: "a", 1: "a", 2: "b", 3: "b"}


def tell_sick_run(root: Path, *, evil: str = "") -> Path:
    """A run of two hosts whose clocks are an hour apart: rank 3 dies twice, b's disk is slow, and
    most else that can be wrong is; ``evil`` stands in every text.
    """
    ranks = {rank: host + evil for rank, host in RANKS.items()}
    a, b = ranks[0], ranks[3]
    told = Told(root, {b: 3600.0})
    tell_start(told, 1, 10.0, ranks)
    for step in range(12):
        tell_save(told, 1, step, 11.0 + 10 * step, ranks)
    tell_death(told, 1, 130.0, ranks, evil)
    tell_start(told, 2, 150.0, ranks, (1, 9))
    for step in range(10, 14):
        tell_save(told, 2, step, 152.0 + 10 * (step - 10), ranks)
    tell_death(told, 2, 190.0, ranks, evil)
    tell_start(told, 3, 210.0, ranks, (2, 12), "storage")
    slow = {2: 2.1, 3: 2.2}
    for step in range(13, 25):
        tell_save(told, 3, step, 212.0 + 10 * (step - 13), ranks, write_s=slow)
    for step in range(25, 29):
        missed = of(events.SnapshotMissed, 3, -1, step=step, reason=f"late{evil}", late_hosts=(b,))
        told(missed, 340.0 + step, a)
    keeper: list[tuple[type[Any], dict[str, Any]]] = [
        (
            events.ProtectionPlanned,
            {"parity": 1, "hosts": 2, "survives": evil, "missing": ("m" + evil,)},
        ),
        (events.SourceDropped, {"source": f"memory{evil}", "reason": f"checksum{evil}"}),
        (events.DamageFound, {"host": b, "what": "image", "name": evil, "outcome": "repaired"}),
        (events.PersistBroke, {"step": 13, "reason": f"full{evil}"}),
        (events.KeeperStarted, {"pid": 1}),
        (events.KeeperStarted, {"pid": 2}),
        (events.KeeperStarted, {"pid": 3}),
        (events.KeeperStopped, {"reason": f"nobody came back{evil}"}),
        (events.LoopHeld, {"host": b, "times": 2, "longest_s": 0.5}),
        (events.RequestsRefused, {"host": b, "door": "peers", "counts": {f"forged{evil}": 3}}),
        (events.ValuesDiffer, {"names": (f"v{evil}",)}),
        (events.Warned, {"message": f"look{evil}"}),
        (events.ImageRebuilt, {"host": b, "elapsed_s": 1.0, "size_bytes": 5}),
        (events.MemoryPinned, {"size_bytes": 10, "pinned_bytes": 5, "elapsed_s": 1.0}),
        (
            events.ReplicasDiffer,
            {"leaf": f"w{evil}", "box": "0", "ranks": (1,), "replicas": 3, "is_known_which": True},
        ),
    ]
    for kind, fields in keeper:
        told(of(kind, 3, -1, **fields), 372.0, a)
    told(of(events.KeeperLost, 3, 3, reason=f"killed{evil}"), 372.0, b)
    return told.write()


def tell_death(told: Told, number: int, at_s: float, ranks: dict[int, str], evil: str) -> None:
    """Rank 3 dies in a phase that the program declared, and the others are stopped after 4 s."""
    died = of(events.TrainerDied, number, 3, host=ranks[3], phase=f"eval{evil}", quiet_s=1.0)
    told(died, at_s + 1, ranks[3])
    for rank, host in reversed(ranks.items()):
        lost_s = at_s if rank == 3 else at_s + 4
        told(of(events.TrainerLost, number, rank, host=host, pid=100 + rank), lost_s, ranks[0])
