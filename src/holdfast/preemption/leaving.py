"""After the last step: wait for storage as long as there is time, and let go.

Durable is the last step only if a handle of it was told so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from holdfast.errors import HoldfastError, Preempted
from holdfast.preemption.grace import Preemption
from holdfast.snapshot.handle import SaveHandle

#: Something that waits, so many seconds at most.
Wait = Callable[[float], None]


def leave(
    step: int, handle: SaveHandle, preemption: Preemption,
    *, keep_promises: Wait, close: Wait, hang_up: Wait,
) -> NoReturn:  # fmt: skip
    """The last step is saved, for ``handle``: Preempted, when it is in storage or time is over.

    The Checkpointer's own ways: to wait for what is to be durable, to say goodbye, and to leave
    without one.
    """
    try:
        keep_promises(preemption.storage_s)
        handle.wait_durable(preemption.storage_s)
    except Exception as error:
        hang_up(preemption.storage_s)  # the keeper is to keep what is in memory
        raise _preempted(step, error) from error
    with suppress(HoldfastError):  # of a rank that is gone: what is durable stays so
        close(preemption.storage_s)
    raise _preempted(step, None)


def _preempted(step: int, failure: Exception | None) -> Preempted:
    """What is raised after the last step; ``failure``: why it is not in storage."""
    if failure is not None:
        return Preempted(
            f"told to end by SIGTERM after step {step}, which is not in storage: {failure}. What "
            "of it is in memory stays there, and its keeper goes on as long as it lives.",
            step=step, is_durable=False,
        )  # fmt: skip
    return Preempted(
        f"told to end by SIGTERM: step {step} was the last one, and is in storage. The next start "
        "of the run goes on from it.",
        step=step, is_durable=True,
    )  # fmt: skip
