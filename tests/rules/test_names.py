"""Patterns find leaves by name, and templates name others by what was found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.rules.patterns import Pattern, Template


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("a.b", "a.b", {}),
        ("a.b", "a.bc", None),
        ("a.b", "aXb", None),  # a dot is a dot
        ("a[0].b+", "a[0].b+", {}),
        ("layers.{i}.w", "layers.12.w", {"i": "12"}),
        ("layers.{i}.w", "layers.1.2.w", None),
        ("layers.{i}.w", "layers..w", None),
        ("h_{i}.{name_2}", "h_3.wq", {"i": "3", "name_2": "wq"}),
        ("e{s}x{i}.w", "e1x2.w", {"s": "1", "i": "2"}),
        ("{i}.a.{i}", "4.a.4", {"i": "4"}),
        ("{i}.a.{i}", "4.a.5", None),
        ("layers.*.w", "layers.0.w", {}),
        ("layers.*.w", "layers.0.1.w", None),
        ("w*.x", "wq.x", {}),
        ("w*.x", "w.x", {}),
        ("**", "a", {}),
        ("**", "a.b.c", {}),
        ("**.bias", "bias", {}),
        ("**.bias", "a.b.bias", {}),
        ("**.bias", "a.xbias", None),
        ("a.**.c", "a.c", {}),
        ("a.**.c", "a.b.b.c", {}),
        ("a.**", "a.b.c", {}),
        ("a.**", "a", None),
        ("a.**", "a.", None),
        ("**.{i}.**", "x.7.y", {"i": "7"}),
    ],
)
def test_a_pattern_finds_names(pattern: str, name: str, found: dict[str, str] | None) -> None:
    assert Pattern(pattern).match(name) == found


@pytest.mark.parametrize(
    "text",
    ["", "a..b", "a.", ".a", "a.{}", "a.{1}", "a.{i", "i}", "a.{i+1}", "a**", "***", "{i}.**b"],
)
def test_a_text_that_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no pattern") as caught:
        Pattern(text)
    assert caught.value.fields["pattern"] == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("a.b", "a.b"),
        ("l.{i}.w", "l.3.w"),
        ("l.{i+8}.w", "l.11.w"),
        ("l.{i-3}.w", "l.0.w"),
        ("l.{s*4+i}.w", "l.11.w"),
        ("l.{ (s+i) * 2 }.w{s}", "l.10.w2"),
        ("e.{i//2}.{i%2}", "e.1.1"),
        ("{kind}.{7}", "wq.7"),
    ],
)
def test_a_template_is_filled_and_reckoned(template: str, name: str) -> None:
    values = {"i": "3", "s": "2", "kind": "wq"}
    found = Template(template)
    found.check(values, "pattern")
    assert found.fill(values, "leaf") == name


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_numbers_are_reckoned_as_numbers(a: int, b: int) -> None:
    assert Template("{a*b+a}").fill({"a": str(a), "b": str(b)}, "") == str(a * b + a)


@pytest.mark.parametrize("text", ["", "a{", "a}b", "a{{i}}"])
def test_a_text_that_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no name"):
        Template(text)


@pytest.mark.parametrize(
    "text",
    ["{}", "{i+}", "{i/2}", "{f(i)}", "{-i}", "{i.x}", "{i+1.5}", "{'a'}", "{i\0}"],
)
def test_what_cannot_be_reckoned_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither an open place nor reckoned"):
        Template(text)


def test_what_is_found_nowhere_cannot_be_put_in() -> None:
    with pytest.raises(UsageError, match=r"'a.{i}': 'x.{j}' wants 'j'.*use i or name"):
        Template("x.{j}").check({"name", "i"}, "a.{i}")
    with pytest.raises(UsageError, match="use a pattern that has one"):
        Template("x.{j}").check((), "a")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{i-4}", r"w: \{i-4\} in '\{i-4\}' is -1"),
        ("{k+1}", "reckons with k, which is 'wq' here and no number"),
        ("{i//(i-3)}", "divides by 0"),
        ("{i%(i-3)}", "divides by 0"),
    ],
)
def test_what_cannot_be_reckoned_with_this_name_is_said(template: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Template(template).fill({"i": "3", "k": "wq"}, "w")
