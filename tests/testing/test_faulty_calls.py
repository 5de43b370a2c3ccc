"""System calls of a process fail as the rules say, and as many of them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.testing.faults.faulty_calls import (
    Action,
    Call,
    CallRule,
    FaultyCalls,
    build,
    missing,
)

needs_compiler = pytest.mark.skipif(bool(missing()), reason=f"this machine lacks {missing()}")

#: Makes each kind of call below a directory, and prints its outcome.
CALLS = """
import os, sys
at = sys.argv[1]
def tell(name, act):
    try:
        print(name, act())
    except OSError as error:
        print(name, "errno", error.errno)
def opened(flags, name="file"):
    return os.open(os.path.join(at, name), flags)
tell("MAKE_DIRECTORY", lambda: os.mkdir(os.path.join(at, "made")))
tell("OPEN", lambda: opened(os.O_RDWR | os.O_CREAT) and 0)
file = os.open(os.path.join(at, "other"), os.O_RDWR | os.O_CREAT)
tell("WRITE", lambda: os.pwritev(file, [bytes(5000)], 0))
tell("WRITE", lambda: os.pwrite(file, bytes(5000), 0))
tell("WRITE", lambda: os.write(file, bytes(5000)))
tell("READ", lambda: os.preadv(file, [bytearray(5000)], 0))
tell("READ", lambda: len(os.pread(file, 5000, 0)))
tell("SYNC", lambda: os.fsync(file))
tell("TRUNCATE", lambda: os.ftruncate(file, 10))
tell("LINK", lambda: os.link(os.path.join(at, "other"), os.path.join(at, "linked")))
tell("RENAME", lambda: os.replace(os.path.join(at, "other"), os.path.join(at, "renamed")))
tell("REMOVE", lambda: os.unlink(os.path.join(at, "renamed")))
"""
UNTOUCHED = {
    "MAKE_DIRECTORY": ["None"],
    "OPEN": ["0"],
    "WRITE": ["5000"] * 3,
    "READ": ["5000"] * 2,
    "SYNC": ["None"],
    "TRUNCATE": ["None"],
    "LINK": ["None"],
    "RENAME": ["None"],
    "REMOVE": ["None"],
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("library")


@pytest.fixture
def faults(library: Path) -> FaultyCalls:
    return FaultyCalls(library)


def outcomes(faults: FaultyCalls, at: Path, program: str = CALLS) -> dict[str, list[str]]:
    """Returns what each kind of call returned below ``at``, in order."""
    said = subprocess.run(
        [sys.executable, "-c", program, str(at)],
        env=dict(os.environ) | faults.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "LD_PRELOAD" not in said.stderr, said.stderr
    found: dict[str, list[str]] = {}
    for line in said.stdout.splitlines():
        name, _, outcome = line.partition(" ")
        found.setdefault(name, []).append(outcome)
    return found


@needs_compiler
def test_without_a_rule_nothing_changes(faults: FaultyCalls, tmp_path: Path) -> None:
    assert outcomes(faults, tmp_path) == UNTOUCHED


@needs_compiler
@pytest.mark.parametrize("call", [one for one in Call if one.name != "ALLOCATE"])
def test_each_kind_of_call_fails_alone(faults: FaultyCalls, tmp_path: Path, call: Call) -> None:
    path = str(tmp_path / "file") if call is Call.OPEN else str(tmp_path)
    number = faults.add(CallRule((call,), path, Action.FAIL, errno.EIO))
    found = outcomes(faults, tmp_path)
    assert set(found.pop(call.name)) == {f"errno {errno.EIO}"}
    assert faults.met(number) == faults.seen(number) == len(UNTOUCHED[call.name])
    if call not in (Call.WRITE, Call.LINK, Call.RENAME):  # on which what follows relies
        assert found == {name: one for name, one in UNTOUCHED.items() if name != call.name}


@needs_compiler
def test_allocating_fails_as_storage_calls_it(faults: FaultyCalls, tmp_path: Path) -> None:
    faults.add(CallRule((Call.ALLOCATE,), str(tmp_path), Action.FAIL, errno.ENOSPC))
    program = """
import os, sys
from holdfast.storage.files import allocate
file = os.open(os.path.join(sys.argv[1], "file"), os.O_RDWR | os.O_CREAT)
try:
    allocate(file, 4096)
except OSError as error:
    print("ALLOCATE errno", error.errno, os.fstat(file).st_size)
"""
    assert outcomes(faults, tmp_path, program) == {"ALLOCATE": [f"errno {errno.ENOSPC} 0"]}


@needs_compiler
def test_calls_are_counted_over_all_processes_and_only_those_asked_for_fail(
    faults: FaultyCalls, tmp_path: Path
) -> None:
    rule = CallRule((Call.WRITE,), str(tmp_path), Action.FAIL, errno.EIO, first=4, last=5)
    number = faults.add(rule)
    assert outcomes(faults, tmp_path)["WRITE"] == ["5000"] * 3
    (tmp_path / "made").rmdir()
    (tmp_path / "linked").unlink()
    failed = f"errno {errno.EIO}"
    assert outcomes(faults, tmp_path)["WRITE"] == [failed, failed, "5000"]
    assert (faults.seen(number), faults.met(number)) == (6, 2)
    faults.remove(number)
    (tmp_path / "made").rmdir()
    (tmp_path / "linked").unlink()
    assert outcomes(faults, tmp_path) == UNTOUCHED


@needs_compiler
def test_reads_and_writes_stop_short(faults: FaultyCalls, tmp_path: Path) -> None:
    faults.add(CallRule((Call.READ, Call.WRITE), str(tmp_path), Action.SHORTEN, 1000))
    found = outcomes(faults, tmp_path)
    assert (found["WRITE"], found["READ"]) == (["1000"] * 3, ["1000"] * 2)


@needs_compiler
def test_a_signal_ends_the_process_before_the_call(faults: FaultyCalls, tmp_path: Path) -> None:
    faults.add(CallRule((Call.RENAME,), str(tmp_path), Action.SIGNAL, 9))
    with pytest.raises(subprocess.CalledProcessError) as error:
        outcomes(faults, tmp_path)
    assert error.value.returncode == -9
    assert (tmp_path / "linked").exists() and not (tmp_path / "renamed").exists()


@needs_compiler
def test_a_call_comes_later(faults: FaultyCalls, tmp_path: Path) -> None:
    faults.add(CallRule((Call.SYNC,), str(tmp_path), Action.DELAY, 300))
    program = """
import os, sys, time
file = os.open(sys.argv[1], os.O_RDONLY)
began = time.monotonic()
os.fsync(file)
print("SYNC", time.monotonic() - began >= 0.3)
"""
    assert outcomes(faults, tmp_path, program) == {"SYNC": ["True"]}


def test_what_cannot_be_is_refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not missing():
        faults = FaultyCalls(library)
        with pytest.raises(ValueError, match="at most 207"):
            faults.add(CallRule((Call.READ,), "p" * 208, Action.FAIL, errno.EIO))
        for _ in range(16):
            faults.add(CallRule((Call.READ,), "nowhere", Action.FAIL, errno.EIO))
        with pytest.raises(ValueError, match="16 rules already"):
            faults.add(CallRule((Call.READ,), "nowhere", Action.FAIL, errno.EIO))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert missing() == "a C compiler (cc)"
    with pytest.raises(OSError, match="C compiler"):
        build(library / "new")
