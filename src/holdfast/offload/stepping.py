"""One step of an optimizer: whole, or none, or a part that nothing goes on from.

What is due is collected, gradients are brought to the host, the update runs. An interrupt may come
between any two lines; what it leaves is undone, or made whole, or known to be broken off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from holdfast.offload.clipping import Clipped
from holdfast.offload.gradients import Gradients
from holdfast.offload.kernels import Kernel
from holdfast.offload.lanes import Lanes
from holdfast.offload.noting import changed, note
from holdfast.offload.placing import Placing
from holdfast.offload.rows import Place, Row
from holdfast.offload.small import Small
from holdfast.offload.states import begin_state
from holdfast.offload.tier import Tier
from holdfast.offload.update import Due, Scales, Update

#: The state of an optimizer, by parameter.
States = dict[torch.Tensor, dict[str, Any]]


class Stepping:
    """Takes the steps of one optimizer, whose ``places`` these are.

    ``broken_off``: why its parameters and state are those of no step; "" where they are.
    """

    def __init__(
        self, kernel: Kernel, placing: Placing, places: Mapping[torch.Tensor, tuple[Row, Place]],
        tier: Tier | None,
    ) -> None:  # fmt: skip
        self._kernel, self._placing, self._places = kernel, placing, places
        self._tier = tier
        self.broken_off = ""
        self.is_done = False
        """Whether the last update that raised was a whole one all the same."""

    def step(
        self, found: Mapping[Place, torch.Tensor], groups: Sequence[dict[str, Any]],
        state: States, lanes: Lanes, gradients: Gradients, clipped: Clipped | None,
        divisor: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Update these, each with this rank's elements of its gradient.

        ``divisor``: what the gradients were multiplied by, by a gradient scaler.
        """
        places = list(found)
        scales = Scales(None if clipped is None else clipped.factor, divisor)
        host, device, slots = self._placing.ready(groups, lanes, places, scales=scales.is_any)
        turn = None if self._tier is None else self._tier.turn(host)
        others = changed(places)
        due: dict[Place, Due] = {}
        update = Update(lanes, self._kernel, groups, due, scales, self._placing.learn, turn)
        try:
            self.broken_off = "it was interrupted"  # an interrupt comes between any two lines
            for place, gradient in found.items():
                own = state[place.parameter]
                update.had[place] = tuple(own)
                is_first = self._begin(place, groups, own, is_changed=place in others)
                if not own:
                    del state[place.parameter]
                is_clipped = clipped is not None and clipped.has(_whole(place))
                due[place] = Due(place.line(gradient), is_first, is_clipped, own.get("step"))
            self._bring(due, gradients)
            if self._kernel.counts_steps:
                steps = [one.step for one in due.values() if one.step is not None]
                update.steps_before = steps[0].item()
                update.steps = steps  # last: by then it is known whether they were counted
                self._count(list(due.values()), steps, lanes.device, bool(device))
            update.run(host if turn is None else turn.order, device, slots)
            self._end(due)
            with suppress(torch.OutOfMemoryError):  # all is done; the masters follow next time
                note(due)
        except BaseException as error:
            self._settle(update, state, f"{type(error).__name__}: {error}")
            raise

    def _begin(
        self, place: Place, groups: Sequence[dict[str, Any]], own: dict[str, Any], *,
        is_changed: bool,
    ) -> bool:  # fmt: skip
        """Give a parameter its state, and its master what it is; whether this is its first."""
        row, _ = self._places[place.parameter]
        kinds = self._kernel.kinds(groups[row.group])
        return begin_state(row, place, own, kinds, self._kernel.counts_steps, is_changed)

    def _count(
        self, due: list[Due], steps: list[torch.Tensor], device: torch.device, is_needed: bool
    ) -> None:
        """One more step of each; ``is_needed``: on the device, too."""
        torch._foreach_add_(steps, 1)
        all_ = torch.stack(steps)
        for one, count in zip(due, all_.tolist(), strict=True):
            one.count = count
        if is_needed:
            there = all_.to(device, non_blocking=True).unbind()
            for one, step in zip(due, there, strict=True):
                one.step_there = step

    def _bring(self, due: Mapping[Place, Due], gradients: Gradients) -> None:
        """See that all gradients the host needs are on their way, as they are now."""
        ranges = {}
        small: dict[Small, Row] = {}
        for place in due:
            found = self._placing.on_host(place)
            if place.small is not None:
                place.small.make()
            if found and place.small is not None:
                small[place.small] = self._places[place.parameter][0]
            elif found:
                ranges[place] = found
        for one, row in small.items():
            flats = {place: due[place].gradient for place in due if place.small is one}
            arrival = gradients.send_small(row, one, flats)
            for place in flats:
                due[place].arrival = arrival
        marks = gradients.true(ranges)
        for place, found in ranges.items():
            mark = marks.get(place)
            row = self._places[place.parameter][0]
            due[place].arrival = mark or gradients.send(row, place, due[place].gradient, found)

    def _end(self, due: Mapping[Place, Due]) -> None:
        """All is updated. Until more is noted every parameter counts as changed by others."""
        for place in due:
            place.seen = ()
        self.broken_off = ""

    def _settle(self, update: Update, state: States, why: str) -> None:
        """What an update is that raised: none at all, or a whole one, or a part of one."""
        self.broken_off = why
        self.is_done = update.is_complete
        if update.is_complete:
            self._end(update.due)
        elif not update.has_begun:
            if update.steps and update.steps[0].item() != update.steps_before:
                torch._foreach_sub_(update.steps, 1)
            for place, had in update.had.items():  # else a first update is none when tried again
                own = state[place.parameter]
                for kind in own.keys() - had:
                    del own[kind]
                if not own:
                    del state[place.parameter]
            self.broken_off = ""


def _whole(place: Place) -> torch.Tensor:
    found = place.parameter.grad
    assert found is not None
    return found
