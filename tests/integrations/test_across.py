"""What one adapter saves is read by plain objects of torch, by the commands, and by the others.

One tiny Llama, trained by four libraries: each goes on from what each has saved, and has its names,
weights and moments to the bit. `make integrations-across` makes the environment that has them all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli import main
from integrations.real_runs import environment, needs, said, whole

LIBRARIES = ("transformers", "accelerate", "lightning", "fabric")
pytestmark = [
    *(needs(one) for one in LIBRARIES if one != "fabric"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


def run(library: str, root: Path, *sources: Path) -> list[list[dict[str, str]]]:
    """Returns what ``across_run.py`` writes down: begin and end of each run."""
    script = Path(__file__).with_name("across_run.py")
    done = subprocess.run(
        [sys.executable, script, library, root, *sources],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[list[dict[str, str]]] = json.loads(Path(f"{root}.json").read_text())
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, str]]]:
    """Returns the root of each library, and what it had at its end."""
    place = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_ARENA_DIR", str(place))
        return {one: (place / one, run(one, place / one)[0][1]) for one in LIBRARIES}


@pytest.fixture(scope="module")
def gone_on(
    written: dict[str, tuple[Path, dict[str, str]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[Path, list[dict[str, str]]]]:
    """Returns the root of each pair (writer, reader), and the reader's begin and end."""
    place = tmp_path_factory.mktemp("gone-on")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_ARENA_DIR", str(place))
        for reader in LIBRARIES:
            all_runs = run(reader, place / reader, *(root for root, _ in written.values()))
            for number, (writer, one) in enumerate(zip(LIBRARIES, all_runs, strict=True)):
                found[writer, reader] = (place / f"{reader}-{number}", one)
    return found


def made() -> tuple[Any, torch.optim.AdamW]:
    from integrations.across_run import adamw, llama

    model = llama(77)
    return model, adamw(model)


def test_each_library_ends_elsewhere(
    written: dict[str, tuple[Path, dict[str, str]]],
) -> None:
    ends = [tuple(sorted(end.items())) for _, end in written.values()]
    assert len(set(ends)) == len(LIBRARIES), "or a comparison would show nothing"


@pytest.mark.parametrize("library", LIBRARIES)
def test_plain_objects_of_torch_have_it_under_the_authors_names(
    library: str, written: dict[str, tuple[Path, dict[str, str]]]
) -> None:
    from integrations.across_run import contents

    root, end = written[library]
    model, optimizer = made()
    with holdfast.open(root) as checkpoint:
        leaves = set(checkpoint.leaves)
    named = {f"model.{name}" for name, _ in model.named_parameters()}
    moments = {
        f"optimizer.{name}.{kind}"
        for name, _ in model.named_parameters()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    assert named | moments <= leaves
    assert {
        one for one in leaves if one.startswith(("model.", "optimizer."))
    } - named - moments <= {f"optimizer.{name}.step" for name, _ in model.named_parameters()}
    holdfast.load(root, {"model": model, "optimizer": optimizer})
    assert contents(model, optimizer) == end


@pytest.mark.parametrize(("writer", "reader"), list(product(LIBRARIES, LIBRARIES)))
def test_each_library_goes_on_from_what_each_has_saved(
    writer: str,
    reader: str,
    written: dict[str, tuple[Path, dict[str, str]]],
    gone_on: dict[tuple[str, str], tuple[Path, list[dict[str, str]]]],
) -> None:
    from integrations.across_run import contents

    root, (begin, end) = gone_on[writer, reader]
    assert begin == written[writer][1]
    steps = [name for name in begin if name.endswith(".step")]
    assert steps and all(end[name] != begin[name] for name in steps), "it has trained a step"
    model, optimizer = made()
    holdfast.load(root, {"model": model, "optimizer": optimizer})
    assert contents(model, optimizer) == end


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_commands_show_compare_and_print_what_a_library_has_saved(
    library: str,
    written: dict[str, tuple[Path, dict[str, str]]],
    gone_on: dict[tuple[str, str], tuple[Path, list[dict[str, str]]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from safetensors.torch import load_file

    from integrations.across_run import digest

    root, end = written[library]
    name = "model.model.layers.1.self_attn.k_proj.weight"
    moment = "optimizer.model.layers.1.self_attn.k_proj.weight.exp_avg_sq"
    assert main(["show", str(root), "--json"]) == 0
    shown = capsys.readouterr().out
    assert name in shown and moment in shown
    for leaf in (name, moment):
        assert (
            main(["dump", str(root), leaf, "--out", str(tmp_path / "x.safetensors"), "--force"])
            == 0
        )
        [tensor] = load_file(tmp_path / "x.safetensors").values()
        assert digest(tensor) == end[leaf]
    other, _ = gone_on[library, "accelerate"]
    capsys.readouterr()
    assert main(["diff", str(root), str(other), "--json"]) == 1
    different = capsys.readouterr().out
    assert moment in different  # the Trainer's rate has ended at zero, which leaves weights alone
    assert main(["diff", str(root), str(root), "--json"]) == 0


@needs("torchtitan")
def test_torchtitan_begins_from_what_the_others_handed_on_and_hands_it_back(
    gone_on: dict[tuple[str, str], tuple[Path, list[dict[str, str]]]],
    tmp_path: Path,
    arena_dir: Path,
) -> None:
    """Trainer, then Lightning, then torchtitan by the names of Hugging Face, then plain objects."""
    from safetensors.torch import load_file

    from integrations.across_run import digest

    root, (_, end) = gone_on["transformers", "lightning"]
    files = tmp_path / "hf"
    assert main(["export", str(root), str(files), "--to", "safetensors", "--only", "model.**"]) == 0
    settings = {"initial_load_path": str(files), "initial_load_in_hf": True}
    export = {"last_save_model_only": True, "last_save_in_hf": True}
    run_root = tmp_path / "run"
    whole(
        "torchtitan_run.py",
        run_root,
        steps=1,
        layers=2,
        says_hf=True,
        checkpoint=settings | export,
    )
    lines = [json.loads(line.partition("hf ")[2]) for line in said(run_root) if ": hf " in line]
    weights = {
        name.removeprefix("model."): one for name, one in end.items() if name[:6] == "model."
    }
    assert lines[0] == weights, "what it begins with"
    [file] = (run_root / "checkpoint-export").glob("step-1/*.safetensors")
    handed_back = load_file(file)
    assert {name: digest(one) for name, one in handed_back.items()} == lines[1]
    assert lines[1].keys() == weights.keys() and lines[1] != weights
    model, _ = made()
    model.load_state_dict(handed_back)
