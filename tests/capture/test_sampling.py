"""A sample is summed alike wherever its bytes lie, and what goes wrong with it costs no save."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast import events
from holdfast.capture import replica_samples as sampling
from holdfast.capture.replica_samples import ReplicaSample
from holdfast.errors import CaptureOvertaken
from holdfast.format.checksum import checksum
from support.models.fake_devices import Elsewhere, fake_streams
from support.runs.mishaps import listening
from support.runs.replicas import WORLD, Replica, numbers


def test_what_two_ranks_hold_alike_has_the_same_sums_in_every_turn() -> None:
    # Of several tiles, in rows longer than one too, and smaller than one.
    tensors = {"a": numbers(1500, 700), "b": numbers(3, 300_000), "c": numbers(5, 7)}
    ranks = [Replica(rank, {n: t.clone() for n, t in tensors.items()}) for rank in range(WORLD)]
    seen = 0
    for turn in range(4):
        found = []
        for replica in ranks:
            sample = replica.sample(turn, 4)
            replica.capture(sample)
            found.append(sample.sums)
            seen += sample.size_bytes
        assert found[0] == found[1]
        assert found[0] != tuple(bytes(len(sums)) for sums in found[0])
    assert seen == WORLD * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_how_elements_lie_in_memory_makes_no_difference(dtype: torch.dtype) -> None:
    plain = numbers(4, 6, 8, 10).to(dtype)
    ways = [
        plain,
        plain.contiguous(memory_format=torch.channels_last),
        plain.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ]
    found = []
    for way in ways:
        sample = Replica(0, {"w": way.clone(memory_format=torch.preserve_format)}).sample()
        sample.sum_on_host()
        found.append(sample.sums)
    low = checksum(bytes(plain.view(torch.uint8).numpy())) & 0xFFFFFFFF
    assert found == [(low.to_bytes(4, "little"),)] * 3


def test_one_bit_changes_the_sum_of_its_tile_and_of_no_other() -> None:
    tensor = numbers(1500, 700)
    sums = []
    for _ in range(2):
        sample = Replica(0, {"w": tensor}).sample()
        sample.sum_on_host()
        sums.append([sample.sums[0][n : n + 4] for n in range(0, len(sample.sums[0]), 4)])
        tensor.view(torch.int32)[1499, 699] ^= 1 << 30
    unlike = [a != b for a, b in zip(*sums, strict=True)]
    assert len(unlike) == 5 and sum(unlike) == 1


def test_the_sample_is_taken_before_it_is_looked_whether_it_was_overtaken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica(0, {"w": numbers(1500, 700)})
    real = sampling._sum

    def overtaken(tile: torch.Tensor) -> int:
        with torch.no_grad():
            replica.described.bindings[0].tensor.add_(1)
        return real(tile)

    monkeypatch.setattr(sampling, "_sum", overtaken)
    with pytest.raises(CaptureOvertaken):
        replica.capture(replica.sample())


def test_a_sample_that_cannot_be_found_or_taken_is_said_and_costs_no_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica(0, {"w": numbers(1500, 700)})

    def lacking(*_: Any) -> Any:
        raise MemoryError("no room")

    for name in ("_sum", "part_of"):
        with listening() as heard, monkeypatch.context() as patch:
            patch.setattr(sampling, name, lacking)
            sample = replica.sample()
            replica.capture(sample)
        assert sample.sums == ()
        (warned,) = heard
        assert isinstance(warned, events.Warned)
        assert "could not be compared" in warned.message and "no room" in warned.message


class FakeGpu:
    """A tile on a GPU: what it copies into lands when it is waited for."""

    is_cpu, device = False, torch.device("cuda", 0)

    def __init__(self, tile: torch.Tensor) -> None:
        self.tile = tile
        self.nbytes, self.dtype, self.shape = tile.nbytes, tile.dtype, tile.shape


def test_what_is_on_a_gpu_is_copied_beside_the_image_and_summed_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles = [numbers(5), numbers(3, 3).to(torch.float64), numbers(2).to(torch.int8)]
    landing: list[Callable[[], object]] = []
    copy = torch.Tensor.copy_

    def enqueue(into: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
        if isinstance(source, FakeGpu):
            assert non_blocking
            landing.append(lambda: copy(into, source.tile))
            return into
        return copy(into, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", enqueue)
    fake_streams(monkeypatch)
    on_gpu: list[Any] = [FakeGpu(tile) for tile in tiles]
    staging = torch.full((256,), 3, dtype=torch.uint8)
    sample = ReplicaSample([[on_gpu[0], tiles[1]], [on_gpu[1], on_gpu[2]]], staging)
    sample.enqueue(torch.device("cuda", 1))  # another one: nothing of it is there
    assert not landing
    sample.enqueue(FakeGpu.device)
    sample.sum_on_host()
    assert len(landing) == 3
    for land in landing:
        land()
    sample.finish()
    expected = ReplicaSample([[tiles[0], tiles[1]], [tiles[1], tiles[2]]])
    expected.sum_on_host()
    assert sample.sums == expected.sums


def test_a_sample_does_not_wait_for_who_helps_to_copy() -> None:
    """The segments are given out first: what a second thread still copies, it copies beside it."""
    replica = Replica(0, {"w": numbers(1500, 700)})
    order: list[str] = []

    class Watched(ReplicaSample):
        def sum_on_host(self) -> None:
            order.append(f"sampled on {threading.current_thread().name}")
            super().sum_on_host()

    sample = replica.sample()
    watched = Watched(sample._groups)
    replica.capture(watched, check=lambda: order.append("copied"))
    at = order.index(f"sampled on {threading.current_thread().name}")
    assert order[:at].count("copied") >= 1
    assert watched.sums != ()


def test_tiles_on_a_device_without_streams_are_fetched_and_summed() -> None:
    tiles = [numbers(30, 7), numbers(12)]
    sample = ReplicaSample([[Elsewhere(tiles[0]), tiles[1]]])
    sample.sum_on_host()
    expected = ReplicaSample([tiles])
    expected.sum_on_host()
    assert sample.sums == expected.sums != (bytes(8),)
