"""Handover of slots, layouts and incarnation records from followers to a new coordinator.

To write the images of its followers, a coordinator that was not running at the capture needs the
layout, and the incarnation's record. It asks the follower that has the images.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.errors import FormatError, HoldfastError
from holdfast.events import warn
from holdfast.format.manifest import Incarnation, seal, unseal
from holdfast.geometry.layout import deflate, inflate
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.incarnations import Incarnations
from holdfast.keeper.jobs import Background
from holdfast.protocol.facts import Fact


class StateHandover:
    """The coordinator's side of the handover; lives on the keeper's loop."""

    def __init__(
        self,
        memory: ArenaFiles,
        coordinator: Coordinator,
        incarnations: Incarnations,
        background: Background,
    ) -> None:
        self._memory = memory
        self._coordinator = coordinator
        self._incarnations = incarnations
        self._background = background

    def attach_reply(
        self, attempts: Iterable[Attempt], recorded: Collection[int]
    ) -> host_messages.HostAttached:
        """Answer a follower's inventory with a request for what is unknown here.

        All its incarnation records are requested: storage may lack an ancestor of this incarnation.
        """
        layouts = sorted({attempt.layout for attempt in attempts})
        numbers = {attempt.incarnation for attempt in attempts}
        remembered = {one.n for one in self._memory.incarnations()}
        here = remembered | {self._coordinator.incarnation}
        for n in numbers - here:  # storage may have it, even if the follower does not
            self._background.spawn(self._background.in_thread(self._incarnations.repair, n))
        return host_messages.HostAttached(
            tell_layouts=tuple(
                hash_ for hash_ in layouts if not self._memory.is_layout_intact(hash_)
            ),
            tell_incarnations=tuple(sorted((numbers | set(recorded)) - here)),
        )

    def current(self) -> host_messages.RecordIncarnation | None:
        """Return the record of the current incarnation for all followers, once its parent is
        recorded.
        """
        incarnation = self._incarnations.current
        if incarnation is None:
            return None
        return host_messages.RecordIncarnation(
            n=incarnation.n,
            data=seal(incarnation),
            held=tuple(self._held()),
            is_recorded=self._incarnations.is_recorded,
            parent=self._parent_of(incarnation),
        )

    def _parent_of(self, incarnation: Incarnation) -> bytes:
        number = 0 if incarnation.parent is None else incarnation.parent[0]
        found = self._incarnations.remembered(number)
        return b"" if found is None else seal(found)

    def _held(self) -> set[int]:
        return {attempt.incarnation for attempt in self._coordinator.attempts.values()}

    def store_reply(
        self, name: str, fact: host_messages.LayoutReply | host_messages.IncarnationReply
    ) -> None:
        """Store a reply. Raises FormatError if its content does not match its name."""
        try:
            match fact:
                case host_messages.LayoutReply(hash=hash_, deflated=deflated):
                    data = inflate(deflated, hash_)
                    self._memory.store_layout(hash_, data, self._coordinator.used_layouts)
                case host_messages.IncarnationReply(data=data):
                    incarnation = unseal(Incarnation, data, f"an incarnation of host {name}")
                    if incarnation.run_id != self._memory.run_id:
                        raise FormatError(f"host {name} tells of run {incarnation.run_id}")
                    if self._incarnations.remembered(incarnation.n) is None:
                        self._memory.store_incarnation(incarnation)
        except OSError as error:
            warn(f"what host {name} knows is not remembered here: {error}")


def answer_handover(memory: ArenaFiles, asked: host_messages.HostAttached) -> list[Fact]:
    """Return the follower's replies to a request for layouts and incarnation records."""
    known: list[Fact] = []
    for hash_ in asked.tell_layouts:
        try:
            deflated = deflate(memory.layout(hash_))
            known.append(host_messages.LayoutReply(hash=hash_, deflated=deflated))
        except HoldfastError as error:
            warn(f"the coordinator does not know layout {hash_}: {error}")
    if asked.tell_incarnations:
        known += [
            host_messages.IncarnationReply(data=seal(one))
            for one in memory.incarnations()
            if one.n in asked.tell_incarnations
        ]
    return known
