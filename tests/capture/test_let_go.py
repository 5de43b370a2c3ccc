"""A Checkpointer that nobody closes and nobody holds: it ends, and model and optimizer with it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim

import holdfast
from holdfast import events
from support.runs.keepers import wait_end
from support.runs.leftovers import keeper_pids


def build() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Linear(100, 100)
    return model, {"model": model, "optimizer": optim.AdamW(model.parameters())}


def train(model: nn.Module, state: dict[str, Any]) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    state["optimizer"].step()


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("holdfast-")}


def test_the_model_is_freed_the_threads_end_and_the_keeper_sees_that_the_rank_is_lost(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_KEEPER_IDLE_S", "2")
    before, sinks = threads(), len(vars(events)["_sinks"])
    model, state = build()
    checkpointer = holdfast.Checkpointer(tmp_path, state)
    for step in range(3):
        train(model, state)
        checkpointer.step(step)
    checkpointer.save(3).wait_captured(60)
    (pid,) = keeper_pids(arena_dir)
    keeper = os.pidfd_open(pid)
    freed = [weakref.ref(thing) for thing in (model, state["optimizer"], checkpointer)]
    started = threads() - before
    assert len(started) >= 2
    del checkpointer, model, state
    deadline = time.monotonic() + 10  # its worker may still be at the end of the last save
    while any(reference() is not None for reference in freed):
        assert time.monotonic() < deadline, [reference() for reference in freed]
        gc.collect()
    for thread in started:
        thread.join(30)
        assert not thread.is_alive(), thread.name
    assert len(vars(events)["_sinks"]) == sinks
    assert str(arena_dir) not in Path("/proc/self/maps").read_text()
    wait_end(keeper)  # left alone, it makes the newest snapshot durable
    with holdfast.open(tmp_path) as found:
        assert found.step == 3


def test_what_was_saved_last_is_captured_although_nobody_holds_the_checkpointer(
    tmp_path: Path, arena_dir: Path
) -> None:
    model, state = build()
    handle = holdfast.Checkpointer(tmp_path, state, storage=None).save(5, durable=True)
    gc.collect()
    handle.wait_durable(60)  # its handle keeps the line to the keeper open
    wait = weakref.ref(model)
    saver = weakref.ref(vars(handle)["_explain"].__self__)
    del handle, model, state
    gc.collect()
    assert (wait(), saver()) == (None, None)
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


def test_a_closed_checkpointer_is_freed_as_well(tmp_path: Path) -> None:
    model, state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        checkpointer.save(1).wait_captured(60)
    freed = [weakref.ref(thing) for thing in (model, checkpointer)]
    del checkpointer, model, state
    gc.collect()
    assert [reference() for reference in freed] == [None, None]
