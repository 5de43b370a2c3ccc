"""No two tensors of a foreign file share a name here; what is unfit is left out alone."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ForeignFormatError
from holdfast.geometry.box import Box
from holdfast.interop import arrange as arranging
from holdfast.interop.arrange import arrange
from holdfast.interop.dcp import _nested, _PathTaken
from holdfast.interop.foreign import Extent, ForeignLeaf, StoredBox
from holdfast.interop.pickle_records import NumpyArray, Opaque, Record


def leaf(at: int) -> ForeignLeaf:
    return ForeignLeaf("F32", (2,), (StoredBox(Box.whole((2,)), Extent("f", at)),))


ONE, TWO = leaf(0), leaf(64)


@pytest.mark.promise
def test_a_tensor_of_extra_state_takes_no_parameters_name() -> None:
    found = arrange({"model": {"l.scale": ONE, "l._extra_state": {"scale": TWO}}})
    assert found.leaves["model.l.scale"] == ONE
    assert found.leaves["model.l._extra_state.scale"] == TWO
    assert found.values == {"model": {"l": {"scale": {"$leaf": "model.l._extra_state.scale"}}}}


def test_extra_state_that_is_a_tensor_is_no_parameter() -> None:
    found = arrange({"model": {"w": ONE, "l._extra_state": TWO}})
    assert found.values == {"model": {"l": {"$leaf": "model.l._extra_state"}}}


@pytest.mark.promise
@pytest.mark.parametrize(
    "entry",
    [
        {"a": {"b": ONE}, "a.b": TWO, "n": 3},
        {"x": [{1: ONE, "1": TWO}]},
        {"state": {1: {"m": ONE}, "1": {"m": TWO}}, "param_groups": [{"params": [1, "1"]}]},
        {
            "state": {"a": {"b.c": ONE}, "a.b": {"c": TWO}},
            "param_groups": [{"params": ["a", "a.b"]}],
        },
        {
            "state": {0: {"m": ONE}, 1: {"m": TWO}},
            "param_groups": [{"params": [0, 1], "param_names": ["a", "a"]}],
        },
    ],
)
def test_two_tensors_of_one_name_are_left_out(entry: Any) -> None:
    found = arrange({"it": entry, "step": 3})
    assert found.leaves == {} and found.values == {"step": 3}
    assert len(found.notes) == 1 and found.notes[0].startswith("it is left out")


@pytest.mark.promise
@pytest.mark.parametrize(
    "paths",
    [
        {"x": ("a",), "y": ("a", "b")},
        {"y": ("a", "b"), "x": ("a",)},
        {"x": ("a", "b"), "y": ("a", "b")},
        {"x": (1,), "y": ("1",)},
    ],
)
def test_paths_that_cannot_both_be_are_an_error(paths: Any) -> None:
    with pytest.raises(_PathTaken):
        _nested(dict.fromkeys(paths, ONE), paths)


def test_one_value_that_is_not_known_is_left_out_by_its_name() -> None:
    args = Record("Namespace", {"lr": 0.1, "hook": Opaque("x.Y", 7), "in": {"z": Opaque("x", 1)}})
    found = arrange({"args": args, "model": {"w": ONE, "l._extra_state": Opaque("io", 2)}})
    assert found.values == {"args": {"lr": 0.1}} and found.leaves == {"model.w": ONE}
    assert [note.partition(" is ")[0] for note in found.notes] == [
        "args.hook",
        "args.in.z",
        "model.l._extra_state",
    ]


def test_an_optimizer_with_a_value_that_is_not_known_is_left_out_whole() -> None:
    state = {"a": {"m": ONE, "n": Opaque("x.Y", 7)}}
    found = arrange({"o": {"state": state, "param_groups": [{"params": ["a"]}]}})
    assert found.leaves == {} and found.values == {} and "o.state.a.n is x.Y" in found.notes[0]


def test_a_value_that_contains_itself_is_left_out() -> None:
    inside = Record("Namespace", {})
    inside.fields["me"] = inside
    assert arrange({"k": inside, "n": 1}).values == {"n": 1}


def test_bytes_count_as_often_as_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arranging, "MAX_VALUE_BYTES", 1000)
    array = NumpyArray("|u1", (200,), bytes(200))
    for some in ("x" * 200, b"x" * 200, array):
        assert list(arrange({"k": [some] * 4}).values) == ["k"]
        found = arrange({"k": [some] * 6})
        assert found.values == {} and "more than 1000 bytes" in found.notes[0]


@pytest.mark.parametrize("text", ["f8,(", "(2**", "(1 2)f8", "a[", "0,", "f8,", "O8", "S99999"])
def test_a_dtype_of_numpy_is_never_evaluated(text: str) -> None:
    found = arrange({"k": NumpyArray(text, None, bytes(8)), "n": 1})
    assert found.values == {"n": 1} and "numpy" in found.notes[0]


def test_half_a_character_and_long_names_are_left_out() -> None:
    found = arrange({"k": "\ud800", "\ud800": 1, "n": 1, "x" * 5000: [1]})
    assert found.values == {"n": 1} and len(found.notes) == 3
    "".join(found.notes).encode()


def test_what_values_raise_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(arranging, "_take", fail)
    with pytest.raises(ForeignFormatError, match=r"f\.pt: k cannot be read: too large"):
        arrange({"k": 1}, where="f.pt")


def test_groups_are_put_together_by_equal_options() -> None:
    flat: dict[str, Any] = {}
    for number in range(6):
        flat |= {f"state.p{number}.m": leaf(number * 8), f"param_groups.p{number}.lr": number % 2}
    found = arrange({"o": flat})
    assert [group["params"] for group in found.values["o"]["groups"]] == [
        ["p0", "p2", "p4"],
        ["p1", "p3", "p5"],
    ]


OPTIMIZER: dict[str, Any] = {"state": {"w": {"m": ONE}}, "param_groups": [{"params": ["w"]}]}


@pytest.mark.promise
@pytest.mark.parametrize("depth", [1, 3])
def test_a_dictionary_with_an_optimizer_that_contains_itself_is_an_error(depth: int) -> None:
    cyclic: dict[str, Any] = {"optim": OPTIMIZER}
    inner = cyclic
    for _ in range(depth - 1):
        inner["in"] = {"optim": OPTIMIZER}
        inner = inner["in"]
    inner["in"] = cyclic
    with pytest.raises(ForeignFormatError, match=r"a\.pt: app.* contains itself"):
        arrange({"app": cyclic}, where="a.pt")


def test_dictionaries_with_optimizers_in_each_other_are_taken_apart_so_far() -> None:
    nested: dict[str, Any] = {"optim": OPTIMIZER}
    for _ in range(5000):
        nested = {"in": nested, "optim": OPTIMIZER}
    found = arrange({"app": nested, "step": 3})
    assert {"app.optim", "app.in.in.optim", "step"} <= found.values.keys()
    assert any("nested deeper than" in note for note in found.notes)


def test_one_dictionary_in_very_many_places_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arranging, "MAX_NODES", 1000)
    shared: dict[str, Any] = {"optim": OPTIMIZER}
    for _ in range(3):
        shared = {"optim": OPTIMIZER, **{str(number): shared for number in range(20)}}
    with pytest.raises(ForeignFormatError, match="more than 1000 values"):
        arrange({"app": shared})


def test_an_entry_whose_name_is_no_text_is_left_out() -> None:
    odd: dict[Any, Any] = {"note": "x", 1: 5, None: 6, (1, 2): 7}
    found = arrange(odd)
    assert found.values == {"note": "x"} and len(found.notes) == 3
    assert found.notes[0].startswith("1 is left out: it is no text")
