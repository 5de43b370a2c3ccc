"""From what all ranks asked for to slots that they may write: how an attempt begins, and ends.

No slot is told of before all of an attempt's are there; an attempt that comes to nothing gives
them back. What happens to an attempt between the two is the coordinator's (``handoff``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from holdfast.errors import HoldfastError
from holdfast.geometry.layout import Layout
from holdfast.snapshot import messages as m
from holdfast.snapshot.actions import Action, GiveSlot, KeepLayout, Tell, abort, skip
from holdfast.snapshot.asks import Asks
from holdfast.snapshot.attempts import Attempt, Attempts
from holdfast.snapshot.comparing import Comparing
from holdfast.snapshot.debts import Debts
from holdfast.snapshot.layouts import Layouts
from holdfast.snapshot.rings import RingNeed
from holdfast.snapshot.slots import NO_ROOM, NO_SLOT, Slots, Writer, host_of

ONLY_DURABLE = "Until there is room, no snapshot is kept in memory; only durable saves are made."
STORAGE_IS_BUSY = (
    "storage still writes an earlier save, and no memory could keep this one until then"
)


class Granting:
    """The attempts of a run's ranks, and the slots that they are given, each on its own host.

    ``keeper`` is a text no other keeper of the run has: a later one must not call its attempts
    by the names of those it finds.
    """

    def __init__(self, keeper: str) -> None:
        self.keeper = keeper
        self.incarnation = 0
        self.nonce = ""
        self.world = 0
        self.hosts: dict[int, int] = {}
        """The host of each rank."""
        self.attempts = Attempts()
        self.slots = Slots(self.attempts)
        self.debts = Debts(self.attempts)
        self.comparing = Comparing()
        self._layouts = Layouts()
        self._joined: dict[int, Writer] = {}
        self._asks = Asks(0)
        self._next_attempt = 0
        self._now_s = 0.0

    # ── deciding ─────────────────────────────────────────────────────────────────────────

    def _decide(
        self, step: int, asks: Mapping[int, m.Ask], now_s: float, *, durable: bool = False
    ) -> list[Action]:
        try:
            agreed = self._layouts.agree([asks[r].table for r in range(self.world)])
            sizes = {r: agreed.image_bytes(r, asks[r].values_bytes) for r in asks}
        except HoldfastError as error:
            return skip(step, str(error), is_passing=False)
        except (MemoryError, ImportError) as error:  # of numpy, say, where memory is short
            return skip(step, f"its layout could not be divided: {error!r}")
        durable = durable or self.debts.is_to_be_durable(step, asks.values())
        heads = {rank: agreed.data_start(rank) for rank in asks}
        chosen, actions = self.slots.choose(sizes, self._now_s, heads)
        is_ring = chosen == NO_ROOM and durable
        if is_ring and not self.debts.is_storage_busy:
            needs = {r: _ring_need(agreed.data_start(r), sizes[r]) for r in asks}
            chosen, more = self.slots.choose_rings(needs)
            actions += more
        if isinstance(chosen, str):
            return actions + self._not_now(step, asks, now_s, chosen, is_ring=is_ring)
        attempt = self._new_attempt(step, agreed.layout, now_s)
        attempt.durable, attempt.is_ring, attempt.asks = durable, is_ring, asks
        attempt.slots = {rank: slot.id for rank, slot in chosen.items()}
        actions += self.comparing.start(attempt.id, step, agreed.layout)
        for rank, slot in chosen.items():
            slot.attempt, slot.rank, slot.writer = attempt.id, rank, self._joined.get(rank)
            slot.image_bytes, slot.incarnation = sizes[rank], self.incarnation
        return actions + self._tell_layout(agreed.layout) + self._grant_if_allocated(attempt)

    def _not_now(
        self, step: int, asks: Mapping[int, m.Ask], since_s: float, why: str, *, is_ring: bool
    ) -> list[Action]:
        """No slots for this step: it waits if it is wanted for sure and waiting can help."""
        can_help = why != NO_ROOM or self.debts.is_storage_busy
        if can_help and any(ask.durable and ask.exact for ask in asks.values()):
            self._asks.put_off(step, asks, since_s)
            return []
        if why != NO_ROOM:
            return skip(step, why)
        if is_ring:
            return skip(step, STORAGE_IS_BUSY)
        return skip(step, NO_SLOT if self.attempts.will_free_slots() else self._too_small())

    def _too_small(self) -> str:
        return f"{self.slots.no_room.removesuffix(ONLY_DURABLE).rstrip()} {ONLY_DURABLE}"

    def _tell_layout(self, layout: Layout) -> list[Action]:
        if layout.hash == self._layouts.told:
            return []
        self._layouts.told = layout.hash
        data = layout.to_json()
        return [KeepLayout(layout.hash, data), Tell(m.LayoutAgreed(hash=layout.hash, data=data))]

    def layout_not_kept(self, hash_: str, reason: str, host: int = 0) -> list[Action]:
        """An arena had no room for this layout: no image under it could be read again.

        The keeper's own says so before any grant of what was decided last is told; that of
        another host when the grants have long left.
        """
        self._layouts.told = ""
        actions: list[Action] = []
        decided_now = next(reversed(self.attempts), "")
        for attempt in self.attempts.open():
            if attempt.layout != hash_:
                continue
            is_untold = attempt.phase == "allocating" if host else attempt.id == decided_now
            if is_untold:  # others under this layout may be copying already
                for slot_id in attempt.slots.values():
                    self.slots[slot_id].writer = None
            actions += self._abort(attempt, reason)
        return actions

    def _slot_freed(self) -> list[Action]:
        """Something may have come free: decide again what waits for a slot."""
        waiting = self._asks.take_put_off()
        return self._decide(waiting.step, waiting.asks, waiting.since_s) if waiting else []

    def _new_attempt(self, step: int, layout: Layout, now_s: float) -> Attempt:
        self._next_attempt += 1
        name = f"{self.nonce[:8]}{self.keeper}{self._next_attempt:06x}"
        attempt = Attempt(name, self.incarnation, step, self.world, layout.hash, started_s=now_s)
        attempt.hosts = len(set(self.hosts.values()))
        self.attempts[name] = attempt
        return attempt

    # ── memory ───────────────────────────────────────────────────────────────────────────

    def spares(self) -> list[Action]:
        """Slots to make ahead of need, once the first of their size are granted."""
        return self.slots.spares(Counter(self.hosts.values()))

    def drop_spare(self, slot_id: int) -> bool:
        """A slot that is not begun to be made: forget it if nobody waits for it; whether so."""
        if not self.slots[slot_id].is_spare:
            return False
        del self.slots[slot_id]
        return True

    def is_awaited(self, slot_id: int) -> bool:
        """Whether a save waits for this slot, or has waited for it in vain."""
        slot = self.slots[slot_id]
        return slot.is_late or not slot.is_spare

    def allocated(self, slot_id: int) -> list[Action]:
        """A slot file exists; grant what waited for it."""
        slot = self.slots[slot_id]
        attempt = self.attempts.get(slot.attempt)
        if attempt is None or attempt.phase != "allocating":
            slot.free()
            return []
        slot.state = "granted"
        return self._grant_if_allocated(attempt)

    def allocation_failed(self, slot_id: int, reason: str) -> list[Action]:
        """There is no memory for a slot; what waited for it is skipped, or takes a ring."""
        slot = self.slots.pop(slot_id)
        attempt = self.attempts.get(slot.attempt)
        if attempt is None:  # a spare: try again only for slots of another size
            self.slots.on(host_of(slot_id)).capacity_bytes = 0
            return []
        self.slots.lacked_room(slot_id, reason, self._now_s)
        if not attempt.durable:
            return self._abort(attempt, self._too_small())
        del attempt.slots[slot.rank]
        attempt.lacks_room = True
        return self._grant_if_allocated(attempt)

    def rings_made(self, made: Mapping[int, tuple[int, int]]) -> list[Action]:
        """These rings exist: (capacity, of it the ring) by slot; grant what waited for them."""
        actions: list[Action] = []
        for slot_id, (capacity_bytes, ring_bytes) in made.items():
            slot = self.slots[slot_id]
            slot.capacity_bytes, slot.ring_bytes = capacity_bytes, ring_bytes
            actions += self.allocated(slot_id)
        return actions

    def rings_not_made(self, slot_ids: Iterable[int], reason: str) -> list[Action]:
        """There is not even memory for rings; what waited for them comes to nothing."""
        attempts = {self.slots.pop(slot_id).attempt for slot_id in slot_ids}
        found = [self.attempts[id_] for id_ in attempts if id_ in self.attempts]
        why = f"{self.slots.no_room} {reason}".strip()
        return [action for attempt in found for action in self._abort(attempt, why)]

    def _grant_if_allocated(self, attempt: Attempt) -> list[Action]:
        if any(self.slots[s].state == "allocating" for s in attempt.slots.values()):
            return []
        if attempt.lacks_room:
            return self._take_otherwise(attempt)
        attempt.phase = "capturing"
        actions: list[Action] = [] if attempt.is_ring else self.slots.drop_rings()
        actions += [
            GiveSlot(slot, rank, attempt.id) for rank, slot in sorted(attempt.slots.items())
        ]
        if attempt.durable:
            actions += self.debts.start(attempt)
        return actions

    # ── coming to nothing ────────────────────────────────────────────────────────────────

    def _take_otherwise(self, attempt: Attempt) -> list[Action]:
        """Not all slots of a durable attempt could be made: nobody was told of it yet."""
        self._let_go(attempt)
        return self._decide(attempt.step, attempt.asks, attempt.started_s, durable=True)

    def _let_go(self, attempt: Attempt) -> None:
        """Nobody writes to its slots, and nobody needs them."""
        for slot_id in attempt.slots.values():
            self.slots[slot_id].writer = None
        self.slots.take_back(attempt)
        self.comparing.drop(attempt.id)
        del self.attempts[attempt.id]

    def _abort(
        self, attempt: Attempt, reason: str, leaf: str = "", *, is_lost: bool = False
    ) -> list[Action]:
        attempt.phase = "aborted"
        self.slots.take_back(attempt)
        self.comparing.drop(attempt.id)
        actions = self.debts.aborted(attempt)
        del self.attempts[attempt.id]
        return actions + abort(attempt.id, attempt.step, reason, leaf, is_lost=is_lost)


def _ring_need(data_start: int, size_bytes: int) -> RingNeed:
    return RingNeed(-1, data_start, size_bytes - data_start)
