"""Restores a state from a store alone: no keeper is asked, and no run goes on from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from holdfast.errors import StateMismatch
from holdfast.events.fields import START_FROM
from holdfast.geometry.rank_ranges import ranks_in, ranks_text
from holdfast.restore.match import RestoreRequest
from holdfast.restore.restore import Restored, restore_first
from holdfast.restore.sources import StoredSources
from holdfast.state.objects import State
from holdfast.storage.base import Store
from holdfast.world import World, all_said_or_raise

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
        _require_one_view(world, store, timeout_s)
        restored = restore_first(
            world,
            state,
            sources.first(world, step, timeout_s=timeout_s),
            sources.open,
            incarnation=incarnation,
            timeout_s=timeout_s * READ_PATIENCE,
            on_poison=on_poison,
            request=request,
            plan_again=sources.plan_again,
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


def _require_one_view(world: World, store: Store, timeout_s: float) -> None:
    """Raise StateMismatch on all ranks where their states make different things of what another
    writer has stored: all read it as rank 0 shows it.
    """
    mine: Collection[Sequence[str]] | None = getattr(store, "ties", None)
    if mine is None or world.size == 1:
        return
    views, ties = all_said_or_raise(
        world,
        "restore: the view of the source",
        lambda: [store.identity().encode(), msgspec.json.encode(sorted(map(sorted, mine)))],
        timeout_s=timeout_s,
    )
    if len(views) == 1:
        return
    one, other = (ties if len(ties) > 1 else views)[:2]
    ranks = [ranks_text(ranks_in(said.ranks)) for said in (one, other)]
    if len(ties) == 1:
        why = (
            f"{ranks[0]} and {ranks[1]} make different things of it: numbers of an optimizer stand "
            "for other parameters there, modules are wrapped on some alone, or they see other "
            "files. Build the states alike, or import the checkpoint and load the root"
        )
    else:
        known = [{tuple(some) for some in msgspec.json.decode(said.value)} for said in (one, other)]
        tied = min(known[0] ^ known[1])
        if tied not in known[0]:
            ranks.reverse()
        why = (
            f"the ranks' states tie other tensors: {' and '.join(tied)} are one tensor on "
            f"{ranks[0]} and not on {ranks[1]}. Load before they are tied, on all ranks alike"
        )
    raise StateMismatch(f"{store.url}: {why}", problems=[why])
