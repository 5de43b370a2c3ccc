"""What doctor finds out of a run's hosts: how they protect each other, where launchers meet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.doctor.root import probe_hosts, probe_meetings, probe_protected
from holdfast.cli.doctor.rules.probe_facts import ProtectedFacts, Rendezvous
from holdfast.events import (
    Event,
    ProtectionPlanned,
    RunStarted,
    SnapshotNotProtected,
    SnapshotProtected,
    to_record,
)


def write_events(root: Path, *events: Event) -> None:
    (root / "events").mkdir(parents=True)
    lines = [json.dumps(to_record(event, 1.0)) for event in events]
    torn = lines[-1][:20]
    (root / "events" / "keeper-a.jsonl").write_text("\n".join([*lines, torn]))


def test_the_protection_of_the_newest_start_is_read_from_its_events(tmp_path: Path) -> None:
    def began(n: int, host: str) -> RunStarted:
        return RunStarted(incarnation=n, rank=0, run_id="r", world=2, host=host, pid=1)

    assert probe_protected(str(tmp_path)) is None and probe_hosts(str(tmp_path)) == ()
    planned = ProtectionPlanned(parity=1, hosts=2, survives="any 1 of 2 hosts", incarnation=3)
    old = ProtectionPlanned(parity=1, hosts=4, survives="any 1 of 4 hosts", incarnation=2)
    write_events(
        tmp_path,
        began(2, "c"),
        began(3, "a"),
        began(3, "b"),
        planned,
        old,
        SnapshotProtected(survives="", elapsed_s=1.0, incarnation=2, step=90),
        SnapshotProtected(survives="", elapsed_s=1.0, incarnation=3, step=8),
        SnapshotProtected(survives="", elapsed_s=1.0, incarnation=3, step=9),
        SnapshotNotProtected(reason="old", incarnation=3, step=7),
    )
    assert probe_hosts(str(tmp_path)) == ("a", "b")
    assert probe_protected(str(tmp_path)) == ProtectedFacts(
        3, 1, 2, "any 1 of 2 hosts", newest="3-9"
    )


def launcher(proc: Path, pid: int, *words: str) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_text("\0".join(words) + "\0")


def test_where_launchers_meet_is_on_their_command_lines_and_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ("python", "-m", "torch.distributed.run")
    launcher(tmp_path, 11, *module, "--nnodes", "2:4", "--rdzv-endpoint", "127.0.0.1:1", "train.py")
    launcher(tmp_path, 12, "python", "/bin/torchrun", "--rdzv_endpoint=127.0.0.1:1", "--nnodes=4")
    launcher(tmp_path, 15, "torchrun", "--nnodes=1", "--rdzv-endpoint=localhost:0")
    launcher(tmp_path, 13, "vim", "--rdzv_endpoint=x:1")
    launcher(tmp_path, 14, "torchrun", "--standalone", "train.py")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "no such name.invalid:29400")
    here, unknown = probe_meetings(("b",), tmp_path)
    assert here == Rendezvous("127.0.0.1:1", (11, 12), is_here=True)
    assert unknown == Rendezvous("no such name.invalid:29400", (), is_here=None)
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "192.0.2.1:29400")  # nobody's, by RFC 5737
    assert [one.is_here for one in probe_meetings((), tmp_path)] == [True, False]
    assert probe_meetings(("192.0.2.1",), tmp_path)[1].on == "192.0.2.1"
