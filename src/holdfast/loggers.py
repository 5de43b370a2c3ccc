"""Hands the costs of a rank's saves and restores to TensorBoard, Weights & Biases or MLflow.

Each call takes the object that the user's own code logs to, and imports nothing of it. What is
logged waits in a queue for a thread of its own: training is never held by it, and no error of it
reaches training. After a fall-back the charts go on from the restored step. Call it before
``Checkpointer.restore``, on one rank.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast import events
from holdfast.events import Event, subscribe, warn
from holdfast.observe.phases import BY_EVENT

__all__ = ["to_mlflow", "to_tensorboard", "to_wandb"]

#: Values that wait to be logged; more of them are dropped, and counted.
MOST_WAITING = 10_000
STOP_S = 10.0
#: Errors in a row after which nothing more is logged.
_MOST_ERRORS = 20
Values = dict[str, float]
Log = Callable[[Values, int, float], None]
Stop = Callable[[], None]


def to_tensorboard(writer: Any) -> Stop:
    """Logs to a ``SummaryWriter``; returns a function that stops it, when all is written.

    ``writer``: has ``add_scalar(tag, value, step, walltime)``. When a generation is restored, it is
    closed and goes on in a file that has TensorBoard drop all that the fall-back undid, also of
    other values in that directory; for a writer without ``purge_step`` nothing is dropped.
    """

    def log(values: Values, step: int, time_s: float) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step, time_s)

    def fall_back(step: int) -> None:
        if hasattr(writer, "purge_step"):
            writer.close()
            writer.purge_step = step + 1

    return _BackgroundLog("TensorBoard", log, fall_back).stop


def to_wandb(run: Any, *, commit: bool = False) -> Stop:
    """Logs to a run of Weights & Biases; returns a function that stops it, when all is written.

    The values have an axis of their own, ``holdfast/step``: W&B drops what it gets for a smaller
    step than before, as after a fall-back. Give your own values such an axis too.

    ``run``: has ``define_metric`` and ``log``. ``commit``: each save makes a row of the history;
    without it the values go into the row of the next ``run.log`` of yours, which keeps of several
    saves the last.
    """
    with contextlib.suppress(Exception):  # no error of a logger reaches training
        run.define_metric("holdfast/step")
        run.define_metric("holdfast/*", step_metric="holdfast/step")

    def log(values: Values, step: int, _: float) -> None:
        run.log(values | {"holdfast/step": step}, commit=commit)

    return _BackgroundLog("W&B", log).stop


def to_mlflow(client: Any, run_id: str) -> Stop:
    """Logs to a run of MLflow; returns a function that stops it, when all is written.

    MLflow keeps the values of a step that is done again beside the older ones, by their time;
    ``holdfast/incarnation`` tells them apart.

    ``client``: an ``MlflowClient``, or what else has ``log_metric(run_id, key, value, timestamp,
    step)``. ``run_id``: the run.
    """

    def log(values: Values, step: int, time_s: float) -> None:
        for name, value in values.items():
            client.log_metric(run_id, name, value, int(time_s * 1000), step)

    return _BackgroundLog("MLflow", log).stop


def values_of(event: Event) -> Values:
    """Returns the values of an event, by the names that they are logged under; none for most."""
    found = {
        f"holdfast/{phase.name}_s": float(getattr(event, phase.field))
        for phase in BY_EVENT.get(type(event).__name__, ())
        if phase.side == "rank"
    }
    match event:
        case events.SnapshotMissed():
            found["holdfast/missed"] = 1.0
        case events.Restored():
            found["holdfast/restored_bytes"] = float(event.size_bytes)
        case events.ImageCaptured():
            found["holdfast/image_bytes"] = float(event.size_bytes)
    if found:
        found["holdfast/incarnation"] = float(event.incarnation)
    return found


class _BackgroundLog:
    """Logs on a thread of its own, until ``stop``."""

    def __init__(self, name: str, log: Log, fall_back: Callable[[int], None] | None = None) -> None:
        self._name, self._log, self._fall_back = name, log, fall_back
        self._waiting: queue.SimpleQueue[tuple[Event, float] | None] = queue.SimpleQueue()
        self._dropped = self._errors = 0
        self._unsubscribe = subscribe(self._put)
        self._thread = threading.Thread(target=self._work, name="holdfast-log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Logs what waits, and stops; gives up after 10 s."""
        self._unsubscribe()
        self._waiting.put(None)
        self._thread.join(STOP_S)
        if self._dropped:
            warn(f"{self._dropped} values were not logged: {self._name} was slow")

    def wait(self, timeout_s: float) -> None:
        """Waits until nothing waits, or for so long."""
        until_s = time.monotonic() + timeout_s
        while not self._waiting.empty() and time.monotonic() < until_s:
            time.sleep(0.01)

    def _put(self, event: Event, time_s: float) -> None:
        """Called on the thread that reports; must neither wait nor raise."""
        if isinstance(event, events.Restored) and self._fall_back is not None:
            # Here, while the caller waits for its restore: it logs nothing of its own meanwhile.
            self.wait(1.0)
            with contextlib.suppress(Exception):
                self._fall_back(event.step)
        if type(event).__name__ not in BY_EVENT and not isinstance(event, events.SnapshotMissed):
            return
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put((event, time_s))
        else:
            self._dropped += 1

    def _work(self) -> None:
        while (told := self._waiting.get()) is not None:
            event, time_s = told
            values = values_of(event)
            if values and self._errors < _MOST_ERRORS:
                self._try(values, max(0, event.step), time_s)

    def _try(self, values: Values, step: int, time_s: float) -> None:
        try:
            self._log(values, step, time_s)
            self._errors = 0
        except Exception as error:
            self._errors += 1
            if self._errors == _MOST_ERRORS:
                message = f"nothing is logged to {self._name} any more: {error!r}"
                warn(message)
