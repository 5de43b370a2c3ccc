"""The files of the pure modules, as the import contract "pure" in pyproject.toml lists them.

``make coverage`` measures these: a module is held to it by being held to the contract.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def pure_modules() -> list[str]:
    """Modules and packages, by name."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    contracts = {c["id"]: c for c in project["tool"]["importlinter"]["contracts"]}
    return list(contracts["pure"]["source_modules"])


def pattern(module: str) -> str:
    """What coverage calls the file of this module, or the files of this package."""
    path = Path("src", *module.split("."))
    if (PROJECT / path).is_dir():
        return f"{path}/*"
    if (PROJECT / path).with_suffix(".py").is_file():
        return f"{path}.py"
    raise SystemExit(f"{module} is in the contract of the pure modules, but there is no such file")


if __name__ == "__main__":
    print(",".join(map(pattern, pure_modules())))
