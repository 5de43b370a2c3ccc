"""Run one visit: a system saves in a process of its own, watched from outside.

A process for each system and round keeps their libraries, threads and memory apart, so that the
memory is the system's own, and one that crashes, hangs or eats all memory costs its row only. The
watcher reads the resident memory a hundred times a second while the visit asks for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kit import disk, machine, processes
from benchmarks.kit.disk import MEMORY
from benchmarks.kit.results import PROJECT

SOURCES = [str(PROJECT), str(PROJECT / "src")]
SAMPLE_S = 0.01
LEAST_FREE_BYTES = 600 << 20


@dataclass(slots=True)
class Outcome:
    """What came of a visit: its result or why there is none, and peaks of memory by window."""

    result: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    elapsed_s: float = 0.0


class Watched:
    """A visit under way."""

    def __init__(self, python: str, spec: dict[str, Any], scratch: Path, arena: Path) -> None:
        self.outcome = Outcome()
        self._window = ""
        self._rest = b""
        self._log = scratch / "log"
        self._read, write = os.pipe()
        spec = {**spec, "root": str(scratch / "root"), "answer": write, "family": os.getpid()}
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [*SOURCES, os.environ.get("PYTHONPATH")])),
            "PYTHONWARNINGS": "ignore",
            "HOLDFAST_ARENA_DIR": str(arena),
            **spec["environment"],
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.save.visit", json.dumps(spec)],
                pass_fds=[write],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=scratch,
            )
        os.close(write)

    def follow(self, deadline_s: float) -> Outcome:
        """Until it answered and ended, or has to be ended."""
        began, looked = time.monotonic(), 0.0
        while self._process.poll() is None:
            self._hear(SAMPLE_S)
            self._sample()
            now = time.monotonic()
            if now - began > deadline_s:
                self._give_up(f"no answer within {deadline_s:.0f} s")
            elif now - looked > 0.1:
                looked = now
                if machine.available_bytes() < LEAST_FREE_BYTES:
                    self._give_up("the memory of the machine was used up")
        self._hear(0)
        os.close(self._read)
        outcome = self.outcome
        if not outcome.result and not outcome.failed:
            outcome.failed = f"ended with {self._process.returncode}: {self._last_words()}"
        outcome.elapsed_s = time.monotonic() - began
        return outcome

    def _give_up(self, why: str) -> None:
        self.outcome.failed = self.outcome.failed or why
        self._process.kill()
        self._process.wait()

    def _hear(self, patience_s: float) -> None:
        while select.select([self._read], [], [], patience_s)[0]:
            received = os.read(self._read, 1 << 20)
            if not received:
                time.sleep(patience_s)
                return
            *lines, self._rest = (self._rest + received).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            patience_s = 0

    def _take(self, message: dict[str, Any]) -> None:
        if "window" in message:
            self._sample()
            self._window = message["window"]
        elif "failed" in message:
            self.outcome.failed = message["failed"]
        else:
            self.outcome.result = message

    def _sample(self) -> None:
        if self._window:
            peaks = self.outcome.peaks.setdefault(self._window, {})
            for kind, found in processes.memory(self._process.pid).items():
                peaks[kind] = max(peaks.get(kind, 0), found)

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line]
        return lines[-1][:300] if lines else "it said nothing"


def visit(python: str, spec: dict[str, Any], parent: Path, *, deadline_s: float) -> Outcome:
    """Run one visit in a fresh directory and a fresh arena; nothing is left of it."""
    with machine.alone():
        return _visit(python, spec, parent, deadline_s)


def _visit(python: str, spec: dict[str, Any], parent: Path, deadline_s: float) -> Outcome:
    scratch = Path(tempfile.mkdtemp(prefix="visit-", dir=parent)).resolve()
    arena = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=MEMORY))
    try:
        (scratch / "root").mkdir()
        outcome = Watched(python, spec, scratch, arena).follow(deadline_s)
        if keep := os.environ.get("HOLDFAST_BENCH_LOGS"):
            with contextlib.suppress(OSError):
                shutil.copy(scratch / "log", Path(keep) / f"{spec['system'].replace('/', '-')}.log")
        return outcome
    finally:
        # After an answer the system's own processes have a moment to end by themselves.
        processes.end_descendants(10.0 if sys.exc_info()[0] is None else 0.0)
        shutil.rmtree(arena, ignore_errors=True)
        disk.remove(scratch)
