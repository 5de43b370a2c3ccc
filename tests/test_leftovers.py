"""The net under the other tests: a forgotten keeper is found, and nobody else's is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.runs.leftovers import end_keepers
from support.servers.object_servers import ObjectServer, free_ports


@contextmanager
def _idle_process(*arguments: str, arena_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    program = "import signal; print(flush=True); signal.pause()"
    environment = {**os.environ, "HOLDFAST_ARENA_DIR": str(arena_dir)}
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        yield process
        process.kill()


def test_a_keeper_of_this_arena_is_killed_and_named(arena_dir: Path) -> None:
    options = ("holdfast.keeper", "--arena", str(arena_dir / "holdfast-0" / "run@host"))
    with _idle_process(*options, arena_dir=arena_dir) as keeper:
        (left,) = end_keepers(arena_dir, grace_s=0)
        assert keeper.wait(timeout=10) == -signal.SIGKILL
        assert left.startswith(f"{keeper.pid}: ")


def test_a_keeper_of_another_arena_and_other_processes_are_left_alone(
    arena_dir: Path, tmp_path: Path
) -> None:
    options = ("holdfast.keeper", "--arena", str(tmp_path / "holdfast-0" / "run@host"))
    with (
        _idle_process(*options, arena_dir=arena_dir) as other_keeper,
        _idle_process("trainer", arena_dir=arena_dir) as trainer,
    ):
        assert end_keepers(arena_dir, grace_s=0) == []
        assert other_keeper.poll() is None
        assert trainer.poll() is None


def test_settings_of_the_outer_environment_do_not_reach_a_test(arena_dir: Path) -> None:
    settings = {name: value for name, value in os.environ.items() if name.startswith("HOLDFAST_")}
    assert settings == {"HOLDFAST_ARENA_DIR": str(arena_dir)}


#: Answers, and has started a process that left its group, as the servers of Swift do.
_SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
address = "127.0.0.1", int(sys.argv[1])
http.server.HTTPServer(address, http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_of_a_server_of_objects_that_is_killed_no_process_is_left(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", _SERVER, str(port)]
    server = ObjectServer("a server", command, port, tmp_path)
    server.start()
    assert len(server.processes()) == 2
    server.kill()
    assert server.processes() == []
