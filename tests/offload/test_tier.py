"""State beyond host memory: the same bits, no more memory than allowed, and nothing left over."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StorageError, UnsupportedState, UsageError
from holdfast.offload import HybridAdamW, HybridSGD
from holdfast.storage import direct
from holdfast.storage.direct import Scratch
from support.models import hybrids

#: A subgroup of 1,024 elements, of three kinds.
PART = 3 * 4096
TIGHT, ROOMY = 3 * PART, 5 * PART


def tiered(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> tuple[nn.Module, HybridAdamW]:
    model = hybrids.wide(dtype, seed)
    given = {"subgroup_elements": 700, "host_memory_bytes": TIGHT, "storage_path": path, **options}
    return model, HybridAdamW(model.parameters(), 1e-2, **given)


def plain(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, HybridAdamW]:
    model = hybrids.wide(dtype)
    return model, HybridAdamW(model.parameters(), 1e-2, subgroup_elements=700, **options)


@pytest.mark.parametrize("budget", [TIGHT, ROOMY, 100 * PART])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_step_is_that_of_state_in_memory_and_the_budget_holds(
    tmp_path: Path, dtype: torch.dtype, budget: int
) -> None:
    here = tiered(tmp_path, dtype, host_memory_bytes=budget, lane_delay_s=0.001)
    there = plain(dtype)
    for step in range(5):
        assert hybrids.train(*here, [step]) == hybrids.train(*there, [step])
        assert hybrids.differences(here, there) == []  # read between steps, wherever it lies
    tier = here[1]._tier
    assert tier is not None and 0 < tier.most_bytes <= budget


def test_other_kernels_and_options_are_the_same_too(tmp_path: Path) -> None:
    here, there = tiered(tmp_path, amsgrad=True, host_memory_bytes=2 * TIGHT), plain(amsgrad=True)
    hybrids.train(*here, range(4), clip=0.1, micro=2, clips_itself=True)
    hybrids.train(*there, range(4), clip=0.1, micro=2, clips_itself=True)
    assert hybrids.differences(here, there) == []
    one, other = hybrids.wide(), hybrids.wide()
    options: Any = {"host_memory_bytes": TIGHT, "storage_path": tmp_path}
    ours = HybridSGD(one.parameters(), 0.1, momentum=0.9, subgroup_elements=1000, **options)
    theirs = HybridSGD(other.parameters(), 0.1, momentum=0.9)
    hybrids.train(one, ours, range(4))
    hybrids.train(other, theirs, range(4))
    assert hybrids.differences((one, ours), (other, theirs)) == []


def test_steps_of_a_part_of_the_parameters_are_right_and_the_order_turns(tmp_path: Path) -> None:
    here, there = tiered(tmp_path, host_memory_bytes=ROOMY), plain()
    orders = []
    for step in range(6):
        for model, optimizer in (here, there):
            hybrids.loss_of(model, step).backward()
            if step in (2, 3):
                next(model.parameters()).grad = None
            optimizer.step()
            optimizer.zero_grad()
        tier = here[1]._tier
        assert tier is not None and tier._last is not None
        orders.append(tier._last[1].order)
        assert hybrids.differences(here, there) == []
    assert orders[1] == orders[0][::-1] and len(orders[2]) < len(orders[1])


def test_a_checkpoint_goes_to_and_from_state_in_memory(tmp_path: Path) -> None:
    here, there = tiered(tmp_path / "disk"), plain()
    hybrids.train(*here, range(3))
    hybrids.train(*there, range(3))
    holdfast.save(tmp_path / "run", {"model": here[0], "optimizer": here[1]}, step=2)
    again, memory = tiered(tmp_path / "disk", seed=3), plain()
    hybrids.train(*again, range(7, 9))  # has parts in memory and parts in files
    holdfast.load(tmp_path / "run", {"model": again[0], "optimizer": again[1]})
    holdfast.load(tmp_path / "run", {"model": memory[0], "optimizer": memory[1]})
    for pair in (again, memory):
        assert hybrids.differences(pair, there) == []
    for pair in (again, memory, there):
        hybrids.train(*pair, range(3, 6))
    for pair in (again, memory):
        assert hybrids.differences(pair, there) == []


def test_snapshots_behind_training_are_of_the_step_they_name(tmp_path: Path) -> None:
    here, there = tiered(tmp_path / "disk"), plain()
    truth = []
    state = {"model": here[0], "optimizer": here[1]}
    with holdfast.Checkpointer(tmp_path / "run", state) as checkpointer:
        for step in range(4):
            hybrids.train(*here, [step])
            hybrids.train(*there, [step])
            truth.append([{k: v.clone() for k, v in s.items()} for s in there[1].state.values()])
            checkpointer.save(step, durable=True)
    for step, expected in enumerate(truth):
        again = tiered(tmp_path / "disk", seed=5)
        holdfast.load(tmp_path / "run", {"model": again[0], "optimizer": again[1]}, step)
        for found, wanted in zip(again[1].state.values(), expected, strict=True):
            assert all(hybrids.same(found[kind], wanted[kind]) for kind in wanted)


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("operation", ["read", "write"])
def test_an_error_of_the_disk_breaks_the_update_off_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    here = tiered(tmp_path / "disk")
    hybrids.train(*here, range(2))
    calls = []
    real = getattr(Scratch, operation)

    def failing(self: Scratch, *given: Any) -> None:
        calls.append(1)
        if len(calls) == 7:
            raise StorageError(f"{operation} of an optimizer's state in disk failed")
        real(self, *given)

    monkeypatch.setattr(Scratch, operation, failing)
    hybrids.loss_of(here[0], 2).backward()
    with pytest.raises(StorageError, match=f"{operation} of an optimizer's state"):
        here[1].step()
    monkeypatch.undo()
    with pytest.raises(UsageError, match="broke off"):
        here[1].step()
    with pytest.raises(UnsupportedState, match="broke off"):
        holdfast.save(tmp_path / "run", {"model": here[0], "optimizer": here[1]}, step=2)


def test_what_could_not_be_put_away_last_is_put_away_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tiered(tmp_path), plain()
    hybrids.train(*here, range(1))
    hybrids.train(*there, range(2))
    written = []
    real = Scratch.write

    def last_fails(self: Scratch, *given: Any) -> None:
        written.append(1)
        if len(written) == 3 * count:
            raise StorageError("the last one")
        real(self, *given)

    tier = here[1]._tier
    assert tier is not None and tier._last is not None
    count = len(tier._last[1].writes)
    monkeypatch.setattr(Scratch, "write", last_fails)
    hybrids.loss_of(here[0], 1).backward()
    with pytest.raises(StorageError, match="the last one"):
        here[1].step()
    here[1].zero_grad()
    monkeypatch.undo()
    assert not here[1].broken_off and hybrids.differences(here, there) == []
    hybrids.train(*here, range(2, 4))
    hybrids.train(*there, range(2, 4))
    assert hybrids.differences(here, there) == []


def test_a_full_disk_is_found_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(direct, "allocate", full)
    with pytest.raises(StorageError, match=r"reserve of an optimizer's state in .* are needed, "):
        tiered(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"make of an optimizer's state in .*file/below failed"):
        tiered(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"storage_path": None}, "both, or neither"),
        ({"host_memory_bytes": None}, "both, or neither"),
        ({"host_memory_bytes": -1}, "both, or neither"),
        ({"device_share": 0.5}, "with a storage_path: storage is slower"),
        ({"host_memory_bytes": PART}, "3 subgroups on their way need"),
    ],
)
def test_options_that_cannot_mean_anything_are_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        tiered(tmp_path, **options)


def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    here = tiered(tmp_path)
    hybrids.train(*here, range(1))
    tier = here[1]._tier
    assert tier is not None
    tier._owner += 1
    hybrids.loss_of(here[0], 1).backward()
    with pytest.raises(UsageError, match="a forked process cannot update"):
        here[1].step()


KILLED = """
import sys
import torch
torch.set_num_threads(1)
import holdfast
from holdfast.storage.direct import Scratch
sys.path.insert(0, {tests!r})
import pathlib
from support.models import hybrids
from offload.test_tier import tiered
here = tiered(pathlib.Path({disk!r}))
state = {{"model": here[0], "optimizer": here[1]}}
hybrids.train(*here, range(3))
holdfast.save({run!r}, state, step=2)
writes = []
real = Scratch.write
def slow(self, *given):
    real(self, *given)
    writes.append(1)
    if len(writes) == 10:
        print("in the middle", flush=True)
        import time; time.sleep(60)
Scratch.write = slow
hybrids.train(*here, range(3, 4))
"""


def test_killed_in_the_middle_of_an_update_it_leaves_no_file_and_goes_on_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    tests = Path(__file__).parents[1]
    disk, run = tmp_path / "disk", tmp_path / "run"
    code = KILLED.format(tests=str(tests), disk=str(disk), run=str(run))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "in the middle\n"
        os.kill(child.pid, signal.SIGKILL)
    assert list(disk.iterdir()) == []
    here, there = tiered(disk, seed=9), plain()
    hybrids.train(*there, range(3))
    holdfast.load(run, {"model": here[0], "optimizer": here[1]})
    hybrids.train(*here, range(3, 6))
    hybrids.train(*there, range(3, 6))
    assert hybrids.differences(here, there) == []
