"""Restores a state from a store alone: no keeper is asked, and no run goes on from it."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import StateMismatch
from holdfast.events.fields import START_FROM
from holdfast.restore.match import RestoreRequest
from holdfast.restore.restore import Restored, restore_first
from holdfast.restore.sources import StoredSources
from holdfast.state.objects import State
from holdfast.storage.base import Store
from holdfast.world import World

#: Reading and writing may take this many times as long as meeting the other ranks.
READ_PATIENCE = 10


def restore_stored(
    world: World,
    state: State,
    store: Store,
    request: RestoreRequest,
    step: int | str | None = None,
    *,
    timeout_s: float,
    incarnation: int = 0,
    on_poison: Callable[[bool], None] = lambda _: None,
) -> Restored:
    """Fill the state from the newest checkpoint of a store, or that of ``step``; all ranks call it.

    Raises as ``holdfast.load`` does; StateMismatch with a note of what was left out of what another
    writer has stored.
    """
    sources = StoredSources(store, world.rank)
    try:
        restored = restore_first(
            world,
            state,
            sources.first(world, step, timeout_s=timeout_s),
            sources.open,
            incarnation=incarnation,
            timeout_s=timeout_s * READ_PATIENCE,
            on_poison=on_poison,
            request=request,
            plan_again=sources.plan_again(),
            clock=sources.clock,
            origin=START_FROM if incarnation else "",
        )
    except StateMismatch as error:
        for note in getattr(store, "notes", ()):
            if " is left out: " in note:
                error.add_note(f"{store.url}: {note}")
        raise
    finally:
        sources.let_go()
    assert restored is not None  # there was a candidate, and no error
    return restored
