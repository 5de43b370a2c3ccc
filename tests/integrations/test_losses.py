"""What a framework needs and an adapter forgot does not pass unseen: each loss is refused by name,
or the resumed run is another one. So the tests of kills would find it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integrations import test_ray, test_torchft
from integrations.losses import ENGINES, LOSSES, Loss
from integrations.real_runs import needs, said, start, whole
from support.runs.leftovers import end_keepers

RUNS = {"transformers": "trainer_run.py", ENGINES: "accelerate_run.py"}
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
    [
        pytest.param(
            one,
            marks=needs(*one.framework.split("_")),
            id=f"{one.framework}: {one.what} {''.join(map(str, one.options))}",
        )
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
    was_refused = done.returncode != 0 and "holdfast.errors." in done.stderr
    assert Path(f"{root}.died").exists() or was_refused, "it was killed"
    assert done.returncode == 0 or "holdfast.errors." in done.stderr, done.stderr
    assert done.returncode != 0 or set(said(root)) != set(unbroken(script, loss.options))
    end_keepers(arena_dir, grace_s=0.0)  # of a run that was refused it waits for the next start
