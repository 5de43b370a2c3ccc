"""Holds the saves that were staged and are not durable yet, and waits for what becomes of them.

In the process that staged one its handle tells; in another process, a file that the first writes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.capture.handles import SaveHandle
from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.world import outcome_of, raise_outcome

#: The only key of what is handed out in place of a staged state dict.
STAGED = "staged by holdfast"
_PAUSES_S = 0.002, 0.05

#: Closes the session of this process with a root: its keeper has the root's lock until then.
sessions: dict[str, Callable[[], None]] = {}
_handles: dict[str, SaveHandle] = {}


class StagedSave(NamedTuple):
    """A staged save, as it is told to the thread or process that waits for it."""

    token: str
    root: str
    step: int
    rank: int
    outcome: str
    """The file that says what became of it."""


def add(save: StagedSave, handle: SaveHandle | None, error: HoldfastError | None) -> None:
    """Note a save that was staged, or the error that kept it from being staged."""
    if handle is not None:
        _handles[save.token] = handle

    def wait() -> None:
        if error is not None:
            raise error
        assert handle is not None
        handle.wait_durable()

    def tell() -> None:
        word = outcome_of(save.rank, wait)
        part = Path(f"{save.outcome}.part")
        try:
            part.write_bytes(word)
            part.rename(save.outcome)
        except OSError:  # the stager is closed: nobody waits any more
            return
        _handles.pop(save.token, None)

    if error is not None:
        tell()
    else:
        threading.Thread(target=tell, name="holdfast-staged", daemon=True).start()


def wait_durable(save: StagedSave, timeout_s: float) -> None:
    """Wait until a staged save is durable; raises what it came to nothing by."""
    handle = _handles.pop(save.token, None)
    if handle is not None:
        handle.wait_durable(timeout_s)
        return
    end_s, pause_s = time.monotonic() + timeout_s, _PAUSES_S[0]
    while not Path(save.outcome).exists():
        if not Path(save.outcome).parent.is_dir():
            raise UsageError(f"the Stager of step {save.step} was closed before it was durable")
        if time.monotonic() > end_s:
            raise DeadlineExceeded(
                f"step {save.step} was not durable within {timeout_s:g} s", step=save.step
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S[1])
    raise_outcome(save.rank, Path(save.outcome).read_bytes())


def close_session(root: str) -> None:
    """Close the session of this process with a root, if there is one."""
    close = sessions.pop(root, None)
    if close is not None:
        close()
