"""The Trainer of torchtitan in real processes: killed anywhere, it says what an unbroken run says,
to the bit. Without torchtitan, which `make integrations` installs, these are skipped.
"""

from __future__ import annotations

import contextlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli import main
from holdfast.errors import NotFound, UsageError
from holdfast.observe.report_builder import read_report
from integrations.real_runs import (
    check_resumed,
    check_same,
    killed_and_resumed,
    needs,
    said,
    start,
    whole,
)

needs_it = needs("torchtitan")
RUN = "torchtitan_run.py"
run = partial(start, RUN)
resumed = partial(killed_and_resumed, RUN)
FSDP2: dict[str, Any] = {"ranks": 2}
PIPELINE: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "pipeline_parallel_schedule": "1F1B",
}


def root_of(root: Path) -> Path:
    """Returns the root of Holdfast in a run's folder."""
    return root / "checkpoint"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_ARENA_DIR", str(root.parent))
        return whole(RUN, root)


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("begin", 2),
        ("forward", 1),
        ("forward", 7),
        ("update", 4),
        ("update", 12),
        ("log", 9),
        ("save", 5),
        ("save", 11),
    ],
)
def test_a_killed_trainer_goes_on_as_if_nothing_had_been(
    place: str, step: int, tmp_path: Path, unbroken: list[str]
) -> None:
    root = tmp_path / "run"
    check_same(resumed(root, step, place), unbroken)
    check_resumed(root_of(root))


@needs_it
@pytest.mark.timeout(600)
def test_two_ranks_of_fsdp2_that_torchrun_starts_again(tmp_path: Path) -> None:
    options = FSDP2 | {"global_batch": 8}  # two batches an update
    unbroken = whole(RUN, tmp_path / "whole", **options)
    assert sum(line.startswith("1: step") for line in unbroken) == 12
    for step, place, who in ((7, "update", 1), (10, "save", 0)):
        found = resumed(tmp_path / f"run-{step}", step, place, who=who, **options)
        check_same(found, unbroken)
        check_resumed(root_of(tmp_path / f"run-{step}"))


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    [
        (2, {"tensor_parallel_degree": 2}),
        (2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}),
        (4, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}),
        (2, PIPELINE),
        (4, PIPELINE | {"tensor_parallel_degree": 2}),
        (4, PIPELINE | {"data_parallel_shard_degree": 2}),
    ],
    ids=[
        "tensor parallel",
        "replicated",
        "replicated shards",
        "pipeline",
        "pipeline and tensor parallel",
        "pipeline and shards",
    ],
)
def test_other_layouts_of_ranks_that_torchrun_starts_again(
    ranks: int, parallelism: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"ranks": ranks, "parallelism": parallelism, "steps": 6, "layers": 2}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    assert sum(line.startswith("1: step") for line in unbroken) == 6
    found = resumed(tmp_path / "run", 5, "update", who=1, **options)
    check_same(found, unbroken)
    check_resumed(root_of(tmp_path / "run"))


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_qwen_3_of_the_debug_size_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "qwen3", "steps": 6, "layers": 2}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    check_same(resumed(tmp_path / "run", 5, "update", **options), unbroken)
    check_resumed(root_of(tmp_path / "run"))


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("degree", [1, 2], ids=["shards", "expert parallel"])
def test_experts_of_torchtitan_on_two_ranks_go_on(degree: int, tmp_path: Path) -> None:
    parallelism = {"expert_parallel_degree": degree}
    options: dict[str, Any] = {"ranks": 2, "parallelism": parallelism, "steps": 6}
    options |= {"model": "qwen3_moe"}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    assert sum(line.startswith("1: step") for line in unbroken) == 6
    check_same(resumed(tmp_path / "run", 5, "update", who=1, **options), unbroken)
    check_resumed(root_of(tmp_path / "run"))
    with holdfast.open(root_of(tmp_path / "run")) as checkpoint:
        shapes = {name: tuple(leaf.shape) for name, leaf in checkpoint.leaves.items()}
    experts = [shapes[name] for name in shapes if name.endswith("w1_EFD") and "model." in name]
    assert experts == [(8, 64, 256)] * 2


@needs_it
@pytest.mark.timeout(400)
def test_torchtitan_resumes_from_storage_when_shared_memory_is_gone(
    tmp_path: Path, arena_dir: Path, unbroken: list[str]
) -> None:
    root = tmp_path / "run"
    assert run(root, 9, "forward").returncode == -9
    for left in arena_dir.iterdir():
        shutil.rmtree(left)
    done = run(root, 9, "forward")
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)
    report = read_report(root_of(root))
    assert {source for each in report.restores for source in each.sources} == {"storage"}
    assert [each.step for each in report.restores] == [5], "the interval, counted from 1"


@needs_it
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_torchtitans_own_checkpointer_saves_and_loads_here_with_one_import_changed(
    mode: str, tmp_path: Path
) -> None:
    """What lies there is what DCP has of the same run; both are loaded by the same calls."""
    settings = {"interval": 2, "async_mode": mode, "keep_latest_k": 0}
    options: dict[str, Any] = {"steps": 4, "manager": "changed import", "checkpoint": settings}
    lines = whole(RUN, tmp_path / "ours", **FSDP2, **options)
    own = whole(RUN, tmp_path / "theirs", **FSDP2, **options | {"manager": "own"})
    check_same(lines, own)
    root = root_of(tmp_path / "ours")
    assert main(["verify", str(root), "--deep"]) == 0
    for step in (2, 4):
        with (
            holdfast.open(root, step=step) as ours,
            holdfast.open(root_of(tmp_path / "theirs") / f"step-{step}") as theirs,
        ):
            assert ours.step == step and ours.leaves.keys() == theirs.leaves.keys()
            assert any(name.startswith("optimizer.") for name in ours.leaves)
            for name in ours.leaves:
                assert torch.equal(ours.read(name), theirs.read(name)), name
    begin = {"initial_load_path": str(root), "initial_load_model_only": False}
    again = tmp_path / "again"
    more = {"steps": 5, "says_loaded": "moments", "checkpoint": settings | begin}
    whole(RUN, again, **FSDP2, **options | more)
    trained = {line.split()[0]: line.split() for line in lines if ": step 4 " in line}
    for rank in ("0:", "1:"):
        words = [line.split() for line in said(again) if line.startswith(rank)]
        (told,), (filled,) = (
            [one for one in words if one[1] == key] for key in ("loaded", "filled")
        )
        assert told[2:] == ["True", "4", trained[rank][3]]
        assert filled[2:] == trained[rank][4:6]


@needs_it
@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", [0, 1])
def test_torchtitans_own_checkpointer_goes_on_from_here_as_from_its_own_files(
    who: int, tmp_path: Path
) -> None:
    """Killed behind a save and started again by torchrun. It keeps no random state: the same run
    with its own files is what it can be, to the bit.
    """
    settings = {"interval": 2, "async_mode": "disabled", "keep_latest_k": 0}
    options: dict[str, Any] = {"steps": 7, "layers": 2, "who": who, "checkpoint": settings}
    found = {
        manager: resumed(
            tmp_path / manager[:3], 4, "save", **FSDP2, **options, manager=manager, goes_on=True
        )
        for manager in ("own", "changed import")
    }
    ours = found["changed import"]
    check_same(ours, found["own"])
    told = [line.split()[2] for line in ours if line.startswith("1: step ")]
    assert told == list("1234567"), "it went on"
    root = root_of(tmp_path / "cha")
    assert main(["verify", str(root), "--deep"]) == 0
    with (
        holdfast.open(root) as last,
        holdfast.open(root_of(tmp_path / "own") / "step-7") as theirs,
    ):
        assert last.step == 7 and last.leaves.keys() == theirs.leaves.keys()
        assert len(last.leaves) > 10
        for name in last.leaves:
            assert torch.equal(last.read(name), theirs.read(name)), name


@needs_it
@pytest.mark.timeout(400)
def test_sigterm_ends_torchtitan_in_its_grace_period(tmp_path: Path, unbroken: list[str]) -> None:
    root = tmp_path / "run"
    grace = {"holdfast_options": {"grace_s": 30.0}}
    told = run(root, 6, "forward", signal=15, checkpoint=grace)
    assert told.returncode == 1 and "Preempted" in told.stderr
    done = run(root)
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("options", "place", "step"),
    [
        ({"validate": 3}, "validate", 6),
        ({"validate": 3}, "save", 7),
        ({"workers": 2, "global_batch": 4}, "update", 7),
        ({"checkpoint": {"memory_interval": 0, "interval": 3}}, "forward", 8),
    ],
    ids=["in a validation", "after a validation", "workers", "without memory"],
)
def test_other_settings_of_a_trainer(
    options: dict[str, Any], place: str, step: int, tmp_path: Path
) -> None:
    given = options | {"steps": 9}
    unbroken = whole(RUN, tmp_path / "whole", **given)
    check_same(resumed(tmp_path / "run", step, place, **given), unbroken)


def loaded(root: Path) -> list[str]:
    """Returns what a run found loaded: if anything, the step, the weights."""
    lines = [line.split() for line in said(root) if "loaded" in line]
    return lines[-1][2:]


def trained(root: Path) -> str:
    """Returns the weights after a run's last step."""
    return [line.split() for line in said(root) if ": step" in line][-1][3]


@needs_it
@pytest.mark.timeout(600)
def test_checkpoints_to_begin_from_and_to_end_with(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    hf = {"last_save_model_only": True, "last_save_in_hf": True}
    ours, theirs, whole_state = (tmp_path / name for name in ("ours", "theirs", "whole"))
    whole(RUN, ours, steps=3, checkpoint=hf)
    whole(RUN, theirs, steps=3, checkpoint=hf, manager="own")
    whole(RUN, whole_state, steps=3, manager="own")
    (one,), (other,) = (list(root.glob("*/step-3/*.safetensors")) for root in (ours, theirs))
    found, expected = load_file(one), load_file(other)
    assert found.keys() == expected.keys() and len(found) > 10
    assert "model.layers.0.self_attn.q_proj.weight" in found
    expected_weights = trained(ours)
    starts: dict[str, dict[str, Any]] = {
        "hugging face": {"initial_load_path": str(one.parent), "initial_load_in_hf": True},
        "dcp": {"initial_load_path": str(whole_state / "checkpoint" / "step-3")},
        "holdfast": {"initial_load_path": str(root_of(ours))},
        "all of dcp": {
            "initial_load_path": str(whole_state / "checkpoint" / "step-3"),
            "initial_load_model_only": False,
        },
        "all of holdfast": {
            "initial_load_path": str(root_of(ours)),
            "initial_load_model_only": False,
        },
    }
    for number, (name, settings) in enumerate(starts.items()):
        root = tmp_path / str(number)
        steps = 4 if "all" in name else 1
        whole(RUN, root, steps=steps, says_loaded=True, checkpoint=settings)
        weights = trained(whole_state) if "dcp" in name else expected_weights
        assert loaded(root) == ["True", "3" if "all" in name else "0", weights], name


@needs_it
@pytest.mark.timeout(600)
def test_a_seed_checkpoint_is_where_any_layout_begins(tmp_path: Path) -> None:
    root = tmp_path / "run"
    whole(RUN, root, checkpoint={"create_seed_checkpoint": True})
    starts = len(read_report(root_of(root)).starts)
    done = run(root, steps=2, says_loaded=True)
    assert done.returncode == 0, done.stderr
    assert loaded(root)[:2] == ["True", "0"]
    done = run(root, steps=3, says_loaded=True, checkpoint={"load_only": True})
    assert done.returncode == 0, done.stderr
    assert loaded(root)[:2] == ["True", "2"], "what is published"
    assert len(read_report(root_of(root)).starts) == starts + 1, "load_only begins no run"


def stored(root: Path, steps: range) -> list[int]:
    """Returns those of the steps that the root has a checkpoint of."""
    found = []
    for step in steps:
        with contextlib.suppress(NotFound), holdfast.open(root_of(root), step=step):
            found.append(step)
    return found


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_step_to_load_the_first_step_and_how_many_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "run"
    settings: dict[str, Any] = {"interval": 2, "enable_first_step_checkpoint": True}
    lines = whole(RUN, root, steps=8, layers=2, checkpoint=settings)
    assert stored(root, range(9)) == [1, 2, 4, 6, 8]
    given = settings | {"load_step": 2, "keep_latest_k": 3}
    done = run(root, steps=8, layers=2, says_loaded=True, checkpoint=given)
    assert done.returncode == 0, done.stderr
    assert loaded(root)[:2] == ["True", "2"]
    again = said(root)[len(lines) :]
    assert [line.split()[2] for line in again if ": step " in line] == list("345678")
    assert [line for line in again if "loaded" not in line] == lines[lines.index(again[1]) :]
    assert stored(root, range(9)) == [4, 6, 8]


@needs_it
@pytest.mark.timeout(600)
def test_another_number_of_ranks_is_refused_or_begins_the_data_anew(tmp_path: Path) -> None:
    root = tmp_path / "run"
    whole(RUN, root, steps=3)
    refused = run(root, ranks=2, steps=5)
    assert refused.returncode != 0
    assert "saved with 1 data ranks, 0 workers, now there are 2 data ranks" in refused.stderr
    anew = {"exclude_from_loading": ["dataloader"]}
    done = run(root, ranks=2, steps=5, checkpoint=anew)
    assert done.returncode == 0, done.stderr
    assert sum(": step 4" in line or ": step 5" in line for line in said(root)) == 4


@needs_it
@pytest.mark.filterwarnings("ignore")  # torch's, which torchtitan brings
def test_settings_that_are_not_kept_are_refused_by_name(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch import nn

    from holdfast.integrations import torchtitan as adapter

    manager = adapter.HoldfastCheckpointManager

    def make(states: dict[str, Any] | None = None, parts: int = 1, **settings: Any) -> Any:
        models = [nn.Linear(2, 2) for _ in range(parts)]
        optimizers = [torch.optim.SGD(models[0].parameters(), lr=0.1)]
        return manager.Config(enable=True, folder=str(tmp_path / "a"), **settings).build(
            dataloader=Counter(),
            model_parts=models,
            optimizers=optimizers,
            lr_schedulers=[torch.optim.lr_scheduler.ConstantLR(optimizers[0])],
            states={"train_state": Counter()} if states is None else states,
            sd_adapter=None,
        )

    with pytest.raises(UsageError, match="holdfast_options has keep, which is keep_latest_k here"):
        make(holdfast_options={"keep": 3})
    with pytest.raises(UsageError, match="'stoarge' is no option of a Checkpointer"):
        make(holdfast_options={"stoarge": 3})
    with pytest.raises(UsageError, match="memory_interval=-1: give a number of steps"):
        make(memory_interval=-1)
    with pytest.raises(UsageError, match="exclude_from_loading has 'data', the state has train"):
        make(exclude_from_loading=["data"])
    with pytest.raises(UsageError, match="steps would be counted from 1 and saved a second time"):
        make(exclude_from_loading=["train_state"])
    with pytest.raises(UsageError, match="the model has no adapter to the names of Hugging Face"):
        make(last_save_in_hf=True)
    with pytest.raises(UsageError, match="the keys rng, which are torchtitan's own"):
        make({"train_state": Counter(), "rng": 1})
    with pytest.raises(UsageError, match="states= has no 'train_state'"):
        make({})
    with pytest.raises(UsageError, match="the model has 2 parts on this rank"):
        make(parts=2)
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "version", lambda name: "0.2.9")
        with pytest.raises(UsageError, match=r"needs torchtitan 0\.3 or later, got 0\.2\.9"):
            make()
    made = make()
    with pytest.raises(NotFound):
        made.load(7)
    made.close()
    (tmp_path / "a" / "step-3").mkdir(parents=True)
    (tmp_path / "a" / "step-3" / ".metadata").touch()
    with pytest.raises(UsageError, match=r"step-\*/\.metadata, a file of torchtitan"):
        make()
    (tmp_path / "a" / "step-3" / ".metadata").rename(
        tmp_path / "a" / "step-3" / "model.safetensors.index.json"
    )
    with pytest.raises(UsageError, match=r"index\.json, a file of torchtitan: which of the two"):
        make()
    off = manager.Config(enable=False).build(
        dataloader=None,
        model_parts=[],
        optimizers=[],
        lr_schedulers=[],
        states={},
        sd_adapter=None,
    )
    assert not off.load() and not off.save(1) and off.close() is None


class Counter:
    """An object with a state, in place of a Trainer and a loader."""

    def state_dict(self) -> dict[str, int]:
        return {"step": 0}

    def load_state_dict(self, found: dict[str, int]) -> None:
        pass
