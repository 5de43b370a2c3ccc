"""The modules of an import contract in pyproject.toml, for whatever else they are held to.

``python tests/support/project/contracts.py pure`` names their files as ``coverage report`` takes
them with ``--include``.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[3]


def modules_of(contract: str) -> list[str]:
    """The modules and packages that the contract of this id is about."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    contracts = {c["id"]: c for c in project["tool"]["importlinter"]["contracts"]}
    return list(contracts[contract]["source_modules"])


def files_of(module: str) -> str:
    """A pattern for the file of this module, or for all files of this package."""
    path = Path("src", *module.split("."))
    if (PROJECT / path).is_dir():
        return f"{path}/*"
    if not (PROJECT / path).with_suffix(".py").is_file():
        raise SystemExit(f"a contract is about {module}, and there is no such module")
    return f"{path}.py"


if __name__ == "__main__":
    print(",".join(map(files_of, modules_of(sys.argv[1]))))
