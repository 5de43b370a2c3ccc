"""What the documents show, runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.project.code_blocks import PROJECT, Block, blocks, name_of, pages
from support.runs.launch import run_ranks

PAGES = {name_of(page): blocks(page) for page in pages()}
DIRECTIVES = ("not run:", "on ", "file:", "before:")


def _runs(found: list[Block]) -> list[Block]:
    return [block for block in found if block.is_run]


def _needs_processes(found: list[Block]) -> bool:
    return any(block.language == "sh" for block in _runs(found))


ALONE = [
    pytest.param(name, marks=[pytest.mark.slow] if _needs_processes(found) else [], id=name)
    for name, found in PAGES.items()
    if any(not block.ranks for block in _runs(found))
]
ON_RANKS = [block for found in PAGES.values() for block in _runs(found) if block.ranks]


@pytest.mark.parametrize("name", PAGES)
def test_every_code_block_runs_or_says_why_not(name: str) -> None:
    for block in PAGES[name]:
        where = f"{name}:{block.line}"
        reason = block.said("not run:")
        assert reason != "", f"{where}: not run, and no reason given"
        if block.is_code:
            unknown = [d for d in block.directives if not d.startswith((*DIRECTIVES, "Generated"))]
            assert not unknown or reason, f"{where}: what is meant by {unknown}?"
            assert block.said("file:") is None or block.language == "python", where


@pytest.mark.parametrize("name", PAGES)
def test_what_is_shown_as_json_is_json(name: str) -> None:
    for block in PAGES[name]:
        if block.language == "json":
            json.loads(block.text)


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("name", ALONE)
def test_the_blocks_of_a_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in PAGES[name]:
        if not block.is_run or block.ranks:
            continue
        file = block.said("file:")
        if file is not None:
            (tmp_path / file).write_text(block.text)
        elif block.language == "sh":
            _shell(block, tmp_path)
        else:
            _python(block, names)


def _python(block: Block, names: dict[str, Any]) -> None:
    exec(block.said("before:") or "", names)
    exec(block.compiled(), names)


def _shell(block: Block, directory: Path) -> None:
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(PROJECT / "src")
    environment["HOME"] = str(directory)  # whatever a page tells its reader to install
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout}\n{done.stderr[-4000:]}"


@pytest.mark.slow
def test_the_blocks_for_several_ranks_run(tmp_path: Path) -> None:
    """All in one launch: each block makes its own group, as it would under torchrun."""
    assert {block.ranks for block in ON_RANKS} == {4}
    run_ranks(4, _run_on_a_rank, ON_RANKS, str(tmp_path), [_free_port() for _ in ON_RANKS])


def _run_on_a_rank(
    rank: int, world: int, found: list[Block], directory: str, ports: list[int]
) -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    for number, (block, port) in enumerate(zip(found, ports, strict=True)):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        own = Path(directory, str(number))
        own.mkdir(exist_ok=True)
        os.chdir(own)
        print(f"{block.page}:{block.line}")
        _python(block, {"__name__": "__main__"})
        if dist.is_initialized():
            dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
