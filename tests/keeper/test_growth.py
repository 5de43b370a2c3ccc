"""A keeper that serves a run for months holds what the newest saves need, and no more."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from holdfast.coordinator.actions import Action
from holdfast.format.manifest import AttemptId, ImageId, ImageRef, Manifest, seal, unseal
from holdfast.geometry.layout import (
    REPLICATE,
    Instance,
    LeafEntry,
    Mesh,
    table_hash,
)
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.published_images import PublishedImages
from holdfast.protocol import messages as m
from holdfast.transport.server import PeerServer
from holdfast.transport.wire.http import layout_path
from support.coordinator.coordinators import TABLES, Keeper, declared, granted


def blocks_grown(act: Callable[[], object]) -> int:
    """How many more blocks of memory Python holds after it: containers, numbers, text, patterns."""
    with warnings.catch_warnings(action="ignore"):  # of what other tests left behind
        gc.collect()
    before = sys.getallocatedblocks()
    act()
    gc.collect()
    return sys.getallocatedblocks() - before


def test_the_coordinator_holds_nothing_of_saves_that_are_over() -> None:
    keeper = Keeper()

    def save(steps: range) -> None:
        for step in steps:
            keeper.c.lifecycle.persisted(keeper.capture(step, durable=True, exact=True))

    save(range(300))
    assert blocks_grown(lambda: save(range(300, 900))) < 60


def test_the_coordinator_holds_no_layout_but_those_of_the_newest_saves() -> None:
    keeper = Keeper()

    def save(steps: range) -> None:
        for step in steps:
            mesh = Mesh((2,), (0, 1))
            leaf = LeafEntry("w", "F32", (8,), "split", Instance(mesh, (REPLICATE,)))
            TABLES.clear()
            data = declared([leaf, LeafEntry(f"counter{step:05}", "F32", (), "lowest")])
            actions: list[Action] = []
            for rank in range(2):
                ask = m.RequestCapture(
                    step=step, table=table_hash(data), values_bytes=10, durable=False
                )
                actions += keeper.with_memory(keeper.c.request_capture(rank, ask, 0.0))
            for rank in range(2):
                keeper.seal(rank, granted(actions))

    save(range(440))  # dictionaries and free lists grow for some hundred saves
    assert blocks_grown(lambda: save(range(440, 540))) < 100


def test_reading_manifests_leaves_nothing_behind() -> None:
    def read(steps: range) -> None:
        for step in steps:
            image = ImageRef(
                path=f"steps/1-{step}-a/live-00000.safetensors",
                rank=0,
                size_bytes=1,
                header_xxh3="0" * 16,
                table_xxh3="0" * 16,
            )
            manifest = Manifest(
                run_id="r",
                incarnation=1,
                step=step,
                attempt="a",
                world=1,
                layout="0" * 32,
                images=(image,),
            )
            unseal(Manifest, seal(manifest), "m")

    read(range(10))
    assert blocks_grown(lambda: read(range(10, 310))) < 60


class Server:
    """What a peer could ask for."""

    def __init__(self) -> None:
        self.documents: dict[str, bytes] = {}

    def offer_document(self, path: str, data: bytes, **_: Any) -> None:
        self.documents[path] = data

    def offer_file(self, path: str, *_: Any, **__: Any) -> None: ...

    def withdraw(self, path: str) -> bool:
        return self.documents.pop(path, None) is not None


def test_peers_are_offered_the_layouts_that_memory_has_and_no_older_ones(arena_dir: Path) -> None:
    memory, server = ArenaFiles(arena_dir, "run"), Server()
    offering = PublishedImages(memory)
    offering.serve(cast(PeerServer, server), "a", 1)
    used: list[str] = []
    for step in range(50):
        data = json.dumps({"step": step}).encode()
        used = [*used[-2:], table_hash(data)]
        memory.store_layout(used[-1], data, used)
        id_ = AttemptId(1, step, f"a{step}", 1, used[-1])
        offering.publish(step % 3, id_, ImageId(0, 10, "h", "t"))
        offered = {path for path in server.documents if "layout" in path}
        assert {layout_path(one) for one in used} <= offered
        assert len(offered) <= len(used) + 1
