"""What a run leaves behind for a test to look at: slots in its arena, its events, its storage."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import holdfast
from holdfast.catalogue import STEPS, catalogue
from holdfast.protocol.arena import SLOT_SUFFIX, SlotFile, SlotRecord
from holdfast.storage.local import LocalStore


def slot_records(arena_dir: Path) -> list[SlotRecord]:
    """The records of all slots below this directory that have one."""
    found = []
    for path in sorted(arena_dir.glob(f"*/*/*{SLOT_SUFFIX}")):
        try:
            slot = SlotFile.open(path, writable=False)
        except holdfast.ArenaError:
            continue  # half-made, or removed since it was listed
        record = slot.read_record()
        slot.close()
        if record is not None:
            found.append(record)
    return found


def read_events(root: Path, writer: str, name: str = "") -> list[dict[str, Any]]:
    """The events that ``writer`` (a pattern: "rank-00000", "keeper") has written so far."""
    found = []
    for path in sorted((root / "events").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # being written, or torn by a kill
            if not fnmatch(record.get("writer", ""), f"{writer}-*"):
                continue
            if not name or record["event"] == name:
                found.append(record)
    return found


def newest_sealed(root: Path, world: int) -> int:
    """The newest step that every rank has told to be sealed in memory; -1 when there is none."""
    steps = []
    for rank in range(world):
        told = read_events(root, f"rank-{rank:05d}", "ImageCaptured")
        steps.append(told[-1]["step"] if told else -1)
    return min(steps)


def unpublished_attempts(root: Path) -> set[str]:
    """The directories of images that no manifest names."""
    store = LocalStore(root)
    named = {i.path.split("/")[1] for m in catalogue(store).manifests for i in m.images}
    return set(store.list(STEPS)) - named


def check_storage(root: Path, newest: int) -> None:
    """Every published checkpoint holds one step, whole; the newest is ``newest``."""
    found = catalogue(LocalStore(root))
    assert not found.broken
    assert found.latest is not None and found.latest.step == newest
    for manifest in found.manifests[-8:]:
        with holdfast.open(root, f"{manifest.incarnation}-{manifest.step}") as checkpoint:
            step = manifest.step
            for name in checkpoint.leaves:
                values = set(checkpoint.read(name).flatten().tolist())
                if "momentum" in name:
                    assert values == {-float(step + 1)}
                elif name.endswith("seen"):
                    assert values == {float(step)}
                else:
                    assert values == {(step + 1) * (step + 2) / 2}
