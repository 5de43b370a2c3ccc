"""The step of a checkpoint is the one that it says, for loads, listings and imports alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.catalogue import catalogue
from holdfast.errors import NotFound
from holdfast.interop.opening import open_source
from holdfast.interop.state_files import named_step
from holdfast.interop.steps import find_steps
from holdfast.storage.open import open_store
from support.checkpoints.commands import json_of, text_of

Out = pytest.CaptureFixture[str]


def lightning(path: Path, step: int) -> None:
    document = {
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {"w": torch.full((3,), float(step))},
        "optimizer_states": [],
        "lr_schedulers": [],
        "global_step": step,
    }
    torch.save(document, path)


def trainer(path: Path, step: int) -> None:
    path.mkdir()
    save_file({"w": torch.full((3,), float(step))}, path / "model.safetensors")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def loaded(path: Path, step: int | None) -> tuple[int, float]:
    state: dict[str, Any] = {"model": torch.nn.Module()}
    state["model"].register_parameter("w", torch.nn.Parameter(torch.zeros(3)))
    return holdfast.load(path, state, step=step).step, state["model"].w[0].item()


WRITERS = {"lightning": (lightning, "a-step={}.ckpt"), "trainer": (trainer, "checkpoint-{}")}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_renamed_checkpoint_is_of_the_step_that_it_says(
    tmp_path: Path, capsys: Out, writer: str
) -> None:
    write, name = WRITERS[writer]
    path = tmp_path / "run"
    path.mkdir()
    for called, step in ((20, 40), (30, 30), (5, 0)):
        write(path / name.format(called), step)
    assert [loaded(path, step) for step in (40, 30, 0)] == [(40, 40.0), (30, 30.0), (0, 0.0)]
    assert loaded(path, None) == (40, 40.0)
    with pytest.raises(NotFound, match=r"no step 20; there are .*20.* \(step 40\)"):
        loaded(path, 20)
    listed = json_of(capsys, "ls", path, "--json")
    assert sorted(one["step"] for one in listed["checkpoints"]) == [0, 30, 40]
    text_of(capsys, "import", path, tmp_path / "root")
    assert [one.step for one in catalogue(open_store(tmp_path / "root")).manifests] == [0, 30, 40]


def test_two_that_say_other_steps_than_their_equal_names_are_both_there(
    tmp_path: Path, capsys: Out
) -> None:
    lightning(tmp_path / "a-step=20.ckpt", 40)
    lightning(tmp_path / "b-step=20.ckpt", 20)
    assert [loaded(tmp_path, step) for step in (20, 40)] == [(20, 20.0), (40, 40.0)]


def test_step_0_is_no_unknown_step(tmp_path: Path) -> None:
    path = tmp_path / "epoch=1-step=20.ckpt"
    lightning(path, 0)
    assert loaded(path, None) == (0, 0.0)
    assert loaded(tmp_path, 0) == (0, 0.0)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-100", 100),
        ("run-20241124-093000", None),
        ("20241124_093000", None),
        ("2024-11-24-09-30-00", None),
        ("2024-11-24", None),
        ("model_2024-11-24T09-30-00", None),
        ("20241124", 20241124),
        ("run-20241124-2000", 2000),
        ("run-2024-11-24-500", 500),
        ("run-20241124-996000", 996000),
        ("step-20241124", 20241124),
        ("global_step20241124", 20241124),
        ("checkpoint-2024", 2024),
        ("iter_0000020", 20),
        ("run-20241124-093000-step-7", 7),
        ("2024-11-24/7", 7),
        ("v1.5-300", 300),
        ("99999999", 99999999),
    ],
)
def test_a_date_in_a_name_is_no_step(name: str, step: int | None) -> None:
    assert named_step(name.rpartition("/")[2]) == step


def test_a_step_of_deepspeed_is_the_one_inside_whatever_its_directory_is_called(
    tmp_path: Path,
) -> None:
    golden = Path(__file__).parents[1] / "golden" / "foreign" / "deepspeed-0.19.8"
    source = golden / "zero1-fp32-2" / "checkpoint"
    (manifest,) = catalogue(open_source(source)).manifests
    step = manifest.step
    (tag,) = (one for one in source.iterdir() if one.is_dir())
    shutil.copytree(tag, tmp_path / "epoch_77")
    (place,), _ = find_steps(tmp_path)
    assert (place.step, place.name) == (step, "epoch_77") and step != 77
    (manifest,) = catalogue(open_source(tmp_path, step=None)).manifests
    assert manifest.step == step
