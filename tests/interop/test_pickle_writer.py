"""What is written opcode by opcode is what pickle reads, and what our interpreter reads."""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UnsupportedState
from holdfast.format.native_types import DeviceName, DtypeName
from holdfast.interop.pickle_records import GlobalName
from holdfast.interop.pickle_writer import (
    PersistentId,
    PickledCall,
    PickledObject,
    replace_native,
    write_pickle,
)
from holdfast.interop.pickles import interpret

KEYS = st.one_of(st.text(max_size=8), st.integers(-(1 << 40), 1 << 40))
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 2100), 1 << 2100),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.complex_numbers(allow_nan=False),
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(max_size=5), inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=5).map(tuple),
        st.sets(KEYS, max_size=3),
        st.frozensets(KEYS, max_size=3),
    ),
    max_leaves=20,
)


@given(VALUES)
@settings(max_examples=300, deadline=None)
def test_pickle_reads_what_is_written(value: Any) -> None:
    read = pickle.loads(write_pickle(value))
    assert read == value and type(read) is type(value)


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_our_interpreter_reads_what_is_written(value: Any) -> None:
    assert interpret(write_pickle(value), "here").value == value


def test_long_lists_and_dictionaries_are_written_in_batches() -> None:
    value = {"list": list(range(2500)), "dict": {str(n): n for n in range(2500)}}
    assert pickle.loads(write_pickle(value)) == value


def test_one_object_stays_one() -> None:
    shared = [1, 2]
    read = pickle.loads(write_pickle({"a": shared, "b": shared, "c": [1, 2]}))
    assert read["a"] is read["b"] and read["c"] is not read["a"]


def test_counters_and_dictionaries_with_a_default_stay_what_they_are() -> None:
    some: defaultdict[str, list[int]] = defaultdict(list, a=[1])
    read = pickle.loads(write_pickle((Counter("aab"), some, defaultdict(None, b=2))))
    assert read == (Counter("aab"), some, {"b": 2}) and type(read[0]) is Counter
    assert read[1].default_factory is list and read[2].default_factory is None


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        np.arange(6, dtype="<i2").reshape(2, 3),
        np.array(["a", "bcd"]),
        np.array([b"xy", b"z"]),
        np.arange(3, dtype=">f4"),
        np.zeros((0, 2)),
        np.array(2.5),
    ],
)
def test_values_of_numpy_stay_what_they_are(value: Any) -> None:
    read = pickle.loads(write_pickle(value, replace_native))
    same = pickle.loads(pickle.dumps(value, 2))
    assert type(read) is type(same) and read.dtype == same.dtype and read.shape == same.shape
    assert read.tobytes() == same.tobytes()


def test_dtypes_and_devices_are_those_of_torch() -> None:
    import torch

    written = write_pickle([DtypeName("bfloat16"), DeviceName("cuda:1")], replace_native)
    assert pickle.loads(written) == [torch.bfloat16, torch.device("cuda:1")]
    written = write_pickle([torch.float8_e5m2, torch.device("cpu")], replace_native)
    assert pickle.loads(written) == [torch.float8_e5m2, torch.device("cpu")]


def test_objects_calls_and_what_stands_outside() -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    module = "torch.distributed.checkpoint.metadata"
    size = PickledCall(GlobalName("torch", "Size"), ((3, 4),))
    index = PickledObject(
        GlobalName(module, "MetadataIndex"), {"fqn": "w", "offset": size, "index": 0}
    )
    assert pickle.loads(write_pickle({index: 7})) == {MetadataIndex("w", (3, 4), 0): 7}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return ("taken", pid)

    written = write_pickle([PersistentId(("storage", "0")), PersistentId(("storage", "1"))])
    assert Unpickler(io.BytesIO(written)).load() == [
        ("taken", ("storage", "0")),
        ("taken", ("storage", "1")),
    ]


def test_a_value_without_a_form_is_refused_by_its_type() -> None:
    with pytest.raises(UnsupportedState, match="object has no form"):
        write_pickle([object()], replace_native)
