"""Makes system calls of real processes fail, stop short, take long or end the process.

A library is put before the C library of each process that is started with ``environment()``, and of
all that those start, a keeper too. Rules lie in a file that all of them map, so they may change
while the processes run, and calls are counted over all of them. Needs a C compiler.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from enum import IntEnum
from importlib import resources
from pathlib import Path

_RULES = 16
_PATH_BYTES = 208
_RULE = struct.Struct(f"<IIIIQQQQ{_PATH_BYTES}s")
_CALLS = struct.Struct("<I")
_COUNTS = struct.Struct("<QQ")
_COUNTS_AT = 32
_SOURCE = "faulty_calls.c"
_VARIABLE = "FAULTY_CALLS"


class Call(IntEnum):
    """A kind of system call: all functions of the C library that make it."""

    OPEN = 0
    READ = 1
    WRITE = 2
    SYNC = 3
    RENAME = 4
    LINK = 5
    REMOVE = 6
    ALLOCATE = 7
    TRUNCATE = 8
    MAKE_DIRECTORY = 9


class Action(IntEnum):
    """What happens to a call: the meaning of a rule's ``value``."""

    #: It is not made, and fails with ``value`` as errno.
    FAIL = 1
    #: It moves at most ``value`` bytes.
    SHORTEN = 2
    #: It is made ``value`` milliseconds later.
    DELAY = 3
    #: The signal ``value`` is sent to the process before it is made.
    SIGNAL = 4


@dataclass(frozen=True, slots=True)
class CallRule:
    """Applies ``action`` to calls of these kinds on files whose path contains ``path``.

    Of the calls that match, counted over all processes from 1, those from ``first`` to ``last``.
    For RENAME and LINK the path is the new one.
    """

    calls: tuple[Call, ...]
    path: str
    action: Action
    value: int
    first: int = 1
    last: int = 2**63

    def _packed(self) -> bytes:
        path = os.fsencode(self.path)
        if len(path) >= _PATH_BYTES:
            raise ValueError(f"the path has {len(path)} bytes, at most {_PATH_BYTES - 1} fit")
        bits = sum(1 << call for call in set(self.calls))
        counts = (self.first, self.last, 0, 0)
        return _RULE.pack(bits, self.action, self.value, 0, *counts, path)


class FaultyCalls:
    """Rules for the system calls of processes; ``directory``: where the library and rules lie.

    ``missing()`` says why this machine cannot have it.
    """

    def __init__(self, directory: Path) -> None:
        self._library = build(directory)
        self._file = directory / "rules"
        self._file.write_bytes(bytes(_RULES * _RULE.size))
        with self._file.open("r+b") as file:
            self._rules = mmap.mmap(file.fileno(), 0)
        self._count = 0

    def environment(self) -> dict[str, str]:
        """Return the variables that put a process under the rules."""
        before = os.environ.get("LD_PRELOAD", "")
        preloaded = f"{self._library}:{before}" if before else str(self._library)
        return {"LD_PRELOAD": preloaded, _VARIABLE: str(self._file)}

    def add(self, rule: CallRule) -> int:
        """Apply a rule from now on; return its number. ValueError: there are 16 already."""
        if self._count == _RULES:
            raise ValueError(f"there are {_RULES} rules already")
        number, packed = self._count, rule._packed()
        start = number * _RULE.size
        # The kinds of call come last: with them the rule begins to apply.
        self._rules[start + _CALLS.size : start + _RULE.size] = packed[_CALLS.size :]
        self._rules[start : start + _CALLS.size] = packed[: _CALLS.size]
        self._count += 1
        return number

    def remove(self, number: int) -> None:
        """Apply a rule no longer; its counts stay."""
        start = number * _RULE.size
        self._rules[start : start + _CALLS.size] = bytes(_CALLS.size)

    def seen(self, number: int) -> int:
        """Return how many calls matched a rule."""
        return int(_COUNTS.unpack_from(self._rules, number * _RULE.size + _COUNTS_AT)[0])

    def met(self, number: int) -> int:
        """Return to how many calls a rule was applied."""
        return int(_COUNTS.unpack_from(self._rules, number * _RULE.size + _COUNTS_AT)[1])


def missing() -> str:
    """Return what this machine lacks for ``FaultyCalls``; "" if nothing."""
    return "" if _compiler() else "a C compiler (cc)"


def build(directory: Path) -> Path:
    """Compile the library into ``directory``, once for each source; return its path. OSError."""
    source = resources.files(__package__).joinpath(_SOURCE).read_bytes()
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"faulty_calls-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if target.exists():
        return target
    compiler = _compiler()
    if compiler is None:
        raise OSError(f"{missing()} is needed to build {_SOURCE}")
    with tempfile.TemporaryDirectory(dir=directory) as work:
        text, made = Path(work, _SOURCE), Path(work, "made.so")
        text.write_bytes(source)
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(made), str(text), "-ldl"]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise OSError(f"{_SOURCE} does not compile:\n{done.stderr.decode(errors='replace')}")
        made.replace(target)
    return target


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))
