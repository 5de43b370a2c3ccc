"""Keepers whose storage is slow, hangs, or is written in chunks of another size.

A keeper is another process. What is to be different in it goes into a ``sitecustomize`` on its
way of imports, which runs before its first line and does nothing anywhere else. The stores are
those of ``holdfast.testing``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

#: Every call of the stores made below goes to these.
_IN_KEEPER = """
import os, sys
if "holdfast.keeper" in sys.orig_argv:
    import time
    from holdfast.keeper import incarnations
    from holdfast.persist import writer
    from holdfast.storage.open import open_store
    from holdfast.testing import LateFsyncStore, SlowStore
    open({mark!r}, "w").close()
{change}
"""
_HANG = """
    def wait():
        while os.path.exists({flag!r}):
            time.sleep(0.01)
    incarnations.open_store = lambda url: LateFsyncStore(open_store(url), wait)
"""
_LATE = """
    incarnations.open_store = lambda url: LateFsyncStore(open_store(url), lambda: time.sleep({s}))
"""
_SLOW = """
    def clock():
        return os.path.getsize({steps!r})
    def sleep(steps):
        until = clock() + steps
        while clock() < until and os.path.exists({flag!r}):
            time.sleep(0.005)
    incarnations.open_store = lambda url: SlowStore(
        open_store(url), {bytes_per_step}, clock=clock, sleep=sleep
    )
"""
_IMPATIENT = """
    from holdfast.keeper import message_limits as limits
    limits.FRAME_S = {frame_s}
"""
_CHUNKS = """
    writer.CHUNK_BYTES = {chunk_bytes}
"""


class HungFsync:
    """Keepers started from now on make nothing durable from ``hang`` to ``let_go``."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self._flag = directory / "fsync-hangs"
        _change(directory, patch, _HANG.format(flag=str(self._flag)))

    def hang(self) -> None:
        """Every fsync from now on."""
        self._flag.touch()

    def let_go(self) -> None:
        """All that hang return."""
        self._flag.unlink(missing_ok=True)


def late_fsync(directory: Path, patch: pytest.MonkeyPatch, *, delay_s: float) -> None:
    """Keepers started from now on wait this long before each fsync."""
    _change(directory, patch, _LATE.format(s=delay_s))


class SlowDisk:
    """Keepers started from now on have a disk that can take so many bytes per step of training.

    Its time are the steps told with ``stepped``: were the training to wait for it, both would stand
    still, however fast or busy the machine is.
    """

    def __init__(
        self, directory: Path, patch: pytest.MonkeyPatch, *, bytes_per_step: float
    ) -> None:
        self._steps, self._flag = directory / "steps", directory / "disk-is-slow"
        self._steps.touch()
        change = _SLOW.format(
            steps=str(self._steps), flag=str(self._flag), bytes_per_step=bytes_per_step
        )
        _change(directory, patch, change)

    def slow_down(self) -> None:
        """It was fast so far."""
        self._flag.touch()

    def stepped(self) -> None:
        """The training has taken a step."""
        with self._steps.open("ab") as file:
            file.write(b".")

    def let_go(self) -> None:
        """It is fast from now on."""
        self._flag.unlink()


def chunks(directory: Path, patch: pytest.MonkeyPatch, *, chunk_bytes: int) -> Path:
    """Keepers started from now on write such chunks; the file that the first of them makes."""
    return _change(directory, patch, _CHUNKS.format(chunk_bytes=chunk_bytes))


def impatient(directory: Path, patch: pytest.MonkeyPatch, *, frame_s: float) -> None:
    """Keepers started from now on wait this long for the rest of a message."""
    _change(directory, patch, _IMPATIENT.format(frame_s=frame_s))


def _change(directory: Path, patch: pytest.MonkeyPatch, change: str) -> Path:
    mark = directory / "keeper-was-changed"
    text = _IN_KEEPER.format(change=change, mark=str(mark))
    (directory / "sitecustomize.py").write_text(text)
    patch.setenv("PYTHONPATH", str(directory))
    return mark
