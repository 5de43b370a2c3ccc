"""Parses patterns that match leaf names, and templates that make other names from the matches.

In a pattern ``{i}`` stands for a component of the dotted name or for a part of one, ``*`` for any
characters inside a component, ``**`` for any number of components. In a template ``{i}`` is the
matched text, and ``{i+8}`` is computed: ``+ - * // %`` and parentheses, whole numbers only.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from holdfast.errors import UsageError

_TOKEN = re.compile(r"\{(?P<name>\w+)\}|(?P<star>\*)|(?P<plain>[^{}*]+)")
_HOLE = re.compile(r"\{([^{}]*)\}")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """Matches the leaves a rule applies to. Raises UsageError when the text is no pattern."""

    text: str
    names: frozenset[str] = field(init=False)
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        seen: list[str] = []
        compiled = _compile(self.text, seen)
        object.__setattr__(self, "_compiled", compiled)
        object.__setattr__(self, "names", frozenset(seen))

    def match(self, name: str) -> dict[str, str] | None:
        """Returns the values of the placeholders in ``name``; None when it does not match."""
        found = self._compiled.fullmatch(name)
        return found.groupdict() if found else None


def _compile(text: str, seen: list[str]) -> re.Pattern[str]:
    components = text.split(".")
    parts = []
    for at, component in enumerate(components):
        is_last = at == len(components) - 1
        if component == "**":
            parts.append(r"(?:[^.]+(?:\.[^.]+)*)" if is_last else r"(?:[^.]+\.)*")
        else:
            parts.append(_component(text, component, seen) + ("" if is_last else r"\."))
    return re.compile("".join(parts))


def _component(text: str, component: str, seen: list[str]) -> str:
    found, at = [], 0
    for token in _TOKEN.finditer(component):
        if token.start() != at:
            break
        at = token.end()
        if token["plain"]:
            found.append(re.escape(token["plain"]))
        elif token["star"]:
            found.append("[^.]*")
        elif token["name"] in seen:
            found.append(f"(?P={token['name']})")
        elif token["name"].isidentifier():
            seen.append(token["name"])
            found.append(f"(?P<{token['name']}>[^.]+?)")
        else:
            break
    else:
        if component and at == len(component) and "**" not in component:
            return "".join(found)
    raise UsageError(
        f"{text!r} is no pattern: {component!r} is not a part of a name, {{i}} for an open place, "
        "* for any characters or ** alone for any number of parts, with dots between them",
        pattern=text,
    )


@dataclass(frozen=True, slots=True)
class Template:
    """Makes a name from a pattern's matches. Raises UsageError when the text is no template."""

    text: str
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        rest = _HOLE.sub("", self.text)
        if not self.text or "{" in rest or "}" in rest:
            raise UsageError(
                f"{self.text!r} is no name: write what is to be put in as {{i}} or {{i+8}}",
                pattern=self.text,
            )
        trees = [_parse(self.text, hole) for hole in _HOLE.findall(self.text)]
        names = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
        object.__setattr__(self, "names", frozenset(names))

    def check(self, known: Collection[str], pattern: str) -> None:
        """Raises UsageError when the template uses a placeholder that does not exist."""
        unknown = sorted(self.names - set(known))
        if unknown:
            raise UsageError(
                f"{pattern!r}: {self.text!r} wants {unknown[0]!r}, which is no open place of the "
                f"pattern: use {' or '.join(sorted(known)) or 'a pattern that has one'}",
                pattern=pattern,
            )

    def fill(self, values: Mapping[str, str], where: str) -> str:
        """Returns the name. Raises UsageError when a number is needed and the value is none."""

        def filled(hole: re.Match[str]) -> str:
            tree = _parse(self.text, hole[1])
            if isinstance(tree, ast.Name):
                return values[tree.id]
            number = self._reckon(tree, values, where)
            if number < 0:
                raise UsageError(
                    f"{where}: {{{hole[1]}}} in {self.text!r} is {number}, and nothing is numbered "
                    "below 0: check the number that is taken off",
                )
            return str(number)

        return _HOLE.sub(filled, self.text)

    def _reckon(self, tree: ast.expr, values: Mapping[str, str], where: str) -> int:
        if isinstance(tree, ast.Constant):
            return int(tree.value)  # type: ignore[arg-type]
        if isinstance(tree, ast.Name):
            if not values[tree.id].isdecimal():
                raise UsageError(
                    f"{where}: {self.text!r} reckons with {tree.id}, which is "
                    f"{values[tree.id]!r} here and no number: leave it as it is, or take a "
                    "pattern that only finds numbers there",
                )
            return int(values[tree.id])
        assert isinstance(tree, ast.BinOp)
        left, right = (self._reckon(side, values, where) for side in (tree.left, tree.right))
        if right == 0 and isinstance(tree.op, (ast.FloorDiv, ast.Mod)):
            raise UsageError(f"{where}: {self.text!r} divides by 0 here: change the rule")
        return _OPERATORS[type(tree.op)](left, right)


@lru_cache(maxsize=1 << 10)
def _parse(text: str, hole: str) -> ast.expr:
    try:
        tree = ast.parse(hole.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        tree = None
    if tree is not None and all(_is_known(node) for node in ast.walk(tree)):
        return tree
    raise UsageError(
        f"{text!r}: {{{hole}}} is neither an open place nor reckoned from some with + - * // %",
        pattern=text,
    )


def _is_known(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.operator):
        return type(node) in _OPERATORS
    return isinstance(node, (ast.BinOp, ast.Name, ast.Load))
