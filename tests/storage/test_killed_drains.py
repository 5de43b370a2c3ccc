"""Keepers are killed while they drain a cache to a bucket on SeaweedFS."""

from __future__ import annotations

import random
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from support.checkpoints.roots import whole
from support.runs.keepers import kill_keeper
from support.servers.object_servers import ObjectServer, object_store, use


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.promise
@pytest.mark.parametrize("kills", [5, 100])
def test_of_keepers_killed_while_they_drain_to_a_bucket_none_loses_what_was_told(
    tmp_path: Path,
    arena_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    seaweedfs_server: ObjectServer,
    kills: int,
) -> None:
    use(seaweedfs_server, monkeypatch)
    monkeypatch.setenv("HOLDFAST_DRAIN_BYTES_S", "20e6")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    store = object_store(f"drains/{uuid.uuid4().hex}")
    random_ = random.Random(kills)
    torch.manual_seed(0)
    model = nn.Linear(300, 1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handles: list[holdfast.SaveHandle] = []
    cached, durable = set[int](), set[int]()
    with holdfast.Checkpointer(
        store.url,
        {"model": model, "optimizer": optimizer},
        storage=holdfast.Every(steps=1),
        keep=holdfast.Keep(),
        cache=tmp_path / "cache",
    ) as checkpointer:
        checkpointer.restore()
        for step in range(2 * kills + 1):
            model(torch.full((1, 300), step / 7)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            handles.append(checkpointer.save(step, durable=True))
            with suppress(holdfast.SaveError):  # of the keeper that was just killed
                handles[-1].wait_cached(60)
                cached.add(handles[-1].step)
            if step % 2 and step < 2 * kills:
                time.sleep(random_.uniform(0, 0.4))
                kill_keeper(arena_dir)
                durable |= {one.step for one in handles if one.state == "durable"}
    there = set(whole(store))
    print(f"{len(durable)} durable and {len(cached)} cached of {len(handles)} when it was killed")
    assert len(cached) > kills
    assert {f"1-{step}" for step in cached | durable} <= there
    assert store.bucket.uploads(store.url.partition("/drains/")[2]) == []
    loaded = nn.Linear(300, 1000)
    assert holdfast.load(store.url, {"model": loaded}, only=["model.*"]) is not None
    assert torch.equal(loaded.weight, model.weight)
