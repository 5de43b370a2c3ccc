"""An update that raised: it was none, or a whole one, or nothing goes on from it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import UnsupportedState, UsageError
from holdfast.offload import HybridAdamW, HybridSGD, gradients, kernels
from holdfast.offload import step as noting
from holdfast.offload import step as stepping
from holdfast.offload.bit_sums import Bits, checksums
from holdfast.offload.placement import SubgroupPlacement
from holdfast.offload.step import StepRunner
from holdfast.offload.streams import ThreadMark
from holdfast.offload.update import Update
from support.models import hybrids

SMALL: dict[str, Any] = {"subgroup_elements": 700, "device_share": 0.5}


def adamw(model: nn.Module) -> HybridAdamW:
    return HybridAdamW(model.parameters(), 1e-2, **SMALL)


def sgd(model: nn.Module) -> HybridSGD:
    return HybridSGD(model.parameters(), 1e-2, momentum=0.9, dampening=0.5, **SMALL)


def test_half_an_update_is_neither_saved_nor_given_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hybrids.tiny()
    optimizer = adamw(model)
    hybrids.train(model, optimizer, range(1))
    state = {"model": model, "optimizer": optimizer}
    real = kernels._fused_adamw
    calls = []

    def failing(*args: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the third call")
        real(*args, **options)

    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        checkpointer.save(0, durable=True).wait_durable(timeout_s=60)
        hybrids.loss_of(model, 1).backward()
        monkeypatch.setattr(kernels, "_fused_adamw", failing)
        with pytest.raises(RuntimeError, match="the third call"):
            optimizer.step()
        with pytest.raises(UnsupportedState, match=r"'optimizer' broke off .RuntimeError: the"):
            checkpointer.save(1, durable=True)
    with pytest.raises(UsageError, match=r"HybridAdamW broke off .RuntimeError: the third call"):
        optimizer.state_dict()


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("after", [0, 2])
def test_an_update_interrupted_when_its_work_was_all_given_is_a_whole_one(
    make: Any, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ((model, make(model)) for model in (hybrids.tiny(), hybrids.tiny()))
    hybrids.train(*other, range(3))
    hybrids.train(*one, range(2))
    hybrids.loss_of(one[0], 2).backward()
    waits = []

    def wait(mark: ThreadMark) -> None:
        if threading.current_thread() is threading.main_thread():
            waits.append(1)
            if len(waits) == after + 1:
                raise KeyboardInterrupt
        mark.future.result()

    monkeypatch.setattr(ThreadMark, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        one[1].step()
    monkeypatch.undo()
    one[1].zero_grad()
    assert not one[1].broken_off
    assert hybrids.differences(one, other) == []
    hybrids.train(*one, range(3, 5))
    hybrids.train(*other, range(3, 5))
    assert hybrids.differences(one, other) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("after", [0, 1])
def test_an_update_interrupted_while_it_is_noted_is_a_whole_one_and_can_be_saved(
    dtype: torch.dtype, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ((m, adamw(m)) for m in (hybrids.tiny(dtype), hybrids.tiny(dtype)))
    hybrids.train(*other, range(3))
    hybrids.train(*one, range(2))
    hybrids.loss_of(one[0], 2).backward()
    calls = []

    def interrupted(flats: list[torch.Tensor]) -> Any:
        calls.append(1)
        if len(calls) == 1:  # those taken before the update, of the same parameters
            return checksums(flats)
        return some_of(checksums(flats))

    def some_of(sums: list[Bits]) -> Iterator[Bits]:
        assert len(sums) > after
        yield from sums[:after]
        raise KeyboardInterrupt

    monkeypatch.setattr(noting, "checksums", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one[1].step()
    monkeypatch.undo()
    assert not one[1].broken_off
    assert hybrids.differences(one, other) == []
    with holdfast.Checkpointer(tmp_path, {"model": one[0], "optimizer": one[1]}) as checkpointer:
        checkpointer.save(2, durable=True).wait_durable(timeout_s=60)
    one[1].zero_grad()
    hybrids.train(*one, range(3, 5))
    hybrids.train(*other, range(3, 5))
    assert hybrids.differences(one, other) == []


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("where", ["_bring", "_count"])
def test_an_update_interrupted_before_it_began_is_none(
    make: Any, steps_before: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ((model, make(model)) for model in (hybrids.tiny(), hybrids.tiny()))
    for pair in (one, other):
        hybrids.train(*pair, range(steps_before))
        hybrids.loss_of(pair[0], 7).backward()
    if where == "_count" and make is sgd:
        where = "_begin"
    real = getattr(StepRunner, where)

    def interrupted(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(StepRunner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        one[1].step()
    monkeypatch.undo()
    assert hybrids.differences(one, other) == []
    one[1].step()
    other[1].step()
    assert hybrids.differences(one, other) == []


class _Interrupt:
    """Interrupts ``StepRunner.step`` before its line with this number, in the order they run."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code is StepRunner.step.__code__ else None

    def _line(self, _: FrameType, event: str, __: object) -> Any:
        self.left -= event == "line"
        if self.left < 0:
            raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_step_interrupted_at_any_line_is_none_or_a_whole_one(make: Any) -> None:
    one, other = ((model, make(model)) for model in (hybrids.tiny(), hybrids.tiny()))
    outcomes = []
    for line in count():
        for pair in (one, other):
            hybrids.loss_of(pair[0], line).backward()
        interrupt = _Interrupt(line)
        before = sys.gettrace()
        try:
            sys.settrace(interrupt)
            one[1].step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert not one[1].broken_off
        is_none = hybrids.differences(one, other) == []
        outcomes.append(is_none)
        other[1].step()
        if is_none:
            one[1].step()
        assert hybrids.differences(one, other) == []
        for pair in (one, other):
            pair[1].zero_grad()
        if interrupt.left >= 0:
            break
    assert outcomes.count(True) > 10 and outcomes.count(False) > 2
    assert outcomes == sorted(outcomes, reverse=True)


def test_a_step_that_did_not_begin_behind_one_that_raised_though_whole_keeps_the_clipping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = ((model, adamw(model)) for model in (hybrids.tiny(), hybrids.tiny()))
    for pair in (one, other):
        hybrids.loss_of(pair[0], 0).backward()
    real, left = StepRunner._end, [1]

    def interrupted(*given: Any) -> None:
        real(*given)
        if left:
            left.pop()
            raise KeyboardInterrupt

    monkeypatch.setattr(StepRunner, "_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one[1].step()
    other[1].step()
    assert hybrids.differences(one, other) == []
    for model, optimizer in (one, other):
        optimizer.zero_grad()
        (hybrids.loss_of(model, 1) * 100).backward()
        assert optimizer.clip_grad_norm_(0.1) > 1
    monkeypatch.setattr(SubgroupPlacement, "ready", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        one[1].step()
    monkeypatch.undo()
    for pair in (one, other):
        pair[1].step()
    assert hybrids.differences(one, other) == []


def _interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def _full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_on_the_device_that_has_begun_asks_for_no_more_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = (1.0, 0.0)
    both = [
        (model, hybrids.hybrid(model.parameters(), device_share=share, subgroup_elements=7000))
        for model, share in ((hybrids.tiny(dtype), share) for share in shares)
    ]
    one = both[0][1]
    assert any(place.small is not None for _, place in one._places.values())
    real = Update.run

    def run(*given: Any) -> None:
        with monkeypatch.context() as full:
            for name in ("cat", "empty", "stack", "zeros", "_foreach_mul"):
                full.setattr(torch, name, _full)
            real(*given)

    for model, optimizer in both:
        (hybrids.loss_of(model, 0) * 100).backward()
        assert optimizer.clip_grad_norm_(0.1) > 1
        given = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with monkeypatch.context() as without:
            if optimizer is one:
                without.setattr(Update, "run", run)
            optimizer.step()
        now = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, given, now)), "what the user sees stays"
    assert hybrids.differences(*both) == []


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_step_that_divides_by_a_scale_leaves_the_gradients_as_they_are(share: float) -> None:
    model = hybrids.tiny()
    optimizer = HybridAdamW(model.parameters(), subgroup_elements=700, device_share=share)
    (hybrids.loss_of(model, 0) * 8).backward()
    given = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    vars(optimizer).update(grad_scale=torch.tensor(8.0), found_inf=torch.tensor(0.0))
    optimizer.step()
    now = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, given, now))


@pytest.mark.parametrize("where", [gradients, noting])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_memory_for_a_checksum_raises_nothing_and_changes_no_bit(
    dtype: torch.dtype, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ((m, adamw(m)) for m in (hybrids.tiny(dtype), hybrids.tiny(dtype)))
    hybrids.train(*other, range(5))
    hybrids.train(*one, range(2))
    if where is gradients:
        monkeypatch.setattr(where, "checksum", _full)
    hybrids.loss_of(one[0], 2).backward()
    monkeypatch.undo()
    if where is noting:
        monkeypatch.setattr(stepping, "note", _note_one)
    one[1].step()
    monkeypatch.undo()
    one[1].zero_grad()
    hybrids.train(*one, range(3, 5))
    assert hybrids.differences(one, other) == []


_note = noting.note


def _note_one(places: Any) -> None:
    _note(list(places)[:1])
    raise torch.OutOfMemoryError("CUDA out of memory")
