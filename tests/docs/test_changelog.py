"""CHANGELOG.md is what the notes in changes/ say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def generator() -> ModuleType:
    """The script that writes the page."""
    script = PROJECT / "docs" / "generate_changelog.py"
    spec = importlib.util.spec_from_file_location("generate_changelog", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_changelog_is_what_the_notes_say(generator: ModuleType) -> None:
    assert generator.PAGE.read_text() == generator.render(), "run `make docs`"


def test_every_link_of_the_changelog_leads_somewhere(generator: ModuleType) -> None:
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", generator.PAGE.read_text())
    assert links
    dead = [link for link in links if ":" not in link and not (PROJECT / link).exists()]
    assert not dead, "links in changes/ are written from the top directory: docs/..."


def test_every_kind_of_note_that_may_be_written_has_a_title(generator: ModuleType) -> None:
    said = (PROJECT / "changes" / "README.md").read_text()
    assert all(f"| `{kind}` |" in said for kind in generator.TITLES)
    assert said.count("\n| `") == len(generator.TITLES)


def test_notes_are_grouped_by_kind_and_the_newest_issue_comes_first(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "changes"
    notes.mkdir()
    (notes / "README.md").write_text("how to write them")
    (notes / "0001-old.fixed.md").write_text("Old.\n\nMore of it.\n")
    (notes / "0002-new.fixed.md").write_text("New,\non two lines.\n")
    (notes / "0001-bytes.format.md").write_text("Bytes.\n")
    monkeypatch.setattr(generator, "NOTES", notes)
    text = generator.render().partition("## Unreleased\n")[2]
    assert text == (
        "\n### Format\n\n* Bytes.\n\n### Fixed\n\n* New,\n  on two lines.\n"
        "* Old.\n\n  More of it.\n"
    )


def test_a_note_without_a_kind_is_refused(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0001-what.better.md").write_text("?")
    monkeypatch.setattr(generator, "NOTES", tmp_path)
    with pytest.raises(ValueError, match=r"changes/0001-what\.better\.md"):
        generator.notes()
