"""Write docs/code-map.md from the captions of packages and files: `make docs`.

The page is checked in, and tests/docs/test_code_map.py fails when it is not what this prints.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "holdfast"
PAGE = Path(__file__).parent / "code-map.md"

HEAD = """\
# Code map

<!-- Generated from the captions of src/holdfast by `make docs`: change them there. -->

Every package and file of `src/holdfast`, with the first sentence of its caption. Imports point
down: the order of the levels is in `pyproject.toml`, contract `layers`. Packages marked PURE do no
I/O; what the keeper and the command line use never imports torch. The words are those of the
[glossary](glossary.md).
"""


def files() -> Iterator[Path]:
    """Every source file, a package's own files before its sub-packages."""
    return iter(sorted(SOURCE.rglob("*.py"), key=lambda path: (path.parent, path.name)))


def caption(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(text.split("\n\n")[0].split())
    end = first.find(". ")
    while first[:end].endswith((" PURE", "PURE", "e.g", "i.e")):
        end = first.find(". ", end + 1)
    return first if end < 0 else first[: end + 1]


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    folder = None
    for path in files():
        if path.parent != folder:
            folder = path.parent
            name = "holdfast" if folder == SOURCE else f"{folder.relative_to(SOURCE)}/"
            top = folder / "__init__.py"
            parts.append(f"\n## `{name}`\n\n{caption(top) if top.is_file() else ''}\n\n")
        if path.name != "__init__.py":
            parts.append(f"* `{path.name}`: {caption(path)}\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
