"""Keepers are killed while they drain a cache to a bucket on SeaweedFS."""

from __future__ import annotations

import random
import time
import uuid
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch
from torch import nn

import holdfast
from holdfast.testing.faults import wait_until
from holdfast.testing.faults.faulty_proxy import FaultyProxy, RequestFault
from support.checkpoints.roots import whole
from support.runs.keepers import kill_keeper
from support.runs.leftovers import keeper_pids
from support.servers.object_servers import BUCKET, ObjectServer, object_store, use


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


class PartLog(FaultyProxy):
    """Passes everything on, and notes which part of which object was sent."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port)
        self.parts: list[tuple[str, int]] = []

    def _match(self, method: str, target: str) -> dict[RequestFault, float]:
        url = urlsplit(target)
        number = parse_qs(url.query).get("partNumber")
        if method == "PUT" and number:
            key = unquote(url.path).removeprefix(f"/{BUCKET}/")
            self.parts.append((key, int(number[0])))
        return super()._match(method, target)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kills", [5, 100])
def test_keepers_killed_amid_the_parts_of_a_drain_send_at_most_a_tenth_of_them_again(
    tmp_path: Path,
    arena_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    seaweedfs_server: ObjectServer,
    kills: int,
) -> None:
    use(seaweedfs_server, monkeypatch)
    store = object_store(f"drains/{uuid.uuid4().hex}")
    below = store.url.partition(f"/{BUCKET}/")[2]
    monkeypatch.setenv("HOLDFAST_DRAIN_BYTES_S", "40e6")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    random_ = random.Random(kills)
    weight = torch.nn.Parameter(torch.zeros(10_000_000))  # five parts of an upload
    there: dict[tuple[str, int], int] = {}
    """Parts that a keeper left, and how many had been sent by then."""

    def begun() -> list[tuple[str, int]]:
        uploads = store.bucket.uploads(below)
        return [(one.key, part.number) for one in uploads for part in store.bucket.parts(one)]

    with PartLog(seaweedfs_server.port) as log:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{log.port}")
        with holdfast.Checkpointer(
            store.url,
            {"weight": weight},
            storage=holdfast.Every(steps=1),
            keep=holdfast.Keep(),  # so all that was begun is gone on with
            cache=tmp_path / "cache",
        ) as checkpointer:
            checkpointer.restore()
            for step in range(kills):
                with torch.no_grad():
                    weight.fill_(step)
                with suppress(holdfast.SaveError):  # of the keeper that was just killed
                    checkpointer.save(step, durable=True).wait_cached(60)
                wait_until(lambda: bool(begun()), timeout_s=60, what="a part")
                time.sleep(random_.uniform(0, 0.8))
                kill_keeper(arena_dir)
                for part in begun():
                    there.setdefault(part, len(log.parts))
            checkpointer.save(kills, durable=True)
        wait_until(lambda: not keeper_pids(arena_dir), timeout_s=60, what="the keeper's end")
    use(seaweedfs_server, monkeypatch)
    again = [part for part, sent in there.items() if part in log.parts[sent:]]
    images = {part[0] for part in there}
    print(f"{len(there)} parts of {len(images)} images left by kills, {len(again)} sent again")
    assert len(images) > kills // 2
    assert len(again) <= len(there) // 10
    assert images <= set(store.bucket.keys(below))
    assert f"1-{kills}" in whole(store)
    assert store.bucket.uploads(below) == []
    assert holdfast.load(store.url, {"weight": weight}) is not None
    assert weight.eq(kills - 1).all()
