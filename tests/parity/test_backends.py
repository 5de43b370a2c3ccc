"""Every backend gives the same bytes, and one that does not is not used and is said why."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.parity.coding import backends
from holdfast.parity.coding import backends as isal
from holdfast.parity.coding import codes as numpy_coding
from holdfast.parity.coding.backends import choose, chosen, fault_of, plain_sum
from holdfast.parity.coding.codes import Backend, Bytes, Coder, NumpyBackend


@given(st.data())
def test_any_sum_is_the_same_by_tables(data: st.DataObject) -> None:
    draw = data.draw
    sources_count, outputs_count = draw(st.integers(1, 14)), draw(st.integers(1, 5))
    size, seed = draw(st.integers(1, 700)), draw(st.integers(0, 1 << 30))
    random = np.random.default_rng(seed)
    rows = [random.bytes(sources_count) for _ in range(outputs_count)]
    if draw(st.booleans()):
        rows[0] = bytes(sources_count)
    sources = [noise(random, size, draw(st.integers(0, 64))) for _ in range(sources_count)]
    before = [noise(random, size, draw(st.integers(0, 64))) for _ in range(outputs_count)]
    for add in (False, True):
        expected = [
            plain_sum(row, sources) ^ (old if add else 0)
            for row, old in zip(rows, before, strict=True)
        ]
        for backend in (NumpyBackend(), chosen().backend):
            outputs = [old.copy() for old in before]
            backend.combine(rows, sources, outputs, add=add)
            assert all(map(np.array_equal, outputs, expected)), (backend.name, add)


@pytest.mark.parametrize("beyond", [-1, 0, 1, 77])
@pytest.mark.parametrize("add", [False, True])
def test_sums_go_through_long_buffers(beyond: int, add: bool, backend: Backend) -> None:
    random = np.random.default_rng(beyond + 1)
    sources = [noise(random, 2 * numpy_coding.TILE_BYTES + beyond, n) for n in range(3)]
    rows = [b"\1\1\1", b"\1\2\4", b"\x9d\0\x47"]
    outputs = [noise(random, len(sources[0]), n) for n in range(3)]
    expected = [
        plain_sum(row, sources) ^ (old if add else 0)
        for row, old in zip(rows, outputs, strict=True)
    ]
    backend.combine(rows, sources, outputs, add=add)
    assert all(map(np.array_equal, outputs, expected))


def noise(random: np.random.Generator, size: int, offset: int) -> Bytes:
    """Random bytes that begin at some address."""
    return random.integers(0, 256, size + offset, np.uint8)[offset:]


def test_isa_l_is_in_use_where_this_project_is_developed() -> None:
    if importlib.util.find_spec("pyeclib") is None:
        pytest.skip("without pyeclib there need not be an ISA-L")
    assert chosen().backend.name == "ISA-L of pyeclib"
    assert chosen().text == "ISA-L of pyeclib"
    assert chosen() is chosen()


def test_every_backend_passes_its_trial(backend: Backend) -> None:
    assert fault_of(backend) == ""


def test_isa_l_lets_go_of_pythons_lock() -> None:
    for name, load in isal.candidates():
        try:
            library = isal.IsalBackend(name, load)._library
        except OSError:
            continue
        assert isinstance(library, ctypes.CDLL) and not isinstance(library, ctypes.PyDLL)


def test_what_is_longer_than_a_c_int_goes_in_parts(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    monkeypatch.setattr(isal, "MAX_BYTES", 100)
    monkeypatch.setattr(numpy_coding, "TILE_BYTES", 100)
    data = [bytes(range(n, n + 250)) for n in range(5)]
    found = [bytearray(250) for _ in range(3)]
    again = [bytearray(250) for _ in range(3)]
    coder = Coder(5, 3, backend)
    coder.encode(data, found)
    for n, part in enumerate(data):
        coder.add(n, part, again)
    monkeypatch.undo()
    whole = [bytearray(250) for _ in range(3)]
    coder.encode(data, whole)
    assert found == again == whole


class Wrong(NumpyBackend):
    """Computes as numpy does, and then does harm."""

    def __init__(self, harm: Callable[[Sequence[Bytes], bool], None]) -> None:
        self._harm = harm

    def combine(
        self,
        rows: Sequence[bytes],
        sources: Sequence[Bytes],
        outputs: Sequence[Bytes],
        *,
        add: bool,
    ) -> None:
        super().combine(rows, sources, outputs, add=add)
        self._harm(outputs, add)


def flip_last(outputs: Sequence[Bytes], add: bool) -> None:
    if len(outputs) > 1 and len(outputs[0]) > 200:
        outputs[1][-1] ^= 1


def flip_added(outputs: Sequence[Bytes], add: bool) -> None:
    outputs[0][0] ^= int(add)


def beside(outputs: Sequence[Bytes], add: bool) -> None:
    whole = outputs[0].base
    assert isinstance(whole, np.ndarray)
    whole[-60] = 0


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (flip_last, "it computes wrongly, 257 bytes of 5+2"),
        (flip_added, "it adds wrongly"),
        (beside, "it writes beside the output"),
    ],
)
def test_a_library_that_computes_wrongly_is_not_used(
    harm: Callable[[Sequence[Bytes], bool], None], said: str
) -> None:
    found = choose(iter([("ISA-L of yore", lambda: Wrong(harm))]))
    assert found.backend.name == "numpy"
    assert f"numpy; ISA-L of yore is not used: {said}" in found.text
    assert "pip install 'holdfast[parity]'" in found.text


def test_the_next_is_tried_and_the_reasons_are_kept() -> None:
    def missing() -> Backend:
        raise OSError("libisal.so.2: cannot open shared object file")

    def older() -> Backend:
        raise AttributeError("undefined symbol: ec_encode_data_update")

    def attempts() -> Iterator[tuple[str, Callable[[], Backend]]]:
        yield "one", missing
        yield "two", older
        yield "three", NumpyBackend
        raise AssertionError("nothing is tried after the first that works")

    found = choose(attempts())
    assert found.refused == (
        "one is not used: libisal.so.2: cannot open shared object file",
        "two is not used: undefined symbol: ec_encode_data_update",
    )


def test_a_library_without_the_functions_is_refused() -> None:
    with pytest.raises(AttributeError, match="ec_init_tables"):
        isal.IsalBackend("libc", "libc.so.6")
    with pytest.raises(OSError, match="no-such-library"):
        isal.IsalBackend("none", "no-such-library.so")


def test_without_pyeclib_and_isa_l_everything_works_through_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def distribution(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(isal, "SYSTEM_NAMES", ("no-such-library.so",))
    found = choose(backends._attempts())
    assert found.backend.name == "numpy"
    assert found.refused[0].startswith("ISA-L of the system is not used: no-such-library.so")


def test_a_pyeclib_that_lists_no_files_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listless:
        files = None

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Listless())
    assert [name for name, _ in isal.candidates()] == ["ISA-L of the system"]
