"""A replica group of torchft that goes on after the last step. Kill it, and start it again.

A lighthouse (`torchft_lighthouse --min_replicas 1`) has its address in TORCHFT_LIGHTHOUSE. Each
group is started with a REPLICA_GROUP_ID of its own: 0, 1, and so on.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

import holdfast
from holdfast.integrations.torchft import attach

group = int(os.environ.get("REPLICA_GROUP_ID", "0"))
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of this group
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
    load_state_dict=None,
    state_dict=None,
    min_replica_size=1,
    replica_id=f"group_{group}",  # the same at each start
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
    hostname="localhost",
)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8))
model = DistributedDataParallel(manager, net)
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = Optimizer(manager, inner)
state = {"model": net, "optimizer": inner, "rng": holdfast.Rng()}
ckpt = attach(manager, state, sys.argv[1], storage=holdfast.Every(steps=10))

while (step := manager.current_step()) < 30:
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 100 + group))
    optimizer.zero_grad()  # begins a step, in which a peer may give its state
    loss = (model(batch) - batch.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    ckpt.step()  # saves nothing where the step was not committed
    if ckpt.has_committed:
        print(ckpt.steps, loss.item(), flush=True)
ckpt.close()
manager.shutdown()
os._exit(0)  # the threads of torchft do not end by themselves
