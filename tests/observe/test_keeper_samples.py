"""Who watches a run on its own host is told by its keepers what is in no file yet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli import main
from holdfast.observe import keeper_samples as module
from holdfast.observe.keeper_samples import KeeperSamples
from holdfast.observe.live_run import LiveRun
from holdfast.protocol import messages as m
from holdfast.protocol.arena import arena_home
from support.checkpoints.commands import Out, json_of

KILLED = """
import os, sys, torch, holdfast
ckpt = holdfast.Checkpointer(sys.argv[1], {"model": torch.nn.Linear(8, 8)})
ckpt.save(0, durable=True).wait_durable()
os._exit(1)
"""
BROKEN = m.pack(m.SampleTaken(event=b"\x81\xa5event\xa1\xff"), 1)


def test_a_keeper_tells_at_once_what_its_trainers_are_doing(tmp_path: Path, capsys: Out) -> None:
    with holdfast.Checkpointer(tmp_path / "run", {"model": torch.nn.Linear(8, 8)}) as ckpt:
        ckpt.save(0, durable=True).wait_durable()
        samples, other = KeeperSamples(str(tmp_path / "run")), KeeperSamples(str(tmp_path))
        for phase in ("evaluation", "lunch"):
            with ckpt.phase(phase):
                ((sample, head),) = samples.read()
                assert sample.doing == {phase: 1}
        assert sample.trainers == 1, "who watches is none"
        assert head.by_host == sample.host and head.mono_s is not None
        assert list(other.read()) == [], "those of another run are not asked"
        live = LiveRun()
        live.take(sample, head)
        assert live.hosts[sample.host].doing == {"lunch": 1}
        with ckpt.phase("dinner"):
            shown = json_of(capsys, "top", tmp_path / "run")
        assert shown["hosts"][sample.host]["doing"] == {"dinner": 1}
    samples.close()
    assert main(["top", str(tmp_path / "run"), "--once"]) == 0


@pytest.mark.promise
def test_a_keeper_does_not_stay_for_who_watches(tmp_path: Path) -> None:
    environment = os.environ | {"HOLDFAST_KEEPER_IDLE_S": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, check=False)
    samples = KeeperSamples(str(tmp_path))
    ((sample, _),) = samples.read()
    assert sample.trainers == 0
    until_s = time.monotonic() + 60
    while list(samples.read()):
        assert time.monotonic() < until_s, "it is still there"
        time.sleep(0.1)
    samples.close()


@pytest.mark.parametrize("answer", [b"", b"\xff\xff\xff\x7f", m.pack(m.Done(), 1), BROKEN, None])
def test_what_answers_otherwise_or_not_at_all_is_left_alone_for_a_while(
    answer: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a keeper of an older version, or one that is stopped."""
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    monkeypatch.setattr(module, "parse_arena_name", lambda _: ("", "key", "a"))
    arena = arena_home() / "some"
    arena.mkdir(parents=True, mode=0o700)
    asked = []
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(arena / "keeper.sock"))
        door.listen()

        def answer_one() -> None:
            line, _ = door.accept()
            with line:
                asked.append(line.recv(100))
                if answer is None:
                    line.recv(1)  # until who asks has had enough
                else:
                    line.sendall(answer)

        thread = threading.Thread(target=answer_one)
        thread.start()
        samples = KeeperSamples(str(tmp_path))
        samples._keys = {"key"}
        assert list(samples.read()) == []
        thread.join()
        assert list(samples.read()) == [] and len(asked) == 1
        samples.close()
