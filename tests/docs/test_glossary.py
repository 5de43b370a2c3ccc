"""The glossary: every word is there once, those of the design among them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "glossary.md"
#: The words of the design: they have no synonym in Holdfast.
DESIGN = {
    *("leaf", "box", "layout", "image", "block", "chunk", "incarnation", "generation", "attempt"),
    *("lineage", "arena", "slot", "keeper", "coordinator", "snapshot", "checkpoint", "manifest"),
    *("captured", "protected", "durable"),
}
_ENTRY = re.compile(r"^\* \*\*(.+?)\*\*: .+\.( \*Elsewhere: .+\.\*)$", re.MULTILINE)
_BOLD = re.compile(r"\*\*(.+?)\*\*")


def test_every_bold_word_is_defined_once_on_one_line_with_what_others_call_it() -> None:
    bold = Counter(_BOLD.findall(PAGE.read_text()))
    assert not [word for word, times in bold.items() if times > 1]
    assert not bold.keys() - {found[1] for found in _ENTRY.finditer(PAGE.read_text())}


def test_the_twenty_words_of_the_design_come_first() -> None:
    words = [found[1] for found in _ENTRY.finditer(PAGE.read_text())]
    assert len(DESIGN) == 20
    assert set(words[:20]) == DESIGN
