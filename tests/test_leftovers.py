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
