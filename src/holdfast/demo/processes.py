"""Start the demo's trainers, kill what is to be killed, and leave nothing behind.

Every process of a run has the run's own arena directory in its environment: torchrun, its
trainers and the keeper they start. So all of them can be found, and nobody else's.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

#: A restart was once seen to fail its first rendezvous and to succeed at the next.
MAX_RESTARTS = 5
#: If even our own end is violent, a keeper without trainers goes by itself after this long.
KEEPER_IDLE_S = 120
#: How agents meet. Without a word for 2 s four times a host is lost (torchrun's own: 5 s, three
#: times), and once there are enough hosts others are waited for 3 s (30 s).
RENDEZVOUS = "is_host=0,keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=3"
_SOURCE = str(Path(__file__).resolve().parents[2])
_FOREIGN = ("HOLDFAST_", "TORCHELASTIC_", "MASTER_", "PET_")


def start_torchrun(
    module: str, arguments: Sequence[str], *, ranks: int, arena: Path, log: Path
) -> subprocess.Popen[bytes]:
    """``torchrun`` with ``ranks`` trainers on this host; all they print goes to ``log``."""
    options = ["--standalone", "--nproc-per-node", str(ranks)]
    return _start([*options, *_ways(module, arguments)], _environment(arena), log)


def start_agent(
    module: str,
    arguments: Sequence[str],
    *,
    host: str,
    most: int,
    endpoint: str,
    arena: Path,
    log: Path,
) -> subprocess.Popen[bytes]:
    """The ``torchrun`` of one simulated host: one trainer, in a run of 1 to ``most`` hosts.

    ``endpoint`` is where the agents meet; who listens there is on none of the hosts.
    """
    options = ["--nnodes", f"1:{most}", "--nproc-per-node", "1", "--rdzv-id", "demo"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    options += ["--rdzv-conf", RENDEZVOUS, "--monitor-interval", "0.1"]
    environment = _environment(arena) | {"HOLDFAST_HOST_ID": host}
    return _start([*options, *_ways(module, arguments)], environment, log)


def _ways(module: str, arguments: Sequence[str]) -> list[str]:
    common = ["--local-addr", "127.0.0.1", "--max-restarts", str(MAX_RESTARTS)]
    return [*common, "--module", module, *arguments]


def _start(options: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C is for us, and we end them in order
        )


def _environment(arena: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    path = os.pathsep.join([_SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {
        "HOLDFAST_ARENA_DIR": str(arena),
        "HOLDFAST_KEEPER_IDLE_S": str(KEEPER_IDLE_S),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # the host's name need not resolve
        # torchrun gives every round of trainers the same store, with the dead round's addresses
        # still in it. A rank that reads one before its successor has overwritten it is refused, or
        # waits in init_process_group for ever (torch 2.13, busy cores: 8 of 12 restarts; with a
        # store for each round none of 60).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # its warnings would bury the traceback one looks for
    }


def kill_one(pid: int, arena: Path) -> bool:
    """SIGKILL to one process of this arena; whether there was one."""
    held = _open(pid, arena)
    if held is None:
        return False
    signal.pidfd_send_signal(held, signal.SIGKILL)
    os.close(held)
    return True


def kill_all(*arenas: Path) -> list[str]:
    """SIGKILL to every process of these arenas, launchers first; the command lines of the killed.

    All are signalled before any is waited for. When it returns none of them runs.
    """
    killed = []
    while found := [one for arena in arenas for one in _processes(arena)]:
        for _, held, command in found:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(held, signal.SIGKILL)
                killed.append(command)
        for _, held, _ in found:
            _wait(held, 10.0)
            os.close(held)
    return killed


def ask_where(arena: Path, module: str) -> None:
    """Have the trainers write their stacks into the log."""
    for _, held, command in _processes(arena):
        if module in command and "torch.distributed.run" not in command:
            signal.pidfd_send_signal(held, signal.SIGUSR1)
        os.close(held)
    time.sleep(0.5)  # they write at once, but we cannot know when


def wait_for_end(arena: Path, *, timeout_s: float) -> list[str]:
    """Wait until no process of this arena runs; the command lines of those that still do."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = _processes(arena)
        for _, held, _ in found:
            os.close(held)
        if not found or time.monotonic() > deadline_s:
            return [command for _, _, command in found]
        time.sleep(0.05)


def remove_arena(arena: Path) -> bool:
    """Remove the run's shared memory; whether there was any."""
    was_there = arena.exists()
    shutil.rmtree(arena, ignore_errors=True)
    return was_there


def _processes(arena: Path) -> list[tuple[int, int, str]]:
    """(number, descriptor, command line) of all processes of this arena, oldest first."""
    numbers = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    found = [(pid, held) for pid in numbers if (held := _open(pid, arena)) is not None]
    return [(pid, held, _text(pid, "cmdline").strip()) for pid, held in found]


def _open(pid: int, arena: Path) -> int | None:
    """A descriptor of the process, whose number cannot pass to another while it is looked at."""
    try:
        held = os.pidfd_open(pid)
    except OSError:
        return None
    settings = _text(pid, "environ").split()
    if any(s == f"HOLDFAST_ARENA_DIR={arena}" for s in settings) and not _wait(held, 0.0):
        return held
    os.close(held)
    return None


def _text(pid: int, name: str) -> str:
    """A file of the process in /proc, its parts divided by blanks; empty when it has ended."""
    try:
        data = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return ""
    return data.replace(b"\0", b" ").decode(errors="replace")


def _wait(held: int, timeout_s: float) -> bool:
    """Whether the process has ended within ``timeout_s``."""
    poll = select.poll()
    poll.register(held, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
