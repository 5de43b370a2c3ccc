"""Write CHANGELOG.md from the notes in changes/: `make docs`.

The page is checked in, and tests/docs/test_changelog.py fails when it is not what this prints.
"""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PAGE = PROJECT / "CHANGELOG.md"
NOTES = PROJECT / "changes"

#: Kinds of notes, in the order of the page; changes/README.md says what each is for.
TITLES = {
    "format": "Format",
    "removed": "Removed",
    "changed": "Changed",
    "added": "Added",
    "fixed": "Fixed",
}
NAME = re.compile(r"[0-9]{4}-[a-z0-9-]+\.(?P<kind>[a-z]+)\.md")

HEAD = """\
# Changelog

<!-- Generated from the notes in changes/ by `make docs`: change them there. -->

All that a user of Holdfast would notice, by version and kind.

## Unreleased
"""


def notes() -> dict[str, list[Path]]:
    """The notes by kind, those of the newest issue first. ValueError for a name without a kind."""
    found: dict[str, list[Path]] = {kind: [] for kind in TITLES}
    for path in sorted(NOTES.glob("*.md")):
        if path.name == "README.md":
            continue
        name = NAME.fullmatch(path.name)
        if name is None or name["kind"] not in TITLES:
            raise ValueError(f"changes/{path.name} is not called NNNN-what.kind.md")
        found[name["kind"]].append(path)
    return {kind: sorted(paths, key=_newest_first) for kind, paths in found.items()}


def _newest_first(path: Path) -> tuple[int, str]:
    return -int(path.name[:4]), path.name


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for kind, paths in notes().items():
        if paths:
            parts += [f"\n### {TITLES[kind]}\n\n", *map(_entry, paths)]
    return "".join(parts)


def _entry(path: Path) -> str:
    """One note as a list item: its further lines are indented."""
    lines = path.read_text().strip().splitlines()
    return "\n".join([f"* {lines[0]}", *(f"  {line}" if line else "" for line in lines[1:])]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
