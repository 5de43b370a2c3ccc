"""Loggers give the costs of saves back through their own readers, over two fall-backs."""

from __future__ import annotations

import importlib.util
import json
import struct
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events, loggers
from holdfast.events import emit

#: What each start saves, and the step that the next one goes on from: two fall-backs.
STARTS = ((range(6), None), (range(4, 8), 3), (range(2, 5), 1))


def held(step: int, incarnation: int) -> events.SaveReturned:
    """A save whose length tells which start made it."""
    return events.SaveReturned(
        incarnation=incarnation,
        step=step,
        rank=0,
        held_s=incarnation + step / 100,
        describe_s=0.0,
        volatile_s=0.0,
        wait_previous_s=0.0,
        leaves=1,
        size_bytes=1,
        durable=False,
    )


def restored(step: int, incarnation: int) -> events.Restored:
    return events.Restored(
        incarnation=incarnation,
        step=step,
        rank=0,
        source="memory",
        elapsed_s=0.5,
        size_bytes=7,
        saved_world=1,
        world=1,
        parent_incarnation=incarnation - 1,
    )


#: step -> the value that is left after two fall-backs
LEFT = {0: 1.0, 1: 1.01, 2: 3.02, 3: 3.03, 4: 3.04}


def train(incarnation: int, stop: loggers.Stop) -> None:
    """The events of one start."""
    steps, from_step = STARTS[incarnation - 1]
    if from_step is not None:
        emit(restored(from_step, incarnation))
    for step in steps:
        emit(held(step, incarnation))
    stop()


# ── the real ones ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_shows_what_is_left_after_two_fall_backs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    for number in range(1, 4):
        writer = SummaryWriter(tmp_path)
        stop = loggers.to_tensorboard(writer)
        train(number, stop)
        writer.close()
        time.sleep(1.1)  # files are named by the second
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    found = {e.step: e.value for e in read.Scalars("holdfast/held_s")}
    assert found == pytest.approx(LEFT)
    assert [e.step for e in read.Scalars("holdfast/restore_s")] == [1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_all_on_an_axis_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(mode="offline", x_disable_stats=True, console="off")
    run = wandb.init(project="p", dir=str(tmp_path), settings=settings)
    for number in range(1, 4):
        train(number, loggers.to_wandb(run, commit=True))
    run.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    until_s = time.monotonic() + 20
    while len(rows := history_of(path)) < 15 and time.monotonic() < until_s:
        time.sleep(0.1)  # its service writes the file behind the run's end
    seen = [
        (row["holdfast/step"], row["holdfast/held_s"]) for row in rows if "holdfast/held_s" in row
    ]
    wanted = [(s, n + s / 100) for n, (steps, _) in enumerate(STARTS, 1) for s in steps]
    assert seen == wanted, "none is dropped for its smaller step"


def history_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a run that was written offline: records in blocks of 32 KiB, as LevelDB logs."""
    from wandb.proto import wandb_internal_pb2

    data, rows, record, at = path.read_bytes(), [], b"", 7
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            read = wandb_internal_pb2.Record.FromString(record)
            record = b""
            if read.WhichOneof("record_type") == "history":
                items = ((i.key or ".".join(i.nested_key), i.value_json) for i in read.history.item)
                rows.append({key: json.loads(value) for key, value in items})
    return rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_gives_the_newest_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    import os

    from mlflow.tracking import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    run_id = client.create_run(client.create_experiment("e")).info.run_id
    for number in range(1, 4):
        train(number, loggers.to_mlflow(client, run_id))
        time.sleep(0.01)
    history = client.get_metric_history(run_id, "holdfast/held_s")
    assert len(history) == sum(len(steps) for steps, _ in STARTS)
    starts = client.get_metric_history(run_id, "holdfast/incarnation")
    assert {int(one.value) for one in starts} == {1, 2, 3}
    newest: dict[int, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for one in history:
        newest[one.step] = max(newest[one.step], (one.timestamp, one.value))
    left = {step: value for step, (_, value) in newest.items() if step in LEFT}
    assert left == pytest.approx(LEFT)


# ── what training notices: nothing ───────────────────────────────────────────────────────────────


class Writer:
    """Takes scalars, and may hang or raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.error, self.gate = error, threading.Event()
        self.gate.set()

    def add_scalar(self, tag: str, value: float, step: int, walltime: float) -> None:
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.scalars.append((tag, value, step))


def test_a_real_run_is_logged_with_the_costs_of_its_saves(tmp_path: Path) -> None:
    writer = Writer()
    stop = loggers.to_tensorboard(writer)
    state = {"model": torch.nn.Linear(4, 4)}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        for step in range(3):
            ckpt.save(step).wait_captured()
    stop()
    steps = {step for tag, _, step in writer.scalars if tag == "holdfast/held_s"}
    tags = {tag for tag, _, _ in writer.scalars}
    assert steps == {0, 1, 2}
    assert tags >= {"holdfast/copy_s", "holdfast/image_bytes", "holdfast/incarnation"}


def test_a_logger_that_hangs_holds_nobody_and_what_is_too_much_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loggers, "MOST_WAITING", 100)
    monkeypatch.setattr(loggers, "STOP_S", 0.5)
    writer = Writer()
    writer.gate.clear()
    stop = loggers.to_tensorboard(writer)
    warned: list[str] = []

    def note(event: events.Event, _: float) -> None:
        if isinstance(event, events.Warned):
            warned.append(event.message)

    end = events.subscribe(note)
    try:
        began_s = time.monotonic()
        for step in range(300):
            emit(held(step, 1))
        assert time.monotonic() - began_s < 1
        stop()
        assert time.monotonic() - began_s < 5
    finally:
        writer.gate.set()
        end()
    assert len(warned) == 1 and "values were not logged: TensorBoard was slow" in warned[0]


def test_a_logger_that_raises_is_let_be_after_a_while_and_said_once() -> None:
    writer = Writer(RuntimeError("disk full"))
    stop = loggers.to_tensorboard(writer)
    warned: list[str] = []

    def note(event: events.Event, _: float) -> None:
        if isinstance(event, events.Warned):
            warned.append(event.message)

    end = events.subscribe(note)
    for step in range(100):
        emit(held(step, 1))
    stop()
    end()
    assert warned == ["nothing is logged to TensorBoard any more: RuntimeError('disk full')"]
    loggers.to_wandb(object())()  # whatever was handed in


def test_after_a_stop_nothing_is_logged() -> None:
    writer = Writer()
    stop = loggers.to_tensorboard(writer)
    stop()
    emit(held(1, 1))
    assert writer.scalars == []
    assert importlib.util.find_spec("holdfast.loggers") is not None
