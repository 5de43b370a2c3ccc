"""What all attached Checkpointers do alike, without a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.integrations.attached import AttachedCheckpointer, present
from holdfast.integrations.seam import Adapter, check_root


class Loop:
    """What a Checkpointer is attached to: it has a model alone."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)


class LoopCheckpointer(AttachedCheckpointer):
    """Attached to a loop, with a key of the user's."""

    def __init__(self, loop: Loop, root: Path, **more: Any) -> None:
        parts = {**present({"model": loop.model, "scheduler": None}), **more}
        super().__init__(loop, root, "loop", {"ranks": 1}, parts, {"memory": None, "storage": None})
        self._restore(None)


def test_a_value_of_the_user_that_is_none_yet_is_kept_and_comes_back(
    tmp_path: Path, arena_dir: Path
) -> None:
    for best in (None, 0.25):
        with LoopCheckpointer(Loop(), tmp_path, best=None) as checkpointer:
            assert checkpointer.state["best"] == best and "scheduler" not in checkpointer.state
            checkpointer.state["best"] = 0.25
            checkpointer.step()
            handle = checkpointer.save()
            assert handle is not None
            handle.wait_durable(60)


def test_a_root_of_ours_is_one_whatever_else_was_put_into_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        check_root(tmp_path)
    (tmp_path / "holdfast.json").touch()
    check_root(tmp_path)


@pytest.mark.parametrize("file", [".metadata", "model.safetensors.index.json"])
def test_checkpoints_that_no_run_of_ours_writes_are_refused_in_a_root_of_ours_too(
    file: str, tmp_path: Path
) -> None:
    adapter = Adapter("one", "1.0", never_beside=(f"step-*/{file}",))
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / file).touch()
    with pytest.raises(UsageError, match="torchtitan, and is no root of Holdfast"):
        adapter.check("1.0", tmp_path)
    (tmp_path / "holdfast.json").touch()
    with pytest.raises(UsageError, match=r"torchtitan: which of the two .* Move the other's"):
        adapter.check("1.0", tmp_path)
    Adapter("another", "1.0").check("1.0", tmp_path)


@pytest.mark.parametrize("state", [torch.nn.Linear(2, 2), [torch.nn.Linear(2, 2)], "model"])
def test_a_state_that_is_no_dict_is_refused_by_what_it_is(state: Any, tmp_path: Path) -> None:
    words = f"a dict from names to objects, got a {type(state).__name__}"
    with pytest.raises(UsageError, match=words):
        Adapter("one", "1.0").check("1.0", tmp_path, state)


@pytest.mark.parametrize("name", ["stoarge", "state", "root"])
def test_what_is_no_option_of_a_checkpointer_is_refused_before_the_run(
    name: str, tmp_path: Path
) -> None:
    adapter = Adapter("one", "1.0")
    adapter.check("1.0", tmp_path, {}, {"storage": None, "cache_keep": 1})
    with pytest.raises(UsageError, match=f"'{name}' is no option .* it has memory, storage, keep"):
        adapter.check("1.0", tmp_path, {}, {"storage": None, name: 1})
