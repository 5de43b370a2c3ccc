"""The demo is right when all is well, and says so when it is not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.demo import main, orchestrate
from holdfast.demo.screen import Screen
from holdfast.demo.train import batch
from holdfast.demo.verdict import (
    TOLERANCE,
    Interruption,
    VerdictRow,
    judge_memory,
    judge_reference,
    judge_storage,
)
from holdfast.testing.faults import Hosts
from holdfast.testing.runs import processes
from holdfast.testing.runs.journals import Journal, JournalLine, Journals, Kind, RunIncarnation

LAST = 9


def _loss(step: int) -> float:
    return 5.0 - step / 7


def _add(run: RunIncarnation, rank: int, what: Kind, **facts: Any) -> None:
    run.add(rank, JournalLine(what=what, incarnation=run.n, **facts))


def _incarnation(
    n: int, steps: range, *, world: int = 2, restored: tuple[int, str] | None = None
) -> RunIncarnation:
    """One that made ``steps`` with the right losses, every step handed over."""
    found = RunIncarnation(n)
    for rank in range(world):
        _add(found, rank, "start", world=world, pid=1)
        if restored is not None:
            step, source = restored
            _add(found, rank, "restored", step=step, source=source, elapsed_s=0.1)
            _add(found, rank, "state", step=step, state=f"{step}")
        for step in steps:
            _add(found, rank, "update", step=step, loss=_loss(step).hex())
            _add(found, rank, "over", step=step)
        _add(found, rank, "end")
    return found


@pytest.fixture
def reference() -> RunIncarnation:
    found = _incarnation(1, range(LAST + 1))
    for step in range(LAST + 1):
        _add(found, 0, "state", step=step, state=f"{step}")
    return found


@pytest.fixture
def kill() -> Interruption:
    """After step 5 of the first incarnation."""
    return Interruption("one trainer", _incarnation(1, range(6)), 0.0)


# ── what is promised ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("step", "lost"), [(5, 0), (4, 1)])
def test_memory_gives_the_last_completed_step_or_the_one_before(
    step: int, lost: int, kill: Interruption, reference: RunIncarnation
) -> None:
    resumed = _incarnation(2, range(step + 1, LAST + 1), restored=(step, "memory"))
    row = judge_memory(kill, resumed, reference)
    assert row.broken == ()
    assert (row.resumed_at, row.lost_steps, row.has_same_state) == (step, lost, True)


@pytest.mark.parametrize("restored", [(3, "memory"), (6, "memory"), (5, "storage"), None])
def test_any_other_step_or_source_is_not_as_promised(
    restored: tuple[int, str] | None, kill: Interruption, reference: RunIncarnation
) -> None:
    first = restored[0] + 1 if restored else 0
    resumed = _incarnation(2, range(first, LAST + 1), restored=restored)
    assert judge_memory(kill, resumed, reference).broken


def test_a_step_counts_from_its_update_and_binds_from_its_end(
    kill: Interruption, reference: RunIncarnation
) -> None:
    for rank in range(2):  # step 6 is made, but ``Checkpointer.step`` has not returned
        _add(kill.killed, rank, "update", step=6, loss=_loss(6).hex())
    resumed = _incarnation(2, range(5, LAST + 1), restored=(4, "memory"))
    row = judge_memory(kill, resumed, reference)
    assert row.broken == ()
    assert row.lost_steps == 2


@pytest.mark.parametrize("restored", [(2, "storage"), (4, "memory"), (5, "storage")])
def test_after_everything_was_killed_only_the_newest_checkpoint_will_do(
    restored: tuple[int, str], kill: Interruption, reference: RunIncarnation
) -> None:
    resumed = _incarnation(2, range(restored[0] + 1, LAST + 1), restored=restored)
    assert judge_storage(kill, resumed, 4, reference).broken


def _resumed_elsewhere(reference: RunIncarnation, kill: Interruption, loss: float) -> VerdictRow:
    resumed = _incarnation(2, range(5, LAST), world=3, restored=(4, "storage"))
    for rank in range(3):
        _add(resumed, rank, "update", step=LAST, loss=loss.hex())
    return judge_storage(kill, resumed, 4, reference, world="3 ranks")


def test_other_ranks_may_differ_by_rounding_and_by_no_more(
    kill: Interruption, reference: RunIncarnation
) -> None:
    right = _loss(LAST)
    assert _resumed_elsewhere(reference, kill, right * (1 + TOLERANCE / 2)).broken == ()
    assert _resumed_elsewhere(reference, kill, right * (1 + TOLERANCE * 2)).broken
    assert _resumed_elsewhere(reference, kill, float("nan")).broken


def test_one_bit_of_one_loss_is_seen_on_the_same_ranks(
    kill: Interruption, reference: RunIncarnation
) -> None:
    resumed = _incarnation(2, range(6, LAST), restored=(5, "memory"))
    nearly = float.fromhex(_loss(LAST).hex()) * (1 + 2**-52)
    for rank in range(2):
        _add(resumed, rank, "update", step=LAST, loss=nearly.hex())
    assert "1 losses are not" in judge_memory(kill, resumed, reference).broken[0]


def test_a_state_with_another_checksum_is_seen(
    kill: Interruption, reference: RunIncarnation
) -> None:
    resumed = _incarnation(2, range(6, LAST + 1), restored=(5, "memory"))
    resumed.states[5] = "another"
    row = judge_memory(kill, resumed, reference)
    assert row.has_same_state is False
    assert row.broken


@pytest.mark.parametrize(
    ("step", "source", "is_kept"),
    [
        (4, "memory", True),
        (5, "memory", True),
        (3, "memory", False),
        (6, "memory", False),
        (4, "storage", False),
    ],
)
def test_after_the_loss_of_a_host_memory_gives_a_protected_step_or_a_newer_one(
    step: int, source: str, is_kept: bool, kill: Interruption, reference: RunIncarnation
) -> None:
    resumed = _incarnation(2, range(step + 1, LAST + 1), world=3, restored=(step, source))
    row = judge_memory(kill, resumed, reference, 4)
    assert (not row.broken) == is_kept, row.broken
    assert row.world == "FSDP2 3 hosts"


def test_a_state_restored_on_fewer_hosts_is_compared_or_the_promise_is_not_kept(
    kill: Interruption, reference: RunIncarnation
) -> None:
    resumed = _incarnation(2, range(5, LAST + 1), world=3, restored=(4, "memory"))
    del reference.states[4]
    assert "compared with none" in judge_memory(kill, resumed, reference, 4).broken[0]
    # From storage it is that of whoever saved it, not of the reference.
    saved = _incarnation(2, range(6), world=3)
    saved.states[4] = "4"
    stored = _incarnation(3, range(5, LAST + 1), world=1, restored=(4, "storage"))
    assert judge_storage(kill, stored, 4, reference, before=(saved,)).broken == ()
    saved.states[4] = "another"
    assert judge_storage(kill, stored, 4, reference, before=(saved,)).broken
    assert judge_storage(kill, stored, 4, reference, before=()).broken


def test_a_reference_that_misses_a_step_or_a_checkpoint_is_seen() -> None:
    assert judge_reference(_incarnation(1, range(10)), 10, [4, 9], 5).broken == ()
    assert judge_reference(_incarnation(1, range(10)), 10, [4], 5).broken
    assert judge_reference(_incarnation(2, range(3, 10)), 10, [4, 9], 5).broken


# ── how it is found out ──────────────────────────────────────────────────────────────────────


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, incarnation=1)
    journal.write("update", step=0, loss="0x1p0")
    journal.close()
    whole = (tmp_path / "rank-0.jsonl").read_bytes()
    with (tmp_path / "rank-0.jsonl").open("ab") as file:
        file.write(whole[:-9])
    journals = Journals(tmp_path)
    journals.poll()
    assert journals.lines == 1
    with (tmp_path / "rank-0.jsonl").open("ab") as file:
        file.write(whole[-9:])
    journals.poll()
    assert journals.lines == 2


def test_every_number_of_ranks_sees_the_same_batch() -> None:
    text = torch.arange(5000, dtype=torch.int64).remainder(251).to(torch.uint8)
    whole, after = batch(text, 7, 0, 1)
    for world in (2, 3, 4):
        shares = [batch(text, 7, rank, world)[0] for rank in range(world)]
        assert torch.equal(torch.cat(shares), whole)
    assert torch.equal(whole[:, 1:], after[:, :-1])


def test_only_processes_of_the_arena_are_killed(tmp_path: Path, arena_dir: Path) -> None:
    program = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    sleepers = []
    for arena in (arena_dir, tmp_path):
        environment = Hosts(arena).environment(orchestrate.HERE)
        sleepers.append(subprocess.Popen(program, env=environment, stdout=subprocess.PIPE))
    with sleepers[0] as ours, sleepers[1] as other:
        for sleeper in sleepers:
            assert sleeper.stdout is not None
            sleeper.stdout.readline()  # it runs, with its own environment
        run = orchestrate.DemoRun(tmp_path / "run", arena_dir, Screen(to_stderr=True))
        journal = Journal(tmp_path / "run", 0, incarnation=1)
        journal.write("start", world=1, pid=other.pid)
        journal.close()
        run.journals.poll()
        with pytest.raises(orchestrate.PhaseFailed, match="was gone before its kill"):
            run.kill_rank(0)
        run.lose(orchestrate.HERE)
        assert ours.wait(10) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


def test_hosts_that_are_lost_at_once_are_all_killed_before_one_is_waited_for(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts, hosts = list[str](), Hosts(arena_dir)
    send, wait = signal.pidfd_send_signal, processes._ends_by

    def note_kill(pidfd: int, number: int) -> None:
        acts.append("kill")
        send(pidfd, number)

    def note_wait(pidfd: int, deadline_s: float) -> bool:
        acts.append("wait")
        return wait(pidfd, deadline_s)

    monkeypatch.setattr(signal, "pidfd_send_signal", note_kill)
    monkeypatch.setattr(processes, "_ends_by", note_wait)
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    sleepers = [subprocess.Popen(program, env=hosts.environment(host)) for host in "ab"]
    # A process that was only just begun does not show its environment yet.
    processes.wait_until(lambda: len(hosts.processes("a", "b")) == 2, timeout_s=30)
    hosts.lose("a", "b")
    assert acts == ["kill", "kill", "wait", "wait"]
    assert [sleeper.wait(10) for sleeper in sleepers] == [-signal.SIGKILL] * 2


# ── the whole ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def shared_memory(arena_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo makes its arenas, and must leave nothing."""
    monkeypatch.setattr(orchestrate, "SHARED_MEMORY", arena_dir)
    return arena_dir


def _run(out: Path, *, as_json: bool = True, hosts: int | None = None) -> int:
    return main(Namespace(out=str(out), seed=3, json=as_json, hosts=hosts, root="", cache=False))


def test_a_phase_that_fails_shows_the_log_and_ends_the_demo(
    tmp_path: Path,
    shared_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(orchestrate, "TRAINER", "holdfast.no_such_trainer")
    monkeypatch.setattr(orchestrate, "MAX_RESTARTS", 0)
    assert _run(tmp_path / "out", as_json=False) == 1
    shown = capsys.readouterr().out
    assert "No module named holdfast.no_such_trainer" in shown
    assert "NOT AS PROMISED: the demo broke off: torchrun ended with exit code 1" in shown
    assert json.loads((tmp_path / "out" / "result.json").read_text())["as_promised"] is False
    assert list(shared_memory.iterdir()) == []


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").touch()
    from holdfast import UsageError

    with pytest.raises(UsageError, match="give another --out"):
        _run(tmp_path)
    assert (tmp_path / "runs" / "mine").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_training_run_is_killed_and_resumes_exactly_on_any_ranks(
    tmp_path: Path, shared_memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = _run(tmp_path / "out")
    captured = capsys.readouterr()
    print(captured.err)
    result: dict[str, Any] = json.loads(captured.out)
    assert code == 0
    assert result["as_promised"]
    assert [(r["world"], r["source"], r["has_same_state"]) for r in result["rows"]] == [
        ("FSDP2 2 ranks", "", None),
        ("FSDP2 2 ranks", "memory", True),
        ("FSDP2 2 ranks", "storage", True),
        ("FSDP2 1 rank", "storage", True),
        ("FSDP2 3 ranks", "storage", True),
        ("FSDP2 x TP 2x2", "storage", True),
    ]
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert list(shared_memory.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_hosts_are_lost_and_training_goes_on_from_memory_then_from_storage(
    tmp_path: Path, shared_memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = _run(tmp_path / "out", hosts=4)
    captured = capsys.readouterr()
    print(captured.err)
    result: dict[str, Any] = json.loads(captured.out)
    assert code == 0
    assert result["as_promised"] and result["hosts"] == 4
    assert [(r["world"], r["source"], r["has_same_state"]) for r in result["rows"]] == [
        ("FSDP2 4 ranks", "", None),
        ("FSDP2 3 hosts", "memory", True),
        ("FSDP2 1 host", "storage", True),
    ]
    assert "survives the loss of any 1 of 4 hosts" in captured.err
    assert "did not answer, and its parity replaces 1" in captured.err
    assert list(shared_memory.iterdir()) == []


def test_a_root_that_is_no_bucket_is_refused(tmp_path: Path) -> None:
    from holdfast import UsageError

    with pytest.raises(UsageError, match="is no bucket"):
        main(Namespace(out=None, seed=3, json=False, hosts=None, root=str(tmp_path), cache=False))
