"""Write docs/integrations.md, the table of the adapters, from docs/integrations.toml: `make docs`.

Versions are those of the lists in tests/integrations and the bounds of pyproject.toml, costs those
of the newest results of `python -m benchmarks adapters`, losses those of
tests/integrations/losses.py. What is refused names words that occur in a test there. The page is
checked in, and tests/docs/test_integrations_page.py fails when it is not what this prints.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE, ROWS = HERE / "integrations.md", HERE / "integrations.toml"
TESTS = HERE.parent / "tests" / "integrations"
RESULTS = HERE.parent / "benchmarks" / "results"
COST = "python -m benchmarks adapters"

HEAD = f"""\
<!-- Generated from docs/integrations.toml by `make docs`: change that. -->
# Inside the frameworks people train with

An adapter for each, in `holdfast.integrations`: a module imports its framework and no other, and
`import holdfast` none. `make integrations-NAME` installs the version that is tested here beside a
pinned torch, and runs its tests in real processes on a CPU. `make integrations-kills` kills each
run at twenty places that a printed seed draws, and what it says after its restart is what an
unbroken run says, to the bit.

* *Cost*, by `{COST}`: the processor time that a step takes of the training thread
  with the adapter, to that with a `Checkpointer` put into the same loop by hand, and to the
  framework's alone; then the time of a whole step to that of the framework alone, on two cores,
  which also do the keeper's work. Ratios of medians; a snapshot after each step. The machine was
  shared: a few milliseconds more or less are noise, of which those below zero are the measure.
  *Adds* is the processor time of the adapter's own functions in a step, and what the `Checkpointer`
  below them takes more than one put in by hand, of that of the framework's step alone: medians, and
  an upper bound, as the counting is in it.
* *Held*, by the same: how much longer a step takes that saves, with the adapter and with the
  framework's own save of all of it, where it has one.
* *Tried* are the oldest and the newest version that have passed, which killed and resumed a run at
  least. Lower bounds are those of the extras.
* *Losses* are parts of a state that a test takes away from what an adapter keeps, one at a time:
  the start that follows is refused by name, or goes on otherwise than an unbroken run, which the
  tests see.
"""


def rows() -> dict[str, dict[str, Any]]:
    """All frameworks; stops at words of a refusal that are in no test."""
    found: dict[str, dict[str, Any]] = tomllib.loads(ROWS.read_text())
    tests = "\n".join(path.read_text() for path in sorted(TESTS.glob("*.py")))
    for name, row in found.items():
        for what, words in row["refused"]:
            if words not in tests:
                raise SystemExit(f"{ROWS.name}: {name}: no test has {words!r}, of {what!r}")
    return found


def tried(row: dict[str, Any]) -> str:
    """Returns the version that the tests install."""
    pinned = (TESTS / f"{row['extra']}.txt").read_text()
    return _match(rf"^{re.escape(row['package'])}(?:\[\w+\])?==(\S+)", pinned)


def least(row: dict[str, Any]) -> str:
    """Returns the lower bound of the extra."""
    extras = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    wanted = "\n".join(extras["optional-dependencies"][row["extra"]])
    return _match(rf"^{re.escape(row['package'])}(?:\[\w+\])?>=(\S+)", wanted)


def _match(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"no {pattern} in {text!r}")
    return found[1]


def costs() -> dict[str, dict[str, Any]]:
    """Returns the newest figures of each framework."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("adapters_*.json"), key=lambda one: _date(one)):
        found |= json.loads(path.read_text())["frameworks"]
    return found


def _date(path: Path) -> str:
    return str(json.loads(path.read_text())["date"])


def held(found: dict[str, Any] | None) -> str:
    """Returns the cell of the time that a save holds training."""
    times = (found or {}).get("held_s")
    if times is None:
        return "not measured"
    own = f", its own {times['own'] * 1e3:.0f} ms" if "own" in times else ""
    return f"{times['adapter'] * 1e3:.0f} ms{own}"


def losses() -> dict[str, list[str]]:
    """Returns what is taken away from each framework's state, by its names there, each once."""
    spec = importlib.util.spec_from_file_location("losses", TESTS / "losses.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, list[str]] = {}
    for one in module.LOSSES:
        found.setdefault(one.framework, []).append(one.what)
    return found


def cost(found: dict[str, Any] | None) -> str:
    """Returns the cell of the costs."""
    found = found or {}
    cells = []
    if "thread" in found:
        thread, step = found["thread"], found["step"]
        over = f"{thread['over_checkpointer']:.2f} ({thread['over_checkpointer_s'] * 1e3:+.1f} ms)"
        cells.append(f"{over}; {thread['over_framework']:.2f}, {step['over_framework']:.2f}")
    if "work" in found:
        work = found["work"]
        own_s = work["own_s"] + work["checkpointer_below_s"] - work["checkpointer_s"]
        cells.append(f"adds {own_s * 1e3:.2f} ms of {work['step_s'] * 1e3:.0f}")
    return "; ".join(cells) or "not measured"


def render() -> str:
    """Returns the page."""
    measured = costs()
    lines = [
        "| framework | tried, at least | what is there | cost: to a `Checkpointer`; to alone |",
        "|---|---|---|---|",
    ]
    for name, row in rows().items():
        guide = f"[{row['title']}](guides/{row['guide']}.md)"
        oldest = f"{row['oldest']} to " if "oldest" in row else ""
        version = f"{oldest}{tried(row)}, {least(row)}"
        lines.append(f"| {guide} | {version} | {row['by']} | {cost(measured.get(name))} |")
    parts = [HEAD, "\n".join(lines) + "\n"]
    parts.append(
        "| framework | kept | tried | refused by name, among others |\n|---|---|---|---|\n"
        + "".join(
            f"| {row['title']} | {row['keeps']} | {row['ran']} | "
            f"{'; '.join(what for what, _ in row['refused'])} |\n"
            for row in rows().values()
        )
    )
    taken = losses()
    parts.append(
        "| framework | killed at drawn places, seen to pass | goes on with other ranks | held |\n"
        "|---|---|---|---|\n"
        + "".join(
            f"| {row['title']} | {row['killed']} | {row['others']} | {held(measured.get(name))} |\n"
            for name, row in rows().items()
        )
    )
    parts.append(
        f"{sum(map(len, taken.values()))} losses, `pytest tests/integrations/test_losses.py`:\n\n"
        + "".join(
            f"* {name.replace('_', ' on ')}: `{'`, `'.join(dict.fromkeys(some))}`\n"
            for name, some in taken.items()
        )
    )
    parts.append(
        "`torch.distributed.checkpoint` needs no framework: [holdfast.dcp](reference/dcp.md). "
        "A root is read\nby plain torch objects under the author's names, whichever adapter wrote "
        "it. The Trainer\nof transformers, accelerate, Lightning and Fabric go on from what each "
        "other has saved, with one\nmodel, and torchtitan from its export: `make "
        "integrations-across`.\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
