"""Run a benchmark by its name: ``python -m benchmarks NAME [options]``; without a name, list all.

A name is a file here, or a package here with a file of the same name. It has ``main``, which takes
the options and returns the exit status.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def found() -> dict[str, Path]:
    """Every benchmark by its name."""
    files = [path for path in HERE.glob("*.py") if not path.stem.startswith("_")]
    files += [path for path in HERE.glob("*/*.py") if path.stem == path.parent.name]
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def listed() -> str:
    """A line for each benchmark, from its caption."""
    lines = ["python -m benchmarks NAME [options]; --help after a name shows its options", ""]
    for name, path in found().items():
        caption = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines.append(f"  {name:15}{caption.partition(chr(10))[0]}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """The status of the benchmark; 2 where there is none of this name."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listed())
        return 0
    name, *options = arguments
    if name not in found():
        print(f"there is no benchmark {name!r}\n\n{listed()}", file=sys.stderr)
        return 2
    module = ".".join(found()[name].relative_to(HERE.parent).with_suffix("").parts)
    status: int = importlib.import_module(module).main(options)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
