"""Ways to lose state without a word, found by looking for them: each comes back, or is refused."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import CaptureOvertaken, HoldfastError
from holdfast.format.values import from_bytes
from holdfast.state.describe import Describer
from support.runs.launch import run_ranks


def comes_back_or_is_refused(
    path: Path, saved: dict[str, Any], back: dict[str, Any], is_right: Callable[[], bool]
) -> None:
    """Right after a restore, or refused with the objects as they were."""
    try:
        holdfast.save(path, saved)
    except HoldfastError:
        return
    try:
        holdfast.load(path, back)
    except holdfast.StateMismatch:
        return
    assert is_right()


def adam(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    model(torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    return state


class WithMaster(torch.optim.SGD):
    """Keeps a master copy, which is the parameter itself where that is precise enough."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            master = self.state[parameter].setdefault("master", parameter.detach())
            master.sub_(0.1)


def test_optimizer_state_that_is_the_parameter_is_filled_where_it_is_made_anew(
    tmp_path: Path,
) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(3, 3)
        return {"model": model, "optimizer": WithMaster(model.parameters(), lr=0.1)}

    saved, back = make(), make()
    saved["optimizer"].step()
    weight, other = saved["model"].weight, back["model"].weight

    def is_right() -> bool:
        return torch.equal(back["optimizer"].state[other]["master"], weight)

    comes_back_or_is_refused(tmp_path, saved, back, is_right)


def test_state_tensors_that_are_one_here_and_two_in_the_checkpoint_become_two(
    tmp_path: Path,
) -> None:
    saved, back = adam(1), adam(2)
    saved["optimizer"].state[saved["model"].bias]["step"].fill_(50)
    there, model = back["optimizer"].state, back["model"]
    there[model.bias]["step"] = there[model.weight]["step"]
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    assert [there[p]["step"].item() for p in (model.weight, model.bias)] == [1, 50]


def test_elements_that_share_memory_are_not_filled_with_different_ones(tmp_path: Path) -> None:
    back: dict[str, Any] = {"x": torch.zeros(1).expand(3)}
    saved = {"x": torch.arange(3.0)}
    comes_back_or_is_refused(tmp_path, saved, back, lambda: back["x"].tolist() == [0, 1, 2])


def test_a_copy_is_not_read_into_a_view_of_the_weights(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    saved: dict[str, Any] = {"model": model, "best": model.weight.detach()[:2] + 1}
    back: dict[str, Any] = {"model": other, "best": other.weight.data[:2]}

    def is_right() -> bool:
        same = torch.equal(other.weight, model.weight)
        return same and torch.equal(back["best"], saved["best"])

    comes_back_or_is_refused(tmp_path, saved, back, is_right)


@pytest.mark.parametrize("kind", ["set", "key"])
def test_a_tensor_in_a_set_or_as_a_key_is_refused_or_can_be_restored(
    kind: str, tmp_path: Path
) -> None:
    tensor = torch.ones(2)
    back: dict[str, Any] = {"x": None}
    saved = {"x": {tensor} if kind == "set" else {tensor: 1}}
    comes_back_or_is_refused(tmp_path, saved, back, lambda: len(back["x"]) == 1)


@pytest.mark.parametrize("kind", ["number and text", "dot"])
def test_two_objects_are_not_stored_under_one_name(kind: str, tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    state = (
        {"nets": {1: one, "1": two}} if kind == "number and text" else {"a.b": one, "a": {"b": two}}
    )
    with pytest.raises(holdfast.UsageError):
        holdfast.save(tmp_path, state)


def test_objects_by_keys_that_are_no_names_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    each = {parameter: torch.optim.SGD([parameter]) for parameter in model.parameters()}
    with pytest.raises(holdfast.UsageError):
        holdfast.save(tmp_path, {"model": model, "optimizers": each})


class Counting(nn.Module):
    """Keeps what it counted where only its own ``state_dict`` finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(1)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}total"] = self.total


def test_a_module_that_keeps_more_in_its_state_dict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.UnsupportedState):
        holdfast.save(tmp_path, {"model": nn.Sequential(nn.Linear(1, 1), Counting())})


def test_generators_that_are_not_in_the_checkpoint_are_missed(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"n": 1})
    with pytest.raises(holdfast.StateMismatch):
        holdfast.load(tmp_path, {"n": 0, "rng": holdfast.Rng()})


class Seen(nn.Linear):
    seen: Any = 0

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("is_saved", [False, True])
def test_extra_state_of_one_side_only_is_missed(is_saved: bool, tmp_path: Path) -> None:
    saved, back = (Seen(1, 1), nn.Linear(1, 1)) if is_saved else (nn.Linear(1, 1), Seen(1, 1))
    holdfast.save(tmp_path, {"model": saved})
    with pytest.raises(holdfast.StateMismatch):
        holdfast.load(tmp_path, {"model": back})


class Numbered(torch.optim.SGD):
    """Names its state by a number."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            there: dict[Any, Any] = self.state[parameter]
            there.setdefault(0, torch.zeros_like(parameter)).add_(1)


def test_optimizer_state_under_a_number_comes_back_under_it(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": Numbered(model.parameters())}

    saved, back = make(), make()
    saved["optimizer"].step()
    comes_back_or_is_refused(
        tmp_path, saved, back, lambda: 0 in back["optimizer"].state[back["model"].bias]
    )


def test_a_scheduler_goes_on_with_groups_made_in_another_order(tmp_path: Path) -> None:
    def make(*, turned: bool) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        groups: list[dict[str, Any]] = [
            {"params": [model.weight], "lr": 1.0},
            {"params": [model.bias], "lr": 0.5},
        ]
        optimizer = torch.optim.SGD(groups[::-1] if turned else groups)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def go_on(state: dict[str, Any]) -> dict[int, float]:
        state["optimizer"].step()
        state["scheduler"].step()
        groups = state["optimizer"].param_groups
        return {group["params"][0].ndim: group["lr"] for group in groups}

    saved, back = make(turned=False), make(turned=True)
    go_on(saved)
    comes_back_or_is_refused(tmp_path, saved, back, lambda: go_on(back) == go_on(saved))


def test_a_group_without_parameters_gets_its_options_back(tmp_path: Path) -> None:
    def make(lr: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        groups: list[dict[str, Any]] = [{"params": []}, {"params": list(model.parameters())}]
        return {"model": model, "optimizer": torch.optim.SGD(groups, lr=lr)}

    saved, back = make(0.5), make(0.1)

    def is_right() -> bool:
        return [group["lr"] for group in back["optimizer"].param_groups] == [0.5, 0.5]

    comes_back_or_is_refused(tmp_path, saved, back, is_right)


def test_a_rate_that_is_a_tensor_stays_the_tensor_that_a_compiled_step_holds(
    tmp_path: Path,
) -> None:
    def make(lr: Any) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=lr)}

    holdfast.save(tmp_path, make(0.5))
    rate = torch.tensor(0.1)
    holdfast.load(tmp_path, make(rate))
    assert rate.item() == 0.5


def test_what_is_made_by_a_restore_can_be_trained_on_wherever_it_was_called(
    tmp_path: Path,
) -> None:
    holdfast.save(tmp_path, adam(1))
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.inference_mode():
        holdfast.load(tmp_path, {"model": model, "optimizer": optimizer})
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_weights_swapped_out_for_an_evaluation_are_not_stored_in_their_place(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    checkpointer.restore()
    handle = checkpointer.save(0, durable=True)
    for parameter in model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter))  # as an EMA's copy_to does
    try:
        handle.wait_durable(60)
        checkpointer.close()
    except CaptureOvertaken:
        with pytest.raises(CaptureOvertaken):
            checkpointer.close()
        return
    with holdfast.open(tmp_path) as checkpoint:
        for (name, _), weight in zip(model.named_parameters(), weights, strict=True):
            assert torch.equal(checkpoint.read(f"model.{name}"), weight)


def test_a_state_that_stopped_being_storable_is_told_at_the_end(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": nn.Linear(2, 2), "best": 0}
    checkpointer = holdfast.Checkpointer(tmp_path, state)
    checkpointer.restore()
    checkpointer.step(0)
    state["best"] = Path("best")
    checkpointer.step(1)
    with pytest.raises(HoldfastError, match="best"):
        checkpointer.close()


def on_each_rank(rank: int, world: int, path: Path) -> tuple[int, int, bool]:
    drawn = torch.Generator().manual_seed(rank).get_state()
    holdfast.save(path, {"drawn": drawn, "rank": rank, "again": [drawn]})
    back: dict[str, Any] = {"drawn": None, "rank": None, "again": None}
    holdfast.load(path, back)
    generator = torch.Generator()
    generator.set_state(back["drawn"])
    return generator.initial_seed(), back["rank"], back["again"][0] is back["drawn"]


def test_each_rank_gets_its_own_tensors_back_as_it_gets_its_own_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert run_ranks(2, on_each_rank, path) == [(0, 0, True), (1, 1, True)]
    with holdfast.open(path) as checkpoint:  # what rank 0 had
        first = torch.Generator().manual_seed(0).get_state()
        assert torch.equal(checkpoint.values["drawn"], first)
        assert torch.equal(checkpoint.values["again"][0], first)
        assert torch.equal(checkpoint.read("drawn"), first)
        assert torch.equal(checkpoint.read("drawn", [slice(3, 7)]), first[3:7])


class Unhooked(torch.optim.Optimizer):
    """Made without ``Optimizer.__init__``, as wrappers are: torch runs no hook before its step."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.state, self.defaults = defaultdict(dict), {}
        self._optimizer_state_dict_post_hooks = OrderedDict()

    #: No function that could be wrapped: it would not be held by the fence.
    step = functools.partial(lambda closure=None: None)  # type: ignore[assignment]


def captured_later(state: dict[str, Any]) -> list[str]:
    return [b.name for b in Describer(state, 0).describe().bindings if b.lazy]


@pytest.mark.parametrize("is_first", [False, True])
def test_what_an_unhooked_optimizer_changes_is_copied_at_once_whoever_else_changes_it(
    is_first: bool,
) -> None:
    model = nn.Linear(2, 2)
    both = [torch.optim.SGD(model.parameters()), Unhooked(model.parameters())]
    optimizers = both[::-1] if is_first else both
    assert captured_later({"model": model, "optimizers": optimizers}) == []


def test_weights_that_a_forward_changes_are_copied_at_once() -> None:
    model = nn.ModuleList([nn.Embedding(3, 3, max_norm=1.0), nn.EmbeddingBag(3, 3, max_norm=1.0)])
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    assert captured_later(state) == []


def test_an_optimizer_called_like_the_state_of_another_is_told_from_it(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        one, two = adam(1), adam(2)
        return {
            "one": one["model"],
            "two": two["model"],
            "o": one["optimizer"],
            "o.weight": two["optimizer"],
        }

    saved, back = make(), make()
    try:
        holdfast.save(tmp_path, saved)
    except holdfast.UsageError:
        return
    holdfast.load(tmp_path, back)


def test_a_tensor_that_is_gone_lends_its_name_to_no_other() -> None:
    class Passing:
        """Gives an empty tensor that nobody holds afterwards."""

        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

        def state_dict(self) -> dict[str, Any]:
            return {"x": torch.empty(0, dtype=self.dtype)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    dtypes = [torch.int64, torch.float32, torch.bool, torch.float64] * 5
    state: dict[str, Any] = {f"k{n}": Passing(dtype) for n, dtype in enumerate(dtypes)}
    shared = from_bytes(Describer(state, 0, 2).describe().values, "here")["shared"]
    stored = [shared[key]["x"]["$tensor"]["dtype"] for key in state]
    assert stored == ["I64", "F32", "BOOL", "F64"] * 5


def test_a_long_list_of_numbers_is_not_asked_for_objects_one_by_one() -> None:
    calls = 0

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name == "_is_stateful"

    sys.setprofile(count)
    try:
        Describer({"history": [0.5] * 1000}, 0).describe()
    finally:
        sys.setprofile(None)
    assert calls < 20
