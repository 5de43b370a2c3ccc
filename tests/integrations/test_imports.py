"""Each adapter imports its own framework and no other; their pages show the scripts that run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integrations.choose import choose
from integrations.real_runs import ALONE
from support.project.code_blocks import PROJECT

FRAMEWORKS = (
    "transformers",
    "accelerate",
    "lightning",
    "deepspeed",
    "torchtitan",
    "megatron",
    "ray",
    "torchft",
)
#: What an adapter brings into memory beside its own framework, by that framework.
BROUGHT = {"transformers": {"transformers", "accelerate"}, "accelerate": {"accelerate"}}
SCRIPTS = {
    "transformers": "trainer_fit.py",
    "accelerate": "accelerate_loop.py",
    "lightning": "lightning_fit.py",
    "fabric": "fabric_loop.py",
    "torchtitan": "torchtitan_llama.py",
    "deepspeed": "deepspeed_loop.py",
}
#: Where a page or a framework has another name than the script.
PAGES = {"fabric": "lightning", "transformers": "trainer-of-transformers"}
PARTS_OF = {"fabric": "lightning"}
#: What lets a script run on a CPU, before it; see torchtitan_on_cpu.py.
HELP = {
    "torchtitan": "from integrations import torchtitan_on_cpu as cpu; cpu.say_losses(); ",
}
#: Scripts that need more than a root; the tests of their adapters run them.
MORE_SCRIPTS = {
    "megatron": "megatron_loop.py",
    "ray": "ray_train.py",
    "torchft": "torchft_loop.py",
}


def loaded_by(code: str) -> set[str]:
    """Returns the frameworks, and torch, that a process has loaded after running ``code``."""
    found = f"import json, sys; {code}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
    return {*FRAMEWORKS, "torch"} & set(json.loads(done.stdout.splitlines()[-1]))


def test_the_package_imports_no_framework() -> None:
    assert loaded_by("import holdfast, holdfast.integrations") == set()
    assert loaded_by("import holdfast.integrations.seam") == {"torch"}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_adapter_imports_its_own_framework_and_no_other(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: make integrations")
    found = loaded_by(f"import holdfast.integrations.{name}")
    assert found <= BROUGHT.get(name, {name}) | {"torch"} and name in found


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE_SCRIPTS])
def test_a_page_shows_the_script_that_runs(name: str) -> None:
    file = {**SCRIPTS, **MORE_SCRIPTS}[name]
    script = (PROJECT / "examples" / "integrations" / file).read_text()
    shown = script.split("from __future__ import annotations\n\n", 1)[1].strip()
    assert shown in (PROJECT / "docs" / "guides" / f"{PAGES.get(name, name)}.md").read_text()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_a_page_goes_on_with_the_same_losses(name: str, tmp_path: Path) -> None:
    framework = PARTS_OF.get(name, name)
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}: make integrations")
    script = PROJECT / "examples" / "integrations" / SCRIPTS[name]
    command = [sys.executable, str(script)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    options |= {"stderr": subprocess.DEVNULL, "cwd": tmp_path}
    if name in ("torchtitan", "deepspeed"):
        options["env"] = os.environ | ALONE
    if name in HELP:
        code = (
            f"import runpy, sys; sys.path.append({str(Path(__file__).parents[1])!r}); {HELP[name]}"
        )
        code += f"sys.argv[:] = [{str(script)!r}, sys.argv[1]]; runpy.run_path({str(script)!r})"
        command = [sys.executable, "-c", code]
    whole = subprocess.run([*command, str(tmp_path / "whole")], check=True, **options)
    losses = [line for line in whole.stdout.splitlines() if line[:1].isdigit()]
    first: Any = subprocess.Popen([*command, str(tmp_path / "run")], **options)
    said = []
    for line in first.stdout:
        said.append(line.strip())
        if line.startswith("17 "):
            os.kill(first.pid, signal.SIGKILL)
    first.stdout.close()
    first.wait()
    again = subprocess.run([*command, str(tmp_path / "run")], check=True, **options)
    said += again.stdout.splitlines()
    assert {line for line in said if line[:1].isdigit()} == set(losses)
    assert len(losses) >= 30


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_without_a_framework_the_error_says_what_to_install(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is there")
    code = f"import holdfast.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UsageError" in done.stderr and f"pip install 'holdfast[{name}]'" in done.stderr


def test_a_seed_chooses_the_same_three_frameworks_again() -> None:
    chosen = [choose(seed) for seed in range(40)]
    assert all(len(set(one)) == 3 for one in chosen)
    assert [choose(seed) for seed in range(40)] == chosen
    reached = {name.removeprefix("integrations-") for one in chosen for name in one}
    assert reached >= {*FRAMEWORKS}, "each is chosen some time"
