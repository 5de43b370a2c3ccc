"""``holdfast doctor``: every finding from made-up facts, and the command as a whole."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import overview as overview_module
from holdfast.catalogue import catalogue
from holdfast.cli import EXIT_CODES, doctor, main
from holdfast.cli.doctor import judge
from holdfast.cli.doctor import root as doctor_root
from holdfast.cli.doctor.rules.probe_facts import (
    Arena,
    Facts,
    Finding,
    HostFacts,
    PlaceFacts,
    ProtectedFacts,
    Rendezvous,
    RootFacts,
    Speeds,
    Torch,
    worst,
)
from holdfast.errors import StorageError
from holdfast.overview import leave_index, overview
from holdfast.storage.local import LocalStore
from support.checkpoints.roots import fill, leave_behind
from support.servers.bucket_model import World, model_store

Out = pytest.CaptureFixture[str]
GB = 10**9

HOST = HostFacts(
    system="Linux",
    kernel="6.8.0",
    python=(3, 12, 1),
    cores=8,
    cores_allowed=8,
    cores_quota=None,
    memory_bytes=64 * GB,
    memory_limit_bytes=None,
    locked_memory_bytes=None,
    open_files=65536,
)
SHM = PlaceFacts("/dev/shm", "tmpfs", "/dev/shm", size_bytes=32 * GB, free_bytes=30 * GB)
DISK = PlaceFacts(
    "/data/run",
    "xfs",
    "/data",
    size_bytes=900 * GB,
    free_bytes=500 * GB,
    free_files=10**6,
    is_direct=True,
    links=True,
    locks=True,
)
TORCH = Torch("2.12.0", cuda=False)
KEY = "0123456789abcdef"
ROOT = RootFacts(
    "/data/run",
    run_id="r",
    keys=(KEY,),
    checkpoints=3,
    newest="2-40",
    newest_bytes=4 * GB,
    newest_images=4,
)
ARENA = Arena(
    "/dev/shm/holdfast-0/r@here",
    run_id="r",
    root_key=KEY,
    host_id="here",
    size_bytes=12 * GB,
    keeper_pid=77,
    keeper_state="S",
    answers=True,
    root="/data/run",
    root_exists=True,
    newest="2-57",
    users=(80, 81),
)
GOOD = Facts(HOST, SHM, DISK, TORCH, Speeds(2 * GB, 4 * GB, 10 * GB, 20 * GB), {}, (ARENA,), ROOT)
PROTECTED = ProtectedFacts(2, 1, 4, "any 1 of 4 hosts", newest="2-57")
MEETING = Rendezvous("head:29400", (4711,), is_here=False)
DEAD = replace(ARENA, keeper_pid=0, keeper_state="", answers=None, users=())


def host(**change: Any) -> Facts:
    return replace(GOOD, host=replace(HOST, **change))


def memory(**change: Any) -> Facts:
    return replace(GOOD, memory=replace(SHM, **change), arenas=())


def storage(**change: Any) -> Facts:
    return replace(GOOD, storage=replace(DISK, **change))


def torch(*fields: Any, **change: Any) -> Facts:
    return replace(GOOD, torch=Torch(*fields, **change))


def settings(**values: str) -> Facts:
    return replace(GOOD, settings=values)


def root(**change: Any) -> Facts:
    return replace(GOOD, root=replace(ROOT, **change))


def arena(base: Arena = ARENA, **change: Any) -> Facts:
    return replace(GOOD, arenas=(replace(base, **change),))


def meeting(**change: Any) -> Facts:
    return replace(GOOD, meetings=(replace(MEETING, **change),))


def found(facts: Facts, about: str) -> list[Finding]:
    return [one for one in judge(facts) if one.about == about]


def test_a_machine_without_fault_gets_no_warning() -> None:
    assert {one.severity for one in judge(GOOD)} == {"ok"}
    assert worst(judge(GOOD)) == "ok"
    assert worst([]) == "ok"


TROUBLE = [
    (host(system="Darwin"), "system", "bad", "Darwin", "Linux"),
    (host(python=(3, 10, 9)), "Python", "bad", "3.10.9", "3.11"),
    (host(cores_allowed=1), "cores", "warn", "1 of 8 cores", "taskset"),
    (host(cores_quota=1.5), "cores", "warn", "1.5 of 8 cores", "--cpus"),
    (host(memory_limit_bytes=8 * GB), "memory", "bad", "8.00 GB, by the limit", "--memory"),
    (host(open_files=256), "open files", "warn", "256", "ulimit -n"),
    (memory(fault="Permission denied"), "shared memory", "bad", "Permission", "HOLDFAST_ARENA_DIR"),
    (memory(kind="ext4"), "shared memory", "warn", "on ext4", "/dev/shm"),
    (memory(free_bytes=11 * GB), "shared memory", "bad", "needs 12.0 GB", "--shm-size"),
    (
        replace(
            memory(free_bytes=4 * GB),
            root=replace(ROOT, hosts=tuple("abcd"), protected=PROTECTED),
        ),
        "shared memory",
        "bad",
        "needs 4.67 GB (4 images a rank, and parity of two generations)",
        "emptyDir",
    ),
    (
        replace(memory(size_bytes=64 << 20, free_bytes=64 << 20), root=None),
        "shared memory",
        "bad",
        "unless it asks for more",
        "--shm-size",
    ),
    (torch(), "torch", "bad", "not installed", "pip install torch"),
    (torch("2.10.1", cuda=False), "torch", "bad", "2.10.1", "2.11"),
    (torch("2.12", fault="no answer"), "CUDA", "warn", "no answer", "torch.cuda"),
    (torch("2.12", cuda=False, driver="550.1"), "CUDA", "warn", "without CUDA", "nvidia-smi"),
    (
        torch("2.12", built_for="12.6", cuda=False, driver="550.1"),
        "CUDA",
        "warn",
        "for CUDA 12.6",
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        replace(
            torch("2.12", "12.6", True, ("H200",), "550.1"),
            host=replace(HOST, locked_memory_bytes=8 << 20),
        ),
        "locked memory",
        "warn",
        "8.39 MB",
        "memlock=-1",
    ),
    (torch("2.13.0+cpu", cuda=False), "torchrun", "warn", "SHARE_RDZV", "export TORCH_DISABLE"),
    (
        settings(HOLDFAST_LOGG="x"),
        "settings",
        "warn",
        "HOLDFAST_LOGG",
        "Did you mean HOLDFAST_LOG?",
    ),
    (settings(HOLDFAST_ZZZZ="x"), "settings", "warn", "no meaning", "HOLDFAST_RUN_ID"),
    (settings(HOLDFAST_LOG="loud"), "settings", "bad", "info, debug or off", "unset HOLDFAST_LOG"),
    (settings(HOLDFAST_EXCHANGE="yes"), "settings", "bad", "auto, always or never", "unset"),
    (settings(HOLDFAST_ARENA_DIR="shm"), "settings", "bad", "relative", "unset"),
    (settings(HOLDFAST_KEEPER_IDLE_S="1h"), "settings", "bad", "seconds", "unset"),
    (settings(HOLDFAST_KEEPER_IDLE_S="inf"), "settings", "bad", "seconds", "unset"),
    (settings(HOLDFAST_ARENA_BYTES="64MiB"), "settings", "bad", "number of bytes", "unset"),
    (settings(HOLDFAST_METRICS="yes"), "settings", "bad", "give a port", "unset"),
    (settings(HOLDFAST_PARITY_RATE="fast"), "settings", "bad", "500M", "unset"),
    (settings(HOLDFAST_PARITY_RATE="3M"), "settings", "bad", "4M or more", "unset"),
    (settings(HOLDFAST_RUN_ID="a/b"), "settings", "bad", "names a directory", "unset"),
    (settings(HOLDFAST_RUN_ID=".a"), "settings", "bad", "names a directory", "unset"),
    (storage(fault="Read-only file system"), "storage", "bad", "Read-only", "another root"),
    (storage(kind="tmpfs"), "storage", "bad", "gone after a reboot", "disk"),
    (storage(kind="overlay"), "storage", "warn", "goes with its container", "-v"),
    (storage(kind="nfs4"), "storage", "warn", "lock", "nolock"),
    (storage(kind="fuse.sshfs"), "storage", "warn", "fuse.sshfs", "fsync"),
    (storage(links=False), "storage", "bad", "hard links", "ext4"),
    (storage(locks=False), "storage", "bad", "two runs", "flock"),
    (storage(is_direct=False), "direct I/O", "warn", "page cache", "O_DIRECT"),
    (storage(free_bytes=11 * GB), "free space", "warn", "2 more checkpoints", "Keep"),
    (storage(free_bytes=3 * GB), "free space", "bad", "0 more checkpoints", "prune"),
    (storage(free_files=5), "free space", "bad", "inodes", "prune"),
    (
        replace(storage(free_bytes=15 * GB), root=replace(ROOT, keeps=5)),
        "free space",
        "warn",
        "5 are needed",
        "prune",
    ),
    (root(fault="needs format version 2"), "root", "bad", "format version 2", "reads it"),
    (
        root(broken=(("manifests/1-1.json", "bad checksum"),)),
        "root",
        "bad",
        "manifests/1-1.json cannot be read: bad checksum",
        "/data/run/manifests/1-1.json",
    ),
    (root(gap="2.json is missing"), "root", "warn", "2.json is missing", "restore('1-100')"),
    (root(gap="2.json is missing", newest=""), "root", "bad", "2.json is missing", "by its name"),
    (
        root(leftovers=2, leftover_bytes=GB),
        "root",
        "warn",
        "2 attempts left behind",
        "holdfast prune /data/run",
    ),
    (root(pins_gone=("1-9",)), "pins", "warn", "1-9", "holdfast pin /data/run 1-9 --remove"),
    (root(pins_unreadable=("1-9",)), "pins", "warn", "still pins", "holdfast pin /data/run 1-9"),
    (
        arena(answers=False, keeper_state="T"),
        "arena",
        "bad",
        "process 77, is stopped (SIGSTOP)",
        "kill -CONT 77",
    ),
    (arena(answers=False), "arena", "bad", "is running, and does not answer", "kill -KILL 77"),
    (arena(answers=None), "arena", "warn", "starting or ending", "Look again"),
    (arena(keeper_pid=0, answers=False), "arena", "bad", "does not answer", "pgrep"),
    (arena(keeper_pid=0, root_exists=False), "arena", "warn", "is gone", "where it runs"),
    (arena(root_exists=False), "arena", "warn", "its root /data/run is gone", "kill 77"),
    (arena(DEAD), "arena", "warn", "holds snapshot 2-57", "rm -r /dev/shm/holdfast-0/r@here"),
    (arena(DEAD, newest=""), "arena", "warn", "no whole snapshot", "holdfast doctor --clean, or"),
    (arena(DEAD, root_key=""), "arena", "warn", "an older version of Holdfast", "--clean, or"),
    (
        arena(DEAD, is_its_root=False),
        "arena",
        "warn",
        "it holds snapshot 2-57, and /data/run is another root by now",
        "start the run there to restore from it; or give the memory back: holdfast doctor --clean",
    ),
    (
        arena(DEAD, newest="", part="2-57", has_news=True),
        "arena",
        "warn",
        "this host's part of snapshot 2-57 of /data/run, newer than storage",
        "on its hosts to restore from it; or give the memory back: holdfast doctor --clean "
        "--lose-snapshots",
    ),
    (
        arena(DEAD, newest="", part="2-57", root_exists=False, has_news=None),
        "arena",
        "warn",
        "no run restores 2-57 from it",
        "--lose-snapshots",
    ),
    (
        root(hosts=("a", "b")),
        "protection",
        "warn",
        "the loss of none of them",
        "parity=1",
    ),
    (
        root(protected=replace(PROTECTED, missing=("parity=2 needs 5 hosts, there are 4",))),
        "protection",
        "warn",
        "snapshot 2-57 survives the loss of any 1 of 4 hosts (parity=1, start 2); parity=2 needs",
        "several-hosts.md",
    ),
    (
        root(protected=replace(PROTECTED, reason="b did not answer")),
        "protection",
        "warn",
        "newer ones are not protected: b did not answer",
        "Look at the host",
    ),
    (
        meeting(is_here=True),
        "rendezvous",
        "warn",
        "meet at head:29400 (torchrun: 4711), on this machine, where the run trains: with that "
        "host all launchers end",
        "--rdzv-conf=is_host=0",
    ),
    (meeting(on="b", launchers=()), "rendezvous", "warn", "head:29400, on b, where", "outlives"),
    (meeting(is_here=None), "rendezvous", "warn", "has no address here", "--rdzv-endpoint"),
    (
        arena(DEAD, newest_is_durable=False),
        "arena",
        "warn",
        "2-57 of /data/run, which is nowhere else",
        "Start the run again",
    ),
    (arena(DEAD, newest_is_durable=True), "arena", "warn", "in storage too", "Start the run"),
    (arena(DEAD, root_exists=False), "arena", "warn", "/data/run is gone, and no run", "rm -r"),
    (arena(DEAD, users=(80, 81)), "arena", "warn", "in use by 80, 81", "kill 80 81"),
    (arena(DEAD, is_grave=True), "arena", "warn", "half removed", "rm -r"),
    (arena(fault="not a directory"), "arena", "bad", "not a directory", "ls -la"),
]


@pytest.mark.parametrize(
    ("facts", "about", "severity", "text", "remedy"),
    TROUBLE,
    ids=[f"{about}-{text[:20]}" for _, about, _, text, _ in TROUBLE],
)
def test_every_trouble_is_named_with_its_remedy(
    facts: Facts, about: str, severity: str, text: str, remedy: str
) -> None:
    (one,) = (one for one in judge(facts) if one.severity != "ok")
    assert (one.about, one.severity) == (about, severity)
    assert text in one.text
    assert remedy in one.remedy


def test_no_remedy_is_for_process_0_which_is_every_process_of_the_group() -> None:
    said = [one.remedy for facts, *_ in TROUBLE for one in judge(facts)]
    assert not [remedy for remedy in said if re.search(r"kill[-A-Z ]* 0\b", remedy)]


def test_what_is_fine_is_said_too() -> None:
    (room,) = found(GOOD, "free space")
    assert "125 more checkpoints of 4.00 GB" in room.text
    (speed,) = found(GOOD, "disk speed")
    assert "2-40 (4.00 GB) is durable after 2.00 s, read in 1.00 s" in speed.text
    (kept,) = found(GOOD, "arena")
    assert "process 77, answers, newest snapshot 2-57, 2 trainers" in kept.text
    cuda = torch("2.12", "12.6", True, ("H200", "H200"), "550.1")
    assert found(cuda, "CUDA")[0].text == "12.6, driver 550.1, 2 devices: H200"
    shared = settings(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", HOLDFAST_LOG="debug")
    with_it = replace(torch("2.13", cuda=False), settings=shared.settings)
    assert worst(judge(with_it)) == "ok"


def test_the_level_of_protection_and_the_place_where_launchers_meet_are_said() -> None:
    (said,) = found(root(protected=PROTECTED, hosts=tuple("abcd")), "protection")
    assert said.severity == "ok"
    assert said.text.startswith("snapshot 2-57 survives the loss of any 1 of 4 hosts")
    (none,) = found(root(protected=replace(PROTECTED, newest="")), "protection")
    assert none.text == "no snapshot of 4 hosts was protected yet (parity=1, start 2)"
    (alone,) = found(root(hosts=("a",)), "protection")
    assert "survive the run's processes" in alone.text
    assert not found(GOOD, "protection") and not found(root(exists=False), "protection")
    (met,) = found(meeting(), "rendezvous")
    assert met.severity == "ok" and "a new launch goes on from memory" in met.text


def test_parts_and_parity_in_a_living_arena_are_said() -> None:
    (kept,) = found(arena(newest="", part="2-57", parity_bytes=3 * GB), "arena")
    assert "answers, part of 2-57, 3.00 GB of it parity, 2 trainers" in kept.text


def test_memory_that_this_run_holds_already_counts_as_free_for_it() -> None:
    tight = replace(GOOD, memory=replace(SHM, free_bytes=GB))
    assert worst(judge(tight)) == "ok"
    others = replace(tight, arenas=(replace(ARENA, run_id="another"),))
    assert worst(judge(others)) == "bad"


def test_settings_of_several_hosts_have_a_meaning() -> None:
    known = settings(
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        HOLDFAST_PARITY_RATE="500M",
        HOLDFAST_SECRET_FILE="/run/secret",
        HOLDFAST_HOST_ADDRESS="10.0.0.7",
        HOLDFAST_FAILURE_DOMAIN="rack-a",
    )
    assert worst(judge(known)) == "ok"


def test_a_run_in_progress_is_no_leftover() -> None:
    busy = root(leftovers=1, leftover_bytes=1, holder_pid=77, holder="run r, keeper 77 on here")
    assert worst(judge(busy)) == "ok"
    assert "in use by run r, keeper 77 on here, process 77" in found(busy, "root")[1].text
    killed = root(holder="run r, keeper 77 on here")
    assert "killed, or on another host" in found(killed, "root")[1].text


def test_a_keeper_in_another_container_is_no_dead_one() -> None:
    elsewhere = arena(keeper_pid=0, keeper_state="")
    assert not elsewhere.arenas[0].is_stale
    assert "which cannot be seen from this container, answers" in found(elsewhere, "arena")[0].text


def test_of_what_could_not_be_probed_nothing_is_said() -> None:
    unknown = storage(is_direct=None, links=None, locks=None, free_files=None)
    assert not found(unknown, "direct I/O")
    assert worst(judge(unknown)) == "ok"


def test_without_a_root_nothing_is_said_of_checkpoints() -> None:
    bare = replace(GOOD, root=None, arenas=(), speeds=Speeds())
    said = {one.about for one in judge(bare)}
    assert worst(judge(bare)) == "ok"
    assert "root" not in said and "disk speed" not in said
    assert found(bare, "arenas")[0].text == "none"
    assert found(root(exists=False), "root")[0].text == "/data/run holds no checkpoints yet"
    assert worst(judge(torch("2.12"))) == "ok", "torch was not asked"


# ── the command ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes ``examine`` find what the test says."""

    def use(made_up: Facts) -> None:
        monkeypatch.setattr(doctor, "examine", lambda *_, **__: made_up)

    return use


def test_nothing_bad_exits_with_0_and_something_bad_with_its_own_code(
    facts: Any, capsys: Out
) -> None:
    facts(GOOD)
    assert main(["doctor"]) == 0
    facts(storage(kind="overlay"))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 bad, 1 warning"
    facts(storage(kind="tmpfs"))
    assert main(["doctor"]) == doctor.BAD == 11
    assert "  11  doctor" in EXIT_CODES
    said = capsys.readouterr().out.splitlines()
    (line,) = (n for n, text in enumerate(said) if text.startswith("bad"))
    assert "gone after a reboot" in said[line]
    assert "-> Choose a root on a disk" in said[line + 1]
    assert said[-1] == "1 bad, 0 warnings"


def test_the_whole_answer_is_in_json(facts: Any, capsys: Out) -> None:
    facts(storage(kind="tmpfs"))
    assert main(["doctor", "--json"]) == 11
    document = json.loads(capsys.readouterr().out)
    assert document["worst"] == "bad"
    (bad,) = (one for one in document["findings"] if one["severity"] == "bad")
    assert bad["about"] == "storage" and bad["remedy"]
    assert document["facts"]["host"]["cores"] == 8
    assert document["facts"]["storage"]["kind"] == "tmpfs"


def test_a_real_root_is_examined_without_being_changed(tmp_path: Path, capsys: Out) -> None:
    store = LocalStore(tmp_path)
    fill(store)
    leave_behind(store)
    main(["pin", str(tmp_path), "1-20"])
    (tmp_path / "manifests" / "1-20.json").unlink()
    capsys.readouterr()
    before = sorted(tmp_path.rglob("*"))
    main(["doctor", str(tmp_path), "--quick", "--json"])
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert sorted(tmp_path.rglob("*")) == before
    root = facts["root"]
    assert (root["checkpoints"], root["newest"], root["run_id"]) == (5, "2-40", "r")
    # What a pin names is kept for a repair, although its manifest is gone.
    assert (root["leftovers"], root["pins_gone"]) == (1, ["1-20"])
    assert root["newest_bytes"] > 0 and root["newest_images"] == 2
    assert facts["speeds"] == {"write": None, "read": None, "copy": None, "checksum": None}
    assert facts["torch"]["version"].startswith("2.") and facts["torch"]["cuda"] is None


def test_a_root_that_is_not_there_yet_is_examined_where_it_would_lie(
    tmp_path: Path, capsys: Out
) -> None:
    main(["doctor", str(tmp_path / "runs" / "new"), "--quick", "--json"])
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert facts["root"]["exists"] is False
    assert facts["storage"]["fault"] == "" and facts["storage"]["kind"]
    assert list(tmp_path.iterdir()) == []


def test_a_root_of_a_newer_format_is_bad_and_one_broken_manifest_too(
    tmp_path: Path, capsys: Out
) -> None:
    fill(LocalStore(tmp_path))
    (tmp_path / "manifests" / "1-20.json").write_text("{}")
    assert main(["doctor", str(tmp_path), "--quick"]) == 11
    assert "manifests/1-20.json cannot be read" in capsys.readouterr().out
    (tmp_path / "holdfast.json").write_text("{}")
    assert main(["doctor", str(tmp_path), "--quick"]) == 11
    assert "not a Holdfast document" in capsys.readouterr().out


def test_files_that_are_missing_or_cut_short_are_told_without_being_read(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(LocalStore(tmp_path))
    assert main(["doctor", str(tmp_path), "--quick"]) == 0
    image = next((tmp_path / "steps").glob("2-40-*/live-00001.safetensors"))
    os.truncate(image, image.stat().st_size - 1)
    next((tmp_path / "steps").glob("1-20-*/live-00000.safetensors")).unlink()
    capsys.readouterr()
    assert main(["doctor", str(tmp_path), "--quick"]) == 11
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"checkpoint 2-40 is damaged: steps/2-40\S* has \d+ bytes, the manifest", said)
    assert re.search(r"checkpoint 1-20 is damaged: steps/1-20\S* is not there", said)
    assert f"holdfast repair {tmp_path} --from COPY" in said
    for layout in (tmp_path / "layouts").iterdir():
        layout.unlink()
    assert main(["doctor", str(tmp_path), "--quick", "--json"]) == 11
    damaged = json.loads(capsys.readouterr().out)["facts"]["root"]["damaged"]
    assert len(damaged) == 6 and all(
        re.match(r"layouts/\S+ is not there", d[1][0]) for d in damaged
    )
    monkeypatch.setattr(doctor_root, "_MOST_FILES", 2)
    assert main(["doctor", str(tmp_path), "--quick"]) == 11
    assert "files of 5 older checkpoints were not looked up" in capsys.readouterr().out


def test_a_store_that_does_not_answer_says_nothing_about_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(LocalStore(tmp_path))

    def size_bytes(_: LocalStore, path: str) -> int:
        error = StorageError("no answer within 30 s", operation="size", path=path, url="", errno=0)
        error.retryable = True
        raise error

    monkeypatch.setattr(LocalStore, "size_bytes", size_bytes)
    listed = overview(LocalStore(tmp_path))
    damaged, unchecked = doctor_root._damaged(LocalStore(tmp_path), listed)
    assert damaged == () and unchecked == len(listed.manifests)


def test_a_checkpoint_that_is_removed_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    fill(store)
    listed = overview(store)
    store.remove("manifests/2-40.json")
    store.remove_tree("steps/2-40-a2x40")
    assert doctor_root._damaged(store, listed) == ((), 0)


def test_of_a_bucket_with_an_index_doctor_reads_what_it_looks_up_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch, tries_s=0.1)
    fill(store)
    whole = catalogue(store)
    leave_index(store, overview(store))
    monkeypatch.setattr(overview_module, "FEW", 0)
    monkeypatch.setattr(doctor_root, "_MOST_OF_BUCKET", 4)
    world.log.clear()
    damaged, unchecked = doctor_root._damaged(store, overview(store))
    asked = [key for kind, key in world.log if kind == "GET" and "/manifests/" in key]
    looked_up = len(whole.manifests) - unchecked
    assert not damaged and 0 < looked_up < len(whole.manifests) and len(asked) == looked_up
    assert sum("/steps/" in key for _, key in world.log) <= 4
    del world.objects[f"root/{whole.manifests[-1].images[0].path}"]
    assert doctor_root._damaged(store, overview(store))[0]
    found = overview(store)
    world.fault = lambda kind, key: "dropped" if "/manifests/" in key else ""
    assert doctor_root._damaged(store, found) == ((), len(whole.manifests))
