"""What a run told of itself in its root: which generations were protected, which are durable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.catalogue import catalogue
from holdfast.format.manifest import Generation
from holdfast.storage.local import LocalStore
from holdfast.testing.faults.moments import wait_until


def events_of(root: Path | str, name: str) -> Iterator[dict[str, Any]]:
    """All events of this name that any process of the run wrote down, in no order."""
    for path in (Path(root) / "events").glob("*.jsonl"):
        for line in path.read_text(errors="replace").splitlines():
            if f'"{name}"' not in line:
                continue
            try:
                event = json.loads(line)
            except ValueError:  # cut off by a kill
                continue
            if event["event"] == name:
                yield event


def newest_protected(root: Path | str, *, incarnation: int | None = None) -> Generation | None:
    """The newest generation, of one start or of all, that was said to survive lost hosts."""
    told = (
        Generation(int(event["incarnation"]), int(event["step"]))
        for event in events_of(root, "SnapshotProtected")
    )
    return max((one for one in told if incarnation in (None, one.incarnation)), default=None)


def newest_durable(root: Path | str) -> Generation | None:
    """The newest checkpoint in storage that a start would take."""
    return catalogue(LocalStore(Path(root))).latest if Path(root).is_dir() else None


def wait_protected(
    root: Path | str, incarnation: int, *, more: int = 3, after: int = -1, timeout_s: float = 60.0,
    check: Callable[[], object] = lambda: None,
) -> int:  # fmt: skip
    """Wait until this start has protected ``more`` steps after ``after``; the newest of them.

    ``check`` is called meanwhile and may raise. TimeoutError says what was protected, and why not
    more.
    """
    steps: set[int] = set()

    def is_enough() -> bool:
        check()
        steps.update(
            int(event["step"]) for event in events_of(root, "SnapshotProtected")
            if event["incarnation"] == incarnation and event["step"] > after
        )  # fmt: skip
        return len(steps) >= more

    def what() -> str:
        why = [event["reason"] for event in events_of(root, "SnapshotNotProtected")]
        return f"{more} protected steps after {after} ({sorted(steps)} are; not: {why[-3:]})"

    wait_until(is_enough, timeout_s=timeout_s, what=what, pause_s=0.05)
    return max(steps)
