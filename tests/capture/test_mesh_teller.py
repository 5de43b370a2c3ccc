"""A run reports the mesh that its tensors lie on, with the names of its axes."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.capture import mesh_teller

PROGRAM = """
import json
from types import SimpleNamespace as Made
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from holdfast import events
from holdfast.capture.mesh_teller import MeshTeller

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
told = []
events.subscribe(lambda event, _: told.append(events.to_record(event, 0.0)))
named = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
plain = init_device_mesh("cpu", (8,))
part = distribute_tensor(torch.ones(8, 8), named["tp"], [Shard(0)])
flat = distribute_tensor(torch.ones(8, 8), plain, [Shard(0)])


def tell(teller, table, *tensors, rank=0):
    bindings = [Made(tensor=one) for one in (torch.ones(2), *tensors)]
    description = Made(table_hash=table, bindings=bindings)
    teller.tell(Made(rank=rank, incarnation=3), 5, description)
    told.append(None)


teller = MeshTeller()
tell(teller, "a", part)
tell(teller, "a", flat)
tell(teller, "b", part)
tell(teller, "c", flat)
tell(MeshTeller(), "a", part, rank=1)
tell(MeshTeller(), "a")
print(json.dumps(told))
"""


def test_the_largest_mesh_is_told_once_with_its_names_and_again_when_it_changes() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, check=True)
    told = json.loads(done.stdout)
    meshes = [one and [one["names"], one["sizes"], one["ranks"]] for one in told]
    assert meshes == [
        [["dp", "tp"], [2, 4], []],
        None,
        None,
        None,
        [["axis 0"], [8], []],
        None,
        None,
        None,
    ]
    first = told[0]
    assert (first["event"], first["incarnation"], first["step"], first["rank"]) == (
        "MeshUsed",
        3,
        5,
        0,
    )


def test_a_mesh_that_cannot_be_asked_does_not_stop_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def changed(tensors: object) -> None:
        raise TypeError("torch has changed")

    monkeypatch.setattr(mesh_teller, "_largest", changed)
    description = cast(Any, SimpleNamespace(table_hash="a", bindings=[]))
    mesh_teller.MeshTeller().tell(cast(Any, SimpleNamespace(rank=0)), 1, description)
