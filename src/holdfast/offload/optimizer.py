"""A torch optimizer whose state lives in host memory and is updated where that is fastest.

FP32 masters and moments are on the host; parameters and gradients, of 32 or of 16 bits, stay where
the model is. Another optimizer is a subclass with its defaults and a kernel (``kernels.Kernel``).
See docs/design/0010-hybrid-optimizer.md.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.errors import UsageError
from holdfast.offload.clipping import Clipped, clip
from holdfast.offload.early import Watch, is_complete
from holdfast.offload.gradients import Gradients
from holdfast.offload.grouping import find_groups
from holdfast.offload.kernels import Kernel, settled
from holdfast.offload.lanes import Lanes, make_lanes
from holdfast.offload.loading import Fitting, given_for, hide_from_casts, load_state, unhidden
from holdfast.offload.options import KNOWN, Options, Parameters
from holdfast.offload.placing import Placing
from holdfast.offload.problems import check_parameter, gradient_problem
from holdfast.offload.rows import MASTER, Place, Row
from holdfast.offload.small import limit
from holdfast.offload.states import make_state
from holdfast.offload.stepping import Stepping
from holdfast.offload.tier import tier_of
from holdfast.snapshot.opened import fence_all


class HybridOptimizer(Optimizer):
    """The base of optimizers with their state in host memory. Takes the place of one of torch's."""

    #: The class of torch whose checkpoints are its own, too.
    stands_for: str
    _step_supports_amp_scaling = True

    def __init__(
        self, params: Parameters, defaults: dict[str, Any], kernel: Kernel, options: Options
    ) -> None:
        unknown = sorted(options.keys() - KNOWN)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {unknown[0]!r}")
        self._kernel = kernel
        self._options = options
        self._places: dict[torch.Tensor, tuple[Row, Place]] = {}
        self._lanes: Lanes | None = None
        self._gradients: Gradients | None = None
        self._waiting: dict[torch.Tensor, str] = {}
        """Frozen parameters, with their names: memory is made when they first have a gradient."""
        self._device: torch.device | None = None
        self._numbered: list[int] = []
        """The groups as rows have their numbers."""
        self._clipped: Clipped | None = None
        """What the next step multiplies gradients by."""
        self._tier = tier_of(options)
        self._placing = Placing(kernel, options, self._tier)
        self._stepping = Stepping(kernel, self._placing, self._places, self._tier)
        self._watch = Watch(self._send_early, self._settle_clipped)
        _LIVING.add(self)
        super().__init__(params, defaults)
        self.register_state_dict_pre_hook(_refuse_broken)

    # ── what it is for ───────────────────────────────────────────────────────────────────

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with host memory for their state.

        UsageError for those on another device than the first, or of a dtype FP32 cannot hold.
        """
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._take_group(before)
        except BaseException:
            del self.param_groups[before:]
            raise

    def _take_group(self, number: int) -> None:
        group = self.param_groups[number]
        names = group.get("param_names") or [
            f"parameter {position} of group {number}" for position in range(len(group["params"]))
        ]
        device = self._device
        places = [Place(*pair) for pair in zip(group["params"], names, strict=True)]
        for place in places:
            device = device or place.local.device
            check_parameter(place, device)
        self._device = device
        self._placing.expect(places)
        self._make_rows([place for place in places if not self._may_wait(place)], number)
        self._waiting.update(
            (place.parameter, place.name) for place in places if self._may_wait(place)
        )

    def _may_wait(self, place: Place) -> bool:
        """A frozen parameter takes no memory until it is updated."""
        parameter = place.parameter
        is_frozen = not parameter.requires_grad and parameter.grad is None
        return is_frozen and parameter not in self._places

    def _take_waiting(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        """Make memory for the frozen parameters that need it now, by the groups they are in."""
        for number, group in enumerate(self.param_groups):
            found = [p for p in group["params"] if p in self._waiting and wanted(p)]
            places = [Place(parameter, self._waiting[parameter]) for parameter in found]
            for place in places:
                check_parameter(place, self._device)
            self._make_rows(places, number)
            for parameter in found:
                del self._waiting[parameter]

    def _make_rows(self, places: list[Place], number: int) -> None:
        by_dtype: dict[torch.dtype, list[Place]] = {}
        for place in places:
            by_dtype.setdefault(place.parameter.dtype, []).append(place)
        for alike in by_dtype.values():
            is_pinned = alike[0].local.is_cuda
            small = limit(self._placing.longest)
            make = None if self._tier is None else self._tier.make
            self._take_row(Row(alike, number, is_pinned=is_pinned, small=small, make=make))

    def _take_row(self, row: Row) -> None:
        for kind in (MASTER, *self._kernel.kinds(self.param_groups[row.group])):
            row.memory(kind)
        for place in row.places:
            is_new = place.parameter not in self._places  # else it was in a group taken out since
            self._places[place.parameter] = row, place
            if is_new and place.small is None:
                self._watch.add(place.parameter)
        if self._gradients is not None:
            self._gradients.forget()
        self._placing.add(row)

    def _started(self) -> tuple[Lanes, Gradients]:
        """The lanes, made when first needed: an optimizer that never steps starts no thread."""
        if self._lanes is None or self._gradients is None:
            device = self._device or torch.device("cpu")
            self._lanes = make_lanes(
                device, threads=self._options.get("threads"),
                delay_s=self._options.get("lane_delay_s", 0.0),
            )  # fmt: skip
            self._gradients = Gradients(self._lanes)
        return self._lanes, self._gradients

    # ── gradients ────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _send_early(self, parameter: torch.Tensor) -> None:
        """Of a backward: this gradient is ready. It goes if no more is expected to come to it."""
        row, place = self._places[parameter]
        gradient = place.gradient
        place.backwards += 1
        if place.backwards < place.expected or gradient is None:
            return
        if self._problem(row, place, gradient):
            return
        if not is_complete(place, self._options.get("early_gradients")):
            return
        ranges = self._placing.on_host(place)
        if not ranges:
            return
        with suppress(torch.OutOfMemoryError):  # of a full backward: then it goes at the step
            self._started()[1].send(row, place, place.flat(gradient), ranges)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_ on all its parameters, with no gradient sent again.

        The next step clips them where it uses them, in the same arithmetic; the gradients
        themselves stay, unless this is called twice. Call it last before the step: those that
        are made anew in between are not clipped; those that a backward adds to are clipped before
        it does. Returns their norm before.
        UsageError, here or at the step, for those that were written to in another way in between.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            self._watch.add_coming(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self._clipped is not None:
            self._check_clipped()
            self._clipped.apply(gradients)
        norm, self._clipped = clip(gradients, max_norm, norm_type)
        return norm

    @torch.no_grad()
    def _settle_clipped(self, parameter: torch.Tensor) -> None:
        """Of a backward: this gradient is added to next."""
        if self._clipped is not None and parameter.grad is not None:
            self._clipped.settle(parameter.grad)

    def _check_clipped(self) -> None:
        """UsageError where a gradient was to be clipped, and something else came before that."""
        if self._clipped is None:
            return
        for _, place in self._places.values():
            gradient = place.parameter.grad
            if gradient is not None and self._clipped.is_overtaken(gradient):
                raise UsageError(
                    f"the gradient of {place.name} was written to after clip_grad_norm_, and "
                    "what was there before is not clipped yet: the step does that. Call "
                    "clip_grad_norm_ last before the step, or zero_grad of the optimizer in "
                    "between, or clip with torch.nn.utils.clip_grad_norm_"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what was sent of them."""
        self._forget()
        super().zero_grad(set_to_none)

    # ── the step ─────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; their state on the host is final on return.

        With parameters that other ranks have as well the first one is a collective of those ranks,
        unless device_share=0 or there is no GPU: they agree what is updated where.
        UsageError for gradients it cannot use: sparse ones, or of another dtype or device than
        their parameters. When an update breaks off half-way, every further step refuses.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _refuse_broken(self)
        self._check_clipped()
        gradients = self._with_gradient()
        groups = settled(self.param_groups)
        self._placing.agree(groups, lambda: self._started()[0])
        found_inf = getattr(self, "found_inf", None)  # a gradient scaler sets it for the step
        if gradients and not (found_inf is not None and bool(found_inf.item())):
            self._update(gradients, groups)
        self._forget(is_stepped=True)
        return loss

    def _update(self, found: dict[Place, torch.Tensor], groups: Sequence[dict[str, Any]]) -> None:
        lanes, gradients = self._started()
        divisor = getattr(self, "grad_scale", None)
        self._stepping.is_done = False  # what raises before an update begins is none
        try:
            self._stepping.step(found, groups, self.state, lanes, gradients, self._clipped, divisor)
        except BaseException:
            if not self.broken_off and self._stepping.is_done:
                self._forget(is_stepped=True)
            raise

    @property
    def broken_off(self) -> str:
        """Why its parameters and state are no state of any step: an update broke off half-way."""
        return self._stepping.broken_off

    def _forget(self, *, is_stepped: bool = False) -> None:
        self._clipped = None
        for _, place in self._places.values():
            if is_stepped and place.backwards:
                place.expected = place.backwards
            place.backwards = 0
        if self._gradients is not None:
            self._gradients.forget()

    def _with_gradient(self) -> dict[Place, torch.Tensor]:
        """The parameters to be updated, with this rank's elements of their gradients."""
        if self._waiting:
            self._take_waiting(lambda parameter: parameter.grad is not None)
        found: dict[Place, torch.Tensor] = {}
        for place in self._find_groups():
            gradient = place.gradient
            if gradient is None:
                continue
            problem = self._problem(self._places[place.parameter][0], place, gradient)
            if problem:
                raise UsageError(f"{place.name} {problem}")
            found[place] = gradient
        for place in found:  # in the same order on all ranks, once nothing is refused
            if place.is_placed:
                found[place] = place.reduced()
        return found

    def _problem(self, row: Row, place: Place, gradient: torch.Tensor) -> str:
        return gradient_problem(type(self).__name__, row, place, gradient)

    def _find_groups(self) -> list[Place]:
        self._numbered = [id(group) for group in self.param_groups]
        return find_groups(type(self).__name__, self.param_groups, self._places, self._waiting)

    # ── its state ────────────────────────────────────────────────────────────────────────

    def make_state(self, parameter: torch.Tensor) -> None:
        """Give a parameter all the state it will have, so that a restore reads into it."""
        self._take_group_of({parameter})
        if self._numbered != [id(group) for group in self.param_groups]:
            self._find_groups()
        row, place = self._places[parameter]
        kinds = self._kernel.kinds(self.param_groups[row.group])
        make_state(row, place, self.state[parameter], kinds, self._kernel.counts_steps)

    def _take_group_of(self, parameters: Collection[torch.Tensor]) -> None:
        """Make memory for these and, where one was frozen, for the frozen ones grouped with it."""
        for group in self.param_groups if self._waiting else ():
            if any(p in self._waiting and p in parameters for p in group["params"]):
                of = set(group["params"])
                self._take_waiting(of.__contains__)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of this optimizer, or of the one of torch that it stands for.

        Masters that are not in it are what the parameters are when the next step is taken: load
        those before it. ValueError for state that does not fit; then nothing was changed.
        A snapshot under way is waited for, as before a step: state is put where it is taken from.
        """
        self._take_group_of(given_for(state_dict, self.param_groups))
        self._find_groups()
        fence_all()
        # Last of all such hooks: torch would cast the state to the parameters' dtype and device.
        fit = Fitting(self._places, lambda group: self._kernel.kinds({**self.defaults, **group}))
        hook = self.register_load_state_dict_pre_hook(
            lambda _, given: hide_from_casts(fit.fitting(given, self.param_groups))
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_places" not in self.__dict__:
            raise UsageError(_NOT_COPIED.format(type(self).__name__))
        super().__setstate__(state)
        for group in self.param_groups:  # those of an older torch lack some
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._find_groups()
        for parameter, given in list(self.state.items()):
            found = unhidden(given)
            if found is not None and parameter in self._places:
                row, place = self._places[parameter]
                kinds = self._kernel.kinds(self.param_groups[row.group])
                self.state[parameter] = load_state(row, place, found, kinds)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(_NOT_COPIED.format(type(self).__name__))


#: Threads do not live on in a forked process, and it would wait for them forever.
_LIVING: weakref.WeakSet[HybridOptimizer] = weakref.WeakSet()


def _after_fork() -> None:
    for optimizer in _LIVING:
        optimizer._lanes = optimizer._gradients = None


os.register_at_fork(after_in_child=_after_fork)

_NOT_COPIED = (
    "a {} is bound to its parameters' memory on the host and cannot be pickled or copied: "
    "make another, and give it the state_dict() of this one"
)


def _refuse_broken(optimizer: Any) -> None:
    if optimizer.broken_off:
        raise UsageError(
            f"an update of this {type(optimizer).__name__} broke off ({optimizer.broken_off}), and "
            "some of its parameters have it and some not: make it anew and restore a checkpoint"
        )
