"""What went through a ring is bit for bit what a whole copy would have been."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import rules
from holdfast.capture.copy_plan import plan_copies
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.volatile_copies import stage
from holdfast.errors import CaptureOvertaken, PersistFailed, StorageError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import fill_in
from holdfast.geometry.layout import merge, table_from_json
from holdfast.persist.writer import WrittenImage
from holdfast.protocol.image_plan import chunk_bytes, largest_useful
from holdfast.state.describe import Describer
from holdfast.storage.base import ImageSink
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import FaultyStore, PassingSink
from support.models.fake_devices import fake_streams
from support.runs.ring_runs import FakeGpu, Through

MIB = 1 << 20


def check(tensors: dict[str, torch.Tensor], ring_bytes: int, values: bytes = b"{}") -> None:
    through, store = Through(tensors, values), MemoryStore()
    whole, sealed = through.whole()

    def never_over_what_is_not_stored(told: int, freed: int) -> None:
        ahead = min(told, through.image.size_bytes) - max(freed, through.image.data_start)
        assert ahead <= ring_bytes

    seal, written = through.run(ring_bytes, store, most_ahead=never_over_what_is_not_stored)
    assert store.read("image") == whole
    assert seal == sealed
    assert written == WrittenImage(seal.header_xxh3, seal.table_xxh3)


def bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    item = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    raw = torch.randint(0, 256, (count * item,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def form(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same elements, lying in another way."""
    if how == "strided":
        return torch.stack([tensor, tensor], -1)[:, 0]
    if how == "transposed" and tensor.numel() % 6 == 0 and tensor.numel():
        return tensor.view(6, -1).t()
    if how == "conjugate" and tensor.dtype.is_complex:
        return tensor.conj()
    if how == "negative" and tensor.dtype.is_complex:
        return tensor.conj().imag
    if how == "cube" and tensor.numel() % 24 == 0 and tensor.numel():
        return tensor.view(4, 6, -1).permute(1, 2, 0)
    return tensor


dtypes = st.sampled_from(
    [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.uint8,
        torch.complex64,
        torch.bool,
        torch.complex128,
    ]
)
shapes = st.sampled_from(["plain", "strided", "transposed", "conjugate", "negative", "cube"])
counts = st.one_of(
    st.integers(0, 40),
    st.integers(0, 20_000),
    st.integers(100_000, 700_000),
    st.sampled_from([MIB, MIB // 4, MIB + 1, 6 * 40_000, 24 * 30_000]),
)


@settings(max_examples=60, deadline=None)
@given(
    leaves=st.lists(st.tuples(counts, dtypes, shapes), min_size=1, max_size=8),
    ring_mib=st.integers(2, 40),
    values=st.one_of(st.integers(0, 300), st.just(3 * MIB + 5)),
)
def test_any_state_passes_through_any_ring_bit_for_bit(
    leaves: list[tuple[int, torch.dtype, str]], ring_mib: int, values: int
) -> None:
    tensors = {
        f"leaf{n}": form(bits(count, dtype, n), how) for n, (count, dtype, how) in enumerate(leaves)
    }
    check(tensors, ring_mib * MIB, b'{"a":"' + b"x" * values + b'"}')


@pytest.mark.parametrize("ring_mib", [2, 3, 5, 8, 16, 31, 32])
def test_rings_from_two_blocks_to_the_image_give_the_same_file(ring_mib: int) -> None:
    tensors = {
        "large": bits(4_000_000, torch.float32, 1),
        "apart": bits(3_000_000, torch.float32, 2).view(3, -1).t(),
        **{f"small{n}": bits(700 + n, torch.float32, n) for n in range(900)},
    }
    check(tensors, ring_mib * MIB)


def test_a_source_that_lies_apart_costs_no_copy_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = bits(12_000_000, torch.float32, 1).view(4, -1).t()
    through = Through({"apart": apart})
    reshape, largest = torch.Tensor.reshape, [0]

    def watched(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        if not tensor.is_contiguous():
            largest[0] = max(largest[0], tensor.nbytes)
        return reshape(tensor, *shape)

    # What the hooks would copy lazily is copied from where it lies, not from a staged copy.
    for copy in through.plan.copies:
        copy.source = apart
    monkeypatch.setattr(torch.Tensor, "reshape", watched)
    seal, written = through.run(8 * MIB, MemoryStore())
    assert written.table_xxh3 == seal.table_xxh3
    assert 0 < largest[0] <= 5 * MIB


@pytest.mark.parametrize("ring_mib", [2, 5, 32])
def test_copies_of_a_gpu_are_summed_when_they_landed_and_wait_for_room_before_they_are_enqueued(
    ring_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr("holdfast.capture.device_copies.side_stream", lambda _: gpu)
    fake_streams(monkeypatch)
    tensors = {
        "large": bits(2_000_000, torch.float32, 1),
        "apart": bits(1_500_000, torch.float32, 2).view(3, -1).t(),
        **{f"small{n}": bits(700 + n, torch.float32, n) for n in range(300)},
    }
    through, store = Through(tensors), MemoryStore()
    whole, sealed = through.whole()
    seal, _ = through.run(ring_mib * MIB, store, ready={gpu.device: object()}, gpu=gpu)
    assert store.read("image") == whole
    assert seal == sealed
    assert gpu.enqueued_at == len(gpu.queue) == gpu.landed, "the fence opened too early"
    assert gpu.most_in_flight > 1, "each copy was waited for before the next was enqueued"


class _Holding(PassingSink):
    """Takes what was copied before ``go`` and no more until then."""

    def __init__(self, inner: ImageSink, go: threading.Event) -> None:
        super().__init__(inner)
        self._go = go

    def write(self, offset_bytes: int, data: memoryview) -> None:
        assert self._go.wait(20)
        super().write(offset_bytes, data)


class _HoldingStore(MemoryStore):
    def __init__(self, go: threading.Event) -> None:
        super().__init__()
        self._go = go

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        return _Holding(super().create(path, size_bytes), self._go)


def test_nothing_is_copied_over_what_storage_has_not_taken() -> None:
    go = threading.Event()
    through = Through({"w": bits(3_000_000, torch.float32, 4)})
    told: list[int] = []

    def see(size_bytes: int, _: int) -> None:
        told.append(size_bytes)
        if size_bytes >= through.image.data_start + 4 * MIB:
            go.set()  # the ring is full: storage may begin

    whole, _ = through.whole()
    store = _HoldingStore(go)
    through.run(4 * MIB, store, most_ahead=see)
    assert store.read("image") == whole
    first_after = next(size for size in told if size > through.image.data_start + 4 * MIB)
    assert told.index(first_after) > 0


def test_storage_that_fails_in_the_middle_ends_the_copy_with_its_reason() -> None:
    through = Through({"w": bits(6_000_000, torch.float32, 4)})
    with pytest.raises(StorageError, match="No space left"):
        through.run(4 * MIB, FaultyStore(MemoryStore(), fail_at=7, mode="error"))


@pytest.mark.promise
def test_storage_that_takes_nothing_ends_the_copy() -> None:
    go = threading.Event()
    through = Through({"w": bits(6_000_000, torch.float32, 4)})
    threading.Timer(1.0, go.set).start()  # long after the copy gave up
    with pytest.raises(PersistFailed, match="given up"):
        through.run(4 * MIB, _HoldingStore(go), room_s=0.2)


def test_an_update_before_the_fence_opens_is_found_out() -> None:
    weight = torch.nn.Parameter(bits(3_000_000, torch.float32, 5).nan_to_num())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    model = torch.nn.Module()
    model.w = weight
    described = Describer({"model": model, "optimizer": optimizer}, 0).describe()
    through = Through({"x": torch.zeros(3)})
    layout = merge([table_from_json(described.table)])
    through.plan = plan_copies(layout, 0, described.bindings)
    through.image = fill_in(through.plan.image, {"step": "3"}, 2)
    through.overtaking = OvertakeDetector(described.bindings)
    is_late = [False]

    def overtake(told: int, _: int) -> None:
        if told > 6 * MIB and not is_late[0]:
            is_late[0] = True
            with torch.no_grad():
                weight.data[:] = 7.0  # what was copied is gone from the ring by now

    with pytest.raises(CaptureOvertaken, match=r"model\.w"):
        through.run(2 * MIB, MemoryStore(), most_ahead=overtake)


@pytest.mark.parametrize("data_bytes", [0, 1, BLOCK_BYTES, 7 * BLOCK_BYTES + 3, 100 * BLOCK_BYTES])
def test_a_ring_is_a_multiple_of_its_chunk_and_its_chunk_of_blocks(data_bytes: int) -> None:
    for ring_bytes in range(2 * BLOCK_BYTES, largest_useful(data_bytes) + 1, BLOCK_BYTES):
        chunk = chunk_bytes(ring_bytes)
        assert ring_bytes % chunk == 0 and chunk % BLOCK_BYTES == 0
        assert ring_bytes >= 2 * chunk


def test_parts_of_tensors_pass_through_a_ring_as_they_are_copied_at_once() -> None:
    """Fused, transposed and strided: none of them lies in memory as it is stored."""
    module = torch.nn.Module()
    module.qkv = torch.nn.Parameter(
        bits(3 * MIB, torch.float32, 1).nan_to_num().reshape(3072, 1024)
    )
    module.wide = torch.nn.Parameter(
        bits(2 * MIB, torch.float32, 2).nan_to_num().reshape(16, 2, 65536)
    )
    module.table = torch.nn.Parameter(bits(1 * MIB, torch.int16, 3).reshape(1024, 1024), False)
    seen = rules.Rules(
        [
            ("qkv", rules.fused(0, (2048, 512, 512), into=("q", "k", "v"))),
            ("wide", rules.unstack(1, into="wide.{n}")),
            ("table", rules.transpose(1, 0), rules.padded(0, 1000)),
        ]
    )
    described = Describer({"model": module}, 0, rules=seen).describe()
    through = Through({"x": torch.zeros(3)})
    stage(described.bindings)
    layout = merge([table_from_json(described.table)])
    through.plan = plan_copies(layout, 0, described.bindings)
    through.image = fill_in(through.plan.image, {"step": "3"}, 2)
    through.overtaking = OvertakeDetector(described.bindings)
    image, seal = through.whole()
    store = MemoryStore()
    found, written = through.run(4 * MIB, store)
    assert found == seal and written.table_xxh3 == seal.table_xxh3
    assert store.read("image") == image
    for copy in through.plan.copies:
        start = through.image.data_start + copy.offset
        raw = bytearray(image[start : start + copy.size_bytes])
        stored = torch.frombuffer(raw, dtype=torch.uint8)
        assert torch.equal(stored.view(copy.source.dtype).view(copy.source.shape), copy.source)
    assert {copy.source.is_contiguous() for copy in through.plan.copies} == {True, False}
    leaves = {"model.table", "model.wide.0", "model.wide.1", "model.k", "model.q", "model.v"}
    assert {leaf.name for leaf in layout.leaves} == leaves
