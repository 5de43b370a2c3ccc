"""Lives under ``torchrun``: its workers run ``lives.py``, and it may be killed as they may."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from support.runs.lives import Life, read_progress, read_signpost

SCRIPT = Path(__file__).with_name("lives.py")
QUIET = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # the host's name need not resolve
    # torch hands restarted workers the dead round's store otherwise (docs/operations/settings.md).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def environment() -> dict[str, str]:
    """What a process of a life needs to know, in a process of its own."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, **QUIET, "PYTHONPATH": path}


def write_life(life: Life) -> str:
    """The life as a file for ``lives.py``; its path."""
    path = Path(life.directory) / "life.json"
    path.write_text(json.dumps(asdict(life)))
    return str(path)


class Torchrun:
    """One launcher with its workers. Leaving it kills both."""

    def __init__(self, life: Life, *, max_restarts: int = 0) -> None:
        self.life = life
        self.log = Path(life.directory) / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(life.world)]
        command += ["--max-restarts", str(max_restarts), "--monitor-interval", "0.1"]
        command += [str(SCRIPT), write_life(life)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment(), stdout=log, stderr=log, start_new_session=True
            )

    def round(self, number: int) -> str:
        """Where one round of workers leaves its signposts."""
        return f"{self.life.directory}/round-{number}"

    def workers(self, number: int = 0) -> list[int]:
        """The process numbers of a round's workers."""
        paths = sorted(Path(self.round(number)).glob("pid-*"))
        return [int(path.read_text() or 0) for path in paths]

    def wait_progress(self, step: int, number: int = 0, timeout_s: float = 90.0) -> int:
        """Wait until all workers of a round have completed ``step``; what they have completed."""
        deadline = time.monotonic() + timeout_s
        while (found := read_progress(self.round(number), self.life.world)) < step:
            assert time.monotonic() < deadline, f"step {found} of {step}:\n{self.tail()}"
            assert self.process.poll() is None, f"torchrun ended:\n{self.tail()}"
            time.sleep(0.02)
        return found

    def restored(self, number: int = 0, timeout_s: float = 90.0) -> tuple[int, str]:
        """(step, source) that a round went on from; AssertionError when any element was wrong."""
        paths = [Path(self.round(number)) / f"restored-{r}" for r in range(self.life.world)]
        deadline = time.monotonic() + timeout_s
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, f"no restore in time:\n{self.tail()}"
            assert self.process.poll() is None, f"torchrun ended:\n{self.tail()}"
            time.sleep(0.02)
        reports = [path.read_text().split(" ", 2) for path in paths]
        assert all(wrong == "[]" for _, _, wrong in reports), reports
        assert len({step for step, _, _ in reports}) == 1, reports
        return int(reports[0][0]), reports[0][1]

    def progress(self, number: int = 0) -> int:
        """The last step that all workers of a round completed."""
        return read_progress(self.round(number), self.life.world)

    def phase(self, rank: int, number: int = 0) -> str:
        """What a worker is doing."""
        return read_signpost(self.round(number), rank)[1]

    def wait_end(self, timeout_s: float = 60.0) -> int:
        """Wait until the launcher has ended; its exit code."""
        return self.process.wait(timeout_s)

    def tail(self) -> str:
        """The end of what launcher and workers printed."""
        return self.log.read_text(errors="replace")[-6000:]

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for directory in Path(self.life.directory).glob("round-*"):
            for path in directory.glob("pid-*"):
                with suppress(ProcessLookupError, ValueError):
                    end_worker(int(path.read_text()))


def is_worker(pid: int) -> bool:
    """Whether this process is a worker of ours that still runs."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return bytes(SCRIPT) in command and state != "Z"


def end_worker(pid: int) -> None:
    """SIGKILL a worker, if that process number is still one's."""
    if is_worker(pid):
        os.kill(pid, signal.SIGKILL)
