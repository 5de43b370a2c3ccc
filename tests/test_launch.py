"""The launcher of real ranks: results come back in order, and no failure hides or hangs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.runs.launch import run_ranks


class Refused(Exception):
    """Stands for whatever a test raises on a rank."""


def _sum_of_ranks(rank: int, world: int, plus: int) -> tuple[int, int, int]:
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return rank, int(total) + plus, torch.get_num_threads()


def _environment(rank: int, world: int) -> tuple[str | None, str]:
    return os.environ.get("HOLDFAST_TEST_ONLY"), os.getcwd()


def _print_and_return_error(rank: int, world: int) -> Refused:
    print("hello from", rank)
    return Refused(rank)


def _one_refuses(rank: int, world: int) -> None:
    if rank == 1:
        raise Refused("rank one says no")
    dist.barrier()


def _one_is_killed(rank: int, world: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _sleeps_for_ever(rank: int, world: int, pids: str) -> None:
    Path(pids, str(rank)).write_text(str(os.getpid()))
    while rank == 2:
        time.sleep(1)


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(3, _sum_of_ranks, 10) == [(rank, 13, 1) for rank in range(3)]


def test_ranks_see_the_environment_of_this_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_ranks(1, _environment)  # the server has started before the variable is set
    monkeypatch.setenv("HOLDFAST_TEST_ONLY", "seen")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(1, _environment) == [("seen", str(tmp_path))]


def test_output_and_objects_of_the_test_module_come_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[Any] = run_ranks(2, _print_and_return_error)
    assert [type(one) for one in found] == [Refused, Refused]
    assert "[rank 1] hello from 1" in capsys.readouterr().out


def test_the_traceback_of_a_failing_rank_is_shown_first() -> None:
    with pytest.raises(AssertionError, match="rank one says no") as caught:
        run_ranks(3, _one_refuses)
    assert str(caught.value).startswith("rank 1 failed:\nTraceback")
    assert "in _one_refuses" in str(caught.value)


def test_a_killed_rank_is_named_and_the_others_are_not_waited_for() -> None:
    started_s = time.monotonic()
    with pytest.raises(AssertionError, match="rank 0 ended without a result: SIGKILL"):
        run_ranks(2, _one_is_killed)
    assert time.monotonic() - started_s < 20


def test_ranks_that_do_not_finish_are_named_with_their_stacks_and_killed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"did not finish in 4 s") as caught:
        run_ranks(3, _sleeps_for_ever, str(tmp_path), timeout_s=4)
    assert "in _sleeps_for_ever" in str(caught.value)
    for path in tmp_path.iterdir():
        assert not Path("/proc", path.read_text()).exists()


def test_a_function_that_ranks_cannot_find_is_refused() -> None:
    with pytest.raises(TypeError, match="top of its module"):
        run_ranks(1, lambda rank, world: None)
