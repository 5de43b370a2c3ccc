"""Plain values: what comes back is what went in, of the same type, bit for bit."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, Flag, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import holdfast
from holdfast.errors import FormatError, UnsupportedState, UsageError
from holdfast.format.native_types import DeviceName, DtypeName, EnumMember, register_enum
from holdfast.format.values import (
    _TAGS,
    MAX_DEPTH,
    LeafRef,
    SmallTensor,
    decode,
    encode,
    from_bytes,
    to_bytes,
    values_of,
)

numpy_dtypes = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes()
    | hnp.unsigned_integer_dtypes()
    | hnp.floating_dtypes(sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(sizes=(64, 128))
    | hnp.byte_string_dtypes(max_len=4)
    | hnp.unicode_string_dtypes(max_len=4)
)
arrays = numpy_dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
)
torch_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | torch_dtypes
    | st.builds(LeafRef, st.text())
    | st.binary().map(bytearray)
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")])
    | st.dictionaries(st.text(max_size=2), st.integers(), max_size=3).map(Counter)
    | st.sets(st.integers() | st.text(max_size=3), max_size=4)
    | st.frozensets(st.integers() | st.floats() | st.text(max_size=3), max_size=4)
)
keys: st.SearchStrategy[Any] = (
    st.text(max_size=5)
    | st.integers()
    | st.binary(max_size=3)
    | st.floats()
    | st.booleans()
    | st.tuples(st.integers(), st.text(max_size=2))
    | st.sampled_from(["$int", "$", "$x"])
)
values = st.recursive(
    atoms | arrays | arrays.filter(lambda array: array.size > 0).map(lambda array: array.flat[0]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=4).map(lambda found: defaultdict(list, found))
    ),
    max_leaves=12,
)


def through_storage(value: Any) -> Any:
    return decode(from_bytes(to_bytes(encode(value)), "here"))


def same(one: Any, other: Any) -> bool:
    """Equal in type and bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, (set, frozenset)):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    if isinstance(one, (np.ndarray, np.generic)):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return bool(alike and one.tobytes() == other.tobytes())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    return bool(one == other)


@given(value=values)
@example(value=[LeafRef("w"), torch.bfloat16, torch.device("cuda", 3), {1, "a"}, math.inf])
def test_every_value_comes_back_with_its_type_and_its_bits(value: Any) -> None:
    assert same(through_storage(value), value)


@pytest.mark.parametrize(
    "value",
    [{"$int": "5"}, {"$new": 1}, {"$": None}, {"$tuple": [], "a": 1}, {"a": {"$leaf": "model.w"}}],
)
def test_a_dict_that_looks_like_one_of_our_tags_is_not_taken_for_it(value: Any) -> None:
    assert through_storage(value) == value


@given(value=st.floats(width=64))
def test_a_float_comes_back_to_the_last_bit(value: float) -> None:
    assert same(through_storage(value), value)


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0xFFF8000000000000, 0x7FF0000000000001])
def test_a_nan_keeps_its_sign_and_its_payload(bits: int) -> None:
    (value,) = struct.unpack("<d", bits.to_bytes(8, "little"))
    assert math.isnan(value)
    assert same(through_storage(value), value)


@given(value=st.integers(-(2**70), 2**70) | st.sampled_from([2**53, -(2**53), 2**53 - 1]))
def test_an_integer_of_any_size_stays_one(value: int) -> None:
    found = through_storage(value)
    assert type(found) is int
    assert found == value


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**64, -(2**100)])
def test_an_integer_that_a_float_may_not_hold_is_stored_as_its_digits(value: int) -> None:
    assert encode(value) == {"$int": str(value)}
    assert encode({"steps": value}) == {"steps": {"$int": str(value)}}
    assert encode({"steps": 2**53 - 1, "more": True}) == {"steps": 2**53 - 1, "more": True}
    assert encode(2**53 - 1) == 2**53 - 1


def test_a_mapping_that_is_encoded_stays_as_it_was() -> None:
    value = {"none": {}, "bytes": b"x", "inner": {"large": 2**60}}
    found = encode(value)
    assert value == {"none": {}, "bytes": b"x", "inner": {"large": 2**60}}
    assert found["none"] is not value["none"]


@pytest.mark.parametrize(
    "value",
    [
        np.str_(""),
        np.str_("é"),
        np.bytes_(b""),
        np.float64("nan"),
        np.array([""]),
        np.bool_(True),
        np.zeros((0, 3)),
        np.array(5, ">i4"),
        np.int64(-1),
        np.asfortranarray(np.ones((2, 3))),
    ],
)
def test_numpy_values_that_are_special_come_back(value: Any) -> None:
    found = through_storage(value)
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert np.asarray(found).tobytes() == np.asarray(value).tobytes()


def test_an_array_that_was_read_can_be_changed() -> None:
    found = through_storage(np.arange(3))
    found[0] = 7
    assert found.tolist() == [7, 1, 2]


class Phase(Enum):
    WARMUP = "w"
    DECAY = "d"


class Ways(Flag):
    DATA = 1
    TENSOR = 2


class Color(IntEnum):
    RED = 1


register_enum(Phase, name="tests.Phase")
register_enum(Ways, name="my.Ways")


@pytest.mark.parametrize("value", [Phase.DECAY, Ways.DATA, Ways.DATA | Ways.TENSOR, Ways(0)])
def test_a_registered_enum_comes_back_as_the_very_member(value: Enum) -> None:
    assert through_storage({"a": [value]})["a"][0] is value


def test_an_enum_is_found_by_its_names_and_not_by_its_value() -> None:
    assert encode(Phase.DECAY) == {"$enum": {"type": "tests.Phase", "member": "DECAY"}}
    assert encode(Ways.TENSOR) == {"$enum": {"type": "my.Ways", "member": "TENSOR"}}


def test_an_enum_nobody_registered_is_shown_by_name_and_never_restored() -> None:
    stored = {"$enum": {"type": "Unknown", "member": "ONE"}}
    assert decode(stored) == EnumMember("Unknown", "ONE")
    with pytest.raises(UsageError, match=r"Unknown\.ONE.*register_enum"):
        decode(stored, strict=True)
    gone = {"$enum": {"type": "tests.Phase", "member": "GONE"}}
    assert decode(gone) == EnumMember("tests.Phase", "GONE")
    with pytest.raises(UsageError, match=r"tests\.Phase\.GONE"):
        decode(gone, strict=True)


def test_two_enums_of_one_name_are_told_apart_or_refused() -> None:
    other = Enum("Phase", ["WARMUP"], module="elsewhere")  # type: ignore[misc]
    with pytest.raises(UsageError, match="another name="):
        register_enum(other, name="tests.Phase")
    with pytest.raises(UsageError, match="is not an enum"):
        register_enum(int)  # type: ignore[arg-type]


def test_an_enum_that_is_not_registered_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedState, match=r"^state\.list\.1 is <Color.*register_enum\(Color"):
        encode({"list": [0, Color.RED]}, "state")


def test_the_scheduler_counter_that_torch_needs_stays_a_counter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    found = through_storage(scheduler.state_dict())
    assert found == scheduler.state_dict()
    assert sorted(found["milestones"].elements()) == [2, 2, 5]


def test_a_small_tensor_keeps_name_form_and_bytes_and_a_false_one_is_refused() -> None:
    small = SmallTensor("x.y", "BF16", (2, 1), b"abcd")
    stored = encode([torch.zeros(1)], tensor=lambda value, where: small)
    assert stored == [
        {"$tensor": {"name": "x.y", "dtype": "BF16", "shape": [2, 1], "data": "YWJjZA=="}}
    ]
    assert decode(stored) == [small]
    assert decode(stored, tensor=lambda one: one.shape) == [(2, 1)]
    for field, value in (("shape", [3, 1]), ("shape", [-2, -1]), ("dtype", "F9"), ("data", "!")):
        with pytest.raises(FormatError, match=r"\$tensor is malformed"):
            decode({"$tensor": stored[0]["$tensor"] | {field: value}})


def test_a_tensor_as_a_key_or_in_a_set_is_refused() -> None:
    for value in ({torch.zeros(1)}, {torch.zeros(1): 1}):
        with pytest.raises(UnsupportedState, match=r"an item of s|a key of s"):
            encode(value, "s", tensor=lambda *_: "leaf")


@pytest.mark.parametrize("value", [np.str_("a\0"), np.bytes_(b"a\0")])
def test_text_of_numpy_that_numpy_itself_cuts_short_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedState, match="null characters"):
        encode(value)


def test_a_set_is_stored_alike_in_whatever_order_it_is_walked() -> None:
    assert encode({3, 1, 2}) == encode({2, 3, 1}) == {"$set": [1, 2, 3]}


def test_tensors_inside_values_become_leaves_under_their_path() -> None:
    tensor = torch.zeros(2)
    asked: list[str] = []

    def leaf(value: Any, where: str) -> str | None:
        asked.append(where)
        return f"leaf {where}" if isinstance(value, torch.Tensor) else None

    value = OrderedDict(a=[1, (tensor,)], b=tensor)
    stored = encode(value, "s", tensor=leaf)
    assert asked == ["s.a.1.0", "s.b"]
    found = decode(stored, leaf=lambda name: name.upper())
    assert found == OrderedDict(a=[1, ("LEAF S.A.1.0",)], b="LEAF S.B")


Point = namedtuple("Point", "x y")


class Sneaky:
    def __reduce__(self) -> Any:
        raise AssertionError("it was pickled")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Sneaky(),
        Point(1, 2),
        UserDict(a=1),
        torch.Size([1]),
        torch.zeros(1),
        1j,
        lambda: None,
        Path("/"),
        range(3),
        np.array([object()]),
        np.ma.masked_array([1, 2], [True, False]),
        np.memmap("/dev/zero", mode="r", shape=3),
        np.zeros(2, [("a", "f4")]),
        np.datetime64("2026-01-01"),
        np.random.default_rng(0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_exactly_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(UnsupportedState, match=r"^state\.list\.1 is a") as caught:
        encode({"list": [0, value]}, "state")
    assert caught.value.fields["where"] == "state.list.1"


@pytest.mark.parametrize("bits", [8191, 8192, 8193, 40_000])
def test_an_integer_longer_than_python_reads_from_decimal_text_comes_back(bits: int) -> None:
    for value in (2**bits - 1, -(2**bits)):
        assert through_storage(value) == value


def test_a_defaultdict_of_a_factory_that_is_code_is_refused() -> None:
    with pytest.raises(UnsupportedState, match="made by"):
        encode(defaultdict(lambda: 3), "state")


def test_a_key_or_item_that_is_there_twice_is_malformed() -> None:
    for stored in ({"$dict": [[1, 2], [1, 3]]}, {"$set": [1, 1]}, {"$ordered": [["a", 1]] * 2}):
        with pytest.raises(FormatError, match="there twice"):
            decode(stored)


def test_text_with_half_a_character_is_refused() -> None:
    with pytest.raises(UnsupportedState, match="surrogate"):
        to_bytes(encode({"path": "\udc80"}))


def nested(kind: type, depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {(1,): value} if kind is dict else kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_what_is_nested_as_deep_as_is_allowed_can_be_read_again(kind: type) -> None:
    deepest = nested(kind, MAX_DEPTH - 1 if kind is dict else MAX_DEPTH)
    assert through_storage(deepest) == deepest
    with pytest.raises(UnsupportedState, match="deep"):
        encode(nested(kind, MAX_DEPTH + 1))


def test_a_list_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedState, match="contains itself"):
        encode(endless, "state")


def test_a_torch_dtype_reads_as_its_name_where_torch_is_not_loaded() -> None:
    program = (
        "import sys; from holdfast.format.values import decode;"
        "from holdfast.format.native_types import DtypeName;"
        "assert decode({'$dtype': 'bfloat16'}) == DtypeName('bfloat16'); assert 'torch' not in "
        "sys.modules and 'numpy' not in sys.modules"
    )
    source = str(Path(holdfast.__file__).parents[1])
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": source})
    assert DtypeName("x") != DtypeName("y")


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"$dtype": "float3"}, "no torch dtype is called 'float3'"),
        ({"$dtype": "nn"}, "no torch dtype is called 'nn'"),
        ({"$device": "quantum:0"}, "quantum"),
        ({"$device": "CPU"}, "'CPU' is no device"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_dtype_or_device_that_this_torch_does_not_know_is_refused_by_name(
    stored: Any, said: str
) -> None:
    with pytest.raises(FormatError, match=said):
        decode(stored)


def test_torch_s_own_values_are_read_by_name_where_torch_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert decode({"$dtype": "bfloat16"}) == DtypeName("bfloat16")
    assert decode({"$device": "cuda:3"}) == DeviceName("cuda:3")
    with pytest.raises(FormatError, match="is no device"):
        decode({"$device": "cuda:x"})


@given(value=values)
def test_the_stored_form_is_plain_json(value: Any) -> None:
    def check(form: Any) -> None:
        if isinstance(form, dict):
            assert all(type(key) is str for key in form)
            tags = [key for key in form if key.startswith("$")]
            assert not tags or len(form) == 1
        if isinstance(form, (list, dict)):
            for item in form.values() if isinstance(form, dict) else form:
                check(item)
        else:
            assert form is None or type(form) in (bool, int, float, str)
            # Readers of JSON that know only floating point numbers must read the same.
            assert type(form) is not int or abs(form) < 2**53

    check(encode(value))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(max_size=6)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.dictionaries(st.sampled_from([*_TAGS, "$new"]), inner, min_size=1, max_size=1)
    ),
    max_leaves=8,
)


@given(document=json_values)
def test_any_json_is_read_or_refused_and_never_anything_else(document: Any) -> None:
    with suppress(FormatError):
        decode(document)


simple = st.lists(st.integers()) | st.lists(st.floats()) | st.lists(st.integers() | st.floats())
words = st.lists(st.text(max_size=3) | st.booleans() | st.none())


@given(simple | words | st.lists(st.integers() | st.text(max_size=2) | st.floats()))
@example([1 << 53, -1.5])
@example([-(1 << 53)])
@example([(1 << 53) - 1, 1 - (1 << 53), 0.5])
@example([math.nan, 1 << 60])
@example([1, math.nan])
@example([1.5, math.inf])
@example([True, 1])
def test_a_list_is_stored_as_its_items_are_one_by_one(value: list[Any]) -> None:
    stored = encode(value)
    assert stored is not value
    assert to_bytes(stored) == to_bytes([encode(item) for item in value])
    assert to_bytes(encode(tuple(value))) == to_bytes({"$tuple": stored})


@pytest.mark.parametrize(
    "kind", ["$set", "$frozenset", "$dict", "$counter", "$ordered", "$default"]
)
@pytest.mark.parametrize("form", ["int", "tuple", "complex"])
def test_keys_that_hash_alike_are_refused_before_they_are_compared(kind: str, form: str) -> None:
    count = 50_000  # they would take half a minute
    forms: dict[str, Callable[[int], Any]] = {
        "int": lambda n: {"$int": str(n * (2**61 - 1))},
        "tuple": lambda n: {"$tuple": ["a", {"$int": hex(n * (2**61 - 1))}]},
        "complex": lambda n: encode(np.complex128(complex(1000003 * n, -n))),
    }
    if form != "int":
        count = 2_000
    items = [forms[form](n) for n in range(1, count)]
    body: Any = items if "set" in kind else [[item, 0] for item in items]
    with pytest.raises(FormatError, match=r"malformed.*have the same hash"):
        decode({kind: ["int", body] if kind == "$default" else body})


def test_what_could_not_be_read_is_not_stored() -> None:
    alike = [n * (2**61 - 1) for n in range(1, 70)]
    for value in (set(alike), frozenset(alike), dict.fromkeys(alike), Counter(alike)):
        with pytest.raises(UnsupportedState, match=r"of state\.seen have the same hash"):
            encode({"seen": value}, "state")
    assert decode(encode(set(alike[:64]))) == set(alike[:64])


def test_keys_that_honest_states_have_are_stored_however_many() -> None:
    for value in (
        set(range(-5000, 5000)),
        {2.0**n for n in range(-1074, 1024)},
        {(a, b) for a in range(60) for b in range(60)},
        {n / 7 for n in range(5000)},
        {frozenset({n, n + 1}) for n in range(3000)},
        {n: str(n) for n in range(5000)},
    ):
        assert decode(encode(value)) == value


def test_values_as_deep_as_can_be_stored_are_read_and_deeper_ones_are_refused() -> None:
    value: Any = np.zeros((1, 1))
    for _ in range(MAX_DEPTH - 1):
        value = defaultdict(int, {(1,): value})
    stored = {"shared": {"deep": encode(value)}, "own": {}}
    assert values_of(to_bytes(stored), "here") == {**stored, "aliases": {}}
    deeper: Any = 0
    for _ in range(5 * MAX_DEPTH):
        deeper = [deeper]
    with pytest.raises(FormatError, match="here: the stored values are nested too deep"):
        values_of(to_bytes({"shared": {"deep": deeper}}), "here")


@pytest.mark.parametrize(
    "document",
    [{"shared": []}, {"own": None}, {"aliases": {"a": ["w"]}}, {"aliases": ["w"]}, [], "x", None],
    ids=repr,
)
def test_values_that_are_not_those_of_a_rank_are_refused_by_name(document: Any) -> None:
    with pytest.raises(FormatError, match="here: its values are not those of a rank"):
        values_of(to_bytes(document), "here")
