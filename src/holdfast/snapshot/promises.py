"""What was promised for each step: the handles of its saves, and what the keeper says of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import HoldfastError, NotProtected, PersistFailed, SnapshotSkipped
from holdfast.snapshot.handle import CAPTURED, DURABLE, PROTECTED, SaveHandle

_KEPT_STEPS = 16


class Promises:
    """The handles somebody may still wait for, by the step that is to fulfil them."""

    def __init__(self) -> None:
        self._handles: dict[int, list[SaveHandle]] = {}
        self._asked_durable = self._told_durable = -1
        self._captured = self._refused = -1

    @property
    def owes_durable(self) -> bool:
        """Whether a save was to be durable, and no manifest was told of that is as new."""
        return self._asked_durable > self._told_durable

    @property
    def is_newest_settled(self) -> bool:
        """Whether the newest step in memory is durable, or was refused by storage."""
        return max(self._told_durable, self._refused) >= self._captured

    def add(self, step: int, handles: Iterable[SaveHandle]) -> None:
        """``step`` is saved for these; those of old steps that are settled are forgotten."""
        for handle in handles:
            self.join(step, handle)
        for old in [s for s, held in self._handles.items() if all(map(_is_settled, held))]:
            if len(self._handles) > _KEPT_STEPS and old != max(self._handles):
                for handle in self._handles.pop(old):
                    handle.not_protected(_passed_over(old, "a later one"))

    def join(self, step: int, handle: SaveHandle) -> None:
        """``step`` was saved already, and is now promised to ``handle`` as well."""
        self._handles.setdefault(step, []).append(handle)
        if handle.durable:
            self._asked_durable = max(self._asked_durable, step)

    def catch_up(self, step: int, handle: SaveHandle) -> None:
        """``handle`` is as far as any other of its step."""
        for other in self._handles[step]:
            handle.differing = handle.differing or other.differing
            if other.state in (CAPTURED, PROTECTED, DURABLE):
                handle.reach(other.state)

    def captured(self, step: int) -> None:
        """All ranks have this step in memory."""
        self._captured = max(self._captured, step)
        for handle in self._handles.get(step, []):
            handle.reach(CAPTURED)

    def protected(self, step: int) -> None:
        """This step survives the loss of hosts; of earlier ones no parity is made any more."""
        for one, handles in self._handles.items():
            for handle in handles:
                if one == step:
                    handle.reach(PROTECTED)
                elif one < step:
                    handle.not_protected(_passed_over(one, f"step {step}"))

    def not_protected(self, step: int, error: HoldfastError) -> None:
        """Parity of this step could not be made."""
        for handle in self._handles.get(step, []):
            handle.not_protected(error)

    def differ(self, step: int, leaves: Mapping[str, tuple[int, ...]]) -> None:
        """In this step, these leaves are not the same on all ranks that hold them."""
        for handle in self._handles.get(step, []):
            handle.differing = dict(leaves)

    def durable(self, saved: int, fulfils: Iterable[int]) -> None:
        """A manifest names step ``saved``, which stands for ``fulfils`` as well."""
        self._told_durable = max(self._told_durable, saved)
        for step in (saved, *fulfils):
            for handle in self._handles.get(step, []):
                if handle.durable:
                    handle.move_to(saved)
                    handle.reach(DURABLE)

    def fail(self, step: int, error: HoldfastError, *, captured: bool) -> None:
        """It came to nothing; ``captured``: only its way to storage did."""
        if captured:
            self._refused = max(self._refused, step)
        for handle in self._handles.get(step, []):
            if not _is_settled(handle):
                handle.fail(error, captured=captured)

    def fail_all(self, reason: str) -> None:
        """Whatever is not settled comes to nothing."""
        for step, handles in list(self._handles.items()):
            for handle in handles:
                is_captured = handle.state in (CAPTURED, PROTECTED)
                kind = PersistFailed if is_captured else SnapshotSkipped
                if not _is_settled(handle):
                    handle.fail(kind(f"step {step}: {reason}"), captured=is_captured)
                handle.not_protected(NotProtected(f"step {step} is captured: {reason}"))


def _is_settled(handle: SaveHandle) -> bool:
    in_memory = () if handle.durable else (CAPTURED, PROTECTED)
    return handle.state in (*in_memory, DURABLE, "failed")


def _passed_over(step: int, instead: str) -> NotProtected:
    return NotProtected(
        f"step {step} is captured and no parity of it was made: {instead} was protected instead. "
        "Wait for the newest snapshot, or save it with durable=True."
    )
