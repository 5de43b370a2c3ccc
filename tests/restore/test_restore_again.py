"""A restore whose source fails goes on with what is left, down to storage, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import holdfast
from holdfast import events
from holdfast.catalogue import layout_path
from holdfast.errors import HoldfastError, RestoreError
from holdfast.format.manifest import Generation
from holdfast.geometry.layout import Layout
from holdfast.restore import restore
from holdfast.restore.cluster.open import open_recovery
from holdfast.restore.planning.candidates import Candidate
from holdfast.restore.planning.selection import Inventories
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.stored import open_stored, overview_of, stored
from holdfast.restore.restore import Restored, restore_first
from holdfast.storage.base import Store
from holdfast.storage.open import open_store
from holdfast.world import World
from support.peers.lost_hosts import Hosts, origins
from support.peers.peering import close_pullers

ROOM = (64, 1100)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_pullers()


class Run:
    """A state saved to storage, whose image is in the memory of host h0 too, with parity."""

    def __init__(self, directory: Path) -> None:
        self.weight = torch.randn(ROOM)
        root = directory / "root"
        holdfast.save(root, {"w": self.weight, "notes": {"n": 5}}, step=1200)
        self.store: Store = open_store(root)
        found = overview_of(self.store)
        (manifest,) = found.read.values()
        layout = Layout.from_json(self.store.read(layout_path(manifest.layout)))
        image = self.store.read(manifest.images[0].path)
        self.hosts = Hosts(
            directory / "hosts",
            3,
            2,
            layout=layout,
            images={0: image},
            attempt=manifest.attempt,
            ranks={"h0": [0], "h1": [], "h2": []},
            generation=Generation(manifest.incarnation, manifest.step),
        )
        self.stored = tuple(stored(found))
        self.parents = found.parents
        self.known = Inventories()
        self.tried: list[str] = []

    def restore(self, here: str = "h2") -> tuple[Restored | None, dict[str, Any]]:
        known = self.hosts.known()
        self.known = replace(known, stored=self.stored, parents=self.parents)
        state: dict[str, Any] = {"w": torch.zeros(ROOM), "notes": {"n": 0}}

        def open_checkpoint(candidate: Candidate) -> Checkpoint:
            (recovery,) = (r for r in self.known.find().recoveries if r.candidate == candidate)
            self.tried.append(origins(recovery))
            if not recovery.sources:
                return open_stored(self.store, candidate, 0)
            return open_recovery(recovery, self.hosts.reach(here))

        def plan_again(candidate: Candidate, error: HoldfastError) -> list[Candidate]:
            self.known = self.known.without(candidate, error.told_fields)
            return self.candidates()

        restored = restore_first(
            World(),
            state,
            self.candidates(),
            open_checkpoint,
            incarnation=4,
            timeout_s=60,
            on_poison=lambda _: None,
            plan_again=plan_again,
        )
        return restored, state

    def candidates(self) -> list[Candidate]:
        return [one.candidate for one in self.known.find().recoveries]

    def check(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["w"], self.weight)
        assert state["notes"] == {"n": 5}


@pytest.fixture
def run(arena_dir: Path, tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    with made.hosts:
        yield made


def test_a_state_comes_from_a_peer(run: Run) -> None:
    restored, state = run.restore()
    assert restored is not None
    assert (restored.source, restored.step) == ("memory", 1200)
    run.check(state)


def test_an_image_that_was_changed_is_decoded_instead(run: Run) -> None:
    run.hosts.flip(0, len(run.hosts.images[0]) // 2)
    dropped: list[events.Event] = []
    unsubscribe = events.subscribe(lambda event, _: dropped.append(event))
    restored, state = run.restore()
    unsubscribe()
    assert restored is not None
    assert restored.source == "memory"
    assert [text.partition(": ")[2] for text in run.tried] == [
        "1 of 1 images from memory",
        "0 of 1 images from memory, of ranks 0 decoded from parity",
    ]
    run.check(state)
    (event,) = (one for one in dropped if isinstance(one, events.SourceDropped))
    assert "h0/images/" in event.reason
    (restored_event,) = (one for one in dropped if isinstance(one, events.Restored))
    assert restored_event.dropped_s > 0, "what the changed image took is told apart"
    assert restored_event.decode_s > 0
    assert restored_event.dropped_s + restored_event.decode_s < restored_event.elapsed_s


def test_when_every_host_is_lost_storage_is_what_is_left(run: Run) -> None:
    for host in ("h0", "h1", "h2"):
        run.hosts.die(host)
    restored, state = run.restore("new")
    assert restored is not None
    assert restored.source == "storage"
    run.check(state)


def test_when_nothing_is_left_every_reason_is_told(run: Run) -> None:
    for host in ("h0", "h1", "h2"):
        run.hosts.die(host)
    run.stored = ()
    with pytest.raises(RestoreError, match=r"(?s)keeper h2 at .*keeper h1 at .*keeper h0 at "):
        run.restore("new")


def test_ranks_read_once_for_all_what_is_not_in_the_memory_of_each(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(restore, "read_once", lambda *_, **__: asked.append(True))
    run.restore()
    assert asked
    asked.clear()
    run.hosts.names = ["h0"]  # one host, which has it all
    run.restore("h0")
    assert not asked
