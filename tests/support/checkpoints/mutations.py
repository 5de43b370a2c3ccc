"""Documents with something in them that does not belong there, at random places."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

Path = tuple[Any, ...]

#: What stands in place of something else: every type of JSON, edges of numbers, tags.
STRANGERS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64 - 1,
    1.5,
    -0.0,
    1e308,
    "",
    "x",
    "0",
    "\0",
    "a\ud7ff",
    "4096",
    "w",
    "F32",
    "<U0",
    "|S0",
    "<f4",
    "a" * 300,
    [],
    [[]],
    [0],
    [-1],
    [1, 1],
    [2**62, 0, 2**62],
    ["x"],
    [[0, 1]],
    [None],
    {},
    {"x": 1},
    {"": {}},
    {"$leaf": "w"},
    {"$leaf": "no"},
    {"$tuple": [[1]]},
    {"$set": [[1]]},
    {"$set": [1, 1.0]},
    {"$dict": [[{"$tuple": []}, 1]]},
    {"$dict": [[{"$dict": []}, 1]]},
    {"$float": "nan"},
    {"$default": ["int", []]},
    {"$default": [[], []]},
    {"$default": [{"$set": []}, []]},
    {"$tensor": {"name": "t", "dtype": "F32", "shape": [1], "data": "AAAAAA=="}},
    {"$tensor": {"name": "t", "dtype": "F32", "shape": [2**62, 0, 2**62], "data": ""}},
    {"$tensor": {"name": "t", "dtype": "F32", "shape": [0] * 70, "data": ""}},
    {"$tensor": {"name": [], "dtype": {}, "shape": {}, "data": 1}},
    {"$numpy": {"dtype": "<U0", "shape": [2**40], "data": ""}},
    {"$numpy": {"dtype": "|S0", "shape": None, "data": ""}},
    {"$numpy": {"dtype": "<f4", "shape": [0, 2**70], "data": ""}},
    {"$numpy": {"dtype": "<f4", "shape": {}, "data": "AAAAAA=="}},
    {"$numpy": {"dtype": "<U1", "shape": [1], "data": "////fw=="}},
    {"$numpy": {"dtype": "<U1", "shape": None, "data": "////fw=="}},
    {"$enum": {"type": "A", "member": []}},
    {"$enum": {"type": "A"}},
    {"$enum": []},
    {"$enum": {"type": [], "value": "1"}},
    {"$enum": {"type": "A", "value": "1", "member": "B"}},
    {"$object": {"type": "A"}},
    {"$object": {"type": [], "value": {"$leaf": "no"}}},
    {"$object": {"type": "A", "value": {"$set": [[1]]}}},
    {"$device": "cuda:99999999999999999999"},
    {"$device": "meta"},
    {"$dtype": "_dynamo"},
    {"$int": "9" * 2500},
    {"$counter": [["a", "b"]]},
    {"$counter": [["a", {}]]},
    {"$ordered": {}},
    {"kind": "split_list", "rank": 0, "world": 1, "items": [{"$leaf": "w"}]},
    {"kind": "split_list", "rank": [], "world": {}, "items": {}},
]


def paths(document: Any) -> list[Path]:
    """The place of everything in a document that is not nested beyond all measure."""
    level: list[tuple[Path, Any]] = [((), document)]
    found: list[Path] = []
    while level and len(found) < 10_000:
        found += [at for at, _ in level]
        level = [
            ((*at, key), item)
            for at, one in level
            if isinstance(one, (dict, list)) and len(at) < 20
            for key, item in (one.items() if isinstance(one, dict) else enumerate(one))
        ]
    return found


def _parent(document: Any, at: Path) -> Any:
    for key in at[:-1]:
        document = document[key]
    return document


HOWS = ("replace", "replace", "drop", "wrap", "add", "nest", "number")


@st.composite
def mutated(draw: st.DrawFn, good: Any) -> Any:
    """``good`` with one to four things replaced, left out, wrapped, doubled or added."""
    document, hows = copy.deepcopy(good), list(HOWS)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.sampled_from(paths(document)))
        stranger = copy.deepcopy(draw(st.sampled_from(STRANGERS)))
        if not at:
            if draw(st.integers(0, 20)) == 0:
                return stranger
            continue
        parent, key = _parent(document, at), at[-1]
        how = draw(st.sampled_from(hows))
        if how == "replace":
            parent[key] = stranger
        elif how == "drop":
            del parent[key]
        elif how == "wrap":
            parent[key] = draw(st.sampled_from([[parent[key]], {"x": parent[key]}]))
        elif how == "number" and type(parent[key]) is int:
            parent[key] += draw(st.integers(-3, 3))
        elif how == "nest":
            hows.remove(how)
            for _ in range(draw(st.sampled_from([3, 70, 300]))):
                parent[key] = draw(st.sampled_from([[parent[key]], {"$tuple": [parent[key]]}]))
        elif isinstance(parent[key], list):
            parent[key] += [stranger, *parent[key][:1]]
        elif isinstance(parent[key], dict):
            parent[key][draw(st.sampled_from(["x", "$x", "$tuple", "kind", "names"]))] = stranger
    return document
