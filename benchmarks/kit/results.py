"""Write results with date, machine and raw values, and put tables into the documents."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"
IMAGES = DOCS / "images"
RESULTS = PROJECT / "benchmarks" / "results"
DOCUMENT = RESULTS / "README.md"
#: From there to the plots.
IMAGE_LINK = "../../docs/images"


def write(
    kind: str, facts: dict[str, str], found: dict[str, Any], shown: str, directory: Path = RESULTS
) -> Path:
    """``results/<kind>_<processor>_<month>``: the raw values as JSON, what is shown as markdown."""
    path = _results_file(kind, facts, directory)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"date": today(), "machine": facts, **found}, indent=1) + "\n")
    path.with_suffix(".md").write_text(shown + "\n")
    return path


def read(kind: str, facts: dict[str, str], directory: Path = RESULTS) -> dict[str, Any]:
    """What was written before where ``write`` will write; {} when nothing was."""
    path = _results_file(kind, facts, directory)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _results_file(kind: str, facts: dict[str, str], directory: Path) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", f"{facts['processor']} {facts['cores']}c".lower()).strip("-")
    return directory / f"{kind}_{slug}_{time.strftime('%Y%m')}.json"


def today() -> str:
    """The date of a result."""
    return time.strftime("%Y-%m-%d")


class Section(NamedTuple):
    """A section of results/README.md, made the first time that there are figures for it."""

    title: str
    lead: str
    place: str = "## The keeper"
    """The title that the section comes before."""


def keep(
    kind: str,
    facts: dict[str, str],
    found: dict[str, Any],
    shown: str,
    *,
    document: bool = False,
    block: str = "",
    section: Section | None = None,
    directory: Path = RESULTS,
) -> Path:
    """Write the results and say where; with ``document``, also into the document.

    ``block``: the name of its place there, where it is not ``kind``.
    """
    path = write(kind, facts, found, shown, directory)
    print(f"results/{path.name}")
    if document:
        put(DOCUMENT, block or kind, shown, section)
    return path


def put(document: Path, name: str, text: str, section: Section | None = None) -> None:
    """Put ``text`` into the block ``name``, after its section was made where there is none."""
    page = document.read_text()
    if section and f"<!-- {name} -->" not in page:
        made = f"## {section.title}\n\n{section.lead}\n\n<!-- {name} -->\n<!-- /{name} -->\n\n"
        place = f"{section.place}\n"
        document.write_text(page.replace(place, made + place, 1))
    replace_block(document, name, text)


def replace_block(document: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name -->`` and ``<!-- /name -->`` in a document."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, found, rest = document.read_text().partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{document.name} has no block {name!r} to put the table in")
    document.write_text(f"{head}{begin}{text}\n{end}{tail}")
