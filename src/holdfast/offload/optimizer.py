"""A torch optimizer whose state lives in host memory and is updated where that is fastest.

FP32 masters and moments are on the host; parameters and gradients, of 32 or of 16 bits, stay where
the model is. Another optimizer is a subclass with its defaults and a kernel (``kernels.Kernel``).
See docs/design/0010-hybrid-optimizer.md.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import UsageError
from holdfast.offload.checksums import changed, note
from holdfast.offload.clipping import Clipped, clip
from holdfast.offload.gradients import Gradients
from holdfast.offload.grouping import find_groups
from holdfast.offload.kernels import Kernel
from holdfast.offload.lanes import Lanes, make_lanes
from holdfast.offload.loading import Fitting, hide_from_casts, load_state, unhidden
from holdfast.offload.placing import Placing
from holdfast.offload.rows import MASTER, Place, Row, check_parameter, mesh_problem
from holdfast.offload.states import begin_state, make_state
from holdfast.offload.update import Due, Scales, Update
from holdfast.snapshot.opened import fence_all

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class Options(TypedDict, total=False):
    """Where and how it updates; nothing of it changes what is computed, but for last bits."""

    device_share: float | None
    """The part of all elements updated on the device: 0 to 1. None: what is fastest by measure.

    With a number each step updates the same elements in the same place, so runs are reproducible:
    a GPU's kernels and the CPU's differ in last bits. On the CPU None is 0.
    """
    subgroup_elements: int
    """How many elements are updated in one place at a time."""
    device_slots: int
    """For the state of how many subgroups there is room on the device, during a step."""
    threads: int | None
    """Of the CPU, for updates. None: this rank's share of the cores, less two; without a GPU, all
    that torch uses."""
    early_gradients: bool | None
    """Whether gradients go to the host during the backward. None: where they are complete then."""
    lane_delay_s: float
    """For tests: everything begins up to so much later, by chance."""


_KNOWN = frozenset(Options.__annotations__)


class HybridOptimizer(Optimizer):
    """The base of optimizers with their state in host memory. Takes the place of one of torch's."""

    #: The class of torch whose checkpoints are its own, too.
    stands_for: str
    _step_supports_amp_scaling = True

    def __init__(
        self, params: Parameters, defaults: dict[str, Any], kernel: Kernel, options: Options
    ) -> None:
        unknown = sorted(options.keys() - _KNOWN)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {unknown[0]!r}")
        self._kernel = kernel
        self._options = options
        self._places: dict[torch.Tensor, tuple[Row, Place]] = {}
        self._lanes: Lanes | None = None
        self._gradients: Gradients | None = None
        self._numbered: list[int] = []
        """The groups as rows have their numbers."""
        self._hooks: list[Any] = []
        self.broken_off = ""
        """Why its parameters and state are no state of any step: an update broke off half-way."""
        self._clipped: Clipped | None = None
        """What the next step multiplies gradients by."""
        self._placing = Placing(kernel, options)
        weakref.finalize(self, _remove, self._hooks).atexit = False
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
        by_dtype: dict[torch.dtype, list[Place]] = {}
        device = self._device
        for name, parameter in zip(names, group["params"], strict=True):
            place = Place(parameter, name)
            device = device or place.local.device
            check_parameter(place, device)
            by_dtype.setdefault(parameter.dtype, []).append(place)
        for places in by_dtype.values():
            is_pinned = places[0].local.is_cuda
            self._take_row(Row(places, number, is_pinned=is_pinned))

    def _take_row(self, row: Row) -> None:
        for kind in (MASTER, *self._kernel.kinds(self.param_groups[row.group])):
            row.memory(kind)
        for place in row.places:
            is_new = place.parameter not in self._places  # else it was in a group taken out since
            self._places[place.parameter] = row, place
            if is_new:
                self._watch(place)
        if self._gradients is not None:
            self._gradients.forget()
        self._placing.add(row)

    @property
    def _device(self) -> torch.device | None:
        return next((row.device for row, _ in self._places.values()), None)

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

    # ── gradients, as they become ready ──────────────────────────────────────────────────

    def _watch(self, place: Place) -> None:
        if not place.parameter.requires_grad or not place.parameter.is_leaf:
            return  # then it is sent at the step
        known = weakref.ref(self)

        def ready(parameter: torch.Tensor) -> None:
            optimizer = known()
            if optimizer is not None:
                optimizer._send_early(parameter)

        self._hooks.append(place.parameter.register_post_accumulate_grad_hook(ready))

    @torch.no_grad()
    def _send_early(self, parameter: torch.Tensor) -> None:
        row, place = self._places[parameter]
        gradient = place.gradient
        if gradient is None or self._problem(place, gradient) or not self._is_early(place):
            return
        ranges = self._placing.on_host(place)
        if ranges:
            self._started()[1].send(row, place, place.flat(gradient), ranges)

    def _is_early(self, place: Place) -> bool:
        if not place.is_reduced:
            return False
        wanted = self._options.get("early_gradients")
        if wanted is not None:
            return wanted
        if not dist.is_initialized():
            return True
        # A plain one may be averaged over the ranks yet, by DDP; a sharded one was, where its mesh
        # is of all ranks.
        parameter = place.parameter
        ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
        return ranks == dist.get_world_size()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_ on all its parameters, with no gradient sent again.

        The next step clips them where it uses them, in the same arithmetic; the gradients
        themselves stay, unless this is called twice. Call it last before the step: those that
        are written to, or made anew, in between are not clipped. Returns their norm before.
        """
        gradients = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if self._clipped is not None:
            self._clipped.apply(gradients)
        norm, self._clipped = clip(gradients, max_norm, norm_type)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what was sent of them."""
        self._forget()
        super().zero_grad(set_to_none)

    # ── the step ─────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; their state on the host is final on return.

        UsageError for gradients it cannot use: sparse ones, or of another dtype or device than
        their parameters. When an update breaks off half-way, every further step refuses.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _refuse_broken(self)
        gradients = self._with_gradient()
        found_inf = getattr(self, "found_inf", None)  # a gradient scaler sets it for the step
        if gradients and not (found_inf is not None and bool(found_inf.item())):
            self._update(gradients)
        self._forget()
        return loss

    def _forget(self) -> None:
        self._clipped = None
        if self._gradients is not None:
            self._gradients.forget()

    def _with_gradient(self) -> dict[Place, torch.Tensor]:
        """The parameters to be updated, with this rank's elements of their gradients."""
        found = []
        for place in self._find_groups():
            if place.parameter.grad is None:
                continue
            problem = self._problem(place, place.gradient)
            if problem:
                raise UsageError(f"{place.name} {problem}")
            found.append(place)
        return {place: place.reduced() for place in found}  # in the same order on all ranks

    def _find_groups(self) -> list[Place]:
        self._numbered = [id(group) for group in self.param_groups]
        return find_groups(type(self).__name__, self.param_groups, self._places)

    def _problem(self, place: Place, gradient: torch.Tensor | None) -> str:
        """Why a parameter cannot be updated with its gradient, in words; "" if it can."""
        local, row = place.local, self._places[place.parameter][0]
        assert gradient is not None
        if problem := mesh_problem(place):
            return problem
        if gradient.layout is not torch.strided:
            return (
                f"has a gradient of the layout {gradient.layout}: {type(self).__name__} updates "
                "by dense gradients. Make the embedding with sparse=False"
            )
        if local.dtype != row.dtype or local.device != row.device:
            return (
                f"is {local.dtype} on {local.device} now, and was {row.dtype} on {row.device} when "
                "the optimizer was made: convert and move the module first, then make the optimizer"
            )
        if tuple(local.shape) != place.shape:
            return (
                f"has the shape {list(local.shape)} here now, and had {list(place.shape)} when the "
                "optimizer was made: shard the module first, then make the optimizer"
            )
        if not place.lies_so(local):
            return (
                f"lies in memory with the strides {list(local.stride())} now, and with "
                f"{list(place.stride)} when the optimizer was made: convert the module to its "
                "memory format first, then make the optimizer"
            )
        if gradient.dtype != local.dtype or gradient.device != local.device:
            return (
                f"is {local.dtype} on {local.device}, its gradient {gradient.dtype} on "
                f"{gradient.device}: they have to be alike"
            )
        return ""

    def _update(self, found: Mapping[Place, torch.Tensor]) -> None:
        places = list(found)
        lanes, gradients = self._started()
        host, device, slots = self._placing.ready(self.param_groups, lanes, places)
        others = changed(places)
        due: dict[Place, Due] = {}
        factor = None if self._clipped is None else self._clipped.factor
        scales = Scales(factor, getattr(self, "grad_scale", None))
        update = Update(lanes, self._kernel, self.param_groups, due, scales, self._placing.learn)
        self.broken_off = "it was interrupted"  # an interrupt comes between any two lines
        try:
            for place, gradient in found.items():
                update.had[place] = tuple(self.state[place.parameter])
                due[place] = self._due(place, gradient, is_changed=place in others)
            self._bring(due, gradients)
            if self._kernel.counts_steps:
                update.steps = [one.step for one in due.values() if one.step is not None]
                update.steps_before = update.steps[0].item()
                self._count(list(due.values()), update.steps, lanes.device)
            update.run(host, device, slots)
        except BaseException as error:
            self._settle(update, f"{type(error).__name__}: {error}")
            raise
        self._end(due)

    def _end(self, due: Mapping[Place, Due]) -> None:
        """All is updated."""
        for place in due:
            note(place)
        self.broken_off = ""

    def _settle(self, update: Update, why: str) -> None:
        """What an update is that raised: none at all, or a whole one, or a part of one."""
        self.broken_off = why
        if update.is_complete:
            self._end(update.due)
            self._forget()
        elif not update.has_begun:
            if update.steps and update.steps[0].item() != update.steps_before:
                torch._foreach_sub_(update.steps, 1)
            for place, had in update.had.items():  # else a first update is none when tried again
                state = self.state[place.parameter]
                for kind in state.keys() - had:
                    del state[kind]
                if not state:
                    del self.state[place.parameter]
            self.broken_off = ""

    def _due(self, place: Place, gradient: torch.Tensor, *, is_changed: bool) -> Due:
        row, _ = self._places[place.parameter]
        group = self.param_groups[row.group]
        whole = place.parameter.grad
        assert whole is not None
        is_clipped = self._clipped is not None and self._clipped.has(whole)
        kinds = self._kernel.kinds(group)
        state = self.state[place.parameter]
        is_first = begin_state(row, place, state, kinds, self._kernel.counts_steps, is_changed)
        if not state:
            del self.state[place.parameter]
        return Due(place.flat(gradient), is_first, is_clipped, state.get("step"))

    def _count(self, due: list[Due], steps: list[torch.Tensor], device: torch.device) -> None:
        torch._foreach_add_(steps, 1)
        there = torch.stack(steps).to(device, non_blocking=True).unbind()
        for one, step in zip(due, there, strict=True):
            one.step_there = step

    def _bring(self, due: Mapping[Place, Due], gradients: Gradients) -> None:
        """See that all gradients the host needs are on their way, as they are now."""
        ranges = {place: found for place in due if (found := self._placing.on_host(place))}
        marks = gradients.true(ranges)
        for place, found in ranges.items():
            mark = marks.get(place)
            row = self._places[place.parameter][0]
            due[place].arrival = mark or gradients.send(row, place, due[place].gradient, found)

    # ── its state ────────────────────────────────────────────────────────────────────────

    def make_state(self, parameter: torch.Tensor) -> None:
        """Give a parameter all the state it will have, so that a restore reads into it."""
        if self._numbered != [id(group) for group in self.param_groups]:
            self._find_groups()
        row, place = self._places[parameter]
        kinds = self._kernel.kinds(self.param_groups[row.group])
        make_state(row, place, self.state[parameter], kinds, self._kernel.counts_steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of this optimizer, or of the one of torch that it stands for.

        Masters that are not in it are what the parameters are when the next step is taken: load
        those before it. ValueError for state that does not fit; then nothing was changed.
        A snapshot under way is waited for, as before a step: state is put where it is taken from.
        """
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


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


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
