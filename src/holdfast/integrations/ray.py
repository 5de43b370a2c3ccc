"""Keeps and resumes the training function of Ray Train, at every step and to the bit.

A worker that dies is started again by Ray's FailureConfig, with all others: they go on from the
memory of the nodes, or from storage. Ray's own checkpoints are references to those of Holdfast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import UsageError
from holdfast.integrations.attached import AttachedCheckpointer
from holdfast.integrations.seam import Adapter, missing

if TYPE_CHECKING:
    from holdfast.capture.handles import SaveHandle

try:
    import ray
    import ray.train
    from pyarrow import fs
    from ray.train import Checkpoint, CheckpointUploadMode
except ImportError as error:
    raise missing("ray", error) from error

_LOOP = "ray"
_ADAPTER = Adapter("ray", "2.60", (_LOOP,))
_DIRECTORY, _FILE = "holdfast", "holdfast.json"
_DEFAULT_STORAGE = "~/ray_results"
_SCHEMES = {"s3": "s3", "gcs": "gs"}


class TrainWorker:
    """The worker of Ray Train that this process is, to which a Checkpointer is attached."""

    attached: RayCheckpointer | None = None


_worker = TrainWorker()


def checkpointer(
    state: Mapping[str, Any],
    root: str | os.PathLike[str] | None = None,
    *,
    step: int | str | None = None,
    **options: Any,
) -> RayCheckpointer:
    """Attach a Checkpointer to this worker of Ray Train, and go on from the newest generation.

    Call it in ``train_loop_per_worker``, on all workers, when model and optimizer are made.

    ``state``, ``options``: as for ``Checkpointer``. ``root``: by default ``holdfast`` in the
    directory of the run, below the ``storage_path`` of its RunConfig. ``step``: go on from this
    step instead, or from a generation as "incarnation-step".

    Raises UsageError outside of a worker, and without a path that all nodes share.
    """
    _ADAPTER.check_version(ray.__version__)
    context = _context()
    where = _root_of(context) if root is None else os.fspath(root)
    own = _ADAPTER.check(ray.__version__, where, state)
    workers = {"workers": context.get_world_size()}
    return RayCheckpointer(where, workers, own, step, options)


class RayCheckpointer(AttachedCheckpointer):
    """A Checkpointer attached to a worker of Ray Train, made by ``checkpointer``."""

    def __init__(
        self,
        root: str,
        workers: Mapping[str, int],
        state: Mapping[str, Any],
        step: int | str | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(_worker, root, _LOOP, workers, state, options)
        self._restore(step)
        self._promised: list[SaveHandle] = []
        """The saves that are to become durable, oldest first."""
        self._values: dict[int, dict[str, Any]] = {}
        _worker.attached = self

    def step(self, step: int | None = None) -> SaveHandle | None:
        """Call at the end of each step of the loop, on all workers; saves when a policy says so.

        ``step``: the number of the step that has ended; by default they are counted, from 1.
        ``report`` with a ``step=`` calls it.
        """
        handle = super().step(step)
        if handle is not None and handle.durable:
            self._promised.append(handle)
        return handle

    def report(
        self, metrics: Mapping[str, Any], *, step: int | None = None, wait: bool = False
    ) -> None:
        """Report metrics to Ray; see ``report`` of the module."""
        if step is not None:
            self.step(step)
        if wait:
            self._wait_durable()
        reference = self._new_reference(metrics)
        ray.train.report(
            dict(metrics), reference, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
        )

    def _wait_durable(self) -> None:
        handle = next((one for one in self._promised if one.step == self.steps), None)
        if handle is None:
            handle = self.save()
            if handle is None:
                return
            self._promised.append(handle)
        handle.wait_durable()

    def _new_reference(self, metrics: Mapping[str, Any]) -> Checkpoint | None:
        """Returns a reference to the newest checkpoint that became durable since the last one.

        Only the first worker makes one: Ray takes one from any.
        """
        if any(one.step == self.steps for one in self._promised):
            self._values[self.steps] = dict(metrics)
        settled = [one for one in self._promised if one.state in ("durable", "failed")]
        durable = [one.step for one in settled if one.state == "durable"]
        self._promised = [one for one in self._promised if one not in settled]
        if not durable:
            return None
        newest = max(durable)
        values = self._values.get(newest)
        self._values = {step: kept for step, kept in self._values.items() if step > newest}
        if self.checkpointer.world.rank:
            return None
        return _write_reference(
            Reference(self.checkpointer.root, f"{self.checkpointer.incarnation}-{newest}", values)
        )

    def _hand_back(self) -> None:
        _worker.attached = None


class Reference(NamedTuple):
    """Which checkpoint of Holdfast a Checkpoint of Ray stands for."""

    root: str
    """Where it is: the ``path`` of ``holdfast.open`` and ``holdfast.load``."""
    generation: str
    """Which one it is, as "incarnation-step": their ``step``."""
    metrics: dict[str, Any] | None
    """The metrics that were reported for its step, where some were."""


def report(metrics: Mapping[str, Any], *, step: int | None = None, wait: bool = False) -> None:
    """Report metrics to Ray, with a Checkpoint that stands for one of Holdfast.

    Call it on all workers, as ``ray.train.report``.

    ``metrics``: for Ray. ``step``: the number of the step that has ended, to be saved when a policy
    says so; None where ``step`` of the Checkpointer was called for it. ``wait``: make this step
    durable and wait for it, so that the metrics are those of the Checkpoint.

    Without ``wait`` the first report after a checkpoint became durable has its reference; nothing
    waits. Raises UsageError before ``checkpointer`` was called.
    """
    if _worker.attached is None:
        raise UsageError(
            "report() without a Checkpointer in this worker: call "
            "holdfast.integrations.ray.checkpointer(state) first"
        )
    _worker.attached.report(metrics, step=step, wait=wait)


def reference(checkpoint: Checkpoint) -> Reference:
    """Returns which checkpoint of Holdfast a Checkpoint of Ray stands for.

    Raises UsageError for one that ``report`` did not make.
    """
    path = f"{checkpoint.path}/{_FILE}"
    try:
        with checkpoint.filesystem.open_input_stream(path) as file:
            found = json.loads(file.read())
        return Reference(found["root"], found["generation"], found["metrics"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{checkpoint.path} stands for no checkpoint of Holdfast ({error}): give one that "
            "holdfast.integrations.ray.report() made"
        ) from error


def _write_reference(found: Reference) -> Checkpoint:
    storage = _context().get_storage()
    path = f"{storage.experiment_fs_path}/checkpoint_holdfast_{found.generation}"
    storage.storage_filesystem.create_dir(path)
    with storage.storage_filesystem.open_output_stream(f"{path}/{_FILE}") as file:
        file.write(json.dumps(found._asdict(), default=str).encode())
    return Checkpoint(path, storage.storage_filesystem)


def _context() -> Any:
    try:
        context = ray.train.get_context()
        context.get_storage()
    except (RuntimeError, AttributeError) as error:
        raise UsageError(
            "this process is no worker of Ray Train: call it in train_loop_per_worker, under "
            f"trainer.fit() of Ray Train V2 ({error})"
        ) from error
    return context


def _root_of(context: Any) -> str:
    """Returns the root in the directory of the run, as Holdfast names it."""
    storage = context.get_storage()
    path = f"{storage.experiment_fs_path}/{_DIRECTORY}"
    kind = storage.storage_filesystem.type_name
    if kind in _SCHEMES:
        return f"{_SCHEMES[kind]}://{path}"
    if not isinstance(storage.storage_filesystem, fs.LocalFileSystem):
        raise UsageError(
            f"the storage_path of the run is on a filesystem of type {kind}, where Holdfast has no "
            "store: give root=, a directory that all nodes share, or a bucket"
        )
    home = os.path.expanduser(_DEFAULT_STORAGE)
    several = context.get_world_size() > context.get_local_world_size()
    if several and os.path.commonpath([home, path]) == home:
        raise UsageError(
            f"the run has workers on several nodes and no storage_path, so that {path} is another "
            "directory on each: give RunConfig(storage_path=...) or root=, which all nodes share"
        )
    return path
