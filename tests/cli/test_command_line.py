"""What holds for every command: help, errors, exit codes, progress, and no traces."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import errors
from holdfast.cli import BUG, COMMANDS, main, parser
from holdfast.cli.command import in_json
from holdfast.cli.output import SlowProgress
from support.checkpoints.commands import SOURCE, Out, json_of, text_of, tied_model
from support.runs.told import tell_sick_run


def test_the_command_line_loads_no_torch() -> None:
    script = (
        "import sys, holdfast.cli; holdfast.cli.main(['ls', '.']);assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": SOURCE}, timeout=60
    )
    assert done.returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: Out) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    examples = said.partition("example")[2].splitlines()[1:]
    assert any(f"holdfast {command}" in line for line in examples)
    assert "--json" in said


def test_the_exit_codes_in_the_help_are_those_of_the_errors(capsys: Out) -> None:
    main(["--help"])
    table = capsys.readouterr().out
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.HoldfastError):
            family = next(base for base in kind.__mro__ if "exit_code" in vars(base))
            (line,) = (
                line for line in table.splitlines() if line.strip().startswith(f"{kind.exit_code} ")
            )
            assert family is errors.HoldfastError or family.__name__ in line


def test_a_holdfast_error_is_one_line_and_an_exit_code(tmp_path: Path, capsys: Out) -> None:
    assert main(["ls", str(tmp_path / "nowhere")]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"holdfast: NotFound: {tmp_path}/nowhere is not a directory\n"


def test_with_json_an_error_is_an_object_too(tmp_path: Path, capsys: Out) -> None:
    document = json_of(capsys, "ls", tmp_path, code=3)
    assert document["error"]["class"] == "NotFound"
    assert document["error"]["fields"] == {"root": str(tmp_path)}


@pytest.mark.parametrize("argv", [[], ["fly"], ["ls"], ["ls", "--hover", "x"]])
def test_a_wrong_call_exits_with_2(argv: list[str], capsys: Out) -> None:
    assert main(argv) == 2
    assert "usage: holdfast" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: Out) -> None:
    assert text_of(capsys, "--version") == f"holdfast {holdfast.__version__}\n"


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.ls.run", interrupted)
    assert main(["ls", "."]) == 130
    assert capsys.readouterr().err == "holdfast: interrupted\n"


def test_a_reader_that_goes_away_causes_no_trace(fallen_back: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "ls", str(fallen_back)],
        env=os.environ | {"PYTHONPATH": SOURCE},
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", ["doctor", "report", "events", "top"])
def test_a_full_disk_and_a_closed_stream_are_no_fault_of_ours(command: str, tmp_path: Path) -> None:
    call = f"{sys.executable} -m holdfast.cli {command} {tell_sick_run(tmp_path)}"
    full = subprocess.run(f"{call} > /dev/full", shell=True, stderr=subprocess.PIPE, text=True)
    assert (full.returncode, full.stderr) == (
        5,
        "holdfast: the output could not be written: No space left on device\n",
    )
    closed = subprocess.run(f"{call} >&-", shell=True, stderr=subprocess.PIPE, text=True)
    assert closed.returncode in (0, 11) and not closed.stderr


def test_an_error_is_not_told_on_stdout_where_stderr_is_closed(tmp_path: Path) -> None:
    call = f"{sys.executable} -m holdfast.cli ls {tmp_path / 'missing'} 2>&-"
    done = subprocess.run(call, shell=True, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (3, "")


def test_quick_work_shows_no_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with SlowProgress("reading") as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""


def test_slow_work_shows_a_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setattr("holdfast.cli.output.QUIET_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes anything for a terminal
    with SlowProgress("reading") as progress:
        progress(1, 2)
    said = capsys.readouterr()
    assert "reading" in said.err
    assert said.out == ""


def test_nobody_watching_means_no_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr("holdfast.cli.output.QUIET_S", 0.0)
    with SlowProgress("reading") as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""


def test_the_parser_names_every_command() -> None:
    listed = parser().format_help().partition("COMMAND\n")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^    ([a-z]+)", listed, re.MULTILINE)) == COMMANDS


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["shwo", "x"], "did you mean show?"),
        (["fly"], "`holdfast --help` lists the commands"),
        (["ls", "x", "--jsn"], "did you mean --json?"),
        (["diff", "x", "--other-setp=3"], "did you mean --other-step?"),
        (["ls", "x", "y"], "y: not an option or argument of this command"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_likeliest(
    argv: list[str], hint: str, capsys: Out
) -> None:
    assert main(argv) == 2
    assert hint in capsys.readouterr().err


def test_a_fault_of_ours_shows_where_and_is_not_taken_for_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    def broken(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("holdfast.cli.diff.run", broken)
    assert main(["diff", "."]) == BUG
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said
    assert "a fault in holdfast" in said


def test_only_the_command_that_is_called_is_loaded() -> None:
    script = (
        "import sys; from holdfast.cli import main; main(['completion', 'bash']);"
        "sys.exit(any(name in sys.modules for name in ('numpy', 'rich', 'msgspec', 'torch')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": SOURCE},
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
    assert done.returncode == 0


def test_json_is_written_so_that_every_reader_takes_it() -> None:
    document = {("a", 1): float("nan"), "b": [float("-inf"), 1.5, b"x"], "c": {"d": None}}
    assert in_json(document) == {
        "('a', 1)": "nan",
        "b": ["-inf", 1.5, "b'x'"],
        "c": {"d": None},
    }


def test_a_name_the_terminal_cannot_write_does_not_end_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "ls", str(tmp_path / "läufe")],
        env=os.environ | {"PYTHONPATH": SOURCE, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert b"l\\xe4ufe is not a directory" in done.stderr


DOCUMENT = Path(__file__).parents[2] / "docs" / "operations" / "command-line.md"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_is_documented(name: str) -> None:
    section = DOCUMENT.read_text().partition(f"## holdfast {name}\n")[2].partition("\n## ")[0]
    (commands,) = (each for each in parser((name,))._actions if each.dest == "command")
    assert commands.choices is not None
    command: argparse.ArgumentParser = dict(commands.choices)[name]
    options = {text for action in command._actions for text in action.option_strings}
    own = {text for text in options if text.startswith("--")} - {"--help", "--json"}
    assert [option for option in sorted(own) if not re.search(rf"{option}\b", section)] == []
    assert "JSON" in section or "```json" in section or "`--json`" in section


def test_the_documented_exit_codes_are_those_of_the_help(capsys: Out) -> None:
    main(["--help"])
    printed = capsys.readouterr().out.partition("exit codes:\n")[2].splitlines()
    said = dict(line.split(maxsplit=1) for line in printed if line.split()[0].isdecimal())
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert {code: text.replace("`", "") for code, text in rows} == said


def test_the_documented_json_is_what_is_printed(by_ranks: Path, root: Path, capsys: Out) -> None:
    holdfast.save(str(root), {"m": tied_model(), "tokens": 7}, step=30)
    holdfast.save(str(root), {"model": torch.nn.Linear(2000, 300), "tokens": 8}, step=40)
    (root / "manifests" / "9-9.json").write_text("broken")
    weight = "model.blocks.0.up.weight"
    printed: dict[str, list[tuple[str | Path, ...]]] = {
        "ls": [("ls", root)],
        "show": [
            ("show", root, "--step", "30"),
            ("show", by_ranks / "tp", weight),
            ("show", by_ranks / "tp", "--for", "dp=2"),
        ],
        "diff": [("diff", root, "--step", "10")],
        "dump": [("dump", by_ranks / "tp", weight)],
        "verify": [("verify", root)],
    }
    for name, calls in printed.items():
        section = DOCUMENT.read_text().partition(f"## holdfast {name}\n")[2].partition("\n## ")[0]
        blocks = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
        code = {"diff": 1, "verify": 4}.get(name, 0)
        for block, call in zip(blocks, calls, strict=True):
            assert places(json.loads(block)) == places(json_of(capsys, *call, code=code))


def places(value: Any, path: str = "") -> set[str]:
    """All places that have a name, except among plain values, which are the user's."""
    if isinstance(value, dict) and path != ".values":
        inner = ((f"{path}.{key}", item) for key, item in value.items())
        return {place for at, item in inner for place in places(item, at)} | {path}
    if isinstance(value, list):
        return {place for item in value for place in places(item, path)} | {path}
    return {path}
