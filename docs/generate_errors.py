"""Write docs/operations/errors.md from the classes in holdfast/errors.py: `make docs`.

The page is checked in, and tests/docs/test_errors_page.py fails when it is not what this prints.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from holdfast import errors
from holdfast.errors import HoldfastError

PAGE = Path(__file__).parent / "operations" / "errors.md"

HEAD = """\
# Errors

<!-- Generated from src/holdfast/errors.py by `make docs`: change it there. -->

Every error of Holdfast is a `holdfast.HoldfastError`. The class says what happened, the message
what, where and what to do now. Three things are for programs:

* `error.retryable`: whether the same call may succeed later without a change by you;
* `error.exit_code`: what the `holdfast` command exits with;
* `error.fields`: facts, under the names listed below. Read them with `.get`: a field is there where
  it is known, and an error that another rank or the keeper told of brings it along.

No error of a save reaches the training loop through `Checkpointer.step`. It is an event, and it is
what `handle.wait_durable()` and `close()` raise. Messages you may meet, with cause and fix, are in
[troubleshooting](troubleshooting.md).

```python
import holdfast

try:
    holdfast.load("runs/nothing-here", {"tokens": 0})
except holdfast.NotFound as error:
    print(error, error.exit_code, error.retryable, error.fields)
```
"""


def classes(root: type[HoldfastError] = HoldfastError) -> Iterator[type[HoldfastError]]:
    """Every class of the tree, as drawn: parents before children, in the order of the source."""
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from classes(child)


def render() -> str:
    """The whole page."""
    parts = [HEAD, "## The tree\n", _tree(), "## At a glance\n", _table()]
    parts += [_section(one) for one in classes()]
    return "\n".join(parts)


def _tree() -> str:
    lines = inspect.cleandoc(errors.__doc__ or "").splitlines()
    drawn = [line for line in lines if line.startswith(("HoldfastError", "├", "│", "└"))]
    return "```text\n" + "\n".join(drawn) + "\n```\n"


def _table() -> str:
    rows = ["| class | exit code | worth trying again |", "|---|---|---|"]
    for one in classes():
        again = "yes" if one.retryable else "no"
        if one is errors.StorageError:
            again = "mostly; the instance says"
        rows.append(f"| [{one.__name__}](#{one.__name__.lower()}) | {one.exit_code} | {again} |")
    return "\n".join(rows) + "\n"


def _section(one: type[HoldfastError]) -> str:
    lines = [f"## {one.__name__}\n", _summary(one), ""]
    lines += [f"* **Cause**: {one.cause}", f"* **What to do**: {one.remedy}"]
    own = one.__dict__.get("keys", {})
    lines += [f"* `fields[{name!r}]`: {meaning}".replace("'", '"') for name, meaning in own.items()]
    parent = one.__mro__[1]
    if issubclass(parent, HoldfastError) and parent is not HoldfastError:
        lines.append(f"* Also a [{parent.__name__}](#{parent.__name__.lower()}), with its fields.")
    return "\n".join(lines) + "\n"


def _summary(one: type[HoldfastError]) -> str:
    return inspect.cleandoc(one.__doc__ or "").partition("\n\n")[0].replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(render())
