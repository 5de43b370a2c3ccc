"""Every code of the dtypes that numpy lacks stands for what torch says it does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.cli.leaf_reader import bits, element, has_numbers, numbers, short_text
from holdfast.geometry.box import ITEMSIZE

SMALL = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


@pytest.mark.parametrize("name", SMALL)
def test_every_code_is_the_number_that_torch_says(name: str) -> None:
    codes = np.arange(256 ** ITEMSIZE[name]).astype(f"i{ITEMSIZE[name]}")
    expected = torch.from_numpy(codes.copy()).view(SMALL[name]).float().numpy()
    found = numbers(codes, name).astype("f4")
    np.testing.assert_array_equal(found, expected)
    numbered = ~np.isnan(expected)
    assert (np.signbit(found) == np.signbit(expected))[numbered].all()


def test_half_complex_numbers_are_two_halves() -> None:
    raw = np.array([[1.5, -2.0], [0.0, np.inf]], dtype="f2").view("i4")
    assert numbers(raw, "C32").tolist() == [[1.5 - 2j], [complex(0, np.inf)]]
    assert element(raw[0], "C32") == [1.5, -2.0]


def test_packed_elements_are_bits_and_no_numbers() -> None:
    opaque = [name for name in ITEMSIZE if not has_numbers(name)]
    assert "FLOAT4_E2M1FN_X2" in opaque
    assert element(np.array([0xA5], "u1"), "FLOAT4_E2M1FN_X2") == "0xa5"
    assert element(np.array([0x1234], "i2"), "BITS16") == "0x1234"


def test_a_byte_that_is_no_boolean_is_shown_as_it_is() -> None:
    found = [element(np.array([code], "u1"), "BOOL") for code in (0, 1, 2)]
    assert [repr(value) for value in found] == ["False", "True", "2"]


def test_bits_tell_apart_what_numbers_do_not() -> None:
    one = np.array([complex(0.0, -0.0), complex(np.nan, 0)])
    assert (bits(one) == bits(one)).all()
    assert (bits(one) != bits(np.array([0j, complex(np.nan, 0)]))).tolist() == [
        [False, True],
        [False, False],
    ]


def test_numbers_are_shown_in_as_few_digits_as_tell_them_apart() -> None:
    assert short_text(float(np.float32(0.1)), "F32") == "0.1"
    assert short_text(0.1 + 2**-56, "F64") == "0.10000000000000002"
    assert short_text("0xa5", "BITS8") == "0xa5"
