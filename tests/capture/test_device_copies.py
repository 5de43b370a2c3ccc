"""Copies from a device that land as late as they may: in pinned memory or pieces, bit for bit."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture.test_through_ring import bits, form
from holdfast.accelerator import devices
from holdfast.capture import device_copies, landing, staging, transfers
from holdfast.capture.copy_plan import CopyPlan, Segment, SlotTarget, TensorCopy, copy_segment
from holdfast.capture.copy_slot import copy_image
from holdfast.capture.landing import Landing
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyCancelled, CopyProgress, GpuCopyStuck
from holdfast.capture.transfers import SmallTensors, Transfer, plan_transfers
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.protocol.arena import IMAGE_START
from holdfast.state.bindings import Bindings
from holdfast.storage.wrap import RateLimit
from support.models.late_devices import HOST, LateDevice, late_device
from support.runs.ring_runs import Through


class Pins:
    """Pins of which the first bytes of a slot are there."""

    def __init__(self, pinned_bytes: int, piece_bytes: int) -> None:
        self.pinned_bytes, self.piece_bytes = pinned_bytes, piece_bytes

    def border(self, at: int) -> int:
        return (at // self.piece_bytes + 1) * self.piece_bytes


late = late_device


def run(
    through: Through,
    late: LateDevice,
    pins: Any = None,
    check: Callable[[], None] = lambda: None,
    ready: Any = None,
    pace: Callable[[int], None] | None = None,
    at_fence: Callable[[], object] = lambda: None,
    target: SlotTarget | None = None,
) -> tuple[bytes, Any]:
    """``target``: that of the save before, with other bytes in it."""
    target = target or new_target(through)
    enqueued: list[int] = []
    told: list[int] = []

    def copied(size_bytes: int) -> None:
        assert not told or told[-1] <= size_bytes
        told.append(size_bytes)

    progress = CopyProgress(
        check=check,
        copied=copied,
        enqueued=lambda _: enqueued.append((at_fence(), len(late.work))[1]),
        pace=pace,
    )
    target.memory[:] = bytes(len(target.memory))
    target.pins = pins
    detector = OvertakeDetector(Bindings())
    seal = copy_image(target, through.image, through.values, detector, progress, 0, {HOST: ready})
    assert enqueued == [len(late.work)] == [late.landed], "the fence opened too early"
    return bytes(target.memory), seal


def new_target(through: Through) -> SlotTarget:
    return SlotTarget(memoryview(bytearray(through.image.size_bytes)), through.plan)


_counts = st.one_of(
    st.integers(0, 40),
    st.integers(0, 20_000),
    st.integers(100_000, 700_000),
    st.sampled_from([BLOCK_BYTES, BLOCK_BYTES // 4, BLOCK_BYTES + 1, 6 * 40_000, 24 * 30_000]),
)
_dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64, torch.float64]
)
_forms = st.sampled_from(["plain", "strided", "transposed", "conjugate", "negative", "cube"])


@pytest.mark.promise
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    leaves=st.lists(st.tuples(_counts, _dtypes, _forms), min_size=1, max_size=9),
    pinned=st.sampled_from([0, 1, 3, 100]),
    border=st.sampled_from([4096 * 77, BLOCK_BYTES, 5 * BLOCK_BYTES + 4096, 1 << 30]),
    on_host=st.one_of(st.just(0), st.integers(0, 511)),
)
def test_any_state_arrives_bit_for_bit_whatever_of_the_slot_is_pinned(
    late: LateDevice,
    leaves: list[tuple[int, torch.dtype, str]],
    pinned: int,
    border: int,
    on_host: int,
) -> None:
    """``on_host``: a bit for each leaf that lies in host memory."""
    late.forget()
    tensors = {
        f"{n}": form(bits(size, dtype, n), how) for n, (size, dtype, how) in enumerate(leaves)
    }
    through = Through(tensors)
    whole, sealed = through.whole()
    for copy in through.plan.copies:  # as they lie, not as they were staged
        copy.source = tensors[copy.leaf]
        if on_host >> int(copy.leaf) & 1:
            copy.source = _Elsewhere(copy.source, torch.device("meta"))
    found, seal = run(through, late, Pins(pinned * BLOCK_BYTES, border))
    assert found == whole
    assert seal == sealed


def large() -> Through:
    return Through({"w": bits(12 * BLOCK_BYTES, torch.uint8, 1)})


@pytest.mark.promise
def test_a_state_larger_than_all_pieces_passes_through_them(late: LateDevice) -> None:
    through = large()
    assert run(through, late) == through.whole()
    assert 1 < staging.pieces._made <= 4


def test_copies_in_flight_end_before_a_cancelled_copy_gives_back_its_pieces(
    late: LateDevice,
) -> None:
    is_cancelled = False

    def cancelled() -> None:
        nonlocal is_cancelled
        is_cancelled |= len(late.work) > 3 and late.landed < len(late.work)
        if is_cancelled:
            raise CopyCancelled("no more")

    back = staging.pieces.give_back
    too_early: list[torch.Tensor] = []

    def give_back(pieces: Any) -> None:
        given = list(pieces)
        too_early.extend(piece for piece in given if late.writes_to(piece))
        back(given)

    staging.pieces.give_back = give_back  # type: ignore[method-assign]
    with pytest.raises(CopyCancelled, match="no more"):
        run(large(), late, check=cancelled)
    assert late.landed == len(late.work) > 3
    assert not too_early, "given back while a copy in flight wrote to them"


@pytest.mark.promise
def test_pieces_that_a_stuck_device_may_still_write_to_are_never_lent_again(
    late: LateDevice,
) -> None:
    def broken() -> None:
        if late.work:
            late.is_broken = True
            raise CopyCancelled("no more")

    before = len(staging._abandoned)
    with pytest.raises(GpuCopyStuck, match="illegal memory access"):
        run(Through({"w": bits(5 * BLOCK_BYTES, torch.uint8, 1)}), late, check=broken)
    assert staging._abandoned[before:]
    assert all(one is not other for one in staging._abandoned for other in staging.pieces._free)
    del staging._abandoned[before:]


def test_large_tensors_are_one_copy_for_each_group_and_border_and_small_ones_one_for_all(
    late: LateDevice,
) -> None:
    large = bits(16 * BLOCK_BYTES, torch.uint8, 1)
    through = Through({"w": large})
    run(through, late, Pins(1 << 40, 1 << 40))
    assert len(late.work) == 4  # groups of four blocks
    late.forget()
    many = {f"{n:04}": bits(100, torch.float32, n) for n in range(1000)}
    run(Through(many), late, Pins(1 << 40, 1 << 40))
    assert len(late.work) == 1


def test_few_events_and_pieces_are_in_use_however_many_copies_land_in_place(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA stream lets the thread wait that records some 60 events which a host may await."""
    monkeypatch.setattr(device_copies, "_SPANS", 4)
    tensors = {f"{n:03}": bits(BLOCK_BYTES if n % 2 else 100, torch.uint8, n) for n in range(80)}
    through = Through(tensors)
    recorded: list[int] = []
    record = late.record_event

    def count(event: Any = None) -> Any:
        recorded.append(len(late.work))
        return record(event)

    late.record_event = count  # type: ignore[method-assign]
    assert run(through, late, Pins(1 << 40, 1 << 40)) == through.whole()
    assert len(late.work) > 40 and len(set(recorded)) <= 4 + 1
    assert staging.pieces._made == 1, "each segment with a small tensor took a piece of its own"


def test_sums_of_what_lands_in_place_begin_when_all_is_enqueued(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "_HOLD_S", 1e9)
    begun: list[int] = []
    add = Landing.add

    def begin(of: Landing, jobs: Any) -> None:
        begun.append(len(late.work))
        add(of, jobs)

    monkeypatch.setattr(Landing, "add", begin)
    through = large()
    assert run(through, late, Pins(1 << 40, 1 << 40)) == through.whole()
    assert begun == [len(late.work)]
    begun.clear()
    late.forget()
    monkeypatch.setattr(device_copies, "_HOLD_S", 0.0)  # each time that any is held
    monkeypatch.setattr(device_copies, "_SPANS", 1 << 40)  # each group on its own
    assert run(through, late, Pins(1 << 40, 1 << 40)) == through.whole()
    assert len(begun) > 2


def test_no_transfer_gathers_more_than_a_piece_at_once() -> None:
    apart = torch.empty(3, 40 << 20, dtype=torch.uint8).t()
    copy = TensorCopy("w", apart, 0, apart.nbytes, is_sampled=True)
    plan = CopyPlan(Any, (copy,))  # type: ignore[arg-type]
    plan.image = type("Image", (), {"tensor_bytes": apart.nbytes})()
    (groups,) = (plan_transfers(plan, [HOST]),)
    assert all(
        one.is_gathered and one.source.nbytes <= staging.PIECE_BYTES
        for group in groups
        for one in group.transfers
    )
    assert sum(one.size_bytes for group in groups for one in group.transfers) == apart.nbytes


@pytest.mark.promise
def test_the_gathering_and_its_copy_are_enqueued_together(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's gathering between them would be copied instead."""
    buffers, copied = staging.gathered, torch.Tensor.copy_
    held: list[bool] = []

    def of(_: torch.device) -> torch.Tensor:
        held.append(buffers.lock.locked())
        return torch.empty(staging.PIECE_BYTES, dtype=torch.uint8)

    def copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        held.append(buffers.lock.locked())
        return copied(into, source)

    monkeypatch.setattr(buffers, "of", of)
    apart = torch.ones(300, 400).t()
    whole = TensorCopy("w", apart, 0, apart.nbytes, is_sampled=True)
    (gathered,) = transfers.transfers_of(whole)
    small = SmallTensors(HOST)
    small.copies.append(TensorCopy("s", torch.ones(7), 0, 28, is_sampled=True))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy)
        gathered.enqueue(torch.empty(apart.nbytes, dtype=torch.uint8))
        small.enqueue(torch.empty(28, dtype=torch.uint8))
        for work in late.work:
            work()
    assert len(held) >= 5 and all(held)


@pytest.mark.promise
def test_host_memory_is_copied_beside_and_summed_after_it(late: LateDevice) -> None:
    """A group with bytes of both is not summed before the host's are there."""
    through = Through({f"{n}": bits(700_001 + n, torch.uint8, n) for n in range(8)})
    whole, sealed = through.whole()
    meta = torch.device("meta")
    for copy in through.plan.copies[::2]:
        copy.source = _Elsewhere(copy.source, meta)
    assert run(through, late, Pins(3 * BLOCK_BYTES, 1 << 30)) == (whole, sealed)


@pytest.mark.promise
def test_the_fence_opens_when_the_host_has_copied_though_several_threads_do(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update on the host waits for no event."""
    monkeypatch.setattr(landing, "land_threads", lambda: 4)
    copied: list[int] = []
    copy = copy_segment

    def copy_slowly(segment: Segment, *rest: Any, **how: Any) -> Any:
        time.sleep(0.02)
        sums = copy(segment, *rest, **how)
        copied.extend(move.size_bytes for moves in segment.blocks for move in moves)
        return sums

    monkeypatch.setattr(landing, "copy_segment", copy_slowly)
    through = Through({f"{n}": bits(3 * BLOCK_BYTES, torch.uint8, n) for n in range(8)})
    whole = through.whole()
    for one in through.plan.copies[::2]:
        one.source = _Elsewhere(one.source, torch.device("meta"))
    at_fence: list[int] = []
    pinned = Pins(1 << 40, 1 << 40)
    assert run(through, late, pinned, at_fence=lambda: at_fence.append(sum(copied))) == whole
    assert at_fence == [4 * 3 * BLOCK_BYTES]


class _Elsewhere(torch.Tensor):
    """A tensor that says of itself that it is on a device without streams."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, _: torch.device) -> _Elsewhere:
        return tensor.as_subclass(cls)

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self._where = device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return getattr(self, "_where", HOST)


@pytest.mark.promise
def test_no_copy_crosses_what_was_pinned_by_two_calls(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    through = Through({"w": bits(6 * BLOCK_BYTES, torch.uint8, 1)})
    target = new_target(through)
    first = IMAGE_START + through.image.data_start
    found: list[tuple[int, int]] = []
    copy_to_host = devices.copy_to_host

    def seen(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        starts = [first + place.data_ptr() - target.data.data_ptr() for place in places]
        found.extend((at, at + one.nbytes - 1) for at, one in zip(starts, places, strict=True))
        copy_to_host(places, sources)

    monkeypatch.setattr(devices, "copy_to_host", seen)
    for border in (BLOCK_BYTES + 4096, 2 * BLOCK_BYTES - 4096):  # also when other memory is pinned
        late.forget()
        found.clear()
        run(through, late, Pins(1 << 40, border), target=target)
        assert found and all(start // border == last // border for start, last in found)


@pytest.mark.promise
def test_a_slot_is_filled_alike_by_every_save_however_much_more_of_it_is_pinned_by_then(
    late: LateDevice,
) -> None:
    """What a save prepared for the next one is of what was pinned then."""
    tensors = {f"{n}": bits(700_001 + n, torch.uint8, n) for n in range(9)}
    tensors |= {f"small {n}": bits(99, torch.float32, n) for n in range(3)}
    tensors["apart"] = form(bits(24 * 30_000, torch.float32, 7), "cube")
    through = Through(tensors)
    target = new_target(through)
    for copy in through.plan.copies:  # as they lie
        copy.source = tensors[copy.leaf]
    pins = Pins(0, 3 * BLOCK_BYTES)
    for pinned_bytes in (0, 3 * BLOCK_BYTES, 1 << 40, 3 * BLOCK_BYTES, 1 << 40):
        for one in tensors.values():
            one.copy_(torch.randint(0, 99, one.shape).to(one.dtype))
        late.forget()
        pins.pinned_bytes = pinned_bytes
        found, seal = run(through, late, pins, target=target)
        assert (found, seal) == through.whole()


@pytest.mark.promise
def test_what_was_prepared_for_one_plan_is_not_enqueued_for_another(late: LateDevice) -> None:
    through = large()
    target, pins = new_target(through), Pins(1 << 40, 1 << 40)
    assert run(through, late, pins, target=target) == through.whole()
    (copy,) = through.plan.copies
    copy.source = bits(12 * BLOCK_BYTES, torch.uint8, 2)
    through.plan.transfers = None  # as for other devices
    late.forget()
    found, _ = run(through, late, pins, target=target)
    start = through.image.data_start
    assert found[start : start + copy.size_bytes] == bytes(copy.source.numpy().data)


@pytest.mark.promise
def test_a_slot_whose_views_were_dropped_can_be_unmapped(late: LateDevice) -> None:
    """What was prepared are views of its memory, too."""
    through = large()
    target = new_target(through)
    run(through, late, Pins(1 << 40, 1 << 40), target=target)
    late.forget()
    room: Any = target.memory.obj
    target.release_views()
    target.memory.release()
    gc.collect()
    room.clear()  # a BufferError while anything has a view of it


def test_a_save_in_place_makes_no_copy_anew(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waits while copies are enqueued: of thousands, a few calls are made."""
    through = Through({f"{n:03}": bits(BLOCK_BYTES, torch.uint8, n) for n in range(24)})
    target, pins = new_target(through), Pins(1 << 40, 3 * BLOCK_BYTES)
    assert run(through, late, pins, target=target) == through.whole()
    cut: list[Transfer] = []
    calls: list[int] = []
    within, copy_to_host = Transfer.within, devices.copy_to_host

    def cut_again(self: Transfer, start: int, stop: int) -> Transfer | None:
        cut.append(self)
        return within(self, start, stop)

    def count(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        calls.append(len(places))
        copy_to_host(places, sources)

    monkeypatch.setattr(Transfer, "within", cut_again)
    monkeypatch.setattr(devices, "copy_to_host", count)
    monkeypatch.setattr(device_copies, "_SPANS", 2)
    late.forget()
    assert run(through, late, pins, target=target) == through.whole()
    monkeypatch.setattr(Transfer, "within", within)
    assert len(late.work) == sum(calls) >= 24
    assert cut and len(calls) <= 3, "other spans than the first save's are made anew, once"
    cut.clear()
    monkeypatch.setattr(Transfer, "within", cut_again)
    late.forget()
    assert run(through, late, pins, target=target) == through.whole()
    assert not cut


@pytest.mark.promise
def test_what_is_copied_out_is_read_when_it_is_there(late: LateDevice) -> None:
    through = Through({"w": bits(3 * BLOCK_BYTES, torch.uint8, 1)})
    whole, sealed = through.whole()
    through.plan.has_copied_out = True
    (copy,) = through.plan.copies
    source = copy.source.clone()
    copy.source.zero_()
    copy.source = _Elsewhere(copy.source, torch.device("meta"))
    ready: Any = SimpleNamespace(synchronize=lambda: copy.source.copy_(source))
    assert run(through, late, ready=ready) == (whole, sealed)


class PacedClock:
    """A clock that only sleeps move on; notes when how much work of a device was enqueued."""

    def __init__(self, late: LateDevice) -> None:
        self.now_s, self.late = 0.0, late
        self.enqueued: list[tuple[float, int]] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.enqueued.append((self.now_s, len(self.late.work)))
        self.now_s += seconds


@pytest.mark.promise
@pytest.mark.parametrize("pinned_bytes", [0, 1 << 40])
def test_paced_copies_are_enqueued_at_their_rate_and_the_fence_opens_with_the_last(
    late: LateDevice, pinned_bytes: int
) -> None:
    """The rate is a block a second; a copy has four blocks, or the two of a piece."""
    through, clock = large(), PacedClock(late)
    limit = RateLimit(BLOCK_BYTES, clock=clock, sleep=clock.sleep)
    pins = Pins(pinned_bytes, 1 << 40)
    assert run(through, late, pins, pace=limit.wait) == through.whole()
    blocks = 4 if pinned_bytes else 2
    assert len(late.work) == 12 // blocks
    assert clock.now_s == pytest.approx(12 - blocks)  # the last is waited for, not its time
    for now_s, copies in clock.enqueued:
        assert (copies - 1) * blocks - 1e-6 < now_s < copies * blocks + 1e-6


def test_a_copy_that_waits_for_its_rate_is_cancelled_at_once(late: LateDevice) -> None:
    clock = PacedClock(late)
    limit = RateLimit(1.0, clock=clock, sleep=clock.sleep)  # a day for each block

    def check() -> None:
        if clock.now_s > 5:
            raise CopyCancelled("no more")

    with pytest.raises(CopyCancelled, match="no more"):
        run(large(), late, check=check, pace=lambda size: limit.wait(size, check))
    assert clock.now_s < 6
    assert late.landed == len(late.work) == 1
