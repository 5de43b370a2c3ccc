"""The Trainer of transformers in real processes: killed anywhere, what it says is what an unbroken
run says, to the bit. Without transformers, which `make integrations` installs, these are skipped.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.events import Warned
from holdfast.observe.log import read_events
from holdfast.observe.report_builder import read_report
from integrations import real_runs
from integrations.real_runs import check_same, needs, said, start

needs_it = needs("transformers")
RUN = "trainer_run.py"
PLACES = ("begin", "end", "log", "evaluate", "epoch begin", "epoch end")
#: 60 samples, 8 an update: 8 updates an epoch, 24 in all, logged every third.
STEPS = {"log": (3, 9, 24), "evaluate": (8, 16, 24), "epoch begin": (8, 16), "epoch end": (8, 24)}
run = partial(start, RUN)
killed_and_resumed = partial(real_runs.killed_and_resumed, RUN)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_ARENA_DIR", str(root.parent))
        done = run(root)
    assert done.returncode == 0, done.stderr
    return said(root)


@needs_it
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", PLACES)
def test_a_killed_trainer_goes_on_as_if_nothing_had_been(
    place: str, tmp_path: Path, unbroken: list[str]
) -> None:
    chance = random.Random(place)
    for step in STEPS.get(place, (1, chance.randrange(2, 24), 24)):
        root = tmp_path / f"run-{step}"
        check_same(killed_and_resumed(root, step, place), unbroken)
        starts = read_report(root).starts
        assert len(starts) == 2 and (starts[1].lost_steps or 0) <= 1


@needs_it
@pytest.mark.timeout(300)
def test_from_storage_when_shared_memory_is_gone(
    tmp_path: Path, arena_dir: Path, unbroken: list[str]
) -> None:
    root = tmp_path / "run"
    assert run(root, 13, "end").returncode == -9
    for left in arena_dir.iterdir():
        shutil.rmtree(left)
    done = run(root, 13, "end")
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)
    assert {source for each in read_report(root).restores for source in each.sources} == {"storage"}


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_ranks_that_torchrun_starts_again(sharding: str, tmp_path: Path) -> None:
    fsdp = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}} if sharding == "fsdp2" else {}
    whole = run(tmp_path / "whole", ranks=2, args=fsdp)
    assert whole.returncode == 0, whole.stderr
    for step, place in ((7, "end"), (4, "epoch begin")):
        found = killed_and_resumed(tmp_path / f"run-{step}", step, place, ranks=2, args=fsdp)
        check_same(found, said(tmp_path / "whole"))


@needs_it
@pytest.mark.timeout(300)
def test_workers_and_steps_that_end_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    args = {"dataloader_num_workers": 2, "max_steps": 13}
    whole = run(tmp_path / "whole", args=args)
    assert whole.returncode == 0, whole.stderr
    check_same(killed_and_resumed(tmp_path / "run", 10, "end", args=args), said(tmp_path / "whole"))
    again = run(tmp_path / "run", args=args)
    assert again.returncode == 0, "a run that is over is over"
    assert said(tmp_path / "run")[-1] == said(tmp_path / "whole")[-1]


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_best_model_is_loaded_at_the_end_of_a_run_that_was_killed_after_it(
    tmp_path: Path,
) -> None:
    """The best one is the first epoch's; the run is killed in the last."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    args = best | {"greater_is_better": True, "save_strategy": "epoch"}
    whole = run(tmp_path / "whole", args=args)
    assert whole.returncode == 0, whole.stderr
    [told] = [line.split() for line in said(tmp_path / "whole") if line.startswith("best ")]
    steps = [line.split() for line in said(tmp_path / "whole") if ": step " in line]
    assert told[1:] == [steps[7][3], "8"] != [steps[-1][3], "8"]
    check_same(killed_and_resumed(tmp_path / "run", 20, "end", args=args), said(tmp_path / "whole"))
    with holdfast.open(tmp_path / "run") as checkpoint:
        assert checkpoint.step == 24, "the last step, and not the best model"


@needs("transformers", "trl")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainer_of_trl_goes_on_with_its_means_and_tokens(tmp_path: Path) -> None:
    """It logs every third step: the kills are between two logs."""
    whole = run(tmp_path / "whole", trl=True)
    assert whole.returncode == 0, whole.stderr
    logs = [line for line in said(tmp_path / "whole") if ": log 24 " in line]
    assert any("entropy" in line and "num_tokens" in line for line in logs)
    for step in (11, 13):
        root = tmp_path / f"run-{step}"
        check_same(killed_and_resumed(root, step, "end", trl=True), said(tmp_path / "whole"))


@needs_it
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        {"args": {"train_sampling_strategy": "group_by_length"}},
        {"args": {"max_steps": 15, "eval_strategy": "no"}, "stream": True},
    ],
    ids=["an order drawn from the generator", "a stream"],
)
def test_data_in_another_order_or_without_a_length(options: dict[str, Any], tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", **options)
    assert whole.returncode == 0, whole.stderr
    check_same(killed_and_resumed(tmp_path / "run", 12, "end", **options), said(tmp_path / "whole"))


@needs_it
@pytest.mark.timeout(400)
def test_each_rank_has_its_own_generator_for_the_order_of_an_epoch(tmp_path: Path) -> None:
    """A restart begins the epoch with the state that the rank had then, and not with rank 0's."""
    args = {"train_sampling_strategy": "group_by_length"}
    options: dict[str, Any] = {"args": args, "apart": True, "ranks": 2}
    whole = run(tmp_path / "whole", **options)
    assert whole.returncode == 0, whole.stderr
    check_same(killed_and_resumed(tmp_path / "run", 12, "end", **options), said(tmp_path / "whole"))


@needs_it
@pytest.mark.timeout(300)
def test_a_run_that_stopped_early_is_over_until_it_is_made_longer(tmp_path: Path) -> None:
    root = tmp_path / "stopped"
    early = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2}
    for _ in range(2):
        done = run(root, args=early, patience=1)
        assert done.returncode == 0, done.stderr
    assert [line.split()[2] for line in said(root) if ": step " in line] == list("1234")
    (told,) = [one for one in read_events(root, Warned) if "ended" in one.message]
    assert "ended at step 4 of 24" in told.message and "num_train_epochs larger" in told.message
    ends = [line for line in said(root) if line.startswith("end ")]
    assert len(ends) == 2 and ends[0].split()[1:3] == ends[1].split()[1:3]
    for stream in (False, True):
        root = tmp_path / f"longer-{stream}"
        for steps in (6, 10):
            args = {"max_steps": steps, "eval_strategy": "no"}
            done = run(root, args=args, stream=stream)
            assert done.returncode == 0, done.stderr
        taken = [int(line.split()[2]) for line in said(root) if ": step " in line]
        assert taken == list(range(1, 11))
        whole = tmp_path / f"whole-{stream}"
        assert (
            run(whole, args={"max_steps": 10, "eval_strategy": "no"}, stream=stream).returncode == 0
        )
        epochs = [
            [line.split()[-1] for line in said(one) if ": step " in line] for one in (root, whole)
        ]
        assert epochs[0][6:] == epochs[1][6:] or stream


def steps_of(root: Path) -> list[str]:
    return [line for line in said(root) if ": step " in line]


@needs_it
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["begin", "end", "signal"])
def test_a_run_that_a_callback_or_a_signal_stopped_goes_on(
    place: str, tmp_path: Path, unbroken: list[str]
) -> None:
    root = tmp_path / "run"
    args = {"enable_jit_checkpoint": place == "signal"}
    for _ in range(2):
        done = run(root, stop=[place, 5], args=args)
        assert done.returncode == 0, done.stderr
    assert steps_of(root) == [line for line in unbroken if ": step " in line]
    assert said(root)[-1] == unbroken[-1]


@needs_it
@pytest.mark.timeout(300)
def test_a_root_of_the_first_version_goes_on(tmp_path: Path, unbroken: list[str]) -> None:
    root = tmp_path / "run"
    assert run(root, 13, "end", first_version=True).returncode == -9
    done = run(root, 13, "end")
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)


@needs_it
@pytest.mark.timeout(300)
def test_every_step_of_an_epoch_that_is_begun_again_is_saved_with_its_place(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run(root, 11, "end", saves=True).returncode == -9
    done = run(root, 11, "end", saves=True, args={"ignore_data_skip": True})
    assert done.returncode == 0, done.stderr
    saved = [tuple(map(int, line.split()[1:])) for line in said(root) if line.startswith("saved ")]
    again = saved[saved.index((10, 1, 2)) + 1 :]
    places = [(step, 1, step - 10) for step in range(11, 18)]
    assert again == places + [(step, 2, step - 18) for step in range(18, 25)]


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A million samples, and which of them were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"x": torch.tensor([float(index)]), "labels": torch.zeros(1)}


class Net(torch.nn.Linear):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        return {"loss": (super().forward(x / 1e6) - labels).square().mean()}


@needs_it
@pytest.mark.timeout(100)
def test_a_million_samples_are_passed_over_by_a_trainer_in_a_second(
    tmp_path: Path, arena_dir: Path
) -> None:
    from transformers import TrainerCallback, TrainingArguments

    from holdfast.integrations.transformers import HoldfastTrainer

    class Far(TrainerCallback):  # type: ignore[misc]
        """The first run begins near the end of its epoch; the second one's begin is timed."""

        began_s: float = 0.0
        took_s: list[float]

        def on_train_begin(self, *given: Any, **named: Any) -> None:
            if trainer._hf_restored is None:
                trainer._hf_loop._updates_before = 124_990
            self.began_s, self.took_s = time.process_time(), []

        def on_step_begin(self, *given: Any, **named: Any) -> None:
            self.took_s.append(time.process_time() - self.began_s)

    for steps, number in ((2, 0), (5, 1)):
        far, data = Far(), Rows()
        trainer = HoldfastTrainer(
            model=Net(1, 1),
            args=TrainingArguments(
                output_dir=str(tmp_path / "hf"),
                max_steps=steps,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=data,
            callbacks=[far],
            holdfast=tmp_path / "run",
        )
        trainer.train()
        assert len(far.took_s) == (2, 3)[number] and len(data.read) <= (4, 5)[number] * 8
    assert far.took_s[0] < 1.0, "124,992 batches of 8"
    assert trainer._hf_loop._updates() == 124_995


@needs_it
@pytest.mark.timeout(300)
def test_another_batch_size_in_the_middle_of_an_epoch_is_refused_by_name(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run(root, 11, "end").returncode == -9
    smaller = {"per_device_train_batch_size": 2}
    refused = run(root, args=smaller)
    assert refused.returncode != 0
    assert "total batch size 8, now 4" in refused.stderr
    assert "ignore_data_skip=True" in refused.stderr
    taken = run(root, args=smaller | {"ignore_data_skip": True})
    assert taken.returncode == 0, taken.stderr
    same_total = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    root = tmp_path / "same"
    assert run(root, 11, "end").returncode == -9
    assert run(root, args=same_total).returncode == 0


@needs_it
@pytest.mark.timeout(300)
def test_the_words_of_resume_from_checkpoint(tmp_path: Path, unbroken: list[str]) -> None:
    root = tmp_path / "run"
    empty = run(root, resume=True)
    assert empty.returncode != 0 and "has no checkpoint" in empty.stderr
    assert run(root, 13, "end", resume=None).returncode == -9
    number = read_report(root).starts[-1].incarnation
    done = run(root, resume=f"{root}@{number}-10")
    assert done.returncode == 0, done.stderr
    assert read_report(root).restores[-1].step == 10
    check_same(said(root), unbroken)
    unknown = run(root, resume=f"{root}@{number}-7")
    assert unknown.returncode != 0 and "NotFound" in unknown.stderr


@needs_it
@pytest.mark.timeout(300)
def test_a_run_begins_at_a_checkpoint_of_the_trainer_and_then_goes_on_from_its_own(
    tmp_path: Path,
) -> None:
    """What the Trainer makes of its own checkpoint is its affair: two runs make the same of it."""
    first = run(tmp_path / "first", args={"save_strategy": "steps", "save_steps": 8})
    assert first.returncode == 0, first.stderr
    begin = str(tmp_path / "first-hf" / "checkpoint-8")
    assert run(tmp_path / "whole", resume=begin).returncode == 0
    check_same(
        killed_and_resumed(tmp_path / "run", 13, "end", resume=begin), said(tmp_path / "whole")
    )
    assert read_report(tmp_path / "run").restores[0].step in (12, 13)
    assert said(tmp_path / "whole")[0].startswith("0: step 9 ")


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_two_ranks_begin_at_a_checkpoint_of_the_trainer_under_fsdp2(
    kind: str, tmp_path: Path
) -> None:
    fsdp = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2, "state_dict_type": kind}}
    saves = {"save_strategy": "steps", "save_steps": 8, "max_steps": 8}
    first = run(tmp_path / "first", ranks=2, args=fsdp | saves)
    assert first.returncode == 0, first.stderr
    begin = str(tmp_path / "first-hf" / "checkpoint-8")
    done = run(tmp_path / "run", ranks=2, args=fsdp | {"max_steps": 10}, resume=begin)
    assert done.returncode == 0, done.stderr
    taken = [line.split()[2] for line in said(tmp_path / "run") if line.startswith("0: step ")]
    assert taken == ["9", "10"]


@needs_it
@pytest.mark.timeout(300)
def test_a_checkpoint_of_the_trainer_without_an_optimizer_is_no_begin(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 8, "save_only_model": True, "max_steps": 8}
    root = tmp_path / "first"
    assert run(root, args=saves).returncode == 0, "what Holdfast keeps is the whole state"
    with holdfast.open(root) as checkpoint:
        assert any("exp_avg_sq" in name for name in checkpoint.leaves)
    begin = tmp_path / "first-hf" / "checkpoint-8"
    for other in ("optimizer_notes.txt", "optimizer_0", "my_scheduler.pt"):
        (begin / other).touch()
    refused = run(tmp_path / "run", resume=str(begin))
    assert refused.returncode == 1
    assert "has no optimizer and no scheduler, as save_only_model=True" in refused.stderr


@needs_it
@pytest.mark.timeout(300)
def test_a_second_trainer_on_a_root_ends_the_first(tmp_path: Path, unbroken: list[str]) -> None:
    root = tmp_path / "run"
    first = run(root, 11, rival=True)
    assert first.returncode == 1 and "Fenced" in first.stderr, first.stderr
    assert Path(f"{root}.rival").read_text() == "0"
    check_same(said(root), unbroken)


@needs_it
def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PretrainedConfig, Trainer, TrainingArguments

    from holdfast.errors import UsageError
    from holdfast.integrations.transformers import (
        HoldfastMixin,
        HoldfastTrainer,
        HoldfastTrainerCallback,
    )

    assert PretrainedConfig is not None
    with pytest.raises(UsageError, match="state= has the keys model, rng"):
        HoldfastTrainer(holdfast="runs/x", state={"rng": 1, "model": 2, "mine": 3})

    (tmp_path / "foreign" / "checkpoint-500").mkdir(parents=True)
    (tmp_path / "foreign" / "checkpoint-500" / "trainer_state.json").touch()
    with pytest.raises(UsageError, match=r"a file of the Trainer of transformers, and is no root"):
        HoldfastTrainer(holdfast=tmp_path / "foreign")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.__version__", "5.22.1")
        with pytest.raises(UsageError, match=r"needs transformers 5\.23 or later, got 5\.22\.1"):
            HoldfastTrainer(holdfast=tmp_path / "a")

    refused: list[tuple[dict[str, Any], str]] = [
        ({"auto_find_batch_size": True}, "begins again with another batch size"),
        ({"optim": "galore_adamw_layerwise"}, "take one without _layerwise"),
    ]
    for given, words in refused:
        args = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, **given)
        with pytest.raises(UsageError, match=words):
            HoldfastTrainer(model=torch.nn.Linear(2, 2), args=args, holdfast=tmp_path / "a")

    args = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True)
    with pytest.raises(UsageError, match="'stoarge' is no option of a Checkpointer"):
        HoldfastTrainer(holdfast=tmp_path / "a", holdfast_options={"stoarge": 1})
    with pytest.raises(UsageError, match="'stoarge' is no option of a Checkpointer"):
        HoldfastTrainerCallback(tmp_path / "a", stoarge=1)
    callback = HoldfastTrainerCallback(tmp_path / "a")
    both = HoldfastTrainer(
        model=torch.nn.Linear(2, 2), args=args, holdfast=tmp_path / "a", callbacks=[callback]
    )
    with pytest.raises(UsageError, match="saves by itself, and has a HoldfastTrainerCallback too"):
        both.train()
    assert not (tmp_path / "a").exists()

    class Old(HoldfastMixin):
        def _run_epoch(self, **given: Any) -> None: ...

    with pytest.raises(UsageError, match=r"has no .*_run_epoch.* put HoldfastMixin before"):
        Old(holdfast="runs/x")

    class Behind(Trainer, HoldfastMixin):  # type: ignore[misc]
        pass

    with pytest.raises(TypeError):
        Behind(holdfast="runs/x")


def test_the_package_itself_imports_no_other_library() -> None:
    code = (
        "import sys, holdfast, holdfast.integrations; "
        "print([n for n in ('transformers', 'accelerate', 'torch') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_growing_log_is_kept_in_leaves_of_few_shapes_and_read_as_it_was_written() -> None:
    from holdfast.integrations.trainer_logs import log_entries, padded

    log, sizes = b"", set()
    entries: list[dict[str, Any]] = []
    for step in range(2000):
        entries.append({"loss": step / 3, "step": step, "said": " \n "})
        log += json.dumps(entries[-1]).encode() + b"\n"
        sizes.add(len(padded(log)))
    assert log_entries(bytes(padded(log))) == log_entries(log) == entries
    assert len(sizes) < 8


@needs_it
@pytest.mark.timeout(300)
def test_sigterm_ends_a_trainer_in_its_grace_period(tmp_path: Path, unbroken: list[str]) -> None:
    root = tmp_path / "run"
    told = run(root, 11, "begin", signal=15, grace_s=30.0)
    assert told.returncode == 1 and "Preempted" in told.stderr
    done = run(root)
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)


@needs_it
@pytest.mark.timeout(300)
def test_a_callback_alone_saves_and_refuses_to_resume(tmp_path: Path) -> None:
    """What it saved are the weights and moments that the mixin has after the same steps."""
    alone, mixin = tmp_path / "alone", tmp_path / "mixin"
    ways: list[tuple[Path, dict[str, Any]]] = [(alone, {"callback": True}), (mixin, {})]
    for root, how in ways:
        done = run(root, durable=1, args={"num_train_epochs": 1}, **how)
        assert done.returncode == 0, done.stderr
    with holdfast.open(alone) as one, holdfast.open(mixin) as other:
        assert one.leaves.keys() <= other.leaves.keys() and len(one.leaves) > 80
        for name in one.leaves:
            assert torch.equal(one.read(name), other.read(name)), name
    for callback, words in (
        (True, "a callback alone cannot resume a Trainer"),
        (False, "was not written by holdfast.integrations.transformers"),
    ):
        refused = run(alone, durable=1, callback=callback)
        assert refused.returncode != 0 and words in refused.stderr


@needs_it
@pytest.mark.timeout(300)
def test_adapters_of_peft_are_kept_all_and_a_missing_one_is_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {"adapters": ["default", "second"]}
    whole = run(tmp_path / "whole", **options)
    assert whole.returncode == 0, whole.stderr
    root = tmp_path / "run"
    assert run(root, 11, "end", **options).returncode == -9
    refused = run(root, 11, "end", adapters=["default"])
    assert refused.returncode != 0 and "StateMismatch" in refused.stderr
    assert "lora_A.second.weight" in refused.stderr
    done = run(root, 11, "end", **options)
    assert done.returncode == 0, done.stderr
    check_same(said(root), said(tmp_path / "whole"))
