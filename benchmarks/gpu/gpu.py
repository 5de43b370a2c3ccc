"""Find out in nine minutes what only a machine with an accelerator can tell.

Each section runs in a process of its own, within its time; what fails or hangs stops no other.
Every finding is one line of JSON. ``--resume FILE`` appends them to a file and leaves out the
sections that ended there, so a day may be cut in pieces. ``--simulated`` runs the same on the
simulated device of ``tests/device``, where counts mean something and figures do not.

Only the source tree, torch, numpy, xxhash, msgspec, rich and pytest are needed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu import findings
from benchmarks.gpu.findings import Finding
from benchmarks.gpu.sections import MINUTES, SECTIONS, Section
from benchmarks.kit import machine, results
from benchmarks.kit.options import Parser

_PATHS = [str(results.PROJECT / name) for name in ("", "src", "tests")]
#: What the processes of all sections have imported already.
_LOADED_BEFORE = ["torch", "benchmarks.gpu.steps", "benchmarks.gpu.hardware"]
#: Parts of sections that need a process of their own, by the name given to ``--body``.
_BODIES = {
    "pin": "hardware:pin_file",
    "call": "hardware:call_beside",
    "capture": "suites:capture_on_this_thread",
}
_ENDING_S = 2.0
_NOBODY = {"device": "", "torch": "", "driver": ""}


def main(arguments: Sequence[str]) -> int:
    """1 where a section failed or ran out of time, or a target was missed; else 0."""
    options = _parse(arguments)
    _make_importable()
    if options.list:
        print("\n".join(f"{one.name:18}{one.budget_s:4.0f} s  {one.caption}" for one in SECTIONS))
        return 0
    if options.body:
        return _run_body(options.body, options.simulated)
    found = findings.read(Path(options.resume)) if options.resume else []
    ended = findings.ended_sections(found)
    wanted = [
        one
        for one in SECTIONS
        if one.name not in ended and (not options.only or one.name in options.only)
    ]
    kept = [one for one in found if one.section in ended]
    with _places(options.simulated):
        new = _run_all(wanted, options)
    _keep([*kept, *new], options)
    return int(any(one.met is False or one.value in ("failed", "out of time") for one in new))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = [one.name for one in SECTIONS]
    parser = Parser("gpu", __doc__)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these sections")
    parser.add_argument("--list", action="store_true", help="list the sections")
    parser.add_argument("--resume", metavar="FILE", help="go on where this file of findings ends")
    parser.add_argument("--simulated", action="store_true", help="on the simulated device")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"for all of it ({MINUTES:g})"
    )
    parser.add_argument("--body", nargs="+", help=argparse.SUPPRESS)
    return parser.parse(arguments)


def _make_importable() -> None:
    """Have this process, and those it starts, import from the source tree."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, *filter(None, before)])
    sys.path[:0] = [path for path in _PATHS if path not in sys.path]


@contextmanager
def _places(is_simulated: bool) -> Iterator[None]:
    """A directory in shared memory for all arenas, and one on the disk for all else that sections
    make; both are removed at the end, keepers and all.
    """
    directory = Path(tempfile.mkdtemp(prefix="hf-gpu-", dir="/dev/shm"))
    is_mounted = not is_simulated and _mount_larger(directory)
    before = {name: os.environ.pop(name) for name in list(os.environ) if name[:9] == "HOLDFAST_"}
    disk = Path(tempfile.mkdtemp(prefix="hf-gpu-"))
    before["TMPDIR"] = os.environ.get("TMPDIR", tempfile.gettempdir())
    os.environ.update(HOLDFAST_ARENA_DIR=str(directory), TMPDIR=str(disk))
    try:
        yield
    finally:
        _clear()
        if is_mounted:
            subprocess.run(["umount", str(directory)], check=False)
        for path in (disk, directory):
            shutil.rmtree(path, ignore_errors=True)
        del os.environ["HOLDFAST_ARENA_DIR"]
        os.environ.update(before)


def _mount_larger(directory: Path) -> bool:
    """Where shared memory is small, as in a container, mount more at ``directory``, if allowed."""
    wanted_bytes = int(0.8 * machine.available_bytes())
    if shutil.disk_usage(directory).free >= wanted_bytes:
        return False
    words = ["mount", "-t", "tmpfs", "-o", f"size={wanted_bytes}", "tmpfs", str(directory)]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def _clear() -> None:
    """End the keepers of a section, and give back the memory and the disk that it took."""
    from holdfast.testing.runs.processes import HeldProcesses, find

    directory, disk = Path(os.environ["HOLDFAST_ARENA_DIR"]), Path(os.environ["TMPDIR"])
    keepers = HeldProcesses(one.pid for one in find(lambda one: one.is_keeper(directory)))
    keepers.kill()
    for path in (*directory.iterdir(), *disk.iterdir()):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# ── sections ─────────────────────────────────────────────────────────────────────────────────


def _run_all(wanted: list[Section], options: argparse.Namespace) -> list[Finding]:
    """Run the sections one after the other; time that one leaves over goes to the next."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_LOADED_BEFORE)
    until_s = time.monotonic() + 60 * options.minutes
    found: list[Finding] = []
    with open(options.resume or os.devnull, "a", encoding="utf-8") as file:

        def take(finding: Finding) -> None:
            found.append(finding)
            for output in (sys.stdout, file):
                print(finding.line(), file=output, flush=True)

        for number, section in enumerate(wanted):
            later_s = sum(one.budget_s for one in wanted[number + 1 :])
            left_s = until_s - time.monotonic()
            seconds = max(min(section.budget_s, left_s), left_s - later_s)
            _run_one(context, section, seconds, options.simulated, take)
            _clear()
    return found


def _run_one(
    context: Any,
    section: Section,
    seconds: float,
    is_simulated: bool,
    take: Callable[[Finding], None],
) -> None:
    """Run one section; take its findings as they come, and one more about how it ended."""
    about = dict(_NOBODY)
    if seconds < _ENDING_S:
        take(findings.ending(section.name, "out of time", "no time was left for it", about))
        return
    here, there = context.Pipe(duplex=False)
    process = context.Process(
        target=_section, args=(section, seconds, is_simulated, there), name=section.name
    )
    process.start()
    there.close()
    until_s = time.monotonic() + seconds
    how, note = "failed", "its process ended without a word"
    try:
        while here.poll(max(0.0, until_s - time.monotonic())):
            said = here.recv()
            if isinstance(said, Finding):
                about = {key: getattr(said, key) for key in _NOBODY}
                take(said)
            else:
                how, note = said
        if how == "failed":
            how, note = "out of time", f"not done after {seconds:.0f} s"
    except EOFError:
        pass  # the process has closed its end
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    take(findings.ending(section.name, how, note, about))


def _section(section: Section, seconds: float, is_simulated: bool, there: Connection) -> None:
    """In the section's own process: find, report, and say how it ended."""
    from benchmarks.gpu.lab import OutOfTime, Unseen, make_lab

    os.setsid()  # so that whatever it starts can be ended with it
    try:
        lab = make_lab(section.name, seconds - _ENDING_S / 2, there.send, is_simulated=is_simulated)
        if lab.device_count() < section.devices:
            raise Unseen(f"there are fewer than {section.devices} accelerators")
        _named(section.place)(lab)
        there.send(("done", ""))
    except Unseen as reason:
        there.send(("unseen", str(reason)))
    except OutOfTime as reason:
        there.send(("out of time", str(reason)))
    except BaseException as error:
        traceback.print_exc()
        there.send(("failed", f"{type(error).__name__}: {error}"[:500]))
    there.close()
    os._exit(0)  # threads of a device that hangs hold nothing up


def _named(place: str) -> Callable[..., Any]:
    module, _, function = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"benchmarks.gpu.{module}"), function)
    return found


def _run_body(words: Sequence[str], is_simulated: bool) -> int:
    """A part of a section, in a process of its own: its last line is what it found."""
    from benchmarks.gpu.lab import make_lab

    lab = make_lab(words[0], 60.0, lambda _: None, is_simulated=is_simulated)
    print(_named(_BODIES[words[0]])(lab, *words[1:]), flush=True)
    sys.stderr.flush()
    os._exit(0)


# ── results ──────────────────────────────────────────────────────────────────────────────────


def _keep(found: list[Finding], options: argparse.Namespace) -> None:
    """Show a table; keep it where all of it is of a real device and nothing was left out."""
    if not any(one.device for one in found):
        raise SystemExit("this measures an accelerator, and there is none; --simulated tries it")
    print(findings.table(found))
    if options.simulated or options.only:
        return
    facts = machine.facts(results.PROJECT, ["torch", "numpy", "xxhash", "msgspec"])
    name = next((one.device for one in found if one.device), "none")
    facts["gpu"] = name
    kind = "gpu-" + "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
    text = f"{results.today()}: " + ", ".join(f"{k} {v}" for k, v in facts.items())
    lines = [{name: getattr(one, name) for name in Finding.__slots__} for one in found]
    results.keep(kind, facts, {"findings": lines}, f"{text}\n\n{findings.table(found)}")
