"""Objects that reset their tensors, and then take what they are given, have what was saved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.errors import RestoreError
from holdfast.events import Restored
from holdfast.state import lent_tensors, restore_targets
from holdfast.state.tensors import DTYPE_NAMES
from support.runs.launch import run_ranks

State = dict[str, Any]
#: Stored as a value, and as a leaf.
SIZES = (4, 10_000)


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a restore no memory to spare: objects are given their own tensors."""
    monkeypatch.setattr(restore_targets, "SPARE_BYTES", 0)


@pytest.fixture(params=["spare", "lent"])
def is_lent(request: pytest.FixtureRequest) -> bool:
    """False if objects are given tensors of no other."""
    if request.param == "lent":
        request.getfixturevalue("lent")
    return bool(request.param == "lent")


def numbers(size: int, begin: float = 1.0) -> torch.Tensor:
    return torch.arange(begin, begin + size)


class Held:
    """An object that shows its tensor, and takes it by ``take(own, given)``, which returns its own
    from then on.
    """

    def __init__(self, tensor: torch.Tensor, take: Callable[..., torch.Tensor]) -> None:
        self.tensor, self.calls, self._take = tensor, 0, take

    def state_dict(self) -> State:
        return {"tensor": self.tensor, "count": 3}

    def load_state_dict(self, saved: State) -> None:
        assert saved["count"] == 3
        self.calls += 1
        self.tensor = self._take(self.tensor, saved["tensor"])


def copy(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return own.copy_(given)


def add_to_zeros(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return own.zero_().add_(given)


def clone_after_zeroing(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    own.zero_()
    return given.clone()


def zero_through_data(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    own.data.zero_()
    return own.add_(given)


def zero_by_numpy(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    own.numpy()[:] = 0
    return own.add_(given)


def zero_in_part(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    own[-1] = 0
    own[-1] += given[-1]
    return own


def make_room_anew(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    size = own.numel()
    return own.resize_(0).resize_(size).zero_().add_(given)


RESETS = (
    add_to_zeros,
    clone_after_zeroing,
    zero_through_data,
    zero_by_numpy,
    make_room_anew,
)


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_that_an_object_resets_in_part_is_given_again(
    size: int, lent: None, tmp_path: Path
) -> None:
    holdfast.save(tmp_path, {"held": Held(numbers(size), zero_in_part)})
    held = Held(numbers(size, 50.0), zero_in_part)
    holdfast.load(tmp_path, {"held": held})
    assert torch.equal(held.tensor, numbers(size)) and held.calls == 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("take", RESETS)
def test_an_object_that_resets_its_tensor_before_it_takes_the_stored_one_has_the_stored_one(
    take: Callable[..., torch.Tensor], size: int, is_lent: bool, tmp_path: Path
) -> None:
    holdfast.save(tmp_path, {"held": Held(numbers(size), take)})
    held = Held(numbers(size, 50.0), take)
    holdfast.load(tmp_path, {"held": held})
    assert torch.equal(held.tensor, numbers(size))
    assert held.calls == 1 + is_lent


def add(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return own.add_(given)


class Merging(Held):
    """An object that adds the number that it is given to its own."""

    count = 0

    def state_dict(self) -> State:
        return {"tensor": self.tensor, "count": self.count}

    def load_state_dict(self, saved: State) -> None:
        self.calls += 1
        self.tensor = self._take(self.tensor, saved["tensor"])
        self.count += saved["count"]


@pytest.mark.promise
@pytest.mark.parametrize(
    ("take", "size"),
    [*((add, size) for size in SIZES), (clone_after_zeroing, 4), (zero_by_numpy, 10_000)],
)
def test_an_object_that_merges_has_what_was_saved_once_or_the_restore_ends_by_its_name(
    take: Callable[..., torch.Tensor], size: int, is_lent: bool, tmp_path: Path
) -> None:
    saved = Merging(numbers(size), take)
    saved.count = 3
    holdfast.save(tmp_path, {"held": saved})
    held = Merging(torch.zeros(size), take)
    if is_lent:
        with pytest.raises(RestoreError, match=r"held: load_state_dict changed .* other values"):
            holdfast.load(tmp_path, {"held": held})
    else:
        holdfast.load(tmp_path, {"held": held})
        assert held.calls == 1
        assert torch.equal(held.tensor, numbers(size)) and held.count == 3
    assert holdfast.load(tmp_path, {"held": Held(numbers(size, 9.0), copy)}), "it is as it was"


def test_an_object_that_merges_a_number_and_copies_its_tensor_is_given_them_once(
    lent: None, tmp_path: Path
) -> None:
    saved = Merging(numbers(10_000), copy)
    saved.count = 3
    holdfast.save(tmp_path, {"held": saved})
    held = Merging(torch.zeros(10_000), copy)
    holdfast.load(tmp_path, {"held": held})
    assert torch.equal(held.tensor, numbers(10_000)) and held.count == 3


def test_what_finds_no_memory_to_spare_is_in_the_objects_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(restore_targets, "SPARE_BYTES", 50_000)

    def state(begin: float) -> State:
        return {name: Held(numbers(10_000, begin), add_to_zeros) for name in ("one", "other")}

    holdfast.save(tmp_path, state(1.0))
    again = state(50.0)
    holdfast.load(tmp_path, again)
    assert all(torch.equal(one.tensor, numbers(10_000)) for one in again.values())
    assert [one.calls for one in again.values()] == [1, 2]


def keep(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return given


@pytest.mark.promise
@pytest.mark.parametrize("take", [keep, copy, add_to_zeros])
@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_that_other_processes_share_stays_the_one_that_they_have(
    take: Callable[..., torch.Tensor], size: int, tmp_path: Path
) -> None:
    holdfast.save(tmp_path, {"held": Held(numbers(size), take)})
    held = Held(numbers(size, 50.0).share_memory_(), take)
    theirs = held.tensor.view(-1)
    holdfast.load(tmp_path, {"held": held})
    assert torch.equal(held.tensor, numbers(size)) and torch.equal(theirs, numbers(size))
    assert held.tensor.is_shared() and held.calls == (2 if take is add_to_zeros else 1)


def test_an_object_whose_tensor_is_sparse_now_is_given_the_dense_one_that_it_saved(
    tmp_path: Path,
) -> None:
    saved = numbers(10_000).reshape(100, 100)
    holdfast.save(tmp_path, {"held": Held(saved, keep)})
    held = Held(torch.zeros(100, 100).to_sparse(), keep)
    holdfast.load(tmp_path, {"held": held})
    assert torch.equal(held.tensor, saved)


def test_a_pinned_tensor_stays_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save(tmp_path, {"held": Held(numbers(10_000), keep)})
    held = Held(numbers(10_000, 50.0), keep)
    there = held.tensor.data_ptr()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda one: one.data_ptr() == there)
    holdfast.load(tmp_path, {"held": held})
    assert held.tensor.is_pinned() and torch.equal(held.tensor, numbers(10_000))


def test_what_an_optimizer_updates_is_given_as_itself(tmp_path: Path) -> None:
    def state(begin: float) -> State:
        model = nn.Linear(100, 100, bias=False)
        model.weight.data.copy_(numbers(10_000, begin).view(100, 100))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return {"held": Held(model.weight, keep), "model": model, "optimizer": optimizer}

    holdfast.save(tmp_path, state(1.0))
    again = state(50.0)
    holdfast.load(tmp_path, again)
    [weight] = again["optimizer"].param_groups[0]["params"]
    assert again["held"].tensor is weight and torch.equal(weight.view(-1), numbers(10_000))


def test_a_parameter_is_given_as_a_parameter(is_lent: bool, tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"held": Held(nn.Parameter(numbers(10_000), False), keep)})
    there = nn.Parameter(numbers(10_000, 9.0), False)
    held = Held(there, keep)
    holdfast.load(tmp_path, {"held": held})
    assert isinstance(held.tensor, nn.Parameter) and not held.tensor.requires_grad
    assert torch.equal(held.tensor, numbers(10_000)) and (held.tensor is there) == is_lent
    assert is_lent or torch.equal(there, numbers(10_000, 9.0)), "what it had is left alone"


@pytest.mark.parametrize("take", [keep, copy, add_to_zeros])
@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_that_the_state_holds_beside_its_object_stays_one_tensor(
    take: Callable[..., torch.Tensor], size: int, tmp_path: Path
) -> None:
    def state(begin: float) -> State:
        shared = numbers(size, begin)
        return {"both": [Held(shared, take), shared]}

    holdfast.save(tmp_path, state(1.0))
    again = state(50.0)
    held, shared = again["both"]
    holdfast.load(tmp_path, again)
    assert torch.equal(again["both"][1], numbers(size)) and torch.equal(shared, numbers(size))
    assert torch.equal(held.tensor, numbers(size))
    assert held.tensor.data_ptr() == again["both"][1].data_ptr()


@pytest.mark.parametrize("size", SIZES)
def test_an_object_that_copies_is_given_its_state_once(
    size: int, is_lent: bool, tmp_path: Path
) -> None:
    holdfast.save(tmp_path, {"held": Held(numbers(size), copy)})
    held, given = Held(numbers(size, 50.0), copy), []
    held._take = lambda own, tensor: given.append(tensor) or own.copy_(tensor)  # type: ignore[func-returns-value]
    there = held.tensor
    holdfast.load(tmp_path, {"held": held})
    assert torch.equal(held.tensor, numbers(size)) and held.tensor is there and held.calls == 1
    assert (given[0].data_ptr() == there.data_ptr()) == is_lent


def test_what_an_object_resets_after_it_took_its_state_stays_reset(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"held": Held(numbers(10_000), copy)})
    held = Held(numbers(10_000), lambda own, given: own.copy_(given).zero_())
    holdfast.load(tmp_path, {"held": held})
    assert not held.tensor.any()


@pytest.mark.parametrize("size", SIZES)
def test_objects_that_share_a_tensor_all_have_it(size: int, is_lent: bool, tmp_path: Path) -> None:
    """The first resets the tensor, and goes on with another; the second takes the first's."""

    def state(begin: float) -> State:
        shared = numbers(size, begin)
        return {"one": Held(shared, clone_after_zeroing), "other": Held(shared, copy)}

    holdfast.save(tmp_path, state(1.0))
    again = state(50.0)
    holdfast.load(tmp_path, again)
    for one in again.values():
        assert torch.equal(one.tensor, numbers(size))


def test_a_tensor_of_a_module_that_another_object_resets_is_as_it_was_saved(
    tmp_path: Path,
) -> None:
    def state(begin: float) -> State:
        model = nn.Linear(100, 100, bias=False)
        model.weight.data.copy_(numbers(10_000, begin).view(100, 100))
        return {"model": model, "held": Held(model.weight.data, add_to_zeros)}

    holdfast.save(tmp_path, state(1.0))
    again = state(50.0)
    holdfast.load(tmp_path, again)
    assert torch.equal(again["model"].weight.view(-1), numbers(10_000))
    assert again["held"].tensor.data_ptr() == again["model"].weight.data_ptr(), "it is one tensor"


def random_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    drawn = torch.randint(0, high, (size,), generator=generator, dtype=torch.uint8)
    return drawn.view(dtype).view(shape)


def zero_bytes(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    there = raw(own)
    there.zero_().add_(raw(given))
    return own


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


@pytest.mark.parametrize("shape", [(3, 5), (70, 200)])
def test_tensors_of_every_type_that_are_reset_come_back_to_the_bit(
    shape: tuple[int, ...], lent: None, tmp_path: Path
) -> None:
    def state(seed: int) -> State:
        return {
            name: Held(random_bytes(dtype, shape, seed + n), zero_bytes)
            for n, (dtype, name) in enumerate(DTYPE_NAMES.items())
        }

    saved, again = state(1), state(1000)
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, again)
    for name, one in again.items():
        assert torch.equal(raw(one.tensor), raw(saved[name].tensor)), name
        assert one.calls == 2, name


def test_views_of_other_strides_or_of_conjugates_are_seen_to_change(
    lent: None, tmp_path: Path
) -> None:
    def state(begin: float) -> State:
        complex_ = torch.complex(numbers(10_000, begin), numbers(10_000, begin))
        return {
            "transposed": Held(numbers(10_000, begin).view(100, 100).t(), add_to_zeros),
            "every second": Held(numbers(20_000, begin)[::2], add_to_zeros),
            "conjugate": Held(complex_.conj(), add_to_zeros),
            "wide": Held(complex_.to(torch.complex128), add_to_zeros),
        }

    saved, again = state(1.0), state(9.0)
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, again)
    for name, one in again.items():
        assert torch.equal(one.tensor, saved[name].tensor) and one.calls == 2, name


class WithExtraState(nn.Module):
    """A module whose extra state is a tensor that it resets before it takes the stored one."""

    def __init__(self, begin: float) -> None:
        super().__init__()
        self.maxima = numbers(10_000, begin)

    def get_extra_state(self) -> State:
        return {"maxima": self.maxima}

    def set_extra_state(self, saved: State) -> None:
        self.maxima.zero_().add_(saved["maxima"])


def test_extra_state_that_a_module_resets_before_it_takes_it_is_the_stored_one(
    is_lent: bool, tmp_path: Path
) -> None:
    holdfast.save(tmp_path, {"model": nn.Sequential(nn.Linear(2, 2), WithExtraState(1.0))})
    model = nn.Sequential(nn.Linear(2, 2), WithExtraState(50.0))
    holdfast.load(tmp_path, {"model": model})
    assert torch.equal(model[1].maxima, numbers(10_000))  # type: ignore[arg-type]


def test_generators_are_those_that_were_saved_whatever_an_object_draws_while_it_loads(
    lent: None, tmp_path: Path
) -> None:
    def draw_and_add(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return add_to_zeros(own, given)

    holdfast.save(tmp_path, {"held": Held(numbers(10_000), copy), "rng": holdfast.Rng()})
    expected = torch.rand(3)
    held = Held(numbers(10_000, 5.0), draw_and_add)
    restored = holdfast.load(tmp_path, {"held": held, "rng": holdfast.Rng()})
    assert held.calls == 2 and torch.equal(torch.rand(3), expected)
    restored.rewind()
    assert torch.equal(torch.rand(3), expected)


def test_an_object_that_raises_at_the_second_time_raises_as_at_the_first(
    lent: None, tmp_path: Path
) -> None:
    def take(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        if held.calls == 2:
            raise ValueError("only once")
        return own.zero_()

    holdfast.save(tmp_path, {"held": Held(numbers(4), copy)})
    held = Held(numbers(4, 5.0), take)
    with pytest.raises(RestoreError, match="values set again: ValueError: only once"):
        holdfast.load(tmp_path, {"held": held})


class Together:
    """An object that waits for the other ranks while it takes its state, which is each rank's own.

    That of the second rank is all zeros, which a reset does not change. They share a tensor in
    parts, too.
    """

    def __init__(self, rank: int, begin: float, mesh: Any) -> None:
        self.own = torch.full((4,), begin * (rank == 0))
        self.shared: Any = distribute_tensor(numbers(10_001, begin), mesh, [Shard(0)])

    def state_dict(self) -> State:
        return {"own": self.own, "shared": self.shared}

    def load_state_dict(self, saved: State) -> None:
        dist.barrier()
        self.own.zero_().add_(saved["own"])
        self.shared.zero_().add_(saved["shared"])
        dist.barrier()


def _restore_together(rank: int, world: int, root: str) -> list[float]:
    mesh = init_device_mesh("cpu", (world,))
    restore_targets.SPARE_BYTES = 0

    def split(begin: float) -> State:
        return {"model": nn.Linear(2, 2), "held": Together(rank, begin, mesh)}

    with holdfast.Checkpointer(root, split(7.0)) as ckpt:
        ckpt.restore()
        ckpt.save(1, durable=True).wait_durable(60)
    found = []
    for step in (None, 1):
        state = split(9.0)
        with holdfast.Checkpointer(root, state) as ckpt:
            assert ckpt.restore(step) is not None
        held = state["held"]
        assert torch.equal(held.shared.full_tensor(), numbers(10_001, 7.0))
        found.append(held.own.unique().item())
    return found


def test_all_ranks_take_their_state_again_where_one_has_to(tmp_path: Path) -> None:
    assert run_ranks(2, _restore_together, str(tmp_path)) == [[7.0, 7.0], [0.0, 0.0]]


def empty_after_cloning(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    kept = given.clone()
    own.resize_(0)
    return kept


def empty_before_cloning(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    own.data = torch.empty(0)
    return given.clone()


def halve_after_cloning(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    kept = given.clone()
    own.data = given.to(torch.float16)
    return kept


def other_shape_after_cloning(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    kept = given.clone()
    own.data = torch.zeros(own.numel() + 3)
    return kept


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "take",
    [
        empty_after_cloning,
        empty_before_cloning,
        halve_after_cloning,
        other_shape_after_cloning,
    ],
)
def test_a_tensor_that_an_object_gives_another_form_is_given_in_its_own(
    take: Callable[..., torch.Tensor], size: int, lent: None, tmp_path: Path
) -> None:
    holdfast.save(tmp_path, {"held": Held(numbers(size) / 3, copy)})
    held = Held(numbers(size, 50.0), take)
    holdfast.load(tmp_path, {"held": held})
    assert torch.equal(held.tensor, numbers(size) / 3)


def test_what_a_later_object_changes_on_purpose_stays(is_lent: bool, tmp_path: Path) -> None:
    def state(begin: float) -> State:
        shared = numbers(10_000, begin)

        def write_to_the_first(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            shared.copy_(given)
            return own.copy_(given)

        return {
            "first": Held(shared, copy),
            "average": Held(numbers(10_000, 2 * begin), write_to_the_first),
        }

    holdfast.save(tmp_path, state(1.0))
    again = state(50.0)
    holdfast.load(tmp_path, again)
    assert torch.equal(again["first"].tensor, numbers(10_000, 2.0))
    assert [one.calls for one in again.values()] == [1, 1]


class Pair(Held):
    """Resets one tensor, and keeps the other as it is given it."""

    def __init__(self, begin: float) -> None:
        super().__init__(numbers(10_000, begin), add_to_zeros)
        self.kept = nn.Parameter(numbers(10_000, begin + 3))

    def state_dict(self) -> State:
        return {**super().state_dict(), "kept": self.kept}

    def load_state_dict(self, saved: State) -> None:
        super().load_state_dict(saved)
        self.kept = saved["kept"]


def test_what_an_object_does_not_reset_is_given_as_itself(lent: None, tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"pair": Pair(1.0)})
    pair = Pair(50.0)
    kept = pair.kept
    holdfast.load(tmp_path, {"pair": pair})
    assert torch.equal(pair.tensor, numbers(10_000)) and pair.calls == 2
    assert pair.kept is kept and torch.equal(kept, numbers(10_000, 4.0))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4096, dtype=torch.float64),
        torch.tensor([2.0, -2.0]),
        torch.tensor([2.0, -2.0], dtype=torch.bfloat16),
        torch.arange(-5, 6),
    ],
)
def test_the_sum_on_a_device_is_that_of_zeros_for_zeros_only(tensor: torch.Tensor) -> None:
    size = tensor.element_size()
    there = tensor.view(-1).view(lent_tensors._BITS[size])
    assert int(lent_tensors._sum_of_bits(there))
    assert not int(lent_tensors._sum_of_bits(torch.zeros_like(there)))


def test_the_time_of_both_loads_counts_as_setting_values(lent: None, tmp_path: Path) -> None:
    def take(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return add_to_zeros(own, given)

    held = Held(numbers(SIZES[1]), take)
    holdfast.save(tmp_path, {"held": held})
    told: list[Restored] = []
    stop = holdfast.subscribe(
        lambda event, _: told.append(event) if isinstance(event, Restored) else None
    )
    try:
        holdfast.load(tmp_path, {"held": held})
    finally:
        stop()
    assert held.calls == 2 and told[-1].set_s >= 0.4


class Two(Held):
    """A small tensor and a large one, which are reset before others are taken in their place."""

    count = 0
    has_more = False

    def __init__(self, begin: float) -> None:
        super().__init__(numbers(10_000, begin), keep)
        self.large = numbers(20_000, begin)

    def state_dict(self) -> State:
        more = {"more": 1} if self.has_more else {}
        return {"tensor": self.tensor, "large": self.large, "count": self.count, **more}

    def load_state_dict(self, saved: State) -> None:
        self.calls += 1
        self.tensor.zero_()
        self.large.zero_()
        self.tensor, self.large, self.count = saved["tensor"], saved["large"], saved["count"] + 1


@pytest.mark.parametrize("spare_bytes", [0, 50_000])
def test_an_object_that_is_called_twice_is_given_copies_of_all_that_it_took(
    spare_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It counts its restores, and shows more than was saved: neither adds what it is given."""
    monkeypatch.setattr(restore_targets, "SPARE_BYTES", spare_bytes)
    holdfast.save(tmp_path, {"two": Two(1.0)})
    two = Two(50.0)
    two.has_more = True
    holdfast.load(tmp_path, {"two": two})
    assert torch.equal(two.tensor, numbers(10_000)) and torch.equal(two.large, numbers(20_000))
    assert (two.calls, two.count) == (2, 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_of_two_objects_stays_one_tensor(size: int, tmp_path: Path) -> None:
    def state(begin: float) -> State:
        shared = numbers(size, begin)
        return {"one": Held(shared, keep), "other": Held(shared, copy)}

    holdfast.save(tmp_path, state(1.0))
    again = state(50.0)
    holdfast.load(tmp_path, again)
    assert torch.equal(again["one"].tensor, numbers(size))
    assert again["one"].tensor.data_ptr() == again["other"].tensor.data_ptr()


def test_where_no_memory_is_left_objects_are_given_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    holdfast.save(tmp_path, {"held": Held(numbers(10_000), keep)})
    held = Held(numbers(10_000, 50.0), keep)
    there = held.tensor
    monkeypatch.setattr(restore_targets, "made_anew", full)
    holdfast.load(tmp_path, {"held": held})
    assert held.tensor is there and torch.equal(there, numbers(10_000))


def test_what_is_restored_in_inference_mode_can_be_trained_on(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"held": Held(numbers(10_000), keep)})
    held = Held(numbers(10_000, 50.0), keep)
    with torch.inference_mode():
        holdfast.load(tmp_path, {"held": held})
    assert not held.tensor.is_inference()
