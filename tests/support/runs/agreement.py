"""The plainest call of all ranks."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.world import World, reduce_or_raise


def agree_or_raise(
    world: World, phase: str, act: Callable[[], object], *, timeout_s: float
) -> None:
    """Runs ``act`` on every rank; all return when all are well, or raise one error."""

    def run() -> bytes:
        act()
        return b""

    reduce_or_raise(world, phase, run, max, timeout_s=timeout_s)
