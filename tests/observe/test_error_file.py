"""Why a trainer failed is read from torchrun's file of it, or from the error at its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast import events
from holdfast.observe.error_file import MOST_TEXT, error_in
from holdfast.observe.event_files import EventFile
from holdfast.observe.findings import find
from holdfast.observe.report_builder import read_report
from holdfast.observe.ring_drain import RingDrain
from holdfast.observe.training import TrainingRecorder
from support.checkpoints.commands import Out, text_of
from support.runs.told import RANKS, Told, of, tell_save, tell_start

FAILING = """
import os, signal, sys
from pathlib import Path
from torch.distributed.elastic.multiprocessing.errors import record
from holdfast.observe.event_ring import RINGS, EventRing
from holdfast.observe.training import TRAINING

ring = EventRing(Path(sys.argv[1]) / RINGS, 'rank-00003', rank=3, host='c', boot='b')
ring.ring.note_doing(TRAINING, 41, 2, b'')

@record
def main():
    raise RuntimeError('CUDA out of memory.\\n  Tried to allocate 2 GiB')

try:
    main()
finally:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_torchrun_recorded_of_a_process_is_told_with_its_death(tmp_path: Path) -> None:
    arena = tmp_path / "arena"
    arena.mkdir(mode=0o700)
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ended = subprocess.run(
        [sys.executable, "-c", FAILING, str(arena)], env=environment, capture_output=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    drain = RingDrain(arena, EventFile(tmp_path / "host-c.jsonl"))
    for _ in range(25):
        drain.poll()
    drain.close()
    (died,) = map(msgspec.json.decode, (tmp_path / "host-c.jsonl").read_bytes().splitlines())
    assert (died["event"], died["rank"]) == ("TrainerDied", 3)
    assert died["reason"] == "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps({"message": {"message": "a\nb", "extraInfo": {}}}), "a b"),
        (json.dumps({"message": "of an older version"}), "of an older version"),
        (json.dumps({"message": "x" * 9999}), "x" * (MOST_TEXT - 4) + " ..."),
        (json.dumps({"message": {"message": 7}}), ""),
        (json.dumps(["message"]), ""),
        ("", ""),
        ("{", ""),
        ("[" * 100_000, ""),
    ],
)
def test_a_file_has_a_message_or_says_nothing(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    assert error_in(str(path)) == said


def test_what_is_no_file_of_ours_is_not_read(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text('{"message": "m"}')
    (tmp_path / "link").symlink_to(good)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "none", "."):
        assert error_in(str(tmp_path / name)) == ""
    assert error_in("") == "" and error_in(str(good)) == "m"


def test_the_error_that_ends_a_with_block_is_told() -> None:
    recorder = TrainingRecorder(0, 1, is_reporting=False, ring=None)
    assert recorder.ended("closed").reason == ""
    try:
        raise ValueError("loss is nan\nat step 7")
    except ValueError:
        assert recorder.ended("failed").reason == "ValueError: loss is nan at step 7"
        assert recorder.ended("closed").reason == "", "it was dealt with"
    assert recorder.ended("failed").reason == ""


def test_the_first_error_is_in_the_report_and_in_the_finding_of_a_loop(
    tmp_path: Path, capsys: Out
) -> None:
    told = Told(tmp_path, {"b": 3600.0})
    tell_start(told, 1, 10.0, RANKS)
    for step in range(3):
        tell_save(told, 1, step, 20.0 + step, RANKS)
    for number in range(1, 5):
        at_s = 30.0 + 40 * number
        for rank, host in RANKS.items():
            late_s = 0.0 if rank == 2 else 0.5  # the others fail because it did
            why = "OSError: disk" if rank == 2 else "RuntimeError: peer is gone"
            ended = of(events.RunEnded, number, rank, outcome="failed", reason=why)
            told(ended, at_s + late_s, host)
        tell_start(told, number + 1, at_s + 20, RANKS, (1, 2))
    report = read_report(told.write())
    assert report.reliability is not None
    each = report.reliability.interruptions
    assert [(one.rank, one.host, one.reason) for one in each] == [(2, "b", "OSError: disk")] * 4
    (loop,) = (one for one in find(report) if one.cause == "restart_loop")
    assert loop.evidence.endswith("; the last error is OSError: disk")
    shown = text_of(capsys, "report", str(tmp_path))
    assert "start 4 ended as rank 2 on b failed: OSError: disk" in shown
