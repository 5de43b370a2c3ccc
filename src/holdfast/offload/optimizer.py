"""AdamW and SGD with their state in host memory, and the options and base class of such
optimizers.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypedDict, Unpack

import torch
from torch.optim import Optimizer

from holdfast.accelerator.devices import is_on_device
from holdfast.errors import UsageError
from holdfast.offload import kernels
from holdfast.offload.file_state import tier_of
from holdfast.offload.gradients import ClippedNorm, EarlyGradients, Gradients, clip, is_complete
from holdfast.offload.host_state import MASTER, FlatBufferRow, ParamSlot, limit
from holdfast.offload.kernels import Kernel, settled
from holdfast.offload.placement import SubgroupPlacement, find_groups
from holdfast.offload.state_dict import (
    Fitting,
    given_for,
    hide_from_casts,
    load_state,
    make_state,
    unhidden,
)
from holdfast.offload.step import StepRunner, check_kernel, check_parameter, gradient_problem
from holdfast.offload.streams import WorkStreams, make_streams
from holdfast.state.step_calls import whole_update

# A torch optimizer whose state lies in host memory and is updated where that is fastest.
#
# FP32 masters and moments are on the host; parameters and gradients, of 32 or of 16 bits, stay with
# the model. Another optimizer is a subclass with its defaults and a kernel (``kernels.Kernel``).
# See docs/design/0010-hybrid-optimizer.md.


class HybridOptimizer(Optimizer):
    """The base of optimizers with their state in host memory, each a substitute for one of torch's.

    ``params``: parameters, or groups of them. ``defaults``: the defaults of a group, by name.
    ``kernel``: what computes an update. ``options``: the options of ``Options`` that were given.
    """

    #: The class of torch that has the same checkpoints.
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
        self._places: dict[torch.Tensor, tuple[FlatBufferRow, ParamSlot]] = {}
        self._streams: WorkStreams | None = None
        self._gradients: Gradients | None = None
        self._waiting: dict[torch.Tensor, str] = {}
        """Frozen parameters, with their names: memory is allocated when they first have a
        gradient.
        """
        self._device: torch.device | None = None
        self._is_forked = False
        self._numbered: list[int] = []
        """The groups in the order in which the flat buffers number them."""
        self._clipped: ClippedNorm | None = None
        """The clipping factor for the gradients of the next step."""
        self._tier = tier_of(options)
        self._placing = SubgroupPlacement(kernel, options, self._tier)
        self._stepping = StepRunner(kernel, self._placing, self._places, self._tier)
        self._watch = EarlyGradients(self._send_early, self._settle_clipped)
        _LIVING.add(self)
        super().__init__(params, defaults)
        self.register_state_dict_pre_hook(_refuse_broken)

    # ── parameters ───────────────────────────────────────────────────────────────────────

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with host memory for their state.

        ``param_group``: as torch's optimizers take it: ``params`` and what differs from defaults.

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
        places = [ParamSlot(*pair) for pair in zip(group["params"], names, strict=True)]
        for place in places:
            device = device or place.local.device
            check_parameter(place, device)
        if device is not None and self._placing.uses_device(device):
            check_kernel(self._kernel, group, device)
        self._device = device
        self._placing.expect(places)
        self._make_rows([place for place in places if not self._may_wait(place)], number)
        self._waiting.update(
            (place.parameter, place.name) for place in places if self._may_wait(place)
        )

    def _may_wait(self, place: ParamSlot) -> bool:
        """Return whether a parameter is frozen: it takes no memory until it is updated."""
        parameter = place.parameter
        is_frozen = not parameter.requires_grad and parameter.grad is None
        return is_frozen and parameter not in self._places

    def _take_waiting(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        """Allocate memory for the frozen parameters that need it now, by their groups."""
        for number, group in enumerate(self.param_groups):
            parameters = [p for p in group["params"] if p in self._waiting and wanted(p)]
            places = [ParamSlot(parameter, self._waiting[parameter]) for parameter in parameters]
            for place in places:
                check_parameter(place, self._device)
            self._make_rows(places, number)
            for parameter in parameters:
                del self._waiting[parameter]

    def _make_rows(self, places: list[ParamSlot], number: int) -> None:
        by_dtype: dict[torch.dtype, list[ParamSlot]] = {}
        for place in places:
            by_dtype.setdefault(place.parameter.dtype, []).append(place)
        for alike in by_dtype.values():
            is_pinned = is_on_device(alike[0].local)
            small = limit(self._placing.longest)
            make = None if self._tier is None else self._tier.make
            self._take_row(
                FlatBufferRow(alike, number, is_pinned=is_pinned, small=small, make=make)
            )

    def _take_row(self, buffer: FlatBufferRow) -> None:
        for kind in (MASTER, *self._kernel.kinds(self.param_groups[buffer.group])):
            buffer.memory(kind)
        for place in buffer.places:
            is_new = place.parameter not in self._places  # else its group was removed once
            self._places[place.parameter] = buffer, place
            if is_new and place.small is None:
                self._watch.add(place.parameter)
        if self._gradients is not None:
            self._gradients.forget()
        self._placing.add(buffer)

    def _started(self) -> tuple[WorkStreams, Gradients]:
        """The work streams, created when first needed: an optimizer that never steps starts no
        thread.
        """
        if self._streams is None or self._gradients is None:
            device = self._device or torch.device("cpu")
            self._streams = make_streams(
                device,
                threads=self._options.get("threads"),
                delay_s=self._options.get("lane_delay_s", 0.0),
            )
            self._gradients = Gradients(self._streams)
        return self._streams, self._gradients

    # ── gradients ────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _send_early(self, parameter: torch.Tensor) -> None:
        """Send a gradient that a backward has completed, if no more is expected to be added to
        it.
        """
        buffer, place = self._places[parameter]
        gradient = place.gradient
        place.backwards += 1
        if place.backwards < place.expected or gradient is None:
            return
        if self._problem(buffer, place, gradient):
            return
        if not is_complete(place, self._options.get("early_gradients")):
            return
        ranges = self._placing.on_host(place)
        if not ranges:
            return
        with suppress(torch.OutOfMemoryError):  # the backward used all memory: send it at the step
            self._started()[1].send(buffer, place, place.flat(gradient), ranges)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip as torch.nn.utils.clip_grad_norm_ on all its parameters, without sending gradients
        again.

        The next step clips the gradients where it uses them, in the same arithmetic; the gradients
        themselves stay unchanged, unless this is called twice. Call it last before the step:
        gradients that are created in between are not clipped; those that a backward adds to are
        clipped before it does. Returns their norm before clipping.

        ``max_norm``: the largest norm of all gradients together. ``norm_type``: the p of the
        p-norm.

        UsageError, here or at the step, for gradients that were written to in another way in
        between.
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
        """Clip a gradient to which a backward is about to add."""
        if self._clipped is not None and parameter.grad is not None:
            self._clipped.settle(parameter.grad)

    def _check_clipped(self) -> None:
        """Raise UsageError where a gradient that must be clipped was written to before."""
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
        """Clear the gradients, and forget the copies that were sent.

        ``set_to_none``: free their memory; else they become zeros.
        """
        self._forget()
        super().zero_grad(set_to_none)

    # ── the step ─────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; their state on the host is final on return.

        With parameters that other ranks have as well the first step is a collective of those ranks,
        unless device_share=0 or all is on the CPU: they agree where each element is updated.
        UsageError for gradients it cannot use: sparse ones, or of another dtype or device than
        their parameters. When an update breaks off half-way, every further step refuses.

        ``closure``: evaluates the model anew and returns the loss, which this returns.
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

    def _update(
        self, flats: dict[ParamSlot, torch.Tensor], groups: Sequence[dict[str, Any]]
    ) -> None:
        streams, gradients = self._started()
        divisor = getattr(self, "grad_scale", None)
        self._stepping.is_done = False  # an error before the update begins means no update
        try:
            self._stepping.step(
                flats, groups, self.state, streams, gradients, self._clipped, divisor
            )
        except BaseException:
            if not self.broken_off and self._stepping.is_done:
                self._forget(is_stepped=True)
            raise

    @property
    def broken_off(self) -> str:
        """Why its parameters and state belong to no step: an update broke off half-way; ""
        otherwise.
        """
        return self._stepping.broken_off

    def _forget(self, *, is_stepped: bool = False) -> None:
        self._clipped = None
        for _, place in self._places.values():
            if is_stepped and place.backwards:
                place.expected = place.backwards
            place.backwards = 0
        if self._gradients is not None:
            self._gradients.forget()

    def _with_gradient(self) -> dict[ParamSlot, torch.Tensor]:
        """Return the parameters to update, with this rank's elements of their gradients."""
        if self._waiting:
            self._take_waiting(lambda parameter: parameter.grad is not None)
        flats: dict[ParamSlot, torch.Tensor] = {}
        for place in self._find_groups():
            gradient = place.gradient
            if gradient is None:
                continue
            problem = self._problem(self._places[place.parameter][0], place, gradient)
            if problem:
                raise UsageError(f"{place.name} {problem}")
            flats[place] = gradient
        for place in flats:  # in the same order on all ranks, once nothing is refused
            if place.is_placed:
                flats[place] = place.reduced()
        return flats

    def _problem(self, buffer: FlatBufferRow, place: ParamSlot, gradient: torch.Tensor) -> str:
        return gradient_problem(type(self).__name__, buffer, place, gradient)

    def _find_groups(self) -> list[ParamSlot]:
        self._numbered = [id(group) for group in self.param_groups]
        return find_groups(type(self).__name__, self.param_groups, self._places, self._waiting)

    # ── state ────────────────────────────────────────────────────────────────────────────

    def make_state(self, parameter: torch.Tensor) -> None:
        """Create all the state that a parameter will have, so that a restore reads into it."""
        self._take_group_of({parameter})
        if self._numbered != [id(group) for group in self.param_groups]:
            self._find_groups()
        buffer, place = self._places[parameter]
        kinds = self._kernel.kinds(self.param_groups[buffer.group])
        make_state(buffer, place, self.state[parameter], kinds, self._kernel.counts_steps)

    def _take_group_of(self, parameters: Collection[torch.Tensor]) -> None:
        """Allocate memory for these and, where one was frozen, for the other frozen ones of its
        group.
        """
        for group in self.param_groups if self._waiting else ():
            if any(p in self._waiting and p in parameters for p in group["params"]):
                of = set(group["params"])
                self._take_waiting(of.__contains__)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer, or of the optimizer of torch that it replaces.

        Masters that are not in it are copied from the parameters at the next step: load those
        before it. ValueError for state that does not fit; then nothing was changed. A running
        capture is waited for, as before a step, because the state is written in place.

        ``state_dict``: what ``state_dict()`` gave.
        """
        self._take_group_of(given_for(state_dict, self.param_groups))
        self._find_groups()
        # Last of all such hooks: torch would cast the state to the parameters' dtype and device.
        fit = Fitting(self._places, lambda group: self._kernel.kinds({**self.defaults, **group}))
        hook = self.register_load_state_dict_pre_hook(
            lambda _, given: hide_from_casts(fit.fitting(given, self.param_groups))
        )
        try:
            load = super().load_state_dict
            whole_update(self, lambda: load(state_dict))
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
            hidden = unhidden(given)
            if hidden is not None and parameter in self._places:
                buffer, place = self._places[parameter]
                kinds = self._kernel.kinds(self.param_groups[buffer.group])
                self.state[parameter] = load_state(buffer, place, hidden, kinds)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(_NOT_COPIED.format(type(self).__name__))


#: Threads do not exist in a forked process, which would wait for them forever.
_LIVING: weakref.WeakSet[HybridOptimizer] = weakref.WeakSet()


def _after_fork() -> None:
    for optimizer in _LIVING:
        optimizer._streams = optimizer._gradients = None
        optimizer._is_forked = True


os.register_at_fork(after_in_child=_after_fork)

_NOT_COPIED = (
    "a {} is bound to its parameters' memory on the host and cannot be pickled or copied: "
    "make another, and give it the state_dict() of this one"
)


def _refuse_broken(optimizer: Any) -> None:
    device = optimizer._device
    if optimizer._is_forked and device is not None and device.type != "cpu":
        raise UsageError(
            f"the state of this {type(optimizer).__name__} is pinned memory, and a forked process "
            "does not have it: use it in the process that made it"
        )
    if optimizer.broken_off:
        raise UsageError(
            f"an update of this {type(optimizer).__name__} broke off ({optimizer.broken_off}), and "
            "some of its parameters have it and some not: make it anew and restore a checkpoint"
        )


class HybridAdamW(HybridOptimizer):
    """torch.optim.AdamW, with its FP32 masters and moments in host memory.

    Takes the arguments of torch's, and options (``holdfast.offload.Options`` has more on each);
    reads its checkpoints and writes checkpoints that it can read. UsageError for parameters of
    other dtypes or devices.

    ``params``: parameters of float32, bfloat16 or float16, plain or DTensor, all on one device; or
    groups of them, or pairs of name and parameter. ``lr``: the learning rate. ``betas``: the decay
    of the first and of the second moment. ``eps``: added to the root of the second moment.
    ``weight_decay``: the decoupled decay of weights. ``amsgrad``: use the largest second moment.
    ``maximize``: go up the gradient. ``options``: any of those below, by name.

    ``device_share``: the part of all elements updated on the device, 0 to 1; None: the fastest.
    ``subgroup_elements``: elements updated in one place at a time, 16 Mi by default.
    ``device_slots``: subgroups whose state has room on the device during a step.
    ``threads``: CPU threads for updates; None: this rank's share of the cores, less two.
    ``early_gradients``: send gradients to the host during the backward; None: where complete.
    ``host_memory_bytes``: masters and moments in memory at a time; None: all of them.
    ``storage_path``: a directory on a fast disk of this host, for the rest.
    ``lane_delay_s``: for tests: everything begins up to so much later, by chance.
    """

    stands_for = "AdamW"

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        # The defaults of torch's, checked by it, so that either loads the other's checkpoints.
        like = torch.optim.AdamW(
            [torch.zeros(0)], lr, betas, eps, weight_decay, amsgrad, maximize=maximize
        )
        super().__init__(params, dict(like.defaults), kernels.AdamW(), options)


# SGD with momentum, with its state in host memory.


class HybridSGD(HybridOptimizer):
    """torch.optim.SGD, with its FP32 masters and momentum in host memory.

    Takes the arguments of torch's, and the options that ``HybridAdamW`` takes.

    ``params``: as for ``HybridAdamW``. ``lr``: the learning rate. ``momentum``: the factor of the
    momentum. ``dampening``: the part of a gradient that the momentum leaves out. ``weight_decay``:
    the decay of weights. ``nesterov``: use Nesterov's momentum. ``maximize``: go up the gradient.
    ``options``: those of ``holdfast.offload.Options``, by name.
    """

    stands_for = "SGD"

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        like = torch.optim.SGD(
            [torch.zeros(0)], lr, momentum, dampening, weight_decay, nesterov, maximize=maximize
        )
        super().__init__(params, dict(like.defaults), kernels.SGD(), options)


# The options of an optimizer with its state in host memory, beside the arguments of torch's.


Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class Options(TypedDict, total=False):
    """Options for where and how to update; they change no result but for last bits."""

    device_share: float | None
    """The part of all elements updated on the device: 0 to 1. None: the fastest, by measurement.

    With a number each step updates the same elements in the same place, so runs are reproducible: a
    GPU's kernels and the CPU's differ in last bits. On the CPU None is 0. Ranks with the same
    parameters agree on it in their first step, which waits for all of them, unless it is 0.
    """
    subgroup_elements: int
    """The number of elements updated in one place at a time."""
    device_slots: int
    """The number of subgroups whose state fits on the device at once, during a step."""
    threads: int | None
    """CPU threads for updates. None: this rank's share of the cores, less two; without a device,
    all that torch uses.
    """
    early_gradients: bool | None
    """True if gradients go to the host during the backward. None: where they are complete then."""
    host_memory_bytes: int | None
    """The most bytes of masters and moments in memory at a time; the rest is in ``storage_path``.

    Every step then works through them in the opposite order of the one before. None: no limit.
    """
    storage_path: str | os.PathLike[str] | None
    """A directory on a fast disk of this host: files without a name there hold all the state."""
    lane_delay_s: float
    """For tests: all work begins up to so much later, at random."""


#: The names of all options.
KNOWN = frozenset(Options.__annotations__)
