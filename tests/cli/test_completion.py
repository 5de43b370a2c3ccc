"""``holdfast completion``: what may stand at the cursor, in every shell the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.catalogue import catalogue
from holdfast.cli import COMMANDS, checkpoints
from holdfast.cli.completion import SCRIPTS, complete
from support.checkpoints.commands import SOURCE, Out, error_of, json_of, text_of
from support.checkpoints.roots import fill
from support.servers.bucket_model import World, model_store


def test_commands_are_completed() -> None:
    assert complete([]) == complete([""]) == list(COMMANDS)
    assert complete(["d"]) == [name for name in COMMANDS if name.startswith("d")]
    assert complete(["--v"]) == ["--version"]
    assert complete(["fly", ""]) == []


def test_options_of_the_command_are_completed_once() -> None:
    assert complete(["diff", "--st"]) == ["--step"]
    assert "--json" in complete(["diff", "a", "-"])
    assert "--json" not in complete(["diff", "a", "--json", "-"])
    assert complete(["completion", ""]) == list(SCRIPTS)


def test_steps_are_completed_from_the_root(fallen_back: Path) -> None:
    root = str(fallen_back)
    assert complete(["show", root, "--step", ""]) == ["10", "20", "1-20", "1-30"]
    assert complete(["show", root, "--json", "--step", "1-"]) == ["1-20", "1-30"]


def test_the_other_step_is_one_of_the_other_root(root: Path, fallen_back: Path) -> None:
    one, other = str(root), str(fallen_back)
    assert complete(["diff", one, other, "--other-step", "1-"]) == ["1-20", "1-30"]
    assert complete(["diff", one, "--other-step", ""]) == ["10", "20"]
    assert complete(["diff", one, other, "--step", ""]) == ["10", "20"]


def test_leaves_are_completed_from_the_step_that_was_named(root: Path) -> None:
    assert complete(["show", str(root), "mod"]) == ["model.bias", "model.weight"]
    assert complete(["dump", "--step", "10", str(root), "model.w"]) == ["model.weight"]
    assert complete(["diff", str(root), "--leaf", ""]) == ["model.bias", "model.weight"]
    assert complete(["show", str(root), "--step", "77", ""]) == []


def test_where_a_file_belongs_or_nothing_is_known_the_shell_is_left_to_offer_files(
    tmp_path: Path,
) -> None:
    assert complete(["ls", ""]) == []
    assert complete(["show", str(tmp_path / "no"), ""]) == []
    assert complete(["show", "--step", ""]) == []
    assert complete(["dump", "root", "leaf", "--out", ""]) == []
    assert complete(["ls", "root", "more", ""]) == []


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_printed_for_every_shell(shell: str, capsys: Out) -> None:
    script = text_of(capsys, "completion", shell)
    assert f"holdfast completion {shell}" in script
    assert json_of(capsys, "completion", shell) == {"shell": shell, "script": script}


def test_without_a_shell_there_is_nothing_to_print(capsys: Out) -> None:
    assert "bash, zsh, fish" in error_of(capsys, "completion", code=2)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which ``holdfast`` is this one."""
    directory = tmp_path / "bin"
    directory.mkdir()
    command = directory / "holdfast"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m holdfast.cli "$@"\n')
    command.chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def in_shell(shell: str, script: str, path: str) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [shell, "-c", script],
        env=os.environ | {"PYTHONPATH": SOURCE, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes(root: Path, path: str) -> None:
    script = f"""
        source <(holdfast completion bash)
        COMP_WORDS=(holdfast show {root} mod); COMP_CWORD=3
        _holdfast holdfast mod {root}; echo "${{COMPREPLY[@]}}"
        COMP_WORDS=(holdfast show --js); COMP_CWORD=2
        _holdfast holdfast --js show; echo "${{COMPREPLY[@]}}"
        complete -p holdfast
    """
    found = in_shell("bash", script, path)
    assert found[:3] == ["model.bias", "model.weight", "--json"]
    assert found[-3:] == ["-F", "_holdfast", "holdfast"]


def test_fish_completes(root: Path, path: str) -> None:
    script = f"""
        holdfast completion fish | source
        complete -C "holdfast show {root} mod"
        complete -C "holdfast show {root} --step "
    """
    assert in_shell("fish", script, path) == ["model.bias", "model.weight", "10", "20"]


def test_zsh_takes_the_script(path: str) -> None:
    script = """
        compdef() { print "$@" }
        source <(holdfast completion zsh)
        compadd() { shift; print -- "$@" }
        words=(holdfast ls --js); CURRENT=3
        _holdfast
    """
    assert in_shell("zsh", script, path) == ["_holdfast", "holdfast", "--json"]


def test_completing_loads_no_torch_and_no_numpy(root: Path) -> None:
    script = (
        "import sys; from holdfast.cli import main;"
        f"main(['completion', '--words', 'show', {str(root)!r}, 'mod']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(Path(holdfast.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["model.bias", "model.weight"])


def test_steps_of_a_bucket_are_completed_by_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    store = model_store(world, monkeypatch, tries_s=0.1)
    fill(store)
    expected = [str(one) for one in catalogue(store).generations]
    monkeypatch.setattr(checkpoints, "open_source", lambda _: store)
    world.log.clear()
    found = complete(["show", "s3://model/root", "--step", ""])
    assert len(found) == len(expected) > 2
    assert not [key for kind, key in world.log if kind == "GET" and "/manifests/" in key]
