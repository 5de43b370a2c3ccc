"""Several processes around one run: second runs, forked children, exits without a word."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import holdfast
from support.runs.leftovers import end_keepers, keeper_pids
from support.runs.mishaps import build, content, train

HERE = Path(__file__).resolve().parents[1]


def _python(program: str, *arguments: str, **environment: str) -> str:
    """What a fresh process prints that runs ``program``."""
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SECOND = """
import sys, holdfast
from support.runs.mishaps import build
root, state = sys.argv[1], build()
for act in (lambda: holdfast.Checkpointer(root, state), lambda: holdfast.save(root, state)):
    try:
        act()
    except holdfast.RootBusy as error:
        print(error)
"""


def test_a_run_of_another_host_on_the_same_root_is_refused_and_told_whose_it_is(
    tmp_path: Path, arena_dir: Path
) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        train(state, 0)
        checkpointer.save(0, durable=True).wait_durable(30)
        said = _python(SECOND, str(tmp_path), HOLDFAST_HOST_ID="other").splitlines()
        (keeper,) = [pid for pid in keeper_pids(arena_dir) if "@other" not in _command(pid)]
        assert len(said) == 2
        for line in said:
            assert f"keeper {keeper} on {socket.gethostname()}" in line
            assert "Wait until it ends, stop it, or choose another root" in line
        train(state, 1)
        checkpointer.save(1, durable=True).wait_durable(30)
    assert holdfast.load(tmp_path, build(1)).step == 1
    end_keepers(arena_dir, grace_s=10)  # the refused one ends by itself: nothing held it


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_the_checkpointer_that_another_one_replaced_says_so_instead_of_saving_nothing(
    tmp_path: Path,
) -> None:
    state = build()
    first = holdfast.Checkpointer(tmp_path, state, storage=None)
    train(state, 0)
    first.save(0, durable=True).wait_durable(30)
    with holdfast.Checkpointer(tmp_path, build(1), storage=None) as second:
        restored = second.restore()
        assert restored is not None and restored.step == 0
        for call in (first.step, first.save):
            with pytest.raises(holdfast.Fenced, match="another Checkpointer was opened on"):
                call(1)
        second.save(1).wait_captured(30)
    first.close()


def test_two_roots_are_two_runs_at_once_and_one_root_is_one_after_the_other(tmp_path: Path) -> None:
    one, other = build(1), build(2)
    with (
        holdfast.Checkpointer(tmp_path / "a", one, storage=None) as a,
        holdfast.Checkpointer(tmp_path / "b", other, storage=None) as b,
    ):
        for step in range(2):
            train(one, step)
            train(other, step + 10)
            a.save(step, durable=True).wait_durable(30)
            b.save(step, durable=True).wait_durable(30)
    with holdfast.Checkpointer(tmp_path / "a", build(3), storage=None) as again:
        restored = again.restore()
        assert restored is not None and restored.step == 1
    into = build(4)
    holdfast.load(tmp_path / "b", into)
    assert content(into) == content(other)


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader_leave_the_run_alone(tmp_path: Path, how: str) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        for step in range(2):
            loader = DataLoader(_Numbers(), num_workers=2, multiprocessing_context=how)
            assert len(list(loader)) == 8
            train(state, step)
            checkpointer.save(step, durable=True).wait_durable(30)
    assert holdfast.load(tmp_path, build(1)).step == 1


def _in_child(act: Callable[[], object]) -> str:
    """What ``act`` raises in a forked child, which then ends as a script does."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # whatever hangs there ends
        try:
            os.close(reader)
            said = "nothing"
            try:
                act()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writer, said.encode())
            sys.exit(0)
        except SystemExit:
            import atexit

            atexit._run_exitfuncs()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_cannot_save_nor_end_the_run_of_its_parent(tmp_path: Path) -> None:
    state = build()
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    train(state, 0)
    checkpointer.save(0).wait_captured(30)
    small = torch.optim.SGD([torch.ones(1, requires_grad=True)])  # a child has no threads to share
    refusal = f"UsageError: this Checkpointer belongs to process {os.getpid()}"
    calls: list[Callable[[], object]] = [
        lambda: checkpointer.step(5),
        lambda: checkpointer.save(5),
        checkpointer.restore,
    ]
    for number, act in enumerate(calls):
        assert _in_child(act).startswith(refusal), number
    assert _in_child(small.step) == "nothing"  # its optimizers have no fence
    assert _in_child(checkpointer.before_update) == "nothing"
    assert _in_child(checkpointer.close) == "nothing"
    assert _in_child(lambda: checkpointer.__exit__(None, None, None)) == "nothing"
    train(state, 1)
    checkpointer.save(1, durable=True).wait_durable(30)
    checkpointer.close()
    into = build(1)
    holdfast.load(tmp_path, into)
    assert content(into) == content(state)


LEAVES = """
import sys, holdfast
from support.runs.mishaps import build, train
state = build(wide=7000)
checkpointer = holdfast.Checkpointer(sys.argv[1], state, storage=None)
train(state, 0)
checkpointer.save(0, durable=True)
"""


def test_a_durable_save_is_finished_although_the_program_ended_without_closing(
    tmp_path: Path, arena_dir: Path
) -> None:
    _python(LEAVES, str(tmp_path), HOLDFAST_KEEPER_IDLE_S="0.5")
    assert not end_keepers(arena_dir, grace_s=60)  # it ended by itself
    assert holdfast.load(tmp_path, build(1, wide=7000)).step == 0


def test_ctrl_c_while_waiting_reaches_the_caller_and_the_run_goes_on(tmp_path: Path) -> None:
    root, state = tmp_path / "run", build()
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    train(state, 0)
    handle = checkpointer.save(0)
    handle.durable = True  # a promise that nobody keeps
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait_durable(30)
    handle.durable = False
    train(state, 1)
    checkpointer.save(1, durable=True).wait_durable(30)
    checkpointer.close()


def test_a_checkpointer_that_could_not_start_leaves_no_keeper_behind(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Checkpointer(tmp_path, build(), storage=None), monkeypatch.context() as patch:
        patch.setenv("HOLDFAST_HOST_ID", "other")
        with pytest.raises(holdfast.RootBusy) as kept:
            holdfast.Checkpointer(tmp_path, build(), storage=None)
    assert not end_keepers(arena_dir, grace_s=20)
    assert kept.value is not None  # its traceback holds the half-made object to the end
