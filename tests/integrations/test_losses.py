"""What a framework needs and an adapter forgot does not pass unseen: each loss is refused by name,
or the resumed run is another one. So the tests of kills would find it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from integrations import test_ray, test_torchft
from integrations.real_runs import needs, said, start, whole
from support.runs.leftovers import end_keepers


class Loss(NamedTuple):
    """A run that is killed and resumed by an adapter that has forgotten something."""

    framework: str
    what: str
    """See ``witness.py``."""
    step: int
    place: str
    options: dict[str, Any]


def losses(framework: str, step: int, place: str, *what: str, **options: Any) -> list[Loss]:
    return [Loss(framework, each, step, place, options) for each in what]


RUNS = {"transformers": "trainer_run.py"}
OF_LOADERS = ("loaders/batches", "loaders/generators")
LOSSES = [
    *losses("accelerate", 10, "save", "model", "optimizer", "scheduler", "rng", "registered"),
    *losses("accelerate", 20, "save", "accelerate/steps", seedable=False),
    *losses("accelerate", 20, "save", *(f"accelerate/{one}" for one in OF_LOADERS), seedable=False),
    *losses("accelerate", 20, "save", "accelerate/loaders/epoch"),
    *losses("accelerate", 10, "save", "accelerate/loaders/sampler", loader="resumable"),
    *losses("lightning", 20, "batch end", "model", "optimizer", "scheduler", "rng"),
    *losses("lightning", 20, "batch end", *(f"lightning/{one}" for one in OF_LOADERS)),
    *losses("lightning", 20, "batch end", "lightning/loops", "lightning/hooks"),
    *losses("lightning", 20, "batch end", "lightning/callbacks", average=True),
    *losses("lightning", 20, "batch end", "lightning/added/0/means", "lightning/added/0/sums"),
    *losses("lightning", 18, "batch end", "optimizer", "scheduler", manual=True),
    *losses("transformers", 11, "end", "model", "optimizer", "scheduler", "rng", "trainer/log"),
    *losses("transformers", 11, "end", "trainer/loss", "trainer/losses_before"),
    *losses("transformers", 11, "end", "trainer/epoch", "trainer/updates", "trainer/last_logged"),
    *losses("torchtitan", 7, "save", "model", "optimizer", "lr_scheduler", "rng"),
    *losses("torchtitan", 7, "save", "dataloader", "train_state"),
    *losses("deepspeed", 7, "save", "model", "optimizer", "scheduler", "rng", "client_state"),
    *losses("deepspeed", 7, "save", "deepspeed/counters", "deepspeed/scaler", precision="fp16"),
    *losses("deepspeed", 7, "save", "scaler", autocast=True),
    *losses("megatron", 7, "save", "model", "optimizer", "scheduler", "rng", ranks=2),
    *losses("megatron", 7, "save", "rng/tracker", tp=2, ranks=2),
    *losses("megatron", 7, "save", "optimizer", ranks=2, distributed=True, bf16=True),
    *losses("torchft", 9, "save", "model", "optimizer", "schedule", "rng"),
    *losses("ray", 9, "report", "model", "optimizer", "schedule", "rng", "seen"),
]
#: Runs that start their processes by themselves, whose state is the user's.
OWN: dict[str, Callable[..., list[str]]] = {
    "ray": lambda *given, **options: test_ray.steps_of(test_ray.run(*given, **options)[0]),
    "torchft": lambda *given, **options: test_torchft.steps_of(test_torchft.run(*given, **options)),
}


def test_forty_losses_are_tried() -> None:
    assert len(LOSSES) >= 40
    assert min(Counter(one.framework for one in LOSSES).values()) >= 4


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what a run says that loses nothing; it is made once for its options."""
    made: dict[str, list[str]] = {}

    def run(script: str, options: dict[str, Any]) -> list[str]:
        key = f"{script} {options}"
        if key not in made:
            root = tmp_path_factory.mktemp("unbroken") / "run"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HOLDFAST_ARENA_DIR", str(root.parent))
                made[key] = whole(script, root, **options)
        return made[key]

    return run


@pytest.fixture(scope="module")
def own_unbroken(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what a run says that loses nothing, of those that start their processes."""
    made: dict[str, list[str]] = {}

    def play(framework: str) -> list[str]:
        if framework not in made:
            root = tmp_path_factory.mktemp("unbroken") / "run"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HOLDFAST_ARENA_DIR", str(root.parent))
                made[framework] = OWN[framework](root)
        return made[framework]

    return play


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(
            one,
            marks=needs(one.framework),
            id=f"{one.framework}: {one.what} {''.join(map(str, one.options))}",
        )
        for one in LOSSES
        if one.framework in OWN
    ],
)
def test_what_a_loop_forgot_of_what_it_gives_does_not_pass_unseen(
    loss: Loss, tmp_path: Path, own_unbroken: Any, arena_dir: Path
) -> None:
    root = tmp_path / "run"
    found, refusal = [], ""
    try:
        found = OWN[loss.framework](root, loss.step, loss.place, leaves_out=loss.what)
    except AssertionError as error:
        refusal = f"{error}"
    if found:
        assert Path(f"{root}.died").exists() or Path(f"{root}.died0").exists(), "it was killed"
        assert set(found) != set(own_unbroken(loss.framework))
    assert found or "holdfast.errors." in refusal, refusal
    end_keepers(arena_dir, grace_s=0.0)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "loss",
    [pytest.param(one, marks=needs(one.framework)) for one in LOSSES if one.framework not in OWN],
    ids=[
        f"{one.framework}: {one.what} {''.join(map(str, one.options))}"
        for one in LOSSES
        if one.framework not in OWN
    ],
)
def test_what_an_adapter_forgot_does_not_pass_unseen(
    loss: Loss, tmp_path: Path, unbroken: Any, arena_dir: Path
) -> None:
    script = RUNS.get(loss.framework, f"{loss.framework}_run.py")
    root, options = tmp_path / "run", {**loss.options, "loses": loss.what}
    done = start(script, root, loss.step, loss.place, **options)
    if "ranks" not in options:
        assert done.returncode == -9, done.stderr
        if "UnsupportedState" in done.stderr:
            end_keepers(arena_dir, grace_s=0.0)
            return  # nothing of it was saved, and it said why
        if "/" not in loss.what:
            complete = start(script, root, loss.step, loss.place, **loss.options)
            assert complete.returncode != 0 and loss.what in complete.stderr
        done = start(script, root, loss.step, loss.place, **options)
    assert Path(f"{root}.died").exists(), "it was killed"
    assert done.returncode == 0 or "holdfast.errors." in done.stderr, done.stderr
    assert done.returncode != 0 or set(said(root)) != set(unbroken(script, loss.options))
    end_keepers(arena_dir, grace_s=0.0)  # of a run that was refused it waits for the next start
