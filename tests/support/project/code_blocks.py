"""Code blocks of Markdown pages, and how each is to be run: what the tests of the documents share.

An HTML comment above a block says what cannot be seen from it:

    <!-- not run: why -->            left out, for this reason
    <!-- on 4 ranks -->              run by every rank of a real process group
    <!-- file: train.py -->          written to this file, for the shell blocks below it
    <!-- before: ... -->             Python that a reader has already, run first

Blocks of one page share names, files and the directory they run in. A block whose language is
neither Python nor the shell is a drawing, or what something prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

PROJECT = Path(__file__).resolve().parents[3]
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
_BLOCK = re.compile(
    r"^(?P<comments>(?:<!--(?:(?!-->).)*-->\s*?\n\s*)*)^```(?P<language>[\w-]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One fenced block and the comments above it."""

    page: str
    line: int
    language: str
    text: str
    directives: tuple[str, ...]

    def said(self, word: str) -> str | None:
        """What a directive that begins with ``word`` goes on to say."""
        found = [d[len(word) :].strip() for d in self.directives if d.startswith(word)]
        return found[0] if found else None

    @property
    def is_code(self) -> bool:
        """Whether it is meant to be run by somebody."""
        return self.language in ("python", "sh")

    @property
    def is_run(self) -> bool:
        """Whether a test runs it."""
        return self.is_code and self.said("not run:") is None

    @property
    def ranks(self) -> int:
        """On how many ranks it runs; 0 for a process of its own."""
        said = self.said("on ")
        return int(said.removesuffix(" ranks")) if said else 0

    def compiled(self) -> CodeType:
        """Python whose tracebacks name the page and its line."""
        padded = "\n" * self.line + self.text
        code: CodeType = compile(padded, self.page, "exec", dont_inherit=True)
        return code


def pages() -> list[Path]:
    """Every page a user may read."""
    top = [PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*top, *sorted((PROJECT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    """A page as it is called in messages and test names."""
    return str(page.relative_to(PROJECT))


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            name_of(page),
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["text"],
            tuple(_COMMENT.findall(found["comments"])),
        )
        for found in _BLOCK.finditer(text)
    ]
