"""What only the hands of a coordinator know of what it may have to make durable.

To write what its hands hold, a coordinator that was not there when it was captured needs its
layout, and how its incarnation began. It asks the hand that comes with the images.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.errors import ArenaError, FormatError, HoldfastError
from holdfast.events import Warned, emit
from holdfast.format.manifest import Incarnation, seal, unseal
from holdfast.geometry.layout import table_hash
from holdfast.keeper import control
from holdfast.keeper.background import Background
from holdfast.keeper.facts import Fact
from holdfast.keeper.incarnations import Incarnations
from holdfast.keeper.memory import Memory
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.handoff import Coordinator


class Learning:
    """The coordinator's side of it; lives on the keeper's loop."""

    def __init__(
        self, memory: Memory, coordinator: Coordinator, incarnations: Incarnations,
        background: Background,
    ) -> None:  # fmt: skip
        self._memory = memory
        self._coordinator = coordinator
        self._incarnations = incarnations
        self._background = background

    def welcome(self, attempts: Iterable[Attempt]) -> control.Attached:
        """What a hand that holds these is answered: what is not known here it is to tell."""
        layouts = sorted({attempt.layout for attempt in attempts})
        numbers = {attempt.incarnation for attempt in attempts}
        remembered = {one.n for one in self._memory.incarnations()}
        lacks = numbers - remembered - {self._coordinator.incarnation}
        for n in lacks:  # storage may know it, even if the hand does not
            self._background.spawn(self._background.in_thread(self._incarnations.repair, n))
        return control.Attached(
            tell_layouts=tuple(hash_ for hash_ in layouts if not self._has_layout(hash_)),
            tell_incarnations=tuple(sorted(lacks)),
        )

    def _has_layout(self, hash_: str) -> bool:
        try:
            self._memory.layout(hash_)
        except ArenaError:
            return False
        return True

    def current(self) -> control.KeepIncarnation | None:
        """What the incarnation served went on from, once that is recorded: for every hand."""
        incarnation = self._incarnations.current
        if incarnation is None:
            return None
        return control.KeepIncarnation(
            n=incarnation.n, data=seal(incarnation), held=tuple(self._held())
        )

    def _held(self) -> set[int]:
        return {attempt.incarnation for attempt in self._coordinator.attempts.values()}

    def hear(self, name: str, fact: control.LayoutTold | control.IncarnationTold) -> None:
        """Remember it. FormatError when it is not what it is called."""
        try:
            match fact:
                case control.LayoutTold(hash=hash_, data=data):
                    if table_hash(data) != hash_:
                        raise FormatError(f"the layout {hash_} of host {name} is another one")
                    used = {one.layout for one in self._coordinator.attempts.values()}
                    self._memory.keep_layout(hash_, data, used)
                case control.IncarnationTold(data=data):
                    incarnation = unseal(Incarnation, data, f"an incarnation of host {name}")
                    if incarnation.run_id != self._memory.run_id:
                        raise FormatError(f"host {name} tells of run {incarnation.run_id}")
                    if self._incarnations.remembered(incarnation.n) is None:
                        self._memory.keep_incarnation(incarnation, self._held())
        except OSError as error:
            emit(Warned(message=f"what host {name} knows is not remembered here: {error}"))


def tell(memory: Memory, asked: control.Attached) -> list[Fact]:
    """What a hand knows of what it is asked for."""
    known: list[Fact] = []
    for hash_ in asked.tell_layouts:
        try:
            known.append(control.LayoutTold(hash=hash_, data=memory.layout(hash_)))
        except HoldfastError as error:
            emit(Warned(message=f"the coordinator does not know layout {hash_}: {error}"))
    if asked.tell_incarnations:
        known += [
            control.IncarnationTold(data=seal(one))
            for one in memory.incarnations()
            if one.n in asked.tell_incarnations
        ]
    return known
